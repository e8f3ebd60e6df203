"""Chooses prompts at the frontier: those whose samples probably get unlike rewards, since groups of one reward teach
nothing.

Of a group's next CANDIDATES prompts one is drawn, with probability in proportion to the variance that its rewards are
expected to have. That is the mean over the groups that the prompt had, by their tries, which count half after HALF_LIFE
steps, and over PRIOR_TRIES more, whose variance is foreseen: a logistic model of the last WINDOW groups says from
features of the text which share p of the run's range of rewards a prompt gets, and p (1 - p) is scaled by what these
groups had of the sum of their own. A share of UNIFORM of the groups ignores all this, so that no prompt is given up.

What is optimised is no longer the mean over the prompts, but one that weighs each by how often it is drawn.

The state is a function of the batches that were taken and of the groups that were dropped for want of variance, in the
order of their steps and numbers. So a restart continues with the same choices.
"""

from __future__ import annotations

import math
import random
import re
from collections import deque
from collections.abc import Callable, Collection, Sequence

from swarm.bounded import Bounded
from swarm.rollout.journal.entries import RECALLED_GROUPS, RecordedRun, Tried
from swarm.rollout.plane.groups import Group
from swarm.types import Prompt

CANDIDATES = 8  # Prompts made for each group. A prompt is drawn at most so many times as often as without selection
UNIFORM = 0.1
PRIOR_TRIES = 2.0
HALF_LIFE = 60.0  # Steps
WINDOW = 128  # Groups from which difficulty is foreseen
ROUNDS, RATE = 40, 4.0  # Steps of gradient descent for each fit; their size: a logistic curves by 1/4 at most
NUMBER = re.compile(r"[0-9]+")


