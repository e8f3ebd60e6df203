"""What every node has, in one process: real servers and gossip on loopback, at twenty times the usual pace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from swarm.errors import PeerUnreachable, ProtocolError, UserError
from swarm.gossip.reachability import DialBack
from swarm.gossip.records import Exchange, GossipRules, Owner, SignedRecord
from swarm.lead.learner import LearnerNode
from swarm.net.client import PeerClient, session_route
from swarm.net.hosts import is_loopback
from swarm.net.links import Links
from swarm.net.server import NodeServer
from swarm.net.sessions import ServerSessions
from swarm.net.signing import swarm_id_of
from swarm.net.stream import Incoming
from swarm.node.bootstrap import read_join_line
from swarm.node.hello import HELLO_PATH
from swarm.node.identity import next_generation
from swarm.node.network import NodeNetwork, advertised, own_hosts
from swarm.settings import JoinConfig, LeadConfig
from swarm.settings_file import load_config
from swarm.types import Address, Role, SwarmId
from swarm.wire import encode
from tests.builders import KEY, OTHER_KEY
from tests.unit.net.test_stream import Clock, Link
from tests.unit.wires import Place

ROUND_S = 0.1


def network(directory: Path, role: Role, *bootstrap: str, **settings: Any) -> NodeNetwork:
    return NodeNetwork(
        directory,
        role,
        LeadConfig(**{"host": "127.0.0.1", "port": 0, "bootstrap": bootstrap, "lan": True, **settings}),
        say=lambda line: None,
        emit=lambda kind, **fields: None,
    )


async def refuse_stream(incoming: Incoming) -> None:
    incoming.sock.close()
    incoming.leave()


@asynccontextmanager
async def learner(directory: Path, **settings: Any) -> AsyncIterator[NodeNetwork]:
    node = network(directory, "learner", **settings)
    await node.start([], node.status, on_stream=refuse_stream, beat_s=1.0)
    try:
        async with node.swarm(node.key.public_bytes, ROUND_S):
            yield node
    finally:
        await node.stop()


@asynccontextmanager
async def joined(directory: Path, bootstrap: str) -> AsyncIterator[NodeNetwork]:
    node = network(directory, "relay", bootstrap)
    await node.start([], node.status, on_stream=refuse_stream)
    try:
        found = await node.find()
        async with node.swarm(found.hello.learner_key, found.learner.record.round_s):
            yield node
    finally:
        await node.stop()


@asynccontextmanager
async def two_nodes(directory: Path) -> AsyncIterator[tuple[NodeNetwork, NodeNetwork]]:
    async with learner(directory / "learner") as lead, joined(directory / "one", lead.address.url) as one:
        yield lead, one


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until `condition` holds; pytest's own time limit ends it if it never does."""
    while not condition():  # noqa: ASYNC110 - what is waited for is in a core, which knows no events
        await asyncio.sleep(ROUND_S / 10)


def publics(node: NodeNetwork) -> set[str]:
    return {public["node"] for public in node.status()["publics"]}


def public_at(address: Address, swarm: str) -> SignedRecord:
    """What OTHER_KEY may say of itself."""
    owner = Owner(OTHER_KEY, SwarmId(swarm), "relay", generation=1, addresses=(address,))
    owner.reachability = "public"
    owner.issue()
    return owner.signed


async def test_nodes_find_one_another_call_back_and_say_goodbye(tmp_path: Path) -> None:
    async with learner(tmp_path / "learner") as lead:
        async with joined(tmp_path / "one", lead.address.url) as one:
            await until(lambda: publics(lead) == {one.node})
            assert one.status()["reachability"] == "public"
            async with joined(tmp_path / "two", one.address.url) as two:
                everybody = {lead.node, one.node, two.node}
                await until(lambda: all(publics(node) | {node.node} == everybody for node in (lead, one, two)))
                assert two.learner()[1] == [lead.address]
        assert publics(lead) == set(), "those who leave say so"
        assert lead.status()["dead"] == 2


