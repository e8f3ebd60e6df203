"""How settings are read from a TOML file and from flags, and the one line that says what is wrong with them.

A file has the tables of the settings' sections; in Python and on the command line settings are flat. A message names
the file, the key and the line.
"""

from __future__ import annotations

import json
import math
import tomllib
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from swarm.errors import UserError
from swarm.settings import MAX_SHOWN, sections

MAX_FAULTS = 3  # Faults of a file that a message names; nobody would read more in one line
C = TypeVar("C", bound=BaseModel)
Place = tuple[str | int, ...]  # Path to a value: keys, and positions in lists


def load_config(
    kind: type[C], file: Path | None, flags: dict[str, Any], *, before: Mapping[str, Any] | None = None
) -> C:
    """Return a `kind` built from the settings `before`, the TOML `file` and the flags that are not None; later ones
    win. Raise a one-line UserError that names a setting by its flag, or by its key in the file if it came from there.
    """
    values = read_settings(kind, file)
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return kind(**{**(before or {}), **values, **given})
    except ValidationError as error:
        faults = error.errors()
        in_file = [fault for fault in faults if fault["loc"] and fault["loc"][0] in values.keys() - given.keys()]
        lines = [_explain_flag(kind, fault) for fault in faults if fault not in in_file]
        if file is not None and in_file:
            places = sections(kind)
            nested = [{**fault, "loc": (places[str(fault["loc"][0])], *fault["loc"])} for fault in in_file]
            lines.insert(0, _explain_file(kind, file, read_toml(file), nested))
        raise UserError("; ".join(lines)) from error


def load_file(kind: type[C], file: Path) -> C:
    """Return a `kind`, whose tables are models of their own, from a TOML file alone. Raise a one-line UserError that
    names the file, keys and lines."""
    values = read_toml(file)
    try:
        return kind(**values)
    except ValidationError as error:
        raise UserError(_explain_file(kind, file, values, error.errors())) from error


def read_settings(kind: type[BaseModel], file: Path | None) -> dict[str, Any]:
    """Return the settings of a file by name, unchecked. Raise a one-line UserError for keys that are in no section."""
    if file is None:
        return {}
    places = sections(kind)
    found = dict(_settings(read_toml(file), set(places.values())))
    if wrong := [place for place in found if len(place) < 2 or places.get(place[1]) != place[0]]:
        text = file.read_text()
        raise UserError(_in_file(file, [(line_of(text, place), _misplaced(places, place)) for place in wrong]))
    return {place[-1]: value for place, value in found.items()}


