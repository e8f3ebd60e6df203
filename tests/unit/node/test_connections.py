"""Why a node cannot be reached, as `join` and `status` say it: which cause, what to do, and what is waited for."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from swarm.cli.runs import _fetch
from swarm.errors import UserError
from swarm.join.link import MISLED_TRIES, LearnerLink
from swarm.node.bootstrap import FIND_S
from swarm.node.hello import HELLO_S
from swarm.node.identity import load_or_create_tls
from swarm.node.network import NodeNetwork
from swarm.settings import LeadConfig
from swarm.types import Address
from swarm.wire import PROTOCOL, PROTOCOL_HEADER
from tests.builders import KEY, OTHER_KEY
from tests.unit.node.test_bootstrap import bootstraps, closed_port, line_for, member


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the search waits, without waiting."""
    waited: list[float] = []
    turn = asyncio.sleep

    async def sleep(seconds: float) -> None:
        # Servers and connections of this process pause too, for a turn.
        if seconds >= 0.1:
            waited.append(seconds)
        await turn(0)

    monkeypatch.setattr("swarm.node.bootstrap.asyncio.sleep", sleep)
    return waited


async def given_up(tmp_path: Path, *texts: str) -> tuple[str, list[str]]:
    said: list[str] = []
    with pytest.raises(UserError) as caught:
        await bootstraps(tmp_path, *texts).find(said.append)
    assert "\n" not in str(caught.value)
    return str(caught.value), said


async def first_line(tmp_path: Path, text: str) -> str:
    """What `join` says first of a cause. It goes on trying, whatever the cause."""

    said: asyncio.Queue[str] = asyncio.Queue()
    trying = asyncio.create_task(bootstraps(tmp_path, text).find(said.put_nowait))
    saying = asyncio.create_task(said.get())
    trying.add_done_callback(lambda _: saying.cancel())
    line = await saying
    assert not trying.done()
    trying.cancel()
    await asyncio.gather(trying, return_exceptions=True)
    assert line.endswith("; trying again until a bootstrap answers (Ctrl-C to give up)")
    return line


@contextmanager
def deaf() -> Iterator[str]:
    """Somebody who takes connections and says nothing; its host and port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@asynccontextmanager
async def web_server(
    *, status: int = 200, headers: dict[str, str] | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Something else that speaks HTTP, and answers everything alike; its port."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, text="hello", headers=headers)

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def test_a_closed_port_and_an_address_without_a_route(tmp_path: Path) -> None:
    """No system connects to a broadcast address."""
    closed, nowhere = Address(host="127.0.0.1", port=closed_port()), Address(host="255.255.255.255", port=7700)
    words = "cannot be reached: nothing listens there (connection refused): is the node running, and is the port right?"
    for address, told in ((closed, words), (nowhere, "there is no route to it: is the address right")):
        pinned = msgspec.structs.replace(address, fingerprint=bytes(32))
        for text in (address.authority, address.url, f"https://{address.authority}", line_for(KEY, pinned)):
            assert told in await first_line(tmp_path, text)
    with pytest.raises(UserError, match=r"no node answers: .*nothing listens there"):
        await _fetch(closed.authority)


async def test_a_name_that_does_not_exist(tmp_path: Path) -> None:
    line = await first_line(tmp_path, "learner.invalid")
    assert "the name learner.invalid" in line
    assert "is this machine on the network?" in line
    with pytest.raises(UserError, match=r"no node answers: the name learner\.invalid"):
        await _fetch("learner.invalid")


async def test_a_host_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes connections and says nothing is told of before the try has ended."""
    monkeypatch.setattr("swarm.node.bootstrap.CERTIFICATE_S", 0.05)
    with deaf() as where:
        line = await first_line(tmp_path, f"https://{where}")
        assert "did not show a certificate within 0.05 s; is the address right, and do firewalls" in line
        monkeypatch.setattr("swarm.node.bootstrap.SAY_S", 0.05)
        line = await first_line(tmp_path, f"http://{where}")
        assert "says nothing: it is busy, or no echo-node; is the port right?" in line


