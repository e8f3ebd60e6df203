"""Which way a version takes to all peers: mesh, forest or a named baseline; its chunk size; the trees of its stripes.

Up to 32 peers the mesh: every chunk through one relay to all others. Beyond, a forest of K stripes, chunk i in stripe
i mod K. Chain, binary tree and star are what others do, kept to be measured against. A death or a join changes the
plan of few: orphans are given to the parents with the least load, everything else stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

from swarm.broadcast.forest import PeerProfile, Tree, forest_of
from swarm.broadcast.manifest import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from swarm.types import NodeId

Scheme = Literal["mesh", "forest", "chain", "tree", "star"]

MESH_PEERS = 32
"""In a mesh of more, a chunk holds its relay for too long and connections number a thousand."""

STRIPES = 16
"""Slots of 1/16 of the rate: rounding a typical uplink to slots wastes a few percent. More would only lengthen hops."""

MAX_CHUNKS = 65_536
"""Chunks of one version that a plan aims at: digests of 2 MiB, bitmaps of 8 KiB."""

PLANNED_CHUNK_BYTES = 1024 * 1024
"""Largest chunk unless the version is larger than MAX_CHUNKS of them."""

RELAY_S = 0.03
"""How long one chunk may hold a typical relay of a mesh: N - 1 copies at its uplink."""

FILL_SHARE = 0.05
"""Share of the transfer that may pass before the last peer of a forest has its first chunk."""

DEPTH = 5
"""Hops of a forest of 1,000 peers with leaves: learner, leaf, public, leaf, public, leaf."""

ASSUMED_UPLINK_BYTES_PER_S = 10e6 / 8
"""Where nobody's uplink is known."""

LEAST_LEFT = 0.05
"""Of an uplink, when all children leave it: it may have been a moment's stall."""

