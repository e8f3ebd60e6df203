"""The command line on a machine whose clock can be set: the file that CLOCK names says by how many seconds it is off.

`time.time` and what follows from it for `time.localtime` are all that the node knows of that clock. Neither timers nor
the clocks that notice a sleep go by it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from swarm.__main__ import main

CLOCK = "TEST_CLOCK"

_true = time.time


def _off() -> float:
    return _true() + float(Path(os.environ[CLOCK]).read_text())


if __name__ == "__main__":
    time.time = _off
    main()
