"""The second line of the audit: which rollouts are drawn again, and when evidence against a sampler is beyond doubt.

Two things are found of an audited rollout (learner/replay.py): how many of its tokens are not what its seed draws with
the weights that it names, and how far its log-probs are from those of these weights. Honest engines differ a little, by
engine, precision and device; a `Calibration` says by how much at most, as measured. In bfloat16 it depends on the model
too, so that the share of missed tokens that is expected of a class follows what most of its samplers miss in this run,
and never exceeds the calibration's. Evidence is Page's CUSUM (1954): each
observation adds the logarithm of how much likelier it is of a guilty sampler than of an honest one, and the sum never
falls below 0. A sum of LIMIT comes up by chance once in e^LIMIT observations of an honest sampler, or more rarely.

Who is audited is chosen by a secret, so that no sampler knows which of its rollouts will be. Newcomers are audited in
full as far as there is time, and their first few rollouts in any case; then a share. Nobody is ever not audited.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from swarm.net.wire import digest
from swarm.types import NodeId, rounding_of

Detector = Literal["draws", "log-probs", "drops"]

LIMIT = 20.0  # e^20 = 5e8 observations: 10,000 node-hours of 14 audited tokens a second
NEW_ROLLOUTS = 64  # Audited in full, as far as there is time
FIRST_ROLLOUTS = 8  # Audited in any case: who lies in all of them is suspect by then, and audited in full
PROVEN_ROLLOUTS = 4096  # Audited without any suspicion, and then on at PROVEN_SHARE of the share of others
PROVEN_SHARE = 0.4
SUSPICION = 0.25  # Of LIMIT: from here on a sampler is audited in full
MISSED_BY_GUILTY, MORE_BY_GUILTY = 0.03, 2.5
"""Share of tokens, and times what is expected of honest samplers, if that is more. A temperature of 0.8 for 1 misses
3 %, other weights more; what differs less changes little."""

LEAST_SAMPLERS, LEAST_TOKENS = 3, 500  # A class is known from so many samplers of so many audited tokens each
PRIOR_TOKENS = 50  # Of the calibration's share are added to those of each sampler: one missed token in bfloat16
ABOVE_USUAL = 2.0  # Times the median share of a class's samplers: what is expected of one of them
LEAST_MISSED = 3e-4  # Is expected whatever others miss: no more than that is known from a few thousand tokens

OFF_BY_HONEST, OFF_BY_GUILTY = 1e-3, 0.5  # Shares of rollouts
DROPPING_BY_HONEST, DROPPING_BY_GUILTY = 0.1, 0.5
"""Shares of steps in which a sampler drops more than MUCH_DROPPED of its leases. An honest one does when it leaves, or
when its machine is wanted for something else; from 27 % of the steps on evidence grows."""

MUCH_DROPPED = 0.1
KEPT_EVIDENCE = 16  # Rollouts named in a verdict, the last ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What honest samplers of a class do, from measured runs. A token is missed if its margin is above `margin` nats,
    as the share `missed` of honest tokens are at most; a rollout's log-probs are off if they differ by more than
    `distance` nats a token in the mean, as fewer than OFF_BY_HONEST of honest rollouts do."""

    margin: float
    missed: float
    distance: float


UNKNOWN = Calibration(margin=0.3, missed=0.02, distance=0.3)
"""Of a class that was never measured: as coarse as bfloat16. Nobody is punished by it: who is beyond doubt by this is
named as suspect."""

MAX_STANDINGS = 65_536
"""Samplers and classes that are remembered, 30 MB at most; the oldest gives way, and is a newcomer again: keys cost
nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What an audit found of one rollout."""

    rollout_id: str
    tokens: int
    missed: int
    distance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Caught:
    """A sampler did not do as it was asked, by `detector`, seen in the rollouts named, after so many audited ones. It
    is only `suspect` if its class of engine was never measured."""

    node: NodeId
    detector: Detector
    rollouts: tuple[str, ...]
    audited: int
    suspect: bool = False


@dataclass(slots=True)
class _Standing:
    audited: int = 0
    tokens: int = 0
    missed: int = 0
    caught: bool = False
    scores: dict[Detector, float] = field(default_factory=dict)
    against: dict[Detector, deque[str]] = field(default_factory=dict)

    def add(self, detector: Detector, gain: float, against: str | None) -> float:
        """Add one observation, with the rollout that it is against, if it is. Return the sum."""
        named = self.against.setdefault(detector, deque(maxlen=KEPT_EVIDENCE))
        self.scores[detector] = score = max(0.0, self.scores.get(detector, 0.0) + gain)
        if not score:
            named.clear()
        elif against is not None:
            named.append(against)
        return score


