"""The pacing rule in the mean: how fast batches become ready if samplers are counted instead of named.

Theory of operation. Similar workers form one class of *units* that start and end alone (a place of a continuous engine;
a whole engine in lockstep, with `samples` at once) and share one install time. Of a group it keeps how many of its
samples wait, run or are done, and the oldest version among them; the rest is counts by deadline. On these it follows
the rule of docs/staleness.md from event to event: a free unit takes a sample of a started group, else opens a group if
the pacing allows it; the learner takes the B ready groups that are due earliest, trains, and publishes; each class
installs a publication `install_s` later. A unit of several samples asks one batch ahead, as sampler/session.py does,
and starts that batch with the version that it holds then.

Lengths are dealt, not drawn: a pack of the equally likely lengths, shuffled in the same way in every call, is dealt to
its end before the next. So equal questions have equal answers, and few steps give the mean.

It leaves out the travel time of requests and answers, failures, and departures; only a simulation of the real plane
shows these.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean
from typing import Any

from swarm.capacity.fleet import Demand, mean_longest
from swarm.rollout.plane.rules import Pacing, deadline

PACK = 1024
"""Fewest lengths in a pack: a group's lengths are then nearly independent, and the longest comes as often as it should.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitClass:
    """`units` that are alike. Each runs `samples` at once in `unit_s` seconds in the mean, the time of the longest of
    `longest_of` lengths. A version is installed `install_s` after its publication."""

    units: int
    samples: int
    longest_of: int
    unit_s: float
    install_s: float


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums. `busy` is each unit's working time multiplied by its rate, in rollouts."""

    steps: int = 0
    finished: int = 0
    discarded: int = 0
    trained: int = 0
    staleness: int = 0
    busy: float = 0.0


@dataclass(slots=True, eq=False)
class _Group:
    """`opened` is the version for which it was opened, `oldest` the oldest version that drew a sample, `versions` the
    sum of all that did. `waiting` samples are not leased, `unfinished` ones are not done."""

    opened: int
    waiting: int
    unfinished: int
    oldest: float = math.inf
    versions: int = 0
    finished: int = 0
    dropped: bool = False


@dataclass(slots=True, eq=False)
class _Unit:
    """A unit of class `one`. It works on `running`; `queued` is its next batch."""

    one: int
    running: list[_Group] = field(default_factory=list)
    queued: list[_Group] = field(default_factory=list)


