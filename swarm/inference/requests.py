"""What OpenAI's clients send: which of it is followed, and which is refused because a sampler could not draw it, or
nobody could draw it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from swarm.errors import ProtocolError
from swarm.inference.calls import value_of
from swarm.types import MAX_TOKENS, SamplingRules, StopString

MAX_MESSAGES = 1024  # Of a chat: twice as many as an episode has turns
MAX_STOPS = 16  # As in types.SamplingRules
MAX_ANSWERS = 32  # To one request: half of the conversations that an episode may have

NewTokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Stop = StopString | Annotated[tuple[StopString, ...], Meta(max_length=4)] | None  # Four, as OpenAI has it


class Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str = "{}"


class ToolCall(msgspec.Struct, frozen=True):
    function: Function
    id: str = ""
    type: Literal["function"] = "function"


class Part(msgspec.Struct, frozen=True):
    type: str
    text: str = ""


class Message(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | tuple[Part, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return it as chat templates expect it. ProtocolError for what is no text."""
        parts = self.content if isinstance(self.content, tuple) else (Part("text", self.content or ""),)
        if other := next((part.type for part in parts if part.type not in ("text", "refusal")), None):
            raise ProtocolError(f"a message has a part of the type {other[:40]!r}, and the model reads texts alone")
        role = "system" if self.role == "developer" else self.role
        found: dict[str, Any] = {"role": role, "content": "".join(part.text for part in parts)}
        found |= {name: value for name in ("name", "tool_call_id") if (value := getattr(self, name)) is not None}
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "id": one.id,
                    "type": "function",
                    "function": {"name": one.function.name, "arguments": value_of(one.function.arguments)},
                }
                for one in self.tool_calls
            ]
        return found


class Streaming(msgspec.Struct, frozen=True):
    include_usage: bool = False


WHOLE = "samplers draw from the whole policy and as it is: leave it out"
AGAIN = "what it forces cannot be drawn again: leave it out, and ask in words"
REFUSED: dict[str, tuple[Sequence[Any], str]] = {
    "top_p": ((1,), WHOLE),
    "top_k": ((0, -1), WHOLE),
    "repetition_penalty": ((1,), WHOLE),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens"), ((0, {}), WHOLE)),
    "response_format": (({"type": "text"},), AGAIN),
    "tool_choice": (("auto", "none"), AGAIN),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice"), ((), AGAIN)),
    **dict.fromkeys(("top_logprobs", "echo", "suffix", "functions"), ((0, False, "", []), "leave it out")),
    "best_of": ((1,), "ask for n answers"),
}
"""Fields that would draw otherwise, the values at which they do not, and what to do."""


def refuse(body: bytes) -> None:
    """Raise ProtocolError for what cannot be kept."""
    asked = msgspec.json.decode(body, type=dict[str, Any])
    for name, (harmless, words) in REFUSED.items():
        if asked.get(name) is not None and asked[name] not in harmless:
            raise ProtocolError(f"$.{name}: {words}")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both kinds of request. None is the run's own; what is not named here is ignored."""

    model: str = ""
    max_tokens: NewTokens | None = None
    max_completion_tokens: NewTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    stop: Stop = None
    n: Annotated[int, Meta(ge=1, le=MAX_ANSWERS)] | None = None
    stream: bool | None = None
    stream_options: Streaming | None = None
    logprobs: bool | int | None = None
    seed: int | None = None
    tool_choice: Any = None

    @property
    def most(self) -> int:
        """The most new tokens; 0 if it does not say."""
        return self.max_completion_tokens or self.max_tokens or 0

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    def check_episode(self, rules: SamplingRules, names: Sequence[str]) -> None:
        """Raise ProtocolError for what a turn that is trained on cannot have."""
        if self.temperature not in (None, rules.temperature):
            raise ProtocolError(f"the run draws at the temperature {rules.temperature:g}, not {self.temperature:g}")
        if len(rules.stop) + len(self.stops) > MAX_STOPS:
            raise ProtocolError(
                f"the run has {len(rules.stop)} stop strings, and with yours there are over {MAX_STOPS}"
            )
        if self.model not in names:
            raise ProtocolError(f"no model {self.model[:64]!r} is trained here: name {names[0]}, or another base_url")


class ChatRequest(Request, frozen=True, kw_only=True):
    messages: Annotated[tuple[Message, ...], Meta(min_length=1, max_length=MAX_MESSAGES)]
    tools: tuple[dict[str, Any], ...] | None = None

    @property
    def offered(self) -> tuple[dict[str, Any], ...]:
        return self.tools if self.tools and self.tool_choice != "none" else ()


class TextRequest(Request, frozen=True, kw_only=True):
    prompt: Annotated[str, Meta(min_length=1)]


class RewardRequest(msgspec.Struct, frozen=True):
    """Credit for the call that was answered as `id`, or for the newest one."""

    reward: float
    id: Annotated[str, Meta(max_length=64)] | None = None


def as_sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of ours as clients expect it."""
    if not (calls := message.get("tool_calls")):
        return dict(message)
    called = [
        {**one, "function": {**one["function"], "arguments": json.dumps(one["function"]["arguments"])}} for one in calls
    ]
    return {**message, "content": message["content"] or None, "tool_calls": called}
