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
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.payload import layout_of, write_random, write_weights
from swarm.broadcast.service import BroadcastService
from swarm.gossip.records import Profile
from swarm.node.network import NodeNetwork
from swarm.settings import LeadConfig
from swarm.types import VersionId
from tests.simulator.broadcast.schemes import planner_named

ROUND_S = 2.0
"""As a learner has it by default."""


async def lead(options: argparse.Namespace) -> None:
    settings = LeadConfig(
        host=options.host,
        port=options.port,
        tls=options.tls,
        lan=True,
        max_upload=options.max_upload,
    )
    network = NodeNetwork(options.directory / "identity", "learner", settings, say=_to_stderr, emit=_ignore)
    plan_of = planner_named(None if options.scheme == "relay" else options.scheme)
    broadcast = BroadcastService(options.directory / "versions", network.key, network.station, plan_of=plan_of)
    await broadcast.open(layout_of(options.size_bytes))

    def status() -> dict[str, Any]:
        return {**network.status(), **broadcast.status()}

    await network.start(broadcast.routes(), status, on_stream=broadcast.accept)
    try:
        async with network.swarm(network.key.public_bytes, ROUND_S), asyncio.TaskGroup() as group:
            serving = group.create_task(broadcast.run())
            say("listening", join=network.join_line(), url=network.address.url)
            await publish_when_told(options, network, broadcast)
            serving.cancel()
    finally:
        await network.stop()
        broadcast.close()


async def publish_when_told(options: argparse.Namespace, network: NodeNetwork, broadcast: BroadcastService) -> None:
    """One version for each line of stdin, until its end."""
    staging = options.directory / "staging.bin"
    step = 0
    while await asyncio.to_thread(sys.stdin.readline):
        version = VersionId(incarnation=network.generation - 1, version=step)
        await asyncio.to_thread(stage, staging, options, step)
        published = await broadcast.encode(staging, version)
        broadcast.announce(published)
        network.published(published.sealed_head)
        network.set_profile(Profile(held=version, engine="learner"))
        encoded_bytes = published.table.encoded_bytes
        say("published", version=str(version), monotonic_s=time.monotonic(), encoded_bytes=encoded_bytes)
        step += 1


def stage(staging: Path, options: argparse.Namespace, step: int) -> None:
    """Write the weights of a version where they are published from."""
    if options.delta is None:
        write_random(staging, options.size_bytes, seed=step)
    else:
        write_weights(staging, options.size_bytes, seed=0, step_lr=step * options.delta)


def say(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _ignore(kind: str, **fields: Any) -> None:
    """Events are for a run's log, and this is no run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=7700)
    parser.add_argument("--scheme", default="relay")
    parser.add_argument("--size-bytes", type=int, required=True)
    parser.add_argument("--delta", type=float, default=None, help="learning rate of the step from version 0 to 1")
    parser.add_argument("--max-upload", type=float, metavar="MBIT", help="as of echo-node lead")
    parser.add_argument("--tls", action=argparse.BooleanOptionalAction, default=None)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    uvloop.run(lead(options))


if __name__ == "__main__":
    main()
