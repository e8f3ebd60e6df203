"""Who may generate what, three ways: the real rollout plane, AReaL's counter rule, and no rule at all.

All three answer the same questions of the same workers (benchmarks/staleness_sim.py), one sample at a time, and keep
the same bound: what is older than S steps when a batch is taken is never trained on. They differ in what they let
begin, and in the order in which a batch is made.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

from benchmarks.holding import HoldingPlane
from swarm.rollout.journal.entries import GroupDropped
from swarm.rollout.messages import Answer
from swarm.rollout.plane.effects import Effect, Granted, Judged, NodeSilent, Refused, ScoreWanted
from swarm.rollout.plane.plane import PlaneRules
from swarm.types import Freshness, Lease, NodeId, Prompt, Rollout, SamplingRules, Score, Span, VersionId

MEAN_TOKENS = 16
"""Tokens of a completion of mean length: the plane sees lengths, and a run stays cheap."""

MAX_TOKENS = 4096
"""The token limit: 256 times the mean, which no length of a benchmark reaches."""

BEAT_S = 5.0
"""The default of a real run; a sampler counts as gone after three."""

SCORE = Score(reward=0.0, exact=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the learner consumes, and the bound. `hold_s` is the plane's alone, `slots` AReaL's `max_concurrent`."""

    max_staleness: int
    batch_groups: int
    group_size: int
    slots: int
    hold_s: float = 0.0
    freshness: Freshness = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sample of one group, given to a worker. `lease` is the plane's."""

    number: int
    index: int
    lease: Lease | None = None

    @property
    def held_out(self) -> bool:
        return self.lease is not None and self.lease.purpose == "eval"


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished sample: its length in mean lengths, and the version that drew it."""

    length: float
    version: int


class Rule(Protocol):
    """What a learner decides. `discarded` collects what was generated and will not be trained on."""

    discarded: list[Sample]

    def ask(self, worker: int, held: int, *, now: float) -> Job | None:
        """A sample for a worker that has installed `held` and asked at `now`, or None while there is none for such a
        worker."""

    def submit(self, worker: int, job: Job, sample: Sample, *, now: float) -> None:
        """What became of it."""

    def published(self, version: int) -> None:
        """Workers can fetch `version` from now on."""

    def take(self, *, now: float) -> list[Sample] | None:
        """The next batch if it is there."""

    def heard(self, worker: int, *, now: float) -> None:
        """The last sign of life of a worker that dies now."""

    def gone(self, worker: int, alive: Collection[int], *, now: float) -> None:
        """`worker` was silent for three beats; all of `alive` were heard meanwhile."""


class DeadlineRule:
    """The real plane, asked as its real shell asks it."""

    def __init__(self, setting: Setting) -> None:
        rules = PlaneRules(
            run_seed=0,
            max_staleness=setting.max_staleness,
            adaptive=setting.freshness == "adaptive",
            groups_per_step=setting.batch_groups,
            group_size=setting.group_size,
            rules=SamplingRules(temperature=1.0, max_new_tokens=MAX_TOKENS, stop_token_ids=(2,)),
            vocab_size=10,
            beat_s=BEAT_S,
            lease_time_limit_s=1e7,
        )
        self._plane = HoldingPlane(rules, prompts=prompt, hold_s=setting.hold_s)
        self._samples: dict[int, list[Sample]] = {}
        self.discarded: list[Sample] = []

    def ask(self, worker: int, held: int, *, now: float) -> Job | None:
        jobs = self.ask_many(worker, held, 1, at_once=0, now=now)
        return jobs[0] if jobs else None

    def ask_many(self, worker: int, held: int, capacity: int, *, at_once: int, now: float) -> list[Job]:
        """Up to `capacity` samples for an engine that can begin `at_once` of them now."""
        version = VersionId(incarnation=0, version=held)
        answer = self._plane.ask(node(worker), version, capacity, now=now, at_once=at_once)[-1]
        if isinstance(answer, Refused):
            return []
        assert isinstance(answer, Granted)
        return [
            Job(number=_number(lease), index=sample.index, lease=lease)
            for lease in answer.leases
            for sample in lease.samples
        ]

    def submit(self, worker: int, job: Job, sample: Sample, *, now: float) -> None:
        assert job.lease is not None
        rollout = _rollout(job, sample)
        (judged, *rest) = self._plane.submit(node(worker), Answer(rollout), now=now)
        assert isinstance(judged, Judged)
        if judged.verdict == "accepted" and not job.held_out:
            self._samples.setdefault(job.number, []).append(sample)
        elif judged.verdict != "accepted":
            assert judged.verdict in ("stale", "duplicate"), judged
            self.discarded.append(sample)
        self._perform(rest)

    def published(self, version: int) -> None:
        self._plane.published(VersionId(incarnation=0, version=version))

    def take(self, *, now: float) -> list[Sample] | None:
        if not self._plane.can_take(now=now):
            return None
        batch, effects = self._plane.take()
        self._perform(effects)
        return [sample for group in batch for sample in self._samples.pop(group.order)]

    def heard(self, worker: int, *, now: float) -> None:
        self._plane.beat(node(worker), now=now)

    def gone(self, worker: int, alive: Collection[int], *, now: float) -> None:
        for one in alive:
            self._plane.beat(node(one), now=now)
        silent = [effect.node for effect in self._plane.tick(now=now) if isinstance(effect, NodeSilent)]
        assert silent == [node(worker)]

    def _perform(self, effects: list[Effect]) -> None:
        """Rewards come at once."""
        for effect in effects:
            match effect:
                case ScoreWanted():
                    self._perform(self._plane.scored(effect.group_id, effect.index, SCORE))
                case GroupDropped():
                    assert effect.number is not None
                    dropped = self._samples.pop(effect.number, [])
                    assert len(dropped) == effect.rollouts
                    self.discarded += dropped
                case _:
                    pass


@dataclass(slots=True, kw_only=True)
class OpenGroup:
    """A group of the two other rules: what is not yet handed out, who works on the rest, and what came back."""

    number: int
    waiting: list[int]
    held_by: dict[int, int] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    completed: int = 0

    @property
    def version(self) -> int:
        return min(sample.version for sample in self.samples)


class CountingRule:
    """Groups are opened while `room` says so; a batch is made in the order of `place`, and what is too old for it is
    thrown away then."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.version = 0
        self.next_batch = 0
        self.running: dict[int, OpenGroup] = {}
        self.ready: list[OpenGroup] = []
        self.discarded: list[Sample] = []
        self.thrown_groups = 0
        self._unfilled: dict[int, OpenGroup] = {}
        self._opened = 0
        self._completed = 0

    def room(self) -> bool:
        raise NotImplementedError

    def place(self, group: OpenGroup) -> int:
        raise NotImplementedError

    def ask(self, worker: int, held: int, *, now: float) -> Job | None:
        if not self._unfilled and not self._open():
            return None
        number, group = next(iter(self._unfilled.items()))
        index = group.waiting.pop(0)
        group.held_by[index] = worker
        if not group.waiting:
            del self._unfilled[number]
        return Job(number=number, index=index)

    def submit(self, worker: int, job: Job, sample: Sample, *, now: float) -> None:
        group = self.running[job.number]
        del group.held_by[job.index]
        group.samples.append(sample)
        if len(group.samples) == self.setting.group_size:
            del self.running[job.number]
            group.completed = self._completed
            self._completed += 1
            self.ready.append(group)

    def published(self, version: int) -> None:
        self.version = version

    def take(self, *, now: float) -> list[Sample] | None:
        self._throw_away()
        size = self.setting.batch_groups
        if len(self.ready) < size:
            return None
        self.ready.sort(key=self.place)
        batch, self.ready = self.ready[:size], self.ready[size:]
        self.next_batch += 1
        return [sample for group in batch for sample in group.samples]

    def heard(self, worker: int, *, now: float) -> None:
        pass

    def gone(self, worker: int, alive: Collection[int], *, now: float) -> None:
        for number, group in self.running.items():
            lost = [index for index, holder in group.held_by.items() if holder == worker]
            for index in lost:
                del group.held_by[index]
                group.waiting.append(index)
                self._unfilled[number] = group

    def _throw_away(self) -> None:
        """What can be in no batch any more."""
        old = [group for group in self.ready if self.next_batch - group.version > self.setting.max_staleness]
        if old:
            self.ready = [group for group in self.ready if group not in old]
            self.thrown_groups += len(old)
            self.discarded += [sample for group in old for sample in group.samples]

    def _open(self) -> bool:
        if not self.room():
            return False
        group = OpenGroup(number=self._opened, waiting=list(range(self.setting.group_size)))
        self.running[self._opened] = self._unfilled[self._opened] = group
        self._opened += 1
        return True


