"""What the membership core asks of its shell: a closed union of frozen facts."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.gossip.messages import Exchange
from swarm.gossip.records import SignedRecord
from swarm.types import Address, NodeId, VersionId


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Post `message` to `node` and hand the answer, or the failure, back under `ticket`."""

    ticket: int
    node: NodeId
    address: Address
    message: Exchange
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Greet:
    """Say hello to a bootstrap and hand its record in: none is known, or it is time to look across a partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """Answer every poll that is held open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLearned:
    """A newer version exists."""

    version: VersionId
    sealed: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Appeared:
    """A public that was not known, or was dead."""

    signed: SignedRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """A public whose beat or record is too old, or that has left."""

    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafGone:
    """A leaf that has not polled this home for the length of its lease."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRaised:
    """Persist the generation before anything else is sent."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Illegal input of a peer, to be counted."""

    reason: str


Effect = Call | Greet | Wake | HeadLearned | Appeared | Died | LeafGone | GenerationRaised | Rejected
