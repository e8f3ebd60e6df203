"""`gym:NAME`: endless questions that reasoning-gym makes and scores. `gym:NAME?KEY=VALUE&...` or the setting
task_options give the options of its data set.

Some of its scorers pass an answer to eval(), others to sympy's parse_expr, which does the same: any sampler could run
programs on the learner's machine. While a score is computed, both use `evaluate` instead, which computes expressions
and refuses all other code. A score is computed in a child process, since an answer can make a scorer recurse or compute
for ever: nested brackets, `9**(9**9)`, or a formula with more variables than a truth table can hold.
"""

from __future__ import annotations

import sys
from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, get_type_hints

import msgspec

from swarm.errors import UserError
from swarm.tasks.base import TaskOptions
from swarm.tasks.drawn import DrawnTask
from swarm.tasks.expressions import evaluate
from swarm.tasks.rewards import EXTRA, aside, without_thoughts
from swarm.types import Prompt, Score
from swarm.wire import digest

CHUNK = 1000  # Size of a reasoning-gym data set. Some make all entries at once, and refuse to make many.

CHOSEN_HERE = ("seed", "size")  # Options of every data set that a user cannot set


class GymTask(DrawnTask):
    """The answer is the content of the last <answer></answer>, or, without one, everything after the thoughts."""

    max_new_tokens = None
    chat = True

    def __init__(self, options: TaskOptions, name: str) -> None:
        if find_spec("reasoning_gym") is None:
            raise UserError(f"the task {options.name} needs a package that is not installed: {EXTRA}")
        self.name = options.name
        self._gym, _, text = name.partition("?")
        pairs = [part.partition("=")[::2] for part in text.split("&") if part]
        self._options = options.task_options or dict(pairs)
        if len(dict(pairs)) < len(pairs) or (pairs and options.task_options):
            raise UserError(f"{self.name} sets an option twice, or both in its name and in task_options")
        self.description = f"questions of reasoning-gym's {self._gym}"
        # Entry i of seed s is entry i - 1 of seed s + 1, so a run begins at a multiple of CHUNK.
        self._first = CHUNK * (int.from_bytes(digest(f"gym/{options.seed}".encode())[:8], "big") % (1 << 40))
        self._dataset = lru_cache(4)(self._make_dataset)
        # The rollouts of a group are scored together.
        self._entry = lru_cache(64)(self._make_entry)
        self._own_score = lru_cache(64)(self._score_own)

    def score(self, prompt: Prompt, completion: str) -> Score:
        number = int(prompt.prompt_id.rpartition("-")[2])
        dataset, entry = self._dataset(number // CHUNK), self._entry(number)
        self._own_score(number)
        # Some scorers fail on an answer of an unexpected form, or never end: such an answer is wrong.
        reward = aside(lambda: _score(dataset, entry, completion)) or 0.0
        return Score(reward=reward, exact=reward >= 1.0)

    def _score_own(self, number: int) -> float:
        """Score the data set's own answer first: so everything that the scorer loads is loaded before a sampler's
        answer."""
        import_module("sympy.parsing.sympy_parser")
        entry = self._entry(number)
        return float(self._dataset(number // CHUNK).score_answer(entry["answer"], entry))

    def _make_dataset(self, chunk: int) -> Any:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if self._gym not in DATASETS:
            near = get_close_matches(self._gym, DATASETS, n=5, cutoff=0.4) or sorted(DATASETS)
            raise UserError(f"reasoning-gym has no {self._gym!r}; it has {', '.join(near)}")
        known = {name: hint for name, hint in get_type_hints(DATASETS[self._gym][1]).items() if name not in CHOSEN_HERE}
        fields = [(name, hint) for name, hint in known.items() if name in self._options]
        try:
            kind = msgspec.defstruct("Options", fields, forbid_unknown_fields=True)
            given = msgspec.structs.asdict(msgspec.convert(self._options, kind, strict=False))
            return reasoning_gym.create_dataset(self._gym, seed=chunk * CHUNK, size=CHUNK, **given)
        except (msgspec.ValidationError, ValueError, TypeError, AssertionError) as error:
            raise UserError(f"{self.name} cannot be made: {error}; its options are {', '.join(known)}") from error

    def _make_entry(self, number: int) -> dict[str, Any]:
        dataset = self._dataset(number // CHUNK)
        try:
            entry: dict[str, Any] = dataset[number % CHUNK]
        except (ValueError, LookupError, AssertionError, RuntimeError) as error:
            raise UserError(f"{self.name} cannot make question {number}: {error}; try other options") from error
        return entry

    def _prompt(self, number: int) -> Prompt:
        entry = self._entry(number)
        answer = entry["answer"]
        return Prompt(
            prompt_id=f"gym-{number}", text=str(entry["question"]), answer="" if answer is None else str(answer)
        )


EVALUATING = ("reasoning_gym.", "sympy.parsing.")  # Modules by the beginning of their names


def _score(dataset: Any, entry: dict[str, Any], completion: str) -> float:
    """The score. Called in a child process, since from here on its modules in EVALUATING use `evaluate` as eval()."""
    from reasoning_gym.utils import extract_answer

    for name, module in sys.modules.items():
        if name.startswith(EVALUATING):
            vars(module)["eval"] = evaluate
    text = without_thoughts(completion)
    answer = extract_answer(text)
    return float(dataset.score_answer(text.strip() if answer is None else answer, entry))
