"""`python:MODULE:CLASS`: the user's own task or environment, from the working directory or an installed package."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm.environments.base import Environment, Messages, Step
from swarm.errors import UserError
from swarm.tasks.base import Task, TaskOptions, user_code
from swarm.tasks.episodes import EnvironmentTask, options_of
from swarm.types import MAX_SEATS, MAX_TURNS, Prompt, Score


def own_task(options: TaskOptions, name: str) -> Task:
    """A class that has `step` is an environment, any other a task."""
    made = _make(options, name)
    if not callable(getattr(made, "step", None)):
        return OwnTask(options, made)
    return EnvironmentTask(options, lambda: OwnEnvironment(options.name, _make(options, name)))


class OwnEnvironment(Environment):
    """Wraps the user's object. Messages may be a plain text, and `step` may return (messages, reward, done) instead of
    a Step; an episode then counts as solved if its last reward is 1 or more."""

    max_turns = 0

    def __init__(self, name: str, own: Any) -> None:
        self.name, self._own, self.description = name, own, _description(own)
        for part in ("max_turns", "max_new_tokens", "max_tokens", "seats", "is_chat", "board"):
            setattr(self, part, getattr(own, part, getattr(self, part)))
        if not 1 <= self.max_turns <= MAX_TURNS:
            raise UserError(f"{name} does not say how long an episode may be: set max_turns, from 1 to {MAX_TURNS}")
        if not 1 <= self.seats <= MAX_SEATS:
            raise UserError(f"{name} has {self.seats} players: set seats, from 1 to {MAX_SEATS}")

    def reset(self, seed: int) -> Messages:
        with user_code(f"reset({seed}) of {self.name} raised"):
            return _messages(self._own.reset(seed)) or [("user", "")]

    def step(self, text: str) -> Step:
        found = self._own.step(text)
        if isinstance(found, Step):
            return found
        if not isinstance(found, tuple) or len(found) != 3:
            raise TypeError(f"step() of {self.name} returned neither a Step nor (messages, reward, done)")
        reward, done = float(found[1]), bool(found[2])
        return Step(messages=_messages(found[0]), rewards=(reward,), done=done, solved=done and reward >= 1)


def _messages(found: Any) -> Messages:
    return [("user", found)] if isinstance(found, str) else [(str(role), str(content)) for role, content in found or ()]


class OwnTask(Task):
    """Wraps the user's object and checks what it returns. Attributes that it lacks have Task's defaults."""

    def __init__(self, options: TaskOptions, made: Any) -> None:
        self.name = options.name
        if missing := [part for part in ("prompt", "held_out", "score") if not callable(getattr(made, part, None))]:
            raise UserError(f"{options.name} is not a task: it has no {', no '.join(part + '()' for part in missing)}")
        self._own = made
        self.description = _description(made)
        self.max_new_tokens = getattr(made, "max_new_tokens", None)
        self.chat = bool(getattr(made, "chat", False))

    @property
    def size(self) -> int | None:
        return getattr(self._own, "size", None)

    @property
    def data_digest(self) -> str:
        return str(getattr(self._own, "data_digest", ""))

    def prompt(self, index: int) -> Prompt:
        call = f"prompt({index}) of {self.name}"
        with user_code(f"{call} raised"):
            return _checked(self._own.prompt(index), call)

    def held_out(self, count: int) -> Sequence[Prompt]:
        call = f"held_out({count}) of {self.name}"
        with user_code(f"{call} raised"):
            return [_checked(prompt, call) for prompt in self._own.held_out(count)]

    def score(self, prompt: Prompt, completion: str) -> Score:
        """The user's score may be a plain number; 1 or more counts as solved."""
        found = self._own.score(prompt, completion)
        if isinstance(found, Score):
            return found
        if not hasattr(found, "__float__"):  # numpy's booleans have it too
            raise TypeError(f"score() of {self.name} returned a {type(found).__name__}, not a number or a Score")
        return Score(reward=float(found), exact=math.isfinite(found) and found >= 1)


def _description(made: Any) -> str:
    return str(getattr(made, "description", (inspect.getdoc(type(made)) or "a task of your own").splitlines()[0]))


def _checked(prompt: Any, call: str) -> Prompt:
    if not isinstance(prompt, Prompt) or not 1 <= len(prompt.prompt_id) <= 64:
        raise UserError(f"{call} did not return a swarm.types.Prompt with a prompt_id of 1 to 64 characters")
    return prompt


def _make(options: TaskOptions, name: str) -> Any:
    module_name, _, rest = name.partition(":")
    class_name, _, text = rest.partition(":")
    if not (module_name and class_name):
        raise UserError(f"{options.name} does not name a class: write python:MODULE:CLASS")
    if (here := str(Path.cwd())) not in sys.path:
        # sys.path begins with the directory of the command, not with the working directory.
        sys.path.insert(0, here)
    with user_code(f"{options.name}: importing {module_name} raised"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise UserError(f"{options.name}: no module {error.name!r} here or installed") from error
    kind = getattr(module, class_name, None)
    if not callable(kind):
        raise UserError(f"{options.name}: {module_name} has no class {class_name}")
    with user_code(f"{options.name} could not be made with (seed) or (options):"):
        parameters = inspect.signature(kind).parameters
        given = {"seed": options.seed, "options": options}
        own = options_of(options.name, kind, text) if text else {}
        return kind(**own | {key: value for key, value in given.items() if key in parameters})
