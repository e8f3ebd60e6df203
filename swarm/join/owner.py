"""What the owner of a machine allows a node, and when: limits that may be changed while it runs.

`join` gets them as flags or from its file. `echo-node limits NAME=VALUE` writes those that are to be otherwise into
`limits.json` in the node's state directory, where the node looks every second; they outlive a restart. Pure but for
that file and the events of Holds: what the clock, the battery and the desktop say are arguments, None for silence.

It also notices that the machine slept, and that its clock was set, by comparing three clocks again and again:

                             wall    monotonic (what timers go by)    boot (counts sleep)
the process is stopped       goes on      goes on                     goes on
the machine sleeps           goes on      stands still                goes on
the clock is set             leaps        goes on                     goes on

So a long gap between two looks, by `boot`, is time in which the node did nothing. A virtual machine that was paused
sees no gap, only that its clock is set forward afterwards; the swarm has gone on without it all the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from swarm.errors import UserError
from swarm.node.identity import write_privately
from swarm.settings import LimitsSection, read_hours
from swarm.settings_file import closest, load_config

FILE = "limits.json"
FILE_BYTES = 4096  # A dozen names with short values; more was not written by `echo-node limits`
RESET, NONE = "default", "none"
DAY = 24 * 60  # Minutes

AWAY_S = 15.0
"""A node that is away for longer has lost its leases: the learner expects a beat every 5 s and takes leases away after
three. A machine with too much to do keeps the loop waiting for a few seconds at most."""

LEAP_S = 5.0  # A clock that is kept in step by NTP is moved by fractions of a second, or once at the start of a machine

BY_REJOINING = frozenset({"gpu_memory_share", "threads"})
"""Limits by which an engine and a pool of threads are made; the others take effect at once."""


class Holds:
    """Why a node does not draw now: reasons by source, such as "owner" or "battery". It is `free` to draw while there
    are no reasons. `on_hold` is called for each reason that is set."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self.on_hold: Callable[[], None] = lambda: None
        self.free = asyncio.Event()
        self.free.set()

    def set(self, source: str, reason: str) -> None:
        """Hold for `reason`, a few words such as "on battery"; "" lifts what `source` had set."""
        if reason:
            self._reasons[source] = reason
            self.free.clear()
            self.on_hold()
        else:
            self._reasons.pop(source, None)
        if not self._reasons:
            self.free.set()

    @property
    def reason(self) -> str:
        """The reason that came first; "" if nothing holds."""
        return next(iter(self._reasons.values()), "")


def holds(limits: LimitsSection, *, minute: int, on_battery: bool | None, in_use: bool | None) -> dict[str, str]:
    """Return for each source of a hold why nothing may be drawn now; "" if it may. `minute` is since midnight."""
    return {
        "hours": _outside(limits.hours, minute),
        "battery": "on battery" if "mains" in limits.only_when and on_battery else "",
        "desktop": "somebody uses this machine" if "idle" in limits.only_when and in_use else "",
    }


def _outside(hours: str, minute: int) -> str:
    ranges = read_hours(hours)
    # Over midnight the end is the smaller one.
    if not ranges or any((minute - start) % DAY < (end - start) % DAY for start, end in ranges):
        return ""
    start = min((start for start, _ in ranges), key=lambda start: (start - minute) % DAY)
    return f"outside its hours, until {start // 60:02}:{start % 60:02}"


def unknown(limits: LimitsSection, *, on_battery: bool | None, in_use: bool | None) -> list[str]:
    """Return a line for each limit that cannot be kept here."""
    silent = (
        ("mains" in limits.only_when and on_battery is None, "whether it is on battery: only-when=mains"),
        ("idle" in limits.only_when and in_use is None, "(by loginctl or xprintidle) who uses it: only-when=idle"),
    )
    return [f"this machine does not say {what} has no effect" for wanted, what in silent if wanted]


def told(before: LimitsSection, after: LimitsSection) -> list[str]:
    """Return a line for each limit that differs."""
    pairs = ((name, getattr(before, name), getattr(after, name)) for name in LimitsSection.model_fields)
    return [
        f"limit changed: {flag_of(name)} is {_said(is_)}, was {_said(was)}" for name, was, is_ in pairs if was != is_
    ]


def described(changed: Mapping[str, Any]) -> list[str]:
    """Return a line for each limit, with what was changed."""
    values = {
        name: _said(changed[name]) if name in changed else "as join was given it" for name in LimitsSection.model_fields
    }
    return [f"{flag_of(name):<17} {value}" for name, value in values.items()]


def flag_of(name: str) -> str:
    return name.replace("_", "-")


def _said(value: Any) -> str:
    if isinstance(value, tuple):
        value = ",".join(value)
    return NONE if value in (None, "") else f"{value:g}" if isinstance(value, float) else str(value)


def read_limits(path: Path) -> dict[str, Any]:
    """Return the limits in a state directory's file by name; none if it is not there. Blocking. Raise UserError if it
    is not what `echo-node limits` writes."""
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES + 1)
        given = json.loads(text) if len(text) <= FILE_BYTES else None
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}): remove it, or mend it") from error
    if not isinstance(given, dict):
        raise UserError(f"{path} is no JSON object of at most {FILE_BYTES} bytes: remove it, or mend it")
    return _checked(given)


def change_limits(path: Path, words: Iterable[str]) -> dict[str, Any]:
    """Change the file as words such as `max-upload=20` say, `max-upload=default` for what the node was started with.
    Return all that it sets. Blocking. Raise UserError with a line for each fault, and change nothing."""
    changes = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"{word}: write NAME=VALUE, or NAME={RESET}")
        changes[name.strip().removeprefix("--").replace("-", "_")] = value.strip()
    wanted = _checked(changes)
    result = {name: value for name, value in read_limits(path).items() if name not in changes} | wanted
    if changes:
        write_privately(path, json.dumps(result, indent=1).encode() + b"\n")
    return result


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return limits by name, as `Limits` holds them, without those that are to be reset."""
    values: dict[str, Any] = {}
    faults = []
    for name, value in given.items():
        try:
            if name not in LimitsSection.model_fields:
                known = list(map(flag_of, LimitsSection.model_fields))
                meant = closest(flag_of(name), known) or f"; there are {', '.join(known)}"
                raise UserError(f"{flag_of(name)} is no limit{meant}")
            if value in (None, NONE) and (default := LimitsSection.model_fields[name].default) in (None, "", ()):
                values[name] = default
            elif value != RESET:
                values[name] = getattr(load_config(LimitsSection, None, {name: value}), name)
        except UserError as fault:
            faults.append(str(fault))
    if faults:
        raise UserError("\n".join(faults))
    return values


class Reading(NamedTuple):
    """What the clocks showed at one moment, in seconds."""

    wall: float
    monotonic: float
    boot: float


def notice(before: Reading, now: Reading) -> tuple[str, bool]:
    """Return a line about what happened between two looks, or "", and whether the swarm has gone on without this node.
    Two looks are a second apart, or a few where there is too much to do."""
    away_s = now.boot - before.boot
    asleep_s = away_s - (now.monotonic - before.monotonic)
    leap_s = now.wall - before.wall - away_s
    lines = []
    if away_s >= AWAY_S:
        what = "this machine slept" if asleep_s > away_s / 2 else "this process was stopped, or got no turn,"
        lines.append(f"{what} for {away_s:,.0f} s")
    if abs(leap_s) >= LEAP_S:
        lines.append(f"the clock was set {'forward' if leap_s > 0 else 'back'} by {abs(leap_s):,.0f} s")
    return "; ".join(lines), max(away_s, leap_s) >= AWAY_S
