"""Dynamic sampling: groups whose rewards are all equal make room for others, as many for a batch as that has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from swarm.rollout.journal.entries import GroupDropped
from swarm.rollout.plane.effects import Effect
from swarm.rollout.plane.plane import RolloutPlane
from swarm.types import Credit, Lease, Rollout, Score, Turn
from tests.builders import ALICE, answering, answers, ask, new_plane, prompt, refusal, rollout, v
from tests.unit.rollout.plane.test_restore import Run

FLAT, UNEVEN = (1.0, 1.0), (1.0, 0.0)


def dynamic_plane(*, max_staleness: int = 0) -> RolloutPlane:
    """A batch is two groups of two samples."""
    plain = new_plane(max_staleness=max_staleness)
    plane = RolloutPlane(replace(plain.rules, dynamic_sampling=True), prompts=prompt)
    plane.published(v(0))
    return plane


def give(plane: RolloutPlane, leases: Sequence[Lease], *rewards: tuple[float, ...], version: int = 0) -> list[Effect]:
    """Answer whole groups and score them; the effects."""
    effects: list[Effect] = []
    for lease, given in answers(leases, version):
        place = [one.group_id for one in leases].index(lease.group_id)
        score = Score(reward=rewards[place][given.index], exact=False)
        effects += plane.submit(ALICE, answering(lease, given), now=0.0)
        effects += plane.scored(given.group_id, given.index, score)
    return effects


def replaced(effects: Sequence[Effect]) -> list[str]:
    return [one.group_id for one in effects if isinstance(one, GroupDropped) and one.reason == "no_variance"]


def taken(plane: RolloutPlane) -> list[str]:
    return [group.group_id for group in plane.take()[0]]


def test_a_step_takes_what_there_is_once_as_many_were_replaced_as_a_batch_has() -> None:
    plane = dynamic_plane()
    assert replaced(give(plane, ask(plane, ALICE, 0, 4), FLAT, FLAT)) == ["t0", "t1"]
    assert replaced(give(plane, ask(plane, ALICE, 0, 4), FLAT, UNEVEN)) == []
    assert taken(plane) == ["t2", "t3"]
    plane.published(v(1))
    assert replaced(give(plane, ask(plane, ALICE, 1, 4), FLAT, UNEVEN, version=1)) == ["t4"]


def test_who_asked_in_vain_is_told_that_another_may_be_opened() -> None:
    """Scores may come after the sampler has asked again."""
    plane = dynamic_plane()
    leases = ask(plane, ALICE, 0, 4)
    for lease, given in answers(leases, 0):
        plane.submit(ALICE, answering(lease, given), now=0.0)
    assert refusal(plane, ALICE, 0) == "paced"
    before = plane.leased.chances
    for lease in leases:
        for spec in lease.samples:
            plane.scored(lease.group_id, spec.index, Score(reward=1.0, exact=False))
    assert plane.leased.chances > before
    assert [lease.group_id for lease in ask(plane, ALICE, 0, 4)] == ["t2", "t3"]


def test_a_restart_judges_no_group_again() -> None:
    """Groups that were kept after as many as a batch has were replaced, and are left over when the next step begins."""
    run = Run(dynamic_plane(max_staleness=2))
    for _ in range(3):
        run.note(give(run.plane, run.ask(ALICE, 0, 4), FLAT, FLAT))
    assert run.take(1) == ("t2", "t3")
    plane, _ = run.restored(1)
    assert (taken(plane), taken(run.plane)) == (["t4", "t5"], ["t4", "t5"])


def played(index: int, *rewards: float, seats: Sequence[int] = (0, 0)) -> Rollout:
    """An episode of two turns with these rewards."""
    turns = tuple(
        Turn(start=2 * n, end=2 * n + 2, node=ALICE, reward=reward, seat=seat)
        for n, (reward, seat) in enumerate(zip(rewards, seats, strict=True))
    )
    return structs.replace(rollout(index=index), turns=turns, seats=(0, 2) if any(seats) else ())


@pytest.mark.parametrize(
    ("credit", "seats", "teaches"), [("episode", (0, 0), 0), ("turn", (0, 0), 1), ("episode", (0, 1), 1)]
)
def test_a_group_whose_turns_or_players_were_given_unlike_rewards_teaches(
    credit: Credit, seats: tuple[int, int], teaches: int
) -> None:
    """Their sums are equal: only what is told apart teaches."""
    plane = RolloutPlane(replace(dynamic_plane().rules, credit=credit, groups_per_step=1), prompts=prompt)
    plane.published(v(0))
    ask(plane, ALICE, 0, 2)
    group = plane.leased.group("t0")
    assert group is not None
    for index, rewards in enumerate([(1.0, 0.0), (0.0, 1.0)]):
        plane.leased.answer(group, played(index, *rewards, seats=seats), ALICE)
        plane.scored("t0", index, Score(reward=1.0, exact=False))
    assert plane.counts()["groups_ready"] == teaches
