"""Real TLS on loopback: what a client pins, what a third party sees, and what it can do with that."""

from __future__ import annotations

import asyncio
import ssl
import stat
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import uvloop
from aiohttp import web

from swarm.errors import PeerUnreachable, ProtocolError, UserError
from swarm.net.client import PeerClient, binary, certificate_of, read_signed, session_route
from swarm.net.limits import RateLimits
from swarm.net.server import NodeServer
from swarm.net.sessions import AUTH_HEADER, ServerSessions
from swarm.node.identity import ServerTls, load_or_create_tls
from swarm.types import Address
from swarm.wire import PROTOCOL, PROTOCOL_HEADER
from tests.builders import KEY, OTHER_KEY

CAP = 100_000
SECRET = b"a rollout that nobody else may read " * 20


@dataclass(slots=True, kw_only=True)
class Serving:
    """A node's server with one signed call, which says who called, and all that it has taken."""

    address: Address
    sessions: ServerSessions
    server: NodeServer
    taken: list[bytes] = field(default_factory=list)

    def client(self, *, address: Address | None = None) -> PeerClient:
        return PeerClient(address or self.address, key=KEY, server=OTHER_KEY.node_id)


Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> ServerTls:
    return load_or_create_tls(tmp_path_factory.mktemp("identity"))


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    return cast(Run, request.param)


@asynccontextmanager
async def serving(tls: ServerTls | None, *, limits: RateLimits | None = None, port: int = 0) -> AsyncIterator[Serving]:
    sessions = ServerSessions(OTHER_KEY, tls.fingerprint if tls else b"")
    taken: list[bytes] = []

    async def who(request: web.Request) -> web.Response:
        node, body = await read_signed(request, CAP, sessions)
        taken.append(body)
        return binary(node.encode())

    server = NodeServer(
        [session_route(sessions), web.post("/who", who)],
        lambda: {"role": "test"},
        tls=tls.context if tls else None,
        limits=limits,
        counted=[sessions.refused],
    )
    port = await server.start("127.0.0.1", port)
    address = Address(host="127.0.0.1", port=port, fingerprint=tls.fingerprint if tls else b"")
    try:
        yield Serving(address=address, sessions=sessions, server=server, taken=taken)
    finally:
        await server.stop()


async def who(peer: PeerClient, body: bytes = b"body", path: str = "/who?x=%2F") -> str:
    return (await peer.post(path, body, cap_bytes=CAP, timeout_s=5.0)).decode()


async def who_once_there_is_room(peer: PeerClient) -> str:
    """The server hears of a connection's end a turn or two later; pytest's time limit ends this if it never does."""
    while True:
        try:
            return await who(peer)
        except PeerUnreachable:
            await asyncio.sleep(0.01)


def at(address: Address, *, port: int | None = None, fingerprint: bytes | None = None) -> Address:
    pin = address.fingerprint if fingerprint is None else fingerprint
    return Address(host=address.host, port=port or address.port, fingerprint=pin)


def test_a_certificate_is_made_once_and_its_key_is_its_owners_alone(tmp_path: Path) -> None:
    first = load_or_create_tls(tmp_path / "identity")
    path = tmp_path / "identity" / "tls.pem"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["tls.pem"]
    assert load_or_create_tls(tmp_path / "identity").fingerprint == first.fingerprint
    assert load_or_create_tls(tmp_path / "another").fingerprint != first.fingerprint
    assert first.context.minimum_version is ssl.TLSVersion.TLSv1_3


