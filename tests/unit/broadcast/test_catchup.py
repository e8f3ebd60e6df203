"""Catching up over real servers on loopback: by deltas or by full regions, whoever fails or lies."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from swarm.broadcast import serving
from swarm.broadcast.receiver import catchup as fetching
from swarm.broadcast.receiver import neighbours
from swarm.broadcast.receiver.catchup import GONE_IN_A_ROW, REQUESTS_A_PEER, CatchUp
from swarm.broadcast.serving import ENCODINGS_AT_A_TIME, ENCODINGS_WAITING, OLDER_WEIGHT, Places, VersionServer
from swarm.broadcast.store.store import KEEP_VERSIONS, HeldVersion, VersionStore
from swarm.broadcast.store.weight_map import WeightMap, open_weights
from swarm.broadcast.version.manifest import DELTAS
from swarm.errors import PeerUnreachable
from swarm.net.client import Gone, HttpPeer, PeerClient, guard
from swarm.net.links import Station
from swarm.net.pace import Pace
from swarm.net.server import NodeServer
from swarm.types import Address, NodeId
from swarm.wire import PROTOCOL, PROTOCOL_HEADER
from tests.builders import v
from tests.publishers import Holder, Publisher
from tests.unit.broadcast.test_transfers import flipped
from tests.unit.wires import PATIENCE_S, many_turns, until

Alter = Callable[[web.Request, web.StreamResponse], Awaitable[web.StreamResponse]]


class Net:
    """A learner's disk, and servers on loopback, each with a client that counts what is asked of it."""

    def __init__(self, stack: AsyncExitStack, publisher: Publisher) -> None:
        self._stack = stack
        self.publisher = publisher
        self.pool = stack.enter_context(ThreadPoolExecutor(2))
        self.refused: Counter[str] = Counter()

    def version_server(
        self, store: VersionStore, weights: WeightMap, *, upload: Pace | None = None, linked: Collection[str] = ()
    ) -> VersionServer:
        linked_at = {NodeId(f"node{number}"): host for number, host in enumerate(linked)}
        station = SimpleNamespace(upload=upload or Pace(None), linked_at=linked_at, refused=self.refused)
        return VersionServer(lambda: store, lambda: weights, self.pool, cast(Station, station))

    async def serve(self, store: VersionStore, weights: WeightMap, *, alter: Alter | None = None) -> CountingPeer:
        asked: list[str] = []

        @web.middleware
        async def count(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            asked.append(request.path)
            answer = await handler(request)
            return await alter(request, answer) if alter else answer

        app = web.Application(middlewares=[count, guard])
        app.add_routes(self.version_server(store, weights).routes())
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        client = PeerClient(Address(host="127.0.0.1", port=runner.addresses[0][1]))
        await self._stack.enter_async_context(client)
        return CountingPeer(client, asked)

    async def node(self, **rest: Any) -> str:
        """Serve as a node does, to clients that may hang up, and return the URL."""
        published = self.publisher.published
        return await self.serving(self.version_server(published.store, published.weights, **rest))

    async def serving(self, server: VersionServer) -> str:
        node = NodeServer(server.routes(), dict)
        port = await node.start("127.0.0.1", 0)
        self._stack.push_async_callback(node.stop)
        return f"http://127.0.0.1:{port}/v1"

    async def session(self) -> aiohttp.ClientSession:
        """Of a client with as many connections as it likes."""
        connector, headers = aiohttp.TCPConnector(limit=0), {PROTOCOL_HEADER: str(PROTOCOL)}
        return await self._stack.enter_async_context(aiohttp.ClientSession(headers=headers, connector=connector))

    async def learner(self, *, alter: Alter | None = None) -> CountingPeer:
        return await self.serve(self.publisher.published.store, self.publisher.published.weights, alter=alter)

    async def up_to_date(self, directory: Path) -> CountingPeer:
        """Another receiver that holds the newest version."""
        newest, other = self.publisher.published.newest, Holder(directory, self.publisher)
        assert newest is not None
        other.fill(newest)
        return await self.serve(other.store, other.map)


class CountingPeer:
    """A Peer; `asked` are the paths of all requests that came in."""

    def __init__(self, client: PeerClient, asked: list[str]) -> None:
        self._client = client
        self.asked = asked

    async def get(self, path: str, *, cap_bytes: int, timeout_s: float, **rest: Any) -> bytes:
        return await self._client.get(path, cap_bytes=cap_bytes, timeout_s=timeout_s, **rest)

    async def post(self, path: str, body: bytes, *, cap_bytes: int, timeout_s: float) -> bytes:
        return await self._client.post(path, body, cap_bytes=cap_bytes, timeout_s=timeout_s)

    def count(self, what: str) -> int:
        return sum(what in path for path in self.asked)


@pytest.fixture
async def net(tmp_path: Path) -> AsyncIterator[Net]:
    async with AsyncExitStack() as stack:
        yield Net(stack, Publisher(tmp_path / "learner"))


class Receiver(Holder):
    """A receiver's disk, and what a catch-up makes of it."""

    def __init__(self, directory: Path, net: Net) -> None:
        super().__init__(directory, net.publisher)
        self._pool = net.pool

    async def catch_up(
        self, target: HeldVersion, *sources: HttpPeer, learner: HttpPeer | None = None, patient: bool = False
    ) -> None:
        helper = [learner] if learner is not None else []
        await CatchUp(
            store=self.store, weights=self.map, sources=sources, learner=helper, patient=patient, pool=self._pool
        ).run(target)


@pytest.fixture
def receiver(tmp_path: Path, net: Net) -> Receiver:
    return Receiver(tmp_path / "receiver", net)


def of(part: str, do: Callable[[web.Response], Awaitable[web.StreamResponse]]) -> Alter:
    """Alter the answers to requests that name this."""

    async def alter(request: web.Request, answer: web.StreamResponse) -> web.StreamResponse:
        return await do(cast(web.Response, answer)) if part in request.path else answer

    return alter


@pytest.mark.parametrize(
    ("newest", "is_new", "by_chunks"),
    [(3, False, True), (0, True, True), (7, False, False)],
    ids=["stored deltas, in sequence", "a full version, for a new node", "regions, further behind than anybody keeps"],
)
async def test_a_node_that_is_behind_takes_the_way_of_fewer_bytes(
    net: Net, receiver: Receiver, newest: int, is_new: bool, by_chunks: bool
) -> None:
    done = net.publisher.publish_up_to(newest)
    wanted = done if is_new else done[1:]
    if not is_new:
        receiver.take(done[0])
    learner = await net.learner()
    await receiver.catch_up(done[newest], learner)
    assert receiver.holds(newest)
    assert learner.count("/chunks/") == (sum(len(version.chunks.spans) for version in wanted) if by_chunks else 0)
    assert (learner.count("/regions/") == 0) == by_chunks
    # Chunks can be given on.
    assert not by_chunks or [held.chunks.complete for held in receiver.store.versions()] == [True] * len(done)


async def test_deltas_that_are_more_bytes_than_the_whole_are_not_fetched(net: Net, receiver: Receiver) -> None:
    net.publisher.changed_words, net.publisher.max_ulps = 400_000, 400
    done = net.publisher.publish_up_to(3)
    assert any(entry.codec in DELTAS for entry in done[3].table.regions)
    receiver.take(done[0])
    learner = await net.learner()
    await receiver.catch_up(done[3], learner)
    assert learner.count("/chunks/") == 0
    assert receiver.holds(3)


async def test_several_peers_share_all_of_the_work(net: Net, receiver: Receiver, tmp_path: Path) -> None:
    newest = net.publisher.publish_up_to(5)[5]
    peers = [await net.up_to_date(tmp_path / f"peer{i}") for i in range(3)]
    learner = await net.learner()
    await receiver.catch_up(newest, *peers, learner=learner)
    assert receiver.holds(5)
    assert [peer.count("/regions/") > 0 for peer in peers] == [True] * 3
    assert learner.count("/regions/") == 0


@pytest.mark.parametrize("lie", [flipped, lambda body: body[:-9], lambda body: b"", lambda body: body + b"more" * 30])
@pytest.mark.parametrize(("behind", "part"), [("a little", "/chunks/"), ("far", "/regions/")])
async def test_a_peer_that_lies_is_left(
    net: Net, receiver: Receiver, lie: Callable[[bytes], bytes], behind: str, part: str
) -> None:
    async def lying(answer: web.Response) -> web.StreamResponse:
        assert isinstance(answer.body, bytes)
        return web.Response(body=lie(answer.body))

    done = net.publisher.publish_up_to(3)
    if behind == "a little":
        receiver.take(done[0])
    liar, honest = await net.learner(alter=of(part, lying)), await net.learner()
    await receiver.catch_up(done[3], liar, honest)
    assert receiver.holds(3)
    assert 0 < liar.count(part) <= REQUESTS_A_PEER


async def test_what_came_before_everybody_failed_is_kept(net: Net, receiver: Receiver) -> None:
    newest = net.publisher.publish_up_to(5)[5]

    async def half(request: web.Request, answer: web.StreamResponse) -> web.StreamResponse:
        index = request.path.rpartition("/")[2]
        return web.Response(status=410) if index.isdigit() and int(index) % 2 else answer

    with pytest.raises(PeerUnreachable):
        await receiver.catch_up(newest, await net.learner(alter=half))
    lacking = receiver.map.lacking(newest.table)
    assert 0 < len(lacking) < len(newest.table.regions)
    receiver.map.close()
    receiver.map = open_weights(receiver.store)
    learner = await net.learner()
    await receiver.catch_up(newest, learner)
    assert learner.count("/regions/") == len(lacking)
    assert receiver.holds(5)


async def test_peers_that_are_gone_or_behind_are_no_obstacle(net: Net, receiver: Receiver, tmp_path: Path) -> None:
    net.publisher.publish(0)
    behind = await net.up_to_date(tmp_path / "behind")
    newest = [net.publisher.publish(number) for number in range(1, 6)][-1]
    async with PeerClient(Address(host="127.0.0.1", port=1)) as dead:
        await receiver.catch_up(newest, dead, behind, learner=await net.learner())
    assert receiver.holds(5)
    assert 0 < behind.count("/regions/") < GONE_IN_A_ROW + REQUESTS_A_PEER


async def stall(answer: web.Response) -> web.StreamResponse:
    await asyncio.Event().wait()
    return answer


async def test_a_stalled_peer_holds_nothing_up(net: Net, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "LATE_S", 0.2)
    newest = net.publisher.publish_up_to(5)[5]
    stalled, good = await net.learner(alter=of("/regions/", stall)), await net.learner()
    async with asyncio.timeout(PATIENCE_S):
        await receiver.catch_up(newest, stalled, good)
    assert receiver.holds(5)


@pytest.mark.parametrize("patient", [True, False])
async def test_the_learner_gives_what_silent_peers_keep_to_themselves(
    net: Net, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, patient: bool
) -> None:
    """Each of their requests would end after a minute, and a patient node would not burden the learner by then."""
    monkeypatch.setattr(fetching, "LATE_S", 0.1)
    monkeypatch.setattr(neighbours, "SILENT_S", 0.1)
    done = net.publisher.publish_up_to(3)
    receiver.take(done[0])
    silent, learner = await net.learner(alter=of("", stall)), await net.learner()
    async with asyncio.timeout(PATIENCE_S):
        await receiver.catch_up(done[3], silent, learner=learner, patient=patient)
    assert receiver.holds(3)
    # Once silent, it is left out of what else there is to fetch.
    assert silent.count("/chunks/") <= REQUESTS_A_PEER


async def test_a_patient_node_leaves_the_learner_alone_while_its_peers_answer(net: Net, receiver: Receiver) -> None:
    done = net.publisher.publish_up_to(1)
    receiver.take(done[0])
    behind, learner = await net.serve(receiver.store, receiver.map), await net.learner()
    with pytest.raises(PeerUnreachable):
        await receiver.catch_up(done[1], behind, learner=learner, patient=True)
    assert learner.asked == []
    await receiver.catch_up(done[1], behind, learner=learner)
    assert receiver.holds(1)


async def test_no_peer_says_how_long_one_waits(net: Net, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = [300]

    async def hesitate(request: web.Request, answer: web.StreamResponse) -> web.StreamResponse:
        return web.Response(status=503, headers={"Retry-After": str(pauses.pop())}) if pauses else answer

    monkeypatch.setattr(fetching, "MAX_BUSY_S", 0.0)
    newest = net.publisher.publish(0)
    async with asyncio.timeout(PATIENCE_S):
        await receiver.catch_up(newest, await net.learner(alter=hesitate))
    assert receiver.holds(0)


async def test_a_busy_peer_is_asked_again(net: Net, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "ENCODINGS_WAITING", 1)
    newest = net.publisher.publish_up_to(5)[5]
    learner = await net.learner()
    monkeypatch.setattr(fetching, "BUSY_IN_A_ROW", 1000)
    monkeypatch.setattr(fetching, "REQUESTS_A_PEER", 2)
    await receiver.catch_up(newest, learner)
    assert receiver.holds(5)


async def test_a_damaged_region_is_fetched_and_the_rest_is_applied(net: Net, receiver: Receiver) -> None:
    done = net.publisher.publish_up_to(1)
    receiver.take(done[0])
    with receiver.map.path.open("r+b") as file:
        file.seek(100)
        file.write(b"rot")
    receiver.store.drop(v(0))
    receiver.map.close()
    receiver.map = open_weights(receiver.store)
    assert receiver.map.version is None
    learner = await net.learner()
    await receiver.catch_up(done[1], learner)
    assert receiver.holds(1)
    assert learner.count("/chunks/") > 0
    assert learner.count("/regions/") == 1


async def test_a_node_serves_no_version_that_it_does_not_hold(net: Net, receiver: Receiver) -> None:
    done = net.publisher.publish_up_to(1)
    receiver.store.begin(done[1])
    peer = await net.serve(receiver.store, receiver.map)
    head = await peer.get("/v1/versions/0.1/head", cap_bytes=1024, timeout_s=5)
    assert head == done[1].sealed_head
    for path in ("0.1/chunks/0", "0.1/chunks/999", "0.1/regions/0", "0.1/regions/9999", "0.0/head", "0.0/chunks/0"):
        with pytest.raises(Gone):
            await peer.get(f"/v1/versions/{path}", cap_bytes=1 << 20, timeout_s=5)


async def test_every_request_waits_for_the_cap(net: Net, receiver: Receiver) -> None:
    asked: list[int] = []

    async def meter(nbytes: int) -> None:
        asked.append(nbytes)

    newest = net.publisher.publish(0)
    learner = await net.learner()
    await CatchUp(store=receiver.store, weights=receiver.map, sources=[learner], pool=net.pool, meter=meter).run(newest)
    assert len(asked) == learner.count("/chunks/") + learner.count("/regions/") > 0
    assert sum(asked) == newest.table.encoded_bytes


# -- strangers who ask ---------------------------------------------------------------------------------------

CROWD, NEWCOMER = "198.51.100.7", "203.0.113.9"


async def entered(places: Places, caller: str, order: list[str]) -> bool:
    if got := await places.enter(caller):
        order.append(caller)
    return got


async def test_a_newcomer_has_its_turn_among_many_requests_of_one_address() -> None:
    places, order = Places(), list[str]()
    crowd = [asyncio.ensure_future(entered(places, CROWD, order)) for _ in range(48)]
    await many_turns()
    assert [task.result() for task in crowd if task.done()].count(False) == 48 - ENCODINGS_WAITING - ENCODINGS_AT_A_TIME
    newcomer = [asyncio.ensure_future(entered(places, NEWCOMER, order)) for _ in range(4)]
    await many_turns()
    order.clear()
    for _ in range(8):
        places.leave()
        crowd.append(asyncio.ensure_future(entered(places, CROWD, order)))
        await many_turns()
    assert order == [CROWD, NEWCOMER] * 4
    for task in crowd:
        task.cancel()
    assert await asyncio.gather(*newcomer) == [True] * 4


async def test_requests_that_hang_up_leave_no_place_taken() -> None:
    places, order = Places(), list[str]()
    for _ in range(ENCODINGS_AT_A_TIME):
        assert await places.enter(CROWD)
    crowd = [asyncio.ensure_future(entered(places, CROWD, order)) for _ in range(ENCODINGS_WAITING)]
    await many_turns()
    for task in crowd[1:]:
        task.cancel()
    # The last one has its place at the moment in which it hangs up.
    places.leave()
    crowd[0].cancel()
    places.leave()
    await asyncio.gather(*crowd, return_exceptions=True)
    assert order == []
    async with asyncio.timeout(PATIENCE_S):
        assert [await places.enter(NEWCOMER) for _ in range(ENCODINGS_AT_A_TIME)] == [True] * ENCODINGS_AT_A_TIME


async def test_what_clients_that_hung_up_asked_for_is_not_encoded(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    net.publisher.publish(0)
    weights, go_on, begun = net.publisher.published.weights, threading.Event(), list[int]()
    encode_full = weights.encode_full

    def slowly(index: int, wanted: bytes) -> object:
        begun.append(index)
        assert go_on.wait(PATIENCE_S)
        return encode_full(index, wanted)

    monkeypatch.setattr(weights, "encode_full", slowly)
    server = net.version_server(net.publisher.published.store, weights)
    path = f"{await net.serving(server)}/versions/{v(0)}/regions/0"
    session = await net.session()
    calls = [asyncio.ensure_future(session.get(path)) for _ in range(48)]
    await until(lambda: net.refused["encodings"] == 48 - ENCODINGS_WAITING - ENCODINGS_AT_A_TIME)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await until(lambda: not server._places._turns)
    go_on.set()
    assert (await session.get(path)).status == 200
    assert len(begun) == ENCODINGS_AT_A_TIME + 1


async def test_a_body_is_booked_as_it_is_sent(net: Net) -> None:
    net.publisher.publish(0)
    upload = Pace(1.0)
    path = f"{await net.node(upload=upload)}/objects/{net.publisher.published.store.layout_digest.hex()}"
    net.publisher.published.store.layout_bytes = bytes(10 * Pace.PIECE_BYTES)
    session = await net.session()
    calls = [asyncio.ensure_future(session.get(path)) for _ in range(4)]
    await until(lambda: upload.total_bytes and upload._turns)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert upload.total_bytes <= 2 * Pace.PIECE_BYTES


async def test_older_chunks_weigh_more_and_a_head_alone_encodes_nothing(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    net.publisher.publish_up_to(1)
    weights: list[int] = []

    async def flow(self: Pace, nbytes: int, name: str, *, weight: int) -> None:
        weights.append(weight)

    monkeypatch.setattr(Pace, "flow", flow)
    url, session = await net.node(), await net.session()
    for path in ("0.0/chunks/0", "0.1/chunks/0", "0.1/regions/0"):
        assert (await session.get(f"{url}/versions/{path}")).status == 200
    assert (await session.head(f"{url}/versions/0.1/regions/0")).status == 405
    assert weights == [OLDER_WEIGHT, 1, 1]


@pytest.mark.parametrize(("linked", "kept"), [({"127.0.0.1"}, 1), (set(), 0)], ids=["linked", "stranger"])
async def test_only_nodes_with_a_link_keep_versions_by_asking(net: Net, linked: set[str], kept: int) -> None:
    net.publisher.publish(0)
    url, session = await net.node(linked=linked), await net.session()
    assert (await session.get(f"{url}/versions/{v(0)}/head")).status == 200
    for number in range(1, KEEP_VERSIONS + 3):
        net.publisher.publish(number)
    assert len(net.publisher.published.store.versions()) == KEEP_VERSIONS + kept
