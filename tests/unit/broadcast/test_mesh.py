"""The mesh of seeder and relays over links that never fail, and what it does when peers stall, die or lie."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from swarm.broadcast.mesh import seeder as seeder_module
from swarm.broadcast.mesh.forwarder import Forwarder, Window
from swarm.broadcast.mesh.seeder import Seeder
from swarm.broadcast.notes import Complete, Courier, Credit, Have, NoteKind, Send, Want, has_bit, set_bit
from swarm.types import NodeId

SEEDER = NodeId("seeder")
STEP_S = 0.002


@dataclass
class Mesh:
    """Every node sends `rate[node]` chunks a step, round robin over its links; a step is 2 ms."""

    count: int
    leaves: frozenset[NodeId] = frozenset()
    rate: dict[NodeId, int] = field(default_factory=dict)
    blocked: set[tuple[NodeId, NodeId]] = field(default_factory=set)
    nodes: dict[NodeId, Courier] = field(default_factory=dict)
    sends: dict[NodeId, int] = field(default_factory=dict)
    now: float = 0.0
    turn: int = 0

    def add(self, name: str) -> NodeId:
        node = NodeId(name)
        if node == SEEDER:
            self.nodes[node] = Seeder(self.count, now=self.now)
        else:
            self.nodes[node] = Forwarder(SEEDER, self.count, leaf=node in self.leaves, now=self.now)
        for other in self.nodes:
            if other != node and not {other, node} <= self.leaves:
                self.nodes[node].join(other, leaf=other in self.leaves, now=self.now)
                self.nodes[other].join(node, leaf=node in self.leaves, now=self.now)
        return node

    def kill(self, node: NodeId) -> None:
        del self.nodes[node]
        for other in self.nodes.values():
            other.leave(node, now=self.now)

    def step(self) -> None:
        self.now += STEP_S
        self.turn += 1
        arriving: list[tuple[NodeId, NodeId, Send]] = []
        for name, node in self.nodes.items():
            links = deque(other for other in self.nodes if other != name)
            links.rotate(-self.turn)
            budget = self.rate.get(name, 2)
            idle = 0
            while links and budget > 0 and idle < len(links):
                peer = links[0]
                links.rotate(-1)
                frame = None if (name, peer) in self.blocked else node.next_for(peer, now=self.now)
                idle = idle + 1 if frame is None else 0
                if isinstance(frame, Send):
                    budget -= 1
                    self.sends[name] = self.sends.get(name, 0) + 1
                    node.sent(peer, frame, now=self.now)
                    arriving.append((name, peer, frame))
                elif frame is not None:
                    self.nodes[peer].heard(name, frame, now=self.now)
        for source, target, send in arriving:
            self.nodes[target].arrived(source, send.index, send.kind, send.via, now=self.now)
        for node in self.nodes.values():
            node.ready()
            due = node.deadline()
            if due is not None and due <= self.now:
                node.tick(now=self.now)

    def begin(self, steps: int) -> None:
        """Run the first steps of a transfer, and no more: what happens next has to happen in the middle."""
        for _ in range(steps):
            self.step()
        assert not any(node.complete for name, node in self.nodes.items() if name != SEEDER)

    def run(self, *, limit_s: float) -> float:
        """Until everybody has everything; the time it took."""
        while not all(node.complete for node in self.nodes.values()):
            self.step()
            missing = {name: getattr(node, "_missing", 0) for name, node in self.nodes.items()}
            assert self.now < limit_s, f"not complete after {self.now:.1f} s: {missing}"
        return self.now


def mesh_of(count: int, publics: int, leaves: int = 0) -> Mesh:
    names = [f"p{i}" for i in range(publics)] + [f"leaf{i}" for i in range(leaves)]
    mesh = Mesh(count=count, leaves=frozenset(NodeId(n) for n in names if n.startswith("leaf")))
    for name in (SEEDER, *names):
        mesh.add(name)
    return mesh


@pytest.mark.parametrize(("publics", "leaves"), [(1, 0), (2, 0), (8, 0), (0, 3), (1, 1), (1, 4), (4, 4), (2, 6)])
def test_everybody_gets_everything(publics: int, leaves: int) -> None:
    mesh_of(300, publics, leaves).run(limit_s=30)


def test_the_seeder_sends_hardly_more_than_one_copy_where_its_uplink_binds() -> None:
    mesh = mesh_of(1000, 8)
    taken = mesh.run(limit_s=30)
    assert mesh.sends[SEEDER] <= 1.02 * 1000
    assert taken < 1.2 * 1000 / 2 * STEP_S


def test_a_fast_seeder_sends_what_the_relays_cannot() -> None:
    mesh = mesh_of(3000, 8)
    mesh.rate[SEEDER] = 100
    # 8 * 3000 chunks over 100 + 8 * 2 a step.
    assert mesh.run(limit_s=30) < 1.5 * 24_000 / 116 * STEP_S


@pytest.mark.parametrize(
    ("count", "leaves", "begun", "happens"),
    [
        (600, 0, 60, lambda mesh: mesh.kill(NodeId("p1"))),
        (600, 0, 100, lambda mesh: mesh.add("p9")),
        (2000, 0, 50, lambda mesh: mesh.blocked.add((NodeId("p0"), NodeId("p1")))),
        (2000, 4, 50, lambda mesh: mesh.blocked.add((NodeId("p0"), NodeId("p1")))),
    ],
    ids=["a relay dies", "a newcomer comes", "a link stalls", "a link stalls, with leaves"],
)
def test_whatever_happens_in_the_middle_everybody_gets_everything(
    count: int, leaves: int, begun: int, happens: Callable[[Mesh], object]
) -> None:
    mesh = mesh_of(count, 4, leaves)
    mesh.begin(begun)
    happens(mesh)
    mesh.run(limit_s=30)


def test_what_a_relay_does_not_send_any_more_others_send() -> None:
    mesh = mesh_of(2000, 4)
    mesh.begin(50)
    mesh.blocked |= {(NodeId("p0"), NodeId(f"p{i}")) for i in range(1, 4)}
    sent = mesh.sends[NodeId("p0")]
    mesh.run(limit_s=30)
    assert mesh.sends[NodeId("p0")] == sent
    assert min(mesh.sends[NodeId(f"p{i}")] for i in range(1, 4)) > 3 * sent


A, B = NodeId("a"), NodeId("b")


def forwarder(count: int, *peers: NodeId) -> Forwarder:
    relay = Forwarder(SEEDER, count, leaf=False, now=0.0)
    for peer in peers:
        relay.join(peer, leaf=False, now=0.0)
    return relay


def test_a_peer_that_wants_what_one_lacks_gets_nothing_and_breaks_nothing() -> None:
    relay = forwarder(10, A)
    relay.heard(A, Want(indices=(1, 2, 99)), now=0.0)
    assert relay.next_for(A, now=0.0) is None


def test_fresh_chunks_count_only_from_the_seeder() -> None:
    relay = forwarder(10, A, B)
    relay.arrived(A, 3, NoteKind.FRESH, None, now=0.0)
    assert relay.next_for(B, now=0.0) is None


def test_a_complete_child_is_sent_no_copies() -> None:
    relay = forwarder(10, SEEDER, A, B)
    relay.heard(B, Complete(), now=0.0)
    relay.arrived(SEEDER, 3, NoteKind.FRESH, None, now=0.0)
    assert relay.next_for(B, now=0.0) is None
    assert relay.next_for(A, now=0.0) == Send(3, NoteKind.COPY)


@pytest.mark.parametrize(("children", "slow"), [(4, 1), (7, 3)])
def test_links_that_are_slow_do_not_keep_their_relay_to_their_pace(children: int, slow: int) -> None:
    """A quarter of the others' rate: enough not to be taken for stalled."""
    peers = [NodeId(f"p{i}") for i in range(children)]
    relay = forwarder(4000, SEEDER, *peers)
    credit = index = 0
    for step in range(1, 2001):
        now = step * STEP_S
        while isinstance(note := relay.next_for(SEEDER, now=now), Credit):
            credit += note.copies
        for _ in range(min(credit, 2)):
            relay.arrived(SEEDER, index, NoteKind.FRESH, None, now=now)
            index, credit = index + 1, credit - 1
        for peer in peers:
            for _ in range(2 if peer not in peers[:slow] else step % 2):
                if isinstance(send := relay.next_for(peer, now=now), Send):
                    relay.sent(peer, send, now=now)
        if (due := relay.deadline()) is not None and due <= now:
            relay.tick(now=now)
    # The slow ones take 1,000 copies each, the others could take 4,000.
    assert index > 3000


