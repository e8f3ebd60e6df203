"""What a simulated swarm costs: the learner's time, paid nodes' time, metered traffic."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.capacity.fleet import GB
from swarm.capacity.scenario import Scenario
from swarm.sim.capacity_fleet import HOUR_S, Node

LEARNER = "learner"
"""The class under which the learner's own costs are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSums:
    """Since the start, by device class."""

    total: float
    tokens: float
    by_class: dict[str, float]
    rollouts: dict[str, int]


class Costs:
    """All costs of a run. Prices change when nodes are activated or go."""

    def __init__(self, scenario: Scenario) -> None:
        self._egress = scenario.learner.egress_usd_per_gb
        self._upload_bytes = scenario.rollout.upload_bytes_per_token
        self._rates = defaultdict[str, float](float, {LEARNER: scenario.learner.price_per_h})
        self._prices: dict[str, float] = {}
        self._sums = defaultdict[str, float](float)
        self._rollouts: Counter[str] = Counter()
        self._tokens = 0.0
        self._since = 0.0
        self._stepped = 0.0

    @property
    def per_hour(self) -> float:
        """What time costs now, without traffic."""
        return sum(self._rates.values())

    def pay(self, node: Node, price_per_hour: float, *, now: float) -> None:
        """From now on the node's time costs so much."""
        self._accrue(now)
        self._rates[node.kind.name] += price_per_hour - self._prices.get(node.name, 0.0)
        self._prices[node.name] = price_per_hour

    def moved(self, node: Node | None, down: float, up: float) -> None:
        """Bytes that a node, or the learner (None), received and sent."""
        if node is None:
            self._sums[LEARNER] += up / GB * self._egress
        else:
            cost = down / GB * node.worker.down_cost_per_gb + up / GB * node.worker.up_cost_per_gb
            self._sums[node.kind.name] += cost

    def generated(self, node: Node, tokens: Sequence[float]) -> None:
        """Rollouts of these lengths were handed in."""
        self._rollouts[node.kind.name] += len(tokens)
        self._tokens += sum(tokens)
        self.moved(node, 0.0, sum(tokens) * self._upload_bytes)

    def stepped(self, *, now: float) -> float:
        """What was spent since the last step."""
        self._accrue(now)
        before, self._stepped = self._stepped, sum(self._sums.values())
        return self._stepped - before

    def sums(self, *, now: float) -> CostSums:
        self._accrue(now)
        return CostSums(
            total=sum(self._sums.values()),
            tokens=self._tokens,
            by_class=dict(self._sums),
            rollouts=dict(self._rollouts),
        )

    def _accrue(self, now: float) -> None:
        hours = (now - self._since) / HOUR_S
        self._since = now
        for name, rate in self._rates.items():
            self._sums[name] += rate * hours
