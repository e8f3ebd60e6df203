"""Environments for the tiny model, whose classes are loaded by the environment processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import gettempdir

from swarm.environments.base import Environment, Messages, Step
from swarm.environments.frozen_lake import FrozenLake

LONGEST_S = 110.0  # A test that was killed leaves no process that waits for ever


def _thoughts(learner: int) -> Path:
    return Path(gettempdir(), f"echo-node-thinking-{learner}")


@contextmanager
def thinking(learner: int) -> Iterator[None]:
    """Environments of the learner with this process id answer nothing meanwhile."""
    _thoughts(learner).touch()
    try:
        yield
    finally:
        _thoughts(learner).unlink()


class ThinkingLake(FrozenLake):
    """Frozen lake, which answers when the test lets it."""

    name = "thinking-lake"

    def step(self, text: str) -> Step:
        until = time.monotonic() + LONGEST_S
        while _thoughts(os.getppid()).exists() and time.monotonic() < until:
            time.sleep(0.01)
        return super().step(text)


class Duel(Environment):
    """Two players see a digit each, say one, and see the other's. The higher sum wins; nonsense counts as 0."""

    name = "duel"
    description = "two players, two turns each"
    max_turns = 4
    max_new_tokens = 2
    max_tokens = 24
    seats = 2
    is_chat = False

    def reset(self, seed: int) -> Messages:
        self._cards = Random(f"duel/{seed}").choices("0123456789", k=2)
        self._said: list[int] = []
        return [("user", f"{self._cards[0]}=")]

    def step(self, text: str) -> Step:
        digits = [int(one) for one in text if one.isdigit()]
        self._said.append(digits[0] if digits else 0)
        turn = len(self._said)
        if turn == self.max_turns:
            mine, theirs = (int(card) + sum(self._said[seat::2]) for seat, card in enumerate(self._cards))
            won = float((mine > theirs) - (mine < theirs))
            return Step(done=True, solved=won > 0, rewards=(won, -won))
        seat = turn % 2
        read = f"{self._cards[seat]}=" if turn == 1 else f"={self._said[-1]}="
        return Step(messages=[("user", read)], seat=seat, rewards=(0.0, 0.0))
