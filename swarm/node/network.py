"""What every node has: a key, a server, clients that sign, and its place in the swarm.

start     listen; answer `status`, and 503 to everything else until the node has found its swarm
find      ask a bootstrap which swarm this is (the learner knows already)
swarm     take part in the swarm: gossip, dial-back
stop      tell the others, and leave
"""

from __future__ import annotations

import asyncio
import fcntl
import re
import secrets
import socket
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import SystemRandom
from typing import Any

import msgspec
from aiohttp import web

from swarm.broadcast.version.manifest import open_head
from swarm.errors import PeerUnreachable, ProtocolError, UserError
from swarm.gossip.membership import Membership
from swarm.gossip.reachability import DIAL_BACK_CONTEXT, DialBackLimit, Knock, Reachability
from swarm.gossip.records import GossipRules, Owner, SignedRecord, open_record, read_record
from swarm.gossip.service import KNOCK_S, GossipService
from swarm.gossip.table import Leaf, Peer, Table
from swarm.net.client import PeerClient, session_route
from swarm.net.hosts import caller_of, is_dialable, is_loopback, is_private
from swarm.net.links import Station
from swarm.net.pace import Pace
from swarm.net.server import NodeServer
from swarm.net.sessions import ServerSessions
from swarm.net.signing import SigningKey, node_id_of, swarm_id_of, unseal
from swarm.net.stream import Incoming
from swarm.node.bootstrap import (
    Bootstraps,
    Greeting,
    JoinLine,
    OtherSwarm,
    read_bootstrap,
    read_bootstraps,
    write_join_line,
)
from swarm.node.exposition import metrics_route
from swarm.node.hello import HELLO_BYTES, HELLO_PATH, Hello, hello_route
from swarm.node.identity import (
    load_or_create_key,
    load_or_create_tls,
    next_generation,
    raise_generation,
)
from swarm.settings import DEFAULT_PORT, JoinConfig, LeadConfig
from swarm.types import Address, NodeId, Role, VersionId
from swarm.wire import PROTOCOL, decode, encode

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # Listens on all interfaces; and how this machine dials that
SIOCGIFADDR, SIOCGIFFLAGS, IFF_UP = 0x8915, 0x8913, 0x1  # Linux: ask for an interface's address, and whether it is up
MAX_JOIN_ADDRESSES = 8  # As JoinLine takes

MAX_CLIENTS = 256  # Clients are kept for their sessions with a server; idle connections close by themselves


