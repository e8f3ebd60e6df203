"""What the rollout plane's shell tells of samplers to whoever wants to know."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.rollout.entries import RolloutAccepted
from swarm.rollout.messages import Offer
from swarm.types import NodeId, VersionId


class SamplerWatch:
    """Called on the event loop, so each call returns at once. All of them do nothing here."""

    def offered(self, node: NodeId, offer: Offer) -> None:
        """What a sampler says that it is and costs, with every beat."""

    def installed(self, node: NodeId, version: VersionId) -> None:
        """A sampler's engine holds `version`."""

    def accepted(self, node: NodeId, tokens: Sequence[int]) -> None:
        """Rollouts of these lengths were accepted for training."""

    def gone(self, node: NodeId, *, vanished: bool) -> None:
        """A sampler left, or missed three beats and `vanished`."""


def tell_accepted(watch: SamplerWatch, records: Sequence[object]) -> None:
    """Of the accepted rollouts among `records`, by node."""
    lengths: dict[NodeId, list[int]] = {}
    for one in records:
        if isinstance(one, RolloutAccepted):
            lengths.setdefault(one.node, []).append(one.rollout.length)
    for node, tokens in lengths.items():
        watch.accepted(node, tokens)
