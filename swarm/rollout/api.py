"""The learner's HTTP interface to the rollout plane. It performs the plane's effects and holds lease requests open.

The order matters: the learner replies only after everything the reply rests on is committed to the journal. So a
sampler never holds a lease on a group that the learner could forget, and never hears "accepted" for a rollout that
could be lost. If the commit takes too long, the reply is a 503. The sampler then submits again, and is told that the
rollout is a duplicate if the first submission was recorded.

Intake refuses submissions before their bodies are read. Small bodies are opened on the event loop, large ones in a
thread, one at a time, so at most one large body is unpacked in memory.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from aiohttp import web

from swarm.aio import Changes
from swarm.errors import EchoError
from swarm.net.client import Crowded, Forbidden, binary, read_signed
from swarm.net.hosts import caller_of, is_loopback
from swarm.net.sessions import AUTH_HEADER, ServerSessions
from swarm.rollout.ahead import PromptsAhead
from swarm.rollout.intake import TEXTS, Body, Claimed, Intake, is_small, open_submission
from swarm.rollout.journal.entries import GroupDropped, Record, RolloutScored
from swarm.rollout.journal.journal import Journal
from swarm.rollout.messages import (
    WHY_LENGTH,
    Beat,
    BeatReply,
    LeaseReply,
    LeaseRequest,
    Refusal,
    Release,
    StepReply,
)
from swarm.rollout.plane.effects import (
    Answered,
    AuditResult,
    Effect,
    Evaluated,
    GenerationFailed,
    Granted,
    Judged,
    LeaseOverdue,
    NodeSilent,
    Refused,
    ScoreWanted,
    StepWanted,
)
from swarm.rollout.plane.groups import Group, Sample
from swarm.rollout.plane.nodes import MAX_NODES
from swarm.rollout.plane.plane import RETURN_S, RolloutPlane
from swarm.rollout.scoring import RewardFailures, Scorer, Scoring, Stepper
from swarm.rollout.stepping import Stepping, stepped, within
from swarm.rollout.tally import Recent, SamplerStats, SamplerWatch, Tally
from swarm.types import (
    GroupId,
    NodeId,
    Observed,
    Prompt,
    Rollout,
    SamplingRules,
    Score,
    Unscored,
    VersionId,
)
from swarm.wire import CONTROL_BODY_BYTES, ROLLOUT_BODY_BYTES, decode, encode

MAX_WAIT_S = 20.0  # Longest time that a request for leases is held open
SLOW_COMMIT = "the learner has not yet recorded this: come again"

COMMIT_S = 8.0
"""How long a reply waits for the journal. Together with the longest time for a body (client.MAX_BODY_S) it is less
than the time limit of the sampler's call (client.CALL_S), so the sampler hears the reason for the delay."""

MAX_ROUNDS = 3  # Held-out rounds in a row in which somebody was caught
QUESTION_S = 120.0  # A long answer of a slow engine; who asked has lost patience by then


class BatchAuditor(Protocol):
    """Audits a batch before it is taken (audit/auditing.py)."""

    def is_measured(self, node: NodeId) -> bool: ...

    def select(self, batch: Sequence[Group]) -> Sequence[Any]: ...

    async def audit(self, chosen: Sequence[Any]) -> AuditResult: ...

    async def is_genuine(self, group: Group, sample: Sample) -> tuple[bool | None, AuditResult]: ...

    def fault_of(self, node: NodeId) -> str: ...

    def forgive(self, node: NodeId, why: str) -> bool: ...


