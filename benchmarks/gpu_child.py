"""vLLM's engine process as a node starts it, which counts the CUDA graphs that are replayed: `gpu_child vllm`.

After each call that drew, a line of the process's log says how many replays there were in it, of the first worker, and
how many steps the call took at least. Where there are no graphs, as on a CPU, that is 0. Inside vLLM's workers the
node's own extension counts them: `CountingWorker`, which is made when a worker looks for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarm.confine import confine
from swarm.process import ChildChannel
from swarm.sampler.engine import Engine, Generate, Generated, Told
from swarm.sampler.engine_child import serve

MARK = "graph replays: "


def counted(replay: Callable[[Any], None]) -> tuple[Callable[[Any], None], Callable[[], int]]:
    """A method that does the same and is counted, and how often it was called."""
    calls = 0

    def counting(graph: Any) -> None:
        nonlocal calls
        calls += 1
        replay(graph)

    return counting, lambda: calls


def replays_per_step(log: Path) -> list[float]:
    """Of each call that drew, in their order."""
    lines = [line.removeprefix(MARK) for line in log.read_text(errors="replace").splitlines() if line.startswith(MARK)]
    return [replays / steps for replays, steps in map(json.loads, lines)]


def __getattr__(name: str) -> Any:
    if name != "CountingWorker":
        raise AttributeError(name)
    import torch

    from swarm.sampler.vllm.extension import EchoWorker

    # Of the class: graphs are looked up there when they are replayed, whenever they were captured.
    counting, count = counted(torch.cuda.CUDAGraph.replay)
    torch.cuda.CUDAGraph.replay = counting  # type: ignore[assignment,method-assign]
    globals()[name] = type(name, (EchoWorker,), {"echo_replays": lambda self: count()})
    return globals()[name]


def _engine() -> Engine:
    from swarm.sampler.vllm.engine import VllmEngine

    class CountingEngine(VllmEngine):
        async def generate(self, command: Generate, progress: Told) -> Generated:
            before = await self._replays()
            done = await super().generate(command, progress)
            print(MARK + json.dumps([await self._replays() - before, done.steps]), flush=True)
            return done

        async def _replays(self) -> int:
            return int((await self._engine.collective_rpc("echo_replays"))[0])

    return CountingEngine("benchmarks.gpu_child.CountingWorker")


def main() -> None:
    # As in engine_child: before a library is loaded or a thread started.
    exposed = confine([], needs_loopback=True)
    channel = ChildChannel()
    serve(_engine(), channel, exposed)


if __name__ == "__main__":
    main()
