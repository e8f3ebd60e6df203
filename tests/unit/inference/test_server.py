"""The endpoint, over loopback, with a policy that says what the test wants."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from swarm.inference import server
from swarm.inference.episodes import ExternalEpisodes
from swarm.inference.server import ADDRESS, Endpoint, serving
from swarm.tasks.base import EpisodeResult
from swarm.tasks.turns import TurnText
from swarm.types import Prompt
from tests.unit.inference.scripted import RULES, ScriptedPolicy, drawn, endpoint, letters

CHAT, TEXT, REWARD, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/reward", "/v1/models"
HELLO = [{"role": "user", "content": "hello"}]


async def post(
    policy: ScriptedPolicy | Endpoint, path: str, body: Any, *, token: str | None = None, **headers: str
) -> tuple[int, Any]:
    """Return the status and the answer, which is JSON or else the text."""
    served = policy if isinstance(policy, Endpoint) else endpoint(policy)
    async with TestClient(TestServer(served.application())) as client:
        known = {"Authorization": f"Bearer {served.token if token is None else token}"}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with client.post(path, data=data, headers={**known, **headers}) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if answer.content_type == "application/json" else text


@pytest.mark.parametrize("path", [TEXT, CHAT, REWARD])
@pytest.mark.parametrize("token", ["", "wrong", "é", ":", "0123:t0/1.2"])
async def test_nothing_is_asked_without_the_token(path: str, token: str) -> None:
    policy = ScriptedPolicy()
    status, answer = await post(policy, path, {"prompt": "a", "messages": HELLO, "reward": 1}, token=token)
    assert status == 401
    assert ADDRESS in answer["error"]["message"]
    assert policy.asked == []


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (TEXT, b"{", "truncated"),
        (CHAT, b'{"messages": [{"role": "user", "content": "\xff"}]}', "utf-8"),
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": ""}, "$.prompt"),
        (TEXT, {"prompt": "a" * 64}, "reads 64 tokens, and here are 64"),
        (REWARD, {"reward": 1}, "played by its own environment"),
        (CHAT, {"messages": []}, "$.messages"),
        (CHAT, {"messages": [{"role": "oracle", "content": ""}]}, "$.messages[0].role"),
        (CHAT, {"messages": HELLO * 20}, "reads 64 tokens, and here are 100"),
        (CHAT, {"messages": HELLO, "n": 33}, "$.n"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "image_url"),
        (CHAT, {"messages": HELLO, "top_k": 50}, "top_k"),
        (CHAT, {"messages": HELLO, "min_p": 0.1}, "$.min_p"),
        (CHAT, {"messages": HELLO, "presence_penalty": 0.5}, "$.presence_penalty"),
        (CHAT, {"messages": HELLO, "frequency_penalty": 0.5}, "$.frequency_penalty"),
        (CHAT, {"messages": HELLO, "logit_bias": {"1": 5}}, "logit_bias"),
        (CHAT, {"messages": HELLO, "repetition_penalty": 1.1}, "$.repetition_penalty"),
        (CHAT, {"messages": HELLO, "guided_regex": "a*"}, "$.guided_regex"),
        (TEXT, {"prompt": "a", "best_of": 3}, "best_of"),
        (TEXT, {"prompt": "a", "echo": True}, "echo"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"messages": HELLO, "top_p": 0.9}, "$.top_p"),
        (CHAT, {"messages": HELLO, "max_tokens": 0}, "$.max_tokens"),
        (CHAT, {"messages": HELLO, "temperature": -1}, "$.temperature"),
        (CHAT, {"messages": HELLO, "stop": ["a"] * 5}, "$.stop"),
    ],
)
async def test_what_cannot_be_asked_is_refused_in_a_line_that_names_it(path: str, body: Any, words: str) -> None:
    policy = ScriptedPolicy()
    status, answer = await post(policy, path, body)
    assert status == 400
    assert words in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]
    assert policy.asked == []


async def test_a_body_that_is_too_large_is_not_read() -> None:
    status, answer = await post(ScriptedPolicy(), CHAT, b" " * (server.BODY_BYTES + 1))
    assert (status, str(server.BODY_BYTES) in answer["error"]["message"]) == (413, True)


async def test_a_chat_is_answered_as_openai_s_clients_expect_it() -> None:
    policy = ScriptedPolicy(drawn("hi!$", finish="length"))
    status, answer = await post(policy, CHAT, {"model": "any", "messages": HELLO})
    assert status == 200
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    message = {"role": "assistant", "content": "h i !"}
    assert choice == {"index": 0, "message": message, "finish_reason": "length", "logprobs": None}
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    assert policy.rules == [RULES]


async def test_a_chat_is_drawn_by_the_rules_that_it_names_within_the_run_s() -> None:
    policy = ScriptedPolicy(*[drawn("a")] * 3)
    await post(policy, CHAT, {"messages": HELLO, "temperature": 0, "max_tokens": 3, "stop": "!"})
    await post(policy, CHAT, {"messages": HELLO, "max_completion_tokens": 1000, "stop": ["a", "b"]})
    await post(policy, CHAT, {"messages": HELLO * 12})
    found = [(rules.temperature, rules.max_new_tokens, rules.stop) for rules in policy.rules]
    assert found == [(0.0, 3, ("!",)), (0.7, 8, ("a", "b")), (0.7, 4, ())]
    assert {rules.stop_token_ids for rules in policy.rules} == {RULES.stop_token_ids}


async def test_a_stream_is_the_whole_text_in_one_event_an_end_and_what_it_used() -> None:
    asked = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    status, text = await post(ScriptedPolicy(drawn("hi$")), CHAT, asked)
    *events, last, rest = text.split("\n\n")
    first, second, used = (json.loads(event.removeprefix("data: ")) for event in events)
    assert (status, last, rest) == (200, "data: [DONE]", "")
    assert {one["object"] for one in (first, second, used)} == {"chat.completion.chunk"}
    (begun,), (ended,) = first["choices"], second["choices"]
    assert (begun["delta"], begun["finish_reason"]) == ({"role": "assistant", "content": "h i"}, None)
    assert (ended["delta"], ended["finish_reason"]) == ({}, "stop")
    assert (used["choices"], used["usage"]["completion_tokens"]) == ([], 3)


async def test_a_text_goes_on_and_several_answers_have_places_and_log_probs() -> None:
    policy = ScriptedPolicy(drawn("b$"), drawn("cd"))
    status, answer = await post(policy, TEXT, {"prompt": "a", "n": 2})
    assert (status, answer["object"], policy.asked) == (200, "text_completion", [(1,), (1,)])
    assert [(one["index"], one["text"]) for one in answer["choices"]] == [(0, "b"), (1, "c d")]
    _, answer = await post(ScriptedPolicy(drawn("ab$")), TEXT, {"prompt": "a", "logprobs": 1})
    found = answer["choices"][0]["logprobs"]
    assert (found["tokens"], found["token_logprobs"]) == (["a", "b", "$"], [-0.25, -0.5, -0.75])
    assert found["text_offset"] == [0, 1, 2]
    _, answer = await post(ScriptedPolicy(drawn("ab$")), CHAT, {"messages": HELLO, "logprobs": True})
    found = [(one["token"], one["logprob"]) for one in answer["choices"][0]["logprobs"]["content"]]
    assert found == [("a", -0.25), ("b", -0.5), ("$", -0.75)]


async def test_the_key_of_an_episode_asks_for_its_turns_and_nothing_else() -> None:
    policy = ScriptedPolicy()
    served = endpoint(policy)

    async def run(episode: str, prompt: Prompt) -> EpisodeResult:
        return EpisodeResult()

    served.episodes = ExternalEpisodes(run, TurnText(letters(), None, (0,)))
    key = served.key_of("t0/1.2")
    for path, body in ((CHAT, {"model": "policy", "messages": HELLO}), (TEXT, {"model": "policy", "prompt": "a"})):
        status, answer = await post(served, path, body, token=key)
        assert (status, policy.asked) == (400, [])
        assert "no episode 't0/1.2' is played" in answer["error"]["message"]
    other = key.replace("t0/1.2", "t0/1.3")
    assert (await post(served, REWARD, {"reward": 1}, token=other))[0] == 401


async def test_an_agent_s_calls_of_the_judge_go_to_its_own_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str, Any]] = []

    async def judge(request: web.Request) -> web.StreamResponse:
        """It answers in parts, as one that streams does."""
        told.append((request.path, request.headers["Authorization"], await request.json()))
        answer = web.StreamResponse(status=418, headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        for part in (b'{"choi', b'ces": []}'):
            await answer.write(part)
            await asyncio.sleep(0.02)
        return answer

    app = web.Application()
    app.router.add_post("/v2/chat/completions", judge)
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    asked = {"model": "judge", "messages": HELLO, "response_format": {"type": "json_object"}}
    async with TestServer(app) as elsewhere:
        served = endpoint(policy := ScriptedPolicy(drawn("a$")), judge=f"{elsewhere.make_url('/v2')}#gpt-5")
        assert await post(served, CHAT, asked, token=served.key_of("t0/1.2")) == (418, {"choices": []})
        assert told == [("/v2/chat/completions", "Bearer secret", {**asked, "model": "gpt-5"})]
        assert (await post(served, CHAT, {"model": "judge", "messages": HELLO}))[0] == 200, "a person asks the policy"
        assert len(told) == len(policy.asked) == 1
    status, answer = await post(served, CHAT, asked, token=served.key_of("t0/1.2"))
    assert (status, "does not answer" in answer["error"]["message"]) == (503, True)


async def test_a_key_that_is_no_text_is_no_key() -> None:
    served = endpoint(ScriptedPolicy())
    async with TestClient(TestServer(served.application())) as client:
        headers = {b"Authorization": b"Bearer x:\xff"}
        async with client.post(
            TEXT, data=b"{}", headers={k.decode(): v.decode("latin-1") for k, v in headers.items()}
        ) as answer:
            assert answer.status == 401


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("temperature", 1.0, "draws at the temperature 0.7, not 1"), ("model", "gpt-5", "no model 'gpt-5'")],
)
async def test_what_a_turn_that_is_trained_on_cannot_have_is_refused(field: str, value: Any, words: str) -> None:
    served = endpoint(ScriptedPolicy())
    key = served.key_of("t0/1.2")
    status, answer = await post(served, CHAT, {"model": "org/model", "messages": HELLO, field: value}, token=key)
    assert (status, words in answer["error"]["message"]) == (400, True)


async def test_a_crowd_is_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUESTS", 0)
    policy = ScriptedPolicy()
    status, answer = await post(policy, CHAT, {"messages": HELLO})
    assert (status, policy.asked) == (429, [])
    assert "ask again later" in answer["error"]["message"]


async def test_the_model_is_named_with_the_length_of_its_context() -> None:
    served = endpoint(ScriptedPolicy())
    async with TestClient(TestServer(served.application())) as client:
        async with client.get(MODELS, headers={"Authorization": f"Bearer {served.token}"}) as answer:
            (card,) = (await answer.json())["data"]
        async with client.get("/v1/elsewhere", headers={"Authorization": f"Bearer {served.token}"}) as answer:
            assert (answer.status, "/v1/elsewhere" in (await answer.json())["error"]["message"]) == (404, True)
    assert (card["id"], card["max_model_len"]) == ("policy", 64)


async def test_only_the_owner_can_read_where_it_is_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    path = tmp_path / ADDRESS
    path.write_text("of a life before")
    path.chmod(0o644)
    served = endpoint(ScriptedPolicy())
    async with serving(served, tmp_path) as place:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert json.loads(path.read_text()) == {"url": place.url, "token": served.token}
        assert place.url.startswith("http://127.0.0.1:")
        assert stat.S_IMODE(Path(place.socket).parent.stat().st_mode) == 0o700
    assert not path.exists()
