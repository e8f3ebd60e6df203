"""An environment that does what it is told, for better or worse. Its class is loaded by the environment processes."""

from __future__ import annotations

import sys
from random import Random
from typing import Any

from swarm.environments.base import Environment, Messages, Step


class OddEnvironment(Environment):
    """Digits are added to a total, which is told to the player whose turn is next: the one of its parity. `==` ends the
    episode, and `=` with a digit is what goes wrong."""

    name = "odd"
    description = "environments that go wrong"
    max_turns = 16
    max_new_tokens = 8
    seats = 2
    is_chat = False

    def reset(self, seed: int) -> Messages:
        self._total = Random(seed).randrange(10**6)
        return [("user", f"{self._total}=")]

    def step(self, text: str) -> Step:
        if text == "==":
            return Step(done=True, solved=self._total % 3 == 0, rewards=(1.0, -1.0))
        if text.startswith("="):
            found: Any = getattr(self, f"_do_{text[1:]}")()
            return found  # type: ignore[no-any-return]
        self._total += sum(map(int, text))
        return Step(
            messages=[("user", f"={self._total}=")],
            rewards=(0.25 * len(text), float(self._total % 2)),
            seat=self._total % 2,
            parts={"digits": len(text)},
        )

    def _do_0(self) -> Step:
        raise ValueError("this environment\nraises")

    def _do_5(self) -> Step:
        return Step(rewards=(float(len(bytearray(4096 << 20))),))

    def _do_55(self) -> Step:
        """Keep memory, though not too much for one episode alone."""
        self._kept = bytearray(1024 << 20)
        return Step(messages=[("user", "=")])

    def _do_8(self) -> Step:
        sys.exit("enough")
