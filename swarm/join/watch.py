"""Looks once a second at what a machine's owner allows, at what the machine says of itself, and at its clocks."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from swarm.errors import UserError
from swarm.join.owner import FILE, Holds, Reading, holds, notice, read_limits, told, unknown
from swarm.settings import JoinConfig

LOOK_S = 1.0
ASK_S = 5.0  # Between two questions to programs such as loginctl; an owner who comes back waits no longer
ANSWER_S = 3.0  # Longest time that such a program may take
IN_USE_S = 300.0  # A desktop without input for this long is idle; desktops set IdleHint after about as long

POWER = Path("/sys/class/power_supply")
BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # macOS has the one, which counts sleep there


def _read_clocks() -> Reading:
    return Reading(wall=time.time(), monotonic=time.monotonic(), boot=time.clock_gettime(BOOT_CLOCK))


async def watch_clocks(say: Callable[[str], None], on_away: Callable[[], None] | None = None) -> None:
    """Say whenever this machine slept or a clock was set. `on_away` is called when the swarm has gone on without it."""
    before = _read_clocks()
    while True:
        await asyncio.sleep(LOOK_S)
        now = _read_clocks()
        line, was_away = notice(before, now)
        if was_away and on_away is not None:
            line += "; joining again"
            on_away()
        if line:
            say(line)
        before = now


class Watch:
    """The limits of one node: `config` with what its state directory says. `on_change` gets the settings that hold
    from now on."""

    def __init__(
        self,
        directory: Path,
        config: JoinConfig,
        *,
        holding: Holds,
        say: Callable[[str], None],
        on_change: Callable[[JoinConfig], None],
    ) -> None:
        self._path = directory / FILE
        self._started_with = self.config = config
        self._holding = holding
        self._say = say
        self._on_change = on_change
        self._said: set[str] = set()

    async def run(self) -> None:
        """Look until this is cancelled."""
        asked_at, on_battery, in_use = -ASK_S, None, None
        while True:
            if self.look():
                self._on_change(self.config)
            if time.monotonic() - asked_at >= ASK_S:
                asked_at = time.monotonic()
                on_battery = await asyncio.to_thread(is_on_battery) if "mains" in self.config.only_when else None
                in_use = await asyncio.to_thread(is_in_use) if "idle" in self.config.only_when else None
                for line in unknown(self.config, on_battery=on_battery, in_use=in_use):
                    self._say_once(line)
            local = time.localtime(time.time())
            minute = local.tm_hour * 60 + local.tm_min
            for source, why in holds(self.config, minute=minute, on_battery=on_battery, in_use=in_use).items():
                self._holding.set(source, why)
            await asyncio.sleep(LOOK_S)

    def look(self) -> bool:
        """Read the file. Return whether other limits hold than at the last look, and say which."""
        try:
            changed = read_limits(self._path)
        except UserError as fault:
            self._say_once(f"the limits stay as they were: {'; '.join(str(fault).splitlines())}")
            return False
        before, self.config = self.config, self._started_with.model_copy(update=changed)
        for line in told(before, self.config):
            self._say(line)
        return self.config != before

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)


# -- what the machine says -----------------------------------------------------------------------------------


def is_on_battery(root: Path = POWER) -> bool | None:
    """Return whether this machine runs on battery, or None if it does not say. Blocking."""
    if sys.platform == "darwin":
        said = _said_by("pmset", "-g", "batt")
        return "'Battery Power'" in said if said else None
    if not root.is_dir():
        return None
    try:
        supplies = [supply for supply in root.iterdir() if _read(supply / "scope") != "Device"]  # Not a mouse's battery
    except OSError:
        return None
    if any(_read(supply / "online") == "1" for supply in supplies):
        return False
    return any(_read(supply / "status") == "Discharging" for supply in supplies)


def is_in_use() -> bool | None:
    """Return whether somebody uses this machine's desktop, or None if nothing says so. Blocking."""
    if found := re.search(r"^IdleHint=(yes|no)$", _said_by("loginctl", "show-seat", "seat0"), re.MULTILINE):
        return found[1] == "no"
    idle_ms = _said_by("xprintidle").strip()
    return float(idle_ms) < IN_USE_S * 1000 if idle_ms.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _said_by(*command: str) -> str:
    """Return what a program prints, or "" if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=ANSWER_S, check=True)
        return done.stdout
    except (OSError, subprocess.SubprocessError):
        return ""


# -- what the node gives -------------------------------------------------------------------------------------


def give_way(nice: int, engine_pid: int | None) -> bool:
    """Give this process's threads and the engine's process group this niceness; threads that give way further already
    stay. Return False if the system does not let them give way less."""
    threads = Path("/proc/self/task")  # Where niceness belongs to a thread
    own = [int(path.name) for path in threads.iterdir()] if threads.is_dir() else [0]
    targets = [(os.PRIO_PROCESS, thread) for thread in own]
    if engine_pid is not None:
        targets.append((os.PRIO_PGRP, engine_pid))
    main = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        for kind, who in targets:
            with suppress(ProcessLookupError):
                was = os.getpriority(kind, who)
                os.setpriority(kind, who, nice if was == main else max(was, nice))
    except PermissionError:
        return False
    return True