class Frontier:
    """What is known of the prompts of a run, of as many as a restart can recall."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._known: Bounded[str, tuple[float, float, int]] = Bounded(RECALLED_GROUPS)
        """By prompt id: tries, the sum of their variances, both as they count at a step, and that step"""
        self._window: deque[tuple[tuple[float, ...], float, float]] = deque(maxlen=WINDOW)
        self._lowest, self._highest = math.inf, -math.inf
        self._foresee, self._scale = Foresight(()), 1.0
        self._waiting: list[tuple[Tried, Prompt]] = []

    def choose(self, number: int, step: int, candidates: Sequence[Prompt], open_ids: Collection[str]) -> int:
        """Return the place of the prompt for group `number` among its candidates, preferably none that is open."""
        places = range(len(candidates))
        free = [i for i in places if candidates[i].prompt_id not in open_ids] or [*places]
        weights = [self.expected_variance(candidates[i], step) for i in free]
        mean = sum(weights) / len(weights)
        draw = random.Random(f"frontier/{self._seed}/{number}")
        return draw.choices(free, [UNIFORM * mean + (1 - UNIFORM) * weight for weight in weights])[0]

    def next_prompt(
        self, number: int, step: int, prompts: Callable[[int], Prompt], open_ids: Collection[str]
    ) -> tuple[int, Prompt]:
        """Return the prompt for group `number` and its own number. Numbers are asked for in their order."""
        first = number * CANDIDATES
        candidates = [prompts(first + place) for place in range(CANDIDATES)]
        place = self.choose(number, step, candidates, open_ids)
        return first + place, candidates[place]

    def restore(self, run: RecordedRun, prompts: Callable[[int], Prompt]) -> None:
        """Recall what is on record. It makes the prompts of these groups again, which takes a while."""
        for one in run.tried:
            self.note(one, prompts(one.prompt_number))
        self.fold(before=run.next_batch)

    def taken(self, batch: Sequence[Group], step: int) -> None:
        """Learn from batch `step`."""
        for group in batch:
            self.note(*tried(group, step))
        self.fold(before=step + 1)

    def expected_variance(self, prompt: Prompt, step: int) -> float:
        """Return the variance that the rewards of a prompt are expected to have at `step`."""
        rate = self._foresee(features(prompt))
        tries, total, then = self._known.get(prompt.prompt_id) or (0.0, 0.0, step)
        left = remaining(step - then)
        return (PRIOR_TRIES * self._scale * rate * (1 - rate) + left * total) / (PRIOR_TRIES + left * tries)

    def note(self, new: Tried, prompt: Prompt) -> None:
        """Take the rewards of a group, which count from the next `fold` on."""
        self._waiting.append((new, prompt))

    def fold(self, *, before: int) -> None:
        """Learn from what was noted of the steps before `before`."""
        ripe = [one for one in self._waiting if one[0].step < before]
        self._waiting = [one for one in self._waiting if one[0].step >= before]
        for new, prompt in sorted(ripe, key=lambda one: (one[0].step, one[0].number)):
            tries, total, then = self._known.get(prompt.prompt_id) or (0.0, 0.0, new.step)
            left = remaining(new.step - then)
            found = variance(new)
            self._known[prompt.prompt_id] = left * tries + new.tries, left * total + new.tries * found, new.step
            self._window.append((features(prompt), new.total / new.tries, found))
            self._lowest, self._highest = min(self._lowest, new.lowest), max(self._highest, new.highest)
        self._foresee = Foresight([(given, self._share(mean)) for given, mean, _ in self._window])
        rates = [self._foresee(given) for given, _, _ in self._window]
        self._scale = (sum(found for _, _, found in self._window) or 1.0) / (sum(p * (1 - p) for p in rates) or 1.0)

    def _share(self, reward: float) -> float:
        spread = self._highest - self._lowest
        return (reward - self._lowest) / spread if spread > 0 else 0.5


def tried(group: Group, step: int) -> tuple[Tried, Prompt]:
    """Return what a complete group shows, which is in batch `step` or dropped before it."""
    rewards = [sample.score.reward for sample in group.samples if sample.score is not None]
    figures = len(rewards), sum(rewards), min(rewards), max(rewards)
    return Tried(group.order, group.prompt_number, step, *figures), group.prompt


def variance(of: Tried) -> float:
    """Return the variance of these rewards if there were two values, and the most that it can be (Bhatia and Davis)."""
    mean = of.total / of.tries
    return max(0.0, (of.highest - mean) * (mean - of.lowest))


def remaining(steps: int) -> float:
    """Return what tries count after so many steps."""
    return math.exp2(-steps / HALF_LIFE)


class Foresight:
    """A logistic model of the rate of success, fitted to features and rates. Without any it says 0.5."""

    def __init__(self, seen: Sequence[tuple[tuple[float, ...], float]]) -> None:
        self._scales = [_scale(column) for column in zip(*(given for given, _ in seen), strict=True)]
        self._weights = [0.0] * (1 + len(self._scales))
        rows = [(self._row(given), rate) for given, rate in seen]
        for _ in range(ROUNDS if rows else 0):
            errors = [rate - self._rate(row) for row, rate in rows]
            slopes = [sum(e * row[i] for e, (row, _) in zip(errors, rows, strict=True)) for i in range(len(rows[0][0]))]
            self._weights = [w + RATE * slope / len(rows) for w, slope in zip(self._weights, slopes, strict=True)]

    def __call__(self, given: tuple[float, ...]) -> float:
        """Return the rate that is expected of a prompt with these features, between 0.01 and 0.99."""
        return min(0.99, max(0.01, self._rate(self._row(given)))) if self._scales else 0.5

    def _row(self, given: tuple[float, ...]) -> list[float]:
        return [1.0, *((x - mean) / deviation for x, (mean, deviation) in zip(given, self._scales, strict=True))]

    def _rate(self, row: Sequence[float]) -> float:
        return 1 / (1 + math.exp(-max(-30.0, min(30.0, sum(map(float.__mul__, row, self._weights))))))


def _scale(column: Sequence[float]) -> tuple[float, float]:
    mean = sum(column) / len(column)
    return mean, math.sqrt(sum((x - mean) ** 2 for x in column) / len(column)) or 1.0


def features(prompt: Prompt) -> tuple[float, ...]:
    """Return what foretells how hard a prompt is: its length, its numbers, the longest of them, its answer's length."""
    numbers = NUMBER.findall(prompt.text)
    sizes = len(prompt.token_ids), len(numbers), max(map(len, numbers), default=0), len(prompt.answer)
    return tuple(math.log1p(size) for size in sizes)
