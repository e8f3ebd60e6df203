"""A scripted sampler: what sampler/session.py does, with an engine that only takes time.

Theory of operation. One life of one sampler is one object; a crash ends it without a word, and callbacks of a dead
life do nothing. Its parts run beside one another, each a chain of callbacks:

    refresh   question for a newer version -> broadcast delay -> installed between two batches
    settle    what a former life left in the spool is submitted -> whatever else it held is void -> ask and beat begin
    ask       leases, one batch ahead of the engine -> queue of one
    generate  queue -> the longest of the samples' lognormal times -> the spool, at most two batches of answers
    submit    oldest batch in the spool, again and again until it is answered; episodes that go on join the next batch
    beat      every beat_s, and after every install

The spool is the one thing that outlives a life: a batch of answers is there from its end to its verdicts.

A crash may also happen before each single action: a call to the learner, an answer that is heard, a batch that begins
or ends, an install. It unwinds what was being done; every callback begins in `_alive`, where that ends.

A learner that cannot be reached is tried again with growing pauses, by each of these on its own (join/link.py).
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec import structs

from swarm.join.link import back_off_s
from swarm.plan.simulate.world import World
from swarm.rollout.plane.effects import Granted, Refused
from swarm.rollout.plane.episodes import part_of
from swarm.sampler.session import ASK_WAIT_S, FAREWELL_S, GIVE_UP_S
from swarm.types import Lease, NodeId, Observed, Rollout, SampleSpec, Span, Turn, VersionId
from tests.simulator.network import Network, Reply
from tests.simulator.rollouts.books import Holding
from tests.simulator.rollouts.learner import LEARNER, REPLY_BYTES, STARTING_S, Learner
from tests.simulator.rollouts.scenario import Scenario
from tests.simulator.rollouts.task import MAX_NEW_TOKENS, STOP_TOKEN, drawn, stream

TOKEN_BYTES = 9
"""Id, log-prob and mask of one token."""

ANSWERS_QUEUED = 2
"""Batches of answers that wait for submission before the engine waits too; as in sampler/session.py."""

GRACE_S = 10.0  # As JoinConfig.grace

A = TypeVar("A")
Answers = list[tuple[Lease, Rollout]]


class SamplerCrashed(Exception):
    """Unwinds what a sampler was doing when it died."""


@dataclass(slots=True, kw_only=True)
class SamplerDisk:
    """What all lives of one sampler share: its spool of answers, oldest first. Its actions are counted here too, with
    those that it dies before."""

    spool: deque[Answers] = field(default_factory=deque)
    crash_before: set[int] = field(default_factory=set)
    actions: int = 0


class Sampler:
    """One life of one sampler. `on_gone` is called once, at its end."""

    def __init__(
        self,
        *,
        world: World,
        network: Network,
        scenario: Scenario,
        learner: Learner,
        node: NodeId,
        slowness: float,
        broadcast_s: float,
        disk: SamplerDisk,
        on_gone: Callable[[], None],
    ) -> None:
        self._world = world
        self._network = network
        self._scenario = scenario
        self._learner = learner
        self._slowness = slowness
        self._broadcast_s = broadcast_s
        self._disk = disk
        self._on_gone = on_gone
        self._fetched: VersionId | None = None
        self._asking = False
        self._queued: list[Lease] = []
        self._games: list[Lease] = []
        self._running: list[Lease] = []
        self._drawing: list[tuple[Lease, Rollout, float]] = []
        self._began_at = 0.0
        self._answers = disk.spool
        self._settled = False
        self._submitting = False
        self._tries: Counter[str] = Counter()
        self._leaving = False
        self._parting = False
        self.node = node
        self.alive = True
        self.held: VersionId | None = None

    def start(self) -> None:
        def begin() -> None:
            self._refresh()
            self._settle()

        self._alive(begin)

    def crash(self) -> None:
        """Vanish without a word."""
        self._gone()

    def leave(self) -> None:
        """Hand back what has not begun, let the running batch finish and be submitted, or hand over what has come of
        it, say farewell."""
        self._alive(self._leave)

    def _leave(self) -> None:
        if self._leaving:
            return
        self._leaving = True
        queued, self._queued, self._games = self._queued, [], []
        if queued:
            self._release(queued, leaving=False, then=_nothing, failed=_nothing)
        self._later(GRACE_S - GIVE_UP_S - FAREWELL_S, f"{self.node} gives up", self._give_up)
        self._drained()

    # -- weights ---------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        held = self.held
        self._request(
            100,
            lambda reply: self._learner.newer_version(held, reply),
            self._found,
            self._patiently("refresh", self._refresh),
            timeout_s=ASK_WAIT_S + self._scenario.call_s,
        )

    def _found(self, version: VersionId | None) -> None:
        self._tries["refresh"] = 0
        if version is None:
            self._refresh()
        else:
            self._later(self._broadcast_s, f"{self.node} has {version}", lambda: self._fetch(version))

    def _fetch(self, version: VersionId) -> None:
        self._fetched = version
        if not self._running:
            self._install()
            self._generate()

    def _install(self) -> None:
        """Between two batches only."""
        if self._fetched is None:
            return
        self._act("installs")
        self.held, self._fetched = self._fetched, None
        if self._settled:
            self._beat(_nothing, _nothing)
        self._refresh()
        self._ask()

    # -- rollouts --------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        held = self.held
        if held is None or not self._settled or self._asking or self._queued or self._leaving:
            return
        holding = self._holding()
        room = self._scenario.capacity - (len(holding) if self._scenario.turns else 0)
        if room <= 0:
            return
        self._asking = True
        self._request(
            100,
            lambda reply: self._learner.leases(self.node, held, room, holding, reply),
            self._leased,
            self._patiently("ask", self._ask_again),
            timeout_s=ASK_WAIT_S + self._scenario.call_s,
        )

    def _holding(self) -> Holding:
        """All that is in our hands: what runs, and what was not yet answered for. The queue is empty when we ask."""
        leases = [*self._running, *self._games]
        running = frozenset((lease.group_id, spec.index) for lease in leases for spec in lease.samples)
        return running.union((r.group_id, r.index) for answers in self._answers for _, r in answers)

    def _ask_again(self) -> None:
        self._asking = False
        self._ask()

    def _leased(self, answer: Granted | Refused) -> None:
        self._asking = False
        self._tries["ask"] = 0
        if self._leaving:
            return
        if isinstance(answer, Granted):
            self._queued = list(answer.leases)
            self._generate()
        elif answer.reason == "finished":
            self.leave()
        elif answer.reason in ("paced", "standby"):
            self._ask()
        else:
            self._later(answer.retry_after_s, f"{self.node} asks again", self._ask)

    def _generate(self) -> None:
        if self._running or not (self._queued or self._games) or len(self._answers) >= ANSWERS_QUEUED:
            return
        self._act("generates")
        self._running, self._queued, self._games = self._games + self._queued, [], []
        self._ask()
        jobs = [(lease, spec, self._draw_s()) for lease in self._running for spec in lease.samples]
        batch_s = max(min(took_s, lease.time_limit_s) for lease, _, took_s in jobs)
        version = self.held
        assert version is not None
        answers = [(lease, self._rollout(lease, spec, took_s, version)) for lease, spec, took_s in jobs]
        self._began_at = self._world.now
        self._drawing = [(*answer, took_s) for answer, (_, _, took_s) in zip(answers, jobs, strict=True)]
        self._later(batch_s, f"{self.node} generated", lambda: self._generated(answers))

    def _generated(self, answers: Answers) -> None:
        if not self._running:
            return
        self._act("keeps what it generated")
        self._running = []
        self._answers.append(answers)
        self._submit()
        self._install()
        self._generate()

    def _submit(self) -> None:
        if self._submitting:
            return
        if not self._answers:
            self._settle()
            return
        self._submitting = True
        answers = self._answers[0]
        nbytes = sum(REPLY_BYTES + TOKEN_BYTES * rollout.length for _, rollout in answers)
        self._request(
            nbytes,
            lambda reply: self._learner.rollouts(self.node, answers, reply),
            self._submitted,
            self._patiently("submit", self._submit_again),
            timeout_s=self._scenario.call_s,
        )

    def _submit_again(self) -> None:
        self._submitting = False
        self._submit()

    def _submitted(self, heard: Sequence[Observed | None] | None) -> None:
        if heard is None:
            self._later(STARTING_S, f"{self.node} comes back", self._submit_again)
            return
        self._submitting = False
        self._tries["submit"] = 0
        answers = self._answers.popleft()
        if self._settled and not self._leaving:
            pairs = zip(answers, heard, strict=True)
            self._games += [going_on(*answer, said) for answer, said in pairs if said is not None and not said.done]
        self._submit()
        self._generate()
        if self._scenario.turns:
            self._ask()
        self._drained()

    def _settle(self) -> None:
        """Once a life: submit what a former one generated, then say that whatever else it held is void."""
        if self._settled or self._leaving:
            return
        if self._answers:
            self._submit()
            return

        def answered() -> None:
            self._settled = True
            self._beat_on()
            self._ask()

        self._release([], leaving=True, then=answered, failed=self._patiently("settle", self._settle))

    # -- life ------------------------------------------------------------------------------------------------

    def _beat_on(self) -> None:
        """The next beat comes a while after the last one was answered."""

        def answered() -> None:
            self._tries["beat"] = 0
            self._later(self._scenario.beat_s, f"{self.node} beats", self._beat_on)

        self._beat(answered, self._patiently("beat", self._beat_on))

    def _beat(self, then: Callable[[], None], failed: Callable[[], None]) -> None:
        held = self.held

        def answered(finished: bool) -> None:
            then()
            if finished:
                self.leave()

        self._request(
            50,
            lambda reply: self._learner.beat(self.node, held, self._tokens_per_s, reply),
            answered,
            failed,
            timeout_s=self._scenario.call_s,
        )

    def _give_up(self) -> None:
        """Hand over the first tokens of what runs; the rest of it is void with the farewell."""
        parts: Answers = []
        for lease, rollout, took_s in self._drawing if self._running and not self._scenario.turns else ():
            share = (self._world.now - self._began_at) / took_s
            tokens = min(rollout.length - 1, int(share * rollout.length))
            if tokens > 0:
                parts.append((lease, part_of(rollout, Turn(start=0, end=tokens))))
        self._running = []
        if parts:
            handed = [(lease, structs.replace(part, finish="handed")) for lease, part in parts]
            self._answers.append(handed)
            self._submit()
        self._later(FAREWELL_S, f"{self.node} waits no longer", self._farewell)
        self._drained()

    def _drained(self) -> None:
        if self._leaving and not self._running and not self._answers:
            self._farewell()

    def _farewell(self) -> None:
        """Said once: a node that leaves does not wait for a learner that it cannot reach."""
        if self._parting:
            return
        self._parting = True
        self._release([], leaving=True, then=self._gone, failed=self._gone)

    def _gone(self) -> None:
        if self.alive:
            self.alive = False
            self._on_gone()

    def _release(
        self, leases: list[Lease], *, leaving: bool, then: Callable[[], None], failed: Callable[[], None]
    ) -> None:
        samples = [(lease.group_id, spec.index) for lease in leases for spec in lease.samples]

        def answered(_: bool) -> None:
            then()

        self._request(
            100,
            lambda reply: self._learner.release(self.node, samples, leaving, reply),
            answered,
            failed,
            timeout_s=self._scenario.call_s,
        )

    def _request(
        self,
        nbytes: int,
        handler: Callable[[Reply[A]], None],
        on_answer: Callable[[A], None],
        on_failure: Callable[[], None],
        *,
        timeout_s: float,
    ) -> None:
        """A call to the learner whose outcome a dead life does not hear."""

        def heard(answer: A) -> None:
            self._act("hears an answer")
            on_answer(answer)

        def answered(answer: A) -> None:
            self._alive(lambda: heard(answer))

        def failed() -> None:
            self._alive(on_failure)

        self._act("calls the learner")
        self._network.request(self.node, LEARNER, nbytes, handler, answered, failed, timeout_s=timeout_s)

    def _patiently(self, call: str, again: Callable[[], None]) -> Callable[[], None]:
        """What to do when `call` failed: the same once more, after a random pause of up to twice the last one."""

        def failed() -> None:
            self._tries[call] += 1
            pause_s = back_off_s(self._tries[call], self._world.random)
            self._later(pause_s, f"{self.node} tries to {call} again", again)

        return failed

    def _later(self, delay_s: float, label: str, callback: Callable[[], None]) -> None:
        self._world.schedule(delay_s, label, lambda: self._alive(callback))

    def _alive(self, callback: Callable[[], None]) -> None:
        """Run `callback` in this life, if it is not over."""
        if not self.alive:
            return
        try:
            callback()
        except SamplerCrashed:
            self._gone()

    def _act(self, what: str) -> None:
        """It may die here. Raises SamplerCrashed."""
        disk = self._disk
        disk.actions += 1
        if disk.actions in disk.crash_before:
            self._world.note(f"{self.node} crashes before it {what}, at action {disk.actions}")
            raise SamplerCrashed

    # -- the engine ------------------------------------------------------------------------------------------

    @property
    def _tokens_per_s(self) -> float:
        """Measured; what takes longest is as long as may be."""
        longest_s = self._scenario.generation_s * self._slowness * math.exp(2 * self._scenario.generation_sigma)
        return 0.0 if self.held is None else MAX_NEW_TOKENS / longest_s

    def _draw_s(self) -> float:
        """Lognormal, with the scenario's mean for a node of ordinary speed."""
        sigma = self._scenario.generation_sigma
        factor = math.exp(self._world.random.gauss(-sigma * sigma / 2, sigma))
        return self._scenario.generation_s * self._slowness * factor

    def _rollout(self, lease: Lease, spec: SampleSpec, took_s: float, version: VersionId) -> Rollout:
        if took_s > lease.time_limit_s or self._world.random.random() < self._scenario.generation_failure_share:
            return Rollout(
                group_id=lease.group_id,
                index=spec.index,
                token_ids=b"",
                logprobs=b"",
                spans=(),
                finish="failed",
                reason="simulated",
            )
        length = 1 + spec.seed % (MAX_NEW_TOKENS - 1) - len(lease.begun) // 4
        token_ids = array("i", [*([5] * (length - 1)), STOP_TOKEN]).tobytes()
        if (progress := lease.episode) is not None:
            before = stream(lease.group_id, spec.index, progress.turn)
            assert b"".join(progress.streams) == before, f"turn {progress.turn} continues something else"
            token_ids = drawn(lease.group_id, spec.index, progress.turn)
            length = len(token_ids) // 4
        return Rollout(
            group_id=lease.group_id,
            index=spec.index,
            token_ids=token_ids,
            logprobs=array("f", [-0.5] * length).tobytes(),
            spans=(Span(version=version, start=0, end=length),),
            finish="stop",
        )


def going_on(lease: Lease, rollout: Rollout, said: Observed) -> Lease:
    """The lease of the next turn of an episode."""
    progress, specs = lease.episode, tuple(spec for spec in lease.samples if spec.index == rollout.index)
    assert progress is not None
    streams = (b"".join(progress.streams) + rollout.token_ids + said.token_ids,)
    return structs.replace(
        lease, samples=specs, episode=structs.replace(progress, turn=progress.turn + 1, streams=streams)
    )


def _nothing() -> None:
    """What is to be done when nothing is."""
