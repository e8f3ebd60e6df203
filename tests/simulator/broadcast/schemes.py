"""Plans by name: what the planner offers, and chain, binary tree and star, which ours are measured against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from swarm.broadcast.forest.planner import PeerProfile, PlanOf, Tree, VersionPlan, plan_of, slots_of
from swarm.types import NodeId

ARITIES = {"chain": 1, "tree": 2, "star": None}
SCHEMES = ("mesh", "forest", *ARITIES)


def planner_named(scheme: str | None) -> PlanOf:
    """Plans of `scheme`, one of SCHEMES; None leaves the choice to the planner."""
    if scheme in ARITIES:
        return partial(_narrow_plan, scheme)
    assert scheme is None or scheme in SCHEMES, scheme
    return partial(plan_of, scheme=scheme)  # type: ignore[arg-type]


def _narrow_plan(scheme: str, learner: PeerProfile, peers: Sequence[PeerProfile], encoded_bytes: int) -> VersionPlan:
    """The plan of a forest, with another tree."""
    forest = plan_of(learner, peers, encoded_bytes, scheme="forest")
    everybody, arity = list(forest.peers.values()), ARITIES[scheme]
    tree = _narrow(learner.node, everybody, arity) if arity else {peer.node: learner.node for peer in everybody}
    return replace(forest, scheme=scheme, trees=(tree,))


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
