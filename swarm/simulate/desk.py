"""The learner's desk in a simulation of capacity: the real rollout plane, and the questions that wait at it.

Theory of operation. A question that finds nothing stays here and is tried again when something changed, as
rollout/api.py does it. Questions of one *case* (same version, ahead of the engine or not) get the same answer until
then, so only the oldest of each case is asked again: a fleet of a thousand that waits costs no more than one sampler.
Rewards come at once. Rollouts carry no log-probs, and as many token ids as tell long answers from short ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from swarm.capacity.fleet import Demand
from swarm.rollout.journal.entries import GroupDropped
from swarm.rollout.plane.effects import Effect, Granted, Judged, NodeSilent, ScoreWanted
from swarm.rollout.plane.plane import PlaneRules, RolloutPlane
from swarm.types import Lease, NodeId, Prompt, Rollout, SamplingRules, Score, Span, SwarmId, VersionId

BEAT_S = 5.0  # The default of a real run; a sampler counts as gone after three
COARSE_TOKENS = 64  # Token ids that the longest answer carries: the plane prefers groups whose answers are long so far
LEASE_LIMIT_S = 1e7  # Samplers of a simulation answer or die: no lease is ever overdue
SWARM = SwarmId("capacity")
SCORE = Score(reward=0.0, exact=False)


@dataclass(frozen=True, slots=True)
class Job:
    """One sample of a lease. `share` in [0, 1) is its place in the distribution of lengths, by its seed."""

    lease: Lease
    index: int
    share: float


@dataclass(slots=True, kw_only=True)
class Question:
    """Of a sampler that holds `held` and takes on `capacity` samples, `at_once` of which begin at once. `given` is
    called with what it gets, whenever that is."""

    node: NodeId
    held: int
    capacity: int
    at_once: int
    asked_at: float
    given: Callable[[list[Job]], None]

    @property
    def case(self) -> tuple[int, bool]:
        return self.held, self.at_once > 0


@dataclass(slots=True, kw_only=True)
class Counts:
    """Rollouts so far: handed in, trained on (with the sum of their staleness), thrown away, lost with their nodes."""

    generated: int = 0
    trained: int = 0
    staleness: int = 0
    discarded: int = 0
    lost: int = 0
    failed: int = 0


class Desk:
    """Questions, answers and batches. Samples are numbered by their leases; `seed` decides their lengths."""

    def __init__(self, demand: Demand, *, seed: int) -> None:
        rules = PlaneRules(
            swarm=SWARM,
            run_seed=seed,
            max_staleness=demand.max_staleness,
            groups_per_step=demand.groups_per_step,
            group_size=demand.group_size,
            rules=SamplingRules(temperature=1.0, max_new_tokens=COARSE_TOKENS, stop_token_ids=(2,)),
            vocab_size=10,
            beat_s=BEAT_S,
            lease_time_limit_s=LEASE_LIMIT_S,
        )
        self.plane = RolloutPlane(rules, prompts=_prompt)
        self.counts = Counts()
        self._waiting: dict[tuple[int, bool], dict[NodeId, Question]] = {}
        self._told = 0

    # -- samplers --------------------------------------------------------------------------------------------

    def ask(self, question: Question) -> None:
        """Answer now, or as soon as there is something; a node has one question at a time."""
        waiting = self._waiting.get(question.case)
        if waiting:
            waiting[question.node] = question
        elif not self._try(question):
            self._waiting.setdefault(question.case, {})[question.node] = question

    def withdraw(self, question: Question) -> None:
        """It is not asked any more."""
        waiting = self._waiting.get(question.case)
        if waiting is not None and waiting.get(question.node) is question:
            del waiting[question.node]

    def submit(self, node: NodeId, job: Job, *, version: int, failed: bool = False, now: float) -> None:
        """What `version` made of `job`."""
        rollout = _rollout(job, version, failed=failed)
        judged, *rest = self.plane.submit(node, job.lease, rollout, now=now, fault="")
        assert isinstance(judged, Judged)
        self.counts.failed += failed
        self.counts.generated += not failed
        if judged.verdict != "accepted":
            assert judged.verdict in ("stale", "duplicate"), judged
            self.counts.discarded += not failed
        self._perform(rest)
        if failed:
            self.retry_all()  # Its sample may be for others, though not for the one that is first in line.

    def silent(self, alive: Iterable[NodeId], *, now: float) -> list[NodeId]:
        """Who has missed three beats, all of `alive` having been heard meanwhile."""
        for one in alive:
            self.plane.beat(one, now=now)
        silent = [effect for effect in self.plane.tick(now=now) if isinstance(effect, NodeSilent)]
        self.counts.lost += sum(effect.samples for effect in silent)
        return [effect.node for effect in silent]

    def leave(self, node: NodeId) -> None:
        """`node` says that it goes; what it held is for others."""
        self.counts.lost += len(self.plane.leased.held_by(node))
        self.plane.leave(node)

    # -- the learner -----------------------------------------------------------------------------------------

    def take(self, *, now: float) -> list[Rollout] | None:
        """The next batch if it is there; I1 is checked for every rollout of it."""
        if not self.plane.can_take(now=now):
            return None
        step = self.plane.next_batch
        groups, effects = self.plane.take()
        self._perform(effects)
        batch = [sample.rollout for group in groups for sample in group.samples if sample.rollout is not None]
        for rollout in batch:
            oldest = rollout.oldest
            assert oldest is not None
            assert 0 <= step - oldest <= self.plane.max_staleness, "I1"
            self.counts.staleness += step - oldest
        self.counts.trained += len(batch)
        return batch

    def changed(self) -> bool:
        """Whether something happened since the last `retry` after which a question may find an answer."""
        return self.plane.leased.chances != self._told

    def retry(self) -> None:
        """Ask the oldest question of each case again, until one of it is refused."""
        self._told = self.plane.leased.chances
        for waiting in list(self._waiting.values()):
            while waiting:
                node, question = next(iter(waiting.items()))
                if not self._try(question):
                    break
                # With what it got it may have asked again already, and keeps its place in the line.
                if waiting.get(node) is question:
                    del waiting[node]
        self._waiting = {case: waiting for case, waiting in self._waiting.items() if waiting}

    def retry_all(self) -> None:
        """Ask every question again."""
        waiting, self._waiting = self._waiting, {}
        for questions in waiting.values():
            for question in questions.values():
                self.ask(question)

    # -- inside ----------------------------------------------------------------------------------------------

    def _try(self, question: Question) -> bool:
        held = VersionId(incarnation=0, version=question.held)
        answer = self.plane.ask(
            question.node, held, question.capacity, at_once=question.at_once, now=question.asked_at
        )[-1]
        if not isinstance(answer, Granted):
            return False
        question.given([_job(lease, i) for lease in answer.leases for i in range(len(lease.samples))])
        return True

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ScoreWanted):
                self._perform(self.plane.scored(effect.group_id, effect.index, SCORE))
            elif isinstance(effect, GroupDropped):
                self.counts.discarded += effect.rollouts


def _job(lease: Lease, place: int) -> Job:
    spec = lease.samples[place]
    return Job(lease, spec.index, spec.seed / (1 << 63))


@cache
def _prompt(_: int) -> Prompt:
    return Prompt(prompt_id="p", text="", answer="", token_ids=(1,))


def _rollout(job: Job, version: int, *, failed: bool) -> Rollout:
    if failed:
        return Rollout(job.lease.group_id, job.index, b"", b"", b"", (), "failed", "simulated")
    length = 1 + int(job.share * (COARSE_TOKENS - 1))
    return Rollout(job.lease.group_id, job.index, b"\0" * (4 * length), b"", b"", _spans(version, length), "stop")


@cache
def _spans(version: int, length: int) -> tuple[Span, ...]:
    return (Span(version=VersionId(incarnation=0, version=version), start=0, end=length),)
