"""Calls of tools in what a model says, as the families of models write them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

WRITTEN = (
    r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|\Z)",  # Hermes, Qwen 2.5 and 3, SmolLM3
    r"\[TOOL_CALLS\]\s*(\[.*\])",  # Mistral
    r"(?:<\|python_tag\|>|\A)\s*(\{\s*\"name\".*\})\s*\Z",  # Llama 3
    r"<tool_call>\s*(?:<function=)?[\w.-]+.*?(?:</tool_call>|\Z)",  # Qwen3-Coder and GLM-4.5, with tags
)
TAGGED = re.compile(r"<tool_call>\s*(?:<function=)?([\w.-]+)")
PART = re.compile(
    r"<parameter=([\w.-]+)>\n?(.*?)\n?</parameter>|<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL
)


def read_calls(text: str, number: int) -> tuple[str, list[dict[str, Any]]]:
    """Return the text without its calls, and these as OpenAI has them, with ids after the message's `number`. What
    cannot be read as calls stays text."""
    for form in WRITTEN:
        found = [(match, list(_calls(match))) for match in re.finditer(form, text, re.DOTALL)]
        if any(calls for _, calls in found):
            for match in [match for match, calls in found if calls][::-1]:
                text = text[: match.start()] + text[match.end() :]
            every = [call for _, calls in found for call in calls]
            return text.strip(), [_named(f"{number:05d}{n:04d}", *call) for n, call in enumerate(every)]
    return text, []


def _calls(match: re.Match[str]) -> Iterator[tuple[str, Any]]:
    """Yield name and arguments of each call in what was matched."""
    if not match.re.groups:
        if tag := TAGGED.match(match[0]):
            yield tag[1], {a or b: _value(c or d) for a, c, b, d in PART.findall(match[0])}
        return
    found = _value(match[1])
    for one in found if isinstance(found, list) else [found]:
        if isinstance(one, dict) and isinstance(one.get("name"), str):
            yield one["name"], one.get("arguments", one.get("parameters", {}))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _named(number: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
