"""What another bound changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.rollout.journal.entries import GroupDropped
from swarm.rollout.plane.effects import Judged
from swarm.rollout.plane.plane import RolloutPlane
from swarm.types import Lease
from tests.builders import ALICE, BOB, answering, answers, ask, new_plane, prompt, refusal, submit_and_score, v


def without_an_aim(*, max_staleness: int = 1) -> RolloutPlane:
    """Batches of one group of one sample; version 0 is published."""
    rules = replace(new_plane(max_staleness=max_staleness, groups=1, size=1).rules, adaptive=False)
    plane = RolloutPlane(rules, prompts=prompt)
    plane.published(v(0))
    return plane


def one_left_behind(plane: RolloutPlane) -> Lease:
    """Alice's t0 is due by batch 1, which is ready without it: Bob's t1 was batch 0, and his t2 is of version 1."""
    (slow,) = ask(plane, ALICE, 0, 1)
    submit_and_score(plane, BOB, ask(plane, BOB, 0, 1), 0)
    assert plane.can_take(now=0.0)
    plane.take()
    plane.published(v(1))
    submit_and_score(plane, BOB, ask(plane, BOB, 1, 1), 1)
    return slow


def test_a_lower_bound_drops_what_is_ready_and_too_old_by_it() -> None:
    plane = without_an_aim(max_staleness=2)
    submit_and_score(plane, ALICE, ask(plane, ALICE, 0, 3), 0)
    plane.take()
    plane.published(v(1))
    first, second = plane.set_bound(0)
    assert isinstance(first, GroupDropped)
    assert isinstance(second, GroupDropped)
    assert {first.reason, second.reason} == {"bound_lowered"}
    assert (first.nodes, first.next_batch, first.max_staleness) == ({ALICE: 1}, 1, 0)
    assert refusal(plane, ALICE, 0) == "behind"
    assert len(ask(plane, BOB, 1, 9)) == 1


@pytest.mark.parametrize(("lowered", "said"), [(True, "bound_lowered"), (False, "stale")])
def test_an_answer_that_only_a_lower_bound_makes_stale_is_counted_as_such(lowered: bool, said: str) -> None:
    plane = without_an_aim()
    slow = one_left_behind(plane)
    if lowered:
        plane.set_bound(0)
    else:
        plane.take()
    lease, late = answers([slow], 0)[0]
    judged, *_ = plane.submit(ALICE, answering(lease, late), now=0.0)
    assert isinstance(judged, Judged)
    assert (judged.verdict, judged.counted_as) == ("stale", said)
