"""The first line of the audit: a rollout whose claimed log-probs are far from the learner's own is not trained on.

Samplers say how likely each token was when they drew it, and every ratio of an objective rests on that. The pass that
training makes anyway gives the same log-probs under the present weights. The distance of a rollout is the mean of
|claimed - present| over its tokens, in nats: three at most of each token, and over eight if it has fewer. It grows with
the rollout's age, so it is judged by what is usual at that age: the median over samplers of each one's median, which no
minority of them moves.

Everything follows from the steps alone, so a replay withholds the same, and so do ranks that are given the same claims.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from swarm.learner.messages import ClaimState

TOKEN_DISTANCE = 3.0  # Nats, the most of one token: within S steps a policy may give one up altogether
MIN_TOKENS = 8  # An honest answer of one token or two can move by 1.5 nats a token in two steps
MIN_LIMIT = 1.5
"""Nats. In honest runs of the copy task, with 6 tokens and up to 6 steps of age, the furthest rollouts were at 1.4 of
their own tokens, 1.05 here. Claims that are all off by 2.2 nats stop a run from learning: on 6 tokens, 1.65."""

TIMES_USUAL = 6.0  # The same runs: where the median is above 0.2 nats the furthest rollouts are at 4.6 times it
USUAL_WEIGHT = 0.2  # Of the last step in what is usual: a memory of five steps


@dataclass(frozen=True, slots=True)
class Claim:
    """The distance of one rollout, and how far it is from the learner's log-probs at equal weights: `nats` over all its
    `tokens` that were drawn with these weights."""

    sampler: str
    staleness: int
    distance: float
    nats: float = 0.0
    tokens: float = 0.0


class Claims:
    """With `min_limit` infinite nothing is withheld."""

    def __init__(self, min_limit: float = MIN_LIMIT) -> None:
        self.state = ClaimState()
        self._min_limit = min_limit

    def limit(self, staleness: int) -> float:
        """Return the largest distance that is believed of a rollout of this age. Where nothing is known of that age,
        the nearest one counts."""
        if not self.state.usual:
            return self._min_limit
        _, usual = min(self.state.usual, key=lambda known: abs(known[0] - staleness))
        return max(self._min_limit, TIMES_USUAL * usual)

    def stepped(self, claims: Sequence[Claim]) -> Counter[str]:
        """Take note of all that one learner step read; return how many rollouts of each sampler were withheld."""
        withheld = Counter(one.sampler for one in claims if one.distance > self.limit(one.staleness))
        known, seen = dict(self.state.usual), _usual(claims)
        for staleness, usual in seen.items():
            before = known.get(staleness, usual)
            known[staleness] = before + USUAL_WEIGHT * (usual - before)
        self.state = ClaimState(usual=tuple(sorted(known.items())))
        return withheld


def _usual(claims: Sequence[Claim]) -> dict[int, float]:
    """By staleness. Weights that are no numbers any more say nothing of samplers."""
    by_age: defaultdict[int, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in claims:
        if math.isfinite(one.distance):
            by_age[one.staleness][one.sampler].append(one.distance)
    return {age: median_low([median_low(own) for own in of.values()]) for age, of in by_age.items()}
