"""A receiver of the version benchmark: a sampler's network, data plane and engine, without leases.

It installs each version as a sampler does and draws one token with it. It prints one JSON object a version: when each
stage was reached, on this machine's monotonic clock, and what it has cost so far.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.broadcast_learner import _to_stderr, say
from swarm.broadcast.coding import in_thread
from swarm.broadcast.receiver import Receiver
from swarm.join.joining import JoiningNode
from swarm.node.bootstrap import Greeting
from swarm.sampler.engine import EngineOptions, Generate, Generated, Job
from swarm.sampler.worker import EngineWorker
from swarm.settings import JoinConfig
from swarm.types import SamplingRules

ONE_TOKEN = Job(
    prompt_token_ids=(1, 2, 3),
    seed=1,
    rules=SamplingRules(temperature=1.0, max_new_tokens=1, stop_token_ids=()),
    time_limit_s=600.0,
)


class ReceivingNode(JoiningNode):
    """Installs what it receives."""

    role = "sampler"

    def __init__(self, config: JoinConfig) -> None:
        super().__init__(config, _to_stderr)

    def status(self) -> dict[str, Any]:
        return {**self._network.status(), **self._data.status()}

    def _set_state(self, state: str) -> None: ...

    async def _take_part(self, found: Greeting, receiver: Receiver) -> bool:
        options = EngineOptions(device="cpu", dtype="bfloat16")
        engine = EngineWorker(self._directory, kind="transformers", options=options)
        await engine.launch()
        try:
            say("ready", pid=engine.status()["engine_pid"])
            await engine.load(await receiver.layout())
            while True:
                await receiver.installed(engine.installed)
                await self._install(engine, receiver)
        finally:
            await engine.stop()

    async def _install(self, engine: EngineWorker, receiver: Receiver) -> None:
        assert receiver.weights is not None
        async with receiver.steady() as version:
            changed = await in_thread(receiver.changes_since, engine.installed)
            path, proven = receiver.weights.path, receiver.is_proven
            refused = await engine.install(version.head, version.table, path, proven=proven, changed=changed)
        if refused is not None:
            raise SystemExit(f"not installed: {refused.why}")
        assert engine.installed is not None
        receiver.note_time(engine.installed, "installed_s")
        await engine._child.call(Generate(jobs=(ONE_TOKEN,)), Generated)
        receiver.note_time(engine.installed, "drawn_s")
        say(
            "installed",
            version=str(engine.installed),
            **receiver.status()["versions"][str(engine.installed)],
            **costs(receiver.weights.layout.total_bytes),
        )


def costs(map_bytes: int) -> dict[str, float]:
    """What this process and its children have cost: CPU, and bytes that went to the disk; and the memory of this
    process: its part of the pages that it shares, but all of the map, which its engine maps too."""
    me = psutil.Process()
    family = [me, *me.children(recursive=True)]
    written = sum(int(_io(one.pid).get("write_bytes", 0)) for one in family)
    times = [one.cpu_times() for one in family]
    kib = dict(line.split()[:2] for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    pss = 1024 * (int(kib["Pss:"]) - int(kib["Pss_Shmem:"])) + map_bytes
    return {"disk_bytes": written, "cpu_s": sum(t.user + t.system for t in times), "pss_bytes": pss}


def _io(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--join", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    options = parser.parse_args()
    config = JoinConfig(role="sampler", bootstrap=(options.join,), state_dir=options.directory, lan=True)
    uvloop.run(ReceivingNode(config).run())


if __name__ == "__main__":
    main()
