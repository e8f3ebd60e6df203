"""Streams over real sockets: whole frames both ways, in order, however they come; caps; turns; and the pace."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import pytest
import uvloop
from msgspec.structs import replace

from swarm.errors import PeerUnreachable, ProtocolError
from swarm.net.client import plain_address
from swarm.net.pace import Pace
from swarm.net.stream import HEADER, PREAMBLE, Frame, Outgoing, open_stream, start_tls
from swarm.node.identity import ServerTls, load_or_create_tls
from swarm.types import Address
from tests.builders import v
from tests.unit.net.test_client import serving
from tests.unit.wires import NOTE, VERSION, Place, at, connected, frame_of, pair_of_sockets, until


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> ServerTls:
    return load_or_create_tls(tmp_path_factory.mktemp("identity"))


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest, certificate: ServerTls) -> ServerTls | None:
    return certificate if request.param == "tls" else None


@asynccontextmanager
async def linked(tls: ServerTls | None) -> AsyncIterator[tuple[Place, Place]]:
    async with connected(tls) as (there, here):
        one, two = at(there, Place()), at(here, Place())
        yield one, two
        one.stream.close()
        two.stream.close()


def payloads(count: int, seed: int) -> list[bytes]:
    """Of all sizes around those of records, buffers and wake-ups."""
    draw = random.Random(seed)
    sizes = [1, 31, 32, 33, 16_383, 16_384, 16_385, 32_768, 70_000, 300_000]
    return [draw.randbytes(draw.choice(sizes)) for _ in range(count)]


# -- frames --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_frames_of_all_sizes_come_whole_in_order_and_both_ways(
    tls: ServerTls | None, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    async def both_ways() -> None:
        async with linked(tls) as (one, two):
            out, back = payloads(60, seed=1), payloads(60, seed=2)
            taken: list[int] = []
            one.give(*(frame_of(p, index=i, sent=lambda i=i: taken.append(i)) for i, p in enumerate(out)))  # type: ignore[misc]
            two.give(*(frame_of(p, type_=NOTE) for p in back))
            await until(lambda: len(two.came) == len(out) and len(one.came) == len(back))
            assert [payload for _, payload in two.came] == out
            assert [payload for _, payload in one.came] == back
            assert [frame.index for frame, _ in two.came] == taken == list(range(len(out)))
            assert {(frame.version, frame.via) for frame, _ in two.came} == {(VERSION, b"\1" * 8)}
            assert one.stream.sent_bytes == sum(HEADER.size + len(p) for p in out)
            assert one.ends == two.ends == []

    run(both_ways())


@asynccontextmanager
async def fed(place: Place) -> AsyncIterator[tuple[socket.socket, Place]]:
    """The other end of a stream to `place`, to be written to by hand."""
    raw, sock = pair_of_sockets()
    yield raw, at(sock, place)
    place.stream.close()
    raw.close()


async def test_frames_come_whole_byte_by_byte_and_several_in_one_segment() -> None:
    async with fed(Place()) as (raw, place):
        for byte in frame_of(b"four", index=9).header + b"four" + Frame(NOTE, 0, v(0)).pack():
            raw.send(bytes([byte]))
            await asyncio.sleep(0)
        await until(lambda: len(place.came) == 2)
        assert [(frame.index, payload) for frame, payload in place.came] == [(9, b"four"), (0, b"")]
        raw.send(b"".join(frame_of(p).header + p for p in (b"a", b"", b"ccc" * 1000)))
        await until(lambda: len(place.came) == 5)
        assert [payload for _, payload in place.came][2:] == [b"a", b"", b"ccc" * 1000]


async def test_a_tls_record_whose_last_bytes_come_late_is_read_though_nothing_follows(certificate: ServerTls) -> None:
    """TLS takes the part that is here out of the kernel, so that what is left is less than a wake-up waits for."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server:
        raw = socket.create_connection(server.getsockname())
        sock, _ = server.accept()
    raw.setblocking(False)
    sock.setblocking(False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(coming, going)
    accepted = asyncio.create_task(start_tls(sock, certificate.context, server_side=True))
    while not accepted.done():
        with suppress(ssl.SSLWantReadError):
            client.do_handshake()
        await loop.sock_sendall(raw, going.read())
        with suppress(BlockingIOError):
            coming.write(raw.recv(65_536))
        await asyncio.sleep(0)
    place = at(await accepted, Place())
    content = random.Random(1).randbytes(4000)
    client.write(frame_of(content).header)
    await loop.sock_sendall(raw, going.read())
    await until(lambda: place.stream._frame is not None)
    client.write(content)
    record = going.read()
    await loop.sock_sendall(raw, record[:-10])
    await until(lambda: place.stream._in_record)
    await loop.sock_sendall(raw, record[-10:])
    await until(lambda: [payload for _, payload in place.came] == [content])
    place.stream.close()
    raw.close()


# -- ends ----------------------------------------------------------------------------------------------------


async def test_a_frame_over_its_cap_ends_the_link_before_any_memory_is_taken(tls: ServerTls | None) -> None:
    async with connected(tls) as (there, here):
        sender, strict = at(there, Place()), at(here, Place(cap_bytes=100))
        sender.give(frame_of(bytes(100)), frame_of(bytes(101)), frame_of(b"never"))
        await until(lambda: strict.ends and sender.ends)
        assert [len(payload) for _, payload in strict.came] == [100]
        assert isinstance(strict.ends[0], ProtocolError)
        assert isinstance(sender.ends[0], OSError)
        assert len(strict.ends) == len(sender.ends) == 1


async def test_the_other_sides_end_is_heard_once_and_nothing_is_sent_any_more(tls: ServerTls | None) -> None:
    async with linked(tls) as (one, two):
        two.stream.close()
        await until(lambda: one.ends)
        one.give(frame_of(b"late"))
        one.stream.close()
        await asyncio.sleep(0.01)
        assert len(one.ends) == len(two.ends) == 1
        assert isinstance(one.ends[0], OSError)
        assert two.ends == [None]
        assert len(one.outbox) == 1


# -- turns ---------------------------------------------------------------------------------------------------


async def test_links_take_turns_chunk_by_chunk() -> None:
    order: list[str] = []
    places: list[Place] = []
    for name in ("a", "b", "c"):
        here, there = pair_of_sockets()
        at(there, Place())
        source = at(here, Place())
        source.outbox.extend(frame_of(bytes(1000), sent=lambda name=name: order.append(name)) for _ in range(20))  # type: ignore[misc]
        places.append(source)
    for source in places:
        source.stream.wake()
    await until(lambda: len(order) == 60)
    assert max(len(list(run)) for _, run in itertools.groupby(order)) == 1
    for source in places:
        source.stream.close()


async def test_notes_do_not_cost_a_turn() -> None:
    order: list[str] = []
    here, there = pair_of_sockets()
    other, source = at(there, Place()), at(here, Place())
    notes = [frame_of(b"note", type_=NOTE) for _ in range(10)]
    source.give(*notes, frame_of(b"chunk", sent=lambda: order.append("chunk")))
    await until(lambda: order)
    assert source.stream.sent_bytes == 11 * HEADER.size + 45
    await until(lambda: len(other.came) == 11)
    source.stream.close()
    other.stream.close()


# -- opening -------------------------------------------------------------------------------------------------


async def test_a_stream_is_opened_to_the_named_certificate_alone(certificate: ServerTls) -> None:
    async with serving(tls=certificate.context, on_stream=lambda incoming: asyncio.sleep(0)) as (url, _):
        with pytest.raises(PeerUnreachable, match="is not the one that was named"):
            await open_stream(replace(plain_address(url), fingerprint=b"f" * 32))


async def test_a_stream_goes_to_the_next_address_of_a_name_when_one_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as refusing, socket.create_server(("127.0.0.1", 0)) as listening:
        refusing.bind(("127.0.0.1", 0))
        entries = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", one.getsockname()) for one in (refusing, refusing, listening)
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **named: entries)
        sock = await open_stream(Address(host="two.example", port=7700))
        with sock, listening.accept()[0] as came:
            assert came.recv(len(PREAMBLE)) == PREAMBLE
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "it was tuned"
        listening.close()
        with pytest.raises(PeerUnreachable, match="cannot be reached for a stream"):
            await open_stream(Address(host="two.example", port=7700))