def granting_seeder(count: int, credits: dict[str, int], *, leaves: frozenset[str] = frozenset()) -> Seeder:
    """With so much credit from each."""
    seeder = Seeder(count, now=0.0)
    for name in credits:
        seeder.join(NodeId(name), leaf=name in leaves, now=0.0)
    for name, copies in credits.items():
        seeder.heard(NodeId(name), Credit(copies=copies, forwards=4, epoch=0, copied=(), forwarded=()), now=0.0)
    return seeder


def dealt_to(seeder: Seeder, name: str, *, now: float) -> list[int]:
    """Take what the link to `name` is to carry: the chunks that it is to relay."""
    found: list[int] = []
    while (send := seeder.next_for(NodeId(name), now=now)) is not None:
        if isinstance(send, Send):
            found += [send.index] if send.kind is NoteKind.FRESH else []
            seeder.sent(NodeId(name), send, now=now)
    return found


def done(*indices: int, copies: int = 0) -> Credit:
    return Credit(copies=copies, forwards=0, epoch=0, copied=indices, forwarded=())


def test_the_last_chunks_go_to_whom_has_the_least_in_hand() -> None:
    """Both took as long over a chunk; one has nineteen in hand now, and the other none."""
    # What the third is to be sent keeps the seeder from relaying itself.
    seeder = granting_seeder(44, {"third": 1, "busy": 20, "idle": 20})
    first, second = dealt_to(seeder, "busy", now=0.0), dealt_to(seeder, "idle", now=0.0)
    assert len(first) == len(second) == 20
    for i in range(20):
        seeder.heard(NodeId("idle"), done(second[i]), now=0.02 * (i + 1))
    seeder.heard(NodeId("busy"), done(first[0], copies=2), now=0.4)
    seeder.heard(NodeId("idle"), done(copies=2), now=0.4)
    assert dealt_to(seeder, "busy", now=0.4) == []
    assert len(dealt_to(seeder, "idle", now=0.4)) == 2