async def test_packets_that_a_firewall_swallows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux drops them too while a listener's queue is full."""
    monkeypatch.setattr("swarm.net.client.CONNECT_S", 0.2)
    monkeypatch.setattr("swarm.node.bootstrap.CERTIFICATE_S", 0.2)
    with ExitStack() as opened:
        full = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        where = Address(host="127.0.0.1", port=full.getsockname()[1])
        for _ in range(2):
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((where.host, where.port))
        pinned = msgspec.structs.replace(where, fingerprint=bytes(32))
        for text in (where.url, f"https://{where.authority}", line_for(KEY, pinned)):
            line = await first_line(tmp_path, text)
            assert "within 0.2 s; is the address right, and do firewalls and routers let the port through?" in line


@pytest.mark.parametrize(
    ("scheme", "banner", "words"),
    [
        ("https", b"", "closed the connection and showed no certificate: it is no echo-node, or too many"),
        ("http", b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n", "what answers there is no echo-node: is the port the one that"),
        ("http", b"\x00\xff\n", "what answers there is no echo-node: is the port the one that `lead` printed?"),
    ],
)
async def test_one_that_hangs_up_and_another_program(tmp_path: Path, scheme: str, banner: bytes, words: str) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(banner)
        if banner:
            await reader.read(1)
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        line = await first_line(tmp_path, f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert words in line
    assert "\n" not in line


async def test_a_silence_is_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    """Told before the first try has ended, told what it ended with, and no more."""
    monkeypatch.setattr("swarm.node.bootstrap.SAY_S", 0.02)
    monkeypatch.setattr("swarm.node.hello.HELLO_S", 0.1)
    monkeypatch.setattr("swarm.node.bootstrap.FIND_S", 10.0)
    with deaf() as where:
        _, said = await given_up(tmp_path, f"http://{where}")
    assert len(pauses) > 2
    assert ["says nothing" in line for line in said] == [True, False]


async def test_a_clock_that_is_off_is_told_and_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the other side's hello says, over a real line."""
    told: dict[float, list[str]] = {}
    async with member(KEY, now=1_000_000.0) as there:
        for ours in (1_000_100.0, 1_010_800.0, 990_000.0):
            monkeypatch.setattr("swarm.node.bootstrap.time.time", lambda: ours)  # noqa: B023
            said: list[str] = told.setdefault(ours, [])
            assert (await bootstraps(tmp_path, there.authority).find(said.append)).address == there
    quiet, ahead, behind = told.values()
    assert quiet == []
    assert "this machine's clock is 3:00:00 ahead of that of http://127.0.0.1" in ahead[0]
    assert "this machine's clock is 2:46:40 behind that of http://127.0.0.1" in behind[0]
    assert "timedatectl set-ntp true" in behind[0]


async def test_a_learner_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    """Also when another program has its port for a moment."""
    said: list[str] = []
    async with member(KEY) as there, member(OTHER_KEY) as other:
        nobody = Address(host="127.0.0.1", port=closed_port())
        ways = [nobody] * 9 + [other] * 3 + [nobody] * 3 + [there]

        async def address_of(*_: object) -> Address:
            return ways.pop(0)

        monkeypatch.setattr("swarm.node.bootstrap.address_of", address_of)
        found = await bootstraps(tmp_path, line_for(KEY, there)).find(said.append)
    assert found.address == there
    # Each cause once, when it is another one than before.
    assert [("refused" in line, "join line is old" in line, "answers" in line) for line in said] == [
        (True, False, True),
        (False, True, True),
        (True, False, True),
        (False, False, True),
    ]


@pytest.mark.parametrize("is_old", [False, True])
async def test_who_never_answers_is_not_waited_for_for_ever(tmp_path: Path, pauses: list[float], is_old: bool) -> None:
    """Nor is a right learner where another swarm is: it may come back there, so the search goes on."""
    async with member(OTHER_KEY) as other:
        nobody = Address(host="127.0.0.1", port=closed_port())
        line, said = await given_up(tmp_path, line_for(KEY, other if is_old else nobody))
    assert "no node answered for 24 hours: ask the person who leads the swarm for a new one" in line
    assert ("this join line is old, ask the person who leads the swarm for a new one" in line) == is_old
    assert FIND_S <= sum(pauses) < FIND_S + 400
    assert 0.8 <= pauses[0] <= 1.2
    assert all(later > earlier for earlier, later in pairwise(pauses[:8]))
    assert all(240 <= pause <= 360 for pause in pauses[13:])
    assert len(said) == 1


async def test_one_that_is_silent_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.node.bootstrap.HEAD_START_S", 0.01)
    with deaf() as where:
        async with member(KEY) as there, asyncio.timeout(HELLO_S / 2):
            found = await bootstraps(tmp_path, *[f"http://{where}"] * 4, there.url).greet()
    assert found.address == there


async def test_of_several_that_fail_one_is_told_of(tmp_path: Path, pauses: list[float]) -> None:
    """The first that was named, whichever was tried first."""
    urls = [f"http://127.0.0.1:{closed_port()}" for _ in range(3)]
    _, said = await given_up(tmp_path, *urls)
    assert len(pauses) > 10
    assert [f"{urls[0]} cannot be reached" in line for line in said] == [True]


async def test_another_certificate_or_none_than_was_named(tmp_path: Path) -> None:
    async with member(KEY, tmp_path / "tls") as here, member(KEY) as plain:
        line = await first_line(tmp_path, line_for(KEY, msgspec.structs.replace(here, fingerprint=b"f" * 32)))
        assert "is not the one that was named" in line
        assert "ask for its new join line" in line
        line = await first_line(tmp_path, f"http://{here.authority}")
        assert "it has just ended, or it speaks TLS (then name it as https://HOST:PORT)" in line
        line = await first_line(tmp_path, line_for(KEY, msgspec.structs.replace(plain, fingerprint=b"f" * 32)))
        assert "does not speak TLS, as was named; if it was set up again, ask for its new join line" in line
        line = await first_line(tmp_path, f"https://{plain.authority}")
        assert f"it is no echo-node, or one without encryption (--no-tls), named as {plain.url}" in line


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "encrypted"])
async def test_a_server_of_something_else(tmp_path: Path, tls: bool) -> None:
    async with web_server(tls=load_or_create_tls(tmp_path).context if tls else None) as port:
        line = await first_line(tmp_path, f"127.0.0.1:{port}")
        assert "answers, but it is not an echo-node: is the port right? A learner's is 7700" in line
        with pytest.raises(UserError, match="answers, but it is not an echo-node"):
            await _fetch(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("theirs", "words"), [(PROTOCOL + 1, "a newer release"), (PROTOCOL - 1, "an older release")], ids=["newer", "older"]
)
async def test_another_release(tmp_path: Path, pauses: list[float], theirs: int, words: str) -> None:
    async with web_server(status=426, headers={PROTOCOL_HEADER: str(theirs)}) as port:
        line, said = await given_up(tmp_path, f"http://127.0.0.1:{port}")
    assert f"runs {words} of echo-node (protocol {theirs}, this one speaks {PROTOCOL}): update" in line
    assert (said, pauses) == ([], [])


