"""OpenAI's endpoint, answered by the current policy: chats and completions, for people and for the turns of episodes.

It listens on loopback, and wants a token that only the run's owner can read, since other users of this machine are
strangers. A page in a browser cannot send it, so no origin needs to be checked. A program that plays episodes has a key
for each, with which it can ask for that episode's turns and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hmac import compare_digest
from hmac import digest as hmac_digest
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout, web

from swarm.errors import EchoError, ProtocolError, UserError
from swarm.inference.conversation import Conversations, Messages
from swarm.inference.episodes import ExternalEpisodes, Said
from swarm.inference.requests import ChatRequest, Request, RewardRequest, TextRequest, as_sent, refuse
from swarm.tasks.programs import POLICY
from swarm.types import MAX_TOKENS, Rollout, SamplingRules, TurnLimits

if TYPE_CHECKING:
    from swarm.tasks.turns import TurnText

ADDRESS = "inference.json"  # In the run directory, for its owner alone: where the endpoint is, and its token
BODY_BYTES = 2 << 20  # Of a request: a chat as long as the longest context is under 1 MB
REQUESTS = 4096  # That wait, each with a connection and its tokens: more than one learner's open episodes

JUDGE, JUDGE_S = "judge", 600.0  # The model's name for agents, and the longest that it may think
EPISODE = web.RequestKey("episode", str)  # That the caller's key is of; "" for the owner's token

Ask = Callable[[Sequence[int], SamplingRules], Awaitable[Rollout]]
"""Has any sampler draw with the current policy; it is not trained on. Raises EchoError if none does in time."""


class Endpoint:
    """Answers requests. `rules` are the run's. The model, called policy or `model`, reads up to `context` tokens.
    `episodes` are those that a program plays, if one does. Their calls of the model "judge" go to the URL `judge`."""

    def __init__(
        self,
        ask: Ask,
        text: TurnText,
        rules: SamplingRules,
        *,
        context: int,
        model: str = POLICY,
        judge: str | None = None,
    ) -> None:
        self._ask, self._text, self._rules, self._names = ask, text, rules, (POLICY, model)
        self._context = min(context, MAX_TOKENS)
        self.episodes: ExternalEpisodes | None = None
        self._judge = judge
        self.token = secrets.token_urlsafe(24)
        self._waiting = 0

    def key_of(self, episode: str) -> str:
        """Return the key with which a program asks for the turns of an episode."""
        proof = hmac_digest(self.token.encode(), episode.encode(errors="replace"), "sha256")
        return f"{proof.hex()[:32]}:{episode}"

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/reward", self._reward)
        app.router.add_get("/v1/models", self._models)
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Let in a caller with the token or a key, and answer a fault as OpenAI's clients expect it."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        episode = given.partition(":")[2]
        known = self.key_of(episode) if episode else self.token
        self._waiting += 1
        try:
            if not compare_digest(given.encode(errors="replace"), known.encode(errors="replace")):
                raise web.HTTPUnauthorized(reason=f"show the token that is in {ADDRESS} of the run directory")
            if self._waiting > REQUESTS:
                raise web.HTTPTooManyRequests(reason=f"{REQUESTS} requests wait already: ask again later")
            request[EPISODE] = episode
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
        card = {"id": POLICY, "object": "model", "owned_by": "echo-node", "max_model_len": self._context}
        return web.json_response({"object": "list", "data": [card]})

    async def _chat(self, request: web.Request) -> web.Response:
        if (judged := await self._judged(request)) is not None:
            return judged
        refuse(body := await request.read())
        asked = msgspec.json.decode(body, type=ChatRequest)
        said = await self._said(request[EPISODE], asked, [one.plain() for one in asked.messages], asked.offered)
        return answered(asked, said, self._text)

    async def _complete(self, request: web.Request) -> web.Response:
        if (judged := await self._judged(request)) is not None:
            return judged
        refuse(body := await request.read())
        asked = msgspec.json.decode(body, type=TextRequest)
        return answered(asked, await self._said(request[EPISODE], asked, asked.prompt, ()), self._text)

    async def _reward(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=RewardRequest)
        turn = asked.id.rpartition("-")[2] if asked.id is not None else None
        self._played().reward(request[EPISODE], asked.reward, int(turn) if turn and turn.isdecimal() else None)
        return web.json_response({})

    async def _said(self, episode: str, asked: Request, chat: Messages | str, tools: Messages) -> Sequence[Said]:
        """Have it drawn: as turns of an episode, or for a person, outside of the run."""
        count, rules = asked.n or 1, self._rules
        if episode:
            asked.check_episode(rules, self._names)
            limits = TurnLimits(max_new_tokens=asked.most, stop=asked.stops)
            return await self._played().ask(episode, chat, tools, limits, count, seeded=asked.seed is not None)
        heat = rules.temperature if asked.temperature is None else asked.temperature
        stop = rules.stop if asked.stop is None else asked.stops
        rules = msgspec.structs.replace(rules, temperature=heat, stop=stop)
        return await asyncio.gather(*(self._one(asked, chat, tools, rules) for _ in range(count)))

    async def _one(self, asked: Request, chat: Messages | str, tools: Messages, rules: SamplingRules) -> Said:
        conversation = Conversations(self._text)
        seat, token_ids = conversation.go_on(chat, tools)
        if (room := self._context - len(token_ids)) < 1:
            raise ProtocolError(f"the model reads {self._context} tokens, and here are {len(token_ids)}: cut them")
        most = min(asked.most or room, rules.max_new_tokens, room)
        drawn = await self._ask(token_ids, msgspec.structs.replace(rules, max_new_tokens=most))
        message = conversation.drawn(seat, drawn.tokens(), rules.stop)
        return Said(message, drawn, len(token_ids), drawn.rollout_id)

    async def _judged(self, request: web.Request) -> web.Response | None:
        """Return what the judge answers to an agent's call of it; None if it is a call of the policy."""
        if self._judge is None or not request[EPISODE]:
            return None
        asked = msgspec.json.decode(await request.read(), type=dict[str, Any])
        if asked.get("model") != JUDGE:
            return None
        base, _, model = self._judge.partition("#")
        asked |= {"model": model or JUDGE}
        headers = {"Authorization": f"Bearer {os.environ.get('JUDGE_API_KEY', '-')}"}
        try:
            async with (
                ClientSession(timeout=ClientTimeout(total=JUDGE_S)) as session,
                session.post(
                    f"{base.rstrip('/')}{request.path.removeprefix('/v1')}", json=asked, headers=headers
                ) as answer,
            ):
                body = b""
                async for part in answer.content.iter_any():
                    body += part
                    if len(body) > BODY_BYTES:
                        raise EchoError(f"the judge at {base} answers with more than {BODY_BYTES} bytes: ask for less")
                return web.Response(status=answer.status, body=body, content_type=answer.content_type)
        except (ClientError, TimeoutError) as fault:
            raise EchoError(f"the judge at {base} does not answer: {type(fault).__name__}") from fault

    def _played(self) -> ExternalEpisodes:
        if self.episodes is None:
            raise ProtocolError("this run's episodes are played by its own environment")
        return self.episodes


