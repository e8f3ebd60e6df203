"""Writes docs/settings.md from the settings: python -m tests.settings_page > docs/settings.md"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from swarm.settings import RESUMED, Flag, JoinConfig, Key, LeadConfig, headings, sections

HEAD = """# Settings
This page is written by tests/settings_page.py from swarm/settings.py.

`lead` and `join` read a TOML file (`--config lead.toml`) with a table for each section below. Settings with a flag can
be given on the command line too, with hyphens (`--max-staleness 4`), and win over the file. A bad value is refused
before anything starts, and the message names the file, the key and the line. `lead --check` does what `lead` does
before it listens: it reads the data, loads the model, measures the memory and starts the rewards, then ends and keeps
nothing. `echo-node --install-completion` makes the shell complete
names and values.

Exit statuses: 0 success (`demo`: it learned, or with `--reward random` it did not; `verify`: no breach), 1 target not
reached, stopped by an alarm, failed, or a breach found, 2 bad input, 130 stopped by a signal.
"""
KINDS = (
    ("lead", LeadConfig, "Those marked * may change when a run is resumed; the others are fixed for a run."),
    ("join", JoinConfig, "What is in `[limits]` may change while the node runs (`echo-node limits`)."),
)


def page() -> str:
    return HEAD + "".join(line for kind in KINDS for line in _of(*kind))


def _of(command: str, kind: type[BaseModel], words: str) -> Iterator[str]:
    yield f"\n## {command}\n{words}\n"
    for table, heading in headings(kind).items():
        yield f"\n### `[{table}]`{heading.partition(']')[2]}\n"
        yield "| setting | flag | meaning | default |\n|---|---|---|---|\n"
        for name, place in sections(kind).items():
            if place == table:
                yield _row(name, kind.model_fields[name])


def _row(name: str, field: FieldInfo) -> str:
    key = next(mark for mark in field.metadata if isinstance(mark, Key))
    flag = f"`--{name.replace('_', '-')}`" if isinstance(key, Flag) else ""
    mark = " *" if RESUMED in field.metadata else ""
    return f"| `{name}`{mark} | {flag} | {key.help} | {key.default or _in_words(field)} |\n".replace("|  |", "| |")


def _in_words(field: FieldInfo) -> str:
    if field.is_required():
        return "has to be given"
    value = field.get_default()
    return "none" if value in (None, "", (), {}) else str(value).lower() if isinstance(value, bool) else f"`{value}`"


if __name__ == "__main__":
    print(page(), end="")
