"""Plan who sends a version to whom (a mesh for few, a forest of K stripes for many or slow peers), and the chunk size.

Chunk i goes down the tree of stripe i mod K. A death or a join changes the plan of few nodes: orphans go to the parents
with the least load, and everybody else stays in place.

Theory of operation of the forest. With K stripes at rate R a child costs its parent R/K in one stripe, so a node with
uplink u can have u*K/R children, counted over all stripes ("slots"). The planner gives out the slots one by one, each
to the node whose load, slots over uplink, is then least. That gives the highest rate that whole numbers allow. Only a
public or the learner can feed a leaf, so the slots for leaves are given out first. The leaves, whose uplinks serve for
nothing else, then feed the publics until all are loaded alike. A node's slots go into as few stripes as its cap on one
stripe allows. Each tree grows from the learner: the shallowest free slot is filled first, by the peer with the most
slots. The counts match exactly, so it never gets stuck (the argument is at `_grow`).

Relief: a node that falls behind says so (Behind). Everybody below it falls behind too, and their own parents are not to
blame. So a complaint counts only if no ancestor in that stripe complains or did so a short while ago.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heapreplace
from statistics import median
from typing import Literal

from swarm.broadcast.notes import MAX_MEMBERS, NO_NODE, Member, Roster, Routing
from swarm.broadcast.version.manifest import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from swarm.types import NodeId

STRIPE_DEGREE = 16
"""Most children of a peer in one stripe, unless nobody else can take them. A hop costs degree * chunk / uplink, and a
death orphans one subtree for each child. 16 reaches 4,096 peers in three hops."""

NEAR = 64  # A parent looks among this many waiting peers for one that it does not feed yet
Tree = dict[NodeId, NodeId]  # The parent of every peer


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerProfile:
    """What a plan needs to know about a node. 0 is an unknown uplink: the median of the others is assumed."""

    node: NodeId
    public: bool
    uplink_bytes_per_s: float


def forest_of(learner: PeerProfile, peers: Sequence[PeerProfile], stripes: int) -> tuple[Tree, ...]:
    """Return a tree for each stripe. All uplinks must be positive. Two leaves are never linked."""
    if not peers:
        return tuple({} for _ in range(stripes))
    slots = _slots(learner, peers, stripes)
    degrees = _spread(learner, peers, slots, stripes)
    fed: dict[NodeId, set[NodeId]] = {node: set() for node in slots}
    # The last peers hang below the slowest parents, so each stripe starts with another peer.
    starts = [stripe * len(peers) // stripes for stripe in range(stripes)]
    turned = [[*peers[start:], *peers[:start]] for start in starts]
    return tuple(_grow(learner.node, turned[stripe], degrees[stripe], fed) for stripe in range(stripes))


def _slots(learner: PeerProfile, peers: Sequence[PeerProfile], stripes: int) -> dict[NodeId, int]:
    """Return how many children each node has over all stripes: stripes * len(peers) in all, and at least one in each
    stripe for the learner."""
    slots = {peer.node: 0 for peer in peers}
    slots[learner.node] = stripes
    feeders = [learner, *(peer for peer in peers if peer.public)]
    leaves = len(peers) + 1 - len(feeders)
    _share(stripes * leaves - stripes, feeders, slots, learner, stripes * len(peers))
    _share(stripes * len(peers) - sum(slots.values()), [learner, *peers], slots, learner, stripes * len(peers))
    return slots


def _share(
    need: int, nodes: Iterable[PeerProfile], slots: dict[NodeId, int], learner: PeerProfile, all_slots: int
) -> None:
    """Give `need` more slots to `nodes`, each to the node whose load is least with it."""
    uplinks = {peer.node: peer.uplink_bytes_per_s for peer in nodes}
    heap = [((slots[node] + 1) / uplink, order, node) for order, (node, uplink) in enumerate(uplinks.items())]
    heapify(heap)
    for _ in range(need):
        _, order, node = heap[0]
        slots[node] += 1
        # A peer does not feed itself, so it cannot have all the slots that the learner leaves.
        if node != learner.node and slots[node] >= all_slots - slots[learner.node]:
            heappop(heap)
        else:
            heapreplace(heap, ((slots[node] + 1) / uplinks[node], order, node))


def _spread(
    learner: PeerProfile, peers: Sequence[PeerProfile], slots: dict[NodeId, int], stripes: int
) -> list[dict[NodeId, int]]:
    """Return degrees by stripe. Each stripe gets len(peers) slots; the sums of publics and learner differ by one."""
    degrees: list[dict[NodeId, int]] = [{} for _ in range(stripes)]
    publics = [peer for peer in peers if peer.public]
    of_publics = slots[learner.node] + sum(slots[peer.node] for peer in publics)
    quotas = _even(of_publics, stripes)
    rest = [len(peers) - quota for quota in quotas]
    for stripe, degree in enumerate(_even(slots[learner.node], stripes)):
        degrees[stripe][learner.node] = degree
        quotas[stripe] -= degree
    _fill(publics, slots, quotas, degrees)
    _fill([peer for peer in peers if not peer.public], slots, rest, degrees)
    return degrees


def _even(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]


def _fill(
    peers: Sequence[PeerProfile], slots: dict[NodeId, int], quotas: list[int], degrees: list[dict[NodeId, int]]
) -> None:
    """Cut each peer's slots into parts of at most STRIPE_DEGREE, for the stripes that need most. A peer gets a second
    part in a stripe only if it already has one in every stripe that still needs slots."""
    for peer in sorted(peers, key=lambda one: -slots[one.node]):
        left = slots[peer.node]
        while left:
            open_stripes = [s for s, quota in enumerate(quotas) if quota]
            new = [s for s in open_stripes if peer.node not in degrees[s]]
            stripe = max(new or open_stripes, key=quotas.__getitem__)
            part = min(left, STRIPE_DEGREE, quotas[stripe])
            degrees[stripe][peer.node] = degrees[stripe].get(peer.node, 0) + part
            quotas[stripe] -= part
            left -= part


def _grow(
    learner: NodeId, peers: Sequence[PeerProfile], degrees: dict[NodeId, int], fed: dict[NodeId, set[NodeId]]
) -> Tree:
    """Grow one tree from the top. `fed` says whom each node feeds in any stripe.

    There are as many slots as peers. Only publics can fill a leaf's slots. Publics and learner have as many
    slots as there are leaves plus `spare`, and at most `spare` of these go to publics. If a peer were left without a
    free slot, all slots of its kind would be filled, and hence all peers of its kind placed, since peers with slots go
    first.
    """
    public = {peer.node: peer.public for peer in peers}
    ordered = sorted(public, key=lambda node: -degrees.get(node, 0))
    waiting = {kind: deque(node for node in ordered if public[node] is kind) for kind in (True, False)}
    spare = degrees[learner] + sum(degrees.get(node, 0) for node in waiting[True]) - len(waiting[False])
    tree: Tree = {}
    free = deque([(learner, degrees[learner])])
    while waiting[True] or waiting[False]:
        parent, degree = free.popleft()
        for _ in range(degree):
            kind = True if parent != learner and not public[parent] else _next_kind(waiting, degrees, spare)
            if parent == learner or public[parent]:
                spare -= kind
            child = _take(waiting[kind], degrees, fed[parent])
            tree[child] = parent
            fed[parent].add(child)
            if degrees.get(child):
                free.append((child, degrees[child]))
    return tree


def _next_kind(waiting: dict[bool, deque[NodeId]], degrees: dict[NodeId, int], spare: int) -> bool:
    """Return True if a public's next slot goes to a public: the peer with more slots, where both may have it."""
    if not waiting[False] or not waiting[True] or not spare:
        return not waiting[False]
    return degrees.get(waiting[True][0], 0) > degrees.get(waiting[False][0], 0)


