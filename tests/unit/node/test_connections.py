"""Why a node cannot be reached, as `join` and `status` say it: which cause, what to do, and what is waited for."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from swarm.cli.runs import _fetch
from swarm.errors import UserError
from swarm.net.wire import PROTOCOL, PROTOCOL_HEADER
from swarm.node.bootstrap import FIND_S, WRONG_TRIES
from swarm.node.link import MISLED_TRIES, LearnerLink
from swarm.node.network import NetworkSettings, NodeNetwork
from swarm.types import Address
from tests.builders import KEY, OTHER_KEY
from tests.unit.node.test_bootstrap import bootstraps, line_for, member


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


async def given_up(tmp_path: Path, text: str) -> tuple[str, list[str]]:
    """The line with which `join` ends, and what it said before."""
    said: list[str] = []
    with pytest.raises(UserError) as caught:
        await bootstraps(tmp_path, text).find(said.append)
    assert "\n" not in str(caught.value)
    return str(caught.value), said


class Said(Exception):
    """A line that a node says before it waits."""


async def first_line(tmp_path: Path, text: str) -> str:
    """What `join` says of a cause that it waits for."""

    def say(line: str) -> None:
        raise Said(line)

    with pytest.raises(Said) as caught:
        await bootstraps(tmp_path, text).find(say)
    line = str(caught.value)
    assert line.endswith("; trying again until a bootstrap answers (Ctrl-C to give up)")
    return line


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def web_server(*, status: int = 200, headers: dict[str, str] | None = None) -> AsyncIterator[int]:
    """Something else that speaks plain HTTP, and answers everything alike; its port."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, text="hello", headers=headers)

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


# -- what is waited for --------------------------------------------------------------------------------------


async def test_a_closed_port(tmp_path: Path) -> None:
    address = Address(host="127.0.0.1", port=closed_port())
    words = "cannot be reached: nothing listens there (connection refused): is the node running, and is the port right?"
    for text in (address.authority, address.url, f"https://{address.authority}", line_for(KEY, address)):
        assert words in await first_line(tmp_path, text)
    with pytest.raises(UserError, match=r"no node answers: .*nothing listens there"):
        await _fetch(address.authority)


async def test_a_name_that_does_not_exist(tmp_path: Path) -> None:
    line = await first_line(tmp_path, "learner.invalid")
    assert "the name learner.invalid" in line
    assert "is this machine on the network?" in line
    with pytest.raises(UserError, match=r"no node answers: the name learner\.invalid"):
        await _fetch("learner.invalid")


async def test_a_host_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.node.bootstrap.CERTIFICATE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        line = await first_line(tmp_path, f"https://127.0.0.1:{deaf.getsockname()[1]}")
    assert "did not show a certificate within 0.05 s; is the address right, and do firewalls" in line


async def test_no_route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unreachable(*_: Any, **__: Any) -> None:
        raise OSError(113, "No route to host")

    monkeypatch.setattr("swarm.net.client.asyncio.open_connection", unreachable)
    assert "there is no route to it: is the address right" in await first_line(tmp_path, "https://192.0.2.1")


async def test_a_plain_client_of_an_encrypted_node(tmp_path: Path) -> None:
    async with member(KEY, tmp_path / "tls") as there:
        line = await first_line(tmp_path, f"http://{there.authority}")
    assert "it closed the connection without an answer; if it speaks TLS, name it as https://HOST:PORT" in line


async def test_a_learner_that_is_down_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    """Also when another program has its port for a moment."""
    said: list[str] = []
    async with member(KEY) as there, member(OTHER_KEY) as other:
        nobody = Address(host="127.0.0.1", port=closed_port())
        ways = [nobody] * 9 + [other] * (WRONG_TRIES - 1) + [nobody] * 3 + [there]

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


async def test_who_never_answers_is_not_waited_for_for_ever(tmp_path: Path, pauses: list[float]) -> None:
    line, said = await given_up(tmp_path, line_for(KEY, Address(host="127.0.0.1", port=closed_port())))
    assert "nobody answered for 24 hours: ask the person who leads the swarm for a new one" in line
    assert FIND_S <= sum(pauses) < FIND_S + 400
    assert len(said) == 1


# -- what no waiting mends -----------------------------------------------------------------------------------


async def test_an_old_join_line(tmp_path: Path, pauses: list[float]) -> None:
    async with member(OTHER_KEY) as other:
        line, said = await given_up(tmp_path, line_for(KEY, other))
    assert "this join line is old, ask the person who leads the swarm for a new one" in line
    assert len(pauses) == WRONG_TRIES - 1
    assert len(said) == 1


async def test_another_certificate(tmp_path: Path, pauses: list[float]) -> None:
    async with member(KEY, tmp_path / "tls") as here:
        before = Address(host=here.host, port=here.port, fingerprint=b"f" * 32)
        line, _ = await given_up(tmp_path, line_for(KEY, before))
    assert "is not the one that was named" in line
    assert "ask for its new join line" in line
    assert len(pauses) == WRONG_TRIES - 1


async def test_a_node_without_tls_where_it_was_named(tmp_path: Path, pauses: list[float]) -> None:
    async with member(KEY) as plain:
        before = Address(host=plain.host, port=plain.port, fingerprint=b"f" * 32)
        line, _ = await given_up(tmp_path, line_for(KEY, before))
        assert "does not speak TLS, as was named; if it was set up again, ask for its new join line" in line
        line, _ = await given_up(tmp_path, f"https://{plain.authority}")
        assert f"does not answer with TLS; if it is an echo-node without (--no-tls), name it as {plain.url}" in line


async def test_a_server_of_something_else(tmp_path: Path, pauses: list[float]) -> None:
    async with web_server() as port:
        line, _ = await given_up(tmp_path, f"http://127.0.0.1:{port}")
        assert "not a Hello" in line
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


# -- a node that has been in the swarm -----------------------------------------------------------------------


async def test_a_sampler_whose_swarm_is_gone_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner is nowhere, and where the join line leads another swarm has begun."""

    async def news(seconds: float) -> None:
        looks.append(seconds)

    looks: list[float] = []
    async with member(OTHER_KEY) as other:
        settings = NetworkSettings(host="127.0.0.1", port=0, bootstrap=(line_for(KEY, other),))
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
