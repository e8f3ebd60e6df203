"""The transfer of one version on a virtual clock: real couriers on simulated links, with deaths, joins and liars.

Theory of operation. The simulation does what a node's shell does: it asks a courier for frames when a link can take
one, hands it what arrived whole, drains `ready`, arms one timer. A frame may be poisoned by its sender; the receiver's
digest refuses it, so it never reaches the courier, and after MAX_FAULTS of one sender the link is closed. A death is
felt by those linked to the dead `detect_s` later. The learner then repairs the plan of a forest, as it does for joins,
and tells those whose routes changed. It does not hear of links that were closed: what they carried is pulled. A new
link takes a handshake.

Bytes are in the books of the simulation, never in a courier: `Member.book` is what has truly arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from swarm.broadcast.forest.courier import TreeCourier
from swarm.broadcast.forest.planner import PeerProfile, Relief, VersionPlan, repaired
from swarm.broadcast.mesh.forwarder import Forwarder
from swarm.broadcast.mesh.seeder import Seeder
from swarm.broadcast.notes import Behind, Courier, Have, Note, Recall, Send, Want
from swarm.plan.simulate.world import World
from swarm.types import NodeId
from tests.simulator.broadcast.network import BulkNetwork, NetworkShape
from tests.simulator.broadcast.schemes import planner_named

MAX_FAULTS = 3
"""Wrong chunks of one sender until its link is closed."""

RELIEF_S = 1.5
"""The learner gathers complaints for so long: those from further down come later."""

HANDSHAKE_TRIPS = 2
"""Round trips until a new link carries frames."""

CHUNK_HEADER_BYTES = 48
"""Frame header, index, kind, and the record that TLS makes of it."""

NOTE_BYTES = 80
"""A note without its list: frame header, TLS record, TCP and IP headers."""

ROUNDING_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A node and its links, in bytes/s."""

    node: NodeId
    public: bool
    up_bytes_per_s: float
    down_bytes_per_s: float

    @property
    def profile(self) -> PeerProfile:
        return PeerProfile(node=self.node, public=self.public, uplink_bytes_per_s=self.up_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Frame:
    """What a link carries at a time."""

    content: Send | Note
    nbytes: int
    poisoned: bool = False


@dataclass(slots=True, eq=False)
class Member:
    """A node of the simulation. `lie_share` of the chunks that it sends are wrong."""

    host: Host
    courier: Courier
    book: bytearray
    missing: int
    alive: bool = True
    lie_share: float = 0.0
    completed_at: float | None = None
    armed_at: float | None = None
    faults: Counter[NodeId] = field(default_factory=Counter)


class BroadcastSwarm:
    """A learner, its peers, and the transfer of `size_bytes` to all of them.

    `scheme` and `chunk_bytes` None leave the choice to the planner. `after` is called with every member that acted,
    `on_send` with what it is about to send.
    """

    def __init__(
        self,
        world: World,
        shape: NetworkShape,
        learner: Host,
        peers: Sequence[Host],
        *,
        size_bytes: int,
        scheme: str | None = None,
        chunk_bytes: int | None = None,
        detect_s: float = 3.0,
    ) -> None:
        self.world = world
        self.latency_s = shape.latency_s
        self.network: BulkNetwork[Frame] = BulkNetwork(world, shape, self)
        self.learner = learner
        profiles = [peer.profile for peer in peers]
        plan = planner_named(scheme)(learner.profile, profiles, size_bytes)
        self.plan: VersionPlan = replace(plan, chunk_bytes=chunk_bytes or plan.chunk_bytes)
        self.chunk_bytes = self.plan.chunk_bytes
        self.size_bytes = size_bytes
        self.count = -(-size_bytes // self.chunk_bytes)
        self.after: Callable[[Member], None] | None = None
        self.on_send: Callable[[Member, Send | Note], None] | None = None
        self.detect_s = detect_s
        self.refused = 0
        self.duplicates = 0
        self.relief = Relief()
        self._relieving = False
        self.closed_links: set[tuple[NodeId, NodeId]] = set()
        self.members: dict[NodeId, Member] = {}
        for host in (learner, *peers):
            self._add(host, b"")

    # -- who takes part --------------------------------------------------------------------------------------

    def _add(self, host: Host, held: bytes) -> Member:
        seeds = host.node == self.learner.node
        book = bytearray(b"\1" * self.count if seeds else held.ljust(self.count, b"\0"))
        member = Member(host, self._courier_of(host, _bitmap(book), seeds), book, self.count - sum(book))
        self.members[host.node] = member
        self.network.add(host.node, up_bytes_per_s=host.up_bytes_per_s, down_bytes_per_s=host.down_bytes_per_s)
        return member

    def _courier_of(self, host: Host, held: bytes, seeds: bool) -> Courier:
        now = self.world.now
        if self.plan.scheme == "mesh":
            if seeds:
                return Seeder(self.count, now=now)
            return Forwarder(self.learner.node, self.count, leaf=not host.public, now=now, have=held)
        return TreeCourier(
            count=self.count,
            learner=self.learner.node,
            routes=self.plan.routes_of(host.node),
            held=held,
            random=Random(f"{host.node} {self.world.random.random()}"),
        )

    def start(self) -> None:
        """All links that the plan wants are up, as subscriptions are when a version is announced."""
        for a, b in self._wanted_links(self.members):
            self._link(a, b)

    def _wanted_links(self, of: Iterable[NodeId]) -> list[tuple[NodeId, NodeId]]:
        """Links that nodes `of` should have, each once: everybody with the learner, and as the plan says."""
        learner = self.learner.node
        wanted: dict[tuple[NodeId, NodeId], None] = {}
        for node in of:
            routes = self.plan.routes_of(node)
            others = [learner, *(parent for parent in routes.parents if parent)]
            others += [child for children in routes.children for child in children]
            if self.plan.scheme == "mesh":
                others += self.members
            wanted.update(((min(node, other), max(node, other)), None) for other in others if other != node)
        return [pair for pair in wanted if not self.network.connected(*pair) and self._may_link(*pair)]

    def _may_link(self, a: NodeId, b: NodeId) -> bool:
        one, other = self.members.get(a), self.members.get(b)
        if one is None or other is None or not (one.alive and other.alive):
            return False
        return (one.host.public or other.host.public) and (a, b) not in self.closed_links

    def _link(self, a: NodeId, b: NodeId) -> None:
        assert self.members[a].host.public or self.members[b].host.public, "two leaves have no link"
        self.network.connect(a, b)
        for node, peer in ((a, b), (b, a)):
            member = self.members[node]
            member.courier.join(peer, leaf=not self.members[peer].host.public, now=self.world.now)
            self._drain(member)

    def _unlink(self, a: NodeId, b: NodeId) -> None:
        self.network.disconnect(a, b)
        for node, peer in ((a, b), (b, a)):
            member = self.members[node]
            if member.alive:
                member.courier.leave(peer, now=self.world.now)
                self._drain(member)

    # -- faults ----------------------------------------------------------------------------------------------

    def kill(self, node: NodeId) -> None:
        """The node is gone at once; others notice `detect_s` later."""
        assert node != self.learner.node
        member = self.members[node]
        member.alive = False
        self.network.kill(node)
        self.world.schedule(self.detect_s, f"missed {node}", lambda: self._bury(member))

    def _bury(self, member: Member) -> None:
        node = member.host.node
        for peer in list(self.members):
            if self.network.connected(node, peer):
                self._unlink(node, peer)
        if node in self.plan.peers:
            self._replan(repaired(self.plan, gone=[node]))

    def join(self, host: Host, *, held: bytes = b"") -> None:
        """A newcomer, or one who comes back with what it `held`: a byte of 0 or 1 for each chunk."""
        assert host.node not in self.members or not self.members[host.node].alive
        self.plan = repaired(self.plan, gone=[host.node])
        before, self.plan = self.plan, repaired(self.plan, joined=[host.profile])
        self._add(host, held)
        self._tell_changes(before)
        self._link_later([host.node])

    def _replan(self, plan: VersionPlan) -> None:
        before, self.plan = self.plan, plan
        self._tell_changes(before)

    def _tell_changes(self, before: VersionPlan) -> None:
        """Everybody whose routes changed hears of it one way later; new links are up after a handshake."""
        changed = [node for node in self.members if _place(self.plan, node) != _place(before, node)]
        for node in changed:
            self.world.schedule(self.latency_s, f"routes {node}", lambda node=node: self._route(node))  # type: ignore[misc]
        self._link_later(changed)

    def _route(self, node: NodeId) -> None:
        member = self.members[node]
        if member.alive and isinstance(member.courier, TreeCourier):
            member.courier.set_routes(self.plan.routes_of(node), now=self.world.now)
            self._drain(member)

    def _link_later(self, nodes: Iterable[NodeId]) -> None:
        wanted = list(nodes)

        def connect() -> None:
            for a, b in self._wanted_links(wanted):
                self._link(a, b)

        self.world.schedule(self.latency_s * (1 + 2 * HANDSHAKE_TRIPS), "connected", connect)

    # -- what the network asks -------------------------------------------------------------------------------

    def pull(self, source: NodeId, target: NodeId) -> Frame | None:
        member = self.members[source]
        content = member.courier.next_for(target, now=self.world.now)
        if content is None:
            return None
        if self.on_send is not None:
            self.on_send(member, content)
        if not isinstance(content, Send):
            return Frame(content, note_bytes(content))
        poisoned = member.lie_share > 0 and self.world.random.random() < member.lie_share
        return Frame(content, self._bytes_of(content.index) + CHUNK_HEADER_BYTES, poisoned)

    def _bytes_of(self, index: int) -> int:
        return min(self.chunk_bytes, self.size_bytes - index * self.chunk_bytes)

    def taken(self, source: NodeId, target: NodeId, frame: Frame) -> None:
        if isinstance(frame.content, Send):
            member = self.members[source]
            member.courier.sent(target, frame.content, now=self.world.now)
            self._drain(member)

    def deliver(self, source: NodeId, target: NodeId, frame: Frame) -> None:
        member, content = self.members[target], frame.content
        if isinstance(content, Send):
            if frame.poisoned:
                self._refuse(member, source)
                return
            self._keep(member, content.index)
            member.courier.arrived(source, content.index, content.kind, content.via, now=self.world.now)
        else:
            member.courier.heard(source, content, now=self.world.now)
            if isinstance(content, Behind):
                self._relieve_later()
        self._drain(member)

    def _relieve_later(self) -> None:
        """Somebody fell behind: the learner plans anew for all who say so within RELIEF_S."""
        if not self._relieving:
            self._relieving = True
            self.world.schedule(RELIEF_S, "relief", self._relieve)

    def _relieve(self) -> None:
        self._relieving = False
        courier = self.members[self.learner.node].courier
        if isinstance(courier, TreeCourier):
            self._replan(self.relief.plan(self.plan, courier.complaints(), now=self.world.now))

    def _keep(self, member: Member, index: int) -> None:
        if member.book[index]:
            self.duplicates += 1
            return
        member.book[index] = 1
        member.missing -= 1
        if not member.missing:
            member.completed_at = self.world.now
            self.world.note(f"whole {member.host.node}")

    def _refuse(self, member: Member, sender: NodeId) -> None:
        """I2: what does not match its digest is dropped and counted; after MAX_FAULTS its sender is left."""
        node = member.host.node
        self.refused += 1
        member.faults[sender] += 1
        self.world.note(f"refused {sender} > {node}")
        if member.faults[sender] >= MAX_FAULTS:
            self.closed_links |= {(node, sender), (sender, node)}
            self._unlink(sender, node)

    def _drain(self, member: Member) -> None:
        courier = member.courier
        for peer in courier.ready():
            self.network.kick(member.host.node, peer)
        self._arm(member)
        if self.after is not None:
            self.after(member)

    def _arm(self, member: Member) -> None:
        """One timer: it may be early, and then is set again."""
        deadline = member.courier.deadline()
        if deadline is None or (member.armed_at is not None and member.armed_at <= deadline):
            return
        member.armed_at = deadline

        def ring() -> None:
            if member.armed_at != deadline:
                return
            member.armed_at = None
            if member.alive and self.members[member.host.node] is member:
                member.courier.tick(now=self.world.now + ROUNDING_S)
                self._drain(member)

        self.world.schedule(max(0.0, deadline - self.world.now), f"tick {member.host.node}", ring)

    # -- how far it is ---------------------------------------------------------------------------------------

    def live_peers(self) -> list[Member]:
        return [member for node, member in self.members.items() if member.alive and node != self.learner.node]

    def delivered(self, not_for: Container[NodeId] = ()) -> bool:
        """Whether all live peers hold all."""
        return all(not m.missing for node, m in self.members.items() if m.alive and node not in not_for)

    def run(self, limit_s: float, *, not_for: Container[NodeId] = ()) -> bool:
        """Run until all live peers hold all, or for `limit_s`; True if they do. `not_for` are not waited for."""
        end = self.world.now + limit_s
        waiting = [member for member in self.live_peers() if member.host.node not in not_for]

        def over() -> bool:
            while waiting and (not waiting[-1].alive or not waiting[-1].missing):
                waiting.pop()
            return self.world.now >= end or (not waiting and self.delivered(not_for))

        self.world.run_until(over)
        return self.delivered(not_for)


def _place(plan: VersionPlan, node: NodeId) -> tuple[object, ...]:
    routes = plan.routes_of(node)
    return routes.parents, routes.children


def note_bytes(note: Note) -> int:
    """About what a note takes on the wire."""
    match note:
        case Have(bitmap=bitmap):
            return NOTE_BYTES + len(bitmap)
        case Want(indices=indices) | Recall(indices=indices):
            return NOTE_BYTES + 3 * len(indices)
        case _:
            return NOTE_BYTES


def _bitmap(book: bytearray) -> bytes:
    """A byte a chunk as a bit a chunk."""
    bits = bytearray(-(-len(book) // 8))
    for index, held in enumerate(book):
        if held:
            bits[index >> 3] |= 1 << (index & 7)
    return bytes(bits)
