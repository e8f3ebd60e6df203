"""What a sampler tells of what its engine did."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from swarm.rollout.messages import MAX_DID
from swarm.sampler.worker import TOLD_S, Doings


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_one_thing_follows_another_and_what_goes_on_is_told_up_to_now_and_again() -> None:
    clock = Clock()
    doings = Doings(clock)
    for after, what in ((2.0, "wait"), (1.0, "draw"), (1.0, "draw")):
        clock.now += after
        doings.now(what)  # type: ignore[arg-type]
    clock.now += 1.0
    assert doings.take() == (("fetch", 5.0, 2.0), ("wait", 3.0, 1.0), ("draw", 2.0, 2.0))
    clock.now += 4.0
    assert doings.take() == (("draw", 4.0, 4.0),)
    assert doings.take() == ()
    clock.now += 1e8
    assert doings.take() == (("draw", TOLD_S, TOLD_S),), "what was long ago is no news"


def test_an_install_beneath_running_samples_is_its_pause_alone() -> None:
    clock = Clock()
    doings = Doings(clock)
    doings.now("draw")
    clock.now += 3.0
    doings.now("install", since_s=0.5)
    doings.now("draw")
    clock.now += 1.0
    assert doings.take() == (("draw", 4.0, 2.5), ("install", 1.5, 0.5), ("draw", 1.0, 1.0))


def test_an_install_that_began_before_the_last_beat_is_told_since_then() -> None:
    clock = Clock()
    doings = Doings(clock)
    doings.now("draw")
    doings.take()
    clock.now += 1.0
    doings.now("install", since_s=7.0)
    doings.now("wait")
    clock.now += 1.0
    assert doings.take() == (("install", 2.0, 1.0), ("wait", 1.0, 1.0))


@given(st.lists(st.tuples(st.floats(0.001, 1), st.sampled_from(("draw", "wait", "install"))), max_size=200))
def test_of_many_the_newest_are_told_without_a_gap(changes: list[tuple[float, str]]) -> None:
    clock = Clock()
    doings = Doings(clock)
    for after, what in changes:
        clock.now += after
        doings.now(what)  # type: ignore[arg-type]
    clock.now += 1.0
    told = doings.take()
    assert 1 <= len(told) <= MAX_DID
    assert abs(sum(lasted for _, _, lasted in told) - told[0][1]) < 1e-6
    assert len(told) == MAX_DID or abs(told[0][1] - (clock.now - 100.0)) < 1e-6
    assert all(one[0] != other[0] for one, other in pairwise(told))
    assert told[-1][0] == (changes[-1][1] if changes else "fetch")
