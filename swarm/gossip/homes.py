"""A leaf's side: which publics it polls, and when.

Each slot has one poll under way at a time. A poll that failed is repeated after a short back-off; a home that failed
four times in a row, or has no room, is exchanged for another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from swarm.gossip.records import GossipRules
from swarm.types import NodeId, VersionId

MAX_FAILURES = 4  # At 10 % loss each way a poll fails one time in five, four in a row do one time in 800


@dataclass(slots=True, kw_only=True)
class Home:
    """One slot. `told` is the order of our record that this home is known to have, `knows` the version; `ticket` its
    poll under way, which named the version `asked`."""

    node: NodeId
    next_at: float
    ticket: int | None = None
    asked: VersionId | None = None
    failures: int = 0
    told: int = -1
    knows: VersionId | None = None
    served: bool = False


class Homes:
    """The homes of a leaf."""

    def __init__(self, rules: GossipRules, random: Random) -> None:
        self._rules = rules
        self._random = random
        self.homes: list[Home] = []

    def wants_others(self, last_resort: NodeId | None) -> bool:
        return len(self.homes) < self._rules.homes or any(home.node == last_resort for home in self.homes)

    def choose(self, candidates: Sequence[NodeId], *, last_resort: NodeId | None, now: float) -> None:
        """Fill every slot from `candidates`, and give up the last resort once there are others.

        The first polls are spread over the time of a call, so that they do not come round together.
        """
        if last_resort not in candidates:
            self.homes = [home for home in self.homes if home.node != last_resort]
        taken = {home.node for home in self.homes}
        free = [node for node in candidates if node not in taken]
        self._random.shuffle(free)
        for node in free[: max(0, self._rules.homes - len(self.homes))]:
            soon = self._random.uniform(0.0, self._rules.call_s) if self.homes else 0.0
            self.homes.append(Home(node=node, next_at=now + soon))

    def keep(self, is_known: Callable[[NodeId], bool]) -> None:
        """Give up homes that are no longer known."""
        self.homes = [home for home in self.homes if is_known(home.node)]

    def due(self, *, now: float) -> list[Home]:
        return [home for home in self.homes if home.ticket is None and home.next_at <= now]

    def deadlines(self) -> list[float]:
        return [home.next_at for home in self.homes if home.ticket is None]

    def of_ticket(self, ticket: int) -> Home | None:
        return next((home for home in self.homes if home.ticket == ticket), None)

    def answered(self, home: Home, *, full: bool, held_s: float, now: float) -> None:
        """Poll again at once; not faster than a quarter of a hold, whatever the home answers."""
        home.ticket, home.failures, home.served = None, 0, True
        home.next_at = now + max(0.0, self._rules.hold_s / 4 - held_s)
        if full:
            self.homes.remove(home)

    def failed(self, home: Home, *, took_s: float, now: float) -> bool:
        """True if the home is given up."""
        home.ticket = None
        home.failures += 1
        # The home may have lost what it knew of us.
        if home.failures > 1:
            home.told, home.knows = -1, None
        home.next_at = now + max(0.0, self._rules.round_s * home.failures - took_s)
        if home.failures >= MAX_FAILURES:
            self.homes.remove(home)
            return True
        return False