def answered(asked: Request, said: Sequence[Said], text: TurnText) -> web.Response:
    """Return an answer as OpenAI has it. With `stream` the whole comes at once: samplers hand in whole completions."""
    is_chat = isinstance(asked, ChatRequest)
    kind = "chat.completion" if is_chat else "text_completion"
    choices = []
    for index, one in enumerate(said):
        message = as_sent(one.message)
        body = {"message": message} if is_chat else {"text": one.message["content"]}
        finish = "tool_calls" if message.get("tool_calls") else one.drawn.finish
        logprobs = _logprobs(one.drawn, text, is_chat=is_chat) if asked.logprobs else None
        choices.append({"index": index, **body, "finish_reason": finish, "logprobs": logprobs})
    read, drew = sum(one.read for one in said[:1]), sum(one.drawn.length for one in said)
    usage = {"prompt_tokens": read, "completion_tokens": drew, "total_tokens": read + drew}
    whole = {"id": said[0].name, "object": kind, "created": int(time.time()), "model": asked.model or POLICY}
    if not asked.stream:
        return web.json_response({**whole, "choices": choices, "usage": usage})
    events = [{**whole, "choices": [part(one) for one in choices]} for part in (_begun, _ended)]
    if asked.stream_options is not None and asked.stream_options.include_usage:
        events.append({**whole, "choices": [], "usage": usage})
    for event in events:
        event["object"] = f"{kind}.chunk" if is_chat else kind
    lines = [*(json.dumps(event) for event in events), "[DONE]"]
    return web.Response(text="".join(f"data: {line}\n\n" for line in lines), content_type="text/event-stream")


def _begun(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice as the first event of a stream has it."""
    found = {**choice, "finish_reason": None}
    if (message := found.pop("message", None)) is not None:
        calls = [{"index": n, **one} for n, one in enumerate(message.get("tool_calls", ()))]
        found["delta"] = {**message, **({"tool_calls": calls} if calls else {})}
    return found


def _ended(choice: dict[str, Any]) -> dict[str, Any]:
    nothing: dict[str, Any] = {"delta": {}} if "message" in choice else {"text": ""}
    return {"index": choice["index"], **nothing, "finish_reason": choice["finish_reason"], "logprobs": None}


def _logprobs(drawn: Rollout, text: TurnText, *, is_chat: bool) -> dict[str, Any]:
    """Return the log-prob of each token. Its bytes are those of the token alone, which may be part of a character."""
    words, values = [text.token(one) for one in drawn.tokens()], list(array("f", drawn.logprobs))
    if not is_chat:
        offsets = [*accumulate(map(len, words), initial=0)][:-1]
        return {"tokens": words, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}
    each: list[dict[str, Any]] = [
        {"token": one, "logprob": value, "bytes": None, "top_logprobs": []}
        for one, value in zip(words, values, strict=True)
    ]
    return {"content": each, "refusal": None}


@dataclass(frozen=True, slots=True)
class Place:
    """Where an endpoint listens: on loopback, and at a socket in a directory that no other user can enter."""

    url: str
    socket: str


@asynccontextmanager
async def serving(endpoint: Endpoint, run_dir: Path, port: int = 0) -> AsyncIterator[Place]:
    """Serve on a port of 127.0.0.1, any free one if it is 0, while the block runs. Note the URL with the token."""
    path, app = run_dir / ADDRESS, endpoint.application()
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        with tempfile.TemporaryDirectory(prefix="echo-node-") as directory:
            socket = str(Path(directory, "endpoint"))
            await web.UnixSite(runner, socket, backlog=REQUESTS).start()
            await web.TCPSite(runner, "127.0.0.1", port, backlog=REQUESTS).start()
            url = next(f"http://127.0.0.1:{one[1]}" for one in runner.addresses if isinstance(one, tuple))
            path.unlink(missing_ok=True)
            path.touch(0o600)
            path.write_text(json.dumps({"url": url, "token": endpoint.token}))
            yield Place(url, socket)
    finally:
        path.unlink(missing_ok=True)
        await runner.cleanup()
