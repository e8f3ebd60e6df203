"""What measuring takes from training: the same run with a large round of held-out prompts and with hardly any."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulator.rollouts.cluster import Cluster
from tests.simulator.rollouts.scenario import DEFAULT

ALONE = replace(
    DEFAULT,
    samplers=1,
    groups_per_step=8,
    group_size=8,
    capacity=16,
    steps=30,
    train_step_s=0.5,
    generation_s=3.0,
    eval_prompts=1,
    eval_every_steps=1000,
)


def training_s(prompts: int, *, max_staleness: int) -> float:
    """Virtual seconds from the first batch to the last step."""
    scenario = replace(ALONE, max_staleness=max_staleness, eval_prompts=prompts)
    figures = Cluster(scenario, 0).run()
    return figures.busy_s + figures.idle_s


@pytest.mark.parametrize("max_staleness", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_round_takes_no_more_from_training_than_its_samples(max_staleness: int) -> None:
    """800 prompts are 50 batches of the one sampler, and it had nothing else to do: the run is that much longer. At
    S = 0 the last batch before a step is not a whole one."""
    without, beside = (training_s(prompts, max_staleness=max_staleness) for prompts in (1, 800))
    assert without < beside < without + 1.2 * 800 / ALONE.capacity * ALONE.generation_s
