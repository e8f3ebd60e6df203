"""What every part of a learner needs of the run that it leads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swarm.rollout.journal.journal import Journal
from swarm.run.log import RunLog
from swarm.run.timeline import Timeline
from swarm.settings import LeadConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One life of a run. `say` gets lines for the person at the terminal."""

    config: LeadConfig
    directory: Path
    log: RunLog
    journal: Journal
    timeline: Timeline
    say: Callable[[str], None]