class PeerPool:
    """One client for each node and address. Above MAX_CLIENTS, the least recently used one is closed."""

    def __init__(self, key: SigningKey) -> None:
        self._key = key
        self._clients: OrderedDict[tuple[NodeId, Address], PeerClient] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def at(self, node: NodeId, address: Address) -> PeerClient:
        """Return the client that signs requests to `node` at `address`."""
        client = self._clients.get((node, address))
        if client is None:
            client = self._clients[node, address] = PeerClient(address, key=self._key, server=node)
            if len(self._clients) > MAX_CLIENTS:
                self._close(self._clients.popitem(last=False)[1])
        self._clients.move_to_end((node, address))
        return client

    async def close(self) -> None:
        for client in self._clients.values():
            self._close(client)
        self._clients.clear()
        await asyncio.gather(*self._closing)

    def _close(self, client: PeerClient) -> None:
        task = asyncio.get_running_loop().create_task(client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


NO_RELAY = (
    "no public node besides the learner: every sampler fetches all weights from the learner alone, and finds nobody "
    "else if it goes. Add one: echo-node join --role relay --bootstrap HOST, on a machine that others can reach"
)


def view_status(core: Membership, *, now: float) -> dict[str, Any]:
    """Return publics, leaves and homes for `status`, with their states, versions and lags."""
    view = core.view
    newest = view.newest
    publics = [_public(peer, newest, view.table.is_suspect(peer, now=now), now) for peer in view.table]
    others_public = any(public["role"] != "learner" for public in publics)
    others_public = others_public or (view.is_public and view.owner.role != "learner")
    return {
        "reachability": view.owner.reachability,
        "addresses": [address.url for address in view.own.record.addresses],
        "newest": str(newest) if newest else None,
        "publics": sorted(publics, key=lambda public: (public["role"] != "learner", public["node"])),
        "dead": len(view.table.dead),
        "homes": [home.node for home in core.homes.homes],
        "leaves": [_leaf(node, leaf, newest, now) for node, leaf in view.leases.leaves.items()],
        "leaves_elsewhere": sum(public["leaves"] for public in publics),
        "advice": None if others_public else NO_RELAY,
    }


def _public(peer: Peer, newest: VersionId | None, suspect: bool, now: float) -> dict[str, Any]:
    record = peer.signed.record
    return {
        "node": peer.signed.node,
        "role": record.role,
        "state": "suspect" if suspect else "alive",
        "address": record.addresses[0].url,
        "beat_s": round(max(0.0, now - peer.heard_at), 1),
        "leaves": record.leaves,
        **_version(record.held, newest),
    }


def _leaf(node: NodeId, leaf: Leaf, newest: VersionId | None, now: float) -> dict[str, Any]:
    record = leaf.signed.record if leaf.signed else None
    return {
        "node": node,
        "role": record.role if record else None,
        "beat_s": round(now - leaf.heard_at, 1),
        **_version(record.held if record else None, newest),
    }


def _version(held: VersionId | None, newest: VersionId | None) -> dict[str, Any]:
    """Return the version that a node holds and how many versions it is behind; None where unknown."""
    lag = newest.version - held.version if newest and held and newest.incarnation == held.incarnation else None
    return {"held": str(held) if held else None, "lag": lag}


CACHE_EVERY_S = 60.0  # How often good peers are written down for the next start


class NodeNetwork:
    """The network side of a node. `emit` writes an event, `say` tells the person at the terminal."""

    def __init__(
        self,
        directory: Path,
        role: Role,
        config: JoinConfig | LeadConfig,
        *,
        say: Callable[[str], None],
        emit: Callable[..., None],
    ) -> None:
        self._directory = directory
        self._role = role
        self._config = config
        self._host, self._wanted_port = where_to_listen(config)
        self._say = say
        self._random = SystemRandom()
        self.bootstraps = Bootstraps(config.bootstrap, directory / "peers", random=self._random)
        self.key = load_or_create_key(directory)
        self.generation = next_generation(directory)
        self.incarnation = self.generation - 1
        """The incarnation of a learner's versions. A learner that resumes a run sets it before it enters the swarm."""
        local = is_loopback(self._host)
        use_tls = not local if config.tls is None else config.tls
        # If all nodes run on one machine, all addresses are local and no stranger can name one.
        hosts = self.bootstraps.hosts
        inferred = (local and config.advertise is None) or (bool(hosts) and all(map(is_loopback, hosts)))
        self._lan = inferred if config.lan is None else config.lan
        self._tls = load_or_create_tls(directory) if use_tls else None
        self._fingerprint = self._tls.fingerprint if self._tls else b""
        self.sessions = ServerSessions(self.key, self._fingerprint)
        self.peers = PeerPool(self.key)
        self.station = Station(
            me=self.key.node_id,
            sessions=self.sessions,
            peer_at=self.peers.at,
            learner=self.learner,
            head=lambda: self.gossip.core.view.head if self.gossip.is_open else b"",
            publics=self.publics,
            public_at=self.public_at,
            dialable=self.may_call,
            lan=lambda: self._lan,
            upload=Pace(config.max_upload * 1e6 / 8 if config.max_upload else None),
            download=Pace(config.max_download * 1e6 / 8 if config.max_download else None),
            random=self._random,
        )
        self._beat_s = 0.0
        self._greeting: Greeting | None = None
        self.port = 0
        self.other_swarm: str | None = None
        self.misled = 0
        """How many greetings in a row led to a swarm other than the one in the join line."""
        self.misled_why = ""
        self.card = b""
        """What the run is about, as its learner signed it; "" while that is not known."""
        self._said: set[str] = set()
        self.on_generation: Callable[[], None] = lambda: None
        """Called when this node's generation rises, for example because others know a later life of it."""
        self.gossip = GossipService(
            sessions=self.sessions,
            peer_at=self.peers.at,
            greet=self._greet,
            knock=self._knock,
            emit=emit,
            on_generation=self._keep_generation,
        )

    @property
    def node(self) -> NodeId:
        return self.key.node_id

    @property
    def address(self) -> Address:
        """The address that others dial to reach this node."""
        return advertised(self._config, self.port, self._fingerprint)

    # -- life ------------------------------------------------------------------------------------------------

    async def start(
        self,
        routes: Iterable[web.RouteDef],
        status: Callable[[], dict[str, Any]],
        *,
        on_stream: Callable[[Incoming], Coroutine[Any, Any, None]],
        beat_s: float = 0.0,
    ) -> int:
        """Listen and return the port in use. `beat_s` is how often a learner wants to hear from a sampler."""
        self._beat_s = beat_s
        own = [hello_route(self._hello), session_route(self.sessions), *self.gossip.routes()]
        own.append(metrics_route(lambda: self._server.status()))
        tls = self._tls.context if self._tls else None
        counted = [self.sessions.refused, self.gossip.rejected, self.station.refused]
        self._server = NodeServer([*own, *routes], status, tls=tls, counted=counted, on_stream=on_stream)
        self.port = await self._server.start(self._host, self._wanted_port)
        if self._config.lan is None and not self._lan and any(map(is_private, self.bootstraps.hosts)):
            self._say("this swarm has private addresses: pass --lan to every node in this network, or they stay leaves")
        return self.port

    async def stop(self, *, leave: bool = True) -> None:
        # In this order, so that calls still work when the others are told.
        await self.gossip.close(leave=leave)
        await self._server.stop()
        await self.peers.close()

    async def find(self) -> Greeting:
        """Wait until a bootstrap answers, and return its hello. Raise UserError if waiting does not help."""
        found = self._greeting = await self.bootstraps.find(self._say)
        if self._config.lan is None and not all(is_loopback(a.host) for a in found.learner.record.addresses):
            # The learner is not on this machine, so a bootstrap on this machine must be a tunnel.
            self._lan = False
        return found

    @asynccontextmanager
    async def swarm(self, learner_key: bytes, round_s: float) -> AsyncIterator[None]:
        """Take part in the swarm of `learner_key` for as long as the block runs."""
        self._learner_key = learner_key
        self.other_swarm = None
        if self.gossip.is_open:
            # A second membership in one process counts as a new life: its records must not reuse earlier numbers.
            self._keep_generation(self.generation + 1)
        self._rules = GossipRules(round_s=round_s)
        core = self._membership(learner_key)
        self.gossip.open(core, self._own_reachability(), DialBackLimit(lan=self._lan))
        if self._greeting is not None:
            found = self._greeting
            self.gossip.perform(core.introduced(found.signed, found.address, now=time.monotonic()))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.gossip.run()), group.create_task(self._remember())]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    # -- what the roles ask ----------------------------------------------------------------------------------

    def learner(self) -> tuple[NodeId, list[Address]]:
        """Return the learner's id and its known addresses, the best guess first."""
        node = node_id_of(self._learner_key)
        signed = self._learners_record()
        addresses = list(self.gossip.core.view.table.callable_at(signed)) if signed is not None else []
        if self._greeting is not None and self._greeting.signed.node == node:
            # Add the address that the user named: the one in the record may only work from elsewhere.
            addresses.append(self._greeting.address)
        return node, list(dict.fromkeys(addresses))

    def publics(self) -> list[tuple[NodeId, Address]]:
        """Return the public nodes that may be called now, at proven addresses, except the learner."""
        if not self.gossip.is_open:
            return []
        learner, _ = self.learner()
        reached = self.gossip.core.view.reached(time.monotonic())
        return [(peer.signed.node, peer.addresses[0]) for peer in reached if peer.signed.node != learner]

    def public_at(self, node: NodeId) -> list[Address]:
        """Return where another public was proven to be, or where its stream comes from if it is linked with this node;
        empty for a leaf or an unknown node."""
        peer = self.gossip.core.view.table.find(node) if self.gossip.is_open else None
        linked_at = self.station.linked_at.get(node)
        return [one for one in peer.addresses if peer.proven or caller_of(one.host) == linked_at] if peer else []

    def may_call(self, address: Address) -> bool:
        """Return whether this node may call an address that another one named."""
        return address.host in self.bootstraps.hosts or is_dialable(address.host, lan=self._lan)

    def set_held(self, version: VersionId | None) -> None:
        """Say in this node's record which version it holds."""
        self.gossip.core.set_held(version, now=time.monotonic())
        self.gossip.perform([])

    def published(self, sealed_head: bytes) -> None:
        """Spread a new head by gossip."""
        self.gossip.perform(self.gossip.core.take_head(sealed_head, now=time.monotonic()))

    def outlive(self, version: VersionId) -> None:
        """Publish under a later incarnation than that of `version` from now on. This learner's key signed `version`."""
        self.gossip.perform(self._owner.outlive(version))

    async def look_again(self) -> None:
        """Ask a bootstrap again: the learner may have moved, or another swarm may have taken its place."""
        if (found := await self._greet()) is not None and self.gossip.is_open:
            self.gossip.perform(self.gossip.core.introduced(*found, now=time.monotonic()))

    def trust_line(self) -> str:
        """Return a line for the terminal that says why this node trusts the swarm."""
        assert self._greeting is not None
        swarm, address = self._greeting.hello.swarm, self._greeting.address
        if self.bootstraps.swarm is not None:
            return f"found swarm {swarm}, which the join line names, through {address.url}"
        shown = f", with certificate {address.fingerprint.hex()[:16]}..." if address.fingerprint else ""
        before = self.bootstraps.remembered
        other = f"; last time it was swarm {before}" if before not in (None, swarm) else ""
        better = "a join line, echo1:..., says whom to trust"
        return f"found swarm {swarm}; trusting it because {address.url} said so{shown} ({better}){other}"

    def join_line(self) -> str:
        """Return the line by which others join at any of the addresses that they may reach this learner at."""
        own = self.address
        hosts = [own.host]
        if self._host == "0.0.0.0" and self._config.advertise is None:
            hosts = list(dict.fromkeys((own.host, *own_hosts())))[:MAX_JOIN_ADDRESSES]
        addresses = tuple(msgspec.structs.replace(own, host=host) for host in hosts)
        key = self._learner_key
        return write_join_line(JoinLine(swarm=swarm_id_of(key), learner_key=key, addresses=addresses))

    def status(self) -> dict[str, Any]:
        """Return the status of this node and its view of the swarm. The keys are described in docs/protocol.md."""
        own = {
            "role": self._role,
            "protocol": PROTOCOL,
            "node": self.node,
            "generation": self.generation,
            "encrypted": self._tls is not None,
            "sent_bytes": self.station.upload.total_bytes,
            "received_bytes": self.station.download.total_bytes,
        }
        if not self.gossip.is_open:
            return {**own, "swarm": None, "reachability": "leaf"}
        return {**own, "swarm": swarm_id_of(self._learner_key), **view_status(self.gossip.core, now=time.monotonic())}

    # -- parts -----------------------------------------------------------------------------------------------

    def _membership(self, learner_key: bytes) -> Membership:
        swarm = swarm_id_of(learner_key)
        is_learner = self._role == "learner"
        self._owner = Owner(
            self.key,
            swarm,
            self._role,
            generation=self.generation,
            addresses=(self.address,) if is_learner else (),
            round_s=self._rules.round_s if is_learner else 0.0,
            incarnation=self.incarnation,
        )
        return Membership(
            self._owner,
            self._rules,
            Table(self._rules, self.may_call, lan=self._lan),
            read_record=lambda sealed: read_record(sealed, swarm),
            open_record=lambda sealed: open_record(sealed, swarm),
            open_head=lambda sealed: open_head(sealed, learner_key).version,
            random=self._random,
            now=time.monotonic(),
        )

    def _own_reachability(self) -> Reachability | None:
        """Return None for the learner, which everybody dials, and for a node that only this machine can reach."""
        if self._role == "learner" or (is_loopback(self._host) and not self._lan):
            return None
        return Reachability(
            port=self.port,
            fingerprint=self._fingerprint,
            round_s=self._rules.round_s,
            lan=self._lan,
            random=self._random,
            now=time.monotonic(),
        )

    def _learners_record(self) -> SignedRecord | None:
        """Return the newest known record; until gossip has one, the record in the greeting."""
        known = self.gossip.core.view.learner()
        return known or (self._greeting.learner if self._greeting is not None else None)

    def _hello(self, knock: str | None, caller: str | None) -> Hello | None:
        if not self.gossip.is_open or (learner := self._learners_record()) is None:
            return None
        return Hello(
            protocol=PROTOCOL,
            learner_key=self._learner_key,
            record=self.gossip.core.view.own.sealed,
            learner=learner.sealed,
            beat_s=self._beat_s,
            knock=self._answer_knock(knock, caller),
            card=self.card,
            now=round(time.time(), 3),
        )

    def _answer_knock(self, nonce: str | None, caller: str | None) -> bytes:
        if nonce is None or caller is None:
            return b""
        if not (re.fullmatch(r"[0-9a-f]{32}", nonce) and re.fullmatch(r"[0-9a-f]{32}", caller)):
            raise ProtocolError("a knock is 16 bytes in hexadecimal, and so is a node's id")
        knock = Knock(key=self.key.public_bytes, nonce=bytes.fromhex(nonce), caller=caller)
        return self.key.seal(DIAL_BACK_CONTEXT, encode(knock))

    async def _knock(self, node: NodeId, address: Address) -> bool:
        """Dial a node back. Return whether the node that answers holds the key of `node`."""
        nonce = secrets.token_bytes(16)
        try:
            async with PeerClient(address) as peer:
                path = f"{HELLO_PATH}?knock={nonce.hex()}&caller={self.node}"
                data = await peer.get(path, cap_bytes=HELLO_BYTES, timeout_s=KNOCK_S)
            hello = decode(data, Hello, cap_bytes=HELLO_BYTES)
            record = open_record(hello.record, swarm_id_of(self._learner_key)).record
            body = unseal(DIAL_BACK_CONTEXT, hello.knock, record.key, cap_bytes=HELLO_BYTES)
            knock = decode(body, Knock, cap_bytes=HELLO_BYTES)
        except (PeerUnreachable, ProtocolError, UserError):
            return False
        return node_id_of(record.key) == node and knock.nonce == nonce and knock.caller == self.node

    async def _greet(self) -> tuple[SignedRecord, Address] | None:
        """Try each bootstrap until one answers, and note if it leads to another swarm."""
        try:
            greeting = await self.bootstraps.greet()
        except OtherSwarm as error:
            self.misled, self.misled_why = self.misled + 1, str(error)
            return None
        except (PeerUnreachable, ProtocolError):
            self.misled = 0
            return None
        self.misled = 0
        if greeting.hello.swarm != swarm_id_of(self._learner_key):
            # Only a bootstrap that the user named can get here: `greet` refuses remembered peers of another swarm.
            self.other_swarm = greeting.hello.swarm
            return None
        self.other_swarm = None
        if greeting.signed.record.role == "learner":
            self._greeting = greeting  # The bootstrap's name may resolve to a new address
        return greeting.signed, greeting.address

    async def _remember(self) -> None:
        while True:
            await asyncio.sleep(CACHE_EVERY_S * self._rules.round_s / 2.0)
            peers = sorted(self.gossip.core.view.table, key=lambda peer: -peer.heard_at)
            # Never more than was proven: a record may name any host to be called at the next start.
            addresses = [address for peer in peers if peer.proven for address in peer.addresses]
            if not addresses:
                continue
            try:
                await asyncio.to_thread(self.bootstraps.remember, swarm_id_of(self._learner_key), addresses)
            except OSError as error:
                # A full disk is no reason to leave the swarm.
                self._say_once(f"cannot write down peers for the next start: {error}")

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _keep_generation(self, generation: int) -> None:
        self.generation = generation
        self.incarnation = generation - 1
        try:
            raise_generation(self._directory, generation)
        except OSError as error:
            self._say_once(f"cannot write down this node's generation; after a restart it may be banned: {error}")
        self.on_generation()


