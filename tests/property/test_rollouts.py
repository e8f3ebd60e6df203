"""Pacing is never a promise that cannot be kept, and the buffer is what a naive one would be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from benchmarks.holding import may_take
from swarm.rollout.plane.buffer import Buffer
from swarm.rollout.plane.rules import deadline, is_fresh, may_open
from tests.builders import ready_group

wishes = st.lists(st.integers(0, 8), max_size=60)


@given(wishes, st.integers(0, 3), st.integers(1, 4))
def test_whatever_the_rule_admits_can_all_be_trained_in_time(
    wished: list[int], next_batch: int, batch_groups: int
) -> None:
    """Groups wish for deadlines in any order; those that the rule admits are trained earliest deadline first."""
    admitted = Counter[int]()
    for due in wished:
        if may_open(due, admitted, next_batch, batch_groups):
            admitted[due] += 1
    waiting = sorted(admitted.elements())
    batch = next_batch
    while waiting:
        taken, waiting = waiting[:batch_groups], waiting[batch_groups:]
        assert min(taken) >= batch
        batch += 1


@given(wishes, st.integers(0, 8), st.integers(1, 4))
def test_what_the_rule_refuses_could_not_all_be_trained_in_time(
    wished: list[int], last: int, batch_groups: int
) -> None:
    """The rule refuses nothing that would still have fitted."""
    admitted = Counter[int]()
    for due in [*wished, last]:
        if may_open(due, admitted, 0, batch_groups):
            admitted[due] += 1
            continue
        trial = sorted([*admitted.elements(), due])
        assert any(trial[place] < place // batch_groups for place in range(len(trial)))


def left_behind(deadlines: list[int], first: int, batch_groups: int) -> int:
    """How many of these groups are in no batch if each, from `first` on, takes those that are due earliest."""
    waiting, lost, batch = sorted(deadlines), 0, first
    while waiting:
        lost += sum(due < batch for due in waiting)
        waiting = [due for due in waiting if due >= batch][batch_groups:]
        batch += 1
    return lost


@given(st.lists(st.integers(0, 8), max_size=30), st.lists(st.integers(0, 8), max_size=20), st.integers(1, 4))
def test_a_batch_may_be_taken_if_it_leaves_no_more_behind_than_must_be(
    ready: list[int], leased: list[int], batch_groups: int
) -> None:
    ready = sorted(due + 2 for due in ready)
    leased = [due + 2 for due in leased]
    batch, others = ready[:batch_groups], ready[batch_groups:] + leased
    lost = left_behind(others, 3, batch_groups)
    least = left_behind(batch + others, 2, batch_groups)
    assert may_take(Counter(others), Counter(batch), 2, batch_groups) is (lost <= least)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=60),
    st.integers(0, 3),
    st.integers(1, 3),
)
def test_with_every_group_ready_pacing_keeps_the_bound_without_any_drop(
    moves: list[tuple[bool, int]], bound: int, batch_groups: int
) -> None:
    """I7 in small: samplers hold versions up to S old, groups finish at once, batches are taken when full."""
    buffer, next_batch, opened = Buffer(batch_groups=batch_groups), 0, 0
    for take, age in moves:
        version = max(0, next_batch - min(age, bound))
        due = deadline(version, bound)
        if may_open(due, buffer.by_deadline(bound), next_batch, batch_groups):
            buffer.add(ready_group(version, opened))
            opened += 1
        if take and buffer.count(next_batch, bound) >= batch_groups:
            assert len(buffer.take(next_batch, bound)) == batch_groups
            next_batch += 1
            assert buffer.expire(next_batch, bound) == []


@dataclass(frozen=True, slots=True, order=True)
class Ready:
    """A ready group in the naive model: its version first, so that sorting is by deadline."""

    version: int
    order: int


class BufferMachine(RuleBasedStateMachine):
    """The buffer beside a sorted list, under a bound that changes."""

    BATCH = 2

    def __init__(self) -> None:
        super().__init__()
        self.buffer = Buffer(batch_groups=self.BATCH)
        self.model: list[Ready] = []
        self.next_batch = 0
        self.bound = 2
        self.added = 0
        self.seen: set[str] = set()

    def fresh(self) -> list[Ready]:
        return sorted(one for one in self.model if self.next_batch - one.version <= self.bound)

    @rule(age=st.integers(-1, 6))
    def add(self, age: int) -> None:
        version = max(0, self.next_batch - age)
        self.buffer.add(ready_group(version, self.added))
        self.model.append(Ready(version, self.added))
        self.added += 1

    @precondition(lambda self: len(self.fresh()) >= self.BATCH)
    @rule()
    def take(self) -> None:
        expected = self.fresh()[: self.BATCH]
        batch = self.buffer.take(self.next_batch, self.bound)
        assert [Ready(group.oldest_version, group.order) for group in batch] == expected
        assert all(is_fresh(group.oldest_version, self.next_batch, self.bound) for group in batch)
        assert not self.seen & {group.group_id for group in batch}
        self.seen |= {group.group_id for group in batch}
        self.model = [one for one in self.model if one not in expected]
        self.next_batch += 1

    @rule()
    def step_without_a_batch(self) -> None:
        self.next_batch += 1

    @rule(bound=st.integers(0, 4))
    def set_bound(self, bound: int) -> None:
        self.bound = bound

    @rule()
    def expire(self) -> None:
        gone = self.buffer.expire(self.next_batch, self.bound)
        expected = set(self.model) - set(self.fresh())
        assert {Ready(group.oldest_version, group.order) for group in gone} == expected
        self.model = [one for one in self.model if one not in expected]

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert len(self.buffer) == len(self.model)
        assert self.buffer.count(self.next_batch, self.bound) == len(self.fresh())
        assert self.buffer.by_deadline(self.bound) == Counter(one.version + self.bound for one in self.model)
        first = self.buffer.first(self.next_batch, self.bound)
        assert [Ready(group.oldest_version, group.order) for group in first] == self.fresh()[: self.BATCH]


BufferMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
test_the_buffer_is_a_list_sorted_by_deadline = BufferMachine.TestCase
