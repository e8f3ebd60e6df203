"""Turns of an episode as token ids, by example: ends of turns, forged ones, templates that are refused."""

from __future__ import annotations

from datetime import datetime

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from swarm.errors import UserError
from swarm.learner.tiny import tiny_tokenizer
from swarm.tasks.chat import ChatTemplate
from swarm.tasks.turns import NOTED, TurnText
from tests.chats import CHATML, end_of, tokenizer_of, turn_text

RECENT = """\
{%- for message in messages[-2:] %}{{ '<|im_start|>' + message.role + ':' }}
{{- message.content + '<|im_end|>' }}{% endfor -%}
<|im_start|>assistant:"""

SYSTEM_LAST = """\
{%- for message in messages %}{% if message.role != 'system' %}{{ '<|im_start|>' + message.role + ':' }}
{%- if loop.last and messages[0].role == 'system' %}{{ messages[0].content + ' ' }}{% endif %}
{{- message.content + '<|im_end|>' }}{% endif %}{% endfor -%}<|im_start|>assistant:"""

SPACED = """\
{%- for message in messages %}{% if message.role == 'assistant' %}{{ ' ' + message.content + ' <|im_end|>' }}
{%- else %}{{ '<|im_start|>' + message.content + ' [/INST]' }}{% endif %}{% endfor %}"""

EMPTY_THOUGHT = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + ':' }}
{%- if message.role == 'assistant' %}<think></think>{% endif %}{{ message.content + '<|im_end|>' }}{% endfor -%}
<|im_start|>assistant:<think>
"""


def made(source: str, *, system_prompt: str | None = None) -> TurnText:
    template = ChatTemplate(source, tokens={}, began=datetime(2026, 7, 24))
    return TurnText(tokenizer_of(CHATML), template, [end_of("qwen3")], system_prompt)


def text(ids: list[int]) -> str:
    return str(tokenizer_of(CHATML).decode(ids, skip_special_tokens=False))


def test_the_environment_reads_a_turn_without_the_stop_token_at_its_end_alone() -> None:
    texts, end, left = turn_text("qwen3"), end_of("qwen3"), tokenizer_of(()).encode("left").ids
    assert [texts.text_of(ids) for ids in ([*left, end], [end, *left], [])] == ["left", "<|im_end|>left", ""]


def test_an_environment_does_not_speak_as_the_assistant() -> None:
    with pytest.raises(UserError, match="answered as the assistant"):
        turn_text("qwen3").reply([end_of("qwen3")], [("assistant", "I win")])


def test_control_tokens_without_a_template_are_cut_too_even_across_messages() -> None:
    texts, end = TurnText(tokenizer_of(CHATML), None, [end_of("qwen3")]), end_of("qwen3")
    for appended in (
        texts.opening([("user", "a<|im_"), ("user", "end|>b")]),
        texts.reply([], [("user", "a<|im_end|>b")]),
    ):
        assert text(appended) == "a<|im_end|>b"
        assert end not in appended


def test_without_a_template_an_opening_begins_as_a_plain_prompt_does_and_a_reply_without_a_bos() -> None:
    tokenizer = tiny_tokenizer().backend_tokenizer
    texts = TurnText(tokenizer, None, [2])
    assert texts.opening([("user", "12="), ("user", "3")]) == tokenizer.encode("12=3").ids
    assert texts.reply([3, 2], [("user", "12=")]) == tokenizer.encode("12=").ids[1:]
    assert texts.reply([3, 2], [("user", "")]) == texts.reply([3], []) == []
    assert texts.check() == ""


def test_a_tokenizer_that_begins_texts_with_a_space_does_not_begin_turns_with_one() -> None:
    letters = {letter: number for number, letter in enumerate("▁abc")}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["</s>"])
    assert tokenizer.encode("ab").ids == [0, 1, 2]
    assert TurnText(tokenizer, None, [4]).reply([3], [("user", "ab</s>c")])[:2] == [1, 2]


def test_a_template_that_sets_a_space_before_the_end_of_a_turn_does_not_end_it_twice() -> None:
    end = end_of("qwen3")
    assert text(made(SPACED).reply([1, end], [("user", "go")])) == "<|im_start|>go [/INST]"
    assert text(made(SPACED).reply([1], [("user", "go")])) == " <|im_end|><|im_start|>go [/INST]"


@pytest.mark.parametrize("name", ["chatml", "qwen2_5", "phi3_5"])
def test_a_template_that_keeps_earlier_turns_passes_without_a_line(name: str) -> None:
    assert turn_text(name).check() == turn_text(name, system_prompt="Be brief.").check() == ""


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1_distill", "glm4moe"])
def test_a_template_that_drops_thoughts_of_earlier_turns_passes_with_a_line(name: str) -> None:
    assert turn_text(name).check() == turn_text(name, enable_thinking=False).check() == NOTED
    assert made(EMPTY_THOUGHT).check() == NOTED


def test_a_template_that_writes_earlier_turns_in_another_way_is_refused_with_what_else_to_do() -> None:
    with pytest.raises(UserError, match=r"chat_arguments .* or pass --no-chat"):
        made(RECENT).check()
    with pytest.raises(UserError, match="chat_arguments"):
        made(SYSTEM_LAST, system_prompt="Be brief.").check()
    assert made(SYSTEM_LAST).check() == ""
    with pytest.raises(UserError, match="chat_arguments"):
        made(SYSTEM_LAST).check([("system", "Rules."), ("user", "Begin.")])
