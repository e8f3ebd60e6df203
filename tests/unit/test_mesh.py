"""The mesh of seeder and relays over links that never fail, and what it does when peers stall, die or lie."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest

from swarm.broadcast.notes import Complete, Courier, Kind, Send, Want
from swarm.broadcast.relay import Relay
from swarm.broadcast.seeder import Seeder
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
            self.nodes[node] = Relay(SEEDER, self.count, leaf=node in self.leaves, now=self.now)
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


def test_what_a_dead_relay_was_dealt_reaches_everybody() -> None:
    mesh = mesh_of(600, 4)
    for _ in range(60):
        mesh.step()
    mesh.kill(NodeId("p1"))
    mesh.run(limit_s=30)


@pytest.mark.parametrize("leaves", [0, 4])
def test_a_stalled_link_holds_up_nobody_else(leaves: int) -> None:
    mesh = mesh_of(2000, 4, leaves)
    for _ in range(50):
        mesh.step()
    mesh.blocked.add((NodeId("p0"), NodeId("p1")))
    mesh.run(limit_s=30)


def test_what_a_relay_does_not_send_any_more_others_send() -> None:
    mesh = mesh_of(2000, 4)
    for _ in range(50):
        mesh.step()
    mesh.blocked |= {(NodeId("p0"), NodeId(f"p{i}")) for i in range(1, 4)}
    sent = mesh.sends[NodeId("p0")]
    mesh.run(limit_s=30)
    assert mesh.sends[NodeId("p0")] == sent
    assert min(mesh.sends[NodeId(f"p{i}")] for i in range(1, 4)) > 3 * sent


def test_a_newcomer_in_the_middle_gets_everything() -> None:
    mesh = mesh_of(600, 3)
    for _ in range(100):
        mesh.step()
    mesh.add("p9")
    mesh.run(limit_s=30)


def test_a_peer_that_wants_what_one_lacks_gets_nothing_and_breaks_nothing() -> None:
    relay = Relay(SEEDER, 10, leaf=False, now=0.0)
    relay.join(NodeId("p"), leaf=False, now=0.0)
    relay.heard(NodeId("p"), Want(indices=(1, 2, 99)), now=0.0)
    assert relay.next_for(NodeId("p"), now=0.0) is None


def test_fresh_chunks_count_only_from_the_seeder() -> None:
    relay = Relay(SEEDER, 10, leaf=False, now=0.0)
    relay.join(NodeId("a"), leaf=False, now=0.0)
    relay.join(NodeId("b"), leaf=False, now=0.0)
    relay.arrived(NodeId("a"), 3, Kind.FRESH, None, now=0.0)
    assert relay.next_for(NodeId("b"), now=0.0) is None


def test_a_complete_child_is_sent_no_copies() -> None:
    relay = Relay(SEEDER, 10, leaf=False, now=0.0)
    for peer in (SEEDER, NodeId("a"), NodeId("b")):
        relay.join(peer, leaf=False, now=0.0)
    relay.heard(NodeId("b"), Complete(), now=0.0)
    relay.arrived(SEEDER, 3, Kind.FRESH, None, now=0.0)
    assert relay.next_for(NodeId("b"), now=0.0) is None
    assert relay.next_for(NodeId("a"), now=0.0) == Send(3, Kind.COPY)
