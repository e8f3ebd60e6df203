"""`FILE.py:FUNCTION` as a reward: the user's own function, which its signature says how to call.

Plain: `score(prompt, completion, answer) -> float`, of which it takes what it names, and other columns of the row too.
TRL's: `score(prompts, completions, **columns) -> list[float]`, with lists of one, which may be a coroutine. It gets
chats as messages where the data has messages, else texts.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.tasks.base import user_code
from swarm.types import Prompt

FORMS = "score(prompt, completion, answer) or, as in TRL, score(prompts, completions, **columns)"


def is_function(name: str) -> bool:
    return ".py:" in name


def check_function(name: str) -> None:
    """Raise UserError if there is no such file. Its code runs in processes of its own alone."""
    if not (path := Path(name.rpartition(":")[0])).is_file():
        raise UserError(f"{name} needs {path}, which is not in {Path.cwd()}: write FILE.py:FUNCTION")


class RewardFunction:
    """A function of the file that `name` names, loaded here."""

    def __init__(self, name: str) -> None:
        path, _, function = name.rpartition(":")
        self._name = name
        found = getattr(load_module(Path(path), f"the reward {name}"), function, None)
        if not callable(found):
            raise UserError(f"the reward {name}: {path} has no function {function}")
        self._call: Callable[..., Any] = found
        parameters = inspect.signature(self._call).parameters.values()
        self._takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        own = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        self._needed = {one.name for one in own if one.default is one.empty}
        named = self._named = {one.name for one in own}
        self.is_batch = "completions" in named
        if not self.is_batch and "completion" not in named:
            raise UserError(f"the reward {name} takes {', '.join(sorted(named)) or 'nothing'}: write it as {FORMS}")
        print(f"{name} is called as {'in TRL, with lists of one' if self.is_batch else 'a function of one answer'}")

    def __call__(self, prompt: Prompt, completion: str, columns: tuple[str, str]) -> float | None:
        """Return the reward of one completion; None, which TRL allows, if the function has none for it. `columns` are
        those of the question and of the answer."""
        row = json.loads(prompt.row) if prompt.row else {}
        asked = row.get(columns[0], prompt.text)
        known = {
            "answer": prompt.answer,
            **row,
            columns[1]: prompt.answer,
            "prompt": prompt.text,
            "completion": completion,
        }
        if self.is_batch:
            message = [{"role": "assistant", "content": completion}]
            known = {name: [value] for name, value in known.items() if name not in ("prompt", "completion")}
            known |= {"prompts": [asked], "completions": [message if isinstance(asked, list) else completion]}
        found = self._call(**self._taken(known))
        if inspect.iscoroutine(found):
            found = asyncio.run(found)
        if self.is_batch:
            (found,) = found
        return None if found is None else float(found)

    def _taken(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the function names. UserError if it needs what there is not."""
        if missing := sorted(self._needed - known.keys()):
            raise UserError(f"{self._name} asks for {', '.join(missing)}; there is {', '.join(sorted(known))}")
        return {name: value for name, value in known.items() if self._takes_all or name in self._named}


def load_module(path: Path, what: str) -> Any:
    """Run the file as a module, which may import others that lie next to it. UserError if it raises."""
    if (folder := str(path.parent.resolve())) not in sys.path:
        sys.path.insert(0, folder)
    spec = spec_from_file_location(f"own_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    with user_code(f"{what}: {path} raised"):
        spec.loader.exec_module(module)
    return module
