"""What is known of the nodes that work on samples: when they were heard, how fast they are, what they hold."""

from __future__ import annotations

import math
from collections.abc import Collection, KeysView
from dataclasses import dataclass, field

from swarm.bounded import Bounded
from swarm.rollout.plane.rules import smoothed
from swarm.types import GroupId, NodeId

MISSED_BEATS = 3  # Beats after which a node counts as gone: one may be lost and one late
LIMIT_FACTOR = 8.0
"""A lease's time limit is this factor times the time for its longest completion at the sampler's measured rate. It
leaves room for a shared batch, a weight swap or a slower engine: failing long samples would favour short answers."""

SLOWEST_TOKENS_PER_S = 2.0  # Sets the longest limit of any lease: a slower node would keep samples from others
MIN_LIMIT_S = 30.0  # Shortest time limit of a lease: a short completion may wait behind a batch and an install
MAX_HELD = 8192  # Samples that a node may hold: twice what it may ask for, since it asks one batch ahead of its engine
UNPROVEN_HELD = 256
"""Samples that a node may hold before its first accepted answer: two batches of an ordinary engine. New keys cost
nothing, and a node that never answers keeps its leases from others for a while."""

NEW_ANSWERS = 64
"""Answers of a node that is new, and may hold a quarter of a batch only: as many as are audited of it."""

MIN_NEW_HELD = 32  # Or this many: a small engine's places, and few enough to be drawn again
LENGTH_WEIGHT = 1 / 64  # Of the last answer in the mean length of answers
MAX_NODES = 4096  # Samplers that the table remembers; the table of publics has the same bound


@dataclass(slots=True, kw_only=True)
class NodeState:
    """What the table knows of one sampler. `held` says when each of its samples is overdue. `tokens_per_s` is its own
    report of how fast one sample grows (0: unknown). It may hold `most` samples: few while it has given less than
    NEW_ANSWERS `answers`, and only one after it kept a sample past its limit. `caller` is the address that it calls
    from, "" if that says nothing. `measured`: the audit knows what honest engines of its class do."""

    heard_at: float
    measured: bool = False
    caller: str = ""
    tokens_per_s: float = 0.0
    most: int = UNPROVEN_HELD
    answers: int = 0
    held: dict[tuple[GroupId, int], float] = field(default_factory=dict)


class Nodes:
    """The samplers that were heard lately. What they hold is kept by groups.LeaseTable."""

    def __init__(self, *, beat_s: float, time_limit_s: float, unproven_held: int = UNPROVEN_HELD) -> None:
        self._unproven_held = min(unproven_held, UNPROVEN_HELD)
        self._max_limit_s = time_limit_s
        self._silence_s = MISSED_BEATS * beat_s
        self._nodes: dict[NodeId, NodeState] = {}
        self._mean_tokens = math.inf
        self._doubted: dict[NodeId, str] = {}
        self._left: Bounded[NodeId, str] = Bounded(MAX_NODES)

    def held_by(self, node: NodeId) -> Collection[tuple[str, int]]:
        """Return the samples that are leased to `node` now, by group and index."""
        state = self._nodes.get(node)
        return () if state is None else state.held.keys()

    def answer_s(self, node: NodeId) -> float:
        """Return how long `node` takes for a sample of mean length at its own rate; 0 if either is not known yet."""
        state = self._nodes.get(node)
        known = state is not None and state.tokens_per_s > 0 and math.isfinite(self._mean_tokens)
        return self._mean_tokens / state.tokens_per_s if state is not None and known else 0.0

    def room(self, node: NodeId) -> int:
        """Return how many more samples `node` may hold. The table must know the node."""
        state = self._nodes[node]
        if state.answers < NEW_ANSWERS and state.caller in self._doubted.values():
            new = [one for one in self._nodes.values() if one.answers < NEW_ANSWERS and one.caller == state.caller]
            return max(0, 1 - sum(len(one.held) for one in new))
        return max(0, state.most - len(state.held))

    def doubt(self, node: NodeId) -> None:
        """Hand newcomers from the address of `node` one sample at a time, to all of them together: it was caught, and
        may come back under other keys."""
        state = self._nodes.get(node)
        caller = self._left.get(node, "") if state is None else state.caller
        if caller and len(self._doubted) < MAX_NODES:
            self._doubted[node] = caller

    def trust(self, node: NodeId) -> None:
        """Undo what `doubt` did."""
        self._doubted.pop(node, None)

    def hear(
        self, node: NodeId, *, now: float, tokens_per_s: float = 0.0, caller: str = "", measured: bool | None = None
    ) -> bool:
        """Note a sign of life, and the node's rate, address and kind of class if they are known. Return False if the
        table of nodes is full."""
        if node not in self._nodes and len(self._nodes) >= MAX_NODES:
            return False
        state = self._nodes.setdefault(node, NodeState(heard_at=now, most=self._unproven_held))
        state.heard_at = max(state.heard_at, now)
        state.tokens_per_s = tokens_per_s or state.tokens_per_s
        state.caller = caller or state.caller
        state.measured = state.measured if measured is None else measured
        return True

    def silent(self, *, now: float) -> list[NodeId]:
        """Return the nodes that were not heard for three beats."""
        return [node for node, state in self._nodes.items() if now - state.heard_at >= self._silence_s]

    def next_due(self) -> float | None:
        """Return when the next node counts as silent or the next lease as overdue, if nothing is heard until then."""
        silences = [state.heard_at + self._silence_s for state in self._nodes.values()]
        limits = [min(state.held.values()) for state in self._nodes.values() if state.held]
        return min((*silences, *limits), default=None)

    def nodes(self) -> KeysView[NodeId]:
        """Return the nodes that were heard lately."""
        return self._nodes.keys()

    def _limit_s(self, node: NodeId, max_new_tokens: int) -> float:
        rate, max_s = self._nodes[node].tokens_per_s, self._longest_s(max_new_tokens)
        return max_s if rate <= 0 else min(max_s, max(MIN_LIMIT_S, LIMIT_FACTOR * max_new_tokens / rate))

    def _longest_s(self, max_new_tokens: int) -> float:
        """Return the longest time limit of any lease. It grows with the completion: cutting off long ones is a bias."""
        return max(self._max_limit_s, max_new_tokens / SLOWEST_TOKENS_PER_S)

    def _credit(self, node: NodeId, tokens: int) -> None:
        """Note an answer of `tokens` that `node` drew."""
        if (state := self._nodes.get(node)) is not None:
            state.answers += 1
            state.most = self._unproven_held if state.answers < NEW_ANSWERS else MAX_HELD
        self._mean_tokens = smoothed(self._mean_tokens, tokens, weight=LENGTH_WEIGHT)
