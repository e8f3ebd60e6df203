"""A sampler that was caught: it gets nothing, nothing is taken from it, and others draw again what it gave."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.rollout.journal.entries import GroupDropped, RolloutReturned
from swarm.rollout.plane.effects import Refused
from swarm.rollout.plane.plane import RolloutPlane
from swarm.types import Lease
from tests.builders import ALICE, BOB, ask, new_plane, prompt, submit_and_score, v

WHY = "its draws are not what was asked for"


def ready(plane: RolloutPlane) -> bool:
    return plane.can_take(now=0.0)


def test_it_gets_nothing_and_is_told_why() -> None:
    plane = new_plane()
    plane.bar(ALICE, WHY)
    (said,) = plane.ask(ALICE, v(0), 4, now=0.0)
    assert isinstance(said, Refused)
    assert said.detail == WHY
    assert ask(plane, BOB, 0, 2)
    plane.unbar(ALICE)
    assert ask(plane, ALICE, 0, 2)


def test_it_gets_no_held_out_prompt_either() -> None:
    plane = new_plane()
    plane.evaluate(v(0), [prompt()])
    plane.bar(ALICE, WHY)
    plane.set_standby({ALICE: "not needed"})
    assert isinstance(plane.ask(ALICE, v(0), 4, now=0.0)[-1], Refused)


def test_it_keeps_no_held_out_prompt_from_those_on_standby() -> None:
    plane = new_plane()
    plane.evaluate(v(0), [prompt()])
    plane.beat(ALICE, now=0.0)
    plane.beat(BOB, now=0.0)
    plane.set_standby({BOB: "not needed"})
    assert isinstance(plane.ask(BOB, v(0), 4, now=0.0)[-1], Refused), "while another draws they go there"
    plane.bar(ALICE, WHY)
    assert ask(plane, BOB, 0, 4)


def seeds_of(leases: Sequence[Lease]) -> set[tuple[str, int, int]]:
    return {(one.group_id, spec.index, spec.seed) for one in leases for spec in one.samples}


def test_what_it_gave_is_drawn_again_from_the_same_seeds_also_in_groups_that_were_ready() -> None:
    """One group is its own, one half its own, one another's."""
    plane = new_plane(groups=3)
    first = ask(plane, ALICE, 0, 3)
    submit_and_score(plane, ALICE, first, 0)
    rest = ask(plane, BOB, 0, 3)
    submit_and_score(plane, BOB, rest, 0)
    assert ready(plane)
    returned = plane.bar(ALICE, WHY)
    assert [(one.number, one.index) for one in returned if isinstance(one, RolloutReturned)] == [(0, 0), (0, 1), (1, 0)]
    assert not ready(plane)
    again = ask(plane, BOB, 0, 3)
    assert seeds_of(again) == seeds_of(first)
    submit_and_score(plane, BOB, again, 0)
    assert ready(plane)
    batch, _ = plane.take()
    assert {sample.author for group in batch for sample in group.samples} == {BOB}


def test_a_group_that_is_too_old_to_be_drawn_again_is_dropped() -> None:
    plane = new_plane(max_staleness=1, groups=1)
    submit_and_score(plane, ALICE, ask(plane, ALICE, 0, 2), 0)
    plane.take()
    submit_and_score(plane, ALICE, ask(plane, ALICE, 0, 2), 0)
    plane.next_batch += 1
    returned = plane.bar(ALICE, WHY)
    assert any(isinstance(one, GroupDropped) for one in returned)
    assert plane.counts()["groups_open"] == 0
