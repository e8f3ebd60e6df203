"""The publics that a node calls in its rounds: a few at a time, so that their connections stay open.

A call on a kept connection takes a fifth of the bytes of one that has to be opened. Partners are exchanged one by one,
so that everybody is called in the course of time, and what is known spreads over a random graph of changing edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from swarm.gossip.rules import GossipRules
from swarm.gossip.table import Peer
from swarm.types import NodeId


class Partners:
    """Chosen at random among those that may be called."""

    def __init__(self, rules: GossipRules, random: Random) -> None:
        self._rules = rules
        self._random = random
        self._chosen: dict[NodeId, None] = {}
        self._rounds = 0

    def next_round(self) -> None:
        """Every few rounds the partner of longest standing is let go."""
        self._rounds += 1
        if self._rounds % self._rules.partner_rounds == 0 and self._chosen:
            del self._chosen[next(iter(self._chosen))]

    def some(self, count: int, peers: Sequence[Peer]) -> list[Peer]:
        """`count` partners, after those that are not among `peers` any more were replaced."""
        by_node = {peer.signed.node: peer for peer in peers}
        self._chosen = {node: None for node in self._chosen if node in by_node}
        free = [node for node in by_node if node not in self._chosen]
        missing = min(self._rules.partners - len(self._chosen), len(free))
        self._chosen.update(dict.fromkeys(self._random.sample(free, max(0, missing))))
        chosen = self._random.sample(list(self._chosen), min(count, len(self._chosen)))
        return [by_node[node] for node in chosen]
