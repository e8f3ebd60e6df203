"""The endpoint, over loopback, with a policy that says what the test wants."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from swarm.errors import PeerUnreachable, ProtocolError, UserError
from swarm.inference import server
from swarm.inference.server import ADDRESS, Endpoint, serving
from tests.unit.inference.scripted import RULES, ScriptedPolicy, drawn, endpoint

GENERATE, CHAT, MODELS = "/inference/v1/generate", "/v1/chat/completions", "/v1/models"
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


async def test_a_turn_comes_back_as_token_ids_with_a_log_prob_each() -> None:
    policy = ScriptedPolicy(drawn("ab$"))
    status, answer = await post(policy, GENERATE, {"model": "m", "token_ids": [3, 4]}, **{"X-Echo-Episode": "e1"})
    (choice,) = answer["choices"]
    assert status == 200
    assert policy.asked == [("e1", (3, 4))]
    assert (choice["token_ids"], choice["finish_reason"]) == ([1, 2, 0], "stop")
    assert choice["logprobs"]["content"] == [
        {"token": f"token_id:{one}", "logprob": value} for one, value in ((1, -0.25), (2, -0.5), (0, -0.75))
    ]


async def test_a_run_without_a_program_of_its_own_has_no_episode_to_go_on_with() -> None:
    served = endpoint(ScriptedPolicy())
    served.episodes = None
    status, answer = await post(served, GENERATE, {"token_ids": [3]}, **{"X-Echo-Episode": "e1"})
    assert status == 400
    assert "played by its own environment" in answer["error"]["message"]


@pytest.mark.parametrize("path", [GENERATE, CHAT])
@pytest.mark.parametrize("token", ["", "wrong", "é"])
async def test_nothing_is_asked_without_the_token(path: str, token: str) -> None:
    policy = ScriptedPolicy()
    status, answer = await post(policy, path, {"token_ids": [3], "messages": HELLO}, token=token)
    assert status == 401
    assert ADDRESS in answer["error"]["message"]
    assert policy.asked == []


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (GENERATE, b"{", "truncated"),
        (CHAT, b'{"messages": [{"role": "user", "content": "\xff"}]}', "utf-8"),
        (GENERATE, {}, "token_ids"),
        (GENERATE, {"token_ids": []}, "$.token_ids"),
        (GENERATE, {"token_ids": [-1]}, "$.token_ids"),
        (GENERATE, {"token_ids": ["a"]}, "$.token_ids"),
        (GENERATE, {"token_ids": [10**6]}, "none with the id 1000000"),
        (GENERATE, {"token_ids": [1] * 64}, "reads 64 tokens, and here are 64"),
        (CHAT, {"messages": []}, "$.messages"),
        (CHAT, {"messages": [{"role": "oracle", "content": ""}]}, "$.messages[0].role"),
        (CHAT, {"messages": HELLO * 20}, "reads 64 tokens, and here are 100"),
        (CHAT, {"messages": HELLO, "n": 2}, "$.n"),
        (CHAT, {"messages": HELLO, "top_p": 0.9}, "$.top_p"),
        (CHAT, {"messages": HELLO, "max_tokens": 0}, "$.max_tokens"),
        (CHAT, {"messages": HELLO, "temperature": -1}, "$.temperature"),
        (CHAT, {"messages": HELLO, "stop": ["a"] * 17}, "$.stop"),
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
    status, answer = await post(ScriptedPolicy(), GENERATE, b" " * (server.BODY_BYTES + 1))
    assert (status, str(server.BODY_BYTES) in answer["error"]["message"]) == (413, True)


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (ProtocolError("its conversation drifted"), 400),
        (UserError("the template refuses it"), 400),
        (PeerUnreachable("no sampler is there"), 503),
    ],
)
async def test_a_fault_says_whose_it_is(fault: Exception, status: int) -> None:
    found, answer = await post(ScriptedPolicy(fault), CHAT, {"messages": HELLO})
    assert (found, answer["error"]["message"]) == (status, str(fault))


async def test_a_chat_is_answered_as_openai_s_clients_expect_it() -> None:
    policy = ScriptedPolicy(drawn("hi!$", finish="length"))
    status, answer = await post(policy, CHAT, {"model": "any", "messages": HELLO})
    assert status == 200
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "message": {"role": "assistant", "content": "h i !"}, "finish_reason": "length"}
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


async def test_a_stream_is_the_whole_text_in_one_event_and_an_end() -> None:
    status, text = await post(ScriptedPolicy(drawn("hi$")), CHAT, {"messages": HELLO, "stream": True})
    first, last, rest = text.split("\n\n")
    chunk = json.loads(first.removeprefix("data: "))
    assert (status, last, rest) == (200, "data: [DONE]", "")
    assert chunk["object"] == "chat.completion.chunk"
    (choice,) = chunk["choices"]
    assert choice == {"index": 0, "delta": {"role": "assistant", "content": "h i"}, "finish_reason": "stop"}


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
    async with serving(served, tmp_path) as url:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert json.loads(path.read_text()) == {"url": url, "token": served.token}
        assert url.startswith("http://127.0.0.1:")
    assert not path.exists()
