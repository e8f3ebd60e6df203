"""Base of tasks with endless questions, each drawn from its number."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.errors import UserError
from swarm.tasks.base import Task
from swarm.tasks.questions import is_held_out
from swarm.types import Prompt

HELD_OUT_BEGINS = 1 << 62  # First number among which every run looks for its held-out questions
HELD_OUT_DRAWS = 100  # Numbers tried for each held-out question, before there are said to be no more
DRAWS = 16  # Numbers tried for one training prompt. With 5 % held out, all are held out once in 1e20 prompts.
DRAW_STRIDE = 1 << 52  # From one try to the next: consecutive prompts come from one data set, which may be slow to make


class DrawnTask(Task):
    """A question's digest decides whether it is held out, so no question is on both sides, whichever seed drew it."""

    _first: int

    def prompt(self, index: int) -> Prompt:
        for draw in range(DRAWS):
            prompt = self._prompt(self._first + index + draw * DRAW_STRIDE)
            if not self._is_held_out(prompt):
                return prompt
        raise UserError(f"{self.name} has too few questions: {DRAWS} were drawn, and all are held out")

    def held_out(self, count: int) -> Sequence[Prompt]:
        found: dict[str, Prompt] = {}
        for draw in range(HELD_OUT_DRAWS * count):
            self.progress(f"{self.name}: {len(found)} of {count} held-out questions found among {draw}")
            prompt = self._prompt(HELD_OUT_BEGINS + draw)
            if self._is_held_out(prompt):
                found.setdefault(prompt.text, prompt)
            if len(found) == count:
                break
        return list(found.values())

    def _is_held_out(self, prompt: Prompt) -> bool:
        return is_held_out(prompt)

    def _prompt(self, number: int) -> Prompt:
        raise NotImplementedError
