"""The process that plays tasksets of verifiers with the library's own server, which asks the learner's endpoint for
turns."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from itertools import islice
from typing import Any

import msgspec

from swarm.errors import UserError
from swarm.process import ChildChannel
from swarm.tasks.base import EpisodeResult
from swarm.tasks.programs import POLICY, Play, ProgramBegin
from swarm.tasks.questions import is_held_out
from swarm.types import MAX_PARTS, PART_NAME_LENGTH, Prompt

MAX_TASKS = 100_000  # Tasks read from a taskset, which may be endless
KEY = "ECHO_NODE_EPISODE_KEY"  # The library reads keys from variables: one that is an episode's for as long as it lasts


def _open(begin: ProgramBegin, directory: str) -> Any:
    """Return a server for the taskset. All roles of its environment run on this machine."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.serve import EnvServer
    from verifiers.v1.utils.loaders import env_config_type, resolve_env_config

    fields = env_config_type(begin.what).model_fields.items()
    roles = {name: {"runtime": {"type": "subprocess"}} for name, one in fields if isinstance(one.default, AgentConfig)}
    return EnvServer(resolve_env_config({"taskset": {"id": begin.what}, **roles}), f"ipc://{directory}/server")


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


async def _serve(begin: ProgramBegin, channel: ChildChannel) -> None:
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.serve import EnvClient
    from verifiers.v1.types import SamplingConfig

    with tempfile.TemporaryDirectory(prefix="echo-node-") as directory:
        server = _open(begin, directory)
        sides, client = _sides(server.env.taskset), EnvClient(server.address)
        serving = asyncio.create_task(server.run())
        serving.add_done_callback(lambda done: done.cancelled() or os._exit(1))  # Or callers would wait for ever

        async def play(call: Play) -> EpisodeResult:
            if not call.prompt_id:
                return EpisodeResult()  # An empty prompt id only checks that the taskset has loaded.
            side, _, number = call.prompt_id.rpartition("-")
            task = sides[side][int(number) % len(sides[side])]
            variable = f"{KEY}_{call.key}"
            os.environ[variable] = call.key
            endpoint = EvalClientConfig(base_url=f"{begin.url}/v1", api_key_var=variable)
            try:
                return _ended(await client.run(endpoint, POLICY, SamplingConfig(**begin.sampling), task))
            except Exception as error:  # noqa: BLE001 - whatever a taskset raises, only this episode fails
                return EpisodeResult(fault=f"{type(error).__name__}: {' '.join(str(error).split())}"[:400])
            finally:
                del os.environ[variable]

        await channel.serve_side_by_side(Play, play)
        serving.cancel()


def main() -> None:
    begin = msgspec.json.decode(sys.argv[1], type=ProgramBegin)
    channel = ChildChannel()
    with channel.alive():
        asyncio.run(_serve(begin, channel))


if __name__ == "__main__":
    main()