async def test_a_second_session_is_another_life_and_is_believed(tmp_path: Path) -> None:
    """An engine that died starts a new session in the same process: its records must not repeat former orders."""
    async with two_nodes(tmp_path) as (lead, one):
        await until(lambda: publics(lead) == {one.node})
        before = one.generation
        async with one.swarm(lead.key.public_bytes, ROUND_S):
            assert one.generation == before + 1
            await until(lambda: one.status()["reachability"] == "public")
            order = one.gossip.core.view.own.order
            await until(lambda: _order_known(lead, one) >= order)
        assert one.node not in lead.gossip.core.view.table.banned
    assert next_generation(tmp_path / "one") == before + 2


async def test_a_public_that_speaks_another_protocol_is_one_that_does_not_answer(tmp_path: Path) -> None:
    """Its 426 ends no task, no call and no node."""

    async def upgrade(request: web.Request) -> web.Response:
        return web.Response(status=426, text="upgrade\x1b[2J")

    sessions = ServerSessions(OTHER_KEY, b"")
    server = NodeServer([session_route(sessions), web.post("/v1/gossip", upgrade), web.get(HELLO_PATH, upgrade)], dict)
    port = await server.start("127.0.0.1", 0)
    try:
        async with learner(tmp_path / "learner") as lead:
            address = Address(host="127.0.0.1", port=port)
            swarm = lead.gossip.core.view.own.record.swarm
            core = lead.gossip.core
            record = public_at(address, swarm)
            lead.gossip.perform(core.introduced(record, address, now=asyncio.get_running_loop().time()))
            peer = core.view.table.find(OTHER_KEY.node_id)
            assert peer is not None
            await until(lambda: peer.failures >= 2)
            assert lead.gossip.rejected["bad_answer"] >= 2
            assert len(lead.gossip._tasks) <= 2
    finally:
        await server.stop()


async def test_who_has_no_swarm_yet_calls_nobody_back_and_says_so(tmp_path: Path) -> None:
    node = network(tmp_path / "node", "relay", "127.0.0.1:9")
    port = await node.start([], node.status, on_stream=refuse_stream)
    asked = {"/v1/dial-back": encode(DialBack(port=1, fingerprint=b"")), "/v1/gossip": b"\x90"}
    try:
        async with PeerClient(Address(host="127.0.0.1", port=port), key=OTHER_KEY, server=node.node) as peer:
            for path, body in asked.items():
                with pytest.raises(PeerUnreachable, match="has not found its swarm yet"):
                    await peer.post(path, body, cap_bytes=1000, timeout_s=5.0)
    finally:
        await node.stop()


async def test_another_swarm_at_the_bootstrap_is_noted_until_it_is_joined(tmp_path: Path) -> None:
    async with learner(tmp_path / "learner") as lead:
        await lead._server.stop()
        async with learner(tmp_path / "other") as other, joined(tmp_path / "one", other.address.url) as one:
            one._learner_key = lead.key.public_bytes
            await one.look_again()
            assert one.other_swarm == other.status()["swarm"]
            async with one.swarm(other.key.public_bytes, ROUND_S):
                assert one.other_swarm is None


@pytest.mark.parametrize("query", ["knock=00&caller=" + "0" * 32, "knock=" + "0" * 32 + "&caller=" + "x" * 5000])
async def test_a_knock_of_another_shape_is_refused(tmp_path: Path, query: str) -> None:
    async with learner(tmp_path / "learner") as lead, PeerClient(lead.address) as peer:
        with pytest.raises(ProtocolError, match="a knock is 16 bytes"):
            await peer.get(f"{HELLO_PATH}?{query}", cap_bytes=4096, timeout_s=5.0)


async def test_a_full_disk_is_no_reason_to_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("swarm.node.network.CACHE_EVERY_S", 0.01)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    async with two_nodes(tmp_path) as (lead, one):
        monkeypatch.setattr(one, "_say", said.append)
        monkeypatch.setattr(one.bootstraps, "remember", full)
        monkeypatch.setattr("swarm.node.network.raise_generation", full)
        one._keep_generation(9)
        await until(lambda: len(said) == 2)
        await until(lambda: publics(lead) == {one.node})
    assert "may be banned" in said[0]
    assert "cannot write down peers" in said[1]


