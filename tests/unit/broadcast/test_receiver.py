"""A learner's data plane and its receivers' over loopback in one process, from the first version to the last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.payload import layout_of, write_weights
from swarm.broadcast.forest.planner import PeerProfile, plan_of
from swarm.broadcast.mesh.seeder import Seeder
from swarm.broadcast.receiver.opening import OtherModel
from swarm.broadcast.receiver.receiver import Receiver
from swarm.broadcast.service import MAX_LINKS, BroadcastService
from swarm.broadcast.store.base_model import BaseModel
from swarm.broadcast.store.store import HeldVersion
from swarm.errors import PeerUnreachable
from swarm.join.joining import DataPlane
from swarm.net import links as links_module
from swarm.net.client import PeerClient, session_route
from swarm.net.links import Station
from swarm.net.pace import Pace
from swarm.net.server import NodeServer
from swarm.net.signing import SigningKey
from swarm.node.network import PeerPool
from swarm.types import Address, NodeId
from tests.builders import KEY, v
from tests.unit.broadcast.store.test_base_model import save
from tests.unit.net.test_links import station_of
from tests.unit.wires import many_turns, until

SIZE = 1 << 20
STEP_LR = 1e-5
LARGE_STEP_LR = 1e-2
"""Its deltas are half as large as a full version."""
SLOW = 250_000.0
"""Bytes a second: a first version takes about three seconds, so that there is time to do something in the middle."""


class World:
    """Where everybody is."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self.directory = directory
        self.stack = stack
        self.learner_at: list[Address] = []
        self.publics: dict[NodeId, list[Address]] = {}
        self.head = b""
        self.learners = 0

    def station(self, key: SigningKey, peers: PeerPool, upload: Pace) -> Station:
        return station_of(
            key,
            peers.at,
            learner=lambda: (KEY.node_id, self.learner_at),
            head=lambda: self.head,
            publics=lambda: [(node, at[0]) for node, at in self.publics.items() if node != key.node_id],
            public_at=lambda node: self.publics.get(node, []),
            upload=upload,
        )

    async def learner(self, *, bytes_per_s: float | None = None, size: int = SIZE, again: bool = False) -> LearnerHost:
        """A learner; `again`, over the directory of the last one."""
        self.learners += not again
        host = LearnerHost(self, self.directory / f"learner{self.learners}", Pace(bytes_per_s))
        await host.start(size)
        return host

    async def receiver(
        self, number: int, *, leaf: bool = False, base: BaseModel | None = None, bytes_per_s: float | None = None
    ) -> ReceiverHost:
        """A receiver; one that has been here before goes on with its directory."""
        host = ReceiverHost(self, number, base, Pace(bytes_per_s))
        await host.start(leaf=leaf)
        return host


class LearnerHost:
    def __init__(self, world: World, directory: Path, upload: Pace) -> None:
        self._world = world
        self._directory = directory
        self._peers = PeerPool(KEY)
        self.station = world.station(KEY, self._peers, upload)
        self.service = BroadcastService(directory, KEY, self.station)

    async def start(self, size: int) -> None:
        self._size = size
        await self.service.open(layout_of(size))
        routes = [session_route(self.station.sessions), *self.service.routes()]
        self._server = NodeServer(routes, dict, on_stream=self.service.accept)
        port = await self._server.start("127.0.0.1", 0)
        self._world.learner_at = [Address(host="127.0.0.1", port=port)]
        self._run = asyncio.create_task(self.service.run())
        self._world.stack.push_async_callback(self.stop)

    async def stop(self) -> None:
        self._run.cancel()
        await asyncio.gather(self._run, return_exceptions=True)
        await self._server.stop()
        await self._peers.close()
        self.service.close()

    async def publish(self, number: int, *, incarnation: int = 0, step_lr: float = STEP_LR) -> HeldVersion:
        staging = self._directory.with_name("staging.bin")
        write_weights(staging, self._size, seed=0, step_lr=step_lr * number)
        held = await self.service.encode(staging, v(number, incarnation))
        self.service.announce(held)
        return held

    def linked(self, count: int) -> Callable[[], bool]:
        return lambda: self.service.status()["streams"] == count

    def holders(self) -> dict[str, int]:
        return {version: found["complete"] for version, found in self.service.status()["broadcasts"].items()}

    @property
    def sent_bytes(self) -> int:
        """Over streams and HTTP."""
        return self.station.upload.total_bytes


