"""The process that plays tasksets of verifiers with the library's own server, which asks the learner's endpoint for
turns."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from swarm.errors import UserError
from swarm.process import ChildChannel
from swarm.tasks.base import EpisodeResult
from swarm.tasks.questions import is_held_out
from swarm.tasks.verifiers import Play, TasksetBegin
from swarm.types import MAX_PARTS, PART_NAME_LENGTH, Prompt

MAX_TASKS = 100_000  # Tasks read from a taskset, which may be endless


class RunRenderer:
    """Turns messages into tokens as the run does, so that drawn tokens are never tokenised again."""

    config_class: Any
    turns: Any
    stop_token_ids: Any
    is_multimodal = supports_tools = False

    def __init__(self, tokenizer: object, config: object) -> None: ...

    def render(self, messages: Any, **_: object) -> Any:
        return _rendered(self.turns.opening(_pairs(messages)))

    def bridge_to_next_turn(self, read: list[int], drawn: list[int], messages: Any, **_: object) -> Any:
        return _rendered([*read, *drawn, *self.turns.reply(drawn, _pairs(messages))])

    def parse_response(self, token_ids: Sequence[int], **_: object) -> Any:
        from renderers import ParsedResponse

        return ParsedResponse(content=self.turns.text_of(token_ids))

    def get_stop_token_ids(self) -> list[int]:
        return list(self.stop_token_ids)


def _pairs(messages: Any) -> list[tuple[str, str]]:
    return [(one["role"], one.get("content") or "") for one in messages]


def _rendered(token_ids: list[int]) -> Any:
    from renderers import RenderedTokens

    return RenderedTokens(token_ids=token_ids)


def _open(begin: TasksetBegin, directory: str) -> Any:
    """Return a server for the taskset. All roles of its environment run on this machine."""
    from renderers.configs import BaseRendererConfig
    from tokenizers import Tokenizer
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.serve import EnvServer
    from verifiers.v1.utils.loaders import env_config_type, resolve_env_config

    from swarm.tasks.chat import load_chat_template
    from swarm.tasks.turns import TurnText

    # The renderers package imports the class by the module's name; here this module is called __main__.
    from swarm.tasks.verifiers_child import RunRenderer

    files, began, stops = Path(begin.files), begin.began, begin.stop_token_ids
    template = load_chat_template(files, began=began, arguments=begin.arguments) if began else None
    RunRenderer.turns = TurnText(
        Tokenizer.from_file(str(files / "tokenizer.json")), template, stops, begin.system_prompt
    )
    RunRenderer.stop_token_ids, RunRenderer.config_class = stops, BaseRendererConfig
    fields = env_config_type(begin.module).model_fields.items()
    roles = {name: {"runtime": {"type": "subprocess"}} for name, one in fields if isinstance(one.default, AgentConfig)}
    return EnvServer(resolve_env_config({"taskset": {"id": begin.module}, **roles}), f"ipc://{directory}/server")


def _sides(taskset: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the tasks to train on and those held out. The digest of a task decides, not its position."""
    sides: dict[str, list[dict[str, Any]]] = {"train": [], "heldout": []}
    for task in islice(taskset, MAX_TASKS):
        question = Prompt(prompt_id="-", text=task.data.model_dump_json(exclude={"idx"}), answer="")
        sides["heldout" if is_held_out(question) else "train"].append(task.data.model_dump(mode="json"))
    if not all(sides.values()):
        raise UserError("all tasks of the taskset are on one side: it needs more")
    return sides


def _ended(episode: Any) -> EpisodeResult:
    if faults := [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]:
        return EpisodeResult(fault=" ".join(f"{faults[-1].type}: {faults[-1].message}".split())[:400])
    played = [trace for trace in episode.traces if trace.agent.trainable]
    parts = {name[:PART_NAME_LENGTH]: one.value for trace in played for name, one in trace.rewards.items() if one}
    return EpisodeResult(reward=sum(trace.reward for trace in played), parts=dict(list(parts.items())[:MAX_PARTS]))


async def _serve(begin: TasksetBegin, channel: ChildChannel) -> None:
    from renderers.configs import CustomRendererConfig
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.serve import EnvClient
    from verifiers.v1.types import SamplingConfig

    with tempfile.TemporaryDirectory(prefix="echo-node-") as directory:
        server = _open(begin, directory)
        sides, client = _sides(server.env.taskset), EnvClient(server.address)
        renderer = CustomRendererConfig(import_path="swarm.tasks.verifiers_child.RunRenderer")
        given = {"base_url": f"{begin.url}/v1", "renderer": renderer, "renderer_model_name": begin.files}
        serving = asyncio.create_task(server.run())
        serving.add_done_callback(lambda done: done.cancelled() or os._exit(1))  # Or callers would wait for ever

        async def play(call: Play) -> EpisodeResult:
            if not call.prompt_id:
                return EpisodeResult()  # An empty prompt id only checks that the taskset has loaded.
            side, _, number = call.prompt_id.rpartition("-")
            task = sides[side][int(number) % len(sides[side])]
            endpoint = TrainClientConfig(**given, headers=call.headers)
            try:
                return _ended(await client.run(endpoint, "policy", SamplingConfig(**begin.sampling), task))
            except Exception as error:  # noqa: BLE001 - whatever a taskset raises, only this episode fails
                return EpisodeResult(fault=f"{type(error).__name__}: {' '.join(str(error).split())}"[:400])

        await channel.serve_side_by_side(Play, play)
        serving.cancel()


def main() -> None:
    begin = msgspec.json.decode(sys.argv[1], type=TasksetBegin)
    channel = ChildChannel()
    with channel.alive():
        asyncio.run(_serve(begin, channel))


if __name__ == "__main__":
    main()
