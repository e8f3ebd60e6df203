"""Renders the chat template of a model as transformers does, but without importing it, since a node imports no model
library.

A template gets what transformers would give it: a sandboxed Jinja environment with trimmed blocks, loop controls,
`{% generation %}`, a `tojson` that does not escape HTML, `raise_exception` and `strftime_now`. The last one returns the
time at which the run began: with the present time a prompt would not be a pure function of its number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.exceptions import TemplateError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from swarm.errors import UserError

Chat = Sequence[tuple[str, str] | Mapping[str, Any]]
"""Messages: (role, content), or an object as OpenAI has it, whose content is a text."""

Tools = Sequence[Mapping[str, Any]]
"""Functions that the model may call, as OpenAI has them."""

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """Turns a chat into the text that a model reads. `arguments` are extra variables for the template, such as
    enable_thinking."""

    def __init__(
        self, source: str, *, tokens: Mapping[str, str], began: datetime, arguments: Mapping[str, Any] | None = None
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = began.strftime
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UserError(f"the model's chat template is not valid Jinja: {error}") from error
        self._given = {**tokens, **(arguments or {})}

    def render(self, messages: Chat, tools: Tools = ()) -> str:
        """The chat up to where the assistant's answer begins. UserError for messages that the template refuses."""
        chat = as_chat(messages)
        try:
            text, fault = self._rendered(chat, tools), None
        except Exception as error:  # noqa: BLE001 - a template is somebody else's program
            text, fault = None, error
        if text is None or not is_printed(messages, text):
            # A template for images expects a list of parts, and would print nothing of a string.
            parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in chat]
            with suppress(Exception):
                if is_printed(messages, found := self._rendered(parts, tools)) and "{'type'" not in found:
                    return found  # Other templates would print the list itself
        if text is None:
            raise UserError(f"the model's chat template refuses it: {fault or type(fault).__name__}") from fault
        return text

    def _rendered(self, turns: list[dict[str, Any]], tools: Tools) -> str:
        given = {**self._given, "messages": turns, "tools": [*tools] or None}
        return self._template.render(**given, documents=None, add_generation_prompt=True)


def as_chat(messages: Chat) -> list[dict[str, Any]]:
    return [{"role": one[0], "content": one[1]} if isinstance(one, tuple) else dict(one) for one in messages]


def is_printed(messages: Chat, text: str) -> bool:
    """Whether a rendered chat contains every message, or nearly all of its words. The assistant's messages do not
    count, since a template may leave thoughts out."""
    shown = set(re.findall(r"\w+", text))
    said = [one["content"] for one in as_chat(messages) if one["role"] != "assistant"]
    parts = [(content, set(re.findall(r"\w+", content))) for content in said]
    return all(content.strip() in text or (words and len(words & shown) > 0.8 * len(words)) for content, words in parts)


def load_chat_template(directory: Path, *, began: datetime, arguments: Mapping[str, Any]) -> ChatTemplate | None:
    """The template in a model's directory, or None."""
    path = directory / "tokenizer_config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        file = directory / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else _default(settings.get("chat_template"))
    except (OSError, ValueError) as error:
        raise UserError(f"the tokenizer's files in {directory} cannot be read: {error}") from error
    if not source:
        return None
    tokens = {}
    for name in SPECIAL:
        if token := settings.get(name):
            tokens[name] = str(token.get("content", "") if isinstance(token, dict) else token)
    return ChatTemplate(source, tokens=tokens, began=began, arguments=arguments)


def _default(templates: Any) -> str | None:
    """The template named "default", if a model has several."""
    if isinstance(templates, list):
        templates = {one.get("name"): one.get("template") for one in templates if isinstance(one, dict)}
    if isinstance(templates, dict):
        templates = templates.get("default")
    return templates if isinstance(templates, str) else None


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training programs; here it is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja has it

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