class ReceiverHost:
    def __init__(self, world: World, number: int, base: BaseModel | None, upload: Pace) -> None:
        self._world = world
        key = SigningKey.from_bytes(bytes([number]) * 32)
        self.node = key.node_id
        self.directory = world.directory / f"receiver{number}"
        self._peers = PeerPool(key)
        self.refusals = 0
        self.said: list[str] = []
        self.station = replace(world.station(key, self._peers, upload), peer_at=self._peer_at)
        self._data = DataPlane(self.station, say=self.said.append, base=base)
        self.receiver: Receiver
        self.failed: BaseExceptionGroup | None = None

    async def start(self, *, leaf: bool = False) -> None:
        routes = [session_route(self.station.sessions), *self._data.routes()]
        self._server = NodeServer(routes, dict, on_stream=self._data.accept)
        port = await self._server.start("127.0.0.1", 0)
        if not leaf:
            self._world.publics[self.node] = [Address(host="127.0.0.1", port=port)]
        started = asyncio.Event()
        self._run = asyncio.create_task(self._receive(started))
        self._world.stack.push_async_callback(self.stop)
        await started.wait()

    async def stop(self) -> None:
        self._world.publics.pop(self.node, None)
        self._run.cancel()
        await asyncio.gather(self._run, return_exceptions=True)
        await self._server.stop()
        await self._peers.close()
        self._data.close()

    def holds(self, number: int, incarnation: int = 0) -> bool:
        return self.receiver.upkeep.version == v(number, incarnation)

    def chunks_held(self, number: int) -> int:
        return int(self.receiver.status()["chunks_held"].get(str(v(number)), 0))

    def weights(self) -> bytes:
        assert self.receiver.upkeep.weights is not None
        return self.receiver.upkeep.weights.path.read_bytes()

    async def _receive(self, started: asyncio.Event) -> None:
        try:
            async with self._data.receiving(self.directory, KEY.public_bytes) as self.receiver:
                started.set()
                await asyncio.Event().wait()
        except BaseExceptionGroup as group:
            self.failed = group

    def _peer_at(self, node: NodeId, address: Address) -> PeerClient:
        if self.refusals > 0:
            self.refusals -= 1
            raise PeerUnreachable("a line that is down for a moment")
        return self._peers.at(node, address)


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(links_module, "MIN_BACK_OFF_S", 0.05)
    monkeypatch.setattr("swarm.broadcast.receiver.opening.RETRY_S", 0.1)
    async with AsyncExitStack() as stack:
        yield World(tmp_path, stack)


def expected(tmp_path: Path, number: int, *, step_lr: float = STEP_LR) -> bytes:
    path = tmp_path / "expected.bin"
    write_weights(path, SIZE, seed=0, step_lr=step_lr * number)
    return path.read_bytes()


def all_hold(hosts: list[ReceiverHost], number: int, incarnation: int = 0) -> Callable[[], bool]:
    return lambda: all(host.holds(number, incarnation) for host in hosts)


# -- versions ------------------------------------------------------------------------------------------------


