"""The simulator of capacity with a fleet that stays: what theory says of plain cases must come out."""

from __future__ import annotations

import math

import pytest

from swarm.pay.fleet import Demand, Lengths, Worker, mean_longest
from swarm.plan.simulate.fixed import run_fixed
from swarm.plan.simulate.learner import CapacityFigures

LENGTHS = Lengths.lognormal(median=6000, sigma=0.75, cap=20_480)


def demand(max_staleness: int = 4, publish_every_steps: int = 1) -> Demand:
    return Demand(
        train_step_s=700.0,
        groups_per_step=16,
        group_size=8,
        publish_every_steps=publish_every_steps,
        max_staleness=max_staleness,
        lengths=LENGTHS,
    )


def run(
    rate: float,
    *,
    workers: int = 8,
    places: int = 4,
    lockstep: bool = False,
    install_s: float = 60.0,
    seed: int = 1,
) -> CapacityFigures:
    """A fleet of `rate` times what the learner consumes."""
    wanted = demand()
    each = rate * wanted.rollouts_per_step / wanted.train_step_s / workers
    fleet = [
        Worker(name=f"w{i}", rollouts_per_s=each, samples_at_once=places, lockstep=lockstep) for i in range(workers)
    ]
    return run_fixed(wanted, fleet, [install_s] * workers, steps=60, warmup_steps=20, seed=seed)


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize(
    ("rate", "idle", "samplers_idle"), [(2.0, (0.0, 0.01), (0.5, 0.05)), (0.5, (0.5, 0.02), (0, 0.02))]
)
def test_who_is_too_fast_waits_for_the_other(
    rate: float, idle: tuple[float, float], samplers_idle: tuple[float, float], lockstep: bool
) -> None:
    figures = run(rate, lockstep=lockstep)
    assert figures.idle_share == pytest.approx(idle[0], abs=idle[1])
    assert figures.samplers_idle_share == pytest.approx(samplers_idle[0], abs=samplers_idle[1])
    assert figures.step_s == pytest.approx(700.0 / min(1.0, rate), rel=0.05)
    assert figures.rollouts_per_s == pytest.approx(min(1.0, rate) * demand().rollouts_per_step / 700.0, rel=0.05)


def test_versions_that_are_rarer_than_the_first_aim_do_not_stop_the_learner() -> None:
    """Four batches are of one version: the last of them are opened once the learner waits."""
    wanted = demand(publish_every_steps=4)
    fleet = [Worker(name=f"w{i}", rollouts_per_s=0.05, samples_at_once=8) for i in range(8)]
    found = run_fixed(wanted, fleet, [60.0] * 8, steps=20, warmup_steps=20, seed=1)
    assert found.steps == 20
    assert found.idle_share < 0.2


@pytest.mark.long
def test_versions_that_come_late_make_rollouts_older() -> None:
    assert run(0.8, install_s=1400.0).mean_staleness > run(0.8, install_s=0.0).mean_staleness + 0.5


def test_an_engine_that_waits_for_its_longest_answer_takes_as_long_as_it_says() -> None:
    assert mean_longest(LENGTHS.tokens, 1) == pytest.approx(LENGTHS.mean)
    assert mean_longest((10.0, 20.0), 2) == pytest.approx(17.5)


@pytest.mark.long
def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    assert run(0.9) == run(0.9)
    assert run(0.9).trace_digest != run(0.9, seed=2).trace_digest


def test_a_learner_without_samplers_is_idle() -> None:
    figures = run_fixed(demand(), [], [], steps=5, warmup_steps=0, seed=0)
    assert (figures.idle_share, figures.step_s, figures.rollouts) == (1.0, math.inf, 0)


def test_no_batch_is_older_than_the_bound_even_where_samplers_lag_behind() -> None:
    """I1: every batch is checked as it is taken; what is too old is thrown away, not trained on."""
    wanted = demand(max_staleness=1)
    fleet = [Worker(name=f"w{i}", rollouts_per_s=0.05, samples_at_once=8) for i in range(8)]
    figures = run_fixed(wanted, fleet, [900.0] * 8, steps=30, warmup_steps=20, seed=3)
    assert figures.mean_staleness <= 1
    assert figures.discarded_share > 0
