"""Agents of the tests, as people write them: each gets a row and a client, and plays with what it likes."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def row(number: int) -> dict[str, int]:
    return {"a": number % 7, "b": 3}


async def plain(row: dict[str, int], client: Any) -> float:
    """The official client, with a tool and a stream."""
    messages: list[Any] = [{"role": "user", "content": f"{row['a']}+{row['b']}?"}]
    first = await client.chat.completions.create(
        model=client.model, messages=messages, tools=[CALCULATOR], max_tokens=60
    )
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls
    given = json.loads(call.function.arguments)
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])}]
    await client.reward(0.25, first)
    text = ""
    stream = await client.chat.completions.create(
        model=client.model, messages=messages, tools=[CALCULATOR], stream=True, stream_options={"include_usage": True}
    )
    async for event in stream:
        text += event.choices[0].delta.content or "" if event.choices else ""
        used = event.usage
    assert used.prompt_tokens > used.completion_tokens > 0
    return float(text == str(row["a"] + row["b"]))


async def pydantic(row: dict[str, int], client: Any) -> dict[str, float]:
    """pydantic-ai, unchanged."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    agent = Agent(OpenAIChatModel(client.model, provider=OpenAIProvider(openai_client=client)))

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    done = await agent.run(f"{row['a']}+{row['b']}?")
    return {"reward": float(done.output == str(row["a"] + row["b"])), "messages": float(len(done.all_messages()))}


async def agents_sdk(row: dict[str, int], client: Any) -> float:
    """openai-agents, unchanged, as a stream."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)

    @function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    model = OpenAIChatCompletionsModel(client.model, client)
    running = Runner.run_streamed(Agent(name="adder", model=model, tools=[add]), f"{row['a']}+{row['b']}?")
    async for _ in running.stream_events():
        pass
    return float(running.final_output == str(row["a"] + row["b"]))


async def many(row: dict[str, int], client: Any) -> float:
    """Answers side by side, and one that goes on from one of them."""
    asked: list[Any] = [{"role": "user", "content": "go"}]
    both = await client.chat.completions.create(model=client.model, messages=asked, n=2, seed=7)
    other = client.chat.completions.create(model=client.model, messages=asked)
    text = client.completions.create(model=client.model, prompt="once")
    await asyncio.gather(other, text)
    asked += [both.choices[1].message, {"role": "user", "content": "on"}]
    await client.chat.completions.create(model=client.model, messages=asked)
    return float(len(both.choices))


async def raises(row: dict[str, int], client: Any) -> float:
    raise KeyError("where")


async def returns_nothing(row: dict[str, int], client: Any) -> None:
    pass


async def gives_up(row: dict[str, int], client: Any) -> float:
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    await task
    return 1.0


async def quotes(row: dict[str, int], client: Any) -> float:
    raise ValueError("bad answer \ud800")


async def elsewhere(row: dict[str, int], client: Any) -> dict[str, float]:
    """Tries what a stranger's code would: the network, and the run's own token."""
    import socket
    from pathlib import Path

    found = {"reached": 0.0, "token": float(bool(Path(__file__).with_name("inference.json").read_text()))}
    try:
        socket.create_connection(("127.0.0.1", int(Path(__file__).with_name("port").read_text())), timeout=2).close()
        found["reached"] = 1.0
    except OSError:
        pass
    return found


async def hangs(row: dict[str, int], client: Any) -> float:
    time.sleep(3600)  # noqa: ASYNC251 - it holds up all others
    return 0.0


async def models(row: dict[str, int], client: Any) -> float:
    await client.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "go"}])
    return 1.0


async def counts(row: dict[str, int], client: Any) -> dict[str, float]:
    """For the tiny model: likes the digit that it asks for, in two texts of which one goes on."""

    async def said(prompt: str) -> str:
        done = await client.completions.create(model=client.model, prompt=prompt, max_tokens=2)
        return str(done.choices[0].text)

    first = await said("1=")
    second = await said(f"1={first}2=")
    other = await said("3=")
    return {"reward": ("1" in first) + ("2" in second) + ("3" in other), "length": float(len(first))}
