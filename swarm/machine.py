"""How much memory this machine has, and how much of it, and how many files, a process may take."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def limit_memory(nbytes: int) -> None:
    """Limit this process's own memory, on Linux alone."""
    if sys.platform == "linux":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        limit = nbytes if most == resource.RLIM_INFINITY else min(nbytes, most)
        # Not RLIMIT_AS: a file that is mapped takes addresses and no memory of its own.
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def free_host_bytes() -> int:
    """Return what programs may still take of this machine's memory without swapping, and of their control group
    (version 2 or 1) if it has a limit. Cached files do not count as taken. All of the memory where the system does not
    say."""
    found = []
    for group, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            cached = re.search(r"^inactive_file (\d+)$", Path(group, "memory.stat").read_text(), re.MULTILINE)
            found.append(
                int(Path(group, limit).read_text())
                - int(Path(group, used).read_text())
                + int(cached[1] if cached else 0)
            )
        except (OSError, ValueError):
            # No such group, or no limit ("max").
            continue
    try:
        available = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        available = None
    if sys.platform == "darwin" and (free := _mac_bytes()) is not None:
        return min([*found, free])
    # Pages that are free (SC_AVPHYS_PAGES) would not do: on a machine that has run for a while files fill nearly all.
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([*found, int(available[1]) * 1024 if available else whole])


def allow_open_files() -> None:
    """Let this process have as many files and connections as the system would allow it, instead of mostly 1,024."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS names a limit that it does not take
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


VM_STAT_S = 5.0  # It counts pages, and answers at once


def _mac_bytes() -> int | None:
    try:
        said = subprocess.run(["vm_stat"], capture_output=True, text=True, timeout=VM_STAT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return mac_free_bytes(said)


def mac_free_bytes(said: str) -> int | None:
    """Return what programs may still take by the words of macOS's vm_stat: pages that are free, or hold what can be
    read again. None if it says something else."""
    page = re.search(r"page size of (\d+) bytes", said)
    pages = re.findall(r"^Pages (?:free|inactive|speculative|purgeable):\s+(\d+)\.$", said, re.MULTILINE)
    return int(page[1]) * sum(map(int, pages)) if page and pages else None