def _take(waiting: deque[NodeId], degrees: dict[NodeId, int], fed: set[NodeId]) -> NodeId:
    """Take the next waiting peer, preferably one that this parent does not feed in another stripe. Sockets share an
    uplink evenly, so the few children in two stripes would bear all that a slow uplink lacks."""
    has_slots = degrees.get(waiting[0], 0) > 0
    for place in range(min(NEAR, len(waiting))):
        node = waiting[place]
        if node not in fed and (degrees.get(node, 0) > 0) == has_slots:
            del waiting[place]
            return node
    return waiting.popleft()


Scheme = Literal["mesh", "forest"]

MESH_PEERS = 32  # A larger mesh has over a thousand connections

MESH_HOLD_S = 0.6
"""Where a chunk of a mesh keeps a slow forwarder (one in four has less uplink) busy for longer, trees are taken: it
seems overdue to the learner, which deals it again and again. In the simulator 16 equal nodes of 2 Mbit/s take 2.9 times
the bound in a mesh and 1.07 in trees; 24 of them over 12 times, and 1.12."""

STRIPES = 16
"""A slot is 1/16 of the rate: rounding a typical uplink to slots wastes a few percent. More only lengthens hops."""

MAX_CHUNKS = 65_536  # Most chunks that a plan allows a version: digests of 2 MiB, bitmaps of 8 KiB
PLANNED_CHUNK_BYTES = 1024 * 1024  # Largest chunk, unless the version would need more than MAX_CHUNKS of them
CHUNK_HOLD_S = 0.03  # How long one chunk may hold a typical forwarder of a mesh: N - 1 copies at its uplink
HOLD_SHARE = 0.008  # Or this share of the transfer, if that is longer: a chunk costs CPU, whatever its size
LONGEST_HOLD_S = 0.15  # But no longer, so that no forwarder seems to stand still
FILL_SHARE = 0.05  # Share of the transfer that may pass before the last peer of a forest has its first chunk
DEPTH = 5  # Hops in a forest of 1,000 peers with leaves: learner, leaf, public, leaf, public, leaf
ASSUMED_UPLINK_BYTES_PER_S = 10e6 / 8  # Assumed when nobody's uplink is known
MIN_LEFT = 0.05  # Share of its uplink that a parent keeps when all children leave it: perhaps it only stalled briefly


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPlan:
    """How one version travels. A mesh has no trees. `scheme` is a Scheme, or the name of a benchmark's own scheme."""

    scheme: str
    chunk_bytes: int
    learner: PeerProfile
    peers: dict[NodeId, PeerProfile]
    trees: tuple[Tree, ...]
    _children: tuple[dict[NodeId, list[NodeId]], ...] = field(init=False, repr=False, compare=False)
    rate_bytes_per_s: float = field(init=False, compare=False)  # What the busiest uplink allows

    def __post_init__(self) -> None:
        object.__setattr__(self, "_children", tuple(map(children_of, self.trees)))
        object.__setattr__(self, "rate_bytes_per_s", self._rate())

    def routes_of(self, node: NodeId) -> Routing:
        """Return the part of `node`. A receiver gets no more children than its roster has room for."""
        most = None if node == self.learner.node else MAX_MEMBERS
        return Routing(
            parents=tuple(tree.get(node, NO_NODE) for tree in self.trees),
            children=tuple(tuple(children.get(node, ())[:most]) for children in self._children),
            chunks_per_s=self.rate_bytes_per_s / self.chunk_bytes,
        )

    def pairs(self) -> set[tuple[NodeId, NodeId]]:
        """Return the links that the trees need, as (parent, child)."""
        return {(parent, child) for tree in self.trees for child, parent in tree.items()}

    def _rate(self) -> float:
        slots = slots_of(self.trees)
        profiles = {self.learner.node: self.learner, **self.peers}
        busiest = (profiles[node].uplink_bytes_per_s * len(self.trees) / count for node, count in slots.items())
        return min(busiest, default=self.learner.uplink_bytes_per_s)


