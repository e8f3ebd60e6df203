"""How long a scrape of `/metrics` holds a learner's event loop, by the number of samplers.

    bin/python -m benchmarks.exposition

The learner is a real one that has not begun its run; its samplers are entries of its tally. So the time of `status()`
is that of the node's own code, and what only a run in progress adds (versions, costs of each node) is missing.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from swarm.lead.learner import LearnerNode
from swarm.node.exposition import metrics_route
from swarm.node.network import NodeNetwork
from swarm.rollout.journal.entries import RecordedRun
from swarm.rollout.journal.journal import Journal
from swarm.rollout.messages import Offer
from swarm.rollout.tally import Recent, SamplerStats
from swarm.run.log import RunLog
from swarm.run.run import Run
from swarm.settings import LeadConfig
from swarm.types import NodeId, VersionId

SAMPLERS = 10, 100, 1_000
ROUNDS = 50


def learner_of(directory: Path, samplers: int) -> LearnerNode:
    node = LearnerNode(config := LeadConfig(run_dir=directory), lambda line: None)
    settings = LeadConfig(host="127.0.0.1", port=7700)
    node._network = NodeNetwork(directory, "learner", settings, say=print, emit=lambda kind, **fields: None)
    log, journal = RunLog(directory), Journal(directory, group_size=2)
    node._life = Run(config=config, directory=directory, log=log, journal=journal, timeline=node.timeline, say=print)
    node._recorded = RecordedRun(next_batch=0, opened=0, groups=(), published=None, bound=None)
    node._build(node._network)
    for number in range(samplers):
        offer = Offer(device_class=f"class-{number % 7}", nickname=f"rig {number}", cost_per_hour=0.3)
        stats = SamplerStats(recent=Recent(now=0.0), verdicts=Counter(accepted=number, stale=1), offer=offer)
        stats.installed = VersionId(incarnation=0, version=number % 4)
        name = NodeId(f"{number:032x}")
        node._rollouts.samplers[name] = stats
        node._rollouts.tally.runs(name, "vllm/bfloat16/sm_89")
    return node


async def held_ms(node: LearnerNode) -> dict[str, Any]:
    """Milliseconds of one status, and of one scrape, which makes one."""
    scrape = metrics_route(lambda: {**node.status(), "refused": {}}).handler
    found: dict[str, list[float]] = {"status_ms": [], "scrape_ms": []}
    for _ in range(ROUNDS):
        began = time.perf_counter()
        node.status()
        found["status_ms"].append(1e3 * (time.perf_counter() - began))
        began = time.perf_counter()
        await scrape(None)  # type: ignore[arg-type]
        found["scrape_ms"].append(1e3 * (time.perf_counter() - began))
    return {name: {"median": statistics.median(all_), "most": max(all_)} for name, all_ in found.items()}


def main() -> None:
    for samplers in SAMPLERS:
        with tempfile.TemporaryDirectory() as directory:
            node = learner_of(Path(directory), samplers)
            print(json.dumps({"samplers": samplers, **asyncio.run(held_ms(node))}), flush=True)


if __name__ == "__main__":
    main()
