"""Open groups and which nodes work on them.

A group is one prompt and G samples. Each sample is *waiting* (nobody works on it), *leased* (one node works on it),
*answered* (its rollout was accepted and is being scored) or *scored*:

    waiting -> leased       grant
    leased  -> waiting      the node released or failed it, was silent for three beats, no longer names it, or is late
    leased  -> waiting      the node handed over what it has of it (begun.py)
    leased  -> answered     an answer was accepted; a waiting sample may be answered too, by a node thought silent
    answered -> scored      its reward arrived
    answered -> waiting     the answer cannot count (its seed does not draw it, its node was caught): it is drawn again

An episode stays leased to the node that plays it while it is *thinking*: its environment is to answer a turn. If the
node is lost it waits once that has answered. It is answered when it has ended (episodes.py).

A sample keeps its id and its seed. It is never taken from a node that works on it within the
time limit: leasing a slow sample twice and taking the first answer would favour short answers. An honest sampler
answers within the limit, if only to say that it failed. Only a node that beats but never answers exceeds it. A sample
has at most one accepted answer at a time. Once all its samples are scored, a group is complete and leaves the table.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Sequence, ValuesView
from dataclasses import dataclass, field

from swarm.bounded import Bounded
from swarm.rollout.journal.entries import GroupOpened, RecordedLease, SamplesLeased
from swarm.rollout.messages import LEASE_REPLY_BYTES
from swarm.rollout.plane.begun import begun_name, joined
from swarm.rollout.plane.episodes import Episode, EpisodeRules
from swarm.rollout.plane.nodes import UNPROVEN_HELD, Nodes
from swarm.rollout.plane.rules import deadline
from swarm.types import (
    Credit,
    GroupId,
    Lease,
    NodeId,
    Prompt,
    Purpose,
    Rollout,
    SampleSpec,
    SamplingRules,
    Score,
    VersionId,
)
from swarm.wire import digest

LEASE_SLACK_S = 60.0  # Added to a time limit here: the sampler counts from receipt and then has to submit its answer


UNMEASURED_SHARE = 0.5
"""Of each training group, for nodes whose class of engine was not measured, while a node of a measured class is here:
within the wide limits for any class they can lean towards some answers. A batch that is late lifts it."""

RETRY_S = 60.0  # For this long a node does not get a sample that it failed, unless all nodes have failed it
ALL_FAILED_RETRY_S = 1.0  # And if all have: a node that is alone and answers wrongly at once must not do so in a loop

FAILED_BY = 3  # Nodes (or all there are) that must fail a sample before its group is dropped: one may lie
MAX_LEASED_TO = 64  # Nodes of a sample from which an answer may come late; a new one replaces the first

TOKEN_BYTES = 5  # Of a token's id in msgpack, at most

MAX_LEASED_TOKENS = LEASE_REPLY_BYTES // 2 // TOKEN_BYTES
"""Prompt tokens in one answer: with long prompts the rest comes with the next one."""

Rank = tuple[bool, VersionId, float, int, GroupId]
"""Sorts the groups that a node may work on: whether it is for training, its version, its mean length, its number."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """One sample of a group. `node` holds it while it is leased, and can draw since `leased_at`; `author` answered it.
    `attempt` counts how often it failed or was withdrawn, `failures` how often it failed since its last answer.
    `leased_to` names all nodes that it was leased to, each with the last attempt. `measured`: so is the class of engine
    that holds or drew it. `episode` is the attempt under way, if the task has turns; `begun` is what was handed over of
    a completion."""

    seed: int
    attempt: int = 0
    leased_to: Bounded[NodeId, int] = field(default_factory=lambda: Bounded(MAX_LEASED_TO))
    node: NodeId | None = None
    leased_at: float = math.inf
    author: NodeId | None = None
    rollout: Rollout | None = None
    score: Score | None = None
    failures: int = 0
    failed_at: float = 0.0
    failed_by: set[NodeId] = field(default_factory=set)
    measured: bool = True
    episode: Episode | None = None
    begun: Rollout | None = None

    @property
    def waiting(self) -> bool:
        return self.node is None and self.rollout is None and not (self.episode and self.episode.thinking)

    @property
    def turn(self) -> int:
        """The number of the turn that is to be drawn, or the name of the tokens that a completion goes on from."""
        if self.episode is not None:
            return self.episode.turn
        return begun_name(self.begun.token_ids) if self.begun is not None else 0

    @property
    def is_settled(self) -> bool:
        """Whether it can be withdrawn: it has its score, or is an episode that waits for no answer."""
        return self.score is not None or (self.rollout is None and not (self.episode and self.episode.thinking))

    @property
    def is_begun(self) -> bool:
        """Whether its lease is to carry more than the group's prompt."""
        return self.begun is not None or (self.episode is not None and self.episode.begun)

    @property
    def oldest(self) -> int | None:
        """The version number of its oldest token so far."""
        drawn = self.rollout or self.begun
        if drawn is not None:
            return drawn.oldest
        return self.episode.oldest if self.episode else None

    @property
    def authors(self) -> set[NodeId]:
        """Who drew what it has so far."""
        drawn = self.rollout or self.begun
        drew = {NodeId(turn.node) for turn in drawn.turns_by(self.author or "")} if drawn else set()
        drew |= set(self.episode.nodes) if self.episode and self.rollout is None else set()
        return drew | ({self.author} if self.author is not None else set())

    def returns(self, credit: Credit, *, one_player: bool = False) -> tuple[float, tuple[float, ...]]:
        """Return what teaches of it: its reward, and what each player was given, or each turn with its credit."""
        assert self.rollout is not None
        assert self.score is not None
        turns, seats = self.rollout.turns, range(0 if one_player else len(self.rollout.seats))
        if credit == "turn":
            return self.score.reward, tuple(turn.reward for turn in turns)
        return self.score.reward, tuple(sum(turn.reward for turn in turns if turn.seat == seat) for seat in seats)


