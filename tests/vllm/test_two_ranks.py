"""A sampler node whose engine is two ranks of vLLM, which share one model, on CPUs; as on two GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.integration.processes import Node, eventually, swarm_in


def ranks(node: Node) -> int:
    """Workers of vLLM: the engine of a small model spawns other processes for several ranks alone."""
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
        eventually(lambda: ranks(node) == 2, node, "two ranks run")
        assert learner.process.wait(400) in (0, 1), learner.output()
        assert node.process.wait(60) == 0, node.output()
        said = node.output()
        assert "engine: vllm on cpu in float32, 8 samples at once" in said
        assert "Traceback" not in said
        # Nobody else drew what these steps were trained on.
        summary = json.loads((learner.run_dir / "summary.json").read_text())
        assert summary["steps"] == 4
        assert summary["rollouts_accepted"] >= 4 * 2 * 4
