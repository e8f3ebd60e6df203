"""Makes the token ids that a player reads of what an environment says. Tokens that a model drew are never tokenised
again: an environment's turn is rendered alone, tokenised alone, and appended.

The chat is rendered with a mark in place of the model's turn, and what follows the mark is appended. An environment
cannot end its own turn or begin the model's: if its text contains a control token, such as <|im_end|>, it is cut
after its first character, so that the model reads its characters, but in other tokens. Tokens such as <think>, which
are neither special in the tokenizer nor put between turns by the template, stay as they are, as in other prompts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, count, takewhile
from typing import Any

from tokenizers import Tokenizer

from swarm.environments.base import Messages
from swarm.errors import UserError
from swarm.tasks.chat import Chat, ChatTemplate, Tools, as_chat

IGNORED = re.compile(r"</?think>|\s")
THOUGHT = "<think>\nrain\n</think>\n\nsun"
NOTED = "the model's chat template leaves thoughts out of earlier turns: in an episode they stay as they were drawn"
REFUSED = (
    "the model's chat template rewrites earlier turns when a chat goes on, so that an episode would differ from what "
    "the model has read: set other chat_arguments (such as enable_thinking), use another model, or pass --no-chat"
)


class TurnText:
    """Tokenises the turns of a chat. Without a `template`, messages are appended as they are. `stop_token_ids` end a
    turn that was not cut off."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        stop_token_ids: Collection[int],
        system_prompt: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._stops = frozenset(stop_token_ids)
        self._system = [] if system_prompt is None else as_chat([("system", system_prompt)])
        added = tokenizer.get_added_tokens_decoder()
        frame = template.render([("user", "sun"), ("assistant", "rain"), ("user", "sun")]) if template else ""
        controls = {one.content for number, one in added.items() if one.special or number in self._stops}
        controls |= {one.content for one in added.values() if one.content in frame}
        # With a lookahead, to find a token that begins within another. A single character cannot be cut.
        words = "|".join(re.escape(word) for word in sorted(controls) if len(word) > 1)
        self._control = re.compile(f"(?=(?:{words}))(.)", re.DOTALL) if words else None
        unstripped = ((n, one.content) for n, one in added.items() if n in self._stops and not one.rstrip)
        self._anchor = next(unstripped, None)

    def is_over(self, drawn: Sequence[int]) -> bool:
        """Return whether a turn ended with a stop token."""
        return bool(drawn) and drawn[-1] in self._stops

    def plain(self) -> TurnText:
        """The same for texts that are no chat."""
        return TurnText(self._tokenizer, None, self._stops)

    def token(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def opening(self, messages: Chat, tools: Tools = ()) -> list[int]:
        """Return the tokens that a player reads before its first turn. UserError if the template refuses the
        messages."""
        mark = self._mark([*messages, *tools])
        chat = as_chat(messages)
        if self._template is None:
            # The tokenizer decides whether there is a BOS, as in every plain prompt.
            first, *rest = self._cut("".join(one["content"] for one in chat), mark).split(mark)
            encoded = self._tokenizer.encode(first, add_special_tokens=True)
            return [*encoded.ids, *chain.from_iterable(map(self._encode, rest))]
        text = self._template.render(self._with_system(self._cut(chat, mark)), self._cut(list(tools), mark))
        return list(chain.from_iterable(map(self._encode, text.split(mark))))

    def reply(self, drawn: Sequence[int], messages: Chat) -> list[int]:
        """Return the tokens to append to a player's stream after its turn `drawn`: the end of the turn, unless it was
        drawn; the environment's messages; and the beginning of the next turn. UserError if the template refuses
        them."""
        mark = self._mark(messages)
        pieces = list(self._after(messages, mark))
        last = drawn[-1] if drawn else None
        if self._template is not None and last in self._stops:
            # Some templates put a space that the model did not draw before the end of a turn.
            first = self._encode(pieces[0].lstrip())
            if first[:1] == [last]:
                return [*first[1:], *chain.from_iterable(map(self._encode, pieces[1:]))]
        return list(chain.from_iterable(map(self._encode, pieces)))

    def text_of(self, drawn: Sequence[int]) -> str:
        """Return the text of a turn, as an environment reads it."""
        return completion_text(self._tokenizer, drawn, self._stops)

    def shows(self, messages: Chat, tools: Tools, texts: Sequence[str]) -> bool:
        """Return whether the chat as it is rendered has all these texts. UserError if the template refuses it."""
        whole = self._template.render(self._with_system(as_chat(messages)), tools) if self._template else None
        return whole is None or all(text in whole for text in texts)

    def check(self, opening: Messages = ()) -> str:
        """Compare what would be appended with the template's whole chats of two and three turns, which begin with
        messages like `opening`. Return a line for the user, or "". UserError if the template rewrites earlier turns."""
        if self._template is None:
            return ""
        asked = enumerate(opening or [("user", "")])
        chat = self._with_system([{"role": role, "content": f"question {place}"} for place, (role, _) in asked])
        shown = self._template.render(chat)
        is_changed = False
        for turn, answer in (("left", "You see\n\na wall."), ("right\nor up", "You are there.")):
            before, question = shown, chat[-1]["content"]
            chat += as_chat([("assistant", turn), ("user", answer)])
            shown = self._template.render(chat)
            (after,) = self._after([("user", answer)], self._mark(chat))
            kept = shown.removesuffix(turn + after)
            same = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, kept, strict=False)))
            rests = [IGNORED.sub("", text[len(same) :]) for text in (before, kept)]
            # Before an earlier turn the template may add or drop a thought or a channel's name, but not change text.
            if kept == shown or question not in same or all(rests):
                raise UserError(REFUSED)
            is_changed |= kept != before
        thought = self._template.render(
            self._with_system(as_chat([("user", "sky?"), ("assistant", THOUGHT), ("user", "sea?")]))
        )
        return NOTED if is_changed or THOUGHT not in thought else ""

    def _with_system(self, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`chat` after the run's system prompt, unless it begins with one."""
        return [*(self._system if not chat or chat[0]["role"] != "system" else ()), *chat]

    def _after(self, messages: Chat, mark: str) -> Iterator[str]:
        """Yield the text that follows a player's turn, in pieces to be tokenised one by one."""
        chat = as_chat(messages)
        if any(one["role"] == "assistant" for one in chat):
            raise UserError("an environment answered as the assistant: give its messages another role, such as user")
        if self._template is None:
            yield from self._cut("".join(one["content"] for one in chat), mark).split(mark)
            return
        chat, before = self._cut(chat, mark), as_chat([("user", "sun"), ("assistant", mark)])
        _, *pieces = self._template.render([*self._with_system(before), *chat]).split(mark)
        if len(pieces) != 1 + sum(one["content"].count(mark) for one in chat):
            raise UserError(REFUSED)
        yield from pieces

    def _cut(self, value: Any, mark: str) -> Any:
        """`value` with a mark within each control token of its texts, and without lone surrogates."""
        if isinstance(value, str):
            whole = value.encode(errors="replace").decode()
            return self._control.sub(lambda found: found[1] + mark, whole) if self._control else whole
        if isinstance(value, dict):
            return {self._cut(name, mark): self._cut(one, mark) for name, one in value.items()}
        return [self._cut(one, mark) for one in value] if isinstance(value, list) else value

    def _encode(self, text: str) -> list[int]:
        """The ids of a part of a chat. It is tokenised after a stop token, since some tokenizers add a space to the
        beginning of a text."""
        if self._anchor is not None:
            number, word = self._anchor
            anchored = self._tokenizer.encode(word + text, add_special_tokens=False).ids
            if anchored[:1] == [number]:
                return list(anchored[1:])
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _mark(self, said: Sequence[Any]) -> str:
        """A word that is in no message. It has only letters and digits, which no template changes."""
        text = str((self._system, said))
        return next(mark for mark in map("EchoTurn{}".format, count()) if mark not in text)


def completion_text(tokenizer: Tokenizer, token_ids: Sequence[int], stop_token_ids: Collection[int]) -> str:
    """The text that a reward reads: the completion without the stop token at its end. Other special tokens stay, or a
    model would learn to hide things in tokens that no reward sees."""
    kept = token_ids[:-1] if token_ids and token_ids[-1] in stop_token_ids else token_ids
    return str(tokenizer.decode(kept, skip_special_tokens=False))
