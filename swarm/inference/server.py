"""OpenAI's chat, answered by the current policy, and vLLM's token ids in and out, for the turns of leased episodes.

It listens on loopback, and wants a token that only the run's owner can read, since other users of this machine are
strangers. A page in a browser cannot send it, so no origin needs to be checked.
"""

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from hmac import compare_digest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from swarm.errors import EchoError, ProtocolError, UserError
from swarm.types import MAX_TOKENS, Rollout, SamplingRules, StopString

if TYPE_CHECKING:
    from swarm.inference.episodes import ExternalEpisodes
    from swarm.tasks.turns import TurnText

ADDRESS = "inference.json"  # In the run directory, for its owner alone: where the endpoint is, and its token
BODY_BYTES = 2 << 20  # Of a request: MAX_TOKENS token ids of some ten characters each are 1.3 MB
MAX_MESSAGES = 1024  # Of a chat: twice as many as an episode has turns
REQUESTS = 4096  # That wait, each with a connection and its tokens: more than one learner's open episodes
EPISODE = "X-Echo-Episode"  # The header that names one

TokenIds = Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1, max_length=MAX_TOKENS)]
NewTokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]


Ask = Callable[[Sequence[int], SamplingRules], Awaitable[Rollout]]
"""Has any sampler draw with the current policy; it is not trained on. Raises EchoError if none does in time."""


class GenerateRequest(msgspec.Struct, frozen=True):
    token_ids: TokenIds


class Said(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant"]
    content: str


class Chat(msgspec.Struct, frozen=True):
    """None is the run's own. `top_p` and `n` are here to be refused unless they are 1; other names are ignored."""

    messages: Annotated[tuple[Said, ...], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: NewTokens | None = None
    max_completion_tokens: NewTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    stop: StopString | Annotated[tuple[StopString, ...], Meta(max_length=16)] | None = None
    top_p: Annotated[float, Meta(ge=1, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=1)] | None = None
    stream: bool | None = None

    def rules(self, run: SamplingRules, room: int) -> SamplingRules:
        """Return the run's rules with what is asked for instead, and at most `room` new tokens."""
        most = min(self.max_completion_tokens or self.max_tokens or room, run.max_new_tokens, room)
        stop = (self.stop,) if isinstance(self.stop, str) else run.stop if self.stop is None else self.stop
        heat = run.temperature if self.temperature is None else self.temperature
        return msgspec.structs.replace(run, temperature=heat, max_new_tokens=most, stop=stop)


class Endpoint:
    """Answers requests. `rules` are the run's. The model reads up to `context` tokens, with ids below `vocabulary`.
    `episodes` are those that a program plays, if one does."""

    def __init__(self, ask: Ask, text: TurnText, rules: SamplingRules, *, context: int, vocabulary: int) -> None:
        self._ask, self._text, self._rules = ask, text, rules
        self.episodes: ExternalEpisodes | None = None
        self._context, self._vocabulary = context, vocabulary
        self.token = secrets.token_urlsafe(24)
        self._waiting = 0

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=BODY_BYTES)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Let in a caller with the token, and answer a fault as OpenAI's clients expect it."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self._waiting += 1
        try:
            if not compare_digest(given.encode(errors="replace"), self.token.encode()):
                raise web.HTTPUnauthorized(reason=f"show the token that is in {ADDRESS} of the run directory")
            if self._waiting > REQUESTS:
                raise web.HTTPTooManyRequests(reason=f"{REQUESTS} requests wait already: ask again later")
            return await handler(request)
        except web.HTTPException as fault:
            most = f" (a body has {BODY_BYTES} bytes at most)" if fault.status == 413 else f" ({request.path})"
            status, words = fault.status, f"{fault.reason}{most}"
        except (EchoError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
            # The request is at fault, or no sampler is there to draw.
            ours = isinstance(fault, EchoError) and not isinstance(fault, ProtocolError | UserError)
            status, words = 503 if ours else 400, str(fault)
        finally:
            self._waiting -= 1
        return web.json_response({"error": {"message": words, "type": "error", "code": status}}, status=status)

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "policy", "object": "model", "owned_by": "echo-node", "max_model_len": self._context}
        return web.json_response({"object": "list", "data": [card]})

    async def _generate(self, request: web.Request) -> web.Response:
        token_ids = msgspec.json.decode(await request.read(), type=GenerateRequest).token_ids
        self._room(token_ids)
        if self.episodes is None:
            raise ProtocolError("this run's episodes are played by its own environment: ask /v1/chat/completions")
        turn = await self.episodes.continue_episode(request.headers.get(EPISODE, ""), token_ids)
        drawn = zip(turn.tokens(), array("f", turn.logprobs), strict=True)
        logprobs = {"content": [{"token": f"token_id:{one}", "logprob": logprob} for one, logprob in drawn]}
        choice = {"index": 0, "token_ids": list(turn.tokens()), "finish_reason": turn.finish, "logprobs": logprobs}
        return web.json_response({"choices": [choice]})

    async def _chat(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=Chat)
        token_ids = self._text.opening([(said.role, said.content) for said in asked.messages])
        drawn = await self._ask(token_ids, asked.rules(self._rules, self._room(token_ids)))
        said = {"role": "assistant", "content": self._text.text_of(drawn.tokens())}
        key, kind = ("delta", "chat.completion.chunk") if asked.stream else ("message", "chat.completion")
        answer = {
            **{"id": drawn.rollout_id, "object": kind, "created": 0, "model": "policy"},
            "choices": [{"index": 0, key: said, "finish_reason": drawn.finish}],
        }
        if asked.stream:
            # A sampler hands in whole completions, so there is nothing finer to tell.
            event = f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n"
            return web.Response(text=event, content_type="text/event-stream")
        counts = (len(token_ids), drawn.length, len(token_ids) + drawn.length)
        usage = dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), counts, strict=True))
        return web.json_response({**answer, "usage": usage})

    def _room(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens may follow. Raise ProtocolError for ids at which an engine would fail."""
        if (largest := max(token_ids)) >= self._vocabulary:
            raise ProtocolError(f"the model has {self._vocabulary} tokens, and none with the id {largest}")
        if (room := self._context - len(token_ids)) < 1:
            raise ProtocolError(f"the model reads {self._context} tokens, and here are {len(token_ids)}: cut them")
        return room


@asynccontextmanager
async def serving(endpoint: Endpoint, run_dir: Path) -> AsyncIterator[str]:
    """Serve on a free port of 127.0.0.1 while the block runs. Yield the URL, and note it with the token."""
    path, app = run_dir / ADDRESS, endpoint.application()
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        path.unlink(missing_ok=True)
        path.touch(0o600)
        path.write_text(json.dumps({"url": url, "token": endpoint.token}))
        yield url
    finally:
        path.unlink(missing_ok=True)
        await runner.cleanup()