class Recursion:
    """Follows these classes for as many steps as asked. Times are seconds from its start."""

    def __init__(self, demand: Demand, classes: Sequence[UnitClass]) -> None:
        self._demand = demand
        self._classes = classes
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = 0
        self._deal = _dealt(demand.lengths.tokens)
        means = [mean_longest(demand.lengths.tokens, one.longest_of) for one in classes]
        self._scale = [one.unit_s / mean for one, mean in zip(classes, means, strict=True)]
        self._answer_s = [scale * fmean(demand.lengths.tokens) for scale in self._scale]
        self._rate = [one.samples / one.unit_s for one in classes]
        self._held = [0 for _ in classes]
        self._free = [deque(_Unit(i) for _ in range(one.units)) for i, one in enumerate(classes)]
        self._ahead: list[dict[_Unit, None]] = [{} for _ in classes]
        self._refused: set[tuple[int, bool]] = set()
        self._next_batch = 0
        self._published = 0
        self._training = False
        self._pacing = Pacing(batch_groups=demand.groups_per_step, adaptive=demand.freshness == "adaptive")
        self._due: dict[int, int] = {}
        self._open: dict[int, set[_Group]] = {}
        self._unfilled: list[_Group] = []
        self._ready: dict[int, list[_Group]] = {}
        self._ready_groups = 0
        self.tally = Tally()

    def steps(self, count: int) -> float:
        """Take `count` more batches and return the seconds that they took; `tally` holds their sums."""
        self.tally = Tally()
        began = self._now
        self._changed()
        while self.tally.steps < count:
            self._now, _, happen, what = heapq.heappop(self._events)
            happen(what)
        return self._now - began

    def _later(self, delay_s: float, happen: Callable[[Any], None], what: Any) -> None:
        self._order += 1
        heapq.heappush(self._events, (self._now + delay_s, self._order, happen, what))

    # -- units -----------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Let refused units try again after an event: first the free ones, the fastest first, then those that ask
        ahead."""
        self._refused.clear()
        for free in sorted(self._free, key=lambda free: self._answer_s[free[0].one] if free else 0.0):
            while free and self._begin(free[0]):
                free.popleft()
        for units in self._ahead:
            for unit in list(units):
                if not self._ask_ahead(unit):
                    break

    def _begin(self, unit: _Unit) -> bool:
        """Let a free unit start what it may. Return False if that is nothing."""
        held, cls = self._held[unit.one], self._classes[unit.one]
        if not unit.queued and (unit.one, False) not in self._refused:
            unit.queued = self._claim(unit.one, cls.samples)
        if not unit.queued:
            self._refused.add((unit.one, False))
            return False
        unit.running, unit.queued = unit.queued, []
        for group in unit.running:
            group.versions += held
            group.oldest = min(group.oldest, held)
        longest = next(self._deal)
        for _ in range(len(unit.running) * cls.longest_of // cls.samples - 1):
            longest = max(longest, next(self._deal))
        seconds = longest * self._scale[unit.one]
        self.tally.busy += seconds * self._rate[unit.one]
        self._later(seconds, self._ended, unit)
        if cls.samples > 1:
            self._ahead[unit.one][unit] = None
            self._ask_ahead(unit)
        return True

    def _ask_ahead(self, unit: _Unit) -> bool:
        """Let a working unit lease its next batch. Return False if it may not yet."""
        if (unit.one, True) in self._refused:
            return False
        unit.queued = self._claim(unit.one, self._classes[unit.one].samples, ahead=True)
        if not unit.queued:
            self._refused.add((unit.one, True))
            return False
        del self._ahead[unit.one][unit]
        return True

    def _claim(self, one: int, most: int, *, ahead: bool = False) -> list[_Group]:
        """Lease at most `most` samples: of started groups first, unless the unit asks ahead, then of new ones."""
        claimed: list[_Group] = []
        held, answer_s = self._held[one], self._answer_s[one]
        for group in [group for group in self._unfilled if group.opened <= held]:
            if self._pacing.may_claim(group.opened, self._next_batch, answer_s=answer_s):
                if ahead:
                    return []
                self._lease(group, most, claimed)
        bound = self._demand.max_staleness
        while len(claimed) < most and self._pacing.may_open(
            held, self._due, self._next_batch, bound, ahead=ahead, answer_s=answer_s
        ):
            due, size = deadline(held, bound), self._demand.group_size
            group = _Group(held, size, size)
            insort(self._unfilled, group, key=_opened)
            self._open.setdefault(held, set()).add(group)
            self._due[due] = self._due.get(due, 0) + 1
            self._lease(group, most, claimed)
        return claimed

    def _lease(self, group: _Group, most: int, claimed: list[_Group]) -> None:
        count = min(group.waiting, most - len(claimed))
        claimed += [group] * count
        group.waiting -= count
        if group.waiting == 0:
            self._unfilled.remove(group)

    def _ended(self, unit: _Unit) -> None:
        self._ahead[unit.one].pop(unit, None)
        due_later = [group for group in unit.running if self._finished(group)]
        unit.running = []
        if not self._begin(unit):
            self._free[unit.one].append(unit)
        self._take_if_ready()
        if due_later:
            self._changed()

    def _finished(self, group: _Group) -> bool:
        """Count a finished sample of `group`. Return True if the group is now due later than assumed."""
        self.tally.finished += 1
        group.finished += 1
        group.unfinished -= 1
        if group.dropped:
            self.tally.discarded += 1
        elif group.unfinished == 0:
            oldest = int(group.oldest)
            self._open[group.opened].discard(group)
            self._ready.setdefault(oldest, []).append(group)
            self._ready_groups += 1
            if oldest > group.opened:
                bound = self._demand.max_staleness
                before, due = deadline(group.opened, bound), deadline(oldest, bound)
                self._due[before] = self._due.get(before, 0) - 1
                self._due[due] = self._due.get(due, 0) + 1
                return True
        return False

    # -- the learner -----------------------------------------------------------------------------------------

    def _take_if_ready(self) -> None:
        batch = self._demand.groups_per_step
        if self._training:
            return
        waited = self._pacing.waits
        if not self._pacing.is_whole(self._ready_groups, self._demand.max_staleness):
            if not waited:
                self._changed()  # More may be opened for a learner that waits.
            return
        for version in sorted(self._ready):
            ready = self._ready[version]
            taken, self._ready[version] = ready[:batch], ready[batch:]
            batch -= len(taken)
            self._due[deadline(version, self._demand.max_staleness)] -= len(taken)
            self._ready_groups -= len(taken)
            for group in taken:
                self.tally.staleness += self._next_batch * self._demand.group_size - group.versions
        self.tally.trained += self._demand.groups_per_step * self._demand.group_size
        self.tally.steps += 1
        self._training = True
        self._later(self._demand.train_step_s, self._trained, None)
        self._next_batch += 1
        self._pacing.taken(now=self._now)
        self._expire()
        self._changed()

    def _expire(self) -> None:
        """Drop groups that no batch can take any more; running samples continue in vain. A group that was leased ahead
        stays while all its started samples are fresh."""
        stale = self._next_batch - self._demand.max_staleness - 1
        ready = self._ready.pop(stale, [])
        self._ready_groups -= len(ready)
        self.tally.discarded += sum(group.finished for group in ready)
        self._unfilled = [group for group in self._unfilled if group.opened > stale]
        self._due = {due: count for due, count in self._due.items() if due >= self._next_batch}
        for opened in [version for version in self._open if version <= stale]:
            for group in list(self._open[opened]):
                if group.oldest <= stale or group.waiting:
                    group.dropped = True
                    self.tally.discarded += group.finished
                    self._open[opened].discard(group)
            if not self._open[opened]:
                del self._open[opened]

    def _trained(self, _: None) -> None:
        self._training = False
        if self._next_batch % self._demand.publish_every_steps == 0:
            self._published = self._next_batch
            for one, cls in enumerate(self._classes):
                self._later(cls.install_s, self._installed, (one, self._published))
        self._take_if_ready()

    def _installed(self, what: tuple[int, int]) -> None:
        one, version = what
        self._held[one] = version
        self._changed()


def _opened(group: _Group) -> int:
    return group.opened


def _dealt(lengths: Sequence[float]) -> Iterator[float]:
    """Yield all lengths equally often, in an order without a pattern."""
    pack = [*lengths] * -(-PACK // len(lengths))
    order = Random(0)
    while True:
        order.shuffle(pack)
        yield from pack
