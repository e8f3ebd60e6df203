"""The rollout plane under watch: every call is passed on, kept account of, and its outcome checked.

Theory of operation. `WatchedPlane` has the plane's methods. It keeps books of its own, from what goes in and what
comes out and never from the plane's tables or predicates, so that a mistake in those cannot hide itself:

    books     each open or ready group: who holds which sample, which rollouts were accepted, which are scored
    I1        a taken rollout's spans, read again, are no staler than the bound
    pacing    when a group is opened, the groups by deadline still fit into the batches to come
    leases    a sample is held by at most one node; only silence, its own word or an answer takes it away; a node on
              standby gets none for training; a lease goes on exactly where the last part was handed over
    episodes  a lease goes on after all that was drawn and said; a turn is on record before its sampler goes on; what is
              accepted is whole, from its first turn to its last
    dynamic   a group is replaced only if it is whole and all its rewards are equal, and for a batch no more than that
              has; else a whole one without variance is left only where as many were replaced
    I3        a rollout is accepted once, trained once, and else is in a group that was dropped for a true reason
    I4        the newest version and what a node holds only rise
    I5        the plane's sizes are those of the books, and under their caps
    I7        a patient learner discards nothing as stale unless a bound was lowered or a whole group's answer was
              refused; any other takes a batch as soon as it is ready
    liveness  there is a step or an evaluation within `stall_s` while a connected sampler lives and the learner works

A life of the learner ends with `close`, and the books are lost with it; `begin` writes them anew from what is on record
and goes on checking, so that whatever the plane forgot or made up in between is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from benchmarks.holding import HoldingPlane
from swarm.rollout.journal.entries import BatchTaken, GroupDropped, RolloutAccepted, RolloutReturned, TurnTaken
from swarm.rollout.messages import Refusal
from swarm.rollout.plane.effects import (
    Effect,
    Evaluated,
    Granted,
    Judged,
    LeaseOverdue,
    NodeSilent,
    StepWanted,
)
from swarm.rollout.plane.groups import Group
from swarm.rollout.plane.nodes import MISSED_BEATS
from swarm.rollout.plane.plane import MAX_FAILURES, RETURN_S
from swarm.types import Lease, NodeId, Observed, Prompt, Rollout, Score, VersionId
from tests.builders import answering
from tests.simulator.breach import InvariantBreach
from tests.simulator.rollouts.books import Books, Entry, Holding, followed, oldest_of
from tests.simulator.rollouts.ledger import Ledger
from tests.simulator.rollouts.scenario import Scenario, scenario_named
from tests.simulator.rollouts.task import stream

BATCHES_IN_HAND = 5
"""Batches of samples that one sampler may hold: queued, running, two answered, one being submitted."""

LIVES_IN_TABLE = 2
"""A sampler that came back may count twice: what its former life held is its own until three beats are missed."""


class WatchedPlane:
    """A RolloutPlane whose every call is checked. `now` is the virtual clock."""

    def __init__(self, scenario: Scenario, *, seed: int, clock: Callable[[], float]) -> None:
        self._plane: HoldingPlane | None = None
        self._scenario = scenario
        self._seed = seed
        self._clock = clock
        self._books = Books()
        self._trained: set[str] = set()
        self._heard_at: dict[NodeId, float] = {}
        self._held: dict[NodeId, VersionId] = {}
        self._newest: VersionId | None = None
        self._highest_bound = scenario.max_staleness
        self._due_sooner = False
        self._next_batch = 0
        self._rounds = 0
        self._round_open = 0
        self._standby: Mapping[NodeId, str] = {}
        self._paused = False
        self._accepted = 0
        self._dropped = 0
        self._replaced = 0
        self._progress_at = 0.0
        self.bound = scenario.max_staleness

    def begin(self, plane: HoldingPlane, ledger: Ledger, *, bound: int) -> list[Effect]:
        """A life of the learner begins, with what is on record."""
        self._plane = plane
        self.bound = bound
        run = ledger.run()
        self._next_batch, self._rounds, self._round_open = run.next_batch, 0, 0
        self._standby = {}
        self._paused = False
        self._books.begin(ledger, self._scenario.group_size, episodes=self._scenario.turns > 0)
        self._trained = {one.rollout.rollout_id for step in range(run.next_batch) for one in ledger.batch(step)}
        self._accepted, self._dropped, self._replaced = ledger.accepted(), ledger.dropped(), run.replaced
        self._heard_at = {}
        for node in (node for entry in self._books.groups.values() for node in entry.holders.values()):
            self._hear(node, RETURN_S)
        return self._settled(plane.restore(run, now=self._clock()))

    def close(self) -> None:
        """A life of the learner ends."""
        self._plane = None

    @property
    def open(self) -> bool:
        return self._plane is not None

    @property
    def next_batch(self) -> int:
        return self._next_batch

    @property
    def newest(self) -> VersionId | None:
        return None if self._plane is None else self._plane.newest

    @property
    def evaluating(self) -> bool:
        return self._live.round.open

    @property
    def _live(self) -> HoldingPlane:
        assert self._plane is not None
        return self._plane

    # -- what samplers do ------------------------------------------------------------------------------------

    def ask(self, node: NodeId, held: VersionId, capacity: int, holding: Holding | None) -> list[Effect]:
        self._hear(node)
        *records, answer = self._live.ask(node, held, capacity, now=self._clock(), holding=holding)
        idle = self._paused and isinstance(answer, Granted)
        self._require(not idle, "leases", f"{node} is given leases in a pause")
        if holding is not None:
            self._books.forget(node, keep=holding)
        if isinstance(answer, Granted):
            samples = sum(len(lease.samples) for lease in answer.leases)
            self._require(0 < samples <= capacity, "leases", f"{samples} samples for a capacity of {capacity}")
            for lease in answer.leases:
                self._leased(node, held, lease)
        return [*records, answer]

    def beat(self, node: NodeId, tokens_per_s: float) -> None:
        self._hear(node)
        self._live.beat(node, now=self._clock(), tokens_per_s=tokens_per_s)

    def submit(self, node: NodeId, lease: Lease, rollout: Rollout) -> list[Effect]:
        self._hear(node)
        answer, entry = answering(lease, rollout), self._books.groups.get(rollout.group_id)
        if self._live.is_taken(node, answer):
            known = entry is not None and len(entry.turns[rollout.index]) == answer.turn + 1
            self._require(known, "episodes", f"turn {answer.turn} of {rollout.rollout_id} was not taken")
            return []
        effects = self._live.submit(node, answer, now=self._clock())
        judged = effects[0]
        assert isinstance(judged, Judged)
        match judged.verdict:
            case "accepted":
                self._accept(entry, node, rollout, is_turn=lease.episode is not None)
            case "duplicate":
                self._require(self._books.is_known(node, lease, rollout), "I3", f"{rollout.rollout_id} is no duplicate")
                if self._books.is_current(lease, rollout):
                    self._books.let_go(node, rollout.group_id, rollout.index)
            case "stale":
                again = (
                    entry is not None and lease.episode is not None and answer.attempt < entry.attempts[rollout.index]
                )
                stale = again or (rollout.finish != "failed" and self._late(oldest_of(rollout)))
                self._require(stale, "I3", f"{rollout.rollout_id} is fresh, yet is called stale")
                lowered = entry is not None and self._next_batch - oldest_of(rollout) <= entry.bound
                lowered = lowered and self._late(oldest_of(rollout))
                self._require(
                    (judged.counted_as == "bound_lowered") is lowered,
                    "I3",
                    f"{rollout.rollout_id} is stale for another reason",
                )
                self._require(again or lowered or self._may_waste, "I7", f"{rollout.rollout_id} is stale")
                if self._books.is_current(lease, rollout):
                    self._books.let_go(node, rollout.group_id, rollout.index)
            case _:
                self.breach("I3", f"the honest rollout {rollout.rollout_id} is called {judged.verdict}")
        return self._settled(effects)

    def next_of(self, node: NodeId, lease: Lease, rollout: Rollout) -> Observed | None:
        return self._live.next_of(node, answering(lease, rollout))

    def observed(self, wanted: StepWanted, said: Observed) -> list[Effect]:
        index, entry = wanted.index, self._books.groups.get(wanted.group_id)
        effects = self._live.observed(wanted.group_id, index, wanted.episode, said, now=self._clock())
        if entry is None or len(entry.turns[index]) != len(wanted.drawn) or entry.said[index] == len(wanted.drawn):
            self._require(not effects, "episodes", f"{wanted.episode} goes on though it was given up")
            return []
        entry.said[index] += 1
        if said.done:
            self._played(entry, wanted, [effect.rollout for effect in effects if isinstance(effect, RolloutAccepted)])
        elif entry.purpose == "train":
            on_record = any(isinstance(one, TurnTaken) and one.turn + 1 == entry.said[index] for one in effects)
            self._require(on_record, "episodes", f"turn {entry.said[index]} of {wanted.episode} is not recorded")
        return self._settled(effects)

    def release(self, node: NodeId, group_id: str, index: int) -> None:
        self._hear(node)
        self._live.release(node, group_id, index, now=self._clock())
        self._books.let_go(node, group_id, index)

    def leave(self, node: NodeId) -> None:
        self._live.leave(node)
        self._heard_at.pop(node, None)
        self._books.forget(node)

    def tick(self) -> list[Effect]:
        return self._settled(self._live.tick(now=self._clock()))

    def deadline(self) -> float | None:
        return self._live.deadline()

    # -- what the learner does -------------------------------------------------------------------------------

    def published(self, version: VersionId) -> None:
        self._require(self._newest is None or version >= self._newest, "I4", f"newest fell to {version}")
        self._live.published(version)

    def scored(self, group_id: str, index: int, score: Score) -> list[Effect]:
        entry = self._books.groups.get(group_id)
        effects = self._live.scored(group_id, index, score)
        if entry is not None:
            entry.scored[index] = score.reward
            if entry.ready and entry.purpose == "eval":
                self._books.close(group_id)
        settled = self._settled(effects)
        if self._scenario.dynamic_sampling and group_id in self._books.groups and entry is not None and entry.ready:
            enough = self._replaced >= self._scenario.groups_per_step
            self._require(not entry.flat or enough, "dynamic", f"{group_id} has no variance and was kept")
        return settled

    def refused(self, group_id: str, index: int) -> list[Effect]:
        entry = self._books.groups.get(group_id)
        self._due_sooner = self._due_sooner or (entry is not None and entry.oldest > entry.born)
        self._books.refuse(group_id, index)
        return self._settled(self._live.refused(group_id, index, now=self._clock()))

    def can_take(self) -> bool:
        ready = sum(e.ready and e.purpose == "train" and not self._late(e.oldest) for e in self._books.groups.values())
        may = self._live.can_take(now=self._clock())
        if self._paused:
            self._require(not may, "pause", "a batch may be taken in a pause")
            ready = 0
        waits = ready >= self._scenario.groups_per_step and not may
        self._require(self._scenario.patient or not waits, "I7", "a batch is ready and is not taken")
        return may

    def take(self) -> tuple[list[Group], list[Effect]]:
        due = {name: self._due(e) for name, e in self._books.groups.items() if e.purpose == "train" and e.ready}
        batch, effects = self._live.take()
        numbers = tuple(group.order for group in batch)
        taken = BatchTaken(step=self._next_batch, max_staleness=self.bound, numbers=numbers)
        self._require(effects[0] == taken, "I3", f"batch {self._next_batch} is recorded as {effects[0]}")
        size = self._scenario.groups_per_step
        self._require(len(batch) == size, "I3", f"batch {self._next_batch} has {len(batch)} groups")
        for group in batch:
            self._train(group)
        last = max(due.pop(group.group_id) for group in batch)
        passed_over = [other for other in due.values() if self._next_batch <= other < last]
        self._require(not passed_over, "pacing", f"due by {last} was taken before {passed_over[:1]}")
        self._next_batch += 1
        self._replaced = 0
        self._progress_at = self._clock()
        return batch, self._settled(effects)

    def set_bound(self, max_staleness: int) -> list[Effect]:
        self._due_sooner = self._due_sooner or max_staleness < self.bound
        self.bound = max_staleness
        self._highest_bound = max(self._highest_bound, max_staleness)
        return self._settled(self._live.set_bound(max_staleness))

    def pause(self, paused: bool) -> None:
        self._paused = paused
        self._live.pause(paused)

    def evaluate(self, version: VersionId, prompts: Sequence[Prompt]) -> None:
        self._live.evaluate(version, prompts)
        self._rounds += 1
        self._round_open = len(prompts)
        for i in range(len(prompts)):
            name = f"e{self._live.rules.life}.{self._rounds}-{i}"
            self._books.groups[name] = Entry(purpose="eval", born=version.version, bound=self.bound, size=1)

    def set_standby(self, nodes: Mapping[NodeId, str]) -> None:
        self._standby = nodes
        self._live.set_standby(nodes)

    def end(self, reason: Refusal) -> None:
        self._live.end(reason)

    # -- after every event -----------------------------------------------------------------------------------

    def check(self, held: Sequence[tuple[NodeId, VersionId | None]], *, connected: bool) -> None:
        """`held`: every live sampler and its installed version; `connected`: no partition stands, the learner works.
        Nobody has to make progress while all of them are on standby."""
        self._check_versions(held)
        if self._plane is not None:
            self._check_sizes()
        if not connected or all(node in self._standby for node, _ in held):
            self._progress_at = self._clock()
        idle_s = self._clock() - self._progress_at
        limit_s = self._scenario.stall_s
        self._require(idle_s <= limit_s, "liveness", f"no step and no evaluation for {limit_s:.0f} s")

    def settle(self, ledger: Ledger) -> None:
        """At the end: every accepted rollout was trained on, or is accounted for, here as on record (I3)."""
        recorded = {f"t{group.number}": group for group in ledger.run().groups}
        books = {name: entry for name, entry in self._books.groups.items() if entry.purpose == "train"}
        self._require(recorded.keys() == books.keys(), "I3", "other groups are open than on record")
        for name, entry in books.items():
            found = {one.rollout.index: one.rollout for one in recorded[name].rollouts}
            self._require(found == entry.rollouts, "I3", f"{name} has other rollouts than on record")
        left = sum(len(e.rollouts) for e in self._books.groups.values() if e.purpose == "train")
        total = len(self._trained) + self._dropped + left
        self._require(
            self._accepted == total,
            "I3",
            f"{self._accepted} accepted, but {len(self._trained)} trained, {self._dropped} dropped, {left} left",
        )

    def _check_versions(self, held: Sequence[tuple[NodeId, VersionId | None]]) -> None:
        newest = self.newest
        if newest is not None:
            self._require(self._newest is None or newest >= self._newest, "I4", f"newest fell to {newest}")
            self._newest = newest
        for node, version in held:
            known = self._held.get(node)
            if version is not None and version != known:
                self._require(known is None or version > known, "I4", f"{node} fell from {known} to {version}")
                self._held[node] = version

    def _check_sizes(self) -> None:
        scenario, counts = self._scenario, self._live.counts()
        ready = sum(entry.ready for entry in self._books.groups.values())
        leased = sum(len(entry.holders) for entry in self._books.groups.values())
        books = {"groups_open": len(self._books.groups) - ready, "groups_ready": ready, "samples_leased": leased}
        for name, count in books.items():
            self._require(counts[name] == count, "I5", f"the plane has {name} {counts[name]}, the books {count}")
        in_hand = scenario.samplers * LIVES_IN_TABLE * BATCHES_IN_HAND * scenario.capacity
        paced = (self._highest_bound + 1) * scenario.groups_per_step
        cap = paced + in_hand + scenario.eval_prompts
        self._require(
            len(self._books.groups) <= cap, "I5", f"{len(self._books.groups)} groups are over the cap of {cap}"
        )
        self._require(leased <= in_hand, "I5", f"{leased} leased samples are over the cap of {in_hand}")
        self._require(counts["nodes"] <= scenario.samplers, "I5", f"{counts['nodes']} nodes")

    # -- the books -------------------------------------------------------------------------------------------

    def _leased(self, node: NodeId, held: VersionId, lease: Lease) -> None:
        what = f"{lease.group_id} for {node}"
        self._require(lease.min_version <= held, "leases", f"{what} needs {lease.min_version}, it holds {held}")
        idle = lease.purpose == "train" and node in self._standby
        self._require(not idle, "leases", f"{what}, which is on standby")
        entry = self._books.groups.get(lease.group_id)
        if entry is None:
            self._require(
                lease.purpose == "train" and lease.group_id not in self._books.closed, "leases", f"{what} is closed"
            )
            born = lease.min_version.version
            entry = Entry(purpose="train", born=born, bound=self.bound, size=self._scenario.group_size)
            self._books.groups[lease.group_id] = entry
            self._paced(self._due(entry))
        if entry.purpose == "train":
            oldest = entry.oldest if lease.episode is None else entry.oldest_drawn
            fresh = not self._late(held.version) and not self._late(oldest)
            self._require(fresh, "leases", f"{what} could be in no batch from {self._next_batch} on")
        for spec in lease.samples:
            free = spec.index not in entry.holders and spec.index not in entry.rollouts
            self._require(free, "leases", f"sample {spec.index} of {what} is held or answered")
            begun = self._books.begun_of(entry, spec.index)
            self._require(
                lease.begun == begun, "leases", f"sample {spec.index} of {what} does not go on from {begun!r}"
            )
            if lease.episode is not None:
                turn, streams = entry.said[spec.index], b"".join(lease.episode.streams)
                whole = turn == lease.episode.turn == len(entry.turns[spec.index])
                whole &= streams == stream(lease.group_id, spec.index, turn)
                self._require(whole, "episodes", f"sample {spec.index} of {what} does not go on from turn {turn}")
            entry.holders[spec.index] = node

    def _paced(self, due: int) -> None:
        """The pacing rule, after a group due by `due` was opened."""
        n, per_step = self._next_batch, self._scenario.groups_per_step
        deadlines = [self._due(e) for e in self._books.groups.values() if e.purpose == "train"]
        self._require(due >= n, "pacing", f"a group due by {due} was opened before batch {n}")
        for d in range(due, max(deadlines) + 1):
            count = sum(n <= other <= d for other in deadlines)
            # An eighth of a batch may be opened beyond it, where batches never wait.
            room = (d - n + 1) * per_step + (per_step // 8 if not self._scenario.patient else 0)
            self._require(count <= room, "pacing", f"{count} groups due in {n}..{d}, room for {room}")

    def _accept(self, entry: Entry | None, node: NodeId, rollout: Rollout, *, is_turn: bool) -> None:
        if entry is None:
            self.breach("I3", f"{rollout.rollout_id} was accepted though its group is closed")
        if rollout.finish == "failed":
            self._require(entry.holders.get(rollout.index) == node, "I3", f"{rollout.rollout_id} failed twice over")
            entry.failures[rollout.index] += 1
            entry.attempts[rollout.index] += 1
            del entry.holders[rollout.index]
            return
        if rollout.finish == "handed":
            self._require(entry.holders.get(rollout.index) == node, "I3", f"{rollout.rollout_id} was not {node}'s")
            entry.begun[rollout.index] = followed(entry.begun.get(rollout.index), rollout, node)
            del entry.holders[rollout.index]
            return
        self._require(rollout.index not in entry.rollouts, "I3", f"{rollout.rollout_id} was accepted twice")
        rollout = followed(entry.begun.pop(rollout.index, None), rollout)
        late = entry.purpose == "train" and self._late(oldest_of(rollout))
        self._require(not late, "I1", f"{rollout.rollout_id} was accepted though it is stale")
        if is_turn:
            entry.turns[rollout.index].append((node, rollout))
            entry.holders[rollout.index] = node
            return
        entry.holders.pop(rollout.index, None)
        entry.rollouts[rollout.index] = rollout
        self._accepted += entry.purpose == "train"

    def _played(self, entry: Entry, wanted: StepWanted, accepted: Sequence[Rollout]) -> None:
        """An episode has ended: of a training group it is one rollout, which is scored."""
        turns = entry.turns.pop(wanted.index)
        entry.holders.pop(wanted.index, None)
        entry.scored[wanted.index] = len(turns)
        if entry.purpose == "eval":
            self._books.close(wanted.group_id)
            return
        (whole,) = accepted
        drew = [node for node, _ in turns]
        tokens = stream(wanted.group_id, wanted.index, len(turns))
        is_whole = whole.token_ids == tokens and [turn.node for turn in whole.turns] == drew
        is_whole &= oldest_of(whole) == min(oldest_of(turn) for _, turn in turns)
        self._require(is_whole, "episodes", f"{whole.rollout_id} is not what was drawn and said")
        entry.rollouts[wanted.index] = whole
        self._accepted += 1

    def _train(self, group: Group) -> None:
        entry = self._books.groups.get(group.group_id)
        if entry is None or not entry.ready or entry.purpose != "train":
            self.breach("I3", f"{group.group_id} is in batch {self._next_batch} but is not ready")
        for index, sample in enumerate(group.samples):
            rollout = sample.rollout
            if rollout is None or rollout != entry.rollouts.get(index):
                self.breach("I3", f"sample {index} of {group.group_id} is not what was accepted")
            age = self._next_batch - oldest_of(rollout)
            self._require(
                age <= self.bound, "I1", f"{rollout.rollout_id} in batch {self._next_batch} has staleness {age}"
            )
            self._require(rollout.rollout_id not in self._trained, "I3", f"{rollout.rollout_id} was trained twice")
            self._trained.add(rollout.rollout_id)
        self._books.close(group.group_id)

    def _settled(self, effects: list[Effect]) -> list[Effect]:
        """Enter effects into the books."""
        for effect in effects:
            match effect:
                case GroupDropped():
                    self._drop(effect)
                case RolloutReturned():
                    known = self._books.take_back(f"t{effect.number}", effect.index)
                    self._require(known, "I3", f"t{effect.number}/{effect.index} was returned, but does not wait")
                    self._accepted -= 1
                case NodeSilent():
                    silent_s = self._clock() - self._heard_at.pop(effect.node)
                    due = silent_s >= MISSED_BEATS * self._scenario.beat_s
                    self._require(due, "leases", f"{effect.node} was called silent after {silent_s:.3f} s")
                    lost = self._books.forget(effect.node)
                    self._require(lost == effect.samples, "leases", f"{effect.node} lost {effect.samples}, not {lost}")
                case LeaseOverdue():
                    for group_id, index in effect.samples:
                        held = self._books.let_go(effect.node, group_id, index)
                        self._require(held, "leases", f"{effect.node} lost {group_id}/{index}, which it did not hold")
                case Evaluated():
                    complete = len(effect.scores) == self._round_open
                    closed = all(entry.purpose == "train" for entry in self._books.groups.values())
                    self._require(complete and closed, "I3", "an evaluation ended before its prompts were answered")
                    self._progress_at = self._clock()
                case _:
                    pass
        return effects

    def _drop(self, effect: GroupDropped) -> None:
        entry = self._books.groups.get(effect.group_id)
        if entry is None:
            self.breach("I3", f"{effect.group_id} was dropped but is not in the plane")
        late = entry.purpose == "train" and self._late(entry.oldest)
        lowered = self._next_batch - entry.oldest <= entry.bound
        true_reason = {
            "stale": late and not lowered,
            "bound_lowered": late and lowered,
            "generation_failed": max(entry.failures.values(), default=0) >= MAX_FAILURES,
            "no_variance": self._scenario.dynamic_sampling and entry.ready and entry.flat and not late,
        }
        self._require(
            true_reason.get(effect.reason, False), "I3", f"{effect.group_id} was dropped, but is not {effect.reason}"
        )
        self._require(effect.reason != "stale" or self._may_waste, "I7", f"{effect.group_id} is stale")
        self._replaced += effect.reason == "no_variance"
        most = self._scenario.groups_per_step
        self._require(self._replaced <= most, "dynamic", f"{self._replaced} groups were replaced for a batch of {most}")
        count = len(entry.rollouts)
        self._require(effect.rollouts == count, "I3", f"{effect.group_id} had {count}, not {effect.rollouts} rollouts")
        self._dropped += count if entry.purpose == "train" else 0
        self._books.close(effect.group_id)

    def _due(self, entry: Entry) -> int:
        return entry.oldest + self.bound

    def _late(self, version: int) -> bool:
        return self._next_batch - version > self.bound

    @property
    def _may_waste(self) -> bool:
        """True unless pacing is to keep the bound by itself. What is due sooner since S was lowered, or since its group
        lacks an answer again, is not waited for."""
        return self._due_sooner or not self._scenario.patient

    def _hear(self, node: NodeId, later_s: float = 0.0) -> None:
        self._heard_at[node] = max(self._heard_at.get(node, 0.0), self._clock() + later_s)

    def _require(self, holds: bool, rule: str, what: str) -> None:
        if not holds:
            self.breach(rule, what)

    def breach(self, rule: str, what: str, cause: Exception | None = None) -> NoReturn:
        scenario, seed = self._scenario, self._seed
        replay = f"bin/python -m tests.simulator --seed {seed} --scenario {scenario.name}"
        if scenario.crashes != scenario_named(scenario.name, seed).crashes:
            replay += f" --crash-at {','.join(map(str, scenario.crashes))}"
        raise InvariantBreach(rule, what, replay=replay, now=self._clock()) from cause
