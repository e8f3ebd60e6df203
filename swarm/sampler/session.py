"""A sampler's work for one learner: the tasks between its weights, its engine and the learner's leases.

    refresh   weight map -> engine; the receiver keeps the map up to date meanwhile
    ask       leases, as many as the feed has room for -> feed
    generate  feed -> engine -> answer queue
    submit    the spool of an earlier process, then answer queue -> handing
    handing   completions, and turns of episodes -> learner -> feed, which goes on with what environments said
    beat      a sign of life every beat_s, and after every install

The order matters. An install reads the weight map, so nothing is written to the map meanwhile (`Receiver.steady`). The
spool of an earlier process is submitted first; then the learner hears that the rest of its leases is void; then new
leases are requested. A batch is in the spool before it enters the answer queue, and stays there until its verdicts
arrive. A sample is in `_in_hand` from its lease to its verdict; every request names these samples, so that the learner
learns which leases were lost in transit. At the end they are handed back, unless the spool keeps them for the next
session.

A session is asked to end because the node leaves, or because its owner wants the machine. What is under way when its
time is up the engine gives up as far as it is, and ends; then it is handed in, and others go on with it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from swarm.aio import Changes, unless_stopped
from swarm.broadcast.coding import in_thread
from swarm.broadcast.receiver.receiver import Receiver
from swarm.errors import InUseElsewhere, PeerUnreachable, ProtocolError
from swarm.rollout.messages import Answer, DroppedRollouts, Offer, SampleName, Stepped
from swarm.sampler.client import RolloutClient, samples_of
from swarm.sampler.feeding import Feed
from swarm.sampler.handing import Handing
from swarm.sampler.spool import Spool
from swarm.sampler.worker import EngineWorker, ProofFailed
from swarm.types import VersionId, printable, quoted

SAID_AGAIN_S = 60.0  # Shortest time between two lines: a run that drops some in each step must not fill the terminal


class Drops:
    """The learner's counts of dropped rollouts by reason, and when to report them. `counts` run since its start."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._said: Counter[str] = Counter()
        self._said_at: float | None = None

    def hear(self, told: Iterable[DroppedRollouts], *, now: float) -> str | None:
        """Take the newest counts. Return a line for the terminal if they grew since the last line, at most one per
        SAID_AGAIN_S. `now` is in monotonic seconds."""
        self.counts = Counter({printable(one.reason): one.rollouts for one in told})
        self._said &= self.counts  # A restarted learner counts from zero.
        grown = self.counts - self._said
        if not grown or (self._said_at is not None and now - self._said_at < SAID_AGAIN_S):
            return None
        self._said, self._said_at = self.counts, now
        words = {quoted(reason): more for reason, more in sorted(grown.items())}
        by_reason = ", ".join(reason if len(words) == 1 else f"{more} {reason}" for reason, more in words.items())
        return f"the learner dropped {sum(grown.values())} of our rollouts: {by_reason}"


ASK_WAIT_S = 10.0  # How long the learner may hold a request for leases open
AHEAD_WAIT_S = 1.0  # The same if no place was free: a place that becomes free meanwhile should not stay empty
GIVE_UP_S = 2.0  # In which an engine draws another token, unless it reads a long prompt
FAREWELL_S = 3.0  # Time limit for handing over answers, and leases: a leaving node does not wait for a dead learner
MIN_BEAT_S = 0.2  # A learner may ask for at most five beats a second
AGAIN_S = 1.0  # Pause before reading unreadable weights again: a catch-up repairs them meanwhile


@dataclass(slots=True, kw_only=True)
class SamplerStatus:
    """What the node shows of itself; it counts from the start of its process. `standby` says why it waits in reserve,
    or is ""; `exposed` what its engine's process could do, as was said once; `has_started`: an engine once did;
    `was_told`: by the learner, what the audit found."""

    state: str = "starting"
    standby: str = ""
    exposed: str = ""
    has_started: bool = False
    was_told: bool = False
    verdicts: Counter[str] = field(default_factory=Counter)
    accepted_tokens: int = 0
    drops: Drops = field(default_factory=Drops)