def test_a_leaf_whose_link_is_full_keeps_no_public_waiting() -> None:
    seeder = granting_seeder(100, {"leaf": 50, "other": 0, "public": 10}, leaves=frozenset({"leaf", "other"}))
    assert len(dealt_to(seeder, "public", now=0.0)) > 0, "nobody took what waits for the leaf"


def test_a_window_shrinks_as_the_transfer_ends() -> None:
    window = Window(start=30, least=1, floor=4)
    assert window.grant(0.0, 100.0, 10.0) == 30
    window.out = 0
    assert window.grant(0.0, 100.0, 0.2) == 6
    window.out = 0
    assert window.grant(0.0, 100.0, 0.0) == 1


def test_a_segment_is_dealt_when_all_of_the_one_before_is() -> None:
    """Else both would send chunks to all over links that each holds for idle."""
    peer = NodeId("peer")
    first = Seeder(3, now=0.0)
    second = Seeder(3, now=0.0, after=first)
    for seeder in (first, second):
        seeder.join(peer, leaf=False, now=0.0)
        seeder.heard(peer, Have(bitmap=b"\0"), now=0.0)
        seeder.heard(peer, Credit(copies=1, forwards=0, epoch=0), now=0.0)
    assert isinstance(first.next_for(peer, now=0.0), Send)
    assert second.next_for(peer, now=0.0) is None
    first.heard(peer, Credit(copies=2, forwards=0, epoch=0, copied=(0,)), now=0.1)
    assert second.next_for(peer, now=0.1) == Send(0, NoteKind.FRESH)


def test_after_a_restart_a_chunk_is_passed_over_once_however_often_peers_say_what_they_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, looked_at = 4096, 0

    def counted(bitmap: bytes, index: int) -> bool:
        nonlocal looked_at
        looked_at += 1
        return has_bit(bitmap, index)

    monkeypatch.setattr(seeder_module, "has_bit", counted)
    seeder, honest, noisy = Seeder(count, now=0.0, resumed=True), NodeId("honest"), NodeId("noisy")
    for peer in (honest, noisy):
        seeder.join(peer, leaf=False, now=0.0)
        seeder.heard(peer, Have(bitmap=b""), now=0.0)
    for number in range(count):
        # It names one chunk more each time, and ever the same far beyond.
        held = bytearray(count // 8)
        set_bit(held, number // 2)
        seeder.heard(noisy, Have(bitmap=bytes(held) + b"\xff" * 100), now=0.0)
    assert looked_at < 3 * count
    seeder.heard(honest, Credit(copies=1, forwards=0, epoch=0), now=0.0)
    assert seeder.next_for(honest, now=0.0) == Send(count // 2, NoteKind.FRESH)
    seeder.heard(noisy, Complete(), now=0.0)
    assert not seeder._undealt
    assert looked_at < 4 * count


def test_the_seeder_knows_about_how_much_each_peer_holds() -> None:
    mesh = mesh_of(count=100, publics=3, leaves=2)
    seeder = mesh.nodes[SEEDER]
    assert isinstance(seeder, Seeder)
    peers = [node for node in mesh.nodes if node != SEEDER]
    assert [seeder.held_by(peer) for peer in (*peers, NodeId("a stranger"))] == [0] * 6
    mesh.begin(20)
    off = [seeder.held_by(peer) - (100 - getattr(mesh.nodes[peer], "_missing", 0)) for peer in peers]
    assert min(seeder.held_by(peer) for peer in peers) > 0
    assert max(map(abs, off)) <= 35, "what a forwarder holds and has not passed on is not counted"
    mesh.run(limit_s=5)
    assert [seeder.held_by(peer) for peer in peers] == [100] * 5
