"""The engine worker with a real child process: what it measures, and an engine that hangs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from swarm.errors import ChildFailed
from swarm.sampler.engine import EngineOptions
from swarm.sampler.feeding import games_of
from swarm.sampler.worker import EngineWorker
from tests.builders import MIXED_LAYOUT, lease, v
from tests.integration.hanging_engine import VARIABLE
from tests.publishers import Publisher
from tests.scripted_engine import ENGINE

HANG_S = 4.0
"""Longer than an engine without a model takes to load on a busy machine."""


@pytest.fixture
def module() -> str:
    return ENGINE


@pytest.fixture
async def engine(module: str, tmp_path: Path) -> AsyncIterator[EngineWorker]:
    options = EngineOptions(hang_s=HANG_S)
    engine = EngineWorker(tmp_path / "sampler", kind="transformers", options=options, module=module)
    yield engine
    await engine.stop()


async def work(engine: EngineWorker, directory: Path) -> None:
    """All that a session asks of an engine."""
    publisher = Publisher(directory / "learner")
    held = publisher.publish(0)
    await engine.launch()
    await engine.load(MIXED_LAYOUT)
    await engine.install(held.head.version, held.table.tensor_sums, publisher.directory / "versions" / "weights.bin")
    assert len(await engine.draw(games_of([lease(indices=range(8))]))) == 8


@pytest.mark.parametrize("module", ["tests.integration.hanging_engine"])
@pytest.mark.parametrize(
    "call", [*(pytest.param(call, marks=pytest.mark.long) for call in ("start", "install")), "generate"]
)
async def test_an_engine_that_hangs_is_killed_whatever_it_does(
    engine: EngineWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setenv(VARIABLE, call)
    with pytest.raises(ChildFailed, match=r"the engine made no progress for 4 s and was killed"):
        await work(engine, tmp_path)
    assert engine._child.pid is not None
    assert not psutil.pid_exists(engine._child.pid)
    assert engine.installed == (v(0) if call == "generate" else None)


async def test_rates_are_known_after_the_first_batch(engine: EngineWorker, tmp_path: Path) -> None:
    assert (engine.rates.rollouts_per_s, engine.rates.tokens_per_s) == (0.0, 0.0)
    await work(engine, tmp_path)
    # Eight samples of one to six tokens: the longest has at least one, and fewer than there are samples.
    assert 0.0 < engine.rates.tokens_per_s < engine.rates.rollouts_per_s
    assert engine.status()["tokens_per_s"] > 0
