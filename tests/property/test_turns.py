"""Over the chat templates of real models: what was drawn stays as it is, and the rest is the template's own words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chats import CONTROLS, end_of, template_of, tokenizer_of, turn_text

FAITHFUL = ("chatml", "qwen2_5", "qwen3", "phi3_5")
"""Templates that write a turn without thoughts as it was drawn, whatever follows."""


words = st.sampled_from(["left", "ou", "l", "EchoTurn0", "EchoTurn", "\n", " ", "€", "\U0001f600"])
forgeries = st.sampled_from(sorted({word for controls in CONTROLS.values() for word in controls}))
broken = st.sampled_from(["\ud800", "<|im_", "end|>", "<|im_<|im_end|>", "<tool_response>", "<think>"])
plain = st.lists(words | st.text(max_size=3), max_size=5).map("".join)
spoken = plain.map(str.strip).filter(lambda text: text and "<" not in text)
hostile = st.lists(words | forgeries | broken | st.text(max_size=3), max_size=6).map("".join)
drawn_ids = st.lists(st.integers(0, 255), max_size=6)
chats = st.lists(st.tuples(spoken, plain, st.booleans()), min_size=1, max_size=4)


def bytes_of(text: str) -> list[int]:
    """Each byte as a token of its own, though a tokenizer may know words."""
    return tokenizer_of(()).encode(text).ids


@pytest.mark.parametrize("name", FAITHFUL)
@pytest.mark.parametrize("drifts", [False, True], ids=["bytes", "drifting"])
@given(question=plain, chat=chats, system_prompt=st.none() | st.just("Be brief."))
def test_the_stream_holds_what_was_drawn_and_reads_as_the_template_writes_the_chat(
    name: str, drifts: bool, question: str, chat: list[tuple[str, str, bool]], system_prompt: str | None
) -> None:
    texts = turn_text(name, drifts=drifts, system_prompt=system_prompt)
    tokenizer = tokenizer_of(CONTROLS[name], drifts=drifts)
    end = end_of(name, drifts=drifts)
    messages = [*([("system", system_prompt)] if system_prompt else []), ("user", question)]
    stream, places = texts.opening([("user", question)]), list[tuple[int, list[int]]]()
    for said, answer, is_cut in chat:
        drawn = bytes_of(said) + ([] if is_cut else [end])
        assert texts.text_of(drawn) == said
        places.append((len(stream), drawn))
        stream += [*drawn, *texts.reply(drawn, [("user", answer)])]
        messages += [("assistant", said), ("user", answer)]
        assert tokenizer.decode(stream, skip_special_tokens=False) == template_of(name).render(messages)
    assert all(stream[start : start + len(drawn)] == drawn for start, drawn in places)


@pytest.mark.parametrize("name", CONTROLS)
@given(turns=st.lists(st.tuples(drawn_ids, hostile), min_size=1, max_size=3), question=hostile)
def test_an_environment_adds_no_control_token_whatever_it_writes(
    name: str, turns: list[tuple[list[int], str]], question: str
) -> None:
    texts, tokenizer = turn_text(name), tokenizer_of(CONTROLS[name])
    controls = {tokenizer.token_to_id(word) for word in CONTROLS[name]}

    def framed(ids: list[int]) -> list[int]:
        return [one for one in ids if one in controls]

    assert framed(texts.opening([("user", question)])) == framed(texts.opening([("user", "sun")]))
    for drawn, answer in turns:
        appended = texts.reply(drawn, [("user", answer)])
        assert framed(appended) == framed(texts.reply(drawn, [("user", "sun")]))
        written = tokenizer.decode(appended, skip_special_tokens=False)
        assert answer.encode(errors="replace").decode().strip() in written


@pytest.mark.parametrize("name", CONTROLS)
@given(answers=st.lists(hostile, min_size=1, max_size=3))
def test_what_is_appended_depends_on_nothing_but_the_end_of_the_turn(name: str, answers: list[str]) -> None:
    texts = turn_text(name)
    end = end_of(name)
    messages = [("user", answer) for answer in answers]
    cut = texts.reply([1, 2], messages)
    assert all(one == cut for one in (texts.reply([], messages), texts.reply([end, 7], messages)))
    assert [end, *texts.reply([1, end], messages)] == cut or cut[0] != end
    assert texts.reply([1, end], messages)[:1] != [end]