async def test_version_after_version_comes_whole_to_publics_and_leaves(world: World, tmp_path: Path) -> None:
    learner = await world.learner()
    hosts = [await world.receiver(1), await world.receiver(2), await world.receiver(3, leaf=True)]
    hosts.append(await world.receiver(4, leaf=True))
    for number in range(4):
        held = await learner.publish(number)
        assert (held.head.base is None) == (number == 0)
        await until(all_hold(hosts, number))
    assert {host.weights() for host in hosts} == {expected(tmp_path, 3)}
    assert [host.said for host in hosts] == [[], [], [], []]
    status = learner.service.status()
    await until(lambda: learner.service.status()["broadcasts"]["0.3"]["complete"] == 4)
    assert status["streams"] == 4
    me, nodes = KEY.node_id, [host.node for host in hosts]
    two_leaves = {(nodes[2], nodes[3]), (nodes[3], nodes[2])}
    to_all = {(sender, node) for sender in (me, *nodes) for node in nodes if node != sender} - two_leaves
    assert {(sender, node) for sender, node, _, _ in learner.service.status()["links"]} == to_all
    assert {rate is None for sender, _, rate, _ in status["links"] if sender != me} == {True}
    own = [rate for sender, _, rate, _ in status["links"] if sender == me and rate is not None]
    assert len(own) == 4
    assert status["up_bytes_per_s"] == pytest.approx(sum(own), abs=4)
    await until(lambda: {version for *_, version in learner.service.status()["links"]} == {None})
    assert hosts[0].receiver.status()["map"] == "0.3"
    # What they can send is known as soon as no version is under way.
    await until(lambda: learner.service.status()["uplinks"].keys() == set(nodes))
    await until(lambda: all(rate > 0 for rate in learner.service.status()["uplinks"].values()))


@pytest.mark.parametrize("count", [60, 600])
async def test_in_a_forest_the_links_are_those_of_the_trees_as_many_as_can_be_drawn(world: World, count: int) -> None:
    learner = await world.learner()
    profiles = [
        PeerProfile(node=NodeId(f"{at:032x}"), public=at % 2 == 0, uplink_bytes_per_s=1e6) for at in range(count)
    ]
    plan = plan_of(PeerProfile(node=KEY.node_id, public=True, uplink_bytes_per_s=1e7), profiles, 10**7)
    learner.service._planning.plan = plan
    links = [(sender, node) for sender, node, _, _ in learner.service.status()["links"]]
    assert plan.pairs() >= set(links)
    assert len(set(links)) == len(links) <= MAX_LINKS
    assert {node for _, node in links} == {profile.node for profile in profiles}
    assert count > 100 or set(links) == plan.pairs()


async def test_deltas_that_were_published_meanwhile_are_applied_in_order(world: World, tmp_path: Path) -> None:
    learner = await world.learner(bytes_per_s=4 * SLOW)
    hosts = [await world.receiver(number, bytes_per_s=4 * SLOW) for number in (1, 2)]
    await until(learner.linked(2))
    for number in range(3):
        await learner.publish(number)
    assert len(learner.service._transfers.active) == 3
    assert {version for *_, version in learner.service.status()["links"]} == {"0.2"}
    progress = [found["progress"] for found in learner.service.status()["broadcasts"].values()]
    assert all(0 < share <= 1 for shares in progress for share in shares.values())
    await until(lambda: any(found["progress"] for found in learner.service.status()["broadcasts"].values()))
    await until(lambda: all(len(host.receiver.status()["chunks_held"]) == 3 for host in hosts))
    await until(all_hold(hosts, 2))
    assert {host.weights() for host in hosts} == {expected(tmp_path, 2)}
    await until(lambda: not any(found["progress"] for found in learner.service.status()["broadcasts"].values()))


async def test_a_full_version_makes_the_ones_before_needless(world: World, tmp_path: Path) -> None:
    """A receiver that cannot keep pace is not buried under deltas."""
    learner = await world.learner(bytes_per_s=SLOW)
    host = await world.receiver(1)
    await until(learner.linked(1))
    for number in range(4):
        held = await learner.publish(number, step_lr=LARGE_STEP_LR)
        await until(lambda: number == 3 or learner.service._transfers.active[v(number)].parts[0].joined)  # noqa: B023
    assert held.head.base is None
    assert list(learner.service._transfers.active) == [v(3)]
    await until(lambda: host.receiver.status()["chunks_held"].keys() == {"0.3"})
    assert host.receiver.upkeep.version is None
    await until(lambda: host.holds(3))
    assert host.weights() == expected(tmp_path, 3, step_lr=LARGE_STEP_LR)


