"""Environments for the benchmark of episodes: they answer at once, and end after exactly so many turns."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.environments.base import Step

TURNS = 8


class EightTurns:
    """Answers `.` to whatever is said, and ends after eight turns."""

    max_turns = TURNS
    is_chat = False

    def __init__(self) -> None:
        self._turn = 0

    def reset(self, seed: int) -> Sequence[tuple[str, str]]:
        self._turn = 0
        return [("user", str(seed)[-6:])]

    def step(self, text: str) -> Step:
        self._turn += 1
        return Step(messages=[("user", ".")], rewards=(0.0,), done=self._turn == self.max_turns)


class OneTurn(EightTurns):
    """The same with a single turn: what is drawn does not travel."""

    max_turns = 1
