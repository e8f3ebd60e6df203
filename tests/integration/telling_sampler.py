"""A real sampler that keeps a list: each rollout that it is told is accepted. Run as the command line is.

One rollout id a line, in TOLD in the state directory; lines of former lives stay.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from swarm.__main__ import main
from swarm.rollout.messages import Answer, SubmissionReply
from swarm.sampler.client import RolloutClient

TOLD = "told-accepted"

_submit = RolloutClient._submit_portion


async def _telling(client: RolloutClient, answers: Sequence[Answer]) -> SubmissionReply:
    reply = await _submit(client, answers)
    state = Path(sys.argv[sys.argv.index("--state-dir") + 1])
    with (state / TOLD).open("a") as file:
        file.writelines(f"{one.rollout_id}\n" for one in reply.verdicts if one.verdict == "accepted")
    return reply


if __name__ == "__main__":
    RolloutClient._submit_portion = _telling  # type: ignore[method-assign, assignment]
    main()
