"""What the learner knows about its samplers: counts for `status`, and events for other parts of the node."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.bounded import Bounded
from swarm.rollout.journal.entries import GroupDropped, RolloutAccepted
from swarm.rollout.messages import DroppedRollouts, Offer
from swarm.rollout.plane.effects import Judged
from swarm.rollout.plane.nodes import MAX_NODES
from swarm.types import NodeId, VersionId

TURNS_WEIGHT = 1 / 64  # Of the last rollout in the mean number of turns: as for lengths in nodes.py
RECENT_S = 20.0  # What was so long ago counts a third: a few steps of a fast run, a batch or two of a slow sampler


class Recent:
    """Amounts by name, of which those of late count most. Times are monotonic seconds."""

    def __init__(self, *, now: float) -> None:
        self._began_at = self._at = now
        self._sums: dict[str, float] = {}

    def add(self, name: str, amount: float, *, now: float) -> None:
        faded = math.exp((self._at - now) / RECENT_S)
        self._sums, self._at = {one: value * faded for one, value in self._sums.items()}, now
        self._sums[name] = self._sums.get(name, 0.0) + amount

    def per_s(self, name: str, *, now: float) -> float:
        # A young run has not filled the window yet. Divide by at least a second, or the rate would be noise.
        window_s = max(1.0, -RECENT_S * math.expm1((self._began_at - now) / RECENT_S))
        return round(self._sums.get(name, 0.0) * math.exp((self._at - now) / RECENT_S) / window_s, 1)


@dataclass(slots=True, kw_only=True)
class SamplerStats:
    """What the learner knows about one sampler. `recent` are rollouts and tokens that were accepted, seconds that
    rewards took, and bytes of weights `up` and `down`, as far as it tells."""

    recent: Recent
    verdicts: Counter[str] = field(default_factory=Counter)
    installed: VersionId | None = None
    samples: int = 0
    heard_at: float = 0.0
    questions: int = 0
    reward_failures: int = 0
    offer: Offer | None = None

    def offered(self, offer: Offer) -> None:
        """Take what it says of itself, at `heard_at`."""
        before, self.offer = self.offer or offer, offer
        self.recent.add("up", max(0, offer.sent_bytes - before.sent_bytes), now=self.heard_at)
        self.recent.add("down", max(0, offer.received_bytes - before.received_bytes), now=self.heard_at)


MAX_LIVES = 16  # Of one node that are told apart: all but the first of so many copies hear at their second beat


class Lives:
    """The processes of one node. A restart has one follow another; if an earlier one speaks after a later one came,
    there are two at the same time, and the later one has to give way."""

    def __init__(self) -> None:
        self._came: list[int] = []
        self._doubled: set[int] = set()

    def hear(self, life: int) -> bool:
        """Return whether `life` has to give way. 0 is none of them."""
        if not life:
            return False
        if life not in self._came:
            self._came = [*self._came, life][-MAX_LIVES:]
        self._doubled = {*self._doubled, *self._came[self._came.index(life) + 1 :]} & {*self._came}
        return life in self._doubled


class Tally:
    """Verdicts and drops, in total and by node. `lost`: as many answers as could be drawn of what vanished with its
    nodes. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.samplers: dict[NodeId, SamplerStats] = {}
        self.verdicts: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.lost = 0.0
        self._dropped_of: dict[NodeId, Counter[str]] = {}
        self._engines: Bounded[NodeId, str] = Bounded(MAX_NODES)
        self._lives: Bounded[NodeId, Lives] = Bounded(MAX_NODES)
        self.recent = Recent(now=0.0)
        self.turns = 1.0  # Of a rollout, in the mean of the last ones

    def begin(self, *, now: float) -> None:
        self.recent = Recent(now=now)

    def judged(self, judged: list[Judged], *, now: float) -> None:
        """Count the verdicts of one submission."""
        for one in judged:
            self.verdicts[one.counted_as] += 1
            if one.node in self.samplers:
                self.samplers[one.node].verdicts[one.counted_as] += 1
                self.samplers[one.node].recent.add("rollouts", one.counted_as == "accepted", now=now)
        self.recent.add("rollouts", sum(one.counted_as == "accepted" for one in judged), now=now)

    def accepted(self, records: Sequence[object], watch: SamplerWatch, *, now: float) -> None:
        """Count the tokens of the accepted rollouts among `records`, and tell `watch` about these by node."""
        lengths: dict[NodeId, list[int]] = {}
        for one in records:
            if isinstance(one, RolloutAccepted):
                drawn = [(NodeId(turn.node), turn.end - turn.start) for turn in one.rollout.turns_by(one.node)]
                self.turns += TURNS_WEIGHT * (max(1, len(one.rollout.turns)) - self.turns)
                for node, length in drawn:
                    lengths.setdefault(node, []).append(length)
        for node, tokens in lengths.items():
            watch.accepted(node, tokens)
            self.recent.add("tokens", sum(tokens), now=now)
            if node in self.samplers:
                self.samplers[node].recent.add("tokens", sum(tokens), now=now)

    def overloaded(self, node: NodeId) -> None:
        """Count a submission that was refused unread as one, whatever it held. `node` is only the claimed sender."""
        self.verdicts["overloaded"] += 1
        if node in self.samplers:
            self.samplers[node].verdicts["overloaded"] += 1

    def vanished(self, node: NodeId, lost: float) -> None:
        """Forget a node that fell silent. It can have drawn `lost` answers of what it holds, but at most what its
        engine draws at once: the rest it asked for ahead."""
        stats = self.samplers.pop(node, None)
        self.lost += min(lost, stats.offer.samples_at_once) if stats and stats.offer else 0.0

    def is_elsewhere(self, node: NodeId, life: int) -> bool:
        """Return whether another process was at work as `node` when that of `life` came, and still is. MAX_NODES are
        known, the last ones."""
        lives = self._lives[node] = self._lives.get(node, Lives())
        return lives.hear(life)

    def runs(self, node: NodeId, engine_class: str) -> None:
        """Note the class of a sampler's engine, which is asked for after it left, too. MAX_NODES are known, the last
        ones. Of who names another class than before none is: its answers of before would be judged by it."""
        if self._engines.setdefault(node, engine_class) != engine_class:
            self._engines[node] = ""

    def engine_of(self, node: NodeId) -> str:
        """Return the class of engine that a sampler named last; "" if unknown."""
        return self._engines.get(node, "")

    def drop(self, dropped: GroupDropped) -> None:
        """Count dropped rollouts by author. At most MAX_NODES authors are remembered."""
        self.dropped[dropped.reason] += dropped.rollouts
        for node, count in dropped.nodes.items():
            if node in self._dropped_of or len(self._dropped_of) < MAX_NODES:
                self._dropped_of.setdefault(node, Counter())[dropped.reason] += count

    def dropped_of(self, node: NodeId) -> tuple[DroppedRollouts, ...]:
        """Return how many accepted rollouts of `node` were dropped, by reason."""
        counts = self._dropped_of.get(node, Counter())
        return tuple(DroppedRollouts(reason=reason, rollouts=count) for reason, count in sorted(counts.items()))

    def status(
        self, *, now: float, why_idle: Callable[[NodeId], str], is_barred: Callable[[NodeId], bool]
    ) -> dict[str, Any]:
        """Return the figures for `status`. `why_idle` says why a node gets no leases, or "", and `is_barred` whether
        that is for good."""
        return {
            "rollouts_per_s": self.recent.per_s("rollouts", now=now),
            "tokens_per_s": self.recent.per_s("tokens", now=now),
            "verdicts": dict(self.verdicts),
            "rollouts_dropped": dict(self.dropped),
            "rollouts_lost": round(self.lost, 1),
            "samplers": [
                {
                    "node": node,
                    "installed": str(stats.installed) if stats.installed else None,
                    "samples": stats.samples,
                    "rollouts_per_s": stats.recent.per_s("rollouts", now=now),
                    "tokens_per_s": stats.recent.per_s("tokens", now=now),
                    "up_bytes_per_s": stats.recent.per_s("up", now=now),
                    "down_bytes_per_s": stats.recent.per_s("down", now=now),
                    "silent_s": round(now - stats.heard_at, 1),
                    "engine": self.engine_of(node),
                    "device_class": stats.offer.device_class if stats.offer else "",
                    "nickname": stats.offer.nickname if stats.offer else "",
                    "cost_per_hour": stats.offer.cost_per_hour if stats.offer else 0.0,
                    "verdicts": dict(stats.verdicts),
                    "dropped": dict(self._dropped_of.get(node, {})),
                    "reward_failures": stats.reward_failures,
                    "reward_s_per_s": stats.recent.per_s("reward_s", now=now),
                    "standby": why_idle(node),
                    "barred": is_barred(node),
                }
                for node, stats in self.samplers.items()
            ],
        }


class SamplerWatch:
    """Is told about samplers on the event loop, so each call must return at once. This one does nothing."""

    def offered(self, node: NodeId, offer: Offer) -> None:
        """Called at each beat that carries the sampler's own description and prices."""

    def installed(self, node: NodeId, version: VersionId) -> None:
        """Called when a sampler's engine holds `version`."""

    def accepted(self, node: NodeId, tokens: Sequence[int]) -> None:
        """Called when rollouts of these lengths in tokens were accepted for training."""

    def gone(self, node: NodeId, *, vanished: bool) -> None:
        """Called when a sampler left, or `vanished` after it missed three beats."""
