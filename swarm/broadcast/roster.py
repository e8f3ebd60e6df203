"""Who takes part in the broadcast: the learner's word to everybody that is linked with it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from swarm.types import Address, Id, NodeId
from swarm.wire import Message

MAX_MEMBERS = 256
"""A roster names the nodes that one node may be linked with: 32 in a mesh, parents and children in a forest."""

ADDRESSES = 4
"""Addresses of one member: IPv4 and IPv6, inside and outside."""

MAX_STRIPES = 64
"""Four times as many as the planner makes."""

MaybeId = Annotated[str, msgspec.Meta(max_length=64)]
Ids = Annotated[tuple[Id, ...], msgspec.Meta(max_length=MAX_MEMBERS)]


class Member(Message, frozen=True):
    """One receiver. Without addresses it is a leaf: it dials, and nobody can dial it."""

    node: Id
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=ADDRESSES)] = ()

    @property
    def is_leaf(self) -> bool:
        return not self.addresses


class Roster(Message, frozen=True):
    """The receivers that a node is to be linked with, itself among them."""

    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_MEMBERS)]


class Routing(Message, frozen=True):
    """One node's part in the trees of a version: by stripe its parent ("" is none) and its children; the pace."""

    parents: Annotated[tuple[MaybeId, ...], msgspec.Meta(max_length=MAX_STRIPES)]
    children: Annotated[tuple[Ids, ...], msgspec.Meta(max_length=MAX_STRIPES)]
    chunks_per_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)]


def whom_to_dial(me: NodeId, roster: Roster) -> dict[NodeId, tuple[Address, ...]]:
    """The members that `me` dials: of two publics the smaller id dials, a leaf dials all publics."""
    own = next((member for member in roster.members if member.node == me), None)
    if own is None:
        return {}
    return {
        NodeId(member.node): member.addresses
        for member in roster.members
        if not member.is_leaf and member.node != me and (own.is_leaf or me < member.node)
    }