MAX_REFUSED = 4096
"""Pairs that do not work together, remembered by a plan: the oldest are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """One node's part of a plan: for each stripe its parent (None: learner, or no part) and its children; the pace that
    is planned for all, 0 if unknown."""

    parents: tuple[NodeId | None, ...]
    children: tuple[tuple[NodeId, ...], ...]
    chunks_per_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one version travels. A mesh has no trees. `refused` are pairs (parent, child) that failed."""

    scheme: Scheme
    chunk_bytes: int
    learner: PeerProfile
    peers: dict[NodeId, PeerProfile]
    trees: tuple[Tree, ...]
    refused: tuple[tuple[NodeId, NodeId], ...] = ()
    _children: tuple[dict[NodeId, list[NodeId]], ...] = field(init=False, repr=False, compare=False)
    rate_bytes_per_s: float = field(init=False, compare=False)
    """What the busiest uplink allows."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_children", tuple(map(children_of, self.trees)))
        object.__setattr__(self, "rate_bytes_per_s", self._rate())

    def routes_of(self, node: NodeId) -> Routes:
        """What `node` has to do."""
        return Routes(
            parents=tuple(tree.get(node) for tree in self.trees),
            children=tuple(tuple(children.get(node, ())) for children in self._children),
            chunks_per_s=self.rate_bytes_per_s / self.chunk_bytes,
        )

    def pairs(self) -> set[tuple[NodeId, NodeId]]:
        """Links that the trees need, as (parent, child)."""
        return {(parent, child) for tree in self.trees for child, parent in tree.items()}

    def _rate(self) -> float:
        slots = slots_of(self.trees)
        profiles = {self.learner.node: self.learner, **self.peers}
        busiest = (profiles[node].uplink_bytes_per_s * len(self.trees) / count for node, count in slots.items())
        return min(busiest, default=self.learner.uplink_bytes_per_s)


def children_of(tree: Tree) -> dict[NodeId, list[NodeId]]:
    """The tree downwards. Children are in the order in which they were placed: those with most below them first."""
    children: dict[NodeId, list[NodeId]] = {}
    for child, parent in tree.items():
        children.setdefault(parent, []).append(child)
    return children


def slots_of(trees: Iterable[Tree]) -> dict[NodeId, int]:
    """Children of each node, over all stripes."""
    slots: dict[NodeId, int] = {}
    for tree in trees:
        for parent in tree.values():
            slots[parent] = slots.get(parent, 0) + 1
    return slots


def bound_bytes_per_s(
    learner_uplink: float, peers: Iterable[PeerProfile], *, slowest_downlink: float = float("inf")
) -> float:
    """The highest rate at which all peers can receive: design.md section 7, the bound of Kumar and Ross and a term for
    leaves, which only publics and the learner can feed."""
    everybody = list(peers)
    uplinks = [peer.uplink_bytes_per_s for peer in everybody]
    publics = [peer.uplink_bytes_per_s for peer in everybody if peer.public]
    terms = [learner_uplink, slowest_downlink]
    if everybody:
        terms.append((learner_uplink + sum(uplinks)) / len(everybody))
    if len(publics) < len(everybody):
        terms.append((learner_uplink + sum(publics)) / (len(everybody) - len(publics)))
    return min(terms)


def plan_of(
    learner: PeerProfile,
    peers: Sequence[PeerProfile],
    *,
    encoded_bytes: int,
    scheme: Scheme | None = None,
) -> Plan:
    """A plan for a version of `encoded_bytes`; `scheme` None chooses mesh or forest."""
    known = _with_uplinks([learner, *peers])
    learner, peers = known[0], known[1:]
    chosen = scheme or ("mesh" if len(peers) <= MESH_PEERS else "forest")
    builders: dict[Scheme, Callable[[], tuple[Tree, ...]]] = {
        "mesh": lambda: (),
        "forest": lambda: forest_of(learner, peers, STRIPES),
        "chain": lambda: (_narrow(learner.node, peers, 1),),
        "tree": lambda: (_narrow(learner.node, peers, 2),),
        "star": lambda: ({peer.node: learner.node for peer in peers},),
    }
    return Plan(
        scheme=chosen,
        chunk_bytes=chunk_bytes_of(chosen, peers, encoded_bytes),
        learner=learner,
        peers={peer.node: peer for peer in peers},
        trees=builders[chosen](),
    )


def _with_uplinks(profiles: Sequence[PeerProfile]) -> list[PeerProfile]:
    known = [profile.uplink_bytes_per_s for profile in profiles if profile.uplink_bytes_per_s > 0]
    middle = median(known) if known else ASSUMED_UPLINK_BYTES_PER_S
    return [p if p.uplink_bytes_per_s > 0 else replace(p, uplink_bytes_per_s=middle) for p in profiles]


def chunk_bytes_of(scheme: Scheme, peers: Sequence[PeerProfile], encoded_bytes: int) -> int:
    """A power of two: in a mesh so that a chunk holds a typical relay for RELAY_S, in trees so that filling them takes
    FILL_SHARE of the transfer; not so small that the version has more than MAX_CHUNKS."""
    if scheme == "mesh" and peers:
        uplink = median(peer.uplink_bytes_per_s for peer in peers)
        wish = RELAY_S * uplink / max(1, len(peers) - 1)
    elif scheme == "forest":
        wish = FILL_SHARE * encoded_bytes / (DEPTH * STRIPES)
    else:
        wish = FILL_SHARE * encoded_bytes / max(1, len(peers))
    chunk_bytes = MIN_CHUNK_BYTES
    while 2 * chunk_bytes <= min(wish, PLANNED_CHUNK_BYTES):
        chunk_bytes *= 2
    while chunk_bytes < MAX_CHUNK_BYTES and chunk_bytes * MAX_CHUNKS < encoded_bytes:
        chunk_bytes *= 2
    return chunk_bytes


def _narrow(learner: NodeId, peers: Sequence[PeerProfile], arity: int) -> Tree:
    """A single tree of that arity, the fastest publics at the top. Leaves hang below publics and have no children, but
    in a chain (arity 1), where a leaf stands between two publics. Leaves that find no place go to publics in turn."""
    by_uplink = sorted(peers, key=lambda peer: -peer.uplink_bytes_per_s)
    publics = [peer.node for peer in by_uplink if peer.public]
    leaves = [peer.node for peer in by_uplink if not peer.public]
    order = publics
    if arity == 1:
        order = [node for pair in zip(publics, leaves, strict=False) for node in pair]
        order += publics[len(leaves) :]
        leaves = leaves[len(publics) :]
    ranks = [learner, *order]
    tree = {node: ranks[at // arity] for at, node in enumerate(order)}
    feeders = [learner, *publics]
    slots = slots_of([tree])
    free = [node for node in feeders for _ in range(arity - slots.get(node, 0))] if arity > 1 else []
    for at, leaf in enumerate(leaves):
        tree[leaf] = free[at] if at < len(free) else feeders[at % len(feeders)]
    return tree


def repaired(
    plan: Plan,
    *,
    gone: Iterable[NodeId] = (),
    joined: Iterable[PeerProfile] = (),
    refused: Iterable[tuple[NodeId, NodeId]] = (),
) -> Plan:
    """`plan` without the peers `gone` and with those `joined`, no child of `refused` fed by the parent it refused. A
    child whose parent stays keeps it."""
    peers = dict(plan.peers)
    for node in gone:
        peers.pop(node, None)
    newcomers = [peer for peer in joined if peer.node != plan.learner.node and peer.node not in peers]
    profiles = _with_uplinks([plan.learner, *peers.values(), *newcomers])
    peers = {peer.node: peer for peer in profiles[1:]}
    pairs = tuple(dict.fromkeys((*plan.refused, *refused)))[-MAX_REFUSED:]
    return replace(
        plan,
        peers=peers,
        trees=_Repair(plan.learner, peers, frozenset(pairs)).trees(plan.trees),
        refused=pairs,
    )


def relieved(plan: Plan, behind: Iterable[tuple[NodeId, int]]) -> Plan:
    """`plan` with other parents for those who fall behind in a stripe, given as (child, stripe). A parent is believed
    to have less uplink by the share of its children that it loses: the next plan asks less of it."""
    profiles = dict(plan.peers)
    slots = slots_of(plan.trees)
    trees = [dict(tree) for tree in plan.trees]
    late: list[set[NodeId]] = [set() for _ in trees]
    lost: dict[NodeId, int] = {}
    for child, stripe in behind:
        parent = trees[stripe].get(child)
        if parent in profiles and child in profiles:
            del trees[stripe][child]
            late[stripe].update((parent, child))
            lost[parent] = lost.get(parent, 0) + 1
    for node, count in lost.items():
        left = max(LEAST_LEFT, 1 - count / slots[node])
        profiles[node] = replace(profiles[node], uplink_bytes_per_s=profiles[node].uplink_bytes_per_s * left)
    repair = _Repair(plan.learner, profiles, frozenset(plan.refused))
    return replace(plan, peers=profiles, trees=repair.trees(trees, late))


class _Repair:
    """New parents for orphans, by least load over all stripes."""

    def __init__(
        self, learner: PeerProfile, peers: dict[NodeId, PeerProfile], refused: frozenset[tuple[NodeId, NodeId]]
    ) -> None:
        self._learner = learner.node
        self._peers = peers
        self._refused = refused
        self._uplinks = {learner.node: learner.uplink_bytes_per_s}
        self._uplinks.update((node, peer.uplink_bytes_per_s) for node, peer in peers.items())
        self._slots: dict[NodeId, int] = {}

    def trees(self, old: Sequence[Tree], late: Sequence[set[NodeId]] = ()) -> tuple[Tree, ...]:
        """The trees, whole again. Nobody new is given to those who are `late` in the stripe."""
        kept = [{child: parent for child, parent in tree.items() if self._stays(parent, child)} for tree in old]
        self._slots = slots_of(kept)
        for stripe, tree in enumerate(kept):
            self._attach_missing(tree, late[stripe] if late else set())
        return tuple(kept)

    def _stays(self, parent: NodeId, child: NodeId) -> bool:
        alive = child in self._peers and parent in self._uplinks
        return alive and (parent == self._learner or (parent, child) not in self._refused)

    def _attach_missing(self, tree: Tree, late: set[NodeId]) -> None:
        """Orphans with children first: what hangs below them waits for them."""
        children = children_of(tree)
        orphans = [node for node in self._peers if node not in tree]
        for orphan in sorted(orphans, key=lambda node: -len(children.get(node, ()))):
            below = self._below(orphan, children) | late
            parent = min(
                (node for node in self._uplinks if node not in below and self._may_feed(node, orphan)),
                key=self._next_load,
            )
            tree[orphan] = parent
            children.setdefault(parent, []).append(orphan)
            self._slots[parent] = self._slots.get(parent, 0) + 1

    def _next_load(self, node: NodeId) -> float:
        return (self._slots.get(node, 0) + 1) / self._uplinks[node]

    def _may_feed(self, parent: NodeId, child: NodeId) -> bool:
        """The learner may feed everybody, as the last resort even one that refused it."""
        if parent == self._learner:
            return True
        return (self._peers[parent].public or self._peers[child].public) and (parent, child) not in self._refused

    @staticmethod
    def _below(node: NodeId, children: dict[NodeId, list[NodeId]]) -> set[NodeId]:
        found = {node}
        rest = [node]
        while rest:
            below = children.get(rest.pop(), [])
            found.update(below)
            rest += below
        return found
