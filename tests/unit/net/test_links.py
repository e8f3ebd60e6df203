"""Who is let in over a stream, what replaces what, and that links come back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from swarm.errors import PeerUnreachable
from swarm.net import links as links_module
from swarm.net.client import PeerClient, session_route
from swarm.net.links import HELLO, METHOD, NO_VERSION, PATH, WELCOME, Links, Station, StreamHello
from swarm.net.pace import Pace
from swarm.net.server import NodeServer
from swarm.net.sessions import ServerSessions
from swarm.net.signing import SigningKey
from swarm.net.stream import HEADER, Frame, Stream, open_stream, receive_exactly, send_all, unpack_frame
from swarm.node.identity import ServerTls, load_or_create_tls
from swarm.node.network import PeerPool
from swarm.types import Address, NodeId
from swarm.wire import PROTOCOL, encode
from tests.builders import KEY, OTHER_KEY
from tests.unit.wires import PATIENCE_S, Place, frame_of, until

THIRD_KEY = SigningKey.from_bytes(bytes(range(2, 34)))


def station_of(key: SigningKey, peer_at: Callable[[NodeId, Address], PeerClient], **rest: Any) -> Station:
    """The station of a node that knows nobody but KEY, its learner, and may call everybody."""
    station = Station(
        me=key.node_id,
        sessions=ServerSessions(key, b""),
        peer_at=peer_at,
        learner=lambda: (KEY.node_id, []),
        head=lambda: b"",
        publics=lambda: [],
        public_at=lambda node: [],
        dialable=lambda address: True,
        lan=lambda: True,
        upload=Pace(None),
        download=Pace(None),
        random=Random(1),
    )
    return replace(station, **rest)


class Host:
    """A node's server, sessions and links, and a Place at each link that it ever had."""

    def __init__(self, key: SigningKey, tls: ServerTls | None = None) -> None:
        self.key = key
        self.admitted: set[NodeId] = {KEY.node_id, OTHER_KEY.node_id, THIRD_KEY.node_id}
        self.places: list[tuple[NodeId, Place]] = []
        self._tls = tls
        self._fingerprint = tls.fingerprint if tls else b""
        self.sessions = ServerSessions(key, self._fingerprint)
        self.peers = PeerPool(key)
        self.station = station_of(key, self.peers.at, sessions=self.sessions)
        self.links = Links(self.station, open_link=self._open_link, admits=lambda node: node in self.admitted)

    async def start(self, port: int = 0) -> None:
        self._server = NodeServer(
            [session_route(self.sessions)],
            dict,
            tls=self._tls.context if self._tls else None,
            on_stream=self.links.accept,
        )
        port = await self._server.start("127.0.0.1", port)
        self.address = Address(host="127.0.0.1", port=port, fingerprint=self._fingerprint)

    async def stop(self) -> None:
        await self.links.close()
        await self._server.stop()
        await self.peers.close()

    def dial(self, *others: Host) -> None:
        self.links.dial({other.key.node_id: lambda other=other: [other.address] for other in others})  # type: ignore[misc]

    def live(self) -> list[NodeId]:
        return [node for node, place in self.places if not place.ends]

    def _open_link(self, node: NodeId, stream: Stream) -> Place:
        place = Place()
        place.stream = stream
        self.places.append((node, place))
        return place


@asynccontextmanager
async def hosts(*keys: SigningKey, tls: ServerTls | None = None) -> AsyncIterator[list[Host]]:
    async with AsyncExitStack() as stack:
        found = [Host(key, tls) for key in keys]
        for host in found:
            await host.start()
            stack.push_async_callback(host.stop)
        yield found


@asynccontextmanager
async def linked(tls: ServerTls | None = None) -> AsyncIterator[list[Host]]:
    """The hosts of KEY and OTHER_KEY, of which the first dialled the second."""
    async with hosts(KEY, OTHER_KEY, tls=tls) as (one, two):
        one.dial(two)
        await until(lambda: one.live() and two.live())
        yield [one, two]


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> ServerTls | None:
    return load_or_create_tls(tmp_path) if request.param == "tls" else None


async def as_long_as_five_dials() -> None:
    """Until two others have tried five times in vain to be linked: whoever else dials has come to it by then."""
    async with hosts(SigningKey.from_bytes(bytes([7]) * 32), SigningKey.from_bytes(bytes([8]) * 32)) as (one, two):
        two.admitted.clear()
        one.dial(two)
        await until(lambda: two.station.refused["stream"] >= 5)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "MIN_BACK_OFF_S", 0.02)


