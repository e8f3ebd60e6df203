"""The learner's plan of who sends to whom, kept from one version to the next and changed by as little as possible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from swarm.broadcast.forest import PeerProfile
from swarm.broadcast.planner import MESH_PEERS, Plan, Routes, Scheme, chunk_bytes_of, plan_of, repaired
from swarm.broadcast.relief import Relief
from swarm.broadcast.roster import Member, Roster, Routing
from swarm.types import NodeId

RELIEF_S = 1.5
"""Complaints are gathered for so long: those from further down a tree come later."""


class Planning:
    """Plans for one learner. `scheme` None lets the planner choose: a mesh up to 32 receivers, beyond it a forest."""

    def __init__(self, learner: NodeId, scheme: Scheme | None) -> None:
        self._learner = learner
        self._scheme = scheme
        self._relief = Relief()
        self._relieved_at = 0.0
        self.plan: Plan | None = None

    def chunk_bytes(self, peers: Mapping[NodeId, PeerProfile], expected_bytes: int) -> int:
        """What the chunks of a version should have that will take about so many bytes."""
        scheme = self._scheme or ("mesh" if len(peers) <= MESH_PEERS else "forest")
        return chunk_bytes_of(scheme, list(peers.values()), expected_bytes)

    def begin(self, peers: Mapping[NodeId, PeerProfile], uplink: float, encoded_bytes: int, chunk_bytes: int) -> Plan:
        """The plan for a version that is about to be announced."""
        learner = PeerProfile(node=self._learner, public=True, uplink_bytes_per_s=uplink)
        fresh = plan_of(learner, list(peers.values()), encoded_bytes=encoded_bytes, scheme=self._scheme)
        if self.plan is None or self.plan.scheme != fresh.scheme:
            self.plan = fresh
        self.follow(peers)
        self.plan = replace(self.plan, chunk_bytes=chunk_bytes)
        return self.plan

    def follow(self, peers: Mapping[NodeId, PeerProfile]) -> bool:
        """Adapt the plan to those who are linked now; True if it changed."""
        plan = self.plan
        if plan is None:
            return False
        # A leaf that has become a public, or the reverse, is another peer to the trees.
        same = {node for node, known in plan.peers.items() if node in peers and peers[node].public == known.public}
        gone = [node for node in plan.peers if node not in same]
        joined = [profile for node, profile in peers.items() if node not in same]
        if gone or joined:
            self.plan = repaired(plan, gone=gone, joined=joined)
        return self.plan is not plan

    def relieve(self, complaints: Iterable[tuple[NodeId, int]], *, now: float) -> bool:
        """Give other parents to those who fall behind; True if the plan changed."""
        plan = self.plan
        if plan is None or now - self._relieved_at < RELIEF_S:
            return False
        self._relieved_at = now
        self.plan = self._relief.plan(plan, complaints, now=now)
        return self.plan is not plan

    def rosters(self, members: Mapping[NodeId, Member]) -> dict[NodeId, Roster]:
        """Whom each node is to be linked with: everybody in a small swarm, parents and children in a large one."""
        if len(members) <= MESH_PEERS or self.plan is None:
            everybody = Roster(members=tuple(members.values()))
            return dict.fromkeys(members, everybody)
        linked: dict[NodeId, dict[NodeId, None]] = {node: {node: None} for node in members}
        for parent, child in sorted(self.plan.pairs()):
            if parent in linked and child in linked:
                linked[parent][child] = None
                linked[child][parent] = None
        return {node: Roster(members=tuple(members[other] for other in known)) for node, known in linked.items()}


def routing_of(routes: Routes) -> Routing:
    """Routes as they travel."""
    return Routing(
        parents=tuple(parent or "" for parent in routes.parents),
        children=routes.children,
        chunks_per_s=routes.chunks_per_s,
    )


def routes_in(routing: Routing) -> Routes:
    """Routes as they came."""
    return Routes(
        parents=tuple(NodeId(parent) if parent else None for parent in routing.parents),
        children=tuple(tuple(NodeId(child) for child in children) for children in routing.children),
        chunks_per_s=routing.chunks_per_s,
    )
