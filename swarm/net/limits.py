"""How much of a node's server one address or one node may take: connections counted, requests metered. Pure.

Every address has eight connections. A connection on which a request was signed by a node counts to that node as well,
which has eight of its own wherever it calls from; and each node that has proven itself at an address adds its eight to
what the address may have. So two samplers behind one router do not starve one another, and keys, which cost nothing,
do not buy one address more than `nodes_per_address` times its share. Requests are metered the same way: a proven
connection draws from its node's bucket, any other from its address's; and all of one address draw from a common one as
well, whatever keys they show.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace

from swarm.types import NodeId

IPV6_HOME_BITS = 64  # A home gets at least this prefix, so every address in it is the same caller


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds, each with its reason."""

    connections: int = 8  # Of one address, and of one node: what one client opens (http.MAX_CONNECTIONS)

    nodes_per_address: int = 8
    """Proven nodes that add to what their address may have: the machines of one home or office."""

    all_connections: int = 4096  # Of the whole server: 512 samplers with eight each
    requests_per_s: float = 20.0
    burst: float = 40.0  # Of an address that has not proven who it is; the burst is a start, or the end of an outage

    proven_share: float = 5.0
    """So many times as much for a node that has: a sampler of a model that takes eight steps a second asks 60 times.
    Verifying 100 signatures takes 12 ms."""

    buckets: int = 8192
    """Addresses and nodes whose rate is remembered. One that is forgotten too early gets a fresh burst, no more."""

    exempt_loopback: bool = True
    """Processes of this machine can do worse than that, and a demonstration runs all its nodes here."""


@dataclass(slots=True, kw_only=True, eq=False)
class Guest:
    """One connection."""

    address: str
    exempt: bool
    node: NodeId | None = None
    gone: bool = False


@dataclass(slots=True, kw_only=True)
class _Address:
    connections: int = 0
    nodes: Counter[NodeId] = field(default_factory=Counter)


class Gate:
    """Lets connections and requests in. `refused` counts by reason. `now` is monotonic seconds."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._addresses: dict[str, _Address] = {}
        self._nodes: Counter[NodeId] = Counter()
        self._strangers = Meter(limits)
        self._proven = Meter(_times(limits, limits.proven_share))
        self._common = Meter(_times(limits, 1 + limits.nodes_per_address))
        self._all = 0
        self.refused: Counter[str] = Counter()

    def enter(self, host: str) -> Guest | None:
        """A new connection from `host`; None if it is one too many."""
        address = caller(host)
        guest = Guest(address=address, exempt=self._limits.exempt_loopback and is_loopback(host))
        at = self._addresses.get(address) or _Address()
        if not guest.exempt and at.connections >= self._allowance(at):
            self.refused["connections"] += 1
            return None
        if self._all >= self._limits.all_connections:
            self.refused["all_connections"] += 1
            return None
        at.connections += 1
        self._addresses[address] = at
        self._all += 1
        return guest

    def leave(self, guest: Guest) -> None:
        """The connection is closed; saying so twice changes nothing."""
        if guest.gone:
            return
        guest.gone = True
        self._all -= 1
        self._disown(guest)
        at = self._addresses[guest.address]
        at.connections -= 1
        if not at.connections:
            del self._addresses[guest.address]

    def prove(self, guest: Guest, node: NodeId) -> bool:
        """A request of `node` on this connection was verified. False if the node has too many connections."""
        if guest.gone or guest.exempt or guest.node == node:
            return True
        if self._nodes[node] >= self._limits.connections:
            self.refused["connections_of_node"] += 1
            return False
        self._disown(guest)
        guest.node = node
        self._nodes[node] += 1
        self._addresses[guest.address].nodes[node] += 1
        return True

    def wait_s(self, guest: Guest, *, now: float) -> float:
        """0 if one more request may be handled on this connection now, else the seconds until one may."""
        if guest.exempt:
            return 0.0
        # The common bucket first: an address that asks with a new key each time must not get a new burst each time.
        wait = self._common.take(guest.address, now=now)
        meter, name = (self._proven, guest.node) if guest.node else (self._strangers, guest.address)
        wait = wait or meter.take(name, now=now)
        if wait > 0.0:
            self.refused["requests"] += 1
        return wait

    def _allowance(self, at: _Address) -> int:
        return self._limits.connections * (1 + min(len(at.nodes), self._limits.nodes_per_address))

    def _disown(self, guest: Guest) -> None:
        if guest.node is None:
            return
        for counts in (self._nodes, self._addresses[guest.address].nodes):
            counts[guest.node] -= 1
            if not counts[guest.node]:
                del counts[guest.node]
        guest.node = None


def _times(limits: Limits, share: float) -> Limits:
    return replace(limits, requests_per_s=share * limits.requests_per_s, burst=share * limits.burst)


class Meter:
    """Token buckets by name, as many as `limits.buckets`; the one longest unused is forgotten first."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, name: str, *, now: float) -> float:
        """Take a token and return 0, or the seconds until there is one."""
        tokens, then = self._buckets.pop(name, (self._limits.burst, now))
        tokens = min(self._limits.burst, tokens + (now - then) * self._limits.requests_per_s)
        wait = 0.0 if tokens >= 1.0 else (1.0 - tokens) / self._limits.requests_per_s
        self._buckets[name] = (tokens - 1.0 if wait == 0.0 else tokens, now)
        if len(self._buckets) > self._limits.buckets:
            self._buckets.popitem(last=False)
        return wait


def caller(host: str) -> str:
    """The name under which a peer's address is counted: IPv4 as it is, IPv6 by its home's prefix."""
    address = _parsed(host)
    if address is None or address.version == 4:
        return str(address or host)
    return str(ipaddress.ip_network((address, IPV6_HOME_BITS), strict=False))


def is_loopback(host: str) -> bool:
    address = _parsed(host)
    return address is not None and address.is_loopback


def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for what is no address. IPv4 in IPv6 clothes is IPv4."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return (address.version == 6 and address.ipv4_mapped) or address
