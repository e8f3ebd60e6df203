"""The rollout plane of the learner: who may generate what, which answers count, and when a batch is ready.

Theory of operation. The plane opens groups on demand. When a sampler asks (`ask`), the plane first offers samples that
lost their node, then opens new groups as far as the pacing rule (rules.Pacing) allows. It keeps some room for held-out
prompts (heldout). Answers are judged (verdict.py), matched with their sample (leases) and scored outside. Complete
groups go to the buffer. `take` hands out batch n and drops groups that are too old for any later batch.

With `dynamic_sampling` a complete group whose rewards are all equal, so that it teaches nothing, is dropped instead,
and pacing lets another be opened in its place, as for any group that is gone: for each batch as many as it has groups,
which bounds what it costs. Where to stop follows from the records, so a restart does not begin to count again.

Where the task has an environment, a sample is an episode (episodes.py). What its sampler hands in are its turns, each
judged as it comes; the environment answers outside (`StepWanted`, `observed`), and once it has ended the episode is one
rollout with its score.

A question (`question`) is no part of the run: some sampler draws its answer, before anything else, for whoever asks.

The plane emits everything that the learner must not forget as records (entries.Record). `restore` continues from the
records of an earlier process. Training groups are numbered from 0. A group with a lower number than the next one is
either open or closed, so the plane remembers nothing of closed groups.

`take` guarantees I1 (through Buffer.take); its caller's metrics and `verify` check it again. I5 holds because groups
are only opened under the pacing rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from swarm.bounded import Bounded
from swarm.rollout.journal.entries import (
    NO_VARIANCE,
    BatchTaken,
    GroupDropped,
    GroupOpened,
    Record,
    RecordedGroup,
    RecordedRun,
    RolloutAccepted,
    RolloutReturned,
    RolloutScored,
    TurnTaken,
)
from swarm.rollout.messages import Answer, Refusal
from swarm.rollout.plane.buffer import Buffer
from swarm.rollout.plane.effects import (
    Answered,
    Effect,
    GenerationFailed,
    Granted,
    Judged,
    LeaseOverdue,
    NodeSilent,
    Refused,
    StepWanted,
    beginnings,
    dropped,
    part_taken,
    returned,
    score_wanted,
    step_wanted,
    turn_taken,
)
from swarm.rollout.plane.episodes import Episode, EpisodeRules
from swarm.rollout.plane.frontier import Frontier, tried
from swarm.rollout.plane.groups import Grant, Group, LeaseTable
from swarm.rollout.plane.heldout import HeldOutRound
from swarm.rollout.plane.nodes import MIN_NEW_HELD
from swarm.rollout.plane.rules import Pacing, aged_by, is_fresh
from swarm.rollout.plane.verdict import is_current, token_fault, verdict_on
from swarm.types import (
    Credit,
    GroupId,
    NodeId,
    Observed,
    Prompt,
    Purpose,
    Rollout,
    SamplingRules,
    Score,
    Selection,
    Verdict,
    VersionId,
)

RETURN_S = 30.0
"""A sampler's longest pause between two tries (join/link.py). After a restart, missed beats are counted from then."""

ROUND_STEPS = 0.25  # By how much older a held-out round may make the data, so that the learner waits less for it
MAX_QUESTIONS = 64  # That wait for an answer: they go before the run's own samples
MAX_PUBLISHED = 1024  # Versions of this life that are remembered; any older one may have been published
PAUSED = "this run's owner paused it"  # What waiting samplers are told
MAX_FAILURES = 8  # Failures of one sample before its group is dropped: by then the prompt is to blame, not the samplers


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneRules:
    """The user's settings. `rules` apply to training, and to held-out prompts if `eval_samples` is above 1; a single
    held-out sample is drawn greedily. `life` is the learner's generation. `adaptive` is the setting `freshness`. With
    `dynamic_sampling` others are drawn for groups that teach nothing under `credit`. `episodes` says how long episodes
    are, if the task has turns."""

    run_seed: int
    life: int = 0
    max_staleness: int
    adaptive: bool = True
    groups_per_step: int
    group_size: int
    dynamic_sampling: bool = False
    selection: Selection = "uniform"
    credit: Credit = "episode"
    eval_samples: int = 1
    rules: SamplingRules
    vocab_size: int
    beat_s: float
    lease_time_limit_s: float
    episodes: EpisodeRules | None = None


