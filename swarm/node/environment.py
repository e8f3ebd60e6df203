"""What a run ran on: environment.json in its directory, one entry for each life of the learner. Blocking."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ENVIRONMENT = "environment.json"

LIVES_KEPT = 100
"""Of a run that is resumed again and again the first and the newest; an entry takes some 10 kB."""

Life = dict[str, Any]


def note_life(run_dir: Path, *, step: int, device: str) -> str:
    """Append this process: libraries, machine and command. `step` is where it goes on, `device` what it trains on.

    "" or why it could not be written, as on a full disk: a run goes on without.
    """
    lives = [*read_lives(run_dir), this_life(step=step, device=device)]
    if len(lives) > LIVES_KEPT:
        lives = [lives[0], *lives[1 - LIVES_KEPT :]]
    partial = run_dir / (ENVIRONMENT + ".partial")
    try:
        partial.write_text(json.dumps(lives, indent=2) + "\n")
        partial.replace(run_dir / ENVIRONMENT)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def read_lives(run_dir: Path) -> list[Life]:
    """What is noted, oldest first; nothing of a run that noted none, or whose file was damaged."""
    try:
        found = json.loads((run_dir / ENVIRONMENT).read_text())
    except (OSError, ValueError):
        return []
    return [life for life in found if isinstance(life, dict)] if isinstance(found, list) else []


def this_life(*, step: int, device: str) -> Life:
    """This process and its machine. Loads no library: versions are those that are installed."""
    return {
        "time": round(time.time(), 3),
        "step": step,
        "device": device,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "gpus": _gpus(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "libraries": libraries(),
    }


def libraries() -> dict[str, str]:
    """Name and version of every installed distribution; a local build shows in its version, as in 2.13.0+cpu."""
    found: dict[str, str] = {}
    for one in metadata.distributions():
        # The first on the path is the one that is imported. One that was removed by hand has no name any more.
        if name := one.metadata["Name"]:
            found.setdefault(name, one.version)
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _cpu() -> str:
    """Its maker's name, as Linux has it."""
    return _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Names of NVIDIA's GPUs by the driver's own files: nvidia-smi may take seconds to answer."""
    found = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return [_field(path, "Model") or "unknown" for path in found]


def _field(path: Path, name: str) -> str:
    """The first value of `name` in a file of lines like `name : value`; "" if there is none."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() == name), "")