@dataclass(slots=True, kw_only=True)
class Group:
    """One prompt and its samples. `min_version` is the version that it was opened for, `bound` is S at that time, and
    `prompt_number` the prompt's in the task, of a training group.
    `answered` and `oldest_answer` (a version) summarise the samples' rollouts, and `waiting` counts the waiting
    samples. LeaseTable keeps them up to date."""

    group_id: GroupId
    order: int
    purpose: Purpose
    prompt: Prompt
    rules: SamplingRules
    min_version: VersionId
    bound: int
    prompt_number: int = -1
    episodes: EpisodeRules | None = None
    samples: list[Sample] = field(default_factory=list)
    answered: int = 0
    oldest_answer: int | None = None
    waiting: int = 0

    @property
    def oldest_version(self) -> int:
        """The version of the group's oldest token. While answers are missing, it is `min_version`, the lower bound."""
        if self.answered < len(self.samples) or self.oldest_answer is None:
            return self.min_version.version
        return self.oldest_answer

    @property
    def newest(self) -> int:
        """The newest version that drew any of its answers."""
        spans = (span for sample in self.samples if sample.rollout for span in sample.rollout.spans)
        return max((span.version.version for span in spans), default=0)

    @property
    def complete(self) -> bool:
        return all(sample.score is not None for sample in self.samples)

    @property
    def leased(self) -> int:
        return sum(sample.node is not None for sample in self.samples)

    @property
    def oldest_drawn(self) -> int | None:
        """The version of its oldest token so far."""
        return min((oldest for sample in self.samples if (oldest := sample.oldest) is not None), default=None)

    @property
    def is_under_way(self) -> bool:
        """Whether a node works on one of its samples, or an episode of it has begun."""
        return any(one.node is not None or (one.turn and one.rollout is None) for one in self.samples)

    @property
    def authors(self) -> Counter[NodeId]:
        """How many of the group's rollouts each node made."""
        return Counter(sample.author for sample in self.samples if sample.author is not None)

    @property
    def mean_tokens(self) -> float:
        """Mean length of the answers so far, a forecast for the others; 0 without any."""
        lengths = [sample.rollout.length for sample in self.samples if sample.rollout is not None]
        return sum(lengths) / len(lengths) if lengths else 0.0


