"""A real sampler that dies by SIGKILL as it is about to submit. Run as the command line is."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from swarm.__main__ import main
from swarm.rollout.messages import Answer, Stepped
from swarm.sampler.client import RolloutClient


async def _dying(client: RolloutClient, answers: Sequence[Answer]) -> list[Stepped]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


if __name__ == "__main__":
    RolloutClient.submit = _dying  # type: ignore[method-assign, assignment]
    main()
