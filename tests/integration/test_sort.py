"""The sort task on its warm base by real processes: the reward chooses among the skills that the base has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import Learner, Swarm, swarm_in

pytestmark = pytest.mark.long

BASE = ("--model", "tiny-warm", "--task", "sort", "--port", "0")


def settings(swarm: Swarm) -> None:
    swarm.lead_with(learning_rate=3e-4, groups_per_step=32, group_size=8, eval_prompts=100)


def finish(swarm: Swarm, learner: Learner, life: str) -> list[dict[str, Any]]:
    """The held-out rounds of the learner's whole run, drawn by two samplers that join now."""
    for number in range(2):
        swarm.join(learner.url(), name=f"sampler-{life}-{number}")
    assert learner.wait() in (0, 1), learner.output()
    return list(learner.summary()["held_out"])


def test_the_rewarded_skill_is_elicited_and_a_resumed_run_reads_the_base_that_was_made(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        settings(swarm)
        first = swarm.lead(*BASE, "--steps", "2", "--checkpoint-every-steps", "2")
        held_out = finish(swarm, first, "first")
        assert 0.1 < held_out[0]["exact_match"] < 0.5
        kept = first.run_dir / "model" / "base.safetensors"
        made_at = kept.stat().st_mtime_ns
        second = swarm.resume(first, "--steps", "60", "--target", "0.95", name="second")
        assert finish(swarm, second, "second")[-1]["exact_match"] >= 0.9
        assert kept.stat().st_mtime_ns == made_at
        assert json.loads((first.run_dir / "config.json").read_text())["learning_rate"] == 3e-4
