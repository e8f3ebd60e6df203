"""What the page reads of a run's files."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from swarm.dashboard import source
from swarm.dashboard.source import older_events
from swarm.run.log import EVENTS


def test_older_events_of_a_long_file_take_no_more_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, count, read = tmp_path / EVENTS, 20_000, [0]
    path.write_text("".join(json.dumps({"kind": "checkpoint", "step": step}) + "\n" for step in range(count)))

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            found = super().readinto(buffer)
            read[0] += found or 0
            return found

        def readall(self) -> bytes:
            found = super().readall()
            read[0] += len(found)
            return found

    monkeypatch.setattr(Path, "open", lambda self, mode: io.BufferedReader(Counted(self, mode)))
    before, steps = path.stat().st_size, list[int]()
    for _ in range(3):
        found = older_events(tmp_path, before, 50)
        before, steps = found["next"], [event["step"] for event in found["events"]] + steps
    assert steps == list(range(count - 150, count))
    assert read[0] <= 3 * (source.OLDER_BYTES + io.DEFAULT_BUFFER_SIZE)


def test_all_events_are_found_but_those_that_are_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "OLDER_BYTES", 200)
    lines = [json.dumps({"step": step, "text": "x" * (500 if step == 7 else step % 5 * 10)}) for step in range(40)]
    (tmp_path / EVENTS).write_text("\n".join(lines) + "\n")
    before: int | None = 1 << 53
    steps: list[int] = []
    while before is not None:
        found = older_events(tmp_path, before, 3)
        assert found["next"] is None or found["next"] < before
        before, steps = found["next"], [event["step"] for event in found["events"]] + steps
    assert steps == [step for step in range(40) if step != 7]
    assert older_events(tmp_path / "nothing", 1 << 53, 3) == {"events": [], "next": None}