@pytest.mark.parametrize(
    "content", [b"", b"-----BEGIN CERTIFICATE-----\n", b"\xff" * 100], ids=["empty", "cut", "junk"]
)
def test_a_file_that_is_no_certificate_is_not_overwritten(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tls.pem").write_bytes(content)
    with pytest.raises(UserError, match="is not a key and certificate; remove it"):
        load_or_create_tls(tmp_path)
    assert (tmp_path / "tls.pem").read_bytes() == content


def test_the_certificate_that_was_named_is_spoken_to_and_no_other(tls: ServerTls, run: Run) -> None:
    async def over_tls() -> None:
        async with serving(tls) as there, there.client() as peer:
            assert await certificate_of(there.address.host, there.address.port, 5.0) == tls.fingerprint
            callers = await asyncio.gather(*(who(peer, bytes(CAP)) for _ in range(20)))
            assert callers == [KEY.node_id] * 20
            assert len(there.sessions) == 1
            there.taken.clear()
            async with there.client(address=at(there.address, fingerprint=b"f" * 32)) as wrong:
                with pytest.raises(PeerUnreachable, match="is not the one that was named"):
                    await who(wrong)
            assert there.taken == []

    run(over_tls())


async def test_between_plain_and_tls_nothing_is_said_and_it_is_counted(tls: ServerTls) -> None:
    for served, pin, refused in ((tls, b"", {"plain_http": 1}), (None, b"f" * 32, {"malformed": 1})):
        async with serving(served) as there, there.client(address=at(there.address, fingerprint=pin)) as peer:
            with pytest.raises(PeerUnreachable, match="cannot be reached"):
                await who(peer)
            assert there.server.refused() == refused
            if served is None:
                with pytest.raises(PeerUnreachable, match="does not answer with TLS"):
                    await certificate_of(there.address.host, there.address.port, 5.0)


def test_a_fingerprint_that_is_none_is_its_authors_fault() -> None:
    with pytest.raises(ProtocolError, match="no SHA-256"):
        PeerClient(Address(host="127.0.0.1", port=1, fingerprint=b"short"))


async def test_a_client_of_a_server_that_restarted_opens_one_new_session_and_goes_on(tls: ServerTls) -> None:
    async with serving(tls) as before:
        peer = before.client()
        await who(peer)
    async with peer, serving(tls, port=before.address.port) as after:
        callers = await asyncio.gather(*(who(peer) for _ in range(5)))
        assert callers == [KEY.node_id] * 5
        assert after.sessions.refused["unknown_session"] >= 1
        assert len(after.sessions) == 1


async def test_an_altered_and_a_repeated_request_are_refused_on_the_wire_too() -> None:
    """Over plain HTTP whoever is between can read and alter it; the signature is what stops it."""
    async with serving(None) as there, there.client() as peer, aiohttp.ClientSession() as raw:
        await who(peer)
        assert peer._granted is not None
        headers = {PROTOCOL_HEADER: str(PROTOCOL), AUTH_HEADER: peer._granted.header("POST", "/who?x=1", b"body")}
        altered = [("/who", b"body"), ("/who?x=2", b"body"), ("/who?x=1", b"BODY")]
        found: list[int] = []
        for path, body in (*altered, ("/who?x=1", b"body"), ("/who?x=1", b"body")):
            async with raw.post(there.address.url + path, data=body, headers=headers) as answer:
                found.append(answer.status)
                assert "\n" not in await answer.text()
        assert found == [401, 401, 401, 200, 401]
        assert there.server.refused() == {"bad_signature": 3, "replayed": 1}


class Wiretap:
    """A proxy between client and server that keeps every byte of each connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.sent: list[bytearray] = []
        self.answered: list[bytearray] = []

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        async with server:
            yield server.sockets[0].getsockname()[1]

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        sent, answered = bytearray(), bytearray()
        self.sent.append(sent)
        self.answered.append(answered)
        await asyncio.gather(_copy(reader, back, sent), _copy(there, writer, answered))


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, kept: bytearray) -> None:
    while data := await source.read(65_536):
        kept += data
        sink.write(data)
    sink.close()


async def _send_again(port: int, recorded: bytes) -> bytes:
    """What the server says to these very bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(recorded)
    said = b""
    with suppress(ConnectionResetError):
        while data := await reader.read(65_536):
            said += data
    writer.close()
    return said


async def test_over_tls_a_third_party_reads_nothing_and_what_it_recorded_is_worth_nothing(tls: ServerTls) -> None:
    async with serving(tls) as there:
        tap = Wiretap(there.address.port)
        async with tap.listening() as port, there.client(address=at(there.address, port=port)) as peer:
            assert await who(peer, SECRET) == KEY.node_id
        recorded = b"".join(map(bytes, tap.sent + tap.answered))
        assert len(recorded) > len(SECRET)
        for hidden in (SECRET[:12], AUTH_HEADER.encode(), KEY.node_id.encode(), KEY.public_bytes, b"/who"):
            assert hidden not in recorded
        for stream in tap.sent:
            await _send_again(there.address.port, bytes(stream))
        assert there.taken == [SECRET]


STRICT = RateLimits(exempt_loopback=False)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "never shaking hands"])
def test_a_ninth_connection_is_refused_and_one_that_ends_makes_room(tls: ServerTls, run: Run, secure: bool) -> None:
    async def nine_connections() -> None:
        async with serving(tls if secure else None, limits=STRICT) as there, there.client() as peer:
            held = [await asyncio.open_connection("127.0.0.1", there.address.port) for _ in range(8)]
            if secure:
                with pytest.raises(PeerUnreachable):
                    await who(peer)
            else:
                said = await _send_again(there.address.port, b"")
                assert said.startswith(b"HTTP/1.1 429 ")
                assert b"too many connections from your address" in said
            assert there.server.refused() == {"connections": 1}
            held[0][1].close()
            assert await who_once_there_is_room(peer) == KEY.node_id
            for _, writer in held:
                writer.close()

    run(nine_connections())


def test_a_look_at_the_certificate_counts_as_no_refused_handshake(tls: ServerTls, run: Run) -> None:
    """A node that knows its bootstrap by name alone looks each time it says hello: alone with a learner, every 8 s."""

    async def looking_at_the_certificate() -> None:
        async with serving(tls) as there:
            for _ in range(3):
                assert await certificate_of("127.0.0.1", there.address.port, 5.0) == tls.fingerprint
            async with there.client() as peer:
                assert await who(peer) == KEY.node_id
            assert there.server.refused() == {}

    run(looking_at_the_certificate())


async def test_a_connection_counts_to_the_node_that_signs_on_it(tls: ServerTls) -> None:
    async with serving(tls, limits=STRICT) as there, there.client() as peer:
        await who(peer)
        (guest,) = there.server._guests.values()
        assert guest.node == KEY.node_id
