"""What holds of every prediction."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.pay.fleet import Demand, Lengths, Worker
from swarm.pay.model import Prediction, predict

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


@settings(max_examples=25, deadline=None)
@given(demands(uneven), fleets)
def test_a_prediction_is_possible_and_the_same_again(demand: Demand, fleet: list[tuple[Worker, float]]) -> None:
    told = predicted(demand, fleet)
    assert 0 <= told.idle_share < 1
    assert told.step_s >= TRAIN_STEP_S * (1 - 1e-9)
    assert told == predicted(demand, fleet)
