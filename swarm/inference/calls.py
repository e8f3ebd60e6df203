"""Calls of tools in what a model says, as the families of models write them. The text is a stranger's: reading it takes
time in proportion to its length."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

OPENS, CLOSES = "<tool_call>", "</tool_call>"  # Hermes, Qwen, SmolLM3 with JSON; Qwen3-Coder and GLM-4.5 with tags
ALONE = ("[TOOL_CALLS]", "<|python_tag|>", "")  # What Mistral and Llama 3 put before JSON that ends their turn
NAME = re.compile(r"\s*(?:<function=)?([\w.-]+)")


def read_calls(text: str, number: int) -> tuple[str, list[dict[str, Any]]]:
    """Return the text without its calls, and these as OpenAI has them, with ids after the message's `number`. What
    cannot be read as calls stays text."""
    before, *pieces = text.split(OPENS)
    kept, found = [before], list[tuple[str, Any]]()
    for piece in pieces:
        inside, _, after = piece.partition(CLOSES)
        calls = list(_of_json(inside)) or list(_of_tags(inside))
        kept.append(after if calls else OPENS + piece)
        found += calls
    if not found:
        for word in ALONE:
            said, _, rest = text.partition(word) if word else ("", "", text)
            if word in text and (found := list(_of_json(rest))):
                kept = [said]
                break
    named = [_named(f"{number:05d}{n:04d}", *call) for n, call in enumerate(found)]
    return ("".join(kept).strip() if named else text), named


def _of_json(text: str) -> Iterator[tuple[str, Any]]:
    """Yield name and arguments of each call."""
    found = value_of(text.strip())
    for one in found if isinstance(found, list) else [found]:
        if isinstance(one, dict) and isinstance(one.get("name"), str):
            yield one["name"], one.get("arguments", one.get("parameters", {}))


def _of_tags(text: str) -> Iterator[tuple[str, Any]]:
    if (name := NAME.match(text)) is None:
        return
    keys = [piece.partition("</arg_key>") for piece in text.split("<arg_key>")[1:]]
    parts = [(key, rest.partition("<arg_value>")[2].partition("</arg_value>")[0]) for key, _, rest in keys]
    named = [piece.partition(">") for piece in text.split("<parameter=")[1:]]
    parts += [(key, rest.partition("</parameter>")[0].strip("\n")) for key, _, rest in named]
    yield name[1], {key: value_of(value) for key, value in parts}


def value_of(text: str) -> Any:
    """Parse JSON; what is none, or could not be written again, stays text."""
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # Half of a surrogate pair is a ValueError too
        return text
    return found


def _named(number: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
