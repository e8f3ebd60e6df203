"""A real learner that dies by SIGKILL before a commit: run as the command line is.

The transaction is the DIE_ATth that holds rollouts to train on. The process stands still in it first, for as long as a
verdict that does not wait for the commit needs to arrive.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from swarm.__main__ import main
from swarm.rollout.journal.entries import Entry, RolloutAccepted
from swarm.rollout.journal.index import Index

DIE_AT = 5
"""Late enough for a batch to be on record: 40 rollouts, in eights."""

STILL_S = 1.0
"""A hundred times what a verdict takes on loopback."""

_apply = Index.apply
_left = DIE_AT


def _dying(index: Index, entries: Sequence[Entry]) -> None:
    global _left
    if any(isinstance(entry, RolloutAccepted) for entry in entries):
        _left -= 1
        if not _left:
            time.sleep(STILL_S)
            os.kill(os.getpid(), signal.SIGKILL)
    _apply(index, entries)


if __name__ == "__main__":
    Index.apply = _dying  # type: ignore[method-assign, assignment]
    main()
