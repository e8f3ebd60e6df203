"""The nodes of a simulated swarm: which are present or rented, what is on their disks, and what they cost.

Theory of operation. A node comes and goes by itself: it is present for `mean_session_h` on average, then away as long
as its class's `duty` implies, both exponential. It vanishes without notice in `mean_session_h / mtbf_h` of all cases;
otherwise it says goodbye and hands its samples back. A volunteer that is present fetches weights and stays warm: it
waits for work, free of charge. A rented class is on offer while it is "there", and starts when the learner wants it. A
node's disk survives its absences, but a machine that is given back loses it. At the start, the disks of present nodes
hold version 0, which is the base model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from swarm.pay.cost import CostBook, CostFigures
from swarm.pay.fleet import Terms, Worker
from swarm.pay.prices import HOUR_S
from swarm.plan.scenario import FleetClass, Scenario, class_workers
from swarm.plan.simulate.sampler import Sampler

MIN_ABSENCE_S = 600.0  # Smallest mean absence: a host comes back, or another takes its place


@dataclass(slots=True, kw_only=True)
class Node:
    """One machine. `sampler` is its engine while that has weights. `wanted`: the learner gives it work. `known`: the
    learner believes it is present. `disk`: the newest version on its disk. `busy`: a transfer to it is under way.
    `life` rises with each change of presence, which marks events scheduled for an earlier one as outdated."""

    worker: Worker
    kind: FleetClass
    there: bool
    known: bool = False
    wanted: bool = False
    running: bool = False
    busy: bool = False
    life: int = 0
    disk: int | None = None
    sampler: Sampler | None = None

    @property
    def name(self) -> str:
        return self.worker.name

    @property
    def ready(self) -> bool:
        """Whether it holds weights and could generate."""
        return self.sampler is not None

    @property
    def paid(self) -> bool:
        """Whether its time is being paid."""
        return self.there and (self.wanted and self.ready if self.kind.volunteer else self.running)

    def session_s(self, random: Random) -> float:
        return random.expovariate(1 / (self.kind.mean_session_h * HOUR_S))

    def absence_s(self, random: Random) -> float:
        mean_s = self.kind.mean_session_h * HOUR_S * (1 - self.kind.duty) / self.kind.duty
        return random.expovariate(1 / max(MIN_ABSENCE_S, mean_s))

    def vanishes(self, random: Random) -> bool:
        """Draw whether it leaves without notice."""
        return random.random() < self.kind.mean_session_h / self.kind.mtbf_h


def nodes_of(scenario: Scenario, random: Random) -> dict[str, Node]:
    """Return all nodes by name; each is present with the probability of its class's duty."""
    nodes: dict[str, Node] = {}
    for kind in scenario.fleet:
        for worker in class_workers(scenario, kind, kind.count, random=random):
            there = random.random() < kind.duty
            nodes[worker.name] = Node(worker=worker, kind=kind, there=there, disk=0 if there else None)
    return nodes


class Costs:
    """The cost book of a run, with an account for every node. Uploads of rollouts are metered traffic too."""

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
            self._book.joined(one.name, Terms(one.device_class, prices), now=0.0)

    def pay(self, node: Node, *, now: float) -> None:
        """Update whether the node is paid."""
        if node.paid:
            self._book.activated(node.name, now=now)
        else:
            self._book.stood_by(node.name, now=now)

    def moved(self, node: Node | None, down: float, up: float) -> None:
        """Count bytes that a node, or the learner (None), received and sent."""
        if node is None:
            self._book.learner_sent(up)
        else:
            self._book.traffic(node.name, down_bytes=down, up_bytes=up)

    def generated(self, node: Node, tokens: Sequence[float]) -> None:
        """Count handed-in rollouts of these lengths."""
        total = round(sum(tokens))
        self._book.accepted(node.name, rollouts=len(tokens), tokens=total)
        self._book.traffic(node.name, down_bytes=0.0, up_bytes=total * self._upload_bytes)

    def stepped(self, *, now: float) -> float:
        """Count a step, and return what was spent since the previous one."""
        self._book.stepped()
        before, self._stepped = self._stepped, self._book.figures(now).total
        return self._stepped - before

    def figures(self, *, now: float) -> CostFigures:
        return self._book.figures(now)
