"""A run as its parts see it, without anything that leads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from swarm.run.log import RunLog, Spent
from swarm.run.run import Run
from swarm.settings import LeadConfig
from swarm.types import NodeId


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file with one a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Log:
    """A run's log that keeps what it is told, as far as it looks at it."""

    def __init__(self, *, spent: Spent | None = None, absent: Sequence[NodeId] = ()) -> None:
        self.spent, self.absent = spent or Spent(), tuple(absent)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.figures: list[Mapping[str, Any]] = []

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def metrics(self, line: Mapping[str, Any]) -> None:
        self.figures.append(line)


def run_in(
    directory: Path,
    *,
    config: LeadConfig | None = None,
    log: Log | RunLog | None = None,
    journal: Any = None,
    note: Callable[..., None] = lambda *_: None,
    say: Callable[[str], None] = lambda line: None,
) -> Run:
    """`note` hears what the timeline is told."""
    timeline: Any = SimpleNamespace(note=note)
    return Run(
        config=config or LeadConfig(),
        directory=directory,
        log=cast(RunLog, log or Log()),
        journal=journal,
        timeline=timeline,
        say=say,
    )