class CounterRule(CountingRule):
    """AReaL's: capacity = min(max_concurrent - running, (S + version + 1) * batch - (accepted + running)).

    `accepted` counts all that was ever accepted; what was thrown away is taken off again, or the learner would stop for
    ever once (S + 1) batches were thrown away. A batch is made in the order of opening.
    """

    def room(self) -> bool:
        running, accepted = len(self.running), self._completed - self.thrown_groups
        bound = (self.setting.max_staleness + self.version + 1) * self.setting.batch_groups
        return min(self.setting.slots - running, bound - (accepted + running)) > 0

    def place(self, group: OpenGroup) -> int:
        return group.number


class NoRule(CountingRule):
    """First in, first out, and every worker always works."""

    def room(self) -> bool:
        return True

    def place(self, group: OpenGroup) -> int:
        return group.completed


RULES: dict[str, Callable[[Setting], Rule]] = {
    "deadlines": DeadlineRule,
    "deadlines, off": DeadlineRule,
    "deadlines, hold": DeadlineRule,
    "counter": CounterRule,
    "none": NoRule,
}


def hold_of(rule: str) -> float:
    """`hold_s` of a rule by its name."""
    return math.inf if rule.endswith("hold") else 0.0


def freshness_of(rule: str) -> Freshness:
    """`freshness` of a rule by its name."""
    return "adaptive" if rule == "deadlines" else "off"


@cache
def node(worker: int) -> NodeId:
    return NodeId(f"w{worker}")


@cache
def prompt(_: int) -> Prompt:
    return Prompt(prompt_id="p", text="", answer="", token_ids=(1,))


def _number(lease: Lease) -> int:
    """The number of a group, or of a held-out prompt within its round."""
    return int(lease.group_id[1:].rpartition("-")[2])


def _rollout(job: Job, sample: Sample) -> Rollout:
    assert job.lease is not None
    tokens, logprobs = _payload(max(1, min(MAX_TOKENS, round(sample.length * MEAN_TOKENS))))
    version = VersionId(incarnation=0, version=sample.version)
    return Rollout(
        group_id=job.lease.group_id,
        index=job.index,
        token_ids=tokens,
        logprobs=logprobs,
        spans=(Span(version=version, start=0, end=len(tokens) // 4),),
        finish="stop",
    )


@cache
def _payload(length: int) -> tuple[bytes, bytes]:
    """Ids and log-probs of that many tokens."""
    ids = array("i", [*([5] * (length - 1)), 2])
    return ids.tobytes(), array("f", [-0.5] * length).tobytes()
