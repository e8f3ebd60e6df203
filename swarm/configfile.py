"""Reads settings: a TOML file, flags over it, and one line for whatever is wrong with either.

A fault in a file names the file, the key and its line. The parser keeps no lines; `line_of` finds them by giving it the
file one statement at a time.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from swarm.errors import UserError

MOST_FAULTS = 3
"""Of a file, told in one line: who sees more reads none."""

MOST_SHOWN = 60
"""Characters of a value or a name that a fault repeats."""

C = TypeVar("C", bound=BaseModel)
Place = tuple[str | int, ...]
"""Keys and, in a list, positions that lead to a value."""


def load_config(
    kind: type[C], file: Path | None, flags: dict[str, Any], *, before: Mapping[str, Any] | None = None
) -> C:
    """A `kind` from the settings it had `before`, overridden by the TOML `file`, overridden by the flags that were
    given. UserError in one line, which names a setting as the flag or as the key of the file that it came from."""
    values = read_toml(file) if file else {}
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return kind(**{**(before or {}), **values, **given})
    except ValidationError as error:
        faults = error.errors()
        in_file = [fault for fault in faults if fault["loc"] and fault["loc"][0] in values.keys() - given.keys()]
        lines = [_explain_flag(kind, fault) for fault in faults if fault not in in_file]
        if file is not None and in_file:
            lines.insert(0, _explain_file(kind, file, values, in_file))
        raise UserError("; ".join(lines)) from error


def load_file(kind: type[C], file: Path) -> C:
    """A `kind` that a TOML file alone says. UserError in one line that names the file, the keys and their lines."""
    values = read_toml(file)
    try:
        return kind(**values)
    except ValidationError as error:
        raise UserError(_explain_file(kind, file, values, error.errors())) from error


def read_toml(file: Path) -> dict[str, Any]:
    """The settings of a file, as they stand. UserError if it cannot be read."""
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise UserError(f"cannot read the configuration {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid TOML: {error}") from error


def closest(name: str, known: Iterable[str]) -> str:
    """`: did you mean ...?`, or nothing if no known name is near."""
    near = get_close_matches(name, list(known), n=1)
    return f": did you mean {near[0]}?" if near else ""


def line_of(text: str, place: Place) -> int:
    """The line of a valid TOML text on which the statement begins that gives the value at `place`, counted from 1. For
    a value that is not there, of the table that it would be in; 0 if that is not there either."""
    best, most, start = 0, 0, 1
    table: Place = ()
    entries: Counter[Place] = Counter()
    statement = ""
    for number, line in enumerate(text.split("\n"), 1):
        statement += line + "\n"
        try:
            values = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue  # it goes on in the next line
        if statement.lstrip().startswith("["):
            table, values = _table(values, entries), {}
        length = _shared(table, values, place)
        if length > most:
            best, most = start, length
        statement, start = "", number + 1
    return best


def _table(values: Any, entries: Counter[Place]) -> Place:
    """The place of the table whose header was read as `values`. `entries` counts those of each list of tables."""
    place: Place = ()
    while values:
        ((name, values),) = values.items()
        place = (*place, name)
        if isinstance(values, list):
            entries[place] += 1
            values = values[0]
        if entries[place]:
            place = (*place, entries[place] - 1)
    return place


def _shared(table: Place, values: Any, place: Place) -> int:
    """How far the way to `place` leads through `values`, which a statement under the header `table` gave."""
    if place[: len(table)] != table:
        return 0
    length = len(table)
    for part in place[length:]:
        if not (isinstance(values, dict) and part in values):
            break
        values = values[part]
        length += 1
    return length


# -- words -------------------------------------------------------------------------------------------------------------


def _explain_flag(kind: type[BaseModel], fault: Any) -> str:
    name = ".".join(str(part) for part in fault["loc"])
    flag = f"--{name.replace('_', '-')}"
    if fault["type"] == "extra_forbidden":
        return f"unknown setting {name!r}" + closest(name, kind.model_fields)
    if fault["type"] == "missing":
        return f"{flag} has to be given"
    message = _message(fault)
    return f"{flag} {_shown(fault['input'])}: {message[0].lower() + message[1:]}" if name else message


def _explain_file(kind: type[BaseModel], file: Path, values: dict[str, Any], faults: Sequence[Any]) -> str:
    """The first faults of a file, by line and key."""
    text = file.read_text()
    places = {fault["loc"] for fault in faults}
    # A list whose members are all faulty is said to be empty, too.
    own = [
        fault for fault in faults if not any(fault["loc"] == place[: len(fault["loc"])] != place for place in places)
    ]
    found = sorted((line_of(text, fault["loc"]), _explain_key(kind, values, fault)) for fault in own)
    told = "; ".join(f"line {line}: {words}" if line else words for line, words in found[:MOST_FAULTS])
    more = f"; and {len(found) - MOST_FAULTS} more" if len(found) > MOST_FAULTS else ""
    return f"{file}{', ' if found[0][0] else ': '}{told}{more}"


def _explain_key(kind: type[BaseModel], values: dict[str, Any], fault: Any) -> str:
    """The fault by its key, as in `fleet vast-4090: price_per_h`."""
    key = _key(values, fault["loc"])
    match fault["type"]:
        case "extra_forbidden":
            known = _known(kind, fault["loc"])
            return f"{key} is no key of this file" + (
                closest(str(fault["loc"][-1]), known) or f"; known: {', '.join(known)}"
            )
        case "missing":
            return f"{key} is missing"
    message, given = _message(fault), fault["input"]
    if isinstance(given, dict | list):
        return f"{key}: {message}" if key else message
    return f"{key} = {repr(given)[:MOST_SHOWN]}: {message[0].lower() + message[1:]}"


def _known(kind: Any, place: Place) -> list[str]:
    """The names that may stand where the last of `place` stands."""
    for part in place[:-1]:
        if isinstance(part, str) and kind is not None:
            kind = _model_in(kind.model_fields[part].annotation)
    return list(kind.model_fields) if kind is not None else []


def _model_in(annotation: Any) -> Any:
    """The model that a field or the entries of its list are; None for plain values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)


def _key(values: Any, loc: tuple[str | int, ...]) -> str:
    """Keys with dots between them; an entry of a list of tables is called by its name."""
    key, at = "", values
    for part in loc:
        if isinstance(at, dict):
            key, at = key + (" " if key.endswith(":") else "." if key else "") + str(part), at.get(part)
        elif isinstance(at, list) and isinstance(part, int):
            at = at[part]
            name = at.get("name") if isinstance(at, dict) else None
            key += f" {name[:MOST_SHOWN] if isinstance(name, str) and name.isprintable() else f'number {part + 1}'}:"
    return key.removesuffix(":")


def _message(fault: Any) -> str:
    return str(fault["msg"]).removeprefix("Value error, ")


def _shown(given: Any) -> Any:
    return given if isinstance(given, int | float) or str(given).isprintable() else repr(given)