async def test_both_ends_know_whom_they_are_linked_with(tls: ServerTls | None) -> None:
    async with linked(tls) as (one, two):
        assert (one.live(), two.live()) == ([OTHER_KEY.node_id], [KEY.node_id])
        (_, here), (_, there) = one.places[0], two.places[0]
        here.give(frame_of(b"one way"))
        there.give(frame_of(b"and the other"))
        await until(lambda: here.came and there.came)
        assert (here.came[0][1], there.came[0][1]) == (b"and the other", b"one way")
        assert len(one.links) == len(two.links) == 1
        assert one.station.linked_at == {OTHER_KEY.node_id: "127.0.0.1"}
        assert two.station.linked_at == {KEY.node_id: "127.0.0.1"}
        one.links.end(OTHER_KEY.node_id)
        one.links.dial({})
        await until(lambda: not one.station.linked_at and not two.station.linked_at)


async def hello_to(host: Host, said: bytes) -> bytes:
    """What the host answers to the bytes of a hello; nothing if it hangs up."""
    with await open_stream(host.address) as sock:
        await send_all(sock, said)
        try:
            return await receive_exactly(sock, HEADER.size)
        except ConnectionResetError:
            return b""


def framed(hello: StreamHello | bytes, *, type_: int = HELLO) -> bytes:
    body = hello if isinstance(hello, bytes) else encode(hello)
    return Frame(type_, len(body), NO_VERSION).pack() + body


async def auth_for(host: Host, *, key: SigningKey = KEY, said: bytes = encode(PROTOCOL)) -> str:
    peers = PeerPool(key)
    try:
        return await peers.at(host.key.node_id, host.address).signed_header(METHOD, PATH, said)
    finally:
        await peers.close()


async def test_a_hello_that_is_right_is_welcome_once_and_not_twice() -> None:
    async with hosts(OTHER_KEY) as (host,):
        said = framed(StreamHello(auth=await auth_for(host)))
        assert unpack_frame(await hello_to(host, said)).type == WELCOME
        assert await hello_to(host, said) == b""
        assert host.station.refused == {"stream": 1}
        assert host.sessions.refused == {"replayed": 1}


async def test_an_unknown_session_and_a_signature_over_another_protocol_are_refused() -> None:
    async with hosts(OTHER_KEY, THIRD_KEY) as (host, elsewhere):
        granted_elsewhere = await auth_for(elsewhere)
        refused = [
            framed(StreamHello(auth=granted_elsewhere)),
            framed(StreamHello(auth=await auth_for(host, said=encode(PROTOCOL + 1)))),
            framed(StreamHello(auth="no base64 at all \xff")),
            framed(StreamHello(auth=await auth_for(host)), type_=WELCOME),
            framed(b"\xc1 no message"),
            Frame(HELLO, 1025, NO_VERSION).pack() + bytes(1025),
        ]
        for said in refused:
            assert await hello_to(host, said) == b""
        assert host.station.refused == {"stream": len(refused)}
        assert host.places == []


async def test_a_node_that_is_not_wanted_is_refused_until_it_is() -> None:
    async with hosts(KEY, OTHER_KEY) as (one, two):
        two.admitted.clear()
        one.dial(two)
        await until(lambda: two.station.refused["stream"] >= 2)
        assert two.places == []
        two.admitted.add(KEY.node_id)
        await until(two.live)


async def test_a_barred_node_is_left_and_neither_let_in_nor_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "MIN_BACK_OFF_S", 0.0)
    async with linked() as (one, two):
        two.links.bar(KEY.node_id)
        await until(lambda: two.station.refused["stream"] >= 2)
        assert two.live() == []
        one.links.bar(OTHER_KEY.node_id)
        refused = two.station.refused["stream"]
        await as_long_as_five_dials()
        assert two.station.refused["stream"] <= refused + 1


async def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "HELLO_S", 0.05)
    async with hosts(OTHER_KEY) as (host,):
        assert await hello_to(host, b"\1") == b""
        assert host.station.refused == {"stream": 1}


async def test_a_new_link_takes_the_place_of_the_old_one() -> None:
    async with hosts(OTHER_KEY) as (two,):
        with await open_stream(two.address) as first, await open_stream(two.address) as second:
            for sock in (first, second):
                await send_all(sock, framed(StreamHello(auth=await auth_for(two))))
                await receive_exactly(sock, HEADER.size)
            await until(lambda: len(two.places) == 2)
            assert [place.ends for _, place in two.places] == [[None], []]
            assert len(two.links) == 1


