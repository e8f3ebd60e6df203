"""Chats that go on, branch, are rewritten and lose turns, over the templates of real models: every drawn token is in
one place of one stream, after exactly what was read when it was drawn."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import UserError
from swarm.inference.conversation import Conversations
from swarm.tasks.base import SEAT
from tests.chats import CONTROLS, end_of, template_of, tokenizer_of, turn_text

THINKING = ("qwen3", "deepseek_r1_distill", "glm4moe")  # Their templates leave thoughts out of earlier turns
FAITHFUL = ("chatml", "qwen2_5", "phi3_5", "llama3_1", "lfm2")

said = st.text("abc <>\n{}é", min_size=1, max_size=6).filter(lambda text: text.strip() == text)
moves = st.lists(
    st.tuples(
        st.sampled_from(["go on", "again", "rewrite", "drop", "new"]), st.integers(0, 5), said, said, st.booleans()
    ),
    min_size=1,
    max_size=9,
)


def ids(text: str) -> list[int]:
    return tokenizer_of(()).encode(text).ids


class Player:
    """Makes calls and draws as a program and a sampler do, and keeps what each turn was drawn after."""

    def __init__(self, name: str) -> None:
        self.name, self.conversations = name, Conversations(turn_text(name))
        self.streams: dict[int, list[int]] = {}
        self.turns: list[tuple[int, int, list[int], list[int]]] = []  # Seat, start, what was read before, drawn

    def call(self, chat: list[dict[str, Any]], answer: str, *, is_cut: bool = False) -> list[dict[str, Any]]:
        """Return the chat with the answer."""
        seat, read = self.conversations.go_on(chat)
        stream = self.streams.setdefault(seat, [])
        stream += read
        shown, at = tokenizer_of(CONTROLS[self.name]).decode(stream, skip_special_tokens=False), 0
        if self.name in FAITHFUL:
            assert shown.strip() == template_of(self.name).render(chat).strip()
        for one in chat:
            text = one["content"].rpartition("</think>")[2].strip()
            assert (at := shown.find(text, at)) >= 0, "a message is not read, or not where it was said"
        drawn = ids(answer) + ([] if is_cut else [end_of(self.name)])
        self.turns.append((seat, len(stream), [*stream], drawn))
        stream += drawn
        return [*chat, self.conversations.drawn(seat, drawn)]

    def check(self) -> None:
        places = set[tuple[int, int]]()
        for seat, start, before, drawn in self.turns:
            assert self.streams[seat][: start + len(drawn)] == [*before, *drawn]
            taken = {(seat, place) for place in range(start, start + len(drawn))}
            assert not taken & places, "a token would be trained on twice"
            places |= taken
        assert sorted(self.streams) == list(range(SEAT, SEAT + len(self.streams)))


@pytest.mark.parametrize("name", CONTROLS)
@given(moves=moves)
def test_each_token_is_drawn_in_one_place_after_what_was_read(name: str, moves: list[Any]) -> None:
    player, chats = Player(name), [[{"role": "user", "content": "hello"}]]
    chats.append(player.call(chats[0], "hi"))
    for kind, number, question, answer, is_cut in moves:
        chat = chats[number % len(chats)]
        match kind:
            case "again":
                asked = chat[: -1 if chat[-1]["role"] == "assistant" else None]  # As a retry or a parallel call does
            case "rewrite":
                asked = [{**one, "content": one["content"] + "!"} if n == 1 else one for n, one in enumerate(chat)]
            case "drop":
                asked = chat[2:]
            case "new":
                asked = []
            case _:
                asked = chat
        if not asked or asked[-1]["role"] == "assistant":
            asked = [*asked, {"role": "user", "content": question}]
        chats.append(player.call(asked, answer, is_cut=is_cut))
    player.check()
    assert player.conversations.forks == len(player.streams) - 1


@pytest.mark.parametrize("name", FAITHFUL)
@given(answers=st.lists(said, min_size=2, max_size=4))
def test_a_chat_that_goes_on_is_one_stream_that_reads_as_the_template_writes_it(name: str, answers: list[str]) -> None:
    player, chat = Player(name), list[dict[str, Any]]()
    for answer in answers:
        chat = player.call([*chat, {"role": "user", "content": "why?"}], answer)
    player.check()
    assert player.conversations.forks == 0
    last = player.turns[-1][2]
    shown = tokenizer_of(CONTROLS[name]).decode(last, skip_special_tokens=False)
    assert shown.strip() == template_of(name).render(chat[:-1]).strip()


@pytest.mark.parametrize("name", THINKING)
def test_a_thought_that_the_template_leaves_out_forks(name: str) -> None:
    player = Player(name)
    chat = player.call([{"role": "user", "content": "sky?"}], "<think>\nrain\n</think>\n\nsun")
    player.call([*chat, {"role": "user", "content": "sea?"}], "wet")
    player.check()
    assert player.conversations.forks == 1
    read = tokenizer_of(CONTROLS[name]).decode(player.turns[1][2], skip_special_tokens=False)
    assert "rain" not in read
    assert "sun" in read


@pytest.mark.parametrize("name", FAITHFUL)
def test_a_parallel_call_copies_the_tokens_that_it_goes_on_from(name: str) -> None:
    """They are those that were drawn, although a tokenizer would write the same text with fewer."""
    player = Player(name)
    chat = player.call([{"role": "user", "content": "a"}], "left")
    more = [*chat, {"role": "user", "content": "b"}]
    for answer in ("x", "y", "z"):
        player.call(more, answer)
    player.check()
    assert player.conversations.forks == 2
    assert len({tuple(before) for _, _, before, _ in player.turns[1:]}) == 1


def test_what_no_template_can_write_is_its_asker_s_fault() -> None:
    class Refuses:
        def opening(self, chat: Any, tools: Any) -> list[int]:
            raise UserError("the model's chat template refuses it")

        def plain(self) -> Any:
            return self

    with pytest.raises(UserError, match="refuses"):
        Conversations(Refuses()).go_on([{"role": "user", "content": "a"}])  # type: ignore[arg-type]


@given(parts=st.lists(st.tuples(said, said), min_size=1, max_size=4), fork=st.integers(0, 3))
def test_a_text_that_goes_on_is_one_stream_and_another_forks(parts: list[tuple[str, str]], fork: int) -> None:
    player, text = Player("chatml"), ""
    texts = [text]
    for asked, answer in parts:
        text += asked
        seat, read = player.conversations.go_on(text)
        stream = player.streams.setdefault(seat, [])
        stream += read
        player.turns.append((seat, len(stream), [*stream], ids(answer)))
        stream += ids(answer)
        text += player.conversations.drawn(seat, ids(answer))["content"]
        texts.append(text)
    player.check()
    assert player.conversations.forks == 0
    assert tokenizer_of(()).decode(player.streams[SEAT]) == text
    player.conversations.go_on(f"{texts[fork % len(parts)]}~")
    assert player.conversations.forks == 1


def test_a_text_goes_on_neither_after_a_stop_token_nor_with_nothing_new() -> None:
    """Its asker never wrote the token, and two calls with one text are two answers to it."""
    conversations = Conversations(turn_text("chatml"))
    seat, _ = conversations.go_on("a")
    conversations.drawn(seat, [*ids("b"), end_of("chatml")])
    assert conversations.go_on("abc") == (seat + 1, ids("abc"))
    conversations.drawn(seat + 1, ids("d"))
    assert conversations.go_on("abcd") == (seat + 2, ids("abcd"))