def children_of(tree: Tree) -> dict[NodeId, list[NodeId]]:
    """Return the children of each parent, in the order in which they were placed: peers with most slots first."""
    children: dict[NodeId, list[NodeId]] = {}
    for child, parent in tree.items():
        children.setdefault(parent, []).append(child)
    return children


def slots_of(trees: Iterable[Tree]) -> dict[NodeId, int]:
    """Return how many children each node has over all stripes."""
    slots: dict[NodeId, int] = {}
    for tree in trees:
        for parent in tree.values():
            slots[parent] = slots.get(parent, 0) + 1
    return slots


def plan_of(
    learner: PeerProfile, peers: Sequence[PeerProfile], encoded_bytes: int, *, scheme: Scheme | None = None
) -> VersionPlan:
    """Plan a version of `encoded_bytes`. With `scheme` None `is_for_mesh` decides."""
    learner, *peers = _with_uplinks([learner, *peers])
    scheme = scheme or ("mesh" if is_for_mesh(peers, encoded_bytes) else "forest")
    return VersionPlan(
        scheme=scheme,
        chunk_bytes=_chunk_bytes(scheme, peers, encoded_bytes),
        learner=learner,
        peers={peer.node: peer for peer in peers},
        trees=forest_of(learner, peers, STRIPES) if scheme == "forest" else (),
    )


