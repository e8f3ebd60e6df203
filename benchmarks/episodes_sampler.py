"""A sampler that notes when each turn came, when it was drawn, and for how long it had a place; run as `join` is.

python -m benchmarks.episodes_sampler LOG join ...
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from swarm.join import sampler
from swarm.rollout.messages import Answer, Stepped
from swarm.sampler import feeding
from swarm.sampler.engine import Generate, Job, Sampled
from swarm.sampler.playing import Game
from swarm.sampler.worker import EngineWorker
from swarm.types import Lease, SampleSpec

DRAWN: dict[int, float] = {}
"""Seconds in the engine, by the identity of the job."""


class TimedWorker(EngineWorker):
    def __init__(self, *given: Any, **rest: Any) -> None:
        super().__init__(*given, **rest)
        self._call = self._child.call
        setattr(self._child, "call", self._timed)  # noqa: B010 - a method of this one alone

    async def _timed(self, command: Any, kind: Any) -> Any:
        answer = await self._call(command, kind)
        if isinstance(command, Generate):
            DRAWN.update((id(job), answer.seconds) for job in command.jobs)
        return answer


class TimedGame(Game):
    log: Any

    def __init__(self, lease: Lease, spec: SampleSpec) -> None:
        super().__init__(lease, spec)
        self._came_s = time.monotonic()
        self._job: Job | None = None

    def job(self) -> Job:
        self._job = super().job()
        return self._job

    def answer(self, one: Sampled) -> Answer:
        line = {
            "group": self.name[0],
            "index": self.name[1],
            "turn": self._turn,
            "came_s": self._came_s,
            "ended_s": time.monotonic(),
            "drawn_s": DRAWN.pop(id(self._job)),
        }
        self.log.write(json.dumps(line) + "\n")
        return super().answer(one)

    def goes_on(self, said: Stepped) -> bool:
        self._came_s = time.monotonic()
        return super().goes_on(said)


def main() -> None:
    TimedGame.log = open(sys.argv.pop(1), "w", buffering=1)  # noqa: SIM115 - for as long as this process lives
    setattr(feeding, "Game", TimedGame)  # noqa: B010 - it is not this module's to export
    setattr(sampler, "EngineWorker", TimedWorker)  # noqa: B010
    from swarm.cli.run import run

    run()


if __name__ == "__main__":
    main()
