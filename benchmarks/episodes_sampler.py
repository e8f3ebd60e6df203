"""`python -m benchmarks.episodes_sampler LOG join ...`: a sampler that writes down what becomes of each turn.

Nothing else differs from `echo-node join`. A line of LOG is an episodes_figures.Drawn. The engine says how long a turn
had its place; this process says when it came and when its answer was there. All processes share one monotonic clock.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from swarm.join import sampler
from swarm.rollout.messages import Answer, SampleName
from swarm.sampler import feeding, session
from swarm.sampler.client import TimedLease
from swarm.sampler.engine import Generated
from swarm.sampler.worker import EngineWorker
from swarm.types import SampleSpec

CAME: dict[SampleName, float] = {}


class TimedFeed(feeding.SampleFeed):
    """Notes when leases come."""

    def add(self, leases: list[TimedLease]) -> None:
        CAME.update(dict.fromkeys((name for timed in leases for name in timed.samples()), time.monotonic()))
        super().add(leases)


def timed_worker(log: TextIO) -> Any:
    class TimedWorker(EngineWorker):
        async def _play(self, samples: Sequence[tuple[TimedLease, SampleSpec]]) -> tuple[list[Answer], Generated]:
            answers, generated = await super()._play(samples)
            for timed, spec in samples:
                name = (timed.lease.group_id, spec.index, timed.lease.turn)
                line = {
                    "group": name[0],
                    "index": name[1],
                    "turn": name[2],
                    "came_s": CAME.pop(name, time.monotonic()),
                    "ended_s": time.monotonic(),
                    "drawn_s": generated.seconds,
                }
                log.write(json.dumps(line) + "\n")
            return answers, generated

    return TimedWorker


def main() -> None:
    log = open(sys.argv.pop(1), "w", buffering=1)  # noqa: SIM115 - for as long as this process lives
    setattr(session, "feed_of", TimedFeed)  # noqa: B010 - it is not this module's to export
    setattr(sampler, "EngineWorker", timed_worker(log))  # noqa: B010
    from swarm.cli.run import run

    run()


if __name__ == "__main__":
    main()
