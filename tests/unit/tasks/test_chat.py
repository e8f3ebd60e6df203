"""Chat templates: the same text as transformers renders, without it, and one clear line for what cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import UserError
from swarm.learner.tiny import tiny_tokenizer
from swarm.tasks.chat import ChatTemplate, is_printed, load_chat_template
from tests.chats import TEMPLATES

BEGAN = datetime(2026, 7, 24, 9, 30)

QWEN3 = (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")


HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday is " + date_string }}
{{- "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

BRACKETS = """\
{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}{% continue %}{% endif %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) and messages[0]['role'] != 'system' %}
{{ raise_exception('roles must alternate') }}
{% endif %}
    {% if message['role'] == 'user' %}
[INST] {{ message['content'] }} [/INST]
    {% else %}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}
{{ messages | tojson(indent=2) }}{{ {'b': '<&>', 'a': 'é'} | tojson(sort_keys=true) }}
"""

CHATS = (
    [("user", "2+2?")],
    [("system", " Be <short> & plain. "), ("user", "é ü 你好?\n")],
    [("user", "2+2?"), ("assistant", "<think>easy</think>\n4"), ("user", "And 3+3?")],
)


def _saved(directory: Path, template: str | None) -> Any:
    """A tokenizer as the trainer saves it."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return tokenizer


def _loaded(directory: Path, **arguments: Any) -> ChatTemplate:
    found = load_chat_template(directory, began=datetime.now(), arguments=arguments)
    assert found is not None
    return found


@pytest.mark.parametrize("chat", CHATS, ids=["one", "system", "turns"])
@pytest.mark.parametrize(
    ("template", "arguments"),
    [(QWEN3, {}), (QWEN3, {"enable_thinking": False}), (HEADERS, {}), (HEADERS, {"date_string": "x"}), (BRACKETS, {})],
    ids=["thinking", "not-thinking", "headers", "dated", "brackets"],
)
def test_a_chat_is_rendered_as_transformers_renders_it(
    tmp_path: Path, chat: list[tuple[str, str]], template: str, arguments: dict[str, Any]
) -> None:
    tokenizer = _saved(tmp_path, template)
    messages = [{"role": role, "content": content} for role, content in chat]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)
    assert _loaded(tmp_path, **arguments).render(chat) == expected


def test_the_date_is_that_of_the_runs_beginning() -> None:
    assert "24 Jul 2026" in ChatTemplate(HEADERS, tokens={"bos_token": "<s>"}, began=BEGAN).render(CHATS[0])


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    _saved(tmp_path, None)
    assert load_chat_template(tmp_path, began=BEGAN, arguments={}) is None


@pytest.mark.parametrize(
    "template",
    [
        "hi {{ bos_token }}",
        [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "hi {{ bos_token }}"}],
    ],
)
def test_a_template_in_the_tokenizers_settings_is_found(tmp_path: Path, template: Any) -> None:
    settings = {"chat_template": template, "bos_token": {"content": "<s>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert _loaded(tmp_path).render(CHATS[0]) == "hi <s>"


def test_what_a_template_refuses_is_the_users_to_mend() -> None:
    with pytest.raises(UserError, match="refuses it: roles must alternate"):
        ChatTemplate(BRACKETS, tokens={}, began=BEGAN).render([("assistant", "a"), ("user", "b")])


def test_a_broken_template_is_one_line() -> None:
    with pytest.raises(UserError, match="is not valid Jinja"):
        ChatTemplate("{% if %}", tokens={}, began=BEGAN)


@pytest.mark.parametrize("inside", ["messages.append(1)", "''.__class__.__mro__", "a.x", "1 / 0", "range(10**9)|list"])
def test_a_template_cannot_reach_out_of_its_box(inside: str) -> None:
    with pytest.raises(UserError, match="refuses it"):
        ChatTemplate(f"{{{{ {inside} }}}}", tokens={}, began=BEGAN).render(CHATS[0])


def test_rendering_loads_no_model_library() -> None:
    program = "import swarm.run.prompts, sys; print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


EACH = "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}={% endfor %}"
PARTS = "{% for m in messages %}" + EACH
STRICT = "{% for m in messages %}{% if m.content is string %}{{ raise_exception('parts') }}{% endif %}" + EACH


@pytest.mark.parametrize("source", [PARTS, STRICT], ids=["silent", "strict"])
def test_a_template_for_images_is_given_parts(source: str) -> None:
    template = ChatTemplate(source, tokens={}, began=BEGAN)
    assert template.render([("system", " add "), ("user", "1+1")]) == " add =1+1="


def test_what_the_assistant_thought_may_be_left_out() -> None:
    source = "{% for m in messages if m.role == 'user' %}{{ m.content }};{% endfor %}"
    messages = [("user", " 1 "), ("assistant", "<think>"), ("user", "2")]
    assert is_printed(messages, ChatTemplate(source, tokens={}, began=BEGAN).render(messages))
