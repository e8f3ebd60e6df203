"""Whom the learner believes that a parent is too slow: the first in a tree that falls behind, not those below it.

Who is behind says so (Behind). Below a node that is behind everybody is, without any fault of their parents. So a
complaint counts only if no ancestor in that stripe complains too, or has complained a short while ago.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarm.broadcast.planner import Plan, relieved
from swarm.types import NodeId

ECHO_S = 6.0
"""So long after a node fell behind those below it may still fall behind for the same reason."""


class Relief:
    """The learner's memory of complaints: one time for each (node, stripe) of the last ECHO_S."""

    def __init__(self) -> None:
        self._heard: dict[tuple[NodeId, int], float] = {}

    def plan(self, plan: Plan, complaints: Iterable[tuple[NodeId, int]], *, now: float) -> Plan:
        """`plan`, changed for those who have a reason to complain."""
        self._heard = {key: at for key, at in self._heard.items() if now - at < ECHO_S}
        new = [(node, stripe) for node, stripe in complaints if (node, stripe) not in self._heard]
        self._heard.update((key, now) for key in new)
        first = [(node, stripe) for node, stripe in new if not self._is_echo(plan, node, stripe)]
        return relieved(plan, first) if first else plan

    def _is_echo(self, plan: Plan, node: NodeId, stripe: int) -> bool:
        tree = plan.trees[stripe]
        above = tree.get(node)
        while above is not None and (above, stripe) not in self._heard:
            above = tree.get(above)
        return above is not None
