"""Tasks that draw questions by number, without end."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.errors import UserError
from swarm.tasks.base import Task
from swarm.tasks.questions import is_held_out
from swarm.types import Prompt

HELD_OUT_BEGINS = 1 << 62  # Every run looks for its held-out questions among the entries from here on
HELD_OUT_DRAWS = 100  # Entries looked at for each held-out question wanted, before it is said that there are no more
DRAWS = 16  # Entries that a training prompt may be one of. All are held out once in 1e20 prompts.
DRAW_STRIDE = 1 << 52  # Between these entries: consecutive prompts come from one data set, and some take long to make


class DrawnTask(Task):
    """A question is on the held-out side by its digest, so that the sides never meet, whatever seed drew it."""

    _first: int

    def prompt(self, index: int) -> Prompt:
        for draw in range(DRAWS):
            prompt = self._prompt(self._first + index + draw * DRAW_STRIDE)
            if not self._is_held_out(prompt):
                return prompt
        raise UserError(f"{self.name} has too few questions: those drawn are all held out")

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
