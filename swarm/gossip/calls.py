"""Which nodes a node calls: a public its partners, a leaf its homes.

A leaf has one poll under way to each home. It repeats a failed poll after a short back-off. It replaces a home that
failed four times in a row or has no room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from swarm.gossip.records import GossipRules, Post
from swarm.gossip.table import Peer
from swarm.types import NodeId, VersionId

MAX_FAILURES = 4  # At 10 % loss each way one poll in five fails, and four in a row fail one time in 800


class Partners:
    """Random publics that this one keeps calling for a while."""

    def __init__(self, rules: GossipRules, random: Random) -> None:
        self._rules = rules
        self._random = random
        self._chosen: dict[NodeId, None] = {}
        self._rounds = 0

    def next_round(self) -> None:
        """Drop the oldest partner every few rounds."""
        self._rounds += 1
        if self._rounds % self._rules.partner_rounds == 0 and self._chosen:
            del self._chosen[next(iter(self._chosen))]

    def some(self, count: int, peers: Sequence[Peer]) -> list[Peer]:
        """Replace the partners that are no longer among `peers`, and return `count` random partners."""
        by_node = {peer.signed.node: peer for peer in peers}
        self._chosen = {node: None for node in self._chosen if node in by_node}
        free = [node for node in by_node if node not in self._chosen]
        missing = min(self._rules.partners - len(self._chosen), len(free))
        self._chosen.update(dict.fromkeys(self._random.sample(free, max(0, missing))))
        chosen = self._random.sample(list(self._chosen), min(count, len(self._chosen)))
        return [by_node[node] for node in chosen]


@dataclass(slots=True, kw_only=True)
class Home:
    """A home that this leaf polls. `told` is the order of our record that it has, as far as we know; `knows` is the
    version that it knows. `poll` is under way."""

    node: NodeId
    next_at: float
    poll: Post | None = None
    failures: int = 0
    told: int = -1
    knows: VersionId | None = None
    served: bool = False


class Homes:
    def __init__(self, rules: GossipRules, random: Random) -> None:
        self._rules = rules
        self._random = random
        self.homes: list[Home] = []

    def choose(self, candidates: Sequence[NodeId], *, last_resort: NodeId | None, now: float) -> None:
        """Fill up the homes from `candidates`, and give up the last resort once there are others.

        The first polls are spread over a round, so that the homes do not answer in step for ever.
        """
        if last_resort not in candidates:
            self.homes = [home for home in self.homes if home.node != last_resort]
        taken = {home.node for home in self.homes}
        free = [node for node in candidates if node not in taken]
        self._random.shuffle(free)
        for node in free[: max(0, self._rules.homes - len(self.homes))]:
            soon = self._random.uniform(0.0, self._rules.round_s) if self.homes else 0.0
            self.homes.append(Home(node=node, next_at=now + soon))

    def keep(self, is_known: Callable[[NodeId], bool]) -> None:
        """Give up homes that are no longer known."""
        self.homes = [home for home in self.homes if is_known(home.node)]

    def due(self, *, now: float) -> list[Home]:
        return [home for home in self.homes if home.poll is None and home.next_at <= now]

    def deadlines(self) -> list[float]:
        return [home.next_at for home in self.homes if home.poll is None]

    def polled_by(self, call: Post) -> Home | None:
        return next((home for home in self.homes if home.poll is call), None)

    def answered(self, home: Home, *, full: bool, held_s: float, now: float) -> None:
        """Poll again at once, but no more often than every quarter of a hold, whatever the home answers."""
        home.poll, home.failures, home.served = None, 0, True
        home.next_at = now + max(0.0, self._rules.hold_s / 4 - held_s)
        if full:
            self.homes.remove(home)

    def failed(self, home: Home, *, took_s: float, patience: int, now: float) -> None:
        """Try again after a short while, or give the home up after `patience` failures."""
        home.poll = None
        home.failures += 1
        # The home may have lost what it knew about this leaf.
        if home.failures > 1:
            home.told, home.knows = -1, None
        home.next_at = now + max(0.0, self._rules.round_s * home.failures - took_s)
        if home.failures >= patience:
            self.homes.remove(home)
