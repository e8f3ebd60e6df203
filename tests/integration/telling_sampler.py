"""A real sampler that keeps a list: each rollout that it is told is accepted. Run as the command line is.

One rollout id a line, in TOLD in the state directory; lines of former lives stay.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from swarm.__main__ import main
from swarm.rollout.messages import Answer, Stepped
from swarm.sampler.client import RolloutClient

TOLD = "told-accepted"

_submit = RolloutClient.submit


async def _telling(client: RolloutClient, answers: Sequence[Answer]) -> list[Stepped]:
    said = await _submit(client, answers)
    state = Path(sys.argv[sys.argv.index("--state-dir") + 1])
    with (state / TOLD).open("a") as file:
        file.writelines(f"{one.group_id}/{one.index}\n" for one in said if one.verdict == "accepted")
    return said


if __name__ == "__main__":
    RolloutClient.submit = _telling  # type: ignore[method-assign, assignment]
    main()
