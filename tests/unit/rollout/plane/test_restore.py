"""What the plane has recorded, and a plane that goes on from there in another life: what tests/property/test_plane.py,
which restores it at any moment and compares it with naive books, does not come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import pytest

from swarm.rollout.journal.entries import (
    BatchTaken,
    GroupDropped,
    GroupOpened,
    Record,
    RolloutAccepted,
    RolloutReturned,
    SamplesLeased,
)
from swarm.rollout.plane.effects import Effect, Granted, NodeSilent, ScoreWanted
from swarm.rollout.plane.groups import LEASE_SLACK_S
from swarm.rollout.plane.nodes import MISSED_BEATS
from swarm.rollout.plane.plane import RETURN_S, RolloutPlane
from swarm.types import GroupId, Lease, NodeId, Score
from tests.builders import ALICE, BOB, answering, answers, failed_rollout, new_plane, prompt, rollout, v, verdict_of
from tests.simulator.rollouts.ledger import Ledger

SCORE = Score(reward=1.0, exact=True)


def _breach(rule: str, what: str) -> NoReturn:
    raise AssertionError(f"{rule}: {what}")


@dataclass
class Run:
    """A plane, and its records in a naive journal. A beat is a second, a batch is two groups of two, S is 2."""

    plane: RolloutPlane
    ledger: Ledger = field(default_factory=lambda: Ledger(2, _breach))
    records: list[Record] = field(default_factory=list)

    def note(self, effects: Sequence[Effect]) -> list[Effect]:
        records = [effect for effect in effects if isinstance(effect, Record)]
        self.records += records
        self.ledger.read(records)
        return list(effects)

    def ask(self, node: NodeId, held: int, capacity: int) -> tuple[Lease, ...]:
        *_, answer = self.note(self.plane.ask(node, v(held), capacity, now=0.0))
        assert isinstance(answer, Granted)
        return answer.leases

    def answer(self, node: NodeId, leases: Sequence[Lease], version: int, *, scored: bool = True) -> None:
        for lease, given in answers(leases, version):
            self.note(self.plane.submit(node, answering(lease, given), now=0.0))
            if scored:
                self.note(self.plane.scored(given.group_id, given.index, SCORE))

    def take(self, version: int) -> tuple[str, ...]:
        """A batch is taken and `version` made of it."""
        batch, effects = self.plane.take()
        self.note(effects)
        self.plane.published(v(version))
        return tuple(group.group_id for group in batch)

    def restored(self, newest: int, *, now: float = 100.0, max_staleness: int = 2) -> tuple[RolloutPlane, list[Effect]]:
        """Another life, which knows what is on record."""
        rules = replace(self.plane.rules, life=1, max_staleness=max_staleness)
        plane = RolloutPlane(rules, prompts=prompt)
        effects = plane.restore(self.ledger.run(), now=now)
        plane.published(v(newest))
        return plane, effects


@pytest.fixture
def run() -> Run:
    return Run(new_plane())


def granted(plane: RolloutPlane, node: NodeId, held: int, capacity: int, *, now: float = 100.0) -> list[str]:
    """The samples that a question is answered with."""
    *_, answer = plane.ask(node, v(held), capacity, now=now)
    leases = answer.leases if isinstance(answer, Granted) else ()
    return [f"{lease.group_id}/{spec.index}" for lease in leases for spec in lease.samples]


def test_who_is_barred_after_a_restart_loses_what_is_on_record_of_it(run: Run) -> None:
    """A crash came between the verdict and the return of what the caught sampler gave."""
    run.answer(ALICE, run.ask(ALICE, 0, 3), 0)
    run.answer(BOB, run.ask(BOB, 0, 1), 0)
    plane, _ = run.restored(0)
    assert plane.can_take(now=100.0)
    returned = [(one.number, one.index) for one in plane.bar(ALICE, "it lied") if isinstance(one, RolloutReturned)]
    assert returned == [(0, 0), (0, 1), (1, 0)]
    assert not plane.can_take(now=100.0)
    assert sorted(granted(plane, BOB, 0, 3)) == ["t0/0", "t0/1", "t1/0"]


def test_a_batch_is_recorded_before_what_it_makes_stale() -> None:
    run = Run(new_plane(max_staleness=1))
    early = run.ask(ALICE, 0, 8)
    run.answer(ALICE, early[:2], 0)
    assert run.take(1) == ("t0", "t1")
    run.answer(BOB, run.ask(BOB, 1, 4), 1)
    run.answer(ALICE, early[2:3], 0)
    run.plane.leave(ALICE)
    run.records.clear()
    assert run.take(2) == ("t2", "t4")
    taken, dropped = run.records
    assert taken == BatchTaken(step=1, max_staleness=1, numbers=(2, 4))
    assert isinstance(dropped, GroupDropped)
    assert (dropped.number, dropped.reason, dropped.rollouts, dropped.nodes) == (3, "stale", 0, {})
    assert (dropped.oldest, dropped.next_batch, dropped.max_staleness) == (0, 2, 1)


def test_held_out_prompts_leave_no_records(run: Run) -> None:
    run.plane.evaluate(v(0), [prompt(0)])
    leases = run.ask(ALICE, 0, 1)
    assert leases[0].purpose == "eval"
    run.answer(ALICE, leases, 0)
    assert run.records == []


def test_a_restart_knows_who_was_leased_a_sample_and_for_which_attempt(run: Run) -> None:
    """After a crash that follows the second lease."""
    (first,) = run.ask(ALICE, 0, 1)
    failed = failed_rollout(group_id="t0")
    run.note(run.plane.submit(ALICE, answering(first, failed), now=0.0))
    (again,) = run.ask(BOB, 0, 1)
    plane, _ = run.restored(0)
    assert verdict_of(plane.submit(ALICE, answering(first, failed), now=100.0)) == "duplicate"
    assert plane.counts()["samples_leased"] == 1
    assert verdict_of(plane.submit(BOB, answering(again, failed), now=100.0)) == "accepted"
    assert plane.counts()["samples_leased"] == 0
    ((lease, given),) = answers([first], 0)
    assert verdict_of(plane.submit(ALICE, answering(lease, given), now=100.0)) == "accepted"


def test_an_answer_without_its_score_is_scored_again(run: Run) -> None:
    leases = run.ask(ALICE, 0, 2)
    run.answer(ALICE, leases, 0, scored=False)
    run.note(run.plane.scored("t0", 1, SCORE))
    plane, effects = run.restored(0)
    (wanted,) = effects
    ((_, given), _) = answers(leases, 0)
    assert wanted == ScoreWanted(group_id=GroupId("t0"), index=0, node=ALICE, prompt=prompt(0), rollout=given)
    plane.scored("t0", 0, SCORE)
    assert plane.counts()["groups_ready"] == 1


def test_what_became_stale_meanwhile_is_dropped_and_what_a_lower_bound_costs_is_called_so(run: Run) -> None:
    run.answer(ALICE, run.ask(ALICE, 0, 6), 0)
    run.take(1)
    plane, effects = run.restored(1, max_staleness=0)
    (dropped,) = effects
    assert isinstance(dropped, GroupDropped)
    assert (dropped.number, dropped.reason, dropped.rollouts) == (2, "bound_lowered", 2)
    assert plane.counts()["groups_ready"] == 0


def test_a_drop_that_the_crash_kept_off_the_record_is_made_again() -> None:
    """One answer of t1 is too old for any batch from 1 on; the journal ends with batch 0."""
    run = Run(new_plane(max_staleness=0, groups=1))
    leases = run.ask(ALICE, 0, 2)
    run.ledger.read([GroupOpened(number=1, prompt_number=1, version=v(0), max_staleness=0)])
    run.ledger.read([SamplesLeased(number=1, node=BOB, samples=((0, 0), (1, 0)))])
    early = rollout(group_id="t1")
    run.ledger.read([RolloutAccepted(number=1, node=BOB, rollout=early)])
    run.answer(ALICE, leases, 0)
    run.take(1)
    plane, (_, dropped) = run.restored(1, max_staleness=0)
    assert isinstance(dropped, GroupDropped)
    assert (dropped.number, dropped.reason, dropped.nodes) == (1, "stale", {BOB: 1})
    assert plane.counts()["groups_open"] == 0


def test_a_silent_holder_keeps_its_samples_until_it_had_time_to_come_back(run: Run) -> None:
    run.ask(ALICE, 0, 2)
    plane, _ = run.restored(0, now=100.0)
    lost_at = 100.0 + RETURN_S + MISSED_BEATS
    assert plane.deadline() == lost_at
    assert plane.tick(now=lost_at - 0.1) == []
    assert plane.tick(now=lost_at) == [NodeSilent(node=ALICE, samples=2)]
    assert granted(plane, BOB, 0, 2, now=lost_at) == ["t0/0", "t0/1"]


def test_a_holder_that_only_beats_loses_its_samples_at_the_longest_limit(run: Run) -> None:
    run.ask(ALICE, 0, 2)
    plane, _ = run.restored(0, now=100.0)
    overdue_at = 100.0 + RETURN_S + plane.rules.lease_time_limit_s + LEASE_SLACK_S
    plane.beat(ALICE, now=overdue_at)
    assert plane.tick(now=overdue_at - 0.1) == []
    assert plane.tick(now=overdue_at) != []


def test_rounds_of_held_out_prompts_of_two_lives_have_different_names(run: Run) -> None:
    run.plane.evaluate(v(0), [prompt(0)])
    (old,) = run.ask(ALICE, 0, 1)
    plane, _ = run.restored(0)
    plane.evaluate(v(0), [prompt(0)])
    ((lease, given),) = answers([old], 0)
    assert verdict_of(plane.submit(ALICE, answering(lease, given), now=100.0)) == "duplicate"
    assert plane.round.open
    assert granted(plane, ALICE, 0, 1) == ["e1.1-0/0"]