def _settings(tables: Mapping[str, Any], known: Collection[str]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield place and value of each setting of a file, and what else is at its top."""
    for table, keys in tables.items():
        if table in known and isinstance(keys, dict):
            yield from (((table, key), value) for key, value in keys.items())
        else:
            yield (table,), keys


def _misplaced(places: Mapping[str, str], place: tuple[str, ...]) -> str:
    """Say of a key that is in no section, or in the wrong one, where it belongs."""
    key = place[-1]
    if table := places.get(key):
        return f"{key} belongs in [{table}]: write [{table}] {key} = ..."
    if meant := get_close_matches(key, places, n=1):
        return f"{'.'.join(place)} is no setting: did you mean {meant[0]}, in [{places[meant[0]]}]?"
    known = [name for name, table in places.items() if table == place[0]] if len(place) > 1 else []
    tables = ", ".join(f"[{table}]" for table in dict.fromkeys(places.values()))
    return f"{'.'.join(place)} is no setting; known: {', '.join(known) or tables}"


def as_toml(kind: type[BaseModel], values: Mapping[str, Any]) -> str:
    """Return the text of a file with these settings, by section."""
    places = sections(kind)
    lines: list[str] = []
    for table in dict.fromkeys(places.values()):
        own = [f"{name} = {_toml(value)}" for name, value in values.items() if places[name] == table]
        lines += [f"[{table}]", *own, ""] if own else []
    return "\n".join(lines)


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return json.dumps(value, ensure_ascii=False)


def read_toml(file: Path) -> dict[str, Any]:
    """Return the settings of a file, unchecked. Raise UserError if it cannot be read."""
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise UserError(f"cannot read the configuration {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid TOML: {error}") from error


def closest(name: str, known: Iterable[str]) -> str:
    """Return `: did you mean ...?`, or "" if no known name is similar."""
    near = get_close_matches(name, list(known), n=1)
    return f": did you mean {near[0]}?" if near else ""


def line_of(text: str, place: Place) -> int:
    """Return the line, from 1, of the statement in a valid TOML text that sets the value at `place`. If the value is
    missing, return the line of the table that it would be in, or 0 if that is missing too."""
    # The parser keeps no line numbers. A statement is complete when it parses on its own. It sets `place` if it is the
    # first one with which the text so far gives as much of `place` as the whole text does.
    lines, ends = text.split("\n"), [0]
    for end in range(1, len(lines) + 1):
        with suppress(tomllib.TOMLDecodeError):
            tomllib.loads("\n".join(lines[ends[-1] : end]))
            ends.append(end)

    def depth(count: int) -> int:
        """Return how many parts of `place` the first `count` statements set."""
        values: Any = tomllib.loads("\n".join(lines[: ends[count]]))
        for found, part in enumerate(place):
            try:
                values = values[part]
            except (KeyError, IndexError, TypeError):
                return found
        return len(place)

    whole = depth(len(ends) - 1)
    return ends[bisect_left(range(len(ends)), whole, key=depth) - 1] + 1 if whole else 0


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
    text = file.read_text()
    places = {fault["loc"] for fault in faults}
    # pydantic also reports a list as empty if all its members are faulty.
    own = [
        fault for fault in faults if not any(fault["loc"] == place[: len(fault["loc"])] != place for place in places)
    ]
    return _in_file(file, [(line_of(text, fault["loc"]), _explain_key(kind, values, fault)) for fault in own])


def _in_file(file: Path, found: list[tuple[int, str]]) -> str:
    found = sorted(found)
    told = "; ".join(f"line {line}: {words}" if line else words for line, words in found[:MAX_FAULTS])
    more = f"; and {len(found) - MAX_FAULTS} more" if len(found) > MAX_FAULTS else ""
    return f"{file}{', ' if found[0][0] else ': '}{told}{more}"


def _explain_key(kind: type[BaseModel], values: dict[str, Any], fault: Any) -> str:
    """Describe the fault with its key, such as `fleet vast-4090: price_per_h`."""
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
    return f"{key} = {repr(given)[:MAX_SHOWN]}: {message[0].lower() + message[1:]}"


def _known(kind: Any, place: Place) -> list[str]:
    """Return the keys that are valid in place of the last part of `place`."""
    for part in place[:-1]:
        if isinstance(part, str) and kind is not None:
            kind = _model_in(kind.model_fields[part].annotation)
    return list(kind.model_fields) if kind is not None else []


def _model_in(annotation: Any) -> Any:
    """Return the model of a field or of its list's entries, or None for plain values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)


def _key(values: Any, loc: tuple[str | int, ...]) -> str:
    """Join keys with dots; entries of a list of tables are called by their names."""
    key, at = "", values
    for part in loc:
        if isinstance(at, dict):
            key, at = key + (" " if key.endswith(":") else "." if key else "") + str(part), at.get(part)
        elif isinstance(at, list) and isinstance(part, int):
            at = at[part]
            name = at.get("name") if isinstance(at, dict) else None
            key += f" {name[:MAX_SHOWN] if isinstance(name, str) and name.isprintable() else f'number {part + 1}'}:"
    return key.removesuffix(":")


def _message(fault: Any) -> str:
    return str(fault["msg"]).removeprefix("Value error, ")


def _shown(given: Any) -> Any:
    return given if isinstance(given, int | float) or str(given).isprintable() else repr(given)