class LeaseTable(Nodes):
    """The open groups, in the order in which their samples are handed out, and the nodes that hold samples."""

    def __init__(
        self, *, run_seed: int, beat_s: float, time_limit_s: float, unproven_held: int = UNPROVEN_HELD
    ) -> None:
        super().__init__(beat_s=beat_s, time_limit_s=time_limit_s, unproven_held=unproven_held)
        self._run_seed = run_seed
        self._groups: dict[GroupId, Group] = {}
        self._unfilled: list[Rank] = []  # Groups with waiting samples, in the order in which they are offered
        self._ranks: dict[GroupId, Rank] = {}
        self._ages: Counter[int] = Counter()
        self.is_late = False
        """Whether the learner has waited longer for its batch than for others to bind anybody."""
        self._attempts = 0
        self.chances = 0
        """Rises when a node that got nothing may now get something: a sample waits again, a node holds nothing any
        more, a group was dropped, a group is due later than it seemed, or the learner begins to wait."""

    def __len__(self) -> int:
        return len(self._groups)

    def groups(self) -> ValuesView[Group]:
        return self._groups.values()

    def attempts(self) -> list[str]:
        """Return the names of the episodes under way."""
        return [one.episode.name for group in self.groups() for one in group.samples if one.episode and not one.rollout]

    def group(self, group_id: str) -> Group | None:
        return self._groups.get(GroupId(group_id))

    def open(self, group: Group, size: int) -> Group:
        """Add a group, and `size` waiting samples to it."""
        name = group.group_id
        assert name not in self._groups
        group.samples = [Sample(seed=sample_seed(self._run_seed, name, i)) for i in range(size)]
        self._groups[name] = group
        self._age(group, 1)
        self._wait(group, size)
        for index in range(size):
            self._begin(group, index)
        return group

    def close(self, group: Group) -> None:
        """Remove a group, and take its samples from the nodes that hold them."""
        del self._groups[group.group_id]
        self._age(group, -1)
        due_later = group.oldest_version > group.min_version.version
        self.chances += group.purpose != "train" or not group.complete or due_later
        for index in range(len(group.samples)):
            self._take_back(group, index)
        self._rank(group)

    def reopen(self, group: Group) -> None:
        """Add a group again that was complete, before its samples are withdrawn."""
        self._groups[group.group_id] = group
        self._age(group, 1)

    def by_deadline(self, max_staleness: int) -> Counter[int]:
        """Count the open training groups by deadline."""
        return Counter({deadline(version, max_staleness): count for version, count in self._ages.items()})

    def claimable(self, held: VersionId) -> list[Group]:
        """Return the groups with waiting samples that a node with version `held` may work on: held-out prompts first,
        then the oldest version, then the longest answers so far."""
        return [self._groups[rank[-1]] for rank in self._unfilled if rank[1] <= held]

    def may_claim(self, group: Group, node: NodeId, *, now: float) -> bool:
        """Return whether a sample of `group` waits that `node` may have."""
        may = any(sample.waiting and self._may_try(node, sample, now) for sample in group.samples)
        return may and self._left_for(group, node) > 0

    def claim(self, group: Group, node: NodeId, capacity: int, *, now: float, max_tokens: int) -> list[Lease]:
        """Lease up to `capacity` waiting samples of `group` to `node`, which the table must know, with up to
        `max_tokens` of prompts and streams: in one lease all that have not begun, each other in its own."""
        most = max(0, min(capacity, self._left_for(group, node)))
        waiting = [i for i, one in enumerate(group.samples) if one.waiting and self._may_try(node, one, now)][:most]
        begun = [i for i in waiting if group.samples[i].is_begun]
        leases: list[Lease] = []
        for indices in ([i for i in waiting if i not in begun], *([i] for i in begun)):
            if indices and max_tokens > 0:
                leases.append(self._lease(group, indices, node, now))
                max_tokens -= tokens_of(leases[-1])
        return leases

    def restore(self, group: Group, leased: Sequence[RecordedLease], *, heard_at: float) -> None:
        """Take up the leases of before a restart, in their order. The last node of a sample holds it, as if it was
        heard at `heard_at`, unless its episode begins again."""
        for one in leased:
            sample = group.samples[one.index]
            sample.leased_to[one.node] = one.attempt
            sample.attempt = max(sample.attempt, one.attempt + (sample.episode is not None and not sample.turn))
            if sample.episode is not None:
                sample.episode.attempt = sample.attempt
        due = heard_at + self._longest_s(group.rules.max_new_tokens) + LEASE_SLACK_S
        for index, node in {one.index: one.node for one in leased}.items():
            if group.episodes is not None and not group.samples[index].turn:
                continue
            if group.samples[index].waiting and self.hear(node, now=heard_at):
                self._hold(group, index, node, due)

    def answer(self, group: Group, rollout: Rollout, node: NodeId) -> Rollout:
        """Take `rollout` as the answer to its sample, or the end of it, unless there is one already. Return it with
        what was handed over before."""
        sample = group.samples[rollout.index]
        if sample.rollout is not None:
            return sample.rollout
        self._end_wait(group, rollout.index)
        rollout, sample.begun = joined(sample.begun, rollout) if sample.begun is not None else rollout, None
        if not rollout.turns:
            self._credit(node, rollout.length)
        sample.rollout, sample.author = rollout, node
        sample.measured = node in self._nodes and self._nodes[node].measured
        oldest = rollout.oldest
        assert oldest is not None
        self._age(group, -1)
        group.answered += 1
        group.oldest_answer = oldest if group.oldest_answer is None else min(oldest, group.oldest_answer)
        self._age(group, 1)
        self._rank(group)
        return rollout

    def hand_over(self, group: Group, part: Rollout, node: NodeId) -> int:
        """Take a part of a completion that `node` has given up, and have others draw the rest. Return where it begins,
        in tokens."""
        sample = group.samples[part.index]
        start = sample.begun.length if sample.begun is not None else 0
        sample.begun = joined(sample.begun, part, node)
        sample.failures, sample.failed_by = 0, set()
        self.release(node, group.group_id, part.index)
        return start

    def take_turn(self, group: Group, rollout: Rollout, node: NodeId) -> Episode:
        """Take `rollout` as a turn of its sample's episode, which `node` holds from now on, even if it was thought
        silent. The episode thinks from now on."""
        sample, name = group.samples[rollout.index], (group.group_id, rollout.index)
        assert sample.episode is not None
        if sample.node != node:
            self._take_back(group, rollout.index)
            self._hold(group, rollout.index, node, math.inf)
        self._nodes[node].held[name] = sample.leased_at = math.inf  # Its environment has limits of its own
        self._credit(node, rollout.length)
        sample.episode.take(node, rollout)
        sample.failures, sample.failed_by = 0, set()  # Of the turn before: a long episode has a right to some
        return sample.episode

    def go_on(self, group: Group, index: int, *, now: float) -> None:
        """Let an episode go on, at its sampler if that is still here."""
        sample = group.samples[index]
        if sample.node is None:
            self._wait(group, 1)
            self.chances += 1
        else:
            due = now + self._limit_s(sample.node, group.rules.max_new_tokens) + LEASE_SLACK_S
            self._nodes[sample.node].held[group.group_id, index], sample.leased_at = due, now

    def withdraw(self, group: Group, index: int) -> None:
        """Have a sample drawn again from its seed, as if it had not been answered."""
        sample = group.samples[index]
        self._age(group, -1)
        self._take_back(group, index)
        sample.attempt += 1
        was_waiting = sample.waiting
        sample.rollout = sample.author = sample.score = sample.begun = None
        sample.measured = True
        answers = [one.rollout.oldest for one in group.samples if one.rollout is not None]
        group.answered = len(answers)
        group.oldest_answer = min((oldest for oldest in answers if oldest is not None), default=None)
        self._age(group, 1)
        self._rank(group)
        if sample.episode is not None:
            sample.episode.thinking = False
        if not was_waiting:
            self._wait(group, 1)
        self._begin(group, index)
        self.chances += 1

    def release(self, node: NodeId, group_id: str, index: int, *, wrong_at: float | None = None) -> None:
        """Put a sample back to waiting if `node` holds it. If the node failed it or did it wrong, at `wrong_at`, others
        have it first: else the node would ask before them and do so again, for ever."""
        if (group_id, index) not in self.held_by(node):
            return
        group = self._groups[GroupId(group_id)]
        if wrong_at is not None:
            self.put_off(node, group, index, now=wrong_at)
        self._take_back(group, index)
        self.chances += 1

    def keep(self, node: NodeId, holding: Collection[tuple[str, int]]) -> None:
        """Put back samples that `node` does not name: their lease got lost, or the node was restarted."""
        for group_id, index in [name for name in self.held_by(node) if name not in holding]:
            self.release(node, group_id, index)

    def fail(self, node: NodeId, group: Group, index: int, *, now: float) -> bool:
        """Put a sample that `node` failed back to waiting, for others first. Return True if enough nodes failed it."""
        sample = group.samples[index]
        sample.failures += 1
        sample.attempt += 1
        self.release(node, group.group_id, index, wrong_at=now)
        return len(sample.failed_by) >= FAILED_BY or self._all_failed(sample)

    def put_off(self, node: NodeId, group: Group, index: int, *, now: float) -> None:
        """Let others have a waiting sample before `node`, which did it wrong."""
        sample = group.samples[index]
        sample.failed_at = now
        sample.failed_by.add(node)

    def forget(self, node: NodeId) -> int:
        """Drop a node and put its samples back to waiting. Return how many there were."""
        held = [*self.held_by(node)]
        for group_id, index in held:
            self._take_back(self._groups[GroupId(group_id)], index)
        if (state := self._nodes.pop(node, None)) is not None:
            self._left[node] = state.caller
        return len(held)

    def take_silent(self, *, now: float) -> list[tuple[NodeId, int, float]]:
        """Forget the nodes that fell silent. Return each with the samples that it held, and as how many answers of mean
        length it can have drawn of them."""
        lost = {node: self._drawn_by(node, now) for node in self.silent(now=now)}
        return [(node, self.forget(node), lost[node]) for node in lost]

    def _drawn_by(self, node: NodeId, now: float) -> float:
        ages_s = [now - self._groups[GroupId(name)].samples[index].leased_at for name, index in self.held_by(node)]
        answer_s = self.answer_s(node)
        return sum(min(1.0, max(0.0, age_s / answer_s)) for age_s in ages_s) if answer_s else 0.0

    def take_overdue(self, *, now: float) -> list[tuple[NodeId, tuple[tuple[GroupId, int], ...]]]:
        """Put back samples past their time limit. Return the nodes that kept them, each with its samples."""
        taken: list[tuple[NodeId, tuple[tuple[GroupId, int], ...]]] = []
        for node, state in self._nodes.items():
            overdue = tuple(name for name, due in state.held.items() if due <= now)
            for group_id, index in overdue:
                self.release(node, group_id, index)
            if overdue:
                state.most = 1
                taken.append((node, overdue))
        return taken

    def _left_for(self, group: Group, node: NodeId) -> int:
        """Return how many samples of a training group `node` may have, whether they wait or not. Where a node of a
        measured class is here, all nodes of other classes together have UNMEASURED_SHARE of the group at most."""
        is_bound = not self._nodes[node].measured and not self.is_late and group.purpose == "train"
        # Not who only says that it is here, or was barred: such nodes hold nothing and gave nothing.
        if not is_bound or not any(one.measured and (one.held or one.answers) for one in self._nodes.values()):
            return len(group.samples)
        given = sum(not one.measured for one in group.samples)
        return max(0, max(1, int(UNMEASURED_SHARE * len(group.samples))) - given)

    def _may_try(self, node: NodeId, sample: Sample, now: float) -> bool:
        """Return whether `node` may have this waiting sample. It may not if it failed it lately and others have not."""
        pause_s = ALL_FAILED_RETRY_S if self._all_failed(sample) else RETRY_S
        return node not in sample.failed_by or now - sample.failed_at >= pause_s

    def _all_failed(self, sample: Sample) -> bool:
        return all(node in sample.failed_by for node in self._nodes)

    def _begin(self, group: Group, index: int) -> None:
        """Begin an attempt at a waiting sample's episode."""
        if group.episodes is None:
            return
        self._attempts += 1
        sample = group.samples[index]
        sample.episode = Episode(name=f"{group.group_id}/{index}.{self._attempts}", attempt=sample.attempt)
        if group.episodes.begins:
            sample.episode.thinking = True
            self._wait(group, -1)

    def _end_wait(self, group: Group, index: int) -> None:
        """Make a sample neither leased nor waiting."""
        self._take_back(group, index)
        if group.samples[index].waiting:
            self._wait(group, -1)

    def _lease(self, group: Group, indices: Sequence[int], node: NodeId, now: float) -> Lease:
        limit_s = self._limit_s(node, group.rules.max_new_tokens)
        specs = []
        for index in indices:
            sample = group.samples[index]
            sample.leased_to[node] = sample.attempt
            self._hold(group, index, node, now + limit_s + LEASE_SLACK_S)
            sample.leased_at = now
            specs.append(SampleSpec(index=index, seed=sample.seed, attempt=sample.attempt))
        episode, begun = group.samples[indices[0]].episode, group.samples[indices[0]].begun
        return Lease(
            purpose=group.purpose,
            group_id=group.group_id,
            prompt_token_ids=group.prompt.token_ids,
            samples=tuple(specs),
            rules=group.rules,
            min_version=group.min_version,
            time_limit_s=limit_s,
            episode=episode.progress(group.episodes) if episode is not None and group.episodes is not None else None,
            begun=begun.token_ids if begun is not None else b"",
        )

    def _hold(self, group: Group, index: int, node: NodeId, due: float) -> None:
        sample = group.samples[index]
        sample.node, sample.measured = node, self._nodes[node].measured
        self._wait(group, -1)
        self._nodes[node].held[group.group_id, index] = due

    def _take_back(self, group: Group, index: int) -> None:
        sample = group.samples[index]
        if sample.node is not None:
            held = self._nodes[sample.node].held
            held.pop((group.group_id, index), None)
            # A node that holds nothing may get samples that a node asking ahead may not.
            self.chances += not held
            sample.node, sample.measured = None, True
            if sample.waiting:
                self._wait(group, 1)

    def _wait(self, group: Group, samples: int) -> None:
        """Add `samples` (possibly negative) to the number of waiting samples of `group`."""
        group.waiting += samples
        if (group.waiting > 0) != (group.group_id in self._ranks):
            self._rank(group)

    def _rank(self, group: Group) -> None:
        """Put `group` in its place among those with waiting samples, if it has any: it was opened, filled or closed, or
        the mean length of its answers changed."""
        if (rank := self._ranks.pop(group.group_id, None)) is not None:
            del self._unfilled[bisect_left(self._unfilled, rank)]
        if group.waiting and group.group_id in self._groups:
            rank = group.purpose == "train", group.min_version, -group.mean_tokens, group.order, group.group_id
            self._ranks[group.group_id] = rank
            insort(self._unfilled, rank)

    def _age(self, group: Group, count: int) -> None:
        if group.purpose != "train":
            return
        self._ages[group.oldest_version] += count
        if not self._ages[group.oldest_version]:
            del self._ages[group.oldest_version]


