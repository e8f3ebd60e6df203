"""The first line of the audit: a rollout whose claimed log-probs are far from the learner's own is withheld from
training.

Samplers claim how likely each token was when they drew it, and every ratio in an objective depends on that. The forward
pass of training gives the log-probs under the present weights. The distance of a rollout is the mean over its tokens of
|claimed - present|, in nats. A token counts for at most three, and the sum is divided by at least eight tokens. The
distance grows with the rollout's age, so it is compared with the usual one at that age: the median over samplers of
each one's median, which no minority of samplers can move.

Everything is computed from the steps alone, so a replay withholds the same rollouts, and so do all ranks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from swarm.learner.messages import ClaimState

TOKEN_DISTANCE = 3.0  # Nats, for one token at most: within S steps a policy may stop drawing a token altogether
MIN_TOKENS = 8  # An honest answer of one or two tokens can move by 1.5 nats a token in two steps
MIN_LIMIT = 1.5
"""Nats. In honest runs of the copy task, with 6 tokens and ages of up to 6 steps, the largest mean was 1.4, which is a
distance of 1.05. If all claims are off by 2.2 nats, which on 6 tokens is a distance of 1.65, a run does not learn."""

TIMES_USUAL = 6.0  # In the same runs, where the median is above 0.2 nats, the largest distance is 4.6 times that
USUAL_WEIGHT = 0.2  # Of the newest step in the usual distance: a memory of five steps


@dataclass(frozen=True, slots=True)
class Claim:
    """The distance of what one sampler drew of a rollout. `nats` is the summed divergence from the learner's log-probs
    over the `tokens` that were drawn with weights equal to the learner's."""

    sampler: str
    staleness: int
    distance: float
    nats: float = 0.0
    tokens: float = 0.0


class Claims:
    """Decides which claims are withheld; none if `min_limit` is infinite."""

    def __init__(self, min_limit: float = MIN_LIMIT) -> None:
        self.state = ClaimState()
        self._min_limit = min_limit

    def limit(self, staleness: int) -> float:
        """Return the largest distance at which a rollout of this age is trained on. If nothing is known about that age,
        the nearest known age counts."""
        if not self.state.usual:
            return self._min_limit
        _, usual = min(self.state.usual, key=lambda known: abs(known[0] - staleness))
        return max(self._min_limit, TIMES_USUAL * usual)

    def stepped(self, claims: Sequence[Claim]) -> Counter[str]:
        """Update the usual distances after a learner step; return how many rollouts of each sampler were withheld."""
        withheld = Counter(one.sampler for one in claims if one.distance > self.limit(one.staleness))
        known, seen = dict(self.state.usual), _usual(claims)
        for staleness, usual in seen.items():
            before = known.get(staleness, usual)
            known[staleness] = before + USUAL_WEIGHT * (usual - before)
        self.state = ClaimState(usual=tuple(sorted(known.items())))
        return withheld


def _usual(claims: Sequence[Claim]) -> dict[int, float]:
    """The usual distance by staleness. A distance of NaN is left out: then the learner's weights are broken."""
    by_age: defaultdict[int, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in claims:
        if math.isfinite(one.distance):
            by_age[one.staleness][one.sampler].append(one.distance)
    return {age: median_low([median_low(own) for own in of.values()]) for age, of in by_age.items()}
