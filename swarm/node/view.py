"""A node's view of the swarm as `status` shows it."""

from __future__ import annotations

from typing import Any

from swarm.gossip.leaves import Leaf
from swarm.gossip.membership import Membership
from swarm.gossip.table import Peer
from swarm.types import NodeId, VersionId

NO_RELAY = (
    "no public node besides the learner: every sampler fetches all weights from the learner alone, and finds nobody "
    "else if it goes. Add one: echo-node join --role relay --bootstrap HOST, on a machine that others can reach"
)


def view_status(core: Membership, *, now: float) -> dict[str, Any]:
    """Publics, leaves and homes, each with its state, version and lag."""
    view = core.view
    newest = view.newest
    publics = [_public(peer, newest, view.table.is_suspect(peer, now=now), now) for peer in view.table]
    others = [peer for peer in view.table if peer.signed.record.role != "learner"]
    others_public = bool(others) or (view.is_public and view.owner.role != "learner")
    return {
        "reachability": view.owner.reachability,
        "addresses": [address.url for address in view.own.record.addresses],
        "newest": str(newest) if newest else None,
        "publics": sorted(publics, key=lambda public: (public["role"] != "learner", public["node"])),
        "dead": len(view.table.dead),
        "homes": [home.node for home in core.homes.homes],
        "leaves": [_leaf(node, leaf, newest, now) for node, leaf in view.leases.leaves.items()],
        "leaves_elsewhere": sum(peer.signed.record.profile.leaves for peer in view.table),
        "advice": None if others_public else NO_RELAY,
    }


def _public(peer: Peer, newest: VersionId | None, suspect: bool, now: float) -> dict[str, Any]:
    record = peer.signed.record
    return {
        "node": peer.signed.node,
        "role": record.role,
        "state": "suspect" if suspect else "alive",
        "address": record.addresses[0].url,
        "beat_s": round(max(0.0, now - peer.heard_at), 1),
        "leaves": record.profile.leaves,
        **_version(record.profile.held, newest),
    }


def _leaf(node: NodeId, leaf: Leaf, newest: VersionId | None, now: float) -> dict[str, Any]:
    profile = leaf.signed.record.profile if leaf.signed else None
    return {
        "node": node,
        "role": leaf.signed.record.role if leaf.signed else None,
        "beat_s": round(now - leaf.heard_at, 1),
        **_version(profile.held if profile else None, newest),
    }


def _version(held: VersionId | None, newest: VersionId | None) -> dict[str, Any]:
    """What a node said it holds, and how many versions that is behind; null where one of the two is unknown."""
    lag = newest.version - held.version if newest and held and newest.incarnation == held.incarnation else None
    return {"held": str(held) if held else None, "lag": lag}
