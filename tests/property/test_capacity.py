"""What holds of every prediction, and that no step of equal lengths is shorter than the closed form."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.capacity.fleet import Demand, Lengths, Worker
from swarm.capacity.model import Prediction, predict
from tests.closed_forms import min_step_s, mu_necessary, mu_sufficient

TRAIN_STEP_S = 60.0

seconds = st.floats(0.5, 200.0)


@st.composite
def demands(draw: st.DrawFn, lengths: st.SearchStrategy[Lengths]) -> Demand:
    max_staleness = draw(st.integers(0, 5))
    return Demand(
        train_step_s=TRAIN_STEP_S,
        groups_per_step=draw(st.integers(1, 24)),
        group_size=draw(st.integers(1, 6)),
        publish_every_steps=draw(st.integers(1, max_staleness + 1)),
        max_staleness=max_staleness,
        lengths=draw(lengths),
    )


@st.composite
def workers(draw: st.DrawFn) -> Worker:
    places = draw(st.integers(1, 24))
    return Worker(
        name="w",
        rollouts_per_s=places / draw(seconds),
        samples_at_once=places,
        lockstep=draw(st.booleans()),
    )


uneven = st.lists(st.floats(1.0, 1000.0), min_size=1, max_size=8).map(Lengths.of)
fleets = st.lists(st.tuples(workers(), seconds), min_size=1, max_size=6)


def predicted(demand: Demand, fleet: list[tuple[Worker, float]]) -> Prediction:
    return predict(demand, [worker for worker, _ in fleet], [delay_s for _, delay_s in fleet])


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(demands(uneven), fleets)
def test_a_prediction_is_possible_and_the_same_again(demand: Demand, fleet: list[tuple[Worker, float]]) -> None:
    told = predicted(demand, fleet)
    assert 0 <= told.idle_share < 1
    assert 0 <= told.discarded_share < 1
    assert 0 <= told.mean_staleness <= demand.max_staleness
    assert 0 <= told.samplers_idle_share <= 1
    assert told.step_s >= TRAIN_STEP_S * (1 - 1e-9)
    assert told == predicted(demand, fleet[::-1])


@settings(max_examples=25, deadline=None)
@given(demands(st.just(Lengths(tokens=(100.0,)))), st.integers(1, 200), seconds, seconds, st.booleans())
def test_no_step_of_equal_lengths_is_shorter_than_the_closed_form(
    demand: Demand, places: int, place_s: float, broadcast_s: float, plenty: bool
) -> None:
    rollouts = demand.rollouts_per_step
    if plenty:
        places = (demand.max_staleness + 2) * rollouts
    worker = Worker(name="w", rollouts_per_s=places / place_s, samples_at_once=places)
    told = predict(demand, [worker], [broadcast_s])
    least = min_step_s(
        rollouts_per_step=rollouts,
        publish_every_steps=demand.publish_every_steps,
        max_staleness=demand.max_staleness,
        train_step_s=TRAIN_STEP_S,
        broadcast_s=broadcast_s,
        batch_s=math.ceil(rollouts / places) * place_s,
        rollouts_per_s=worker.rollouts_per_s,
    )
    if plenty:
        assert math.isclose(told.step_s, least, rel_tol=1e-6)
    else:
        # What was begun in the first steps may still be used up: less than a batch of each version in twelve steps.
        assert told.step_s >= 0.9 * least


@given(demands(uneven), st.floats(0.0, 300.0), st.floats(0.0, 300.0))
def test_what_suffices_is_never_less_than_what_is_necessary(
    demand: Demand, broadcast_s: float, generation_s: float
) -> None:
    least = mu_necessary(
        rollouts_per_step=demand.rollouts_per_step,
        publish_every_steps=demand.publish_every_steps,
        max_staleness=demand.max_staleness,
        train_step_s=TRAIN_STEP_S,
        broadcast_s=broadcast_s,
    )
    enough = mu_sufficient(
        rollouts_per_step=demand.rollouts_per_step,
        publish_every_steps=demand.publish_every_steps,
        max_staleness=demand.max_staleness,
        train_step_s=TRAIN_STEP_S,
        broadcast_s=broadcast_s,
        generation_s=generation_s,
    )
    assert demand.rollouts_per_step / TRAIN_STEP_S <= least <= enough
