"""How fast an engine is, from what it answers: whole batches, or single samples of one that takes on each by itself."""

from __future__ import annotations

from collections import deque

from swarm.capacity.fleet import Lengths, mean_longest
from swarm.sampler.engine import Generated

MOST_PER_S = 1e9
"""What a beat may tell of; only an engine without a model comes near it."""

LEAST_S = 1e-6
"""What a clock may not see."""

LENGTHS_KEPT = 512
"""Lengths by which a batch with free places is compared with a full one: of four batches at least, with 128 places."""

RATE_SMOOTHING = 0.3
"""Weight of the newest batch in the measured rate: three batches forget a slow start."""

TURNS = 2
"""Of single samples so many times as many as were drawn side by side have to be answered before they count: the first
to end are the short ones, which would make the engine ten times as fast as it is."""


class Rates:
    """Measured rates of an engine that draws `places` samples side by side; before the first answer what is assumed.

    `rollouts_per_s` is what it gets done while it works, `full_rollouts_per_s` what it would with all places filled,
    and `tokens_per_s` how fast one sample grows. `most_tokens_per_s` caps what all places can draw, if it was measured:
    a few samples grow faster than many.
    """

    def __init__(self, places: int, *, most_tokens_per_s: float = 0.0, assumed_rollouts_per_s: float = 0.0) -> None:
        self.full_rollouts_per_s = assumed_rollouts_per_s
        self.tokens_per_s = 0.0
        self._assumed_rollouts_per_s = assumed_rollouts_per_s
        self._rollouts_per_s = 0.0
        self._places = places
        self._most_tokens_per_s = most_tokens_per_s
        self._full_batch_s = self._sample_s = self._side_by_side = 0.0
        self._answered = self._most_side_by_side = 0
        self._lengths: deque[int] = deque(maxlen=LENGTHS_KEPT)

    @property
    def rollouts_per_s(self) -> float:
        return self._rollouts_per_s or self._assumed_rollouts_per_s

    def batch(self, generated: Generated, between_s: float) -> None:
        """A batch was answered, `between_s` after the end of the last one, if it could have begun then."""
        count = len(generated.samples)
        self._rollouts_per_s = _smoothed_rate(self._rollouts_per_s, count, generated.seconds)
        self._note_lengths(generated)
        if count:
            full = max(count, self._places)
            took_s = generated.seconds * self._stretch(count, full) + between_s
            # Times are averaged: the mean of rates would be more than what comes of them.
            self._full_batch_s = _smoothed(self._full_batch_s, took_s)
            self.full_rollouts_per_s = min(MOST_PER_S, full / max(self._full_batch_s, LEAST_S))
        self.tokens_per_s = _smoothed_rate(self.tokens_per_s, generated.steps, generated.seconds)

    def sample(self, generated: Generated, side_by_side: int) -> None:
        """One sample was answered, of so many that the engine had; the time of one that waited for a place begins with
        its waiting. What was refused at once says nothing."""
        if generated.steps == 0:
            return
        self._answered += 1
        self._most_side_by_side = max(self._most_side_by_side, side_by_side)
        # A plain mean at first: the first sample of all would count for hundreds.
        weight = max(RATE_SMOOTHING / self._places, 1 / self._answered)
        self._note_lengths(generated)
        self._sample_s = _smoothed(self._sample_s, max(generated.seconds, LEAST_S), weight)
        self._side_by_side = _smoothed(self._side_by_side, side_by_side, weight)
        self.tokens_per_s = _smoothed_rate(self.tokens_per_s, generated.steps, generated.seconds, weight)
        if self._answered < TURNS * self._most_side_by_side:
            return
        # By means of times, as in `batch`: short samples would make the mean of rates a multiple of what is done.
        self._rollouts_per_s = min(MOST_PER_S, self._side_by_side / self._sample_s)
        full = min(MOST_PER_S, max(self._places, self._side_by_side) / self._sample_s)
        if self._most_tokens_per_s and self._lengths:
            full = min(full, self._most_tokens_per_s * len(self._lengths) / sum(self._lengths))
        self.full_rollouts_per_s = full

    def _note_lengths(self, generated: Generated) -> None:
        self._lengths.extend(length for one in generated.samples if (length := len(one.token_ids) // 4))

    def _stretch(self, count: int, full: int) -> float:
        """How much longer a batch of `full` takes than one of `count`: its longest sample is longer. What is at hand
        must not pass for what the engine could do: where samplers are too many, batches are small."""
        if count == full or not self._lengths:
            return 1.0
        lengths = Lengths.of(self._lengths).tokens
        return mean_longest(lengths, full) / mean_longest(lengths, count)


def _smoothed_rate(before: float, count: int, seconds: float, weight: float = RATE_SMOOTHING) -> float:
    """A mean rate that forgets."""
    return _smoothed(before, min(MOST_PER_S, count / max(seconds, LEAST_S)), weight)


def _smoothed(before: float, value: float, weight: float = RATE_SMOOTHING) -> float:
    """A mean that forgets; 0 is no measurement."""
    return before + weight * (value - before) if before and value else value or before