class Auditor:
    """`classes`: calibrations by class name. `share` is audited of samplers that are neither new nor proven."""

    def __init__(self, classes: Mapping[str, Calibration], *, secret: bytes, share: float) -> None:
        self._classes = classes
        self._secret = secret
        self._share = share
        self._standings: dict[tuple[NodeId, str], _Standing] = {}
        self._usual: dict[str, float] = {}

    def share(self, node: NodeId, class_name: str, *, chosen: int = 0, has_time: bool = True) -> float:
        """Return which share of the node's rollouts is audited, once `chosen` more have been."""
        standing = self._standings.get((node, self._known(class_name)), _Standing())
        if standing.audited + chosen < (NEW_ROLLOUTS if has_time else FIRST_ROLLOUTS):
            return 1.0
        if not standing.caught and any(score > SUSPICION * LIMIT for score in standing.scores.values()):
            return 1.0
        return self._share * (PROVEN_SHARE if standing.audited >= PROVEN_ROLLOUTS else 1.0)

    def drawn(self, rollout_id: str) -> float:
        """Return the rollout's secret number, from 0 to 1: below the share that is audited, it is."""
        return int.from_bytes(digest(self._secret + rollout_id.encode())[:8], "little") / 2**64

    def calibration(self, class_name: str) -> Calibration:
        """Return what is expected of a class."""
        return self._classes.get(class_name, UNKNOWN)

    def expected_missed(self, class_name: str) -> float:
        """Return which share of an honest sampler's tokens is missed at most."""
        most = self.calibration(class_name).missed
        return min(most, max(LEAST_MISSED, ABOVE_USUAL * self._usual.get(self._known(class_name), most)))

    def settle(self) -> None:
        """Look at what the samplers of each class miss. No minority of liars moves a median far."""
        found = defaultdict[str, list[float]](list)
        for (_, name), one in self._standings.items():
            if one.tokens >= LEAST_TOKENS and not one.caught:
                prior = PRIOR_TOKENS * self.calibration(name).missed
                found[name].append((one.missed + prior) / (one.tokens + PRIOR_TOKENS))
        self._usual = {name: median(shares) for name, shares in found.items() if len(shares) >= LEAST_SAMPLERS}

    def note(self, node: NodeId, class_name: str, finding: Finding) -> Caught | None:
        """Add what was found of one of the node's rollouts. Return a verdict the first time that it is beyond doubt."""
        standing = self._standing(node, class_name)
        standing.audited += 1
        standing.tokens, standing.missed = standing.tokens + finding.tokens, standing.missed + finding.missed
        if standing.caught:
            return None
        is_off = int(finding.distance > self.calibration(class_name).distance)
        honest = self.expected_missed(class_name)
        guilty = max(MISSED_BY_GUILTY, MORE_BY_GUILTY * honest)
        of_logprobs: tuple[Detector, int, float] = ("log-probs", is_off, _gain(is_off, 1, OFF_BY_HONEST, OFF_BY_GUILTY))
        of_draws: tuple[Detector, int, float] = (
            "draws",
            finding.missed,
            _gain(finding.missed, finding.tokens, honest, guilty),
        )
        # Whose matrices are rounded draws other tokens than the learner's weights do, however honest it is.
        observed = (of_logprobs,) if rounding_of(class_name) != "none" else (of_draws, of_logprobs)
        for detector, hits, gain in observed:
            if standing.add(detector, gain, finding.rollout_id if hits else None) >= LIMIT:
                standing.caught = True
                return Caught(
                    node=node,
                    detector=detector,
                    rollouts=tuple(standing.against[detector]),
                    audited=standing.audited,
                    suspect=class_name not in self._classes,
                )
        return None

    def note_leases(self, node: NodeId, *, answered: int, dropped: int) -> Caught | None:
        """Add what became of a sampler's leases in one step. Others draw what it drops, from the same seeds, so that
        answers are not chosen by it; but they wait. Return a verdict the first time that it is beyond doubt."""
        if not answered + dropped:
            return None
        standing = self._standing(node, "")
        much = int(dropped > MUCH_DROPPED * (answered + dropped))
        before = standing.scores.get("drops", 0.0)
        score = standing.add("drops", _gain(much, 1, DROPPING_BY_HONEST, DROPPING_BY_GUILTY), None)
        if not before < LIMIT <= score:
            return None
        return Caught(node=node, detector="drops", rollouts=(), audited=standing.audited)

    def forget(self, node: NodeId) -> bool:
        """Begin again with a node, as with a newcomer: an operator has let it back in. Return whether it was
        known."""
        others = {known: standing for known, standing in self._standings.items() if known[0] != node}
        was_known, self._standings = len(others) < len(self._standings), others
        return was_known

    def _standing(self, node: NodeId, class_name: str) -> _Standing:
        standing = self._standings.setdefault((node, self._known(class_name)), _Standing())
        if len(self._standings) > MAX_STANDINGS:
            del self._standings[next(iter(self._standings))]
        return standing

    def _known(self, class_name: str) -> str:
        """What a sampler is known for as one class says nothing of it as another, and it chooses what it names."""
        return class_name if class_name in self._classes else ""


def _gain(hits: int, of: int, honest: float, guilty: float) -> float:
    """Return the log-likelihood ratio of so many hits in `of` trials."""
    return hits * math.log(guilty / honest) + (of - hits) * math.log((1 - guilty) / (1 - honest))
