"""The learner of the version benchmark: masters moved by AdamW, staged, encoded and announced as a run's are.

A child of this process holds the masters, as a trainer does; the parent has the node's network and the broadcast. On
each command `publish` or `publish full` it takes an AdamW step, publishes, and says when each stage ended.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

import msgspec
import uvloop

from benchmarks.broadcast_learner import ROUND_S, _ignore, _to_stderr, say
from swarm.broadcast.service import BroadcastService
from swarm.broadcast.store.store import HeldVersion
from swarm.broadcast.version.manifest import Layout
from swarm.gossip.records import Profile
from swarm.node.network import NodeNetwork
from swarm.process import Child, ChildChannel
from swarm.settings import LeadConfig
from swarm.types import VersionId

HANG_S = 600.0
"""Making a gigabyte of random masters on two busy cores takes under two minutes."""

WARM_STEPS = 12
"""AdamW steps before the first version: its first ones move every weight by the whole learning rate, later ones by a
quarter, as in a run."""


class Make(msgspec.Struct, frozen=True, tag=True):
    """Make a model of `nbytes` in bf16, and its optimiser at `lr`."""

    nbytes: int
    lr: float
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
    """The child: masters and optimiser."""
    import torch

    from benchmarks.version_model import Masters

    channel = ChildChannel()
    torch.set_num_threads(2)
    masters: list[Masters] = []

    def handle(command: Make | Step | Stage) -> msgspec.Struct:
        began = time.monotonic()
        with channel.alive():
            match command:
                case Make():
                    masters.append(Masters(command.nbytes, command.lr, Path(command.directory)))
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
    settings = LeadConfig(host=options.host, port=7700, lan=True)
    network = NodeNetwork(options.directory / "identity", "learner", settings, say=_to_stderr, emit=_ignore)
    broadcast = BroadcastService(options.directory / "versions", network.key, network.station)
    trainer = Child(
        "trainer", "benchmarks.version_learner", "--train", log=options.directory / "trainer.log", hang_s=HANG_S
    )
    await trainer.start()
    try:
        make = Make(nbytes=options.size_bytes, lr=options.lr, directory=str(options.directory))
        made = await trainer.call(make, Made)
        await broadcast.open(made.layout)
        await network.start(
            broadcast.routes(), lambda: {**network.status(), **broadcast.status()}, on_stream=broadcast.accept
        )
        async with network.swarm(network.key.public_bytes, ROUND_S), asyncio.TaskGroup() as group:
            serving = group.create_task(broadcast.run())
            say("listening", join=network.join_line(), url=network.address.url, memcpy_s=made.memcpy_s)
            await publish_when_told(options.directory, trainer, network, broadcast)
            serving.cancel()
    finally:
        await trainer.stop()
        await network.stop()
        broadcast.close()


async def publish_when_told(directory: Path, trainer: Child, network: NodeNetwork, broadcast: BroadcastService) -> None:
    """One version for each line of stdin, until its end. Times are of this machine's monotonic clock."""
    step = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        version = VersionId(incarnation=network.generation - 1, version=step)
        await trainer.call(Step(), Did)
        ended_s = time.monotonic()
        held_s = (await trainer.call(Stage(), Did)).seconds
        staged_s = time.monotonic()
        published = await encode(broadcast, directory / "staging.bin", version, full=line.strip() == "publish full")
        encoded_s = time.monotonic()
        broadcast.announce(published)
        network.published(published.sealed_head)
        network.set_profile(Profile(held=version, engine="learner"))
        say(
            "published",
            version=str(version),
            ended_s=ended_s,
            held_s=held_s,
            staged_s=staged_s,
            encoded_s=encoded_s,
            announced_s=time.monotonic(),
            encoded_bytes=published.table.encoded_bytes,
        )
        step += 1


async def encode(broadcast: BroadcastService, staging: Path, version: VersionId, *, full: bool) -> HeldVersion:
    """Encode as the service does. It alone decides on full versions, when receivers lag behind; here we want one."""
    versions = broadcast._versions
    assert versions is not None
    if not full:
        return await broadcast.encode(staging, version)
    size = broadcast._chunk_bytes(full=True)
    await broadcast._encoders.start(versions.weights.layout.total_bytes)
    return await asyncio.to_thread(versions.publish, staging, version, size, broadcast._encoders.submit, full=True)


def main() -> None:
    if sys.argv[1] == "--train":
        train()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--size-bytes", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    uvloop.run(lead(options))


if __name__ == "__main__":
    main()
