"""`python -m tests.integration.killed_apply STORE MEMORY [BYTE]`: apply what lies in a receiver's store, or die of it.

Prints "ready" and then opens the store, which applies every version that is whole. The map lies in the directory
MEMORY, or on the disk if that is "-". With BYTE the process kills itself by SIGKILL when it has written so many bytes,
in the midst of the write; else it prints how many it wrote.
"""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from swarm.broadcast.store.store import VersionStore
from swarm.broadcast.store.weight_map import open_weights
from tests.builders import KEY

THREADS = 2


def main(directory: Path, memory: Path | None, die_at: int | None) -> None:
    written, pwrite = 0, os.pwrite

    def counting(descriptor: int, data: memoryview, start: int, /) -> int:
        nonlocal written
        if die_at is not None and die_at < written + len(data):
            pwrite(descriptor, data[: max(0, die_at - written)], start)
            os.kill(os.getpid(), signal.SIGKILL)
        written += len(data)
        return pwrite(descriptor, data, start)

    os.pwrite = counting  # type: ignore[assignment]
    print("ready", flush=True)
    with ThreadPoolExecutor(THREADS) as pool:
        open_weights(VersionStore(directory, KEY.public_bytes), pool, memory)
    print(written, flush=True)


if __name__ == "__main__":
    where = None if sys.argv[2] == "-" else Path(sys.argv[2])
    main(Path(sys.argv[1]), where, int(sys.argv[3]) if len(sys.argv) > 3 else None)