def is_for_mesh(peers: Sequence[PeerProfile], encoded_bytes: int) -> bool:
    """Return True if a version for these peers is dealt in a mesh, and does not go down trees."""
    if len(peers) <= 1 or len(peers) > MESH_PEERS:
        return len(peers) <= 1
    peers = sorted(_with_uplinks(peers), key=lambda peer: peer.uplink_bytes_per_s)
    held_bytes = (len(peers) - 1) * _chunk_bytes("mesh", peers, encoded_bytes)
    return held_bytes <= MESH_HOLD_S * peers[len(peers) // 4].uplink_bytes_per_s


def _with_uplinks(profiles: Sequence[PeerProfile]) -> list[PeerProfile]:
    known = [profile.uplink_bytes_per_s for profile in profiles if profile.uplink_bytes_per_s > 0]
    middle = median(known) if known else ASSUMED_UPLINK_BYTES_PER_S
    return [p if p.uplink_bytes_per_s > 0 else replace(p, uplink_bytes_per_s=middle) for p in profiles]


def _chunk_bytes(scheme: Scheme, peers: Sequence[PeerProfile], encoded_bytes: int) -> int:
    """Return a power of two. In a mesh a chunk keeps a typical forwarder busy for CHUNK_HOLD_S or HOLD_SHARE, but no
    longer than LONGEST_HOLD_S. In trees the first chunk reaches the last peer after FILL_SHARE of the transfer. A
    version has at most MAX_CHUNKS chunks, unless they already have the largest size."""
    if scheme == "mesh" and peers:
        uplink = median(peer.uplink_bytes_per_s for peer in peers)
        held_bytes = min(max(CHUNK_HOLD_S * uplink, HOLD_SHARE * encoded_bytes), LONGEST_HOLD_S * uplink)
        wish = held_bytes / max(1, len(peers) - 1)
    else:
        wish = FILL_SHARE * encoded_bytes / (DEPTH * STRIPES)
    chunk_bytes = MIN_CHUNK_BYTES
    while 2 * chunk_bytes <= min(wish, PLANNED_CHUNK_BYTES):
        chunk_bytes *= 2
    while chunk_bytes < MAX_CHUNK_BYTES and chunk_bytes * MAX_CHUNKS < encoded_bytes:
        chunk_bytes *= 2
    return chunk_bytes


def repaired(plan: VersionPlan, *, gone: Iterable[NodeId] = (), joined: Iterable[PeerProfile] = ()) -> VersionPlan:
    """Return `plan` without the peers `gone` and with those in `joined`. A child keeps its parent if that one stays."""
    peers = dict(plan.peers)
    for node in gone:
        peers.pop(node, None)
    newcomers = [peer for peer in joined if peer.node != plan.learner.node and peer.node not in peers]
    profiles = _with_uplinks([plan.learner, *peers.values(), *newcomers])
    peers = {peer.node: peer for peer in profiles[1:]}
    return replace(plan, peers=peers, trees=_Repair(plan.learner, peers).trees(plan.trees))


def relieved(plan: VersionPlan, behind: Iterable[tuple[NodeId, int]]) -> VersionPlan:
    """Return `plan` with other parents for the pairs (child, stripe) in `behind`. A parent is believed to have less
    uplink by the share of its children that it loses, so that the next plan asks less of it."""
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
        left = max(MIN_LEFT, 1 - count / slots[node])
        profiles[node] = replace(profiles[node], uplink_bytes_per_s=profiles[node].uplink_bytes_per_s * left)
    return replace(plan, peers=profiles, trees=_Repair(plan.learner, profiles).trees(trees, late))


class _Repair:
    """Finds new parents for orphans, by least load over all stripes."""

    def __init__(self, learner: PeerProfile, peers: dict[NodeId, PeerProfile]) -> None:
        self._learner = learner.node
        self._peers = peers
        self._uplinks = {learner.node: learner.uplink_bytes_per_s}
        self._uplinks.update((node, peer.uplink_bytes_per_s) for node, peer in peers.items())
        self._slots: dict[NodeId, int] = {}

    def trees(self, old: Sequence[Tree], late: Sequence[set[NodeId]] = ()) -> tuple[Tree, ...]:
        """Return the repaired trees. Peers that are `late` in a stripe get no new children in it."""
        kept = [{child: parent for child, parent in tree.items() if self._stays(parent, child)} for tree in old]
        self._slots = slots_of(kept)
        for stripe, tree in enumerate(kept):
            self._attach_missing(tree, late[stripe] if late else set())
        return tuple(kept)

    def _stays(self, parent: NodeId, child: NodeId) -> bool:
        return child in self._peers and parent in self._uplinks

    def _attach_missing(self, tree: Tree, late: set[NodeId]) -> None:
        # Orphans with most children first: their subtrees wait for them.
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
        return parent == self._learner or self._peers[parent].public or self._peers[child].public

    @staticmethod
    def _below(node: NodeId, children: dict[NodeId, list[NodeId]]) -> set[NodeId]:
        found = {node}
        rest = [node]
        while rest:
            below = children.get(rest.pop(), [])
            found.update(below)
            rest += below
        return found


LASTING_S = 6.0  # A link that stood still for a moment complains for less time
ECHO_S = 6.0  # For this long after a node fell behind, complaints from below it may have the same reason


PlanOf = Callable[[PeerProfile, Sequence[PeerProfile], int], VersionPlan]
"""Makes a plan from the learner, the peers and the bytes of the encoded version, like `plan_of`."""


class Relief:
    """The learner's memory of complaints: when each (node, stripe) complained first, and last, within ECHO_S."""

    def __init__(self) -> None:
        self._heard: dict[tuple[NodeId, int], tuple[float, float]] = {}

    def plan(self, plan: VersionPlan, complaints: Iterable[tuple[NodeId, int]], *, now: float) -> VersionPlan:
        """Return `plan`, with new parents for nodes whose complaint lasts, and is no echo of an ancestor's."""
        self._heard = {key: times for key, times in self._heard.items() if now - times[1] < ECHO_S}
        heard = list(complaints)
        self._heard.update((key, (self._heard.get(key, (now, now))[0], now)) for key in heard)
        first = [key for key in heard if now - self._heard[key][0] >= LASTING_S and not self._is_echo(plan, *key)]
        return relieved(plan, first) if first else plan

    def _is_echo(self, plan: VersionPlan, node: NodeId, stripe: int) -> bool:
        tree = plan.trees[stripe]
        above = tree.get(node)
        while above is not None and (above, stripe) not in self._heard:
            above = tree.get(above)
        return above is not None


GAIN = 1.05  # Times faster that other trees have to be to be worth their new links
LINKING_S = 15.0  # From new trees until complaints count: before, some links are up and others are not
RELIEF_S = 1.5  # How long complaints are gathered: they come later from further down a tree


class Planning:
    """One learner's plans. `plan_of` makes each first plan; later ones are repairs of it."""

    def __init__(self, learner: NodeId, plan_of: PlanOf = plan_of) -> None:
        self._learner = learner
        self._plan_of = plan_of
        self._relief = Relief()
        self._deaf_until = 0.0
        self.plan: VersionPlan | None = None

    def chunk_bytes(self, peers: Mapping[NodeId, PeerProfile], expected_bytes: int) -> int:
        """Return the chunk size for a version of about `expected_bytes`."""
        return self._plan_of(self._profile(0.0), list(peers.values()), expected_bytes).chunk_bytes

    def begin(
        self, peers: Mapping[NodeId, PeerProfile], uplink: float, encoded_bytes: int, chunk_bytes: int, *, now: float
    ) -> VersionPlan:
        """Return the plan for the next version."""
        self.follow(peers)
        fresh, kept = self._plan_of(self._profile(uplink), list(peers.values()), encoded_bytes), self.plan
        if kept is not None and kept.scheme == fresh.scheme:
            kept = replace(kept, learner=fresh.learner, peers=fresh.peers)
            if GAIN * kept.rate_bytes_per_s >= fresh.rate_bytes_per_s:
                fresh = kept
        if fresh is not kept:
            self._deaf_until = now + LINKING_S
        self.plan = replace(fresh, chunk_bytes=chunk_bytes)
        return self.plan

    def follow(self, peers: Mapping[NodeId, PeerProfile]) -> bool:
        """Adapt the plan to the peers that are linked now. Return True if it changed."""
        plan = self.plan
        if plan is None:
            return False
        # A leaf that became a public, or the reverse, counts as another peer in the trees.
        same = {node for node, known in plan.peers.items() if node in peers and peers[node].public == known.public}
        gone = [node for node in plan.peers if node not in same]
        joined = [profile for node, profile in peers.items() if node not in same]
        if gone or joined:
            self.plan = repaired(plan, gone=gone, joined=joined)
        return self.plan is not plan

    def relieve(self, complaints: Iterable[tuple[NodeId, int]], *, now: float) -> dict[NodeId, float]:
        """Give other parents to nodes that fall behind. Return the uplinks that their old parents seem to have."""
        plan = self.plan
        if plan is None or now < self._deaf_until:
            return {}
        self._deaf_until = now + RELIEF_S
        self.plan = new = self._relief.plan(plan, complaints, now=now)
        return {node: peer.uplink_bytes_per_s for node, peer in new.peers.items() if peer != plan.peers[node]}

    def _profile(self, uplink: float) -> PeerProfile:
        return PeerProfile(node=self._learner, public=True, uplink_bytes_per_s=uplink)

    def rosters(self, members: Mapping[NodeId, Member]) -> dict[NodeId, Roster]:
        """Say which nodes each node links with: everybody in a small swarm, its parents and children in a large one,
        nobody in a large one without a plan. A roster names at most MAX_MEMBERS; a child without a link to its parent
        pulls its chunks."""
        has_trees = self.plan is not None and bool(self.plan.trees)
        if len(members) <= MESH_PEERS or (self.plan is not None and not has_trees):
            everybody = Roster(members=tuple(members.values())[:MAX_MEMBERS])
            # If a mesh has outgrown a roster, the peers beyond it get chunks from the learner until the next plan.
            beyond = {node: Roster(members=(members[node],)) for node in list(members)[MAX_MEMBERS:]}
            return {**dict.fromkeys(members, everybody), **beyond}
        linked: dict[NodeId, dict[NodeId, None]] = {node: {node: None} for node in members}
        for parent, child in sorted(self.plan.pairs() if self.plan is not None else ()):
            if parent in linked and child in linked and max(len(linked[parent]), len(linked[child])) < MAX_MEMBERS:
                linked[parent][child] = None
                linked[child][parent] = None
        return {node: Roster(members=tuple(members[other] for other in known)) for node, known in linked.items()}