async def test_a_link_comes_back_after_the_other_nodes_restart() -> None:
    async with linked() as (one, two):
        port = two.address.port
        await two.stop()
        await until(lambda: not one.live())
        again = Host(OTHER_KEY)
        await again.start(port)
        try:
            await until(lambda: again.live() and one.live())
            assert len(one.places) == 2
        finally:
            await again.stop()


async def test_a_node_that_moved_is_dialled_where_it_is_said_to_be_last() -> None:
    async with hosts(KEY, OTHER_KEY) as (one, two):
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            stale = Address(host="127.0.0.1", port=nobody.getsockname()[1])
            asked: list[Address] = []
            one.links.dial({OTHER_KEY.node_id: lambda: asked.append(stale) or [stale]})  # type: ignore[func-returns-value]
            await until(lambda: len(asked) >= 2)
            one.dial(two)
            await until(one.live)


async def test_who_is_wanted_no_more_is_not_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "MIN_BACK_OFF_S", 0.0)
    async with linked() as (one, two):
        one.links.dial({})
        two.links.end(KEY.node_id)
        await until(lambda: not one.live())
        await as_long_as_five_dials()
        assert len(one.places) == 1


async def test_a_node_that_was_dialled_by_name_is_linked_at_that_name() -> None:
    """Where its name leads may change. What is asked of it over HTTP goes to the name as well."""
    async with hosts(KEY, OTHER_KEY) as (one, two):
        named = Address(host="localhost", port=two.address.port)
        one.links.dial({OTHER_KEY.node_id: lambda: [named]})
        await until(lambda: one.station.linked_at == {OTHER_KEY.node_id: "localhost"})
        one.links.dial({})
        one.links.end(OTHER_KEY.node_id)
        await until(lambda: not one.station.linked_at)


@pytest.mark.parametrize(
    ("lan", "victim", "other"), [(True, "20.66.66.66", "20.1.1.1"), (False, "192.168.1.10", "192.168.1.11")]
)
async def test_many_nodes_that_name_one_host_have_it_tried_once_and_another_host_is_tried_too(
    monkeypatch: pytest.MonkeyPatch, lan: bool, victim: str, other: str
) -> None:
    """As many as a roster has. The wait after the first try is longer than this test. Private hosts that a node may
    call without `--lan` are those that its user named, perhaps this machine with a tunnel."""
    monkeypatch.setattr(links_module, "MIN_BACK_OFF_S", 25.0)
    tried: list[str] = []
    asked: list[int] = []

    def silent(node: NodeId, address: Address) -> PeerClient:
        tried.append(address.host)
        raise PeerUnreachable("silent")

    def at(number: int) -> list[Address]:
        asked.append(number)
        return [Address(host=victim if number else other, port=7700 + number)]

    async with hosts(KEY) as (one,):
        station = replace(one.station, peer_at=silent, lan=lambda: lan)
        links = Links(station, open_link=one._open_link, admits=lambda node: True)
        links.dial({NodeId(f"{number:032x}"): partial(at, number) for number in reversed(range(256))})
        await until(lambda: len(asked) == 256)
        await links.close()
    assert sorted(tried) == sorted([victim, other])


async def test_a_second_address_at_one_host_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a learner whose router forwards another port than the one that it listens on."""
    tried: list[int] = []

    async def dial(links: Links, node: NodeId, address: Address) -> asyncio.Event:
        tried.append(address.port)
        raise PeerUnreachable("closed")

    monkeypatch.setattr(Links, "_dial", dial)
    monkeypatch.setattr("swarm.net.links.MIN_BACK_OFF_S", 0.001)
    async with hosts(KEY) as (host,):
        host.links.dial({NodeId("far"): lambda: [Address(host="8.8.8.8", port=port) for port in (7700, 8800)]})
        await until(lambda: len(tried) >= 4)
    assert tried[:4] == [7700, 8800, 7700, 8800]


async def test_a_hello_that_comes_after_the_end_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = asyncio.Event()

    async def noting(sock: socket.socket, nbytes: int) -> bytes:
        reading.set()
        return await receive_exactly(sock, nbytes)

    monkeypatch.setattr(links_module, "receive_exactly", noting)
    async with hosts(OTHER_KEY) as (host,):
        said = framed(StreamHello(auth=await auth_for(host)))
        with await open_stream(host.address) as sock:
            await send_all(sock, said[:40])
            await asyncio.wait_for(reading.wait(), PATIENCE_S)
            await host.links.close()
            await send_all(sock, said[40:])
            with pytest.raises(ConnectionResetError):
                await receive_exactly(sock, 2 * HEADER.size)
        assert host.live() == []
        assert len(host.links) == 0
