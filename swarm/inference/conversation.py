"""What an episode's program has read and had drawn: conversations of tokens, each a player's own stream.

A program sends its whole chat with each call, as OpenAI's clients do. If the chat goes on from a turn that was drawn,
message by message, only what is new is tokenised, and appended to what that turn left, token by token. If the turn was
gone on from already (a parallel call, or one of several answers), its tokens are copied into a stream of their own, in
which they are read and not trained on again. If the chat goes on from no turn, since history was rewritten or the
template leaves out a thought, it begins a stream as its messages are rendered now. So every drawn token is trained on
once, after exactly what was read before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.errors import ProtocolError, UserError
from swarm.inference.calls import read_calls
from swarm.tasks.base import SEAT
from swarm.tasks.turns import TurnText
from swarm.types import MAX_SEATS

THOUGHT_ENDS = "</think>"
NO_TOOLS, TEXT = "[]", ""

Messages = Sequence[Mapping[str, Any]]
"""As OpenAI has them, but each with a content that is a text, and arguments of calls as they are in JSON."""

Heard = tuple[str, str, str]
"""A message as two are compared: role, text, and the calls of tools by name and arguments."""


def heard(message: Mapping[str, Any]) -> Heard:
    """Return what counts of a message: clients strip texts, and name calls in another way."""
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls") or ()]
    return message["role"], message["content"].strip(), json.dumps(calls, sort_keys=True)


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a drawn turn: how many messages and tokens its stream had with it, and its text. In a stream that is
    no chat, `whole` is all text up to it; after a stop token none goes on."""

    messages: int
    tokens: int
    drawn: Sequence[int]
    text: str
    whole: str | None = None


@dataclass(slots=True, eq=False)
class _Stream:
    """One conversation, which knows these `tools`, or a text that goes on, whose are TEXT."""

    tools: str
    heard: list[Heard] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    ends: list[_End] = field(default_factory=list)


class Conversations:
    """The streams of one episode, by seat. `text` is how the run tokenises a chat."""

    def __init__(self, text: TurnText) -> None:
        self._text, self._plain = text, text.plain()
        self._streams: list[_Stream] = []

    @property
    def forks(self) -> int:
        """The number of streams after the first."""
        return max(0, len(self._streams) - 1)

    def go_on(self, chat: Messages | str, tools: Messages = ()) -> tuple[int, list[int]]:
        """Return whose turn is next and what is appended to its stream. Raise ProtocolError if it is one too many."""
        if isinstance(chat, str):
            said, named = [("text", chat, "")], TEXT
        else:
            said, named = [heard(one) for one in chat], json.dumps(list(tools), sort_keys=True)
        stream, end = self._found(said, named)
        if stream is not None and end is not None and (read := self._reply(chat, tools, stream, end)) is not None:
            if end is stream.ends[-1]:
                return self._read(stream, said, read)
            kept = [one for one in stream.ends if one.tokens <= end.tokens]
            copy = _Stream(named, stream.heard[: end.messages], [], kept)
            return self._read(self._added(copy), said, [*stream.token_ids[: end.tokens], *read])
        begun = self._plain.opening([("user", chat)]) if isinstance(chat, str) else self._text.opening(chat, tools)
        return self._read(self._added(_Stream(named)), said, begun)

    def drawn(self, seat: int, token_ids: Sequence[int], stops: Sequence[str] = ()) -> dict[str, Any]:
        """Take the turn of a seat. Return it as the message that the program reads, without what a stop string ended
        it with."""
        stream, text = self._streams[seat - SEAT], self._text.text_of(token_ids)
        said = text[: min((at for at in map(text.find, stops) if at >= 0), default=None)]
        knows = stream.tools not in (NO_TOOLS, TEXT)
        content, calls = read_calls(said, len(stream.heard)) if knows else (said, [])
        message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
        stream.token_ids += token_ids
        goes_on = stream.tools == TEXT and not self._text.is_over(token_ids)
        whole = stream.heard[0][1] + text if goes_on else None
        stream.heard.append(heard(message))
        stream.ends.append(_End(len(stream.heard), len(stream.token_ids), token_ids, text, whole))
        return message

    def length(self, seat: int) -> int:
        return len(self._streams[seat - SEAT].token_ids)

    def _found(self, said: list[Heard], tools: str) -> tuple[_Stream | None, _End | None]:
        """Return the last drawn turn that this chat goes on from, with its stream."""
        ends = [
            (end.messages, end is stream.ends[-1], stream, end)
            for stream in self._streams
            for end in stream.ends
            if stream.tools == tools and _begins(said, stream, end)
        ]
        *_, stream, end = max(ends, key=lambda found: found[:2], default=(0, False, None, None))
        return stream, end

    def _reply(self, chat: Messages | str, tools: Messages, stream: _Stream, end: _End) -> list[int] | None:
        """Return the tokens of what is new in the chat; None if the template would not go on from that turn."""
        if isinstance(chat, str):
            return self._plain.reply(end.drawn, [("user", chat[len(end.whole or "") :])])
        drawn = [one.text for one in stream.ends if one.tokens <= end.tokens and THOUGHT_ENDS in one.text]
        thoughts = [text.partition(THOUGHT_ENDS)[0].strip().removeprefix("<think>").strip() for text in drawn]
        try:
            if thoughts and not self._text.shows(chat, tools, thoughts):
                return None
            return self._text.reply(end.drawn, chat[end.messages :])
        except UserError:
            return None

    def _added(self, stream: _Stream) -> _Stream:
        if len(self._streams) + SEAT == MAX_SEATS:
            raise ProtocolError(f"this episode has {len(self._streams)} conversations, the most that it may have")
        self._streams.append(stream)
        return stream

    def _read(self, stream: _Stream, said: list[Heard], read: list[int]) -> tuple[int, list[int]]:
        stream.heard = said
        stream.token_ids += read
        return SEAT + self._streams.index(stream), read


def _begins(said: list[Heard], stream: _Stream, end: _End) -> bool:
    """Return whether a chat, or a text, begins with all up to this turn."""
    if stream.tools == TEXT:
        return end.whole is not None and said[0][1].startswith(end.whole) and said[0][1] != end.whole
    return said[: end.messages] == stream.heard[: end.messages]
