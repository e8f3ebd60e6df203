"""Calls of tools, as families of models write them, and what a stranger writes instead."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.inference.calls import ALONE, CLOSES, OPENS, read_calls

ADD = ("add", {"a": 1, "b": "x"})
JSON = '{"name": "add", "arguments": {"a": 1, "b": "x"}}'


def calls(text: str) -> list[tuple[str, Any]]:
    return [(one["function"]["name"], one["function"]["arguments"]) for one in read_calls(text, 3)[1]]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"I add.\n<tool_call>\n{JSON}\n</tool_call>", "I add."),
        (f"<tool_call>{JSON}", ""),
        (f"[TOOL_CALLS] [{JSON}]", ""),
        (f"<|python_tag|>{JSON.replace('arguments', 'parameters')}", ""),
        (JSON.replace("arguments", "parameters"), ""),
        (
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n</function>",
            "",
        ),
        (
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>x</arg_value>",
            "",
        ),
    ],
)
def test_each_family_s_call_is_read(text: str, content: str) -> None:
    assert (read_calls(text, 3)[0], calls(text)) == (content, [ADD])


def test_several_calls_have_ids_of_their_own_and_what_is_none_stays_text() -> None:
    text = f"a <tool_call>{JSON}</tool_call> b <tool_call>((</tool_call> c <tool_call>{JSON}</tool_call>"
    content, found = read_calls(text, 12)
    assert [one["id"] for one in found] == ["000120000", "000120001"]
    assert content == "a  b <tool_call>((</tool_call> c"
    assert read_calls("no { call", 0) == ("no { call", [])


@pytest.mark.parametrize("inside", ["[" * 5000 + "]" * 5000, "{" * 5000, '"\\ud800"', "NaN"])
def test_what_python_cannot_hold_or_write_is_no_call(inside: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {inside}}}</tool_call>'
    for name, arguments in calls(text):
        assert (name, isinstance(arguments, float)) == ("f", True) or name


@given(
    st.lists(
        st.sampled_from([OPENS, CLOSES, *ALONE, "<arg_key>", "</arg_key>", "<arg_value>", "{", "}", JSON, "f", " "])
    )
)
def test_nothing_that_a_model_writes_breaks_the_reading(parts: list[str]) -> None:
    text = "".join(parts)
    content, found = read_calls(text, 0)
    assert found or content == text


@pytest.mark.parametrize(
    "part", ["<arg_key></arg_key><arg_value>", OPENS, "<tool_call>{", "<parameter=", "[TOOL_CALLS]["]
)
def test_reading_takes_time_in_proportion_to_the_text(part: str) -> None:
    """A longer power of its length would take hours."""
    read_calls(f"<tool_call>f{part * 20_000}", 0)
