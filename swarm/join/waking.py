"""Notices that this machine slept, and that its clock was set, by comparing three clocks again and again. Pure.

                             wall    monotonic (what timers go by)    boot (counts sleep)
the process is stopped       goes on      goes on                     goes on
the machine sleeps           goes on      stands still                goes on
the clock is set             leaps        goes on                     goes on

So a long gap between two looks, by `boot`, is time in which the node did nothing. A virtual machine that was paused
sees no gap, only that its clock is set forward afterwards; the swarm has gone on without it all the same.
"""

from __future__ import annotations

from typing import NamedTuple

AWAY_S = 15.0
"""A node that is away for longer has lost its leases: the learner expects a beat every 5 s and takes leases away after
three. A machine with too much to do keeps the loop waiting for a few seconds at most."""

LEAP_S = 5.0  # A clock that is kept in step by NTP is moved by fractions of a second, or once at the start of a machine


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