async def test_other_ports_of_a_private_bootstrap_are_seldom_tried_without_lan(tmp_path: Path) -> None:
    """Another node there may be called, as of a learner that has moved. So strangers may name any port there."""
    one = network(tmp_path, "relay", "http://192.168.1.10:7700", host="0.0.0.0", lan=False)
    one._learner_key, one._rules = KEY.public_bytes, GossipRules(round_s=ROUND_S)
    links = Links(one.station, open_link=lambda node, stream: Place(), admits=lambda node: True)
    named = [Address(host="192.168.1.10", port=port) for port in range(1, 257)]
    for tries in (links._tries, one._membership(KEY.public_bytes).view.table.tries):
        tried = 0
        for address in filter(one.station.dialable, named):
            if tries.is_due(address, now=0.0):
                tries.tried(address, now=0.0)
                tried += 1
        assert tried == 1


async def test_the_learner_is_called_where_a_bootstrap_found_it_last(tmp_path: Path) -> None:
    """Its name may lead elsewhere than at the start, and nobody else is there to tell."""
    async with two_nodes(tmp_path) as (lead, one):
        assert one._greeting is not None
        one._greeting = replace(one._greeting, address=Address(host="127.0.0.1", port=9))
        await one.look_again()
        assert one.learner()[1][-1] == lead.address


def test_own_addresses_are_none_of_loopback_and_of_the_family_that_is_listened_in() -> None:
    assert not any(map(is_loopback, own_hosts()))
    here = {host: advertised(LeadConfig(host=host, port=7700), 7700, b"").host for host in ("::", "0.0.0.0")}
    assert ":" in here["::"]
    assert ":" not in here["0.0.0.0"]
    assert here["0.0.0.0"] in (*own_hosts(), "127.0.0.1")


def line_of(directory: Path, **settings: Any) -> list[str]:
    node = NodeNetwork(directory, "learner", LeadConfig(port=7700, **settings), say=print, emit=lambda kind, **_: None)
    node.port, node._learner_key = 7700, node.key.public_bytes
    addresses = read_join_line(node.join_line()).addresses
    assert {bool(address.fingerprint) for address in addresses} == {settings["host"] != "127.0.0.1"}
    return [address.authority for address in addresses]


def test_a_join_line_has_all_addresses_that_others_may_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TLS, unless the learner stays at home; what the user advertises stands alone."""
    monkeypatch.setattr("swarm.node.network.own_hosts", lambda: [f"10.0.0.{number}" for number in range(1, 12)])
    monkeypatch.setattr("swarm.node.network._outward_host", lambda family: "10.0.0.3")
    everywhere = line_of(tmp_path / "a", host=LeadConfig().host)
    assert everywhere[:3] == ["10.0.0.3:7700", "10.0.0.1:7700", "10.0.0.2:7700"]
    assert len(everywhere) == len(set(everywhere)) == 8
    assert line_of(tmp_path / "b", host="0.0.0.0", advertise="[2001:db8::7]:80") == ["[2001:db8::7]:80"]
    assert line_of(tmp_path / "f", host="0.0.0.0", advertise="home.example") == ["home.example:7700"]
    with pytest.raises(UserError, match="is not an address"):
        line_of(tmp_path / "g", host="0.0.0.0", advertise="no host")
    assert line_of(tmp_path / "c", host="10.0.0.2") == ["10.0.0.2:7700"]
    assert line_of(tmp_path / "e", host="::") == ["10.0.0.3:7700"], "of the family that it listens in"
    assert line_of(tmp_path / "d", host="127.0.0.1") == ["127.0.0.1:7700"]


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
async def test_a_learner_says_where_it_listens_and_how_to_keep_it_at_home(tmp_path: Path, host: str) -> None:
    said: list[str] = []
    node = LearnerNode(LeadConfig(run_dir=tmp_path, host=host), said.append)
    node._network = network = NodeNetwork(tmp_path, "learner", node._config, say=print, emit=lambda kind, **_: None)
    network.port = 7700
    async with network.swarm(network.key.public_bytes, ROUND_S):
        node._write_address()
        node._announce()
    words = "open to other machines: listens at all of its addresses, port 7700, encrypted (--host 127.0.0.1 keeps it"
    assert [words in line for line in said].count(True) == (host == "0.0.0.0")
    joins = next(line for line in said if "joins with" in line).split()[-1]
    assert joins.startswith("echo1:") == (host == "0.0.0.0")
    assert any(line.endswith("--bootstrap 127.0.0.1:7700") for line in said)


async def test_who_trusts_a_bare_host_is_told_whom_and_when_it_is_another(tmp_path: Path) -> None:
    async with learner(tmp_path / "learner", tls=True) as lead:
        async with joined(tmp_path / "one", lead.address.authority) as one:
            shown = f"trusting it because {lead.address.url} said so, with certificate"
            assert f"{shown} {lead.address.fingerprint.hex()[:16]}..." in one.trust_line()
            assert "last time" not in one.trust_line()
            one.bootstraps.remember(swarm_id_of(lead.key.public_bytes), [lead.address])
        port = lead.port
    async with learner(tmp_path / "other", port=port) as other:
        assert other.node != lead.node
        async with joined(tmp_path / "one", lead.address.authority) as one:
            assert one.trust_line().endswith(f"; last time it was swarm {swarm_id_of(lead.key.public_bytes)}")


async def test_a_node_without_room_for_its_record_stays_a_leaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the open internet, with room for one public besides the learner."""
    monkeypatch.setattr("swarm.gossip.table.open_host", lambda host: host)
    monkeypatch.setattr("swarm.gossip.table.MAX_PER_HOST", 1)
    told: list[str] = []
    async with two_nodes(tmp_path) as (lead, one):
        await until(lambda: publics(lead) == {one.node} and publics(one) == {lead.node})
        async with joined(tmp_path / "two", lead.address.url) as two:
            monkeypatch.setattr(two.gossip, "_emit", lambda kind, **fields: told.append(kind))
            await until(lambda: "crowded" in told)
            assert two.status()["reachability"] == "leaf"
        assert one.status()["reachability"] == "public", "it has its place, and keeps it"