def advertised(config: JoinConfig | LeadConfig, port: int, fingerprint: bytes) -> Address:
    """Return the address that others dial: the advertised one, or the one where this node listens. A node that listens
    on all interfaces advertises the one that leads to the internet. UserError if it is none."""
    if config.advertise is not None:
        named = read_bootstrap(config.advertise, port)
        return Address(host=named.host, port=named.port, fingerprint=fingerprint)
    listens, _ = where_to_listen(config)
    family = socket.AF_INET6 if listens == "::" else socket.AF_INET
    host = _outward_host(family) if listens in EVERYWHERE else listens
    return Address(host=host, port=port, fingerprint=fingerprint)


def where_to_listen(config: JoinConfig | LeadConfig) -> tuple[str, int]:
    """Return host and port. One that joins listens only on this machine if all bootstraps are here, else on every
    interface. UserError for an invalid bootstrap."""
    if isinstance(config, LeadConfig):
        return config.host, config.port
    named, _ = read_bootstraps(config.bootstrap)
    local = all(is_loopback(bootstrap.host) for bootstrap in named)
    # A relay needs a fixed port, which its owner opens in a router once. A sampler does not.
    port = config.port if config.port is not None else DEFAULT_PORT if config.role == "relay" and not local else 0
    return config.host or ("127.0.0.1" if local else "0.0.0.0"), port


