"""Membership under watch: every node's view is checked after whatever it did.

Theory of operation. The checker keeps books of its own on each node: the highest order it ever held of every other,
the newest version it ever knew. What is true of the swarm it takes from the simulation, never from a core.

    I4        orders, its own and those of others, and the newest version only rise
    ages      without stalls and liars nobody is believed to have been heard later than it last did anything, but for
              the time on the way
    I5        the table, tombstones, leases and calls are under their caps; subnets are those of a recount
    states    no node is alive and dead at once, none knows itself, banned keys are nowhere
    I6        `settled`: all live publics know one another and nobody else, and everybody knows the newest version
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from swarm.gossip.records import MAX_LEAVES, MAX_PUBLICS, Died, Effect
from swarm.gossip.table import blocks_of
from swarm.types import NodeId, VersionId
from tests.simulator.breach import InvariantBreach
from tests.simulator.gossip.swarm import CONNECT_TRIPS, GossipNode, GossipSwarm

MAX_CALLS = 64
"""Calls under way at one node: two rounds, four pushes for each tenth of a round, three polls, the second calls."""

SENDING_S = 0.2
"""A link sends 64 KiB in less; a beat counts when all of the message has come."""

HOPS = 4
"""Requests in a row that may have carried an age: answers, which are half of all ways, measure theirs."""


@dataclass(slots=True)
class Book:
    """What one node has held."""

    orders: dict[bytes, int] = field(default_factory=dict)
    own: int = -1
    newest: VersionId | None = None


class GossipChecker:
    """Watches a swarm. `replay` is what a breach names; `honest_ages` is False where nodes lie about them."""

    def __init__(self, swarm: GossipSwarm, replay: str, *, honest_ages: bool = True) -> None:
        self._swarm = swarm
        self._replay = replay
        self._books: dict[int, Book] = {}
        self.deaths: list[tuple[float, GossipNode, NodeId, str]] = []
        scenario = swarm.scenario
        # An age in a request is short by as long as it lay unread, at every stalled node on its way.
        self._honest_ages = honest_ages and not scenario.stall_s
        connecting_s = 2 * CONNECT_TRIPS * (scenario.latency_s + scenario.jitter_s / 2)
        way_s = connecting_s + scenario.latency_s + scenario.jitter_s + SENDING_S
        # The one who was called heard it when it arrived; passed on in requests, an age falls short by what each way
        # takes beyond the allowance.
        self._way_s = way_s + HOPS * max(0.0, way_s - scenario.rules.transit_s)
        swarm.after = self._after
        swarm.on_change = self._on_change

    def false_deaths(self) -> list[tuple[float, int, str]]:
        """Times, witnesses and reasons of deaths of nodes that were alive and public."""
        return [
            (at, witness.number, reason)
            for at, witness, node, reason in self.deaths
            if self._swarm.by_node[node].alive and reason in ("silent", "record expired", "equivocated")
        ]

    def settled(self) -> bool:
        """I6."""
        part = [node for node in self._swarm.live() if not self.is_lonely(node)]
        lonely = {node.node for node in self._swarm.live() if self.is_lonely(node)}
        publics = {node.node for node in part if node.is_public}
        newest = max((node.newest for node in part if node.newest is not None), default=None)
        if any(node.newest != newest for node in part):
            return False
        return all(
            {peer.signed.node for peer in node.core.view.table} - lonely == publics - {node.node}
            for node in part
            if node.is_public
        )

    def is_lonely(self, node: GossipNode) -> bool:
        """A node that knows nobody where he is now is no part of the swarm: it says hello, with waits of up to minutes,
        and in vain for ever where its only bootstrap has died. The first public is a swarm by itself."""
        if len(self._swarm.publics()) == int(node.is_public):
            return False
        found = [self._swarm.at(address) for peer in node.core.view.table for address in peer.addresses]
        return not any(other is not None and other.alive for other in found)

    def run_until_settled(self, limit_s: float) -> float:
        """Seconds until I6 holds; a breach if it does not within `limit_s`."""
        began = self._swarm.world.now
        while not self.settled():
            if self._swarm.world.now - began >= limit_s:
                raise self._breach("I6", f"not settled after {limit_s:g} s: {self._unsettled()}")
            self._swarm.run_for(1.0)
        return self._swarm.world.now - began

    # -- parts -----------------------------------------------------------------------------------------------

    def _on_change(self, node: GossipNode, effect: Effect) -> None:
        if isinstance(effect, Died):
            self.deaths.append((self._swarm.world.now, node, effect.node, effect.reason))

    def _after(self, node: GossipNode) -> None:
        book = self._books.setdefault(node.number, Book())
        self._check_rising(node, book)
        self._check_states(node)
        self._check_caps(node)
        if self._honest_ages:
            self._check_ages(node)

    def _check_rising(self, node: GossipNode, book: Book) -> None:
        view = node.core.view
        held = {peer.signed.prefix: peer.signed.order for peer in view.table}
        held |= {prefix: stone.signed.order for prefix, stone in view.table.dead.items()}
        for prefix, order in held.items():
            self._must(order >= book.orders.get(prefix, 0), "I4", f"{node.number} took an older record")
        # A leaf forgets publics, tombstones and all, and may hear of them again from somebody behind.
        book.orders = book.orders | held if node.is_public else held
        self._must(view.own.order >= book.own, "I4", f"{node.number} went back in its own numbers")
        newest = view.newest
        self._must(book.newest is None or (newest is not None and newest >= book.newest), "I4", "a version went back")
        book.own, book.newest = view.own.order, view.newest

    def _check_states(self, node: GossipNode) -> None:
        table, own = node.core.view.table, node.core.view.own
        self._must(not table.by_prefix.keys() & table.dead.keys(), "states", f"{node.number}: one is alive and dead")
        self._must(own.prefix not in table.by_prefix, "states", f"{node.number} knows itself")
        for peer in table:
            self._must(peer.signed.record.reachability == "public", "states", f"{node.number} knows a leaf")
            self._must(peer.signed.node not in table.banned, "states", f"{node.number} knows a banned key")

    def _check_caps(self, node: GossipNode) -> None:
        view = node.core.view
        table = view.table
        self._must(len(table) + 1 <= MAX_PUBLICS, "I5", f"{node.number} knows {len(table)} publics")
        self._must(len(table) + len(table.dead) <= MAX_PUBLICS, "I5", f"{node.number} has too many tombstones")
        self._must(len(view.leases) <= MAX_LEAVES, "I5", f"{node.number} serves {len(view.leases)} leaves")
        self._must(len(node.core.homes.homes) <= view.rules.homes, "I5", f"{node.number} has too many homes")
        self._must(node.calls <= MAX_CALLS, "I5", f"{node.number} has too many calls under way")
        blocks = Counter(block for peer in table for block in blocks_of(peer.signed.record.addresses))
        counted = {block: len(nodes) for block, nodes in table._blocks.items()}
        self._must(counted == blocks, "I5", f"{node.number} lost count of its blocks")
        for block, count in blocks.items():
            self._must(count <= block[1] + 1, "I5", f"{node.number} knows {count} of block {block[0]}")

    def _check_ages(self, node: GossipNode) -> None:
        for peer in node.core.view.table:
            acted_at = self._swarm.by_node[peer.signed.node].acted_at
            heard_at = peer.heard_at - node.skew_s
            # An allowance against rounding: an age is in tenths, and rounded up.
            late_s = heard_at - acted_at - self._way_s
            self._must(late_s <= 1e-6, "ages", f"{node.number} heard somebody {late_s:.3f} s after its last act")

    def _unsettled(self) -> str:
        publics = [node for node in self._swarm.publics() if not self.is_lonely(node)]
        known = {
            node.number: len(node.core.view.table) for node in publics if len(node.core.view.table) != len(publics) - 1
        }
        versions = Counter(str(node.newest) for node in self._swarm.live())
        return f"{len(publics)} publics, others than all known: {known}, versions {dict(versions)}"

    def _must(self, holds: bool, rule: str, what: str) -> None:
        if not holds:
            raise self._breach(rule, what)

    def _breach(self, rule: str, what: str) -> InvariantBreach:
        return InvariantBreach(rule, what, replay=self._replay, now=self._swarm.world.now)
