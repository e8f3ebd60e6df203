"""The engine worker with a real child process that hangs. One that hangs while it draws: test_session.py."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from swarm.errors import ChildFailed
from swarm.sampler.engine import EngineOptions
from swarm.sampler.worker import EngineWorker
from tests.builders import MIXED_LAYOUT
from tests.integration.hanging_engine import VARIABLE
from tests.publishers import Publisher

HANG_S = 4.0
"""Longer than an engine without a model takes to load on a busy machine."""


@pytest.mark.parametrize("call", [pytest.param("start", marks=pytest.mark.long), "install"])
async def test_an_engine_that_hangs_is_killed_whatever_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setenv(VARIABLE, call)
    publisher = Publisher(tmp_path / "learner")
    held = publisher.publish(0)
    weights = publisher.directory / "versions" / "weights.bin"
    options = EngineOptions(hang_s=HANG_S)
    engine = EngineWorker(
        tmp_path / "sampler", kind="transformers", options=options, module="tests.integration.hanging_engine"
    )

    async def work() -> None:
        await engine.launch()
        await engine.load(MIXED_LAYOUT)
        await engine.install(held.head.version, held.table.tensor_sums, weights)

    with pytest.raises(ChildFailed, match=r"the engine made no progress for 4 s and was killed"):
        await work()
    assert engine._child.pid is not None
    assert not psutil.pid_exists(engine._child.pid)
    assert engine.installed is None
    await engine.stop()
