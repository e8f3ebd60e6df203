"""A sampler node that draws with vLLM for a learner, and one whose engine is two ranks, which share one model on CPUs
as they do on two GPUs."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from tests.integration.processes import Node, eventually, swarm_in


def spawned(node: Node) -> int:
    """vLLM's own processes: its core, and a worker for each rank if there are several."""
    found = 0
    for child in node.children():
        try:
            found += "spawn_main" in " ".join(child.cmdline())
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(("ranks", "processes"), [(1, 1), pytest.param(2, 3, marks=pytest.mark.long)])
def test_rollouts_that_vllm_draws_are_accepted(tmp_path: Path, ranks: int, processes: int) -> None:
    with swarm_in(tmp_path) as swarm:
        swarm.lead_with(groups_per_step=2, max_staleness=1, audit_share=1.0)
        learner = swarm.lead("--port", "0", "--steps", "4", "--seed", "1")
        given = ("--engine", "vllm", "--tensor-parallel-size", str(ranks), "--batch-samples", "8", "--device", "cpu")
        node = swarm.join(learner.url(), *given, name="node")
        eventually(lambda: spawned(node) == processes, node, "vLLM's processes run")
        assert learner.process.wait(400) in (0, 1), learner.output()
        assert node.process.wait(60) == 0, node.output()
        said = node.output()
        assert "engine: vllm on cpu in float32, 8 samples at once" in said
        assert "Traceback" not in said
        accepted = re.search(r"(\d+) of its rollouts were accepted", said)
        assert accepted is not None
        assert int(accepted[1]) >= 4 * 2 * 4
    steps = learner.metrics()
    assert max(step.get("mismatch_kl", 0.0) for step in steps) < 1e-3
    assert steps[-1]["audit/rollouts"] > 0
    assert "caught" not in {event["kind"] for event in learner.events()}
