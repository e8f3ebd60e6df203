"""A sampler node whose engine is two ranks of vLLM, which share one model, on CPUs; as on two GPUs."""

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


@pytest.mark.long
def test_a_node_of_two_ranks_draws_rollouts_that_are_accepted(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        swarm.lead_with(groups_per_step=2, max_staleness=1)
        learner = swarm.lead("--port", "0", "--steps", "4", "--seed", "1")
        given = ("--engine", "vllm", "--tensor-parallel-size", "2", "--batch-samples", "8", "--device", "cpu")
        node = swarm.join(learner.url(), *given, name="two-ranks")
        eventually(lambda: spawned(node) == 3, node, "two ranks run")
        assert learner.process.wait(400) in (0, 1), learner.output()
        assert node.process.wait(60) == 0, node.output()
        said = node.output()
        assert "engine: vllm on cpu in float32, 8 samples at once" in said
        assert "Traceback" not in said
        accepted = re.search(r"(\d+) of its rollouts were accepted", said)
        assert accepted is not None
        assert int(accepted[1]) >= 4 * 2 * 4
