"""`gym:NAME`: questions that reasoning-gym makes and whose answers it scores, without end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from swarm.errors import UserError
from swarm.net.wire import digest
from swarm.tasks.base import Task, TaskOptions
from swarm.tasks.evaluation import expressions_alone
from swarm.tasks.questions import is_held_out
from swarm.tasks.rewards import EXTRA, without_thoughts
from swarm.types import Prompt, Score

CHUNK = 1000  # Entries of one data set of reasoning-gym's. Some make all of theirs at once, and refuse to make many.

TRAIN_CHUNKS = 1 << 40
"""A run begins at one of so many data sets; entry i of seed s is entry i - 1 of seed s + 1, so that seeds
are CHUNK apart."""

HELD_OUT_BEGINS = 1 << 62  # The entries from here on are looked at for held-out questions: those of every run
DRAWS = 16  # Entries that a training prompt may be one of. At a share of 0.05 all are held out once in 1e20 prompts.

DRAW_STRIDE = 1 << 52
"""Between them: prompts that follow one another come from one data set, which is slow to make for some names."""

HELD_OUT_DRAWS = 100  # Entries looked at for each held-out question wanted, before it is said that there are no more
DATASETS_KEPT = 4
KEPT = 64  # Entries kept for scoring: the rollouts of a group come together


class GymTask(Task):
    """A question is on the held-out side by its digest, so that the sides never meet, whatever seed drew it.

    The answer is what stands in the last <answer></answer>, or all that follows the thoughts if there is none.
    """

    max_new_tokens = None
    chat = True

    def __init__(self, options: TaskOptions, name: str) -> None:
        if find_spec("reasoning_gym") is None:
            raise UserError(f"the task {options.name} needs a package that is not installed: {EXTRA}")
        if options.rewards or options.lenient:
            raise UserError(f"{options.name} scores answers itself: leave rewards and lenient out")
        self.name = options.name
        self.description = f"questions of reasoning-gym's {name}"
        self._gym = name
        self._share = options.held_out_share
        self._first = CHUNK * (int.from_bytes(digest(f"gym/{options.seed}".encode())[:8], "big") % TRAIN_CHUNKS)
        self._datasets: OrderedDict[int, Any] = OrderedDict()
        self._kept: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def prompt(self, index: int) -> Prompt:
        for draw in range(DRAWS):
            prompt = self._prompt(self._first + index + draw * DRAW_STRIDE)
            if not is_held_out(prompt, self._share):
                return prompt
        raise UserError(f"{self.name} has too few questions: those drawn are all held out")

    def held_out(self, count: int) -> Sequence[Prompt]:
        found: dict[str, Prompt] = {}
        for draw in range(HELD_OUT_DRAWS * count):
            self.progress(f"{self.name}: {len(found)} of {count} held-out questions found among {draw}")
            prompt = self._prompt(HELD_OUT_BEGINS + draw)
            if is_held_out(prompt, self._share):
                found.setdefault(prompt.text, prompt)
            if len(found) == count:
                break
        return list(found.values())

    def score(self, prompt: Prompt, completion: str) -> Score:
        from reasoning_gym.utils import extract_answer

        text = without_thoughts(completion)
        answer = extract_answer(text)
        given = text.strip() if answer is None else answer
        number = int(prompt.prompt_id.rpartition("-")[2])
        dataset, entry = self._dataset(number), self._entry(number)
        try:
            with expressions_alone():
                reward = float(dataset.score_answer(given, entry))
        except (ValueError, TypeError, LookupError, ArithmeticError, SyntaxError, AttributeError, AssertionError):
            # Some of its scorers take an answer of another form apart without looking: that is a wrong answer.
            reward = 0.0
        return Score(reward=reward, exact=reward >= 1.0)

    def _dataset(self, number: int) -> Any:
        """The data set that entry `number` is of."""
        import reasoning_gym

        chunk = number // CHUNK
        if chunk not in self._datasets:
            try:
                self._datasets[chunk] = reasoning_gym.create_dataset(self._gym, seed=chunk * CHUNK, size=CHUNK)
            except (ValueError, AssertionError) as error:
                known = sorted(reasoning_gym.factory.DATASETS)
                if self._gym not in known:
                    near = get_close_matches(self._gym, known, n=5, cutoff=0.4) or known
                    raise UserError(f"reasoning-gym has no {self._gym!r}; it has {', '.join(near)}") from error
                raise UserError(f"{self.name} cannot be made without settings of its own: {error}") from error
            if len(self._datasets) > DATASETS_KEPT:
                self._datasets.popitem(last=False)
        return self._datasets[chunk]

    def _entry(self, number: int) -> dict[str, Any]:
        if number not in self._kept:
            self._kept[number] = self._dataset(number)[number % CHUNK]
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return self._kept[number]

    def _prompt(self, number: int) -> Prompt:
        entry = self._entry(number)
        answer = entry["answer"]
        return Prompt(
            prompt_id=f"gym-{number}", text=str(entry["question"]), answer="" if answer is None else str(answer)
        )
