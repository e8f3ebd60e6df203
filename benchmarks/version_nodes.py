"""The processes of the version benchmark: a learner, its trainer, and receivers.

`lead`: the node's network and the broadcast; on each command `publish` or `publish full` it has its trainer take an
AdamW step, publishes, and says when each stage ended. `train`: the learner's child, which holds the masters. `receive`:
a sampler's network, data plane and engine, without leases. It installs each version as a sampler does, draws one token
with it, and prints a JSON object: when each stage was reached, on this machine's monotonic clock, and what it has cost.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import uvloop

from benchmarks.broadcast_learner import Broadcaster, say, to_stderr
from swarm.broadcast.coding import in_thread
from swarm.broadcast.receiver.receiver import Receiver
from swarm.broadcast.service import BroadcastService
from swarm.broadcast.store.store import HeldVersion
from swarm.broadcast.version.manifest import Layout
from swarm.join.joining import JoiningNode
from swarm.node.bootstrap import Greeting
from swarm.process import Child, ChildChannel
from swarm.sampler.engine import EngineOptions, Generate, Generated, Job
from swarm.sampler.worker import EngineWorker
from swarm.settings import JoinConfig, LeadConfig
from swarm.types import SamplingRules, VersionId

HANG_S = 600.0  # Making a gigabyte of random masters on two busy cores takes under two minutes
LEARNING_RATE = 1e-6
WARM_STEPS = 12
"""AdamW steps before the first version: its first ones move every weight by the whole learning rate, later ones by a
quarter, as in a run."""


class Make(msgspec.Struct, frozen=True, tag=True):
    """Make a model of `nbytes` in bf16, and its optimiser."""

    nbytes: int
    directory: str


class Step(msgspec.Struct, frozen=True, tag=True):
    """Take an AdamW step."""


class Stage(msgspec.Struct, frozen=True, tag=True):
    """Write the weights to the staging file."""


class Made(msgspec.Struct, frozen=True):
    layout: Layout
    memcpy_s: float


class Did(msgspec.Struct, frozen=True):
    seconds: float


def train() -> None:
    """The child: masters and optimiser. No other of these processes holds torch in its memory, which is measured."""
    import torch

    from benchmarks.sampler_models import Masters

    channel = ChildChannel()
    torch.set_num_threads(2)
    masters: list[Masters] = []

    def handle(command: Make | Step | Stage) -> msgspec.Struct:
        began = time.monotonic()
        with channel.alive():
            match command:
                case Make():
                    masters.append(Masters(command.nbytes, LEARNING_RATE, Path(command.directory)))
                    for _ in range(WARM_STEPS):
                        masters[0].step()
                    return Made(layout=masters[0].layout, memcpy_s=masters[0].memcpy_s())
                case Step():
                    masters[0].step()
                case Stage():
                    masters[0].stage()
        return Did(seconds=time.monotonic() - began)

    channel.serve(Make | Step | Stage, handle)


async def lead(options: argparse.Namespace) -> None:
    directory: Path = options.directory
    broadcaster = Broadcaster(directory, LeadConfig(host=options.host, port=7700, lan=True))
    trainer = Child("trainer", "benchmarks.version_nodes", "train", log=directory / "trainer.log", hang_s=HANG_S)
    await trainer.start()
    try:
        made = await trainer.call(Make(nbytes=options.size_bytes, directory=str(directory)), Made)
        async with broadcaster.serving(made.layout, memcpy_s=made.memcpy_s):
            step = 0
            while line := await asyncio.to_thread(sys.stdin.readline):
                await publish(trainer, broadcaster, directory, step, full=line.strip() == "publish full")
                step += 1
    finally:
        await trainer.stop()


async def publish(trainer: Child, broadcaster: Broadcaster, directory: Path, step: int, *, full: bool) -> None:
    version = broadcaster.version(step)
    await trainer.call(Step(), Did)
    ended_s = time.monotonic()
    held_s = (await trainer.call(Stage(), Did)).seconds
    staged_s = time.monotonic()
    published = await encode(broadcaster.service, directory / "staging.bin", version, full=full)
    encoded_s = time.monotonic()
    broadcaster.announce(published, version)
    times = {"ended_s": ended_s, "held_s": held_s, "staged_s": staged_s, "encoded_s": encoded_s}
    encoded_bytes = published.table.encoded_bytes
    say("published", version=str(version), **times, announced_s=time.monotonic(), encoded_bytes=encoded_bytes)


async def encode(broadcast: BroadcastService, staging: Path, version: VersionId, *, full: bool) -> HeldVersion:
    """Encode as the service does. It alone decides on full versions, when receivers lag behind; here we want one."""
    versions = broadcast._versions
    assert versions is not None
    if not full:
        return await broadcast.encode(staging, version)
    size = broadcast._chunk_bytes(full=True)
    await broadcast._encoders.start(versions.weights.layout.total_bytes)
    return await asyncio.to_thread(versions.publish, staging, version, size, broadcast._encoders.submit, full=True)


# -- a receiver --------------------------------------------------------------------------------------------------

ONE_TOKEN = Job(
    prompt_token_ids=(1, 2, 3),
    seed=1,
    rules=SamplingRules(temperature=1.0, max_new_tokens=1, stop_token_ids=()),
    time_limit_s=600.0,
)


class ReceivingNode(JoiningNode):
    role = "sampler"

    def status(self) -> dict[str, Any]:
        return {**self._network.status(), **self._data.status()}

    def _set_state(self, state: str) -> None: ...

    async def _take_part(self, found: Greeting, receiver: Receiver) -> bool:
        options = EngineOptions(device="cpu", dtype="bfloat16")
        engine = EngineWorker(self._directory, kind="transformers", options=options)
        await engine.launch()
        try:
            say("ready", pid=engine.status()["engine_pid"])
            await engine.load(await receiver.opening.layout())
            while True:
                await receiver.upkeep.installed(engine.installed)
                await self._install(engine, receiver)
        finally:
            await engine.stop()

    async def _install(self, engine: EngineWorker, receiver: Receiver) -> None:
        assert receiver.upkeep.weights is not None
        async with receiver.upkeep.steady() as version:
            changed = await in_thread(receiver.upkeep.changes_since, engine.installed)
            path, proven = receiver.upkeep.weights.path, receiver.upkeep.is_proven
            refused = await engine.install(
                version.head.version, version.table.tensor_sums, path, proven=proven, changed=changed
            )
        if refused is not None:
            raise SystemExit(f"not installed: {refused.why}")
        assert engine.installed is not None
        receiver.note_time(engine.installed, "installed_s")
        await engine._child.call(Generate(jobs=(ONE_TOKEN,)), Generated)
        receiver.note_time(engine.installed, "drawn_s")
        stages = receiver.status()["versions"][str(engine.installed)]
        say("installed", version=str(engine.installed), **stages, **costs(receiver.upkeep.weights.layout.total_bytes))


def costs(map_bytes: int) -> dict[str, float]:
    """What this process and its children have cost: CPU, and bytes that went to the disk; and the memory of this
    process: its part of the pages that it shares, but all of the map, which its engine maps too."""
    me = psutil.Process()
    family = [me, *me.children(recursive=True)]
    written = sum(one.io_counters().write_bytes for one in family)
    times = [one.cpu_times() for one in family]
    kib = dict(line.split()[:2] for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    pss = 1024 * (int(kib["Pss:"]) - int(kib["Pss_Shmem:"])) + map_bytes
    return {"disk_bytes": written, "cpu_s": sum(t.user + t.system for t in times), "pss_bytes": pss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("lead", "train", "receive"))
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--host")
    parser.add_argument("--size-bytes", type=int)
    parser.add_argument("--join")
    options = parser.parse_args()
    if options.part == "train":
        train()
    elif options.part == "lead":
        options.directory.mkdir(parents=True, exist_ok=True)
        uvloop.run(lead(options))
    else:
        config = JoinConfig(role="sampler", bootstrap=(options.join,), state_dir=options.directory, lan=True)
        uvloop.run(ReceivingNode(config, to_stderr).run())


if __name__ == "__main__":
    main()
