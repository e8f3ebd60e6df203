"""A taskset of verifiers 0.4 with an environment of two turns: say the digit that you read. It needs no network.

The harnesses that come with verifiers start their program through a package installer. `Talk` asks from here instead;
any taskset whose model needs no tools can take it as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

__all__ = ["EchoDigits", "EchoEnv", "Talk"]


class Digits(vf.TaskData):
    second: str
    """Asked in the second turn."""


class EchoTask(vf.Task[Digits, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, task: Digits, trace: vf.Trace) -> float:
        """The share of turns in which the digit was said."""
        said = [message.content or "" for message in trace.branches[-1].messages if message.role == "assistant"]
        asked = [task.prompt_text[:1], task.second]
        return sum(word[:1] == digit for word, digit in zip(said, asked, strict=False)) / len(asked)


class EchoDigits(vf.Taskset[EchoTask, vf.TasksetConfig]):
    def load(self) -> Iterator[EchoTask]:
        for number in range(100):
            yield EchoTask(Digits(prompt=f"{number // 10}=", second=str(number % 10)), self.config.task)


class EchoConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class EchoEnv(vf.Env[EchoConfig]):
    async def run(self, task: EchoTask, agents: Any) -> None:
        async with agents.player.interaction(task) as talk:
            if not (await talk.turn()).terminated:
                await talk.turn(f"{task.data.second}=")


class Talk(vf.Harness[vf.HarnessConfig]):
    """One reply a turn, and no tools."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages += (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or [])
        )
        async with httpx.AsyncClient(timeout=None, headers={"Authorization": f"Bearer {secret}"}) as client:
            answer = await client.post(f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages})
        if answer.status_code != 200:
            return ProgramResult(exit_code=1, stdout="", stderr=answer.text)
        return ProgramResult(exit_code=0, stdout=answer.json()["choices"][0]["message"]["content"] or "", stderr="")
