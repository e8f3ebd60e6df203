"""The rollout plane of the learner: who may generate what, which answers count, and when a batch is ready.

Theory of operation. Groups are opened on demand: a sampler asks, and the plane first offers held-out prompts and
samples that lost their node, then opens new groups as far as the pacing rule (admission.may_open) allows. Answers
are judged (admission.judge), matched with their sample (leases), scored outside, and complete groups go to the
buffer. `take` hands out batch n, after which n is n + 1; what can no longer be in any batch is dropped then.

I1 is guaranteed by `take` (through Buffer.take) and checked again by its caller's metrics; I5 because groups are
only opened under the pacing rule and closed ids are remembered in a bounded table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from swarm.rollout.admission import is_fresh, judge, may_open
from swarm.rollout.buffer import Buffer
from swarm.rollout.effects import (
    Effect,
    Evaluated,
    GenerationFailed,
    Granted,
    GroupDropped,
    Judged,
    LeaseOverdue,
    NodeSilent,
    Refused,
    ScoreWanted,
)
from swarm.rollout.leases import Group, LeaseTable, Share
from swarm.rollout.messages import Refusal
from swarm.types import (
    GroupId,
    Lease,
    NodeId,
    Prompt,
    Rollout,
    SamplingRules,
    Score,
    SwarmId,
    Verdict,
    VersionId,
)

MAX_CLOSED = 65_536
"""Closed groups remembered so that a late answer is called a duplicate: 100 times what is open at once."""

MAX_FAILURES = 8
"""Failed generations of one sample before its group is dropped: by then it is the prompt, not the samplers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneRules:
    """What the user set. `rules` are for training; held-out prompts are answered greedily."""

    swarm: SwarmId
    run_seed: int
    max_staleness: int
    groups_per_step: int
    group_size: int
    rules: SamplingRules
    vocab_size: int
    beat_s: float
    lease_time_limit_s: float