class RolloutService:
    """The plane on an event loop. `sessions` identify the sender, `emit(kind, **fields)` writes an event, `watch` is
    told about samplers, `heard` of each beat and why its sender is idle. `absent` are the samplers that the learner had
    before its restart."""

    def __init__(
        self,
        *,
        sessions: ServerSessions,
        journal: Journal,
        emit: Callable[..., None],
        watch: SamplerWatch | None = None,
        heard: Callable[[NodeId, Beat, str], None] = lambda node, beat, idle: None,
        prompts: PromptsAhead | None = None,
        absent: Collection[NodeId] = (),
    ) -> None:
        self._sessions = sessions
        self._journal = journal
        self._emit = emit
        self._watch = watch or SamplerWatch()
        self._heard = heard
        self._prompts = prompts
        self._plane: RolloutPlane | None = None
        self._auditor: BatchAuditor | None = None
        self._caught: set[NodeId] = set()  # During the held-out round under way; they may be forgiven before it ends
        self._scoring: Scoring | None = None
        self._stepper: Stepper | None = None
        self.failures = RewardFailures(emit)
        self._journal_error: EchoError | None = None
        self._intake = Intake()
        self._unpacking = asyncio.Lock()
        self._stepping = Stepping()
        self._chances, self._ready, self._told = Changes(), Changes(), 0
        self._evaluated: asyncio.Future[Evaluated] | None = None
        self._questions: dict[GroupId, asyncio.Future[Rollout | None]] = {}
        self._absent = set(absent)
        self.tally = Tally()
        self.samplers = self.tally.samplers
        self.finished = False

    def open(
        self,
        plane: RolloutPlane,
        scorer: Scorer,
        effects: Sequence[Effect] = (),
        stepper: Stepper | None = None,
        processes: int = 1,
        auditor: BatchAuditor | None = None,
    ) -> None:
        """Begin to serve `plane`; until now samplers were told to wait. `effects` came from restoring the plane.
        Episodes need a `stepper`. `auditor` audits what a batch would be before it is taken, and answers on which one
        of the reward `processes` failed."""
        self._plane = plane
        self._auditor = auditor
        self._scoring = Scoring(
            scorer,
            processes,
            self._genuine,
            self.samplers,
            is_open=lambda group_id: plane.leased.group(group_id) is not None,
            scored=self._scored,
        )
        self._stepper = stepper
        if plane.next_batch:  # The reward has worked in an earlier life
            self.failures.scored_at = time.monotonic()
        self.tally.begin(now=time.monotonic())
        for node in self.samplers:
            plane.beat(node, now=time.monotonic())
        for node in plane.barred:
            self._watch.gone(node, vanished=False)
        self._perform(effects)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/leases", self._post_leases),
            web.post("/v1/beat", self._post_beat),
            web.post("/v1/steps", self._post_steps),
            web.post("/v1/release", self._post_release),
        ]

    # -- for the learner's loop ------------------------------------------------------------------------------

    async def published(self, version: VersionId) -> None:
        self._opened.published(version)
        self._chances.tell()

    async def next_batch(self) -> list[Group]:
        """Wait for the next batch and return it once the journal has recorded it. What it would be is audited before:
        the samplers that are caught are barred, and others draw what they gave."""
        plane = self._opened
        while True:
            await self._until_full()
            if self._auditor is None or not (chosen := self._auditor.select(plane.full_batch())):
                break
            found = await self._audited(chosen)
            if records := plane.correct(found.recomputed):
                self._journal.enqueue(records)
        batch, effects = plane.take()
        self._perform(effects)
        # While the disk is full, this wait keeps the trainer waiting too.
        await self._journal.write(())
        self._chances.tell()
        return batch

    async def _audited(self, chosen: Sequence[Any]) -> AuditResult:
        assert self._auditor is not None
        found = await self._auditor.audit(chosen)
        self._bar_all(found)
        return found

    def _bar_all(self, found: AuditResult) -> None:
        for node, why in found.caught.items():
            self._caught.add(node)
            self.bar(node, why)

    async def _genuine(self, asked: ScoreWanted) -> bool | None:
        group = self._opened.leased.group(asked.group_id)
        if self._auditor is None or group is None:
            return None
        genuine, found = await self._auditor.is_genuine(group, group.samples[asked.index])
        self._bar_all(found)
        return genuine

    async def _until_full(self) -> None:
        while True:
            seen = self._ready.count
            if self._opened.can_take(now=time.monotonic()):
                return
            self._tell_chances()
            await self._ready.wait(seen, None)

    @property
    def taken(self) -> int:
        """How many batches were taken, which is the number of the next one."""
        return self._opened.next_batch

    @property
    def barred(self) -> Mapping[NodeId, str]:
        return self._opened.barred

    def bar(self, node: NodeId, why: str) -> None:
        """Give a sampler nothing more, and have others draw what it gave that is not yet in a batch."""
        self._watch.gone(node, vanished=False)
        self._perform(self._opened.bar(node, why[:WHY_LENGTH]))

    def unbar(self, node: NodeId) -> None:
        """Take rollouts of a sampler again that was barred."""
        self._opened.unbar(node)
        self._chances.tell()

    def pause(self, paused: bool) -> None:
        """While `paused`, give no leases and take no batch. Samplers whose requests are held open hear of the end."""
        self._opened.pause(paused)
        self._ready.tell()
        self._chances.tell()

    async def set_bound(self, max_staleness: int) -> None:
        """Change S from the next batch on."""
        self._perform(self._opened.set_bound(max_staleness))
        self._ready.tell()
        self._chances.tell()

    def set_standby(self, nodes: Mapping[NodeId, str]) -> None:
        """Put these nodes on standby, and tell them why. All others are active."""
        others = nodes.keys() != self._opened.standby.keys()
        self._opened.set_standby({node: why[:WHY_LENGTH] for node, why in nodes.items()})
        if others:
            self._chances.tell()

    async def ask(self, token_ids: Sequence[int], rules: SamplingRules) -> Rollout:
        """Have any sampler answer with its newest policy, outside of the run. Raise EchoError after QUESTION_S."""
        prompt = Prompt(prompt_id="question", text="", answer="", token_ids=tuple(token_ids))
        name = self._plane.question(prompt, rules) if self._plane is not None else None
        if name is None:
            raise EchoError(
                "the run has published nothing yet, pauses or ends, or too many questions wait: ask again later"
            )
        answer: asyncio.Future[Rollout | None]
        answer = self._questions[name] = asyncio.get_running_loop().create_future()
        self._tell_chances()
        try:
            async with asyncio.timeout(QUESTION_S):
                rollout = await answer
        except TimeoutError as late:
            raise EchoError("no sampler has answered: `echo-node status` shows who is here") from late
        finally:
            del self._questions[name]
            self._opened.forget_question(name)
        if rollout is None:
            raise EchoError("the samplers' engines do not draw this: ask with another temperature, or for fewer tokens")
        return rollout

    async def evaluate(self, version: VersionId, prompts: Sequence[Prompt]) -> Evaluated:
        """Begin a held-out round for samplers that hold `version` or a newer one, and wait for the scores. Part of the
        answers is audited; if a sampler is caught that gave any, the round is drawn again by others."""
        for _ in range(MAX_ROUNDS):
            self._caught = set()
            self._evaluated = asyncio.get_running_loop().create_future()
            self._perform(self._opened.evaluate(version, prompts))
            self._chances.tell()
            done = await self._evaluated
            if self._auditor is None:
                return done
            found = await self._audited(self._auditor.select(done.groups))
            done = replace(done, unaudited=bool(found.unaudited))
            authors = {node for group in done.groups for sample in group.samples for node in sample.authors}
            if not authors & (self.barred.keys() | self._caught):
                return done
        return replace(done, unaudited=True)

    async def end(self, reason: Refusal) -> None:
        self._opened.end(reason)
        self.finished = reason == "finished"
        self._chances.tell()

    async def farewell(self, patience_s: float) -> None:
        """Wait until every sampler has heard that the run is over and has left, or fell silent. A sampler that has not
        come back since the learner's restart may be in a long pause between two tries."""
        until = time.monotonic() + (max(patience_s, RETURN_S) if self._absent else patience_s)
        while (self.samplers or self._absent) and (left := until - time.monotonic()) > 0:
            await self._chances.wait(self._chances.count, left)

    async def watch_silence(self) -> None:
        """Put back overdue samples and those of silent nodes until cancelled. Raise errors of scoring or recording."""
        while (fault := self._broken) is None:
            due = self._plane.deadline() if self._plane else None
            await asyncio.sleep(1.0 if due is None else min(1.0, max(0.05, due - time.monotonic())))
            if self._plane:
                self._perform(effects := self._plane.tick(now=time.monotonic()))
                if effects:
                    self._chances.tell()
        raise fault

    def age(self, *, mean_staleness: float, broadcast_steps: float) -> dict[str, Any]:
        """Return figures of a step: the aim of pacing, and what makes the last batch as old as it is."""
        return self._opened.age(mean_staleness=mean_staleness, broadcast_steps=broadcast_steps)

    def status(self) -> dict[str, Any]:
        """Return samplers, verdicts and sizes for `status`."""
        return {
            **self.tally.status(now=time.monotonic(), why_idle=self._why_idle, is_barred=self._is_barred),
            **(self._plane.counts() if self._plane else {}),
            "rollouts_unscored": self._scoring.waiting if self._scoring else 0,
            "reward_s": round(self._scoring.took_s, 4) if self._scoring else 0.0,
            **self._intake.counts(),
        }

    # -- handlers --------------------------------------------------------------------------------------------

    async def _post_leases(self, request: web.Request) -> web.Response:
        node, body = await read_signed(request, CONTROL_BODY_BYTES, self._sessions)
        ask = decode(body, LeaseRequest, cap_bytes=CONTROL_BODY_BYTES)
        self._check_sender(node, ask.node)
        stats = self._hear(node, request.remote)
        if self._plane is None or self._is_ahead(ask.held):
            return _refuse("starting", 1.0)
        self._installed(node, ask.held)
        self.tally.runs(node, ask.engine)
        stats.questions += 1
        question = stats.questions
        until = (asked_at := time.monotonic()) + min(ask.wait_s, MAX_WAIT_S)
        holding: set[tuple[str, int]] | None = {(group.group_id, i) for group in ask.holding for i in group.indices}
        measured = self._auditor is None or self._auditor.is_measured(node)
        # A node that left, fell silent or asked again does not hear this reply, so leases in it would be lost.
        while self.samplers.get(node) is stats and stats.questions == question:
            seen = self._chances.count
            left = until - time.monotonic()
            if self._journal.fault:
                return _come_back(self._journal.fault)  # Open no group that cannot be recorded.
            if self._prompts and not self._prompts.has(-(-ask.capacity // self._plane.rules.group_size)):
                if left <= 0:
                    break
                await self._prompts.wait(left)
                continue
            # A beat may have reported a newer install while this request was held open.
            held = max(ask.held, stats.installed or ask.held)
            *records, answer = self._plane.ask(
                node, held, ask.capacity, now=asked_at, at_once=ask.at_once, holding=holding, measured=measured
            )
            holding = None
            self._perform(records)
            if isinstance(answer, Granted):
                if not await self._committed_soon():
                    return _come_back(SLOW_COMMIT)
                return binary(encode(LeaseReply(leases=answer.leases)))
            assert isinstance(answer, Refused)
            if not answer.may_change or left <= 0:
                return _refuse(answer.reason, answer.retry_after_s, answer.detail)
            # The fastest sampler first: a group is as old as its slowest answer.
            await self._chances.wait(seen, left, rank=self._plane.leased.answer_s(node))
        return _refuse("paced", self._plane.rules.beat_s)

    async def _post_beat(self, request: web.Request) -> web.Response:
        node, body = await read_signed(request, CONTROL_BODY_BYTES, self._sessions)
        beat = decode(body, Beat, cap_bytes=CONTROL_BODY_BYTES)
        self._check_sender(node, beat.node)
        stats = self._hear(node, request.remote)
        stats.samples = beat.samples
        if beat.offer is not None:
            stats.offered(beat.offer)
            if not self._is_barred(node):
                self._watch.offered(node, beat.offer)
        newest, standby = None, ""
        if self._plane is not None:
            self._plane.beat(node, now=time.monotonic(), tokens_per_s=beat.tokens_per_s)
            newest, standby = self._plane.newest, self._why_idle(node)
            installed = beat.installed
            if installed is not None and installed != stats.installed and not self._is_ahead(installed):
                self._installed(node, installed)
                # An open lease request of this node may now be answered with leases for the newer version.
                self._chances.tell()
        self._heard(node, beat, standby)
        dropped = self.tally.dropped_of(node)
        elsewhere = self.tally.is_elsewhere(node, beat.life)
        reply = BeatReply(
            newest=newest,
            finished=self.finished,
            dropped=dropped,
            standby=standby,
            elsewhere=elsewhere,
            wrong=self._auditor.fault_of(node) if self._auditor and self._is_barred(node) else "",
        )
        return binary(encode(reply))

    def _why_idle(self, node: NodeId) -> str:
        return self._plane.why_idle(node) if self._plane else ""

    async def _post_steps(self, request: web.Request) -> web.Response:
        body = await self._admit(request)
        if isinstance(body, web.Response):
            return body
        try:
            node, claimed = await self._open_body(request)
        finally:
            self._intake.done(body)
        plane = self._opened
        taken = [plane.is_taken(node, one.answer) for one in claimed]
        judged = iter(self._judge(node, [one for one, again in zip(claimed, taken, strict=True) if not again]))
        answers = [(one.answer, None if again else next(judged)) for one, again in zip(claimed, taken, strict=True)]
        await self._stepping.wait(node, [one for one, _ in answers], lambda one: plane.next_of(node, one) is not None)
        if not await self._committed_soon():
            return _come_back(SLOW_COMMIT)
        found = [(one, plane.next_of(node, one), verdict) for one, verdict in answers]
        steps = [stepped(one, said, verdict) for one, said, verdict in found if said is not None]
        return binary(encode(StepReply(steps=within(steps))))

    async def _admit(self, request: web.Request) -> Body | web.Response:
        """Take a submission in hand, or return why it is not read."""
        if self._plane is None or self._plane.newest is None:
            # Before the first version no answer can be judged.
            return _come_back("the learner is starting")
        if self._journal.fault:
            return _come_back(self._journal.fault)
        claim = self._sessions.check_header(request.headers.get(AUTH_HEADER), now=time.monotonic())
        body = self._intake.admit(
            claim,
            request.content_length,
            holds=bool(self._plane.leased.held_by(claim.node)),
            journal_bytes=self._journal.pending_bytes,
            now=time.monotonic(),
        )
        if isinstance(body, Body):
            return body
        self.tally.overloaded(claim.node)
        # Slow down a sender that ignores Retry-After, so that it costs us little.
        await asyncio.sleep(body.hold_s)
        wait = {"Retry-After": str(math.ceil(body.retry_after_s))}
        return web.Response(status=429, text=f"overloaded: {TEXTS[body.reason]}", headers=wait)

    async def _open_body(self, request: web.Request) -> tuple[NodeId, list[Claimed]]:
        node, body = await read_signed(request, ROLLOUT_BODY_BYTES, self._sessions)
        vocab_size = self._opened.rules.vocab_size
        if is_small(body):
            named, claimed = open_submission(body, vocab_size)
        else:
            async with self._unpacking:
                named, claimed = await asyncio.to_thread(open_submission, body, vocab_size)
        self._check_sender(node, named)
        return node, claimed

    def _judge(self, node: NodeId, claimed: Sequence[Claimed]) -> list[Judged]:
        self._hear(node)
        plane, now = self._opened, time.monotonic()
        effects: list[Effect] = []
        verdicts: list[Judged] = []
        useless = 0
        for one in claimed:
            leased = one.answer.sample in plane.leased.held_by(node)
            judged, *more = plane.submit(node, one.answer, now=now, fault=one.fault)
            assert isinstance(judged, Judged)
            useless += not leased and judged.verdict != "accepted"
            verdicts.append(judged)
            effects += [judged, *more]
        self._intake.charge(node, useless, now=now)
        self._perform(effects)
        return verdicts

    async def _post_release(self, request: web.Request) -> web.Response:
        node, body = await read_signed(request, CONTROL_BODY_BYTES, self._sessions)
        release = decode(body, Release, cap_bytes=CONTROL_BODY_BYTES)
        self._check_sender(node, release.node)
        if self._plane is not None:
            for held in release.samples:
                for index in held.indices:
                    self._plane.release(node, held.group_id, index, now=time.monotonic())
            if release.forget:
                self._plane.leave(node)
                why = self.barred.get(node, "")
                if self._auditor and why and not self._plane.owes(node) and self._auditor.forgive(node, why):
                    self.unbar(node)
        if release.forget and self.samplers.pop(node, None) is not None:
            self._emit("sampler_left", node=node, samples_released=sum(len(held.indices) for held in release.samples))
            self._watch.gone(node, vanished=False)
        self._chances.tell()
        return binary(b"")

    def _check_sender(self, node: NodeId, named: str) -> None:
        if named != node:
            self._sessions.refused["other_node"] += 1
            raise Forbidden(f"this is signed by node {node} and speaks for {named[:64]}")

    def _perform(self, effects: Sequence[Effect]) -> None:
        judged: list[Judged] = []
        wanted: list[ScoreWanted] = []
        steps: list[StepWanted] = []
        records: list[Record] = []
        for effect in effects:
            match effect:
                case Judged():
                    judged.append(effect)
                case ScoreWanted():
                    wanted.append(effect)
                case GroupDropped():
                    records.append(effect)
                    self.tally.drop(effect)
                    self._answer(effect.group_id, None)
                    self._ready.tell()
                    self._emit("group_dropped", group=effect.group_id, reason=effect.reason, rollouts=effect.rollouts)
                    self.failures.dropped(effect.reason, now=time.monotonic())
                case NodeSilent():
                    self.tally.vanished(effect.node, effect.lost)
                    self._watch.gone(effect.node, vanished=True)
                    self._emit("sampler_silent", node=effect.node, samples_released=effect.samples)
                case LeaseOverdue():
                    self._emit("lease_overdue", node=effect.node, samples_released=len(effect.samples))
                case GenerationFailed():
                    self._emit("generation_failed", node=effect.node, rollout=effect.rollout_id, reason=effect.reason)
                case Evaluated():
                    if self._evaluated is not None and not self._evaluated.done():
                        self._evaluated.set_result(effect)
                case _ if isinstance(effect, Record):
                    records.append(effect)
                    if isinstance(effect, RolloutScored):
                        self.failures.scored(now=time.monotonic())
                case StepWanted():
                    steps.append(effect)
                case Answered():
                    self._answer(effect.group_id, effect.rollout)
                case Granted() | Refused():
                    raise AssertionError("answers to a question are not effects to perform")
        self.tally.judged(judged, now=time.monotonic())
        if malformed := [one for one in judged if one.verdict == "malformed"]:
            # One event per submission: the sender decides how many rollouts it holds.
            first = malformed[0]
            self._emit("rollouts_malformed", node=first.node, rollouts=len(malformed), first=first.detail)
        if records:
            try:
                self._journal.enqueue(records)
            except EchoError as error:
                self._journal_error = error
                raise
            self.tally.accepted(records, self._watch, now=time.monotonic())
        if wanted or steps:
            assert self._scoring is not None
            self._scoring.begin(wanted)
            for step in steps:
                self._scoring.start(self._step(step))
        self._tell_chances()

    def _answer(self, name: GroupId, rollout: Rollout | None) -> None:
        """Tell who asked a question what was drawn; None if no sampler could."""
        answer = self._questions.get(name)
        if answer is not None and not answer.done():
            answer.set_result(rollout)

    def _tell_chances(self) -> None:
        if self._opened.leased.chances != self._told:
            self._told = self._opened.leased.chances
            self._chances.tell()

    def _scored(self, wanted: Sequence[ScoreWanted], outcomes: Sequence[Score | Unscored]) -> None:
        effects, now = list[Effect](), time.monotonic()
        for asked, outcome in zip(wanted, self.failures.settle(wanted, outcomes, now=now), strict=True):
            if isinstance(outcome, Unscored):
                effects += self._opened.refused(asked.group_id, asked.index, now=now)
            else:
                effects += self._opened.scored(asked.group_id, asked.index, outcome)
        self._perform(effects)
        self._ready.tell()

    async def _step(self, asked: StepWanted) -> None:
        """Have the environment answer a turn."""
        assert self._stepper is not None
        said, now = await self._stepper(asked), time.monotonic()
        (outcome,) = self.failures.settle([asked], [said], now=now)
        found = outcome if isinstance(outcome, Observed) else None
        self._perform(self._opened.observed(asked.group_id, asked.index, asked.episode, found, now=now))
        self._stepping.tell((asked.group_id, asked.index))
        self._ready.tell()

    def _hear(self, node: NodeId, host: str | None = None) -> SamplerStats:
        stats = self.samplers.get(node)
        if stats is None:
            if len(self.samplers) >= MAX_NODES:
                raise Crowded(f"this learner already knows {MAX_NODES} samplers")
            stats = self.samplers[node] = SamplerStats(recent=Recent(now=time.monotonic()))
            self._emit("sampler_joined", node=node)
        stats.heard_at = time.monotonic()
        if self._plane is not None:
            # Whoever calls from this machine, as behind a tunnel, is nobody's neighbour.
            caller = "" if host is None or is_loopback(host) else caller_of(host)
            self._plane.beat(node, now=stats.heard_at, caller=caller)
        self._absent.discard(node)
        return stats

    def _is_ahead(self, version: VersionId) -> bool:
        """Return whether `version` is newer than all that this process has published, so another life published it.
        The incarnation alone does not tell: a learner restored from a copy may repeat one."""
        newest = self._opened.newest
        return newest is None or version > newest

    def _installed(self, node: NodeId, version: VersionId) -> None:
        self.samplers[node].installed = version
        if not self._is_barred(node):
            self._watch.installed(node, version)

    def _is_barred(self, node: NodeId) -> bool:
        return self._plane is not None and node in self._plane.barred

    @property
    def _broken(self) -> BaseException | None:
        return (self._scoring and self._scoring.fault) or self._journal_error

    @property
    def _opened(self) -> RolloutPlane:
        assert self._plane is not None
        return self._plane

    async def _committed_soon(self) -> bool:
        """Return whether everything so far is committed before the sampler stops waiting for the reply."""
        try:
            async with asyncio.timeout(COMMIT_S):
                await self._journal.write(())
        except TimeoutError:
            return False
        except EchoError as error:
            self._journal_error = error
            return False
        return True


def _refuse(reason: Refusal, retry_after_s: float, detail: str = "") -> web.Response:
    return binary(encode(LeaseReply(refusal=reason, retry_after_s=retry_after_s, detail=detail)))


def _come_back(why: str) -> web.Response:
    """Return a 503: send the same again in a second."""
    return web.Response(status=503, text=why, headers={"Retry-After": "1"})