async def test_one_that_may_come_back_keeps_the_search_going(tmp_path: Path) -> None:
    nobody = Address(host="127.0.0.1", port=closed_port())
    async with member(OTHER_KEY) as other:
        assert "refused" in await first_line(tmp_path, line_for(KEY, other, nobody))


async def test_a_sampler_whose_swarm_is_gone_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner is nowhere, and where the join line leads another swarm has begun."""

    async def news(seconds: float) -> None:
        looks.append(seconds)

    looks: list[float] = []
    async with member(OTHER_KEY) as other:
        settings = LeadConfig(host="127.0.0.1", port=0, bootstrap=(line_for(KEY, other),))
        network = NodeNetwork(tmp_path, "sampler", settings, say=looks_like_a_line, emit=lambda kind, **_: None)
        network._learner_key = KEY.public_bytes
        monkeypatch.setattr(network, "learner", lambda: (KEY.node_id, []))
        monkeypatch.setattr(network.gossip, "news", news)
        with pytest.raises(UserError, match="this join line is old, ask the person who leads the swarm for a new one"):
            await LearnerLink(network, looks_like_a_line).find()
        await network.peers.close()
    assert len(looks) == MISLED_TRIES


def looks_like_a_line(line: str) -> None:
    assert "\n" not in line
