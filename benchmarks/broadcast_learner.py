"""The learner of the broadcast benchmark: a node's network and the broadcast service, no trainer, no rollout plane.

It speaks JSON lines: `listening` with the join line; then on each command `publish` the next version is staged and
published, and it says `published`. Without --delta there is one version, which no codec makes smaller.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop

from benchmarks.payload import layout_of, write_random, write_weights
from swarm.broadcast.service import BroadcastService
from swarm.broadcast.store.store import HeldVersion
from swarm.broadcast.version.manifest import Layout
from swarm.node.network import NodeNetwork
from swarm.settings import LeadConfig
from swarm.types import VersionId
from tests.simulator.broadcast.schemes import planner_named

ROUND_S = 2.0  # As a learner has it by default


class Broadcaster:
    """A learner's network and data plane, as they are in a run."""

    def __init__(self, directory: Path, settings: LeadConfig, scheme: str | None = None) -> None:
        self.network = NodeNetwork(
            directory / "identity", "learner", settings, say=to_stderr, emit=lambda kind, **fields: None
        )
        self.service = BroadcastService(
            directory / "versions", self.network.key, self.network.station, plan_of=planner_named(scheme)
        )

    @asynccontextmanager
    async def serving(self, layout: Layout, **said: object) -> AsyncIterator[None]:
        """Serve versions of a layout, and say `listening`."""
        network, service = self.network, self.service
        await service.open(layout)
        await network.start(
            service.routes(), lambda: {**network.status(), **service.status()}, on_stream=service.accept
        )
        try:
            async with network.swarm(network.key.public_bytes, ROUND_S), asyncio.TaskGroup() as group:
                running = group.create_task(service.run())
                say("listening", join=network.join_line(), url=network.address.url, **said)
                yield
                running.cancel()
        finally:
            await network.stop()
            service.close()

    def version(self, step: int) -> VersionId:
        return VersionId(incarnation=self.network.generation - 1, version=step)

    def announce(self, published: HeldVersion, version: VersionId) -> None:
        self.service.announce(published)
        self.network.published(published.sealed_head)
        self.network.set_held(version)


async def lead(options: argparse.Namespace) -> None:
    settings = LeadConfig(host=options.host, port=options.port, lan=True, max_upload=options.max_upload)
    broadcaster = Broadcaster(options.directory, settings, None if options.scheme == "relay" else options.scheme)
    staging, step = options.directory / "staging.bin", 0
    async with broadcaster.serving(layout_of(options.size_bytes)):
        while await asyncio.to_thread(sys.stdin.readline):
            version = broadcaster.version(step)
            await asyncio.to_thread(stage, staging, options, step)
            published = await broadcaster.service.encode(staging, version)
            broadcaster.announce(published, version)
            encoded_bytes = published.table.encoded_bytes
            say("published", version=str(version), monotonic_s=time.monotonic(), encoded_bytes=encoded_bytes)
            step += 1


def stage(staging: Path, options: argparse.Namespace, step: int) -> None:
    if options.delta is None:
        write_random(staging, options.size_bytes, seed=step)
    else:
        write_weights(staging, options.size_bytes, seed=0, step_lr=step * options.delta)


def say(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=7700)
    parser.add_argument("--scheme", default="relay")
    parser.add_argument("--size-bytes", type=int, required=True)
    parser.add_argument("--delta", type=float, default=None, help="learning rate of the step from version 0 to 1")
    parser.add_argument("--max-upload", type=float, metavar="MBIT", help="as of echo-node lead")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    uvloop.run(lead(options))


if __name__ == "__main__":
    main()
