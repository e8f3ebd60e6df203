"""The learner node at its start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarm.broadcast.service import BroadcastService
from swarm.errors import Damaged
from swarm.lead.learner import LearnerNode
from swarm.lead.training import Training
from swarm.rollout.journal.journal import Journal
from swarm.run.log import RunLog
from swarm.settings import LeadConfig


@pytest.mark.parametrize("where", [(Journal, "load"), (Training, "look")], ids=["journal", "checkpoints"])
async def test_a_run_that_is_damaged_is_left_with_nothing_open(
    where: tuple[type, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    def damaged(*_: Any) -> None:
        raise Damaged(tmp_path, "journal", "it was cut off")

    def closes(kind: Any) -> None:
        close = kind.close

        def closing(self: Any) -> Any:
            closed.append(kind.__name__)
            return close(self)

        monkeypatch.setattr(kind, "close", closing)

    monkeypatch.setattr(*where, damaged)
    for kind in (Journal, RunLog, BroadcastService):
        closes(kind)
    node = LearnerNode(LeadConfig(run_dir=tmp_path / "run", host="127.0.0.1", port=0), lambda line: None)
    with pytest.raises(Damaged):
        await node.run()
    of_both = ["Journal", "RunLog"]
    assert closed == (of_both if where[0] is Journal else ["BroadcastService", *of_both])
    assert (tmp_path / "run" / "config.json").is_file()
