"""The learner's desk in a capacity simulation: the real rollout plane, and the requests that wait for it.

Theory of operation. A request that gets nothing stays here and is tried again after a change, as in rollout/api.py.
Requests of one *case* (same version, ahead of the engine or not) get the same answer until then, so only the oldest of
each case is tried: a waiting fleet of a thousand costs no more than one sampler. Rewards come at once. Rollouts carry
no log-probs, and only enough token ids to tell long answers from short ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from swarm.pay.fleet import Demand
from swarm.rollout.journal.entries import GroupDropped
from swarm.rollout.messages import Answer
from swarm.rollout.plane.effects import Effect, Granted, Judged, NodeSilent, ScoreWanted
from swarm.rollout.plane.plane import PlaneRules, RolloutPlane
from swarm.types import Lease, NodeId, Prompt, Rollout, SamplingRules, Score, Span, VersionId

BEAT_S = 5.0  # The default of a real run; a sampler counts as gone after three
COARSE_TOKENS = 64  # Token ids of the longest answer: the plane prefers groups whose answers are long so far
LEASE_LIMIT_S = 1e7  # Simulated samplers answer or die: no lease is ever overdue
SCORE = Score(reward=0.0, exact=False)


@dataclass(frozen=True, slots=True)
class LeasedSample:
    """One sample of a lease. `share` in [0, 1), from its seed, is its place in the distribution of lengths."""

    lease: Lease
    index: int
    attempt: int
    share: float


@dataclass(slots=True, kw_only=True)
class Question:
    """The request of a sampler that holds version `held` and takes `capacity` samples, `at_once` of which start at
    once, each in `answer_s` in the mean. `given` is called with what it gets, whenever that is."""

    node: NodeId
    held: int
    capacity: int
    at_once: int
    answer_s: float
    asked_at: float
    given: Callable[[list[LeasedSample]], None]

    @property
    def case(self) -> tuple[float, int, bool]:
        return self.answer_s, self.held, self.at_once > 0


@dataclass(slots=True, kw_only=True)
class Counts:
    """Rollouts so far: handed in, trained on (with their summed staleness), discarded, lost with nodes, failed."""

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
            run_seed=seed,
            max_staleness=demand.max_staleness,
            adaptive=demand.freshness == "adaptive",
            groups_per_step=demand.groups_per_step,
            group_size=demand.group_size,
            rules=SamplingRules(temperature=1.0, max_new_tokens=COARSE_TOKENS, stop_token_ids=(0,)),
            vocab_size=10,
            beat_s=BEAT_S,
            lease_time_limit_s=LEASE_LIMIT_S,
        )
        self.plane = RolloutPlane(rules, prompts=_prompt)
        self.counts = Counts()
        self._waiting: dict[tuple[float, int, bool], dict[NodeId, Question]] = {}
        self._told = 0

    # -- samplers --------------------------------------------------------------------------------------------

    def ask(self, question: Question) -> None:
        """Answer now, or as soon as there is something. A node has one question at a time."""
        waiting = self._waiting.get(question.case)
        if waiting:
            waiting[question.node] = question
        elif not self._try(question):
            self._waiting.setdefault(question.case, {})[question.node] = question

    def withdraw(self, question: Question) -> None:
        """Stop asking this question."""
        waiting = self._waiting.get(question.case)
        if waiting is not None and waiting.get(question.node) is question:
            del waiting[question.node]

    def submit(self, node: NodeId, job: LeasedSample, *, version: int, failed: bool = False, now: float) -> None:
        """Hand in what `version` made of `job`."""
        rollout = _rollout(job, version, failed=failed)
        judged, *rest = self.plane.submit(node, Answer(rollout, job.attempt), now=now, fault="")
        assert isinstance(judged, Judged)
        self.counts.failed += failed
        self.counts.generated += not failed
        if judged.verdict != "accepted":
            assert judged.verdict in ("stale", "duplicate"), judged
            self.counts.discarded += not failed
        self._perform(rest)
        if failed:
            self.retry_all()  # Its sample may suit other nodes than the first in line.

    def silent(self, alive: Iterable[NodeId], *, now: float) -> list[NodeId]:
        """Return the nodes that have missed three beats; all of `alive` have beaten meanwhile."""
        for one in alive:
            self.plane.beat(one, now=now)
        silent = [effect for effect in self.plane.tick(now=now) if isinstance(effect, NodeSilent)]
        self.counts.lost += sum(effect.samples for effect in silent)
        return [effect.node for effect in silent]

    def leave(self, node: NodeId) -> None:
        """Let `node` leave with notice; its samples are free for others."""
        self.counts.lost += len(self.plane.leased.held_by(node))
        self.plane.leave(node)

    # -- the learner -----------------------------------------------------------------------------------------

    def take(self, *, now: float) -> list[Rollout] | None:
        """Return the next batch if it is ready. I1 is checked for every rollout of it."""
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
        """Return whether anything since the last `retry` may have made an answer possible."""
        return self.plane.leased.chances != self._told

    def retry(self) -> None:
        """Try the oldest questions of each case again until one is refused, the fastest samplers first."""
        self._told = self.plane.leased.chances
        for _, waiting in sorted(self._waiting.items()):
            while waiting:
                node, question = next(iter(waiting.items()))
                if not self._try(question):
                    break
                # Its answer may have made it ask again already; it then keeps its place in the line.
                if waiting.get(node) is question:
                    del waiting[node]
        self._waiting = {case: waiting for case, waiting in self._waiting.items() if waiting}

    def retry_all(self) -> None:
        """Try every question again."""
        waiting, self._waiting = self._waiting, {}
        for questions in waiting.values():
            for question in questions.values():
                self.ask(question)

    # -- inside ----------------------------------------------------------------------------------------------

    def _try(self, question: Question) -> bool:
        held = VersionId(incarnation=0, version=question.held)
        rate = COARSE_TOKENS / 2 / question.answer_s
        self.plane.beat(question.node, now=question.asked_at, tokens_per_s=rate)
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


def _job(lease: Lease, place: int) -> LeasedSample:
    spec = lease.samples[place]
    return LeasedSample(lease, spec.index, spec.attempt, spec.seed / (1 << 63))


@cache
def _prompt(_: int) -> Prompt:
    return Prompt(prompt_id="p", text="", answer="", token_ids=(1,))


def _rollout(job: LeasedSample, version: int, *, failed: bool) -> Rollout:
    if failed:
        return Rollout(job.lease.group_id, job.index, b"", b"", (), "failed", "simulated")
    length = 1 + int(job.share * (COARSE_TOKENS - 1))
    return Rollout(job.lease.group_id, job.index, b"\0" * (4 * length), b"", _spans(version, length), "stop")


@cache
def _spans(version: int, length: int) -> tuple[Span, ...]:
    return (Span(version=VersionId(incarnation=0, version=version), start=0, end=length),)
