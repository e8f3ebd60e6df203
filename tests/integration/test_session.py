"""A sampler's session between a real engine process, a real receiver, and a learner's HTTP face."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from swarm.broadcast.version.manifest import Layout
from swarm.errors import ChildFailed, ProtocolError, UserError, first_fault
from swarm.net.client import PeerClient, guard, session_route
from swarm.rollout.messages import Beat, BeatReply, DroppedRollouts, LeaseRequest, Offer, Release
from swarm.sampler.client import RolloutClient
from swarm.sampler.engine import EngineOptions, Started
from swarm.sampler.session import AHEAD_WAIT_S, ASK_WAIT_S, Ending, SamplerStatus, Session
from swarm.sampler.spool import Spool
from swarm.sampler.worker import EngineWorker
from swarm.types import Address
from swarm.wire import CONTROL_BODY_BYTES, decode, encode
from tests.builders import OTHER_KEY, v
from tests.integration.hanging_engine import EXPOSED, VARIABLE
from tests.learner_face import BOB, Learner, answers_to, leases_for
from tests.publishers import Publisher, hand_over
from tests.scripted_engine import ENGINE
from tests.unit.broadcast.test_data_plane import LISTED, Hearer, running
from tests.unit.wires import PATIENCE_S, many_turns, until

CAPACITY = 4
ALL = 8
"""Samples that the test's learner leases to one that asks ahead, before it waits for training: 2 batches of 2 groups of
2; the third is for samplers that could begin at once."""


class Line:
    """Calls to the learner, noted. Those in `mute` are never answered; `broken` raises instead of a beat, what is
    in `refused` instead of a submission, each once."""

    def __init__(self, peer: PeerClient) -> None:
        self._peer = peer
        self.calls: list[tuple[str, bytes]] = []
        self.mute: set[str] = set()
        self.broken: Exception | None = None
        self.refused: list[Exception] = []
        self.dropped: tuple[DroppedRollouts, ...] = ()
        self.open = asyncio.Event()
        self.open.set()

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def bodies(self, path: str) -> list[bytes]:
        return [body for called, body in self.calls if called == path]

    def released(self) -> list[tuple[int, bool]]:
        """How many samples were handed back each time, and whether all others are void too."""
        said = (decode(body, Release, cap_bytes=CONTROL_BODY_BYTES) for body in self.bodies("/v1/release"))
        return [(sum(len(held.indices) for held in one.samples), one.forget) for one in said]

    def beats(self) -> list[Beat]:
        return [decode(body, Beat, cap_bytes=CONTROL_BODY_BYTES) for body in self.bodies("/v1/beat")]

    def is_drawing(self) -> bool:
        """All that its engine takes at once, by its last beat."""
        return bool(self.beats()) and self.beats()[-1].samples == CAPACITY

    async def post(self, path: str, body: bytes, *, cap_bytes: int, timeout_s: float) -> bytes:
        self.calls.append((path, body))
        if path in self.mute:
            await asyncio.Event().wait()
        if path == "/v1/steps":
            await self.open.wait()
        if path == "/v1/steps" and self.refused:
            raise self.refused.pop()
        if path == "/v1/beat" and self.broken is not None:
            raise self.broken
        answer = await self._peer.post(path, body, cap_bytes=cap_bytes, timeout_s=timeout_s)
        if path == "/v1/beat" and self.dropped:
            return encode(BeatReply(newest=v(0), finished=False, dropped=self.dropped))
        return answer


class Sampler:
    """What a session needs besides its learner, and what it said."""

    def __init__(self, learner: Learner, hearer: Hearer, directory: Path) -> None:
        self.learner = learner
        self.hearer = hearer
        self.directory = directory
        self.said: list[str] = []
        self.status = SamplerStatus()
        self.spool = Spool(directory / "spool", "swarm", self.said.append)
        self.line = Line(learner.peers[BOB])
        self.installed = asyncio.Event()
        self.hang_s = 60.0
        self.module = ENGINE
        self.continuous = False
        self.grace_s = 10.0
        self.ending = Ending()

    def hang_in(self, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = "tests.integration.hanging_engine"
        monkeypatch.setenv(VARIABLE, call)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[asyncio.Task[bool]]:
        """A session with an engine of its own, which is told to stop at the end."""
        engine = EngineWorker(
            self.directory,
            kind="transformers",
            options=EngineOptions(places=CAPACITY, hang_s=self.hang_s, arguments={"continuous": self.continuous}),
            module=self.module,
        )
        launch = asyncio.create_task(engine.launch())
        session = Session(
            client=RolloutClient(self.line, BOB),
            beat_s=0.2,
            engine=engine,
            launch=launch,
            spool=self.spool,
            receiver=self.hearer.receiver,
            offer=Offer,
            status=self.status,
            on_change=self.installed.set,
            say=self.said.append,
        )
        ending = self.ending = Ending()
        task = asyncio.create_task(session.run(ending))
        try:
            yield task
            ending.ask(self.grace_s)
            await asyncio.wait([task])
        finally:
            task.cancel()
            await asyncio.gather(task, launch, return_exceptions=True)
            await engine.stop()


@pytest.fixture
async def sampler(tmp_path: Path) -> AsyncIterator[Sampler]:
    """It holds version 0, and its learner has leases for it."""
    learner = Learner()
    app = web.Application(middlewares=[guard])
    app.add_routes([session_route(learner.sessions), *learner.service.routes()])
    runner = web.AppRunner(app, handler_cancellation=True, auto_decompress=False, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = Address(host="127.0.0.1", port=runner.addresses[0][1])
    async with (
        PeerClient(address, key=OTHER_KEY, server=learner.key.node_id) as learner.peers[BOB],
        running(Hearer(tmp_path / "receiver")) as hearer,
    ):
        assert hearer.receiver.upkeep.store is not None
        first = Publisher(tmp_path / "learner").publish(0)
        hand_over(hearer.receiver.upkeep.store, first)
        hearer.list(LISTED)
        hearer.announce(first)
        await learner.open()
        yield Sampler(learner, hearer, tmp_path / "sampler")
    await runner.cleanup()


def accepted(sampler: Sampler, count: int) -> Callable[[], bool]:
    return lambda: sampler.status.verdicts["accepted"] >= count


async def test_what_a_former_life_generated_comes_before_anything_else(sampler: Sampler) -> None:
    former = await leases_for(sampler.learner, BOB, 2)
    sampler.spool.keep(answers_to(former))
    async with sampler.session():
        await until(accepted(sampler, ALL))
    paths = sampler.line.paths()
    assert paths[:2] == ["/v1/steps", "/v1/release"]
    assert {"/v1/leases", "/v1/beat"} <= set(paths[2:])
    assert "rollouts from before were submitted: 2 accepted" in sampler.said
    assert set(sampler.status.verdicts) == {"accepted"}
    assert sampler.spool.files() == []


async def test_of_a_batch_the_portion_alone_is_lost_that_the_learner_does_not_take(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.sampler.handing.PORTION_BYTES", 1)
    sampler.spool.keep(answers_to(await leases_for(sampler.learner, BOB, 3)))
    sampler.line.refused = [ProtocolError("not this one")]
    async with sampler.session():
        await until(lambda: "/v1/release" in sampler.line.paths())
    assert "rollouts from before were submitted: 2 accepted, 1 malformed" in sampler.said
    assert "the learner does not take 1 of these rollouts: not this one" in sampler.said


async def test_nothing_is_asked_for_before_that_has_its_verdicts(sampler: Sampler) -> None:
    sampler.spool.keep(answers_to(await leases_for(sampler.learner, BOB, 2)))
    sampler.line.mute = {"/v1/steps"}
    async with sampler.session():
        await asyncio.wait_for(sampler.installed.wait(), PATIENCE_S)
        await many_turns()
        assert sampler.line.paths() == ["/v1/steps"]
    assert len(sampler.spool.files()) == 1


async def test_a_batch_is_on_disk_from_before_its_submission_to_its_verdict(sampler: Sampler) -> None:
    """The session breaks meanwhile: nothing that is spooled is handed back, and the next one submits it."""
    sampler.line.mute = {"/v1/steps"}
    async with sampler.session() as task:
        await until(lambda: len(sampler.spool.files()) == ALL // CAPACITY)
        sampler.line.broken = ChildFailed("the engine died")
        with pytest.raises(ExceptionGroup) as broken:
            await task
    assert isinstance(first_fault(broken.value), ChildFailed)
    assert sampler.line.released() == [(0, True)]
    sampler.line = Line(sampler.learner.peers[BOB])
    async with sampler.session():
        await until(lambda: f"rollouts from before were submitted: {ALL} accepted" in sampler.said)
    assert sampler.spool.files() == []


async def test_leases_of_an_engine_that_hangs_are_handed_back(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler.hang_in("generate", monkeypatch)
    sampler.hang_s = 4.0
    async with sampler.session() as task:
        with pytest.raises(ExceptionGroup) as broken:
            await task
    assert "made no progress for 4 s" in str(first_fault(broken.value))
    # One batch in the engine, one waiting for it.
    assert sampler.line.released() == [(0, True), (2 * CAPACITY, False)]


async def test_generation_goes_on_while_no_submission_is_answered_and_questions_name_what_is_spooled(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler.grace_s = 0.1
    monkeypatch.setattr("swarm.sampler.session.FAREWELL_S", 0.1)
    sampler.line.mute = {"/v1/steps"}
    async with sampler.session() as task:
        await until(lambda: len(sampler.spool.files()) == ALL // CAPACITY)
        # Samples that a question does not name are put back, and would come anew.
        await until(lambda: len(sampler.line.bodies("/v1/leases")) > ALL // CAPACITY)
    assert task.result() is False
    assert len(sampler.line.bodies("/v1/steps")) == 1
    assert len(sampler.spool.files()) == ALL // CAPACITY
    assert any("what was generated is kept for the next start" in line for line in sampler.said)


async def test_a_learner_that_never_answers_does_not_block_leaving(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler.grace_s = 0.1
    monkeypatch.setattr("swarm.sampler.session.FAREWELL_S", 0.1)
    async with sampler.session() as task:
        await until(accepted(sampler, 1))
        sampler.line.mute = {"/v1/steps", "/v1/leases", "/v1/beat", "/v1/release"}
    assert task.result() is False
    assert any("the learner could not be told" in line for line in sampler.said)


async def test_a_node_that_is_held_ends_its_engine_before_it_hands_back_what_that_was_drawing(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler.hang_in("generate", monkeypatch)
    stop = EngineWorker.stop

    async def noted(self: EngineWorker) -> None:
        await stop(self)
        sampler.line.calls.append(("engine ended", b""))

    monkeypatch.setattr(EngineWorker, "stop", noted)
    sampler.grace_s = 0.0
    async with sampler.session() as task:
        await until(sampler.line.is_drawing)
    assert task.result() is False
    paths = sampler.line.paths()
    assert paths.index("engine ended") < len(paths) - paths[::-1].index("/v1/release") - 1
    assert sampler.line.released()[1:] == [(2 * CAPACITY, True)]


async def test_of_a_node_that_is_held_the_learner_gets_what_was_finished(sampler: Sampler) -> None:
    sampler.line.open.clear()
    async with sampler.session() as task:
        await until(lambda: len(sampler.spool.files()) == ALL // CAPACITY)
        await until(lambda: len(sampler.line.bodies("/v1/leases")) > ALL // CAPACITY)
        sampler.ending.ask(0.0)
        await many_turns()
        sampler.line.open.set()
        assert await task is False
    assert sampler.status.verdicts["accepted"] == ALL
    assert sampler.spool.files() == []


async def test_a_node_that_waits_for_its_samples_may_be_told_to_wait_no_longer(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler.hang_in("generate", monkeypatch)
    async with sampler.session() as task:
        await until(sampler.line.is_drawing)
        sampler.ending.ask(86_400.0)
        await until(lambda: len(sampler.line.bodies("/v1/release")) == 2)
        await many_turns()
        assert not task.done()
        sampler.ending.ask(0.0)
        assert await task is False
    assert f"samples under way are handed back: {CAPACITY}; others draw them" in sampler.said


async def test_what_is_kept_when_the_run_is_over_is_thrown_away(sampler: Sampler) -> None:
    sampler.line.mute = {"/v1/steps"}
    async with sampler.session() as task:
        await until(lambda: sampler.spool.files())
        await sampler.learner.service.end("finished")
        assert await task is True
    assert sampler.spool.files() == []


async def test_beats_tell_how_fast_a_sample_grows_and_hear_what_was_dropped(sampler: Sampler) -> None:
    sampler.line.dropped = (DroppedRollouts(reason="stale", rollouts=12),)
    async with sampler.session():
        await until(accepted(sampler, ALL))
        beats = len(sampler.line.bodies("/v1/beat"))
        await until(lambda: len(sampler.line.bodies("/v1/beat")) > beats + 2)
    told = sampler.line.beats()
    assert told[0].tokens_per_s == 0
    assert told[-1].tokens_per_s > 0
    assert sampler.status.drops.counts == {"stale": 12}
    assert sampler.said.count('the learner dropped 12 of our rollouts: "stale"') == 1


async def test_a_standby_says_so_once_however_the_run_ends(sampler: Sampler) -> None:
    sampler.learner.service.set_standby({BOB: "the active samplers suffice"})
    async with sampler.session():
        await until(lambda: bool(sampler.status.standby))
        await sampler.learner.service.end("draining")
        beats, asks = (len(sampler.line.bodies(path)) for path in ("/v1/beat", "/v1/leases"))
        await until(lambda: len(sampler.line.bodies("/v1/leases")) > asks + 1)
        await until(lambda: len(sampler.line.bodies("/v1/beat")) > beats + 1)
    told = [line for line in sampler.said if "standby" in line or "active" in line]
    assert told == ['standby: the learner says "the active samplers suffice"']


async def test_what_an_engine_could_do_is_said_once(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    open_to_all = "the engine process can reach the network: this is a test"
    sampler.hang_in("never", monkeypatch)
    monkeypatch.setenv(EXPOSED, open_to_all)
    for _ in range(2):
        async with sampler.session():
            await until(sampler.installed.is_set)
        sampler.installed.clear()
    assert sum(line.startswith("engine: ") for line in sampler.said) == 2
    assert sampler.said.count(open_to_all) == 1


async def test_weights_that_rotted_on_disk_are_mended_before_the_engine_takes_them(sampler: Sampler) -> None:
    receiver = sampler.hearer.receiver
    await receiver.upkeep.installed(None)
    assert receiver.upkeep.weights is not None
    with receiver.upkeep.weights.path.open("r+b") as file:
        file.write(b"spoilt")
    async with sampler.session():
        await until(accepted(sampler, ALL))
    assert any("is not the learner's" in line for line in sampler.said)


async def test_weights_whose_sums_alone_are_wrong_are_left_out_and_no_map_is_read_for_ever(sampler: Sampler) -> None:
    """A learner signed sums that its own regions do not have."""
    looked: list[int] = []
    receiver = sampler.hearer.receiver
    await receiver.upkeep.installed(None)
    recheck = receiver.upkeep.recheck

    async def counting() -> int:
        looked.append(await recheck())
        return looked[-1]

    receiver.upkeep.recheck = counting  # type: ignore[method-assign]
    assert receiver.upkeep.weights is not None
    current = receiver.upkeep.weights.current
    assert current is not None
    sums = (current.table.tensor_sums[0] ^ 1, *current.table.tensor_sums[1:])
    receiver.upkeep.weights._current = replace(current, table=msgspec.structs.replace(current.table, tensor_sums=sums))
    async with sampler.session():
        await until(lambda: looked)
        await until(lambda: len(sampler.line.bodies("/v1/beat")) > 10)
    assert looked == [0]


async def test_samples_that_do_not_fit_the_engine_are_handed_back_and_the_node_leaves(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = EngineWorker.load

    async def small(self: EngineWorker, layout: Layout) -> Started:
        self._started = msgspec.structs.replace(await started(self, layout), context_tokens=3)
        return self._started

    monkeypatch.setattr(EngineWorker, "load", small)
    async with sampler.session() as task:
        with pytest.raises(ExceptionGroup) as broken:
            await task
    assert "this engine has room for 3" in str(first_fault(broken.value))
    assert isinstance(first_fault(broken.value), UserError)
    assert sampler.line.released()[-1][0] == CAPACITY
    assert sampler.line.bodies("/v1/steps") == []


async def test_an_engine_that_takes_samples_by_themselves_is_fed_as_its_places_become_free(sampler: Sampler) -> None:
    sampler.continuous = True
    async with sampler.session():
        # More than for an engine that asks ahead: what can begin at once may be of the last batch too.
        await until(accepted(sampler, ALL + CAPACITY))
    asked = [decode(body, LeaseRequest, cap_bytes=CONTROL_BODY_BYTES) for body in sampler.line.bodies("/v1/leases")]
    assert asked[0].capacity == CAPACITY + 1
    assert asked[0].at_once == CAPACITY
    assert all(one.at_once <= CAPACITY and one.capacity <= CAPACITY + 1 for one in asked)
    # A question that says that no place is free is soon asked anew: by then some may be.
    assert all(one.wait_s == (ASK_WAIT_S if one.at_once else AHEAD_WAIT_S) for one in asked)
    assert sampler.spool.files() == []


async def test_a_node_that_finishes_leaves_when_the_run_is_over_meanwhile(sampler: Sampler) -> None:
    sampler.line.mute = {"/v1/steps"}
    async with sampler.session() as task:
        await until(lambda: sampler.spool.files())
        sampler.ending.ask(86_400.0)
        await until(lambda: len(sampler.line.bodies("/v1/release")) > 1 or sampler.status.state == "leaving")
        await many_turns()
        assert not task.done()
        await sampler.learner.service.end("finished")
        assert await task is True