async def test_a_claimed_address_is_unused_until_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.node.network.CACHE_EVERY_S", 0.01)
    remembered: list[list[Address]] = []
    async with two_nodes(tmp_path) as (lead, one):
        for host in ("169.254.169.254", "fe80::1", "router.home"):
            assert not one.station.dialable(Address(host=host, port=80))
        assert one.station.dialable(lead.address)
        await until(lambda: publics(lead) == {one.node} and bool(lead.public_at(one.node)))
        claim = Address(host="20.66.66.66", port=22)
        said = Exchange(records=(public_at(claim, swarm_id_of(lead.key.public_bytes)).sealed,), asks=0)
        lead.gossip.core.receive(OTHER_KEY.node_id, said, host="127.0.0.1", now=time.monotonic())
        assert OTHER_KEY.node_id in publics(lead)
        assert lead.public_at(OTHER_KEY.node_id) == []
        assert lead.publics() == [(one.node, one.address)]
        monkeypatch.setattr(lead.bootstraps, "remember", lambda swarm, addresses: remembered.append(list(addresses)))
        await until(lambda: len(remembered) > 1)
        assert remembered[-1] == [one.address]
        lead.gossip.core.view.table.prove(OTHER_KEY.node_id, lambda address: True)
        assert lead.public_at(OTHER_KEY.node_id) == [claim]


def _order_known(lead: NodeNetwork, node: NodeNetwork) -> int:
    peer = lead.gossip.core.view.table.find(node.node)
    return peer.signed.order if peer is not None else -1


LEARNER = load_config(LeadConfig, None, {"max_upload": 8.0})
SAMPLER = load_config(JoinConfig, None, {"max_upload": 8.0, "max_download": 16.0, "bootstrap": "127.0.0.1"})


@pytest.mark.parametrize(
    ("config", "direction", "mbit"), [(LEARNER, "upload", 8.0), (SAMPLER, "upload", 8.0), (SAMPLER, "download", 16.0)]
)
def test_a_cap_that_the_user_gave_is_that_of_the_nodes_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: LeadConfig | JoinConfig, direction: str, mbit: float
) -> None:
    """How it is kept and shared, tests/unit/net/test_stream.py shows."""
    node = NodeNetwork(tmp_path, "relay", config, say=print, emit=lambda kind, **fields: None)
    pace = node.station.upload if direction == "upload" else node.station.download
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    Link(pace, clock, 16_384).wake()
    clock.run_until(clock.now + 10.0)
    assert pace.total_bytes * pace.OVERHEAD == pytest.approx(10 * mbit * 1e6 / 8, rel=0.05)