class Ending:
    """Whether a session is `asked` to end, and whether the time is `up` within which samples under way may finish and
    be submitted."""

    def __init__(self) -> None:
        self.asked, self.up = asyncio.Event(), asyncio.Event()

    def ask(self, grace_s: float) -> None:
        """Ask for the end within `grace_s`, the time to hand over included; what was asked for before holds if it is
        sooner."""
        self.asked.set()
        if (drain_s := grace_s - GIVE_UP_S - FAREWELL_S) > 0:
            asyncio.get_running_loop().call_later(drain_s, self.up.set)
        else:
            self.up.set()


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples that ended together, their answers that are to be handed in, and the file of these in the spool if they
    are there."""

    samples: set[SampleName]
    answers: list[Answer]
    spooled: Path | None


class Session:
    """One session with a learner, until the run ends, this node stops, or a fault requires a new session. `launch`
    starts the engine's process and asks whether the model fits; `client` repeats its calls until they succeed."""

    def __init__(
        self,
        *,
        client: RolloutClient,
        beat_s: float,
        engine: EngineWorker,
        launch: asyncio.Future[None],
        spool: Spool,
        receiver: Receiver,
        offer: Callable[[], Offer],
        status: SamplerStatus,
        on_change: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._launch = launch
        self._spool = spool
        self._offer = offer
        self._beat_s = max(MIN_BEAT_S, beat_s)
        self._status = status
        self._on_change = on_change
        self._say = say
        self._receiver = receiver
        self._client = client
        self._feed: Feed | None = None
        self._handing = Handing(self._hand_in, say)
        self._wrong: VersionId | None = None
        self._in_hand: set[SampleName] = set()
        self._spooled: set[SampleName] = set()
        self._answers: asyncio.Queue[Batch] = asyncio.Queue(maxsize=2)
        self._settled = asyncio.Event()
        self._installs = Changes()
        self._over = asyncio.Event()

    async def run(self, ending: Ending) -> bool:
        """Work until the learner says that the run is over (return True), or `ending` is asked for (return False)."""
        try:
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(self._ask())
                handing = [group.create_task(work()) for work in (self._submit, self._handing.run)]
                drawing = [group.create_task(work()) for work in (self._refresh, self._generate, self._beat)]
                await unless_stopped(ending.asked, self._over.wait())
                self._status.state = "leaving"
                asking.cancel()
                if not self._over.is_set() and not ending.up.is_set():
                    # A run that is over takes nothing more.
                    await unless_stopped(ending.up, unless_stopped(self._over, self._drain()))
                if not self._over.is_set():
                    await self._give_up()
                for task in drawing:
                    task.cancel()
                await asyncio.wait(drawing)
                if not self._over.is_set():
                    # Before the learner is told: the owner wants the memory now.
                    self._launch.cancel()
                    await self._engine.stop()
                    await self._hand_in_rest()
                for task in handing:
                    task.cancel()
        finally:
            await self._hand_back(self._in_hand - self._spooled, forget=ending.asked.is_set() or self._over.is_set())
        if self._over.is_set():
            await in_thread(self._spool.clear)
        return self._over.is_set()

    # -- weights ---------------------------------------------------------------------------------------------

    async def _refresh(self) -> None:
        await self._load()
        while True:
            await self._receiver.upkeep.installed(max(self._engine.installed, self._wrong, key=_order))
            try:
                await self._install()
            except ProtocolError as fault:
                self._say(f"the weights cannot be read: {fault}")
                await asyncio.sleep(AGAIN_S)

    async def _install(self) -> None:
        """Let the engine take the map's weights; it keeps drawing with the old ones until then. Raise ProofFailed if
        the engine then holds something else. Raise ProtocolError if the map differs from what was signed; the map is
        then repaired."""
        weights = self._receiver.upkeep.weights
        assert weights is not None
        async with self._receiver.upkeep.steady() as version:
            changed = await in_thread(self._receiver.upkeep.changes_since, self._engine.installed)
            proven = self._receiver.upkeep.is_proven
            head, sums = version.head, version.table.tensor_sums
            refused = await self._engine.install(head.version, sums, weights.path, proven=proven, changed=changed)
        if refused is None:
            self._receiver.note_time(version.head.version, "installed_s")
            self._on_change()
            self._installs.tell()
        elif refused.fault == "file":
            if await self._receiver.upkeep.recheck() == 0:
                # Nothing to repair: the table's sums contradict the signed regions, so the learner is wrong.
                self._wrong = version.head.version
            raise ProtocolError(refused.why)
        else:
            raise ProofFailed(refused.why)

    async def _load(self) -> None:
        await asyncio.shield(self._launch)
        started = await self._engine.load(await self._receiver.opening.layout())
        self._status.has_started = True
        at_once = f"{started.places} sample{'' if started.places == 1 else 's'} at once"
        longest = f", of {started.context_tokens} tokens at most" if started.context_tokens else ""
        self._say(f"engine: {started.engine} on {started.device} in {started.dtype}, {at_once}{longest}")
        if started.exposed and started.exposed != self._status.exposed:
            self._say(started.exposed)
        self._status.exposed, self._client.engine_class = started.exposed, started.engine_class
        self._feed = Feed(self._engine, self._handing.hand_in)

    # -- rollouts --------------------------------------------------------------------------------------------

    async def _ask(self) -> None:
        await self._settled.wait()
        while self._engine.installed is None:
            await self._news(None, self._beat_s)
        assert self._feed is not None
        while True:
            room = await self._feed.room()
            held = self._engine.installed
            wait_s = ASK_WAIT_S if room.at_once or self._engine.lockstep else AHEAD_WAIT_S
            asked_at = time.monotonic()
            answer = await self._client.ask(held, room.capacity, wait_s, holding=self._in_hand, at_once=room.at_once)
            if isinstance(answer, list):
                self._status.state = "sampling"
                self._in_hand.update(samples_of(answer))
                self._engine.check_fits(answer)
                self._feed.add(answer)
                continue
            self._status.state = f"waiting ({answer.reason})"
            if answer.reason in ("paced", "standby"):
                # The learner holds these requests open, unless what it says cannot change meanwhile. After other
                # reasons the next beat says whether we are on standby.
                self._hear_standby(answer.detail)
                if (left_s := min(wait_s, answer.retry_after_s) - (time.monotonic() - asked_at)) > 0:
                    await self._news(held, left_s)
                continue
            if answer.reason == "finished":
                self._over.set()
            await self._news(held, max(0.05, answer.retry_after_s))

    async def _generate(self) -> None:
        await self._news(None, None)
        assert self._feed is not None
        await self._feed.run(self._keep)

    async def _hand_in(self, answers: list[Answer]) -> list[Stepped]:
        """Hand in what was drawn, and count the verdicts. What the learner does not take as a whole is lost."""
        try:
            said = await self._client.submit(answers)
        except ProtocolError as fault:
            self._say(f"the learner does not take {len(answers)} of these rollouts: {fault}")
            said = [refused(one) for one in answers]
        verdicts = verdicts_of(answers, said)
        self._status.verdicts.update(verdicts.values())
        accepted = (one.rollout.length for one in answers if verdicts.get(one.sample) in ("accepted", "handed"))
        self._status.accepted_tokens += sum(accepted)
        return said

    async def _keep(self, samples: set[SampleName], answers: list[Answer]) -> None:
        for version in {one.rollout.spans[-1].version for one in answers if one.rollout.spans}:
            self._receiver.note_time(version, "drawn_s")
        batch = Batch(samples, answers, await in_thread(self._spool.keep, answers) if answers else None)
        if batch.spooled is not None:
            self._spooled |= batch.samples
        await self._answers.put(batch)

    async def _submit(self) -> None:
        await self._settle()
        while True:
            # All that has come: one by one, they would wait here for the round trips of those before them.
            batches = [await self._answers.get()]
            while not self._answers.empty():
                batches.append(self._answers.get_nowait())
            await self._handing.hand_in_all([answer for batch in batches for answer in batch.answers])
            for batch in batches:
                self._in_hand -= batch.samples
                self._spooled -= batch.samples
                if batch.spooled is not None:
                    await in_thread(self._spool.remove, batch.spooled)
                self._answers.task_done()

    async def _settle(self) -> None:
        """Submit what an earlier process of this node generated; the rest of its leases is void."""
        verdicts: Counter[str] = Counter()
        for path in await in_thread(self._spool.files):
            answers = await in_thread(self._spool.read, path)
            verdicts.update(verdicts_of(answers, await self._handing.hand_in_all(answers)).values())
            await in_thread(self._spool.remove, path)
        if verdicts:
            said = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
            self._say(f"rollouts from before were submitted: {said}")
        await self._client.release((), forget=True)
        self._settled.set()

    async def _beat(self) -> None:
        await self._settled.wait()
        while True:
            installed = self._engine.installed
            running = self._feed.running if self._feed else 0
            rate, did = self._engine.rates.tokens_per_s, self._engine.doings.take()
            reply = await self._client.beat(installed, running, rate, offer=self._offer(), did=did)
            if reply.elsewhere:
                raise InUseElsewhere
            self._hear_standby(reply.standby)
            if reply.wrong and not self._status.was_told:
                # An honest engine may be broken: with a new one the learner begins again with this node, once.
                self._status.was_told = True
                raise ProofFailed(f"the learner says of its audit: {quoted(reply.wrong)}")
            if (line := self._status.drops.hear(reply.dropped, now=time.monotonic())) is not None:
                self._say(line)
            if reply.finished:
                self._over.set()
            await self._news(installed, self._beat_s)

    def _hear_standby(self, why: str) -> None:
        before, self._status.standby = self._status.standby, why and f"the learner says {quoted(why)}"
        if bool(why) != bool(before):
            self._say(f"standby: {self._status.standby}" if why else "active again")

    async def _news(self, known: VersionId | None, patience_s: float | None) -> None:
        """Wait until a version other than `known` is installed, at most for `patience_s`."""
        if self._engine.installed == known:
            await self._installs.wait(self._installs.count, patience_s)

    # -- leaving ---------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Hand back what has not started, then let running samples finish and be submitted."""
        if self._feed is not None:
            await self._hand_back(self._feed.take_back(), forget=False)
            await self._feed.idle()
        await self._answers.join()

    async def _give_up(self) -> None:
        """Have the engine end what is under way, so that others go on with it."""
        if self._feed is None or not (running := self._feed.running):
            return
        self._feed.take_back()
        told = asyncio.create_task(self._engine.give_up())
        told.add_done_callback(lambda done: done.cancelled() or done.exception())  # An engine that hangs is ended
        with suppress(TimeoutError):
            async with asyncio.timeout(GIVE_UP_S):
                await self._feed.idle()
        if given_up := running - self._feed.running:
            self._say(f"samples under way are given up: {given_up}; others go on with them")

    async def _hand_in_rest(self) -> None:
        """Let finished samples be submitted, and say if some were not."""
        if self._feed is not None and self._feed.running:
            self._say(f"samples under way are handed back: {self._feed.running}; others draw them")
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._answers.join()
        except TimeoutError:
            kept = "; what was generated is kept for the next start" if self._spooled else ""
            self._say(f"the learner did not take all that was generated in time{kept}")

    async def _hand_back(self, samples: set[SampleName], *, forget: bool) -> None:
        self._in_hand -= samples
        if not samples and not forget:
            return
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._client.release(samples, forget=forget)
        except (TimeoutError, PeerUnreachable, ProtocolError):
            self._say("the learner could not be told; it leases this node's samples to others after three silent beats")


def _order(version: VersionId | None) -> tuple[int, int]:
    return (version.incarnation, version.version) if version else (-1, -1)


def refused(answer: Answer) -> Stepped:
    group_id, index = answer.sample
    return Stepped(group_id=group_id, index=index, turn=answer.turn, verdict="malformed", ended=True)


def verdicts_of(answers: Iterable[Answer], said: Iterable[Stepped]) -> dict[SampleName, str]:
    """Return the verdicts. The learner accepts the report of a failed generation; here it counts as "failed", so that
    an engine that only fails is noticed. A part of a completion counts as "handed"."""
    finishes = {one.sample: one.rollout.finish for one in answers}
    verdicts: dict[SampleName, str] = {(one.group_id, one.index): one.verdict for one in said}
    for sample, verdict in verdicts.items():
        if verdict == "accepted" and finishes.get(sample) in ("failed", "handed"):
            verdicts[sample] = finishes[sample]
    return verdicts