def check_addresses(config: LeadConfig) -> None:
    """Raise UserError for an invalid address, before anything is written."""
    advertised(config, config.port or DEFAULT_PORT, b"")
    read_bootstraps(config.bootstrap)


def _outward_host(family: socket.AddressFamily) -> str:
    """Return the address of the interface that packets to the internet would leave by, or another one of this machine.
    Nothing is sent."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1", 9))
        except OSError:
            return "::1" if family == socket.AF_INET6 else next(iter(own_hosts()), "127.0.0.1")
        return str(probe.getsockname()[0])


def own_hosts() -> list[str]:
    """Return this machine's IPv4 addresses, one of each interface, without loopback and bridges, behind which there are
    containers and virtual machines. Elsewhere than on Linux return none."""
    found: list[str] = []
    if sys.platform != "linux":
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            wanted = struct.pack("256s", name.encode())
            with suppress(OSError):  # It has none
                host = socket.inet_ntoa(fcntl.ioctl(asking, SIOCGIFADDR, wanted)[20:24])
                is_up = struct.unpack_from("H", fcntl.ioctl(asking, SIOCGIFFLAGS, wanted), 16)[0] & IFF_UP
                if is_up and not is_loopback(host) and not Path("/sys/class/net", name, "bridge").exists():
                    found.append(host)
    return found
