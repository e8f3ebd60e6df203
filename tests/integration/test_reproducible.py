"""On-policy, with one sampler on a CPU, a run gives the same weights twice: nothing in it depends on timing."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from swarm.learner.checkpoint.files import TENSORS, checkpoint_path, read_state
from tests.integration.processes import Learner, swarm_in

pytestmark = pytest.mark.long

STEPS = 5


def test_at_s_0_one_sampler_gives_the_same_weights_twice(tmp_path: Path) -> None:
    """Both run side by side, so neither meets the other's timing. Prompts differ in length, and engines draw ten
    samples at a time: if held-out prompts came into batches by chance, what is drawn would be padded by chance."""
    with swarm_in(tmp_path) as swarm:
        swarm.lead_with(task="python:tests.integration.ragged:Ragged", eval_every_steps=1)
        flags = ("--port", "0", "--max-staleness", "0", "--steps", str(STEPS))
        runs = [swarm.lead(*flags, name=name) for name in ("first", "second")]
        samplers = [swarm.join(run.url(), "--batch-samples", "10", name=f"sampler-of-{run.name}") for run in runs]
        for node in (*runs, *samplers):
            assert node.wait() == 0, node.output()
        steps = runs[0].metrics()
        assert all(step["grad_norm"] > 0 for step in steps)
        assert [event["kind"] for event in runs[0].events()].count("evaluated") >= 3
        # The digest of every rollout and reward of every batch, in order.
        assert _lineage(runs[0]) == _lineage(runs[1])
        first, second = _tensors(runs[0]), _tensors(runs[1])
        assert len(first) > 50
        assert {name for name in first if first[name] != second[name]} == set()


def _lineage(run: Learner) -> str:
    return read_state(_last(run)).lineage


def _last(run: Learner) -> Path:
    return checkpoint_path(run.run_dir / "checkpoints", STEPS)


def _tensors(run: Learner) -> dict[str, bytes]:
    """All that the trainer is made of, bit for bit: weights, moments of the optimiser, generators."""
    with safe_open(_last(run) / TENSORS, framework="np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118