@dataclass(slots=True, kw_only=True)
class Grant:
    """The leases that answer one question of `node`, while they are put together. It can take `capacity` more samples
    and begin `at_once` of them right away, and its answer has room for prompts of `tokens` more. `begun` are the groups
    that were opened for it."""

    table: LeaseTable
    node: NodeId
    now: float
    capacity: int
    at_once: int
    tokens: int = MAX_LEASED_TOKENS
    leases: list[Lease] = field(default_factory=list)
    records: list[GroupOpened | SamplesLeased] = field(default_factory=list)
    begun: list[Group] = field(default_factory=list)

    @property
    def samples(self) -> int:
        return sum(len(lease.samples) for lease in self.leases)

    def take(self, group: Group, most: int) -> int:
        """Lease up to `most` waiting samples of `group`. Return how many were leased."""
        leases = self.table.claim(
            group, self.node, max(0, min(most, self.capacity)), now=self.now, max_tokens=self.tokens
        )
        count = sum(len(lease.samples) for lease in leases)
        if group.purpose == "train":
            named = [tuple((spec.index, spec.attempt) for spec in lease.samples) for lease in leases]
            self.records += [SamplesLeased(number=group.order, node=self.node, samples=one) for one in named]
        self.leases += leases
        self.tokens -= sum(map(tokens_of, leases))
        self.capacity -= count
        self.at_once = max(0, self.at_once - count)
        return count

    def take_of(self, groups: Iterable[Group], most: int) -> None:
        for group in groups:
            if min(most, self.capacity) <= 0:
                break
            most -= self.take(group, most)


def sample_seed(run_seed: int, group_id: GroupId, index: int) -> int:
    """Return the seed of one sample: 63 bits that depend only on the run's seed, the group and the index."""
    return int.from_bytes(digest(f"{run_seed}/{group_id}/{index}".encode())[:8], "little") >> 1


def tokens_of(lease: Lease) -> int:
    """Return how many tokens a lease carries."""
    streams = lease.episode.streams if lease.episode is not None else ()
    return len(lease.prompt_token_ids) + sum(map(len, (lease.begun, *streams))) // 4