async def test_who_leaves_in_the_middle_takes_no_part_any_more_at_once(world: World) -> None:
    learner = await world.learner(bytes_per_s=SLOW)
    leaving, staying = [await world.receiver(number) for number in (1, 2)]
    await until(lambda: staying.receiver.status()["streams"] == leaving.receiver.status()["streams"] == 2)
    await learner.publish(0)
    await until(lambda: leaving.chunks_held(0) and staying.chunks_held(0))
    others = [host.active[v(0)] for host in (learner.service._transfers, staying.receiver._transfers)]
    await until(lambda: all(leaving.node in transfer.parts[0].joined for transfer in others))
    leaving._run.cancel()
    async with asyncio.timeout(1):
        await until(lambda: not any(leaving.node in transfer.parts[0].joined for transfer in others))


# -- restarts ------------------------------------------------------------------------------------------------


async def test_a_receiver_that_was_restarted_goes_on_where_it_was(world: World, tmp_path: Path) -> None:
    learner = await world.learner(bytes_per_s=SLOW)
    host = await world.receiver(1)
    held = await learner.publish(0)
    half = len(held.chunks.spans) // 2
    await until(lambda: host.chunks_held(0) > half)
    syncing = host.receiver.status()["syncing"]
    assert syncing["version"] == "0.0"
    assert 0.5 <= syncing["share"] < 1
    await host.stop()
    again = await world.receiver(1)
    await until(lambda: again.receiver.status()["chunks_held"])
    assert again.chunks_held(0) > half
    await until(lambda: again.holds(0))
    assert again.weights() == expected(tmp_path, 0)
    assert again.receiver.status()["syncing"] is None
    assert learner.sent_bytes < 1.3 * held.table.encoded_bytes


async def test_a_receiver_far_behind_is_helped_by_another_one(world: World, tmp_path: Path) -> None:
    learner = await world.learner()
    ready = await world.receiver(1)
    for number in range(6):
        await learner.publish(number)
        await until(lambda: ready.holds(number))  # noqa: B023
    before, given = learner.sent_bytes, ready.station.upload.total_bytes
    late = await world.receiver(2)
    await until(lambda: late.holds(5))
    assert late.weights() == expected(tmp_path, 5)
    assert ready.station.upload.total_bytes - given > SIZE / 2
    assert learner.sent_bytes - before < SIZE / 4
    await learner.publish(6)
    await until(lambda: late.holds(6))


async def test_a_learner_that_was_restarted_sends_the_rest_of_a_version(world: World, tmp_path: Path) -> None:
    learner = await world.learner(bytes_per_s=SLOW)
    hosts = [await world.receiver(number) for number in (1, 2)]
    held = await learner.publish(0)
    half = len(held.chunks.spans) // 2
    await until(lambda: all(host.chunks_held(0) > half for host in hosts))
    await learner.stop()
    again = await world.learner(again=True)
    await until(all_hold(hosts, 0))
    assert hosts[0].weights() == hosts[1].weights() == expected(tmp_path, 0)
    assert again.sent_bytes < 0.7 * held.table.encoded_bytes


async def test_a_learner_that_was_restarted_sends_nothing_that_everybody_has(world: World) -> None:
    learner = await world.learner()
    hosts = [await world.receiver(number) for number in (1, 2)]
    held = await learner.publish(0)
    await until(all_hold(hosts, 0))
    await learner.stop()
    again = await world.learner(again=True)
    await until(lambda: again.service.status()["broadcasts"]["0.0"]["complete"] == 2)
    seeder = again.service._transfers.active[v(0)].parts[0].courier
    assert isinstance(seeder, Seeder)
    await until(lambda: seeder.dealt)
    assert again.sent_bytes < 0.2 * held.table.encoded_bytes
    await again.publish(0, incarnation=1)
    await until(all_hold(hosts, 0, 1))


