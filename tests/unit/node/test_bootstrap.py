"""Where a node begins: bare hosts trusted on first use, join lines, names, remembered peers, patience."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import PeerUnreachable, ProtocolError, UserError
from swarm.gossip.records import Owner
from swarm.net.server import NodeServer
from swarm.net.signing import SigningKey, swarm_id_of
from swarm.node.bootstrap import (
    CHECK_BYTES,
    PREFIX,
    Bootstraps,
    JoinLine,
    OtherSwarm,
    read_bootstraps,
    read_join_line,
    write_join_line,
)
from swarm.node.hello import Hello, hello_route
from swarm.node.identity import load_or_create_tls
from swarm.types import Address
from swarm.wire import PROTOCOL, digest, encode
from tests.builders import KEY, OTHER_KEY, SWARM_OF_KEY
from tests.swarmers import LEARNER, THE_SWARM, address, key


def hello_of(key: SigningKey, address: Address, now: float = 0.0) -> Hello:
    swarm = swarm_id_of(key.public_bytes)
    owner = Owner(key, swarm, "learner", generation=1, addresses=(address,), round_s=2.0)
    signed = owner.signed.sealed
    return Hello(protocol=PROTOCOL, learner_key=key.public_bytes, record=signed, learner=signed, now=now)


@asynccontextmanager
async def member(
    key: SigningKey, tls_in: Path | None = None, *, named: bytes | None = None, now: float = 0.0
) -> AsyncIterator[Address]:
    """A node that says hello; `named` is the fingerprint that its record claims, if not the right one."""
    tls = load_or_create_tls(tls_in) if tls_in else None
    fingerprint = tls.fingerprint if tls else b""
    said: list[Hello] = []
    server = NodeServer([hello_route(lambda knock, caller: said[0])], dict, tls=tls.context if tls else None)
    port = await server.start("127.0.0.1", 0)
    claimed = Address(host="127.0.0.1", port=port, fingerprint=fingerprint if named is None else named)
    said.append(hello_of(key, claimed, now))
    try:
        yield Address(host="127.0.0.1", port=port, fingerprint=fingerprint)
    finally:
        await server.stop()


def bootstraps(tmp_path: Path, *texts: str) -> Bootstraps:
    return Bootstraps(texts, tmp_path / "peers", random=Random(1))


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def line_for(key: SigningKey, *addresses: Address) -> str:
    swarm = swarm_id_of(key.public_bytes)
    return write_join_line(JoinLine(swarm=swarm, learner_key=key.public_bytes, addresses=addresses))


async def test_a_bare_address_on_this_machine_is_tried_without_and_with_encryption(tmp_path: Path) -> None:
    async with member(KEY) as plain, member(KEY, tmp_path / "tls") as encrypted:
        for text, found in ((plain.authority, plain), (encrypted.authority, encrypted), (plain.url, plain)):
            assert (await bootstraps(tmp_path, text).greet()).address == found


async def test_a_join_line_takes_no_other_certificate_and_no_other_swarm(tmp_path: Path) -> None:
    async with member(KEY, tmp_path / "tls") as here, member(OTHER_KEY, tmp_path / "other") as other:
        greeting = await bootstraps(tmp_path, line_for(KEY, here)).greet()
        assert greeting.hello.swarm == SWARM_OF_KEY
        forged = Address(host=here.host, port=here.port, fingerprint=other.fingerprint)
        with pytest.raises(PeerUnreachable, match="is not the one that was named"):
            await bootstraps(tmp_path, line_for(KEY, forged)).greet()
        with pytest.raises(OtherSwarm, match="belongs to swarm"):
            await bootstraps(tmp_path, line_for(KEY, other)).greet()


async def test_a_certificate_that_the_record_does_not_name_means_somebody_between(tmp_path: Path) -> None:
    async with member(KEY, tmp_path / "tls", named=bytes(32)) as between:
        with pytest.raises(ProtocolError, match="someone is between"):
            await bootstraps(tmp_path, between.authority).greet()


async def test_a_name_may_have_several_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with member(KEY) as one:
        asked: list[str] = []

        async def two_addresses(host: str, port: int, **settings: Any) -> list[Any]:
            asked.append(host)
            return [(socket.AF_INET, 1, 6, "", (address, port)) for address in ("127.0.0.1", "127.0.0.2")]

        async def host_or_none() -> str | None:
            try:
                return (await several.greet()).address.host
            except PeerUnreachable:
                return None

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", two_addresses)
        several = bootstraps(tmp_path, f"http://seeds.example:{one.port}")
        assert {await host_or_none() for _ in range(12)} == {"127.0.0.1", None}
        assert asked == ["seeds.example"] * 12


async def test_good_peers_are_remembered_for_the_same_bootstraps_alone(tmp_path: Path) -> None:
    dead = f"127.0.0.1:{closed_port()}"
    async with member(KEY) as alive:
        before = bootstraps(tmp_path, alive.authority)
        greeting = await before.greet()
        before = bootstraps(tmp_path, dead)
        before.remember(greeting.hello.swarm, [alive])
        assert (await before.greet()).address == alive, "within the same life too"

        again = bootstraps(tmp_path, dead)
        assert (await again.find(lambda line: None)).address == alive
        elsewhere = bootstraps(tmp_path, "127.0.0.1:9")
        with pytest.raises(PeerUnreachable):
            await elsewhere.greet()
        (tmp_path / "peers").write_bytes(b"damaged")
        assert len(bootstraps(tmp_path, dead)._cached) == 0


async def test_remembered_strangers_lead_nowhere_else_and_keep_nobody_waiting(tmp_path: Path) -> None:
    """Peers were never named by the user: they are tried after what was, and believed of one swarm alone."""
    dead = f"127.0.0.1:{closed_port()}"
    async with member(KEY) as ours, member(OTHER_KEY) as theirs:
        greeting = await bootstraps(tmp_path, ours.authority).greet()
        bootstraps(tmp_path, dead).remember(greeting.hello.swarm, [theirs])
        with pytest.raises(PeerUnreachable):
            await bootstraps(tmp_path, dead).greet()
        sweep = bootstraps(tmp_path, dead)._sweep()
        assert [one.is_remembered for one in sweep] == [False, True]
        with pytest.raises(OtherSwarm):
            await bootstraps(tmp_path, dead)._greet_one(sweep[1])


def test_everything_named_comes_before_a_few_that_are_remembered(tmp_path: Path) -> None:
    reached = [Address(host="8.8.8.8", port=7700 + number) for number in range(40)]
    named = ("10.0.0.1", "10.0.0.2")
    bootstraps(tmp_path, *named).remember(SWARM_OF_KEY, reached)
    sweep = bootstraps(tmp_path, *named)._sweep()
    assert {one.host for one in sweep[:2]} == set(named)
    assert 0 < len(sweep[2:]) < 10


COMMAND = "echo-node join --role sampler --bootstrap {} --state-dir here"


@pytest.mark.parametrize("paste", ["  {}\t", '"{}"', "'{}'", "\u201c{}\u201d.", "<{}>,", "`{}`.", "{}\n", COMMAND])
def test_what_was_pasted_is_read(paste: str) -> None:
    whole = line_for(KEY, Address(host="10.0.0.1", port=7700, fingerprint=bytes(32)))
    for text in (whole, f"{whole[:40]}\n  {whole[40:80]}\r\n{whole[80:]}"):
        assert read_bootstraps([paste.format(text)]) == read_bootstraps([whole])
    if paste != COMMAND:
        assert read_bootstraps([paste.format("10.0.0.1")]) == read_bootstraps(["10.0.0.1"])


def test_join_lines_of_two_swarms_are_refused(tmp_path: Path) -> None:
    here = Address(host="10.0.0.1", port=7700)
    with pytest.raises(UserError, match="different swarms"):
        bootstraps(tmp_path, line_for(KEY, here), line_for(OTHER_KEY, here))


LINE = JoinLine(swarm=THE_SWARM, learner_key=LEARNER.public_bytes, addresses=(address(1), address(2)))
TEXT = write_join_line(LINE)


def checked(body: bytes) -> str:
    """A join line whose checksum is right, whatever it says."""
    return PREFIX + base64.urlsafe_b64encode(body + digest(body)[:CHECK_BYTES]).decode().rstrip("=")


def test_a_join_line_comes_back_as_it_was_also_the_longest() -> None:
    assert read_join_line(f"  {TEXT}\n") == LINE
    assert TEXT.startswith("echo1:")
    assert len(TEXT.split()) == 1
    names = tuple(Address(host="n" * 200, port=65_535, fingerprint=bytes(32)) for _ in range(8))
    longest = JoinLine(swarm=THE_SWARM, learner_key=LEARNER.public_bytes, addresses=names)
    assert read_join_line(write_join_line(longest)) == longest


@pytest.mark.parametrize("cut", range(len(PREFIX), len(TEXT)))
def test_a_join_line_that_was_cut_is_refused(cut: int) -> None:
    with pytest.raises(UserError, match="copy the whole line"):
        read_join_line(TEXT[:cut])


@given(at=st.integers(len(PREFIX), len(TEXT) - 1), other=st.characters(max_codepoint=255))
def test_a_character_that_was_altered_is_seen(at: int, other: str) -> None:
    altered = TEXT[:at] + other + TEXT[at + 1 :]
    try:
        assert read_join_line(altered) == LINE
    except UserError:
        return
    # The last character may carry bits that mean nothing, and white space at the end is no part of the line.
    assert altered.strip() == TEXT or at == len(TEXT) - 1


@given(st.text(max_size=200))
def test_no_other_text_is_a_join_line(text: str) -> None:
    with pytest.raises(UserError):
        read_join_line(text)


def line(*addresses: Address, key: bytes = LEARNER.public_bytes) -> JoinLine:
    return JoinLine(swarm=THE_SWARM, learner_key=key, addresses=addresses)


@pytest.mark.parametrize(
    "line",
    [
        line(address(1), key=key(1).public_bytes),
        line(),
        line(Address(host="a b", port=1)),
        line(address(1), key=b"short"),
    ],
    ids=["another learner", "nowhere to begin", "no host", "no key"],
)
def test_a_line_that_contradicts_itself_is_refused_in_spite_of_its_checksum(line: JoinLine) -> None:
    with pytest.raises(UserError, match="damaged"):
        read_join_line(checked(encode(line)))