@pytest.mark.parametrize("said", [b"\0echo-strean\n", PREAMBLE + b"no TLS at all" * 10])
async def test_what_is_neither_http_nor_a_stream_is_closed_and_counted(certificate: ServerTls, said: bytes) -> None:
    async with serving(tls=certificate.context, on_stream=lambda incoming: asyncio.sleep(0)) as (url, server):
        reader, writer = await asyncio.open_connection("127.0.0.1", plain_address(url).port)
        writer.write(said)
        try:
            await reader.read()
        except ConnectionResetError:
            pass
        await until(lambda: server.refused() == {"handshake": 1})
        writer.close()


# -- pace ----------------------------------------------------------------------------------------------------


class Clock:
    """A loop of which Pace knows no more than the time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._due: list[tuple[float, int, asyncio.Handle]] = []
        self._order = itertools.count()

    def get_debug(self) -> bool:
        return False

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> asyncio.Handle:
        handle = asyncio.Handle(call, (), self)  # type: ignore[arg-type]
        heapq.heappush(self._due, (max(when, self.now), next(self._order), handle))
        return handle

    def call_soon(self, call: Callable[[], None]) -> asyncio.Handle:
        return self.call_at(self.now, call)

    def run_until(self, end: float) -> None:
        while self._due and self._due[0][0] <= end:
            self.now, _, handle = heapq.heappop(self._due)
            if not handle.cancelled():
                handle._run()
        self.now = end


class Link:
    """Has always something to send: one chunk in each turn of the loop."""

    def __init__(self, pace: Pace, clock: Clock, nbytes: int) -> None:
        self._pace, self._clock, self._nbytes = pace, clock, nbytes
        self.sent_bytes = 0

    def wake(self) -> None:
        self._clock.call_soon(self._send)

    def _send(self) -> None:
        if self._pace.admits(self, self.wake):
            self._pace.took(self, self._nbytes)
            self.sent_bytes += self._nbytes
            self.wake()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("swarm.net.stream.asyncio.get_running_loop", lambda: clock)
    return clock


def busy(clock: Clock, pace: Pace, *sizes: int) -> list[Link]:
    """Links that send from now on, each in chunks of its size."""
    links = [Link(pace, clock, size) for size in sizes]
    for link in links:
        link.wake()
    return links


def test_an_idle_hour_saves_up_no_more_than_a_burst(clock: Clock) -> None:
    pace = Pace(1e6)
    clock.run_until(4600.0)
    busy(clock, pace, 1448)
    clock.run_until(4601.0)
    assert pace.total_bytes <= 1e6 / Pace.OVERHEAD + Pace.MIN_BURST_BYTES + 1448


def test_bytes_are_shared_alike_whatever_one_sends_in_a_turn_and_however_many_come_later(clock: Clock) -> None:
    pace = Pace(1e7)
    streams = busy(clock, pace, 1_000, 16_384, 16_384, 65_536, 262_144)
    clock.run_until(1010.0)
    before = [link.sent_bytes for link in streams]
    assert min(before[1:]) >= 0.95 * max(before[1:])
    assert before[0] > 0.2 * max(before), "one that sends less than a quantum in a turn still has all of its turns"
    (late,) = busy(clock, pace, 65_536)
    clock.run_until(1020.0)
    gained = [link.sent_bytes - had for link, had in zip(streams, before, strict=True)]
    assert late.sent_bytes == pytest.approx(gained[1], rel=0.05)


def test_one_that_does_not_come_when_it_is_woken_holds_nobody_up(clock: Clock) -> None:
    pace = Pace(1e6)
    pace.took("a", 10**6)
    for _ in range(100):
        assert not pace.admits("gone", lambda: None)
    (link,) = busy(clock, pace, 16_384)
    clock.run_until(1010.0)
    assert link.sent_bytes >= 8e6 / Pace.OVERHEAD


def test_what_was_sent_while_nobody_waited_is_not_held_against_anybody(clock: Clock) -> None:
    """Neither a debt nor work: a turn is found in no more steps than there are names."""
    pace = Pace(1e6)
    (one,) = busy(clock, pace, 16_384)
    clock.run_until(1060.0)
    (other,) = busy(clock, pace, 16_384)
    before = one.sent_bytes
    clock.run_until(1120.0)
    assert abs(one.sent_bytes - before - other.sent_bytes) <= Pace.MIN_BURST_BYTES + 2 * 16_384


def test_a_cap_that_changes_is_kept_within_a_twentieth_before_and_after(clock: Clock) -> None:
    pace = Pace(1e3)
    busy(clock, pace, *[1448] * 3)
    clock.run_until(clock.now + 1.0)
    assert pace.total_bytes * Pace.OVERHEAD > 30e3, "far ahead of so low a cap"
    for cap in (1e6, 2e6, 2.5e5, 1e6):
        pace.change(cap)
        before = pace.total_bytes
        clock.run_until(clock.now + 30.0)
        assert (pace.total_bytes - before) * Pace.OVERHEAD == pytest.approx(30 * cap, rel=0.05)


def test_what_waited_under_a_cap_flows_at_once_when_that_is_lifted(clock: Clock) -> None:
    pace = Pace(10.0)
    pace.took("c", 10**6)
    turns: list[str] = []
    for name in "ab":
        assert not pace.admits(name, lambda name=name: turns.append(name))  # type: ignore[misc]
    pace.change(None)
    clock.run_until(clock.now)
    assert turns == ["a", "b"]
    assert pace.admits("c", lambda: None)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time passes only while nothing is ready, so that what real sockets carry is measured by a virtual clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        select = self._selector.select  # type: ignore[attr-defined]

        def select_or_pass(timeout: float | None) -> Any:
            found = select(0)
            if not found and timeout:
                self.now += timeout
            return found

        self._selector.select = select_or_pass  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


WINDOW_S = 4.0
"""In which bytes are counted, by the virtual clock."""
T = TypeVar("T")


def measured(what: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(what)


async def calls_for(seconds: float, call: Callable[[int], Coroutine[Any, Any, None]], *callers: int) -> None:
    """Have each of the callers call on eight connections at once, for so long."""
    calls = [asyncio.ensure_future(call(caller)) for caller in callers for _ in range(8)]
    await asyncio.sleep(seconds)
    for task in calls:
        task.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


class Endless(Place):
    """Always has the same to send."""

    def pull(self) -> Outgoing:
        return frame_of(bytes(16_384))


@pytest.mark.parametrize("direction", ["upload", "download"])
def test_bytes_of_a_real_stream_keep_a_cap_that_changes_while_it_runs(direction: str) -> None:
    async def measure() -> list[float]:
        pace, shares = Pace(1e6), list[float]()
        # Not TCP: what was sent has arrived at once, however busy this machine is.
        there, here = pair_of_sockets()
        sink = at(here, Place(), **({"download": pace} if direction == "download" else {}))
        source = at(there, Endless(), **({"upload": pace} if direction == "upload" else {}))
        for cap in (1e6, 2e6, 5e5):
            pace.change(cap)
            await asyncio.sleep(1.0)  # What a socket's buffers held is through
            before = len(sink.came)
            await asyncio.sleep(WINDOW_S)
            carried = (len(sink.came) - before) * (16_384 + HEADER.size)
            shares.append(carried * Pace.OVERHEAD / (WINDOW_S * cap))
        source.stream.close()
        sink.stream.close()
        return shares

    assert measured(measure()) == pytest.approx([1.0, 1.0, 1.0], rel=0.05)


def test_four_streams_get_as_much_of_a_cap_on_what_is_received() -> None:
    """They are woken in the same order each time, and the first reads all that a turn allows."""

    async def measure() -> list[int]:
        pace = Pace(4e6)
        pairs = [pair_of_sockets() for _ in range(4)]
        sources = [at(there, Endless()) for there, _ in pairs]
        sinks = [at(here, Place(), download=pace) for _, here in pairs]
        await asyncio.sleep(10 * WINDOW_S)
        for place in (*sources, *sinks):
            place.stream.close()
        return [len(sink.came) for sink in sinks]

    shares = measured(measure())
    assert min(shares) >= 0.9 * max(shares), shares


@pytest.mark.parametrize("callers", [1, 8])
def test_callers_over_http_leave_the_streams_their_share_of_what_is_sent(callers: int) -> None:
    """Each caller asks for one body of 1 MiB after the other."""

    async def measure() -> tuple[list[int], list[int]]:
        pace = Pace(4e6)
        pairs = [pair_of_sockets() for _ in range(8)]
        sources = [at(there, Endless(), upload=pace) for there, _ in pairs]
        sinks = [at(here, Place()) for _, here in pairs]
        flowed = [0] * callers

        async def call(number: int) -> None:
            while True:
                await pace.flow(1 << 20, f"198.51.100.{number}")
                flowed[number] += 1 << 20

        await calls_for(20 * WINDOW_S, call, *range(callers))
        for place in (*sources, *sinks):
            place.stream.close()
        return [len(sink.came) * 16_384 for sink in sinks], flowed

    streamed, flowed = measured(measure())
    # The bodies under way, of which a caller has eight, are not counted.
    assert min(streamed) >= 0.9 * max(max(streamed), *flowed), (streamed, flowed)
    assert max(flowed) >= 0.4 * max(streamed), (streamed, flowed)


def test_bytes_that_weigh_more_take_more_of_their_callers_share_and_none_exceed_the_cap() -> None:
    pace, flowed = Pace(4e6), Counter[int]()

    async def call(weight: int) -> None:
        while True:
            await pace.flow(Pace.PIECE_BYTES, f"198.51.100.{weight}", weight=weight)
            flowed[weight] += Pace.PIECE_BYTES

    measured(calls_for(5 * WINDOW_S, call, 1, 4))
    assert flowed[1] / flowed[4] == pytest.approx(4, rel=0.05)
    assert flowed.total() * Pace.OVERHEAD == pytest.approx(5 * WINDOW_S * 4e6, rel=0.05)


async def test_a_caller_that_hangs_up_books_no_more_than_it_got() -> None:
    pace = Pace(1.0)
    await calls_for(0, lambda _: pace.flow(1 << 20, "198.51.100.1"), 1)
    assert pace.total_bytes <= Pace.MIN_BURST_BYTES + Pace.PIECE_BYTES
    assert len(pace._turns) == 0


@pytest.mark.parametrize("direction", ["upload", "download"])
async def test_a_capped_link_loses_nothing_and_stands_in_line_once(tls: ServerTls | None, direction: str) -> None:
    """At 60 MB/s a burst is larger than what is read in one turn."""
    pace = Pace(60e6)
    draw = random.Random(5)
    sent = [draw.randbytes(16_384) for _ in range(600)]
    longest = 0
    async with connected(tls) as (there, here):
        source = at(there, Place(), **({"upload": pace} if direction == "upload" else {}))
        sink = at(here, Place(), **({"download": pace} if direction == "download" else {}))
        began = asyncio.get_running_loop().time()
        source.give(*map(frame_of, sent))

        def done() -> bool:
            nonlocal longest
            longest = max(longest, len(pace._turns))
            return len(sink.came) == len(sent)

        await until(done, pause_s=0)
        took_s = asyncio.get_running_loop().time() - began
        assert [payload for _, payload in sink.came] == sent
        assert took_s >= (600 * 16_384 - Pace.BURST_S * 60e6 - 300_000) / 60e6
        assert longest <= 1
        source.stream.close()
        sink.stream.close()


async def test_what_the_other_end_has_not_confirmed_is_told() -> None:
    """More than the kernels take in, to one that reads nothing at first."""
    async with connected(None) as (_raw, sock):
        place = at(sock, Endless())
        await until(lambda: place.stream.unacknowledged_bytes > 0)
        place.stream.close()
    async with connected(None) as (_raw, sock):
        place = at(sock, Place())
        place.give(frame_of(b"few bytes"))
        await until(lambda: place.stream.sent_bytes)
        await until(lambda: place.stream.unacknowledged_bytes == 0)
        place.stream.close()
