"""`python -m swarm.learner.launch OPTIONS`: torchrun for the trainer's ranks, with its faults told in one line."""

from __future__ import annotations

import logging
import os
import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

TORCHRUN_VARIABLE = "ECHO_NODE_TORCHRUN_PID"
"""By which a rank sees whether torchrun is still there."""


def main() -> None:
    os.environ[TORCHRUN_VARIABLE] = str(os.getpid())
    # Its own account of a rank's end is thirty lines, and hides what the rank said.
    logging.disable(logging.CRITICAL)
    try:
        run.main([*sys.argv[1:], "--max-restarts", "0", "--module", "swarm.learner.trainer"])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        sys.exit(f"rank {rank} of the trainer {how}")


if __name__ == "__main__":
    main()
