"""What the owner of a machine allows a node, and when: limits that may be changed while it runs.

`join` gets them as flags or from its file. `echo-node limits NAME=VALUE` writes those that are to be otherwise into
`limits.json` in the node's state directory, where the node looks every second. They outlive a restart. Pure but for
that file: what the clock, the battery and the desktop say are arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.node.identity import write_privately
from swarm.settings import DAY, JoinConfig, Limits, closest, load_config, read_hours

FILE = "limits.json"
FILE_BYTES = 4096  # A dozen names with short values; more was not written by `echo-node limits`
RESET, NONE = "default", "none"

BY_REJOINING = frozenset({"gpu_memory_share", "threads"})
"""Limits by which an engine and a pool of threads are made; the others take effect at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What this machine says of itself: minutes since midnight by its clock, and None for what it does not say."""

    minute: int
    on_battery: bool | None
    in_use: bool | None


def holds(limits: Limits, facts: Facts) -> dict[str, str]:
    """Return for each source of a hold why nothing may be drawn now; "" if it may."""
    return {
        "hours": _outside(limits.hours, facts.minute),
        "battery": "on battery" if limits.only_on_mains and facts.on_battery else "",
        "desktop": "somebody uses this machine" if limits.only_when_idle and facts.in_use else "",
    }


def _outside(hours: str, minute: int) -> str:
    ranges = read_hours(hours)
    # Over midnight the end is the smaller one.
    if not ranges or any((minute - start) % DAY < (end - start) % DAY or end - start == DAY for start, end in ranges):
        return ""
    start = min((start for start, _ in ranges), key=lambda start: (start - minute) % DAY)
    return f"outside its hours, until {start // 60:02}:{start % 60:02}"


def unknown(limits: Limits, facts: Facts) -> list[str]:
    """Return a line for each limit that cannot be kept here because the machine does not say what it depends on."""
    lines = []
    if limits.only_on_mains and facts.on_battery is None:
        lines.append("this machine does not say whether it is on battery: --only-on-mains has no effect")
    if limits.only_when_idle and facts.in_use is None:
        lines.append(
            "this machine does not say whether somebody uses it (loginctl and xprintidle can): --only-when-idle has no "
            "effect"
        )
    return lines


def with_limits(config: JoinConfig, changed: Mapping[str, Any]) -> JoinConfig:
    """Return `config` with the checked limits `changed` in place of its own."""
    return config.model_copy(update=dict(changed))


def told(before: Limits, after: Limits) -> list[str]:
    """Return a line for each limit that differs."""
    return [
        f"limit changed: {flag_of(name)} is {worded(getattr(after, name))}, was {worded(getattr(before, name))}"
        for name in Limits.model_fields
        if getattr(before, name) != getattr(after, name)
    ]


def described(changed: Mapping[str, Any]) -> list[str]:
    """Return a line for each limit, with what was changed."""
    return [
        f"{flag_of(name):<17} {worded(changed[name]) if name in changed else 'as join was given it'}"
        for name in Limits.model_fields
    ]


def flag_of(name: str) -> str:
    return name.replace("_", "-")


def worded(value: Any) -> str:
    match value:
        case None | "":
            return NONE
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
    return str(value)


# -- the file ------------------------------------------------------------------------------------------------


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return limits by name, as `Limits` holds them, without those that are to be reset. Raise UserError with a line
    for each fault."""
    values, faults = {}, []
    for name, value in given.items():
        try:
            found = _checked(name, value)
            if value != RESET:
                values[name] = found
        except UserError as fault:
            faults.append(str(fault))
    if faults:
        raise UserError("\n".join(faults))
    return values


def _checked(name: str, value: Any) -> Any:
    field = Limits.model_fields.get(name)
    if field is None:
        known = list(map(flag_of, Limits.model_fields))
        meant = closest(flag_of(name), known) or f"; there are {', '.join(known)}"
        raise UserError(f"{flag_of(name)} is no limit{meant}")
    if value not in (None, NONE, RESET):
        return getattr(load_config(Limits, None, {name: value}), name)
    if value != RESET and field.default not in (None, ""):
        raise UserError(f"{flag_of(name)} cannot be {NONE}")
    return field.default


def read_limits(path: Path) -> dict[str, Any]:
    """Return the limits in a state directory's file; none if it is not there. Blocking. Raise UserError if it is not
    what `echo-node limits` writes."""
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
    return checked(given)


def change_limits(path: Path, words: Iterable[str]) -> dict[str, Any]:
    """Change the file as words such as `max-upload=20` say, `max-upload=default` for what the node was started with.
    Return all that it sets. Blocking. Raise UserError for a bad word, and change nothing."""
    changes = dict(map(_change, words))
    wanted = checked(changes)
    result = {name: value for name, value in read_limits(path).items() if name not in changes} | wanted
    if changes:
        write_privately(path, json.dumps(result, indent=1).encode() + b"\n")
    return result


def _change(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals:
        raise UserError(f"{word}: write NAME=VALUE, or NAME={RESET}")
    return name.strip().removeprefix("--").replace("-", "_"), value.strip()
