"""How much CPU time the page's digest of a large swarm takes: `bin/python -m benchmarks.digest`.

The status is one that a learner gave (tests/unit/report/status.json) with as many samplers and links as asked for. All
of them are also known by gossip, and each has a part of a version under way.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from swarm.dashboard.digest import digest

RECORDED = Path(__file__).parents[1] / "tests" / "unit" / "report" / "status.json"
ROUNDS = 50
SAMPLERS, LINKS = 1000, 2000


def swarm_of(samplers: int, links: int) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(RECORDED.read_text())
    ids = [f"{number:032x}" for number in range(max(samplers, links))]
    (measured, *_), (public, *_) = status["capacity"]["inputs"]["by_node"].values(), status["publics"]
    sampler = status["samplers"][0]
    status["samplers"] = [{**sampler, "node": node, "nickname": node[-6:]} for node in ids[:samplers]]
    status["publics"] = [{**public, "node": node} for node in ids[:samplers]]
    status["capacity"] |= {"idle_share": 0.3, "binds": "rate", "rollouts_per_s_needed": 1e9}
    status["capacity"]["inputs"]["by_node"] = dict.fromkeys(ids[:samplers], measured)
    status["cost"]["by_node"] = dict.fromkeys(ids[:samplers], 1.0)
    status["links"] = [[status["node"], node, 1000, "0.3"] for node in ids[:links]]
    status["broadcasts"][max(status["broadcasts"])]["progress"] = dict.fromkeys(ids[:samplers], 0.5)
    return status


def main() -> None:
    status = swarm_of(SAMPLERS, LINKS)
    figures: Any = SimpleNamespace(config={"beat_s": 1.0}, began=0.0)
    took_ms = []
    for _ in range(ROUNDS):
        began = time.process_time()
        shown = digest(status, figures, now=0.0)
        took_ms.append(1e3 * (time.process_time() - began))
    size = len(json.dumps(shown, allow_nan=False))
    print(f"{SAMPLERS} samplers, {LINKS} links: median {median(took_ms):.1f} ms, most {max(took_ms):.1f} ms")
    print(f"{size:,} bytes of JSON")


if __name__ == "__main__":
    main()
