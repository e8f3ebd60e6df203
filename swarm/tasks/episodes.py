"""Tasks whose samples are episodes: the starts of an environment are the prompts, `NAME:KEY=VALUE,...` its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cached_property
from pkgutil import resolve_name
from typing import Any, get_type_hints

import msgspec

from swarm.environments.base import Environment
from swarm.errors import UserError
from swarm.tasks.base import Task, TaskOptions
from swarm.tasks.drawn import HELD_OUT_BEGINS, DrawnTask
from swarm.types import Prompt, Score
from swarm.wire import digest

FEW_STARTS = 64  # With fewer, 5 % held out might be no start at all, or one that training needs


class EnvironmentTask(DrawnTask):
    """A prompt is the start of an episode. Its id ends with "-" and the seed. If the environment has fewer than
    FEW_STARTS starts, other seeds are held out instead of other starts."""

    player: Environment

    def __init__(self, options: TaskOptions, make: Callable[[], Environment]) -> None:
        self.name, self._make, self.player = options.name, make, make()
        self.description, self.max_new_tokens = self.player.description, self.player.max_new_tokens
        self.chat = self.player.is_chat
        self._first = int.from_bytes(digest(f"episodes/{options.seed}".encode())[:6], "big")

    def held_out(self, count: int) -> Sequence[Prompt]:
        numbers = range(HELD_OUT_BEGINS, HELD_OUT_BEGINS + count)
        return super().held_out(count) if self._has_many_starts else [self._prompt(number) for number in numbers]

    def score(self, prompt: Prompt, completion: str) -> Score:
        raise TypeError(f"an episode of {self.name} is scored turn by turn, by its environment")

    def environment(self) -> Environment:
        return self._make()

    @cached_property
    def _has_many_starts(self) -> bool:
        return len({self._prompt(seed).messages for seed in range(2 * FEW_STARTS)}) >= FEW_STARTS

    def _is_held_out(self, prompt: Prompt) -> bool:
        return self._has_many_starts and super()._is_held_out(prompt)

    def _prompt(self, number: int) -> Prompt:
        messages = tuple(self.player.reset(number))
        return Prompt(
            prompt_id=f"episode-{number}", text=self.player.board() or messages[-1][1], answer="", messages=messages
        )


def environment_task(options: TaskOptions, path: str, text: str) -> Task:
    """The task of "module:Class" in swarm/environments/, with the options in `text`."""
    kind: Any = resolve_name(f"swarm.environments.{path}")
    given = options_of(options.name, kind, text)
    return EnvironmentTask(options, lambda: kind(**given))


def options_of(name: str, kind: Any, text: str) -> dict[str, Any]:
    """Parse `text`, KEY=VALUE,..., as the keyword-only arguments of `kind`. The first may stand without its key.
    UserError if a value does not fit the annotation."""
    known = [p for p in inspect.signature(kind).parameters.values() if p.kind is p.KEYWORD_ONLY]
    hints = {p.name: str for p in known} | get_type_hints(kind.__init__, include_extras=True)
    fields = [(p.name, hints[p.name]) if p.default is p.empty else (p.name, hints[p.name], p.default) for p in known]
    fitting = msgspec.defstruct("Options", fields, kw_only=True, forbid_unknown_fields=True)
    parts = [part if "=" in part else f"{known[0].name if known else '?'}={part}" for part in text.split(",") if part]
    given = dict(part.split("=", 1) for part in parts)
    if len(given) < len(parts):
        raise UserError(f"{name} names an option twice: only the first may stand without its key")
    try:
        return msgspec.structs.asdict(msgspec.convert(given, fitting, strict=False))
    except msgspec.ValidationError as error:
        raise UserError(
            f"{name}: {error}; write NAME:KEY=VALUE,... with these keys: {[p.name for p in known]}"
        ) from error
