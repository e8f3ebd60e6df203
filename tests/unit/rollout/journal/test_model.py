"""The journal and a naive model of it, in random order, with reopening, syncs and pruning."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swarm.rollout.journal.entries import (
    Entry,
    GroupOpened,
    RecordedGroup,
    RecordedLease,
    RolloutAccepted,
    RolloutReturned,
    RolloutScored,
    SamplesLeased,
    Tried,
)
from swarm.rollout.journal.journal import Journal
from swarm.rollout.journal.verify import verify_run
from swarm.types import NodeId, Score
from tests.builders import ALICE, BOB, v
from tests.unit.rollout.journal.test_journal import SIZE, answer, dropped, taken

BOUND = 2


def parts(index: int) -> dict[str, float]:
    return {"length": index / 7, "answer": -1.0} if index else {}


def tried(number: int, step: int, group: ModelGroup) -> Tried:
    rewards = [score.reward for score in group.scores.values()]
    total: Any = pytest.approx(sum(rewards))
    return Tried(number, number * 8 + 3, step, SIZE, total, min(rewards), max(rewards))


PICK = st.integers(0, 1 << 20)


@dataclass
class ModelGroup:
    version: int
    leases: list[RecordedLease] = field(default_factory=list)
    answers: set[int] = field(default_factory=set)
    scores: dict[int, Score] = field(default_factory=dict)

    def fresh(self, step: int) -> bool:
        return self.version >= step - BOUND


class JournalBesideModel(RuleBasedStateMachine):
    """`waiting`, `batches` and `opened` are what the journal should hold, and the payloads of batches from `kept_from`
    on. The version of a group is the batch that was next when it was opened."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.runner = asyncio.Runner()
        self.waiting: dict[int, ModelGroup] = {}
        self.batches: list[tuple[int, ModelGroup]] = []
        self.opened = 0
        self.kept_from = 0
        self.lineages = [b""]
        self.open_journal()

    def open_journal(self) -> None:
        async def make() -> Journal:
            journal = Journal(self.directory, group_size=SIZE)
            await journal.start()
            return journal

        self.journal = self.runner.run(make())

    def teardown(self) -> None:
        self.runner.run(self.journal.close())
        self.runner.close()
        shutil.rmtree(self.directory)

    def write(self, *entries: Entry) -> None:
        self.runner.run(self.journal.write(entries))

    def pick(self, at: int, *, answered: bool | None = None) -> tuple[int, ModelGroup] | None:
        """A group that waits; `answered`: one that has or lacks an answer."""
        possible = [
            (number, group)
            for number, group in sorted(self.waiting.items())
            if answered is None or (len(group.answers) > 0 if answered else len(group.answers) < SIZE)
        ]
        return possible[at % len(possible)] if possible else None

    @rule(node=st.sampled_from([ALICE, BOB]))
    def open_group(self, node: NodeId) -> None:
        version = len(self.batches)
        self.write(
            GroupOpened(number=self.opened, prompt_number=self.opened * 8 + 3, version=v(version), max_staleness=BOUND),
            SamplesLeased(number=self.opened, node=node, samples=tuple((i, 0) for i in range(SIZE))),
        )
        self.waiting[self.opened] = ModelGroup(version, [RecordedLease(index, node, 0) for index in range(SIZE)])
        self.opened += 1

    @precondition(lambda self: self.waiting)
    @rule(at=PICK, index=st.integers(0, SIZE - 1), node=st.sampled_from([ALICE, BOB]))
    def lease(self, at: int, index: int, node: NodeId) -> None:
        found = self.pick(at)
        assert found
        number, group = found
        attempt = len(group.leases)
        group.leases = [one for one in group.leases if (one.index, one.node) != (index, node)]
        group.leases.append(RecordedLease(index, node, attempt))
        self.write(SamplesLeased(number=number, node=node, samples=((index, attempt),)))

    @precondition(lambda self: self.waiting)
    @rule(at=PICK)
    def finish_group(self, at: int) -> None:
        found = self.pick(at)
        assert found
        self.finish(*found)

    def finish(self, number: int, group: ModelGroup) -> None:
        """All answers that a group lacks, and all scores, in one transaction."""
        missing = [index for index in range(SIZE) if index not in group.answers]
        group.answers.update(missing)
        group.scores = {
            index: Score(reward=index + number / 3, exact=bool(index), parts=parts(index)) for index in range(SIZE)
        }
        self.write(
            *(
                RolloutAccepted(number=number, node=ALICE, rollout=answer(number, index, group.version))
                for index in missing
            ),
            *(RolloutScored(number=number, index=index, score=score) for index, score in group.scores.items()),
        )

    @rule(at=PICK)
    def answer_one(self, at: int) -> None:
        found = self.pick(at, answered=False)
        if found is None:
            return
        number, group = found
        index = next(index for index in range(SIZE) if index not in group.answers)
        group.answers.add(index)
        rollout = answer(number, index, group.version)
        self.write(RolloutAccepted(number=number, node=BOB, rollout=rollout))

    @rule(at=PICK, again=st.booleans())
    def return_one(self, at: int, again: bool) -> None:
        """An answer that cannot be scored, and perhaps the next one to its sample, in one transaction."""
        found = self.pick(at, answered=False)
        if found is None:
            return
        number, group = found
        index = next(index for index in range(SIZE) if index not in group.answers)
        rollout = answer(number, index, group.version)
        accepted = RolloutAccepted(number=number, node=BOB, rollout=rollout)
        returned = RolloutReturned(number=number, index=index)
        self.write(accepted, returned, *([accepted] if again else []))
        group.answers.update([index] if again else [])

    @rule(at=PICK, count=st.integers(1, 4))
    def take_batches(self, at: int, count: int) -> None:
        for _ in range(count):
            self.take_batch(at)

    def take_batch(self, at: int) -> None:
        """Train on one of the groups that are fresh enough, after its last answers; on a new one if there is none."""
        step = len(self.batches)
        fresh = [number for number, group in sorted(self.waiting.items()) if group.fresh(step)]
        if not fresh:
            self.open_group(node=ALICE)
            fresh = [self.opened - 1]
        number = fresh[at % len(fresh)]
        self.finish(number, self.waiting[number])
        self.write(taken(step, number))
        self.batches.append((number, self.waiting.pop(number)))
        self.lineages.append(self.journal.lineage(step + 1))

    @rule(at=PICK)
    def drop(self, at: int) -> None:
        found = self.pick(at)
        if found is not None:
            number, group = found
            self.write(dropped(number, reason="unscorable", oldest=group.version))
            del self.waiting[number]

    @rule()
    def sync(self) -> None:
        self.runner.run(self.journal.sync())

    @rule(keep=st.integers(0, 3), back=st.integers(0, 4))
    def prune(self, keep: int, back: int) -> None:
        oldest = len(self.batches) - back
        while self.runner.run(self.journal.prune(oldest_step=oldest, keep_rollouts=keep)):
            pass
        self.kept_from = max(self.kept_from, len(self.batches) - max(back, keep))

    @rule()
    def reopen(self) -> None:
        self.runner.run(self.journal.close())
        self.open_journal()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        run = self.journal.load()
        assert (run.next_batch, run.opened) == (len(self.batches), self.opened)
        assert {group.number for group in run.groups} == set(self.waiting)
        assert run.tried == tuple(tried(number, step, group) for step, (number, group) in enumerate(self.batches))
        for group in run.groups:
            self.same(group, self.waiting[group.number])
        for step in range(self.kept_from, len(self.batches)):
            (group,) = self.journal.batch(step)
            assert (group.number, group.prompt_number) == (number := self.batches[step][0], number * 8 + 3)
            assert {one.rollout.index for one in group.rollouts} == set(range(SIZE))
        checkpoints = list(enumerate(self.lineages))
        report = verify_run(self.directory, groups_per_step=1, group_size=SIZE, checkpoints=checkpoints)
        assert report.breaches == []
        assert report.trained == SIZE * len(self.batches)
        assert report.pruned >= SIZE * self.kept_from
        assert report.damaged == 0

    def same(self, found: RecordedGroup, model: ModelGroup) -> None:
        assert found.version == v(model.version)
        assert list(found.leases) == model.leases
        assert {one.rollout.index: one.rollout for one in found.rollouts} == {
            index: answer(found.number, index, model.version) for index in model.answers
        }
        assert {one.rollout.index: one.score for one in found.rollouts if one.score} == model.scores


JournalBesideModel.TestCase.settings = settings(max_examples=25, stateful_step_count=30)
TestJournal = JournalBesideModel.TestCase
