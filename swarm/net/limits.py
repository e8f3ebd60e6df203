"""How much of a node's server one address or one node may take: connections are counted, requests metered. Pure.

Every address may have eight connections. A connection on which a node signed a request counts for that node too, which
may have eight wherever it calls from. Each node that has proven itself at an address adds eight to what the address may
have. So two samplers behind one router do not starve one another. Keys cost nothing, but they buy one address no more
than `nodes_per_address` further shares. Requests are metered the same way: a proven connection draws from its node's
bucket, any other from its address's. All connections of one address also draw from a common bucket, whatever keys they
show. What has to wait for something scarce gets it in Turns.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarm.bounded import Bounded
from swarm.net.hosts import caller_of, is_loopback
from swarm.types import NodeId

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """The bounds, each with its reason."""

    connections: int = 8  # Of one address, and of one node: what one client opens (client.MAX_CONNECTIONS)
    nodes_per_address: int = 8  # Proven nodes that add to what their address may have: the machines of a home or office
    all_connections: int = 4096  # Of the whole server: 512 samplers with eight each
    requests_per_s: float = 20.0
    burst: float = 40.0  # Of an address that has not proven who it is; the burst covers a start, or an outage's end

    proven_share: float = 5.0
    """How many times as much a proven node may have. A sampler of a model that takes eight steps a second asks 60 times
    a second. Verifying 100 signatures takes 12 ms."""

    fetches_share: float = 20.0
    """How many times as often an address may ask for a piece of weights, which takes no signature. 400 a second are
    100 MB/s of a model of 270 MB, and take the loop 0.1 s."""

    body_bytes: int = 8 * 1024
    """So much of a body counts as one more request, up to `counted_bytes`: the largest question, 98 kB, takes 10 ms to
    read, as long as 80 small ones."""

    counted_bytes: int = 96 * 1024
    buckets: int = 8192  # Addresses and nodes whose rate is remembered. One forgotten early only gets a new burst
    exempt_loopback: bool = True  # Processes of this machine can do worse, and a demonstration runs all its nodes here


@dataclass(slots=True, kw_only=True, eq=False)
class Guest:
    address: str
    exempt: bool
    node: NodeId | None = None


class Gate:
    """Lets connections and requests in. `refused` counts by reason. `now` is monotonic seconds."""

    def __init__(self, limits: RateLimits) -> None:
        self._limits = limits
        self._at: defaultdict[str, set[Guest]] = defaultdict(set)
        self._of: defaultdict[NodeId, set[Guest]] = defaultdict(set)
        self._strangers = Meter(limits)
        self._proven = Meter(limits, limits.proven_share)
        self._common = Meter(limits, 1 + limits.nodes_per_address)
        self._fetches = Meter(limits, limits.fetches_share)
        self._all = 0
        self.refused: Counter[str] = Counter()

    def enter(self, host: str) -> Guest | None:
        """Let in a new connection from `host`, or return None if it is one too many."""
        guest = Guest(address=caller_of(host), exempt=self._limits.exempt_loopback and is_loopback(host))
        if not guest.exempt and self._is_full(self._at.get(guest.address, set())):
            self.refused["connections"] += 1
            return None
        if self._all >= self._limits.all_connections:
            self.refused["all_connections"] += 1
            return None
        self._at[guest.address].add(guest)
        self._all += 1
        return guest

    def leave(self, guest: Guest) -> None:
        """Take back a connection that is closed. A second call changes nothing."""
        if guest not in self._at.get(guest.address, ()):
            return
        self._all -= 1
        self._disown(guest)
        self._at[guest.address].remove(guest)
        if not self._at[guest.address]:
            del self._at[guest.address]

    def prove(self, guest: Guest, node: NodeId) -> bool:
        """Note that a request of `node` on this connection was verified. Return False if the node has too many."""
        if guest.exempt or guest.node == node or guest not in self._at.get(guest.address, ()):
            return True
        if len(self._of.get(node, ())) >= self._limits.connections:
            self.refused["connections_of_node"] += 1
            return False
        self._disown(guest)
        guest.node = node
        self._of[node].add(guest)
        return True

    def wait_s(self, guest: Guest, *, now: float, fetches: bool = False, body_bytes: float = 0) -> float:
        """Return 0 if one more request may be handled on this connection now, else the seconds until one may. One that
        `fetches` a piece of weights leaves the others theirs."""
        if guest.exempt:
            return 0.0
        cost = 1 + min(body_bytes, self._limits.counted_bytes) / self._limits.body_bytes
        # The common bucket first: an address that asks with a new key each time must not get a new burst each time.
        wait = (self._fetches if fetches else self._common).take(guest.address, now=now, cost=cost)
        if not fetches:
            meter, name = (self._proven, guest.node) if guest.node else (self._strangers, guest.address)
            wait = wait or meter.take(name, now=now, cost=cost)
        if wait > 0.0:
            self.refused["requests"] += 1
        return wait

    def _is_full(self, guests: set[Guest]) -> bool:
        proven = len({guest.node for guest in guests} - {None})
        return len(guests) >= self._limits.connections * (1 + min(proven, self._limits.nodes_per_address))

    def _disown(self, guest: Guest) -> None:
        if guest.node is not None:
            self._of[guest.node].remove(guest)
            if not self._of[guest.node]:
                del self._of[guest.node]
        guest.node = None


class Meter:
    """Token buckets by name, `share` times as large and fast as in `limits`. Beyond `limits.buckets` the one
    unused for longest is forgotten."""

    def __init__(self, limits: RateLimits, share: float = 1.0) -> None:
        self._rate = share * limits.requests_per_s
        self._burst = share * limits.burst
        self._buckets: Bounded[str, tuple[float, float]] = Bounded(limits.buckets)

    def take(self, name: str, *, now: float, cost: float = 1.0) -> float:
        """Take `cost` tokens and return 0, or take none and return the seconds until there are enough."""
        tokens, then = self._buckets.get(name, (self._burst, now))
        tokens = min(self._burst, tokens + (now - then) * self._rate)
        wait = max(0.0, (cost - tokens) / self._rate)
        self._buckets[name] = (tokens - cost if wait == 0.0 else tokens, now)
        return wait


class Turns(Generic[T]):
    """Items that wait for something scarce, by the name of who wants it. Names take turns, which
    pay `quantum` each. One that was charged with more is passed over until it has paid, so that all names get as much
    (deficit round robin)."""

    def __init__(self, quantum: int = 1) -> None:
        self._quantum = quantum
        self._waiting: OrderedDict[Hashable, deque[T]] = OrderedDict()  # With those that still owe
        self._owed: Counter[Hashable] = Counter()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, name: Hashable, item: T) -> None:
        self._waiting.setdefault(name, deque()).append(item)
        self._count += 1

    def remove(self, name: Hashable, item: T) -> None:
        """Take back an item. If it is not waiting, nothing changes."""
        if item in self._waiting.get(name, ()):
            self._waiting[name].remove(item)
            self._count -= 1

    def take(self) -> tuple[Hashable, T]:
        """Return the item whose turn it is, with its name. At least one must be waiting."""
        while True:
            name, items = next(iter(self._waiting.items()))
            self._waiting.move_to_end(name)
            self._owed[name] = max(-self._quantum, self._owed[name] - self._quantum)
            if self._owed[name] > 0:
                continue
            if items:
                self._count -= 1
                return name, items.popleft()
            del self._waiting[name], self._owed[name]

    def charge(self, name: Hashable, cost: int) -> None:
        """Note what `name` took, if anybody else may have to wait for it."""
        if self._count or name in self._waiting:
            self._waiting.setdefault(name, deque())
            self._owed[name] += cost

    def forgive(self) -> None:
        """Forget what is owed. Call it only while no name is waiting."""
        self._waiting.clear()
        self._owed.clear()

    def crowd_out(self, name: Hashable) -> T | None:
        """Take back the newest item of the name with most of them. None if `name` itself would have as many then."""
        largest = max(self._waiting, key=lambda one: len(self._waiting[one]), default=name)
        if len(self._waiting.get(largest, ())) <= len(self._waiting.get(name, ())) + 1:
            return None
        self._count -= 1
        return self._waiting[largest].pop()
