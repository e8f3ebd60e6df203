"""Writes what documents repeat of the code: bin/python -m tests.pages

A part stands between `<!-- from the code: NAME -->` and `<!-- end -->`; all around it is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import get_args

import msgspec.inspect as spec
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from swarm.node.exposition import EVERY, JOINED, LEARNER, OTHER, PREFIX, Figure
from swarm.plan.scenario import Scenario
from swarm.settings import RESUMED, Flag, JoinConfig, Key, LeadConfig, headings, sections
from swarm.wire import PROTOCOL, Message

DOCUMENTS = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
PART = re.compile(r"(<!-- from the code: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
ROOMS = (
    *("node.hello", "gossip.records", "gossip.reachability", "node.bootstrap", "net.signing", "net.sessions"),
    *("net.links", "broadcast.version.manifest", "broadcast.notes", "types", "rollout.messages"),
)
"""Modules with what nodes say to one another, in the order of the page."""

SETTING = ("setting", "flag", "meaning", "default")
METRIC = ("metric", "type", "labels", "what")
SCENARIO = ("table", "keys, with what is taken when they are left out", "what")
LOCAL = {"GoodPeers", "Sealed", "Prompt", "Score", "Observed", "Unscored"}
"""Messages of these modules that never leave their machine, or are described by hand."""


def page(text: str) -> str:
    """Return a document with its parts as the code has them now."""
    return PART.sub(lambda found: found[1] + "".join(PARTS[found[2]]()) + found[3], text)


def _table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n"
    for row in rows:
        yield f"| {' | '.join(row)} |\n".replace("|  |", "| |")


def _docstring(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split())


def _sections(kind: type[BaseModel]) -> Iterator[Iterable[str]]:
    """A row for the heading of each section, and one for each of its settings."""
    for table, heading in headings(kind).items():
        yield f"**[{table}]**", "", f"**{heading.partition(']')[2].strip()}**", ""
        for name, place in sections(kind).items():
            if place == table:
                yield _setting(name, kind.model_fields[name])


def _setting(name: str, field: FieldInfo) -> Iterable[str]:
    key = next(mark for mark in field.metadata if isinstance(mark, Key))
    flag = f"`--{key.name or name.replace('_', '-')}`" if isinstance(key, Flag) else ""
    return f"`{name}`{' *' if RESUMED in field.metadata else ''}", flag, key.help, key.default or _default(field)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "has to be given"
    value = field.get_default()
    return "none" if value in (None, "", (), {}) else str(value).lower() if isinstance(value, bool) else f"`{value}`"


def _metric(figure: Figure) -> Iterable[str]:
    labels = f"`{figure.label}`: {', '.join((*figure.values, OTHER))}" if figure.label else ""
    return f"`{PREFIX}{figure.name}`", "counter" if figure.name.endswith("_total") else "gauge", labels, figure.help


def _messages(*, notes: bool) -> Iterator[str]:
    modules = [import_module(f"swarm.{room}").__name__ for room in ROOMS]
    known = [kind for kind in Message.__subclasses__() if kind.__module__ in modules and kind.__name__ not in LOCAL]
    kinds = sorted(known, key=lambda kind: modules.index(kind.__module__))
    tags = {kind: kind.__struct_config__.tag for kind in kinds}
    rows = (
        (f"{tags[kind]} {kind.__name__}" if notes else kind.__name__, ", ".join(_fields(kind)), _docstring(kind))
        for kind in kinds
        if (tags[kind] is not None) == notes
    )
    return _table(("note" if notes else "message", "fields in order", "what"), rows)


def _fields(kind: type[Message]) -> Iterator[str]:
    described = spec.type_info(kind)
    assert isinstance(described, spec.StructType)
    for field in described.fields:
        yield f"`{field.name}`{'' if field.required else '?'} {_words(field.type)}"


def _words(kind: spec.Type) -> str:
    match kind:
        case spec.Metadata():
            return _words(kind.type)
        case spec.UnionType():
            return " or ".join(map(_words, kind.types))
        case spec.LiteralType():
            return " or ".join(f'"{value}"' for value in kind.values)
        case spec.VarTupleType():
            return f"[{_words(kind.item_type)}]{_longest(kind.max_length)}"
        case spec.TupleType():
            return f"[{', '.join(map(_words, kind.item_types))}]"
        case spec.StructType():
            return kind.cls.__name__
        case spec.StrType() | spec.BytesType():
            return f"{'text' if isinstance(kind, spec.StrType) else 'bytes'}{_longest(kind.max_length)}"
        case _:
            return type(kind).__name__.removesuffix("Type").lower().replace("none", "nil")


def _longest(limit: int | None) -> str:
    return f" ≤ {limit:,}" if limit else ""


def _tables(kind: type[BaseModel]) -> Iterator[Iterable[str]]:
    """A row for a table of the file, and then those for the tables within it."""
    within = {name: _table_in(field.annotation) for name, field in kind.model_fields.items()}
    if keys := [f"`{name}`{_left_out(kind.model_fields[name])}" for name, table in within.items() if table is None]:
        name, words = re.split("[.:] ", _docstring(kind), maxsplit=1)
        yield f"`{name}`", ", ".join(keys), words[0].upper() + words[1:]
    for table in filter(None, within.values()):
        yield from _tables(table)


def _left_out(field: FieldInfo) -> str:
    return "" if field.is_required() else f" ({_default(field).strip('`')})"


def _table_in(kind: object) -> type[BaseModel] | None:
    return next((one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel)), None)


PARTS: dict[str, Callable[[], Iterable[str]]] = {
    "lead": lambda: _table(SETTING, _sections(LeadConfig)),
    "join": lambda: _table(SETTING, _sections(JoinConfig)),
    "every": lambda: _table(METRIC, map(_metric, EVERY)),
    "learner": lambda: _table(METRIC, map(_metric, LEARNER)),
    "joined": lambda: _table(METRIC, map(_metric, JOINED)),
    "protocol": lambda: [f"This is protocol {PROTOCOL}.\n"],
    "messages": lambda: _messages(notes=False),
    "notes": lambda: _messages(notes=True),
    "scenario": lambda: _table(SCENARIO, _tables(Scenario)),
}

if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(page(document.read_text()))
