"""`python -m tests.integration.killed_save`: a trainer that dies by SIGKILL while it saves.

DIE_IN names a function of `os` ("fsync", "rename"), DIE_AT a part of a path: the process kills itself as it is about to
call that function on such a path.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from swarm.learner.trainer import main


def die_in(name: str, part: str) -> None:
    call = getattr(os, name)

    def dying(where: int | Path, *others: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else str(where)
        if part in path:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(where, *others)

    setattr(os, name, dying)


if __name__ == "__main__":
    die_in(os.environ["DIE_IN"], os.environ["DIE_AT"])
    main()
