"""A reward whose process is killed in the middle of a call, as the kernel does when memory runs out."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from swarm.tasks.scoring import Completion, _score
from swarm.types import Score


def score_after_deaths(counter: str, deaths: int, completions: list[Completion]) -> list[Score]:
    """The scores, once the file `counter` has `deaths` bytes; each call before that adds one and dies."""
    with Path(counter).open("ab") as file:
        if file.tell() >= deaths:
            return _score(completions)
        file.write(b"x")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")