async def test_receivers_go_on_among_themselves_while_the_learner_is_gone(world: World, tmp_path: Path) -> None:
    learner = await world.learner()
    hosts = [await world.receiver(number) for number in (1, 2)]
    await learner.publish(0)
    await until(all_hold(hosts, 0))
    await until(lambda: all(host.receiver.status()["streams"] == 2 for host in hosts))
    await learner.stop()
    await until(lambda: [host.receiver.status()["streams"] for host in hosts] == [1, 1])
    await many_turns()
    assert [host.receiver.status()["streams"] for host in hosts] == [1, 1]


# -- versions that came another way --------------------------------------------------------------------------


async def test_the_learner_counts_who_took_a_version_from_its_base_model(world: World, tmp_path: Path) -> None:
    learner = await world.learner(bytes_per_s=SLOW)
    host = await world.receiver(1, base=BaseModel(save(tmp_path / "base", layout_of(SIZE), expected(tmp_path, 0))))
    await until(learner.linked(1))
    await learner.publish(0)
    assert (await host.receiver.upkeep.installed(None)).version == v(0)
    await until(lambda: learner.holders() == {"0.0": 1})
    assert host.chunks_held(0) == 0
    # It can give nobody a chunk: nobody is to count on it.
    assert learner.service._transfers.active[v(0)].parts[0].joined == set()
    await learner.publish(1)
    await until(lambda: host.holds(1))
    assert list(learner.service._transfers.active) == [v(1)]
    await until(lambda: learner.holders() == {"0.0": 1, "0.1": 1})


async def test_the_learner_counts_who_caught_up_by_deltas(world: World) -> None:
    """They lead through the versions between."""
    learner = await world.learner()
    host = await world.receiver(1)
    await learner.publish(0)
    await until(lambda: learner.holders() == {"0.0": 1})
    await host.stop()
    for number in (1, 2):
        await learner.publish(number)
    again = await world.receiver(1)
    await until(lambda: learner.holders() == {"0.0": 1, "0.1": 1, "0.2": 1})
    assert again.receiver.status()["chunks_held"] == {}


# -- models --------------------------------------------------------------------------------------------------


async def test_another_model_is_told_to_whoever_uses_the_old_one(world: World) -> None:
    learner = await world.learner()
    host = await world.receiver(1)
    await learner.publish(0)
    await until(lambda: host.holds(0))
    await learner.stop()
    other = await world.learner(size=SIZE // 2)
    await other.publish(0, incarnation=1)
    await until(lambda: host.failed)
    assert host.failed is not None
    assert host.failed.subgroup(OtherModel)
    again = await world.receiver(1)
    await until(lambda: again.holds(0, incarnation=1))
    assert len(again.weights()) == SIZE // 2


async def test_a_layout_that_nobody_gives_at_first_is_asked_for_again(world: World) -> None:
    learner = await world.learner()
    host = await world.receiver(1)
    await until(learner.linked(1))
    host.refusals = 3
    await learner.publish(0)
    await until(lambda: host.holds(0))
    assert host.refusals == 0


async def test_whom_an_outage_left_behind_together_ask_the_learner_in_the_end(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither has what the other lacks. What both hold is in the map again after each try: that is no progress."""
    monkeypatch.setattr("swarm.broadcast.receiver.upkeep.PATIENCE_S", 0.5)
    monkeypatch.setattr(links_module, "MAX_BACK_OFF_S", 0.1)
    learner = await world.learner()
    hosts = [await world.receiver(number) for number in (1, 2)]
    for number in range(2):
        await learner.publish(number)
        await until(all_hold(hosts, number))
    for host in hosts:
        host.refusals = 10**9
        host.receiver._neighbours.links.end(KEY.node_id)
    await until(learner.linked(0))
    for number in range(2, 8):
        await learner.publish(number)
    for host in hosts:
        host.refusals = 0
    await until(all_hold(hosts, 7))
    assert {host.weights() for host in hosts} == {expected(tmp_path, 7)}
