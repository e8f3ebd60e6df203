"""What a simulated swarm costs, by the learner's own book."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.capacity.cost import CostBook
from swarm.capacity.scenario import Scenario
from swarm.sim.capacity_fleet import Node

LEARNER = "learner"
"""The class under which the learner's own costs are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSums:
    """Since the start; costs and rollouts by device class."""

    total: float
    tokens: int
    by_class: dict[str, float]
    rollouts: dict[str, int]


class Costs:
    """The cost book of a run, in which all nodes have accounts. Uploads of rollouts are metered traffic too."""

    def __init__(self, scenario: Scenario, nodes: Iterable[Node]) -> None:
        self._upload_bytes = scenario.rollout.upload_bytes_per_token
        self._stepped = 0.0
        self._book = CostBook(
            learner_cost_per_hour=scenario.learner.price_per_h,
            learner_up_cost_per_gb=scenario.learner.egress_usd_per_gb,
            now=0.0,
        )
        for node in nodes:
            one = node.worker
            prices = (one.cost_per_hour, one.down_cost_per_gb, one.up_cost_per_gb)
            self._book.joined(one.name, one.device_class, *prices, now=0.0)

    def per_hour(self, *, now: float) -> float:
        """What time costs now, without traffic."""
        return self._book.figures(now).rate_per_hour

    def pay(self, node: Node, *, now: float) -> None:
        """Whether the node's time is paid may have changed."""
        if node.paid:
            self._book.activated(node.name, now=now)
        else:
            self._book.stood_by(node.name, now=now)

    def moved(self, node: Node | None, down: float, up: float) -> None:
        """Bytes that a node, or the learner (None), received and sent."""
        if node is None:
            self._book.learner_traffic(down_bytes=down, up_bytes=up)
        else:
            self._book.traffic(node.name, down_bytes=down, up_bytes=up)

    def generated(self, node: Node, tokens: Sequence[float]) -> None:
        """Rollouts of these lengths were handed in."""
        total = round(sum(tokens))
        self._book.accepted(node.name, rollouts=len(tokens), tokens=total)
        self._book.traffic(node.name, down_bytes=0.0, up_bytes=total * self._upload_bytes)

    def stepped(self, *, now: float) -> float:
        """What was spent since the last step."""
        self._book.stepped()
        before, self._stepped = self._stepped, self._book.figures(now).total
        return self._stepped - before

    def sums(self, *, now: float) -> CostSums:
        found = self._book.figures(now)
        by_class = {name: tally.cost for name, tally in found.by_class.items()}
        return CostSums(
            total=found.total,
            tokens=found.tokens,
            by_class={LEARNER: found.total - sum(by_class.values()), **by_class},
            rollouts={name: tally.rollouts for name, tally in found.by_class.items()},
        )