class RolloutPlane:
    """Leases, admission and buffer in one state machine. `prompts` is a pure function from i to training prompt i."""

    def __init__(self, rules: PlaneRules, *, prompts: Callable[[int], Prompt]) -> None:
        self.rules = rules
        self.max_staleness = rules.max_staleness
        self.next_batch = 0
        self.newest: VersionId | None = None
        self._published: Bounded[VersionId, None] = Bounded(MAX_PUBLISHED)
        self._prompts = prompts
        self.leased = LeaseTable(
            run_seed=rules.run_seed,
            beat_s=rules.beat_s,
            time_limit_s=rules.lease_time_limit_s,
            unproven_held=max(MIN_NEW_HELD, rules.groups_per_step * rules.group_size // 4),
        )
        """Which node holds which samples. Other modules only read it."""
        self._buffer = Buffer(batch_groups=rules.groups_per_step)
        self._opened = 0
        self._replaced = 0  # Groups dropped as NO_VARIANCE since the last batch
        self._frontier = Frontier(rules.run_seed) if rules.selection == "frontier" else None
        self.round = HeldOutRound(rules.life, samples=rules.eval_samples)
        self._asked = 0
        self._pacing = Pacing(batch_groups=rules.groups_per_step, adaptive=rules.adaptive)
        self._ending: Refusal | None = None
        self.standby: Mapping[NodeId, str] = {}  # Nodes that get no leases, and why
        self.barred: dict[NodeId, str] = {}  # Nodes that get nothing and from which nothing is taken, and why
        self.paused = False  # Whether nobody gets leases and no batch is taken. What is leased comes in

    def restore(self, run: RecordedRun, *, now: float) -> list[Effect]:
        """Continue where the records of an earlier process end. Call it before anything else. Samples that were leased
        then count as leased still, and episodes go on from their last recorded turn."""
        assert self._opened == 0
        self.next_batch, self._opened, self._replaced = run.next_batch, run.opened, run.replaced
        if self._frontier is not None:
            self._frontier.restore(run, self._prompts)
        return [effect for group in run.groups for effect in self._restore_group(group, now=now)] + self._expire()

    # -- what samplers do ------------------------------------------------------------------------------------

    def ask(
        self,
        node: NodeId,
        held: VersionId,
        capacity: int,
        *,
        now: float,
        at_once: int = 0,
        holding: Collection[tuple[str, int]] | None = None,
        measured: bool = True,
    ) -> list[Effect]:
        """Answer a sampler that has installed `held` and can take `capacity` samples. The answer is the last effect.

        The engine has room to begin `at_once` of them now; 0 means all of them if it holds nothing, else none.
        `holding` names every sample that it holds, by group and index. Its other samples are put back: if a reply got
        lost, they would stay leased for as long as the sampler lives. `holding` is None when a request that was held
        open is tried again, since the list may be out of date by then. `now` is when the request arrived. `measured`:
        the audit knows what honest engines of its class do.
        """
        if not self.leased.hear(node, now=now, measured=measured):
            return [Refused(reason="draining", retry_after_s=60.0)]
        if holding is not None:
            self.leased.keep(node, holding)
        if self._ending == "finished" or (self._ending and not self.round.open):
            return [Refused(reason=self._ending, retry_after_s=self.rules.beat_s)]
        if self.newest is None:
            return [Refused(reason="starting", retry_after_s=self.rules.beat_s)]
        # A version of another incarnation may belong to a different run, however high its number is.
        of_this_life = held.incarnation == self.newest.incarnation and held <= self.newest
        begun: list[Effect] = []
        if of_this_life:
            grant = self._grant(node, held, capacity, at_once, now=now)
            begun += [*grant.records, *(wanted for group in grant.begun for wanted in beginnings(group))]
            if grant.leases:
                return [*begun, Granted(leases=tuple(grant.leases))]
        if why := self.why_idle(node):
            return [*begun, Refused(reason="standby", retry_after_s=self.rules.beat_s, detail=why)]
        # With the newest version it waits for the learner, and may have a question meanwhile.
        is_paced = of_this_life and (self._fresh(held.version) or held == self.newest)
        reason: Refusal = "paced" if is_paced else "behind"
        return [*begun, Refused(reason=reason, retry_after_s=self.rules.beat_s)]

    def beat(self, node: NodeId, *, now: float, tokens_per_s: float = 0.0, caller: str = "") -> None:
        """Note a sign of life from a sampler, its measured rate, and the address that it calls from."""
        self.leased.hear(node, now=now, tokens_per_s=tokens_per_s, caller=caller)

    def submit(self, node: NodeId, answer: Answer, *, now: float, fault: str | None = None) -> list[Effect]:
        """Judge an answer. `fault` is what is malformed about its tokens ("" if nothing), or None if that has not been
        checked yet."""
        self.leased.hear(node, now=now)
        rollout = answer.rollout
        group = self.leased.group(rollout.group_id)
        verdict, detail = self._judge(node, answer, group, fault)
        oldest, counted_as = rollout.oldest, str(verdict)
        if verdict == "accepted" and rollout.finish in ("failed", "handed"):
            counted_as = rollout.finish
        elif verdict == "stale" and group and oldest is not None and not self._fresh(oldest):
            counted_as = "bound_lowered" if is_fresh(oldest, self.next_batch, group.bound) else counted_as
        judged = Judged(rollout_id=rollout.rollout_id, node=node, verdict=verdict, detail=detail, counted_as=counted_as)
        if verdict != "accepted":
            if group is not None and (verdict == "malformed" or is_current(answer, group)):
                wrong = verdict in ("malformed", "future")
                self.leased.release(node, group.group_id, rollout.index, wrong_at=now if wrong else None)
            return [judged]
        assert group is not None
        if rollout.finish == "failed":
            return [judged, *self._failed(node, group, rollout, now=now)]
        if group.episodes is not None:
            episode = self.leased.take_turn(group, rollout, node)
            return [judged, step_wanted(group, rollout.index, episode)]
        if rollout.finish == "handed":
            return [judged, *part_taken(group, rollout, node, at=self.leased.hand_over(group, rollout, node))]
        rollout = self.leased.answer(group, rollout, node)
        if group.purpose == "ask":
            self.leased.close(group)
            return [judged, Answered(group_id=group.group_id, rollout=rollout)]
        wanted = score_wanted(group, rollout, node)
        if group.purpose == "eval":
            return [judged, wanted]
        accepted = RolloutAccepted(number=group.order, node=node, rollout=rollout)
        return [judged, accepted, wanted]

    def is_taken(self, node: NodeId, answer: Answer) -> bool:
        """Return whether `answer` is the last turn of an episode under way, and was taken from `node`."""
        episode = self._episode_of(answer)
        if episode is None or episode.turn != answer.turn + 1 or answer.attempt < episode.attempt:
            return False
        return episode.nodes[-1] == node

    def next_of(self, node: NodeId, answer: Answer) -> Observed | None:
        """Return what `node` continues after its turn; `done` if it is not to go on with this episode, None while the
        environment thinks."""
        episode = self._episode_of(answer)
        if episode is None or not self.is_taken(node, answer):
            return Observed(done=True)
        return None if episode.thinking else episode.said

    def _episode_of(self, answer: Answer) -> Episode | None:
        """Return the episode under way that a turn belongs to."""
        group, index = self.leased.group(answer.rollout.group_id), answer.rollout.index
        if group is None or index >= len(group.samples) or group.samples[index].rollout is not None:
            return None
        return group.samples[index].episode

    def observed(self, group_id: str, index: int, episode: str, said: Observed | None, *, now: float) -> list[Effect]:
        """Take what an environment said to the last turn. None: it failed, and the episode ends with nothing."""
        group = self.leased.group(group_id)
        found = group.samples[index].episode if group is not None else None
        if group is None or group.episodes is None or found is None or found.name != episode or not found.thinking:
            return []  # It was given up meanwhile.
        if any(node in self.barred for node in found.nodes):
            return self._withdraw(group, index)
        ended = found.observe(said or Observed(done=True), group.episodes)
        if ended and not found.drawn:
            return self._drop(group, "environment_failed")
        if ended:
            return self._ended(group, index, found, ended, failed=said is None)
        self.leased.go_on(group, index, now=now)
        return turn_taken(group, found)

    def _ended(self, group: Group, index: int, episode: Episode, ended: str, *, failed: bool) -> list[Effect]:
        """Take a finished episode as the one answer of its sample."""
        if failed:
            episode.void()
        rollout, node = episode.rollout(group.group_id, index, ended=ended), episode.nodes[-1]
        self.leased.answer(group, rollout, node)
        accepted = RolloutAccepted(number=group.order, node=node, rollout=rollout)
        assert group.episodes is not None
        scored = self.scored(group.group_id, index, episode.scored(group.episodes))
        return [accepted, *scored] if group.purpose == "train" else scored

    def question(self, prompt: Prompt, rules: SamplingRules) -> GroupId | None:
        """Have some sampler draw one completion of `prompt`, which is no part of the run: `Answered` has it. Return
        None if nothing is published yet, the run pauses or ends, or MAX_QUESTIONS wait."""
        waiting = sum(group.purpose == "ask" for group in self.leased.groups())
        if self.newest is None or self.paused or self._ending or waiting >= MAX_QUESTIONS:
            return None
        self._asked += 1
        self.leased.chances += 1
        name = GroupId(f"q{self.rules.life}.{self._asked}")
        return self._open("ask", self._asked, self.newest, prompt, rules, name=name, size=1).group_id

    def forget_question(self, name: GroupId) -> None:
        """Take back a question whose asker has gone."""
        if (group := self.leased.group(name)) is not None:
            self.leased.close(group)

    def release(self, node: NodeId, group_id: str, index: int, *, now: float) -> None:
        """Take back a sample that a sampler returns unanswered."""
        self.leased.hear(node, now=now)
        self.leased.release(node, group_id, index)

    def leave(self, node: NodeId) -> None:
        """Forget a sampler that leaves, and put its samples back."""
        self.leased.forget(node)

    def tick(self, *, now: float) -> list[Effect]:
        """Put back the samples of nodes that missed three beats, and samples past their time limit."""
        was_late, self.leased.is_late = self.leased.is_late, self._pacing.is_late(now=now)
        self.leased.chances += self.leased.is_late and not was_late
        return [
            *(NodeSilent(node=node, samples=held, lost=lost) for node, held, lost in self.leased.take_silent(now=now)),
            *(LeaseOverdue(node=node, samples=names) for node, names in self.leased.take_overdue(now=now)),
        ]

    def deadline(self) -> float | None:
        """Return when `tick` next has something to do, unless a node is heard before."""
        return self.leased.next_due()

    # -- what the learner does -------------------------------------------------------------------------------

    def published(self, version: VersionId) -> None:
        """Note that samplers can fetch `version` from now on."""
        assert self.newest is None or version > self.newest
        self.newest = version
        self._published[version] = None

    def scored(self, group_id: str, index: int, score: Score) -> list[Effect]:
        """Take the reward of an accepted rollout."""
        group = self.leased.group(group_id)
        if group is None:
            return []
        sample = group.samples[index]
        if sample.authors & self.barred.keys():
            return self._withdraw(group, index)
        sample.score = score
        is_recorded = group.purpose == "train"
        record = [RolloutScored(number=group.order, index=index, score=score)] if is_recorded else []
        return [*record, *(self._completed(group) if group.complete else [])]

    def refused(self, group_id: str, index: int, *, now: float) -> list[Effect]:
        """Have others draw a sample whose seed does not draw the answer that was given."""
        if (group := self.leased.group(group_id)) is None:
            return []  # It was given up meanwhile.
        author, effects = group.samples[index].author, self._withdraw(group, index)
        if author is not None:
            self.leased.put_off(author, group, index, now=now)
        return effects

    def bar(self, node: NodeId, why: str) -> list[Effect]:
        """Give `node` nothing more, take nothing more from it, and have others draw what it gave to groups that are not
        yet in a batch. Newcomers from its address come one at a time."""
        self.barred[node] = why
        self.leased.doubt(node)
        self.leased.forget(node)
        effects: list[Effect] = []
        for group in [*self.leased.groups(), *self._buffer.groups()]:
            # What waits for its score is withdrawn when that comes: it could be taken for another answer's.
            given = [i for i, sample in enumerate(group.samples) if node in sample.authors and sample.is_settled]
            if given and group.complete:
                self._buffer.remove(group)
                self.leased.reopen(group)
            effects += [record for index in given for record in self._withdraw(group, index)]
        return [*effects, *self._expire()]

    def why_idle(self, node: NodeId) -> str:
        """Return why `node` gets no leases; "" if it may."""
        return self.barred.get(node) or (PAUSED if self.paused else self.standby.get(node, ""))

    def _withdraw(self, group: Group, index: int) -> list[Effect]:
        given_up = returned(group, index)
        self.leased.withdraw(group, index)
        return [*given_up, *beginnings(group, index)]

    def owes(self, node: NodeId) -> bool:
        """Return whether an answer of `node` waits for its score, which would count if the node were let in now."""
        samples = (sample for group in self.leased.groups() for sample in group.samples)
        return any(node in sample.authors and not sample.is_settled for sample in samples)

    def unbar(self, node: NodeId) -> None:
        self.barred.pop(node, None)
        self.leased.trust(node)

    def can_take(self, *, now: float) -> bool:
        """Return whether batch `next_batch` is full."""
        if self.paused:
            return False
        waited = self._pacing.waits
        ready = self._buffer.count(self.next_batch, self.max_staleness)
        may = self._pacing.is_whole(ready, self.max_staleness, now=now)
        # A waiting learner lets samplers have what pacing refused them.
        self.leased.chances += not (may or waited)
        return may

    def full_batch(self) -> list[Group]:
        """Return what `take` would, if `can_take`."""
        return self._buffer.first(self.next_batch, self.max_staleness)

    def correct(self, own: Mapping[tuple[GroupId, int], tuple[Rollout, bytes]]) -> list[Record]:
        """Train on these log-probs of these rollouts instead of those that were claimed; the records of it."""
        return self._buffer.correct(own)

    def take(self) -> tuple[list[Group], list[Effect]]:
        """Take batch `next_batch`, which must be ready, and drop groups that are too old for the next one."""
        batch = self._buffer.take(self.next_batch, self.max_staleness)
        assert all(is_fresh(g.oldest_version, self.next_batch, self.max_staleness) for g in batch)
        numbers = tuple(group.order for group in batch)
        taken = BatchTaken(step=self.next_batch, max_staleness=self.max_staleness, numbers=numbers)
        if self._frontier is not None:
            self._frontier.taken(batch, self.next_batch)
        self.next_batch += 1
        self._replaced = 0
        self.leased.is_late = False
        self._pacing.taken()
        return batch, [taken, *self._expire()]

    def pause(self, paused: bool) -> None:
        """Begin or end a pause. How long it was says nothing about how long a step takes."""
        self.paused = paused
        self._pacing.interrupted()

    def set_bound(self, max_staleness: int) -> list[Effect]:
        """Change S from the next batch on."""
        self.max_staleness = max_staleness
        return self._expire()

    def evaluate(self, version: VersionId, prompts: Sequence[Prompt]) -> list[StepWanted]:
        """Begin a held-out round for samplers that hold `version` or a newer one."""
        self._pacing.raise_aim(ROUND_STEPS, self.max_staleness)
        names, size = self.round.begin(version, len(prompts)), self.rules.eval_samples
        # A single sample is drawn greedily.
        rules = self.rules.rules if size > 1 else structs.replace(self.rules.rules, temperature=0.0)
        groups = [
            self._open("eval", order, version, prompt, rules, name=name, size=size)
            for order, (name, prompt) in enumerate(zip(names, prompts, strict=True))
        ]
        return [wanted for group in groups for wanted in beginnings(group)]

    def set_standby(self, nodes: Mapping[NodeId, str]) -> None:
        """Give these nodes no new leases, and tell them why. They finish the samples that they hold."""
        self.standby = nodes

    def end(self, reason: Refusal) -> None:
        """Open no more training groups. "draining" still hands out held-out prompts, "finished" hands out nothing."""
        self._ending = reason

    def counts(self) -> dict[str, int]:
        """Return the figures for `status`."""
        return {
            "groups_open": len(self.leased),
            "groups_ready": len(self._buffer),
            "samples_leased": sum(group.leased for group in self.leased.groups()),
            "nodes": len(self.leased.nodes()),
        }

    def age(self, *, mean_staleness: float, broadcast_steps: float) -> dict[str, Any]:
        """Return the aim, if it is below what the bound allows, and what makes the last batch as old as it is."""
        aim, bound = self._pacing.aim, self.max_staleness
        by = aged_by(aim=aim, max_staleness=bound, mean_staleness=mean_staleness, broadcast_steps=broadcast_steps)
        return {**({"staleness/aim": round(aim, 3)} if self.rules.adaptive else {}), "staleness/by": by}

    # -- decisions -------------------------------------------------------------------------------------------

    def _fresh(self, version: int) -> bool:
        return is_fresh(version, self.next_batch, self.max_staleness)

    def _grant(self, node: NodeId, held: VersionId, capacity: int, at_once: int, *, now: float) -> Grant:
        room = min(capacity, self.leased.room(node))
        if not self.round.open:
            room = self._pacing.at_most(room, self.rules.group_size)
        at_once = min(room, at_once or (0 if self.leased.held_by(node) else room))
        grant = Grant(table=self.leased, node=node, now=now, capacity=room, at_once=at_once)
        if node in self.barred or self.paused or room == 0:
            return grant
        # A node on standby gets held-out prompts only, and only if every node is on standby.
        if node not in self.standby or (self.round.open and self._all_are_on_standby()):
            self._fill(grant, held)
        return grant

    def _all_are_on_standby(self) -> bool:
        return not self.leased.nodes() - self.barred.keys() - self.standby.keys()

    def _fill(self, grant: Grant, held: VersionId) -> None:
        """Grant held-out samples, and training ones for the rest of the capacity."""
        claimable = self.leased.claimable(held)
        grant.take_of([group for group in claimable if group.purpose == "ask"], grant.capacity)
        held_out = [group for group in claimable if group.purpose == "eval"]
        if self._ending or grant.node in self.standby:
            grant.take_of(held_out, grant.capacity)
            return
        if not self._fresh(held.version):
            return  # Its version is too old to train with. It is about to install a newer one, so leave it free.
        begun = [group for group in claimable if group.purpose == "train"]
        if self.max_staleness == 0:
            # Only one kind at a time, so that a run can be repeated. Through padding, the last bits of a sample's
            # log-probs depend on its neighbours in the batch, and those must not depend on when a round began.
            self._train(grant, held, begun)
            if not grant.samples:
                grant.take_of(held_out, grant.at_once)
            return
        kept = min(grant.capacity, sum(group.waiting for group in held_out))
        grant.capacity -= kept
        self._train(grant, held, begun)
        grant.capacity += kept
        # A few held-out samples alone would become the engine's whole next batch and take as long as a full one.
        if grant.samples or kept == grant.capacity:
            grant.take_of(held_out, kept)
        grant.take_of(held_out, grant.at_once)

    def _train(self, grant: Grant, held: VersionId, begun: Sequence[Group]) -> None:
        """Grant samples of open groups first, then open new groups as far as pacing allows."""
        answer_s = self.leased.answer_s(grant.node)
        for group in begun:
            if grant.capacity == 0:
                return
            # Of an episode under way it is known how old its tokens are, and the rest of it is short.
            drawn = group.oldest_drawn if group.episodes else None
            oldest = group.oldest_version if drawn is None else drawn
            in_time = self._pacing.may_claim(oldest, self.next_batch, answer_s=answer_s)
            if in_time and self._fresh(oldest) and self.leased.may_claim(group, grant.node, now=grant.now):
                if grant.at_once == 0:
                    return  # An open group waits for a node that can begin at once.
                grant.take(group, grant.at_once)
        by_deadline = self._by_deadline()
        due = held.version + self.max_staleness
        while min(grant.capacity, grant.tokens) > 0 and self._pacing.may_open(
            held.version, by_deadline, self.next_batch, self.max_staleness, ahead=grant.at_once == 0, answer_s=answer_s
        ):
            by_deadline[due] += 1
            number, prompt = self._next_prompt()
            group = self._open_training(self._opened, held, number, prompt)
            opened = GroupOpened(number=self._opened, prompt_number=number, version=held, max_staleness=group.bound)
            grant.records.append(opened)
            grant.begun.append(group)
            # Episodes that wait for their environment are on their way to this node, or to others.
            grant.capacity -= len(group.samples) - group.waiting
            grant.take(group, grant.capacity)
            self._opened += 1

    def _by_deadline(self) -> Counter[int]:
        """Count the open and ready groups by deadline. The rules ignore deadlines below n."""
        return self._buffer.by_deadline(self.max_staleness) + self.leased.by_deadline(self.max_staleness)

    def _next_prompt(self) -> tuple[int, Prompt]:
        """Return the prompt for the next training group, and its number in the task (frontier.py)."""
        if self._frontier is None:
            return self._opened, self._prompts(self._opened)
        begun = {group.prompt.prompt_id for group in [*self.leased.groups(), *self._buffer.groups()]}
        return self._frontier.next_prompt(self._opened, self.next_batch, self._prompts, begun)

    def _open_training(self, number: int, version: VersionId, prompt_number: int, prompt: Prompt) -> Group:
        name, rules = GroupId(f"t{number}"), self.rules
        group = self._open("train", number, version, prompt, rules.rules, name=name, size=rules.group_size)
        group.prompt_number = prompt_number
        return group

    def _open(
        self,
        purpose: Purpose,
        order: int,
        version: VersionId,
        prompt: Prompt,
        rules: SamplingRules,
        *,
        name: GroupId,
        size: int,
    ) -> Group:
        group = Group(
            group_id=name,
            order=order,
            purpose=purpose,
            prompt=prompt,
            rules=rules,
            min_version=version,
            bound=self.max_staleness,
            episodes=None if purpose == "ask" else self.rules.episodes,
        )
        return self.leased.open(group, size)

    def _restore_group(self, recorded: RecordedGroup, *, now: float) -> list[Effect]:
        asked = recorded.prompt_number
        group = self._open_training(recorded.number, recorded.version, asked, self._prompts(asked))
        group.bound = recorded.max_staleness
        wanted: list[Effect] = []
        for found in recorded.rollouts:
            self.leased.answer(group, found.rollout, found.node)
            sample = group.samples[found.rollout.index]
            sample.score = found.score
            if found.score is None and group.episodes is None:
                wanted.append(score_wanted(group, found.rollout, found.node))
            elif found.score is None:
                wanted += returned(group, found.rollout.index)
                self.leased.withdraw(group, found.rollout.index)
        wanted += self._restore_turns(group, recorded.turns)
        self.leased.restore(group, recorded.leases, heard_at=now + RETURN_S)
        wanted += beginnings(group)
        # One that is complete here was judged when its last score came.
        return [*wanted, *(self._completed(group, is_judged=True) if group.complete else [])]

    def _restore_turns(self, group: Group, turns: Sequence[TurnTaken]) -> list[Effect]:
        """Go on with what was under way. The program that plays an episode which `begins` has lost it."""
        if group.episodes is not None and group.episodes.begins:
            lost = sorted({one.drawn.index for one in turns})
            return [RolloutReturned(number=group.order, index=index) for index in lost]
        for one in turns:
            episode = group.samples[one.drawn.index].episode
            if group.episodes is None or episode is None:
                self.leased.hand_over(group, one.drawn, one.node)
                continue
            episode.take(one.node, one.drawn)
            episode.observe(one.said, group.episodes)
        return []

    def _judge(self, node: NodeId, answer: Answer, group: Group | None, fault: str | None) -> tuple[Verdict, str]:
        assert self.newest is not None
        rollout = answer.rollout
        if node in self.barred:
            return "barred", self.barred[node]
        oldest_known = next(iter(self._published), self.newest)
        for span in rollout.spans:
            # Nobody could draw again with a version that never was.
            if oldest_known < span.version <= self.newest and span.version not in self._published:
                return "future", f"this learner never published version {span.version}"
        return verdict_on(
            answer,
            node,
            group,
            fault=token_fault(rollout, self.rules.vocab_size) if fault is None else fault,
            newest=self.newest,
            next_batch=self.next_batch,
            max_staleness=self.max_staleness,
        )

    def _failed(self, node: NodeId, group: Group, rollout: Rollout, *, now: float) -> list[Effect]:
        hopeless = self.leased.fail(node, group, rollout.index, now=now)
        failed = GenerationFailed(node=node, rollout_id=rollout.rollout_id, reason=rollout.reason)
        # A question may ask what engines refuse, and no other sampler is to fail for it.
        if not hopeless or (group.samples[rollout.index].failures < MAX_FAILURES and group.purpose != "ask"):
            return [failed]
        return [failed, *self._drop(group, "generation_failed")]

    def _completed(self, group: Group, *, is_judged: bool = False) -> list[Effect]:
        self.leased.close(group)
        if group.purpose == "eval":
            return [*self.round.scored(group)]
        if not self._fresh(group.oldest_version):
            return [self._dropped(group, "stale")]
        if not is_judged and self._is_for_replacement(group):
            self._replaced += 1
            if self._frontier is not None:
                self._frontier.note(*tried(group, self.next_batch))
            # Who asked in vain may open the next.
            self.leased.chances += 1
            return [self._dropped(group, NO_VARIANCE)]
        self._buffer.add(group)
        return []

    def _is_for_replacement(self, group: Group) -> bool:
        """DAPO's dynamic sampling (arXiv 2503.14476, section 3.2). A step waits for what others draw instead, so after
        as many as a batch has it takes what there is."""
        if not self.rules.dynamic_sampling or self._replaced >= self.rules.groups_per_step:
            return False
        is_one = group.episodes is not None and group.episodes.begins
        return len({sample.returns(self.rules.credit, one_player=is_one) for sample in group.samples}) == 1

    def _drop(self, group: Group, reason: str) -> list[Effect]:
        self.leased.close(group)
        return [self._dropped(group, reason), *self.round.scored(group)]

    def _dropped(self, group: Group, reason: str) -> GroupDropped:
        return dropped(group, reason, self.next_batch, self.max_staleness)

    def _expire(self) -> list[Effect]:
        """Drop groups that are too old for batch n. A group past its first deadline stays while nodes work on it and
        its answers are fresh: the nodes may have installed a newer version before they began."""
        stale = self._buffer.expire(self.next_batch, self.max_staleness)
        effects: list[Effect] = [self._dropped(group, "stale") for group in stale]
        for group in list(self.leased.groups()):
            if group.purpose != "train" or self._fresh(group.oldest_version):
                continue
            oldest = group.oldest_drawn
            if (oldest is not None and not self._fresh(oldest)) or not group.is_under_way:
                effects += self._drop(group, "stale")
        return effects