class RolloutPlane:
    """Leases, admission and buffer in one machine. `prompts(i)` is the i-th training prompt, a pure function."""

    def __init__(self, rules: PlaneRules, *, prompts: Callable[[int], Prompt]) -> None:
        self.rules = rules
        self.next_batch = 0
        self.newest: VersionId | None = None
        self._prompts = prompts
        self._table = LeaseTable(run_seed=rules.run_seed, beat_s=rules.beat_s, time_limit_s=rules.lease_time_limit_s)
        self._buffer = Buffer(batch_groups=rules.groups_per_step)
        self._closed: dict[str, None] = {}
        self._opened = 0
        self._rounds = 0
        self._round: dict[GroupId, Score | None] = {}
        self._round_version = 0
        self._ending: Refusal | None = None

    # -- what samplers do ------------------------------------------------------------------------------------

    def ask(
        self,
        node: NodeId,
        held: VersionId,
        capacity: int,
        *,
        now: float,
        holding: Collection[tuple[str, int]] | None = None,
    ) -> list[Effect]:
        """A sampler that has installed `held` can take on `capacity` samples.

        `holding`, when the question arrives: (group id, index) of all that it has in its hands. What it does not name
        is put back, or an answer that was lost would stay leased for as long as the sampler lives. None on later tries
        of a question that was held open, when the list may be outdated; `now` is when the question arrived.
        """
        if not self._table.hear(node, now=now):
            return [Refused(reason="draining", retry_after_s=60.0)]
        if holding is not None:
            self._table.keep(node, holding)
        if self._ending == "finished" or (self._ending and not self._round):
            return [Refused(reason=self._ending, retry_after_s=self.rules.beat_s)]
        if self.newest is None:
            return [Refused(reason="starting", retry_after_s=self.rules.beat_s)]
        # What another incarnation held may be of another run altogether, however new its number is.
        of_this_life = held.incarnation == self.newest.incarnation and held <= self.newest
        shares = self._claim(node, held, capacity, now=now) if of_this_life else []
        if shares:
            return [Granted(leases=tuple(self._lease(share, node) for share in shares))]
        behind = not of_this_life or not self._fresh(held.version)
        return [Refused(reason="behind" if behind else "paced", retry_after_s=self.rules.beat_s)]

    def beat(self, node: NodeId, *, now: float) -> None:
        """A sign of life from a sampler."""
        self._table.hear(node, now=now)

    def submit(self, node: NodeId, lease: Lease, rollout: Rollout, *, now: float) -> list[Effect]:
        """An answer under a lease whose seal was checked."""
        self._table.hear(node, now=now)
        verdict, detail = self._judge(node, lease, rollout)
        failed = rollout.finish == "failed"
        effects: list[Effect] = [
            Judged(rollout_id=rollout.rollout_id, node=node, verdict=verdict, detail=detail, failed=failed)
        ]
        if verdict != "accepted":
            self._table.release(node, rollout.group_id, rollout.index)
            return effects
        group = self._table.group(rollout.group_id)
        assert group is not None
        if failed:
            return effects + self._failed(node, group, rollout)
        self._table.answer(group, rollout)
        return [
            *effects,
            ScoreWanted(group_id=group.group_id, index=rollout.index, prompt=group.prompt, rollout=rollout),
        ]

    def release(self, node: NodeId, group_id: str, index: int, *, now: float) -> None:
        """A sampler hands a sample back."""
        self._table.hear(node, now=now)
        self._table.release(node, group_id, index)

    def leave(self, node: NodeId) -> None:
        """A sampler goes; whatever it still holds is put back."""
        self._table.forget(node)

    def tick(self, *, now: float) -> list[Effect]:
        """Take the samples of nodes that missed three beats, and those that are past their time limit."""
        return [
            *(NodeSilent(node=node, samples=self._table.forget(node)) for node in self._table.silent(now=now)),
            *(LeaseOverdue(node=node, samples=names) for node, names in self._table.take_overdue(now=now)),
        ]

    def deadline(self) -> float | None:
        """When `tick` has something to do if nothing is heard before."""
        return self._table.next_due()

    # -- what the learner does -------------------------------------------------------------------------------

    def published(self, version: VersionId) -> None:
        """`version` can be fetched by samplers from now on."""
        assert self.newest is None or version > self.newest
        self.newest = version

    def scored(self, group_id: str, index: int, score: Score) -> list[Effect]:
        """The reward of an accepted rollout."""
        group = self._table.group(group_id)
        if group is None:
            return []
        group.samples[index].score = score
        return self._completed(group) if group.complete else []

    def unscorable(self, group_id: str, reason: str) -> list[Effect]:
        """A reward raised or took too long: the group is dropped, since its prompt would fail again."""
        group = self._table.group(group_id)
        return [] if group is None else self._drop(group, reason)

    def can_take(self) -> bool:
        """True if batch `next_batch` is ready."""
        return self._buffer.can_take(self.next_batch, self.rules.max_staleness)

    def take(self) -> tuple[list[Group], list[Effect]]:
        """Batch `next_batch`; what can be in no later batch is dropped. Asserts can_take()."""
        batch = self._buffer.take(self.next_batch, self.rules.max_staleness)
        assert all(is_fresh(g.oldest_version, self.next_batch, self.rules.max_staleness) for g in batch)
        self.next_batch += 1
        return batch, self._expire()

    def evaluate(self, version: VersionId, prompts: Sequence[Prompt]) -> None:
        """Have samplers that hold `version` or a newer one answer held-out prompts greedily. One round at a time."""
        assert not self._round
        assert prompts
        self._rounds += 1
        self._round_version = version.version
        greedy = SamplingRules(
            temperature=0.0,
            max_new_tokens=self.rules.rules.max_new_tokens,
            stop_token_ids=self.rules.rules.stop_token_ids,
        )
        for i, prompt in enumerate(prompts):
            group_id = GroupId(f"e{self._rounds}-{i}")
            self._round[group_id] = None
            self._table.open(
                group_id,
                order=i,
                purpose="eval",
                prompt=prompt,
                rules=greedy,
                min_version=version,
                size=1,
            )

    @property
    def evaluating(self) -> bool:
        """True while a round of held-out prompts is out."""
        return bool(self._round)

    def end(self, reason: Refusal) -> None:
        """Open no more training groups: "draining" still hands out held-out prompts, "finished" nothing."""
        self._ending = reason

    def counts(self) -> dict[str, int]:
        """Sizes for `status`: open groups, ready groups, leased samples, known nodes."""
        return {
            "groups_open": len(self._table),
            "groups_ready": len(self._buffer),
            "samples_leased": sum(group.leased for group in self._table.groups()),
            "nodes": sum(1 for _ in self._table.nodes()),
        }

    # -- decisions -------------------------------------------------------------------------------------------

    def _fresh(self, version: int) -> bool:
        return is_fresh(version, self.next_batch, self.rules.max_staleness)

    def _claim(self, node: NodeId, held: VersionId, capacity: int, *, now: float) -> list[Share]:
        shares: list[Share] = []
        capacity = min(capacity, self._table.room(node))
        for group in self._table.claimable(held):
            if capacity == 0:
                break
            if group.purpose == "train" and not self._trainable(group, held):
                continue
            shares.append(self._table.claim(group, node, capacity, now=now))
            capacity -= len(shares[-1].specs)
        if self._ending or not self._fresh(held.version):
            return shares
        by_deadline = self._by_deadline()
        due = held.version + self.rules.max_staleness
        while capacity > 0 and may_open(due, by_deadline, self.next_batch, self.rules.groups_per_step):
            by_deadline[due] += 1
            shares.append(self._table.claim(self._open(held), node, capacity, now=now))
            capacity -= len(shares[-1].specs)
        return shares

    def _trainable(self, group: Group, held: VersionId) -> bool:
        """True if an answer by `held` can still be in a batch, and batches will still be taken."""
        return not self._ending and self._fresh(held.version) and self._fresh(group.oldest_version)

    def _by_deadline(self) -> Counter[int]:
        """Groups leased or ready, by deadline; those past theirs are not counted (may_open looks from n on)."""
        counts = self._buffer.by_deadline(self.rules.max_staleness)
        for group in self._table.groups():
            if group.purpose == "train":
                counts[group.deadline(self.rules.max_staleness)] += 1
        return counts

    def _open(self, held: VersionId) -> Group:
        number = self._opened
        self._opened += 1
        return self._table.open(
            GroupId(f"t{number}"),
            order=number,
            purpose="train",
            prompt=self._prompts(number),
            rules=self.rules.rules,
            min_version=held,
            size=self.rules.group_size,
        )

    def _lease(self, share: Share, node: NodeId) -> Lease:
        return Lease(
            swarm=self.rules.swarm,
            node=node,
            purpose=share.group.purpose,
            group_id=share.group.group_id,
            prompt_token_ids=share.group.prompt.token_ids,
            samples=share.specs,
            rules=share.group.rules,
            min_version=share.group.min_version,
            time_limit_s=self.rules.lease_time_limit_s,
        )

    def _judge(self, node: NodeId, lease: Lease, rollout: Rollout) -> tuple[Verdict, str]:
        if lease.node != node or lease.swarm != self.rules.swarm or self.newest is None:
            return "malformed", "this lease was not given to this node by this learner"
        verdict, detail = judge(
            rollout,
            lease,
            newest=self.newest,
            next_batch=self.next_batch,
            max_staleness=self.rules.max_staleness,
            vocab_size=self.rules.vocab_size,
        )
        if verdict == "malformed":
            return verdict, detail
        group = self._table.group(rollout.group_id)
        if group is None:
            known = rollout.group_id in self._closed
            return ("duplicate", "this group is closed") if known else ("stale", "this group is long gone")
        if lease.min_version != group.min_version:
            return "stale", "this lease is of an earlier run of this learner"
        sample = group.samples[rollout.index]
        if sample.rollout is not None:
            return "duplicate", "this sample is answered"
        if rollout.finish == "failed" and sample.node != node:
            return "duplicate", "this node does not hold this sample any more"
        return verdict, detail

    def _failed(self, node: NodeId, group: Group, rollout: Rollout) -> list[Effect]:
        self._table.release(node, group.group_id, rollout.index)
        sample = group.samples[rollout.index]
        sample.failures += 1
        failed = GenerationFailed(node=node, rollout_id=rollout.rollout_id, reason=rollout.reason)
        if sample.failures < MAX_FAILURES:
            return [failed]
        return [failed, *self._drop(group, "generation_failed")]

    def _completed(self, group: Group) -> list[Effect]:
        self._close(group)
        if group.purpose == "train":
            if self._fresh(group.oldest_version):
                self._buffer.add(group)
                return []
            return [GroupDropped(group_id=group.group_id, reason="stale", rollouts=group.answered)]
        if group.group_id not in self._round:
            return []
        self._round[group.group_id] = group.samples[0].score
        return self._round_over()

    def _round_over(self) -> list[Effect]:
        scores = [score for score in self._round.values() if score is not None]
        if len(scores) < len(self._round):
            return []
        self._round = {}
        return [Evaluated(version=self._round_version, scores=tuple(scores))]

    def _drop(self, group: Group, reason: str) -> list[Effect]:
        self._close(group)
        dropped = GroupDropped(group_id=group.group_id, reason=reason, rollouts=group.answered)
        if group.group_id not in self._round:
            return [dropped]
        # A held-out prompt that cannot be answered counts as wrong: the share must not rise by dropping.
        self._round[group.group_id] = Score(reward=0.0, exact=False)
        return [dropped, *self._round_over()]

    def _close(self, group: Group) -> None:
        self._table.close(group)
        self._closed[group.group_id] = None
        while len(self._closed) > MAX_CLOSED:
            del self._closed[next(iter(self._closed))]

    def _expire(self) -> list[Effect]:
        """Drop what can be in no batch from n on. A group past its opening deadline is kept while nodes work on it
        and its answers are fresh: they may have switched to a newer version before they began."""
        stale = self._buffer.expire(self.next_batch, self.rules.max_staleness)
        effects: list[Effect] = [
            GroupDropped(group_id=g.group_id, reason="stale", rollouts=len(g.samples)) for g in stale
        ]
        for group in list(self._table.groups()):
            if group.purpose != "train" or self._fresh(group.oldest_version):
                continue
            spoilt = group.oldest_answer is not None and not self._fresh(group.oldest_answer)
            if spoilt or not group.leased:
                effects += self._drop(group, "stale")
        return effects
