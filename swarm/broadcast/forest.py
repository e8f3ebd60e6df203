"""Trees that together use every uplink: K stripes, each a spanning tree from the learner, most peers interior in few.

Theory of operation. With K stripes at rate R a child costs its parent R/K in one stripe, so a node with uplink u can
have u*K/R children, counted over all stripes ("slots"). The slots that are needed are given one by one to the node
whose load, slots over uplink, would be least: the highest rate that whole numbers allow. A leaf can be fed by a public
or by the learner alone, so those slots are given first; what feeds publics then falls to the leaves, whose uplinks
nobody else can use, until all are loaded alike. A node's slots are put into as few stripes as its cap on one stripe
allows. Each tree is grown from the learner, the shallowest free slot first, the peer with the most slots first; the
counts match exactly, therefore it never gets stuck (the argument is at `_grow`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from swarm.types import NodeId

STRIPE_DEGREE = 16
"""Children of one peer in one stripe, where others can take the rest: a hop costs degree * chunk / uplink, and a death
leaves so many subtrees behind. 16 reaches 4,096 peers in three hops."""

NEAR = 64
"""Peers in line that are looked at for one that its parent does not feed yet."""

Tree = dict[NodeId, NodeId]
"""Parent of every peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerProfile:
    """What a plan has to know of one node. An uplink of 0 is unknown: the planner takes the median of the others."""

    node: NodeId
    public: bool
    uplink_bytes_per_s: float


def forest_of(learner: PeerProfile, peers: Sequence[PeerProfile], stripes: int) -> tuple[Tree, ...]:
    """A tree for each stripe. All uplinks must be positive; two leaves are never linked."""
    if not peers:
        return tuple({} for _ in range(stripes))
    slots = _slots(learner, peers, stripes)
    degrees = _spread(learner, peers, slots, stripes)
    fed: dict[NodeId, set[NodeId]] = {node: set() for node in slots}
    # Who comes last hangs below the slowest: somebody else in every stripe.
    starts = [stripe * len(peers) // stripes for stripe in range(stripes)]
    turned = [[*peers[start:], *peers[:start]] for start in starts]
    return tuple(_grow(learner.node, turned[stripe], degrees[stripe], fed) for stripe in range(stripes))


def _slots(learner: PeerProfile, peers: Sequence[PeerProfile], stripes: int) -> dict[NodeId, int]:
    """How many children each node has over all stripes: stripes * len(peers) in all, at least one a stripe for the
    learner."""
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
    """Give `need` more slots to `nodes`, each to the one whose load it raises least."""
    uplinks = {peer.node: peer.uplink_bytes_per_s for peer in nodes}
    heap = [((slots[node] + 1) / uplink, order, node) for order, (node, uplink) in enumerate(uplinks.items())]
    heapify(heap)
    for _ in range(need):
        _, order, node = heap[0]
        slots[node] += 1
        # The last child of a stripe is always the learner's or another's: a peer does not feed itself.
        if node != learner.node and slots[node] >= all_slots - slots[learner.node]:
            heappop(heap)
        else:
            heapreplace(heap, ((slots[node] + 1) / uplinks[node], order, node))


def _spread(
    learner: PeerProfile, peers: Sequence[PeerProfile], slots: dict[NodeId, int], stripes: int
) -> list[dict[NodeId, int]]:
    """Degrees by stripe. Every stripe gets len(peers) slots, and as many of them from publics and learner as any
    other, give or take one."""
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
    """Cut each peer's slots into parts of at most STRIPE_DEGREE, for the stripes that need most; more in one stripe
    only where the peer is in all that still need any."""
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
    """One tree, from the top. `fed` is whom each node feeds in some stripe.

    Slots number as many as peers. Those of leaves are filled by publics only. Those of publics and learner number the
    leaves plus `spare`, and take at most `spare` publics. Were there no free slot and a peer left, then all slots of
    its kind would be filled and hence all peers of its kind placed, since peers that have slots go first.
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
    """Whether the next slot of a public is for a public: the one with more slots, where both may have it."""
    if not waiting[False] or not waiting[True] or not spare:
        return not waiting[False]
    return degrees.get(waiting[True][0], 0) > degrees.get(waiting[False][0], 0)


def _take(waiting: deque[NodeId], degrees: dict[NodeId, int], fed: set[NodeId]) -> NodeId:
    """The next of those that wait that its parent does not feed yet, if one is near. Sockets share an uplink evenly: of
    an uplink that is a little too slow, all that is missing would be missing to the few children in two stripes."""
    has_slots = degrees.get(waiting[0], 0) > 0
    for place in range(min(NEAR, len(waiting))):
        node = waiting[place]
        if node not in fed and (degrees.get(node, 0) > 0) == has_slots:
            del waiting[place]
            return node
    return waiting.popleft()
