"""The engine worker with a real child process: what it measures, and an engine that hangs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from swarm.errors import ChildFailed
from swarm.rollout.client import SealedLease
from swarm.sampler import worker
from swarm.sampler.engine import Generated, Sampled
from swarm.sampler.worker import EngineWorker
from tests.builders import MIXED_LAYOUT, lease, v
from tests.integration.hanging_engine import VARIABLE
from tests.publishers import Publisher


@pytest.fixture
def module() -> str:
    return worker.ENGINE_MODULES["scripted"]


@pytest.fixture
async def engine(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineWorker]:
    monkeypatch.setitem(worker.ENGINE_MODULES, "scripted", module)
    engine = EngineWorker(tmp_path / "sampler", kind="scripted", device="cpu", hang_s=0.5)
    yield engine
    await engine.stop()


async def work(engine: EngineWorker, directory: Path) -> None:
    """All that a session asks of an engine."""
    publisher = Publisher(directory / "learner")
    held = publisher.publish(0)
    await engine.launch()
    await engine.load(MIXED_LAYOUT)
    await engine.install(held.head, held.table, publisher.directory / "versions" / "weights.bin")
    sealed = SealedLease(lease=lease(indices=range(8)), token=b"token", deadline=time.monotonic() + 60.0)
    (answer,) = await engine.generate([sealed])
    assert len(answer.rollouts) == 8


@pytest.mark.parametrize("module", ["tests.integration.hanging_engine"])
@pytest.mark.parametrize("call", ["start", "install", "generate"])
async def test_an_engine_that_hangs_is_killed_whatever_it_does(
    engine: EngineWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setenv(VARIABLE, call)
    with pytest.raises(ChildFailed, match=r"the engine made no progress for 0.5 s and was killed"):
        await work(engine, tmp_path)
    assert engine._child.pid is not None
    assert not psutil.pid_exists(engine._child.pid)
    assert engine.installed == (v(0) if call == "generate" else None)


async def test_rates_are_known_after_the_first_batch(engine: EngineWorker, tmp_path: Path) -> None:
    assert (engine.rollouts_per_s, engine.tokens_per_s) == (0.0, 0.0)
    await work(engine, tmp_path)
    # Eight samples of one to six tokens: the longest has at least one, and fewer than there are samples.
    assert 0.0 < engine.tokens_per_s < engine.rollouts_per_s
    assert engine.status()["tokens_per_s"] > 0


def test_the_rate_at_full_load_is_that_of_a_full_batch_and_of_what_lies_between(tmp_path: Path) -> None:
    """Two samples in a second, of ten that would have taken as long, after a quarter of a second for an install."""
    engine = EngineWorker(tmp_path, kind="scripted", device="cpu", hang_s=1.0, batch_samples=10)
    sampled = Sampled(token_ids=b"", logprobs=b"", spans=(), finish="failed")
    engine._measure(Generated(samples=(sampled,) * 2, seconds=1.0, steps=5), 0.25)
    assert (engine.rollouts_per_s, engine.full_rollouts_per_s) == (2.0, 8.0)


def test_a_batch_with_free_places_is_not_taken_for_a_fast_engine(tmp_path: Path) -> None:
    engine = EngineWorker(tmp_path, kind="scripted", device="cpu", hang_s=1.0, batch_samples=2)

    def sampled(tokens: int) -> Sampled:
        return Sampled(token_ids=b"\0" * 4 * tokens, logprobs=b"", spans=(), finish="stop")

    # Of lengths 1 and 3 the longest of two is 2.5 in the mean, that of one is 2: a full batch takes 1.25 times as long.
    engine._measure(Generated(samples=(sampled(1), sampled(3)), seconds=1.0, steps=3), 0.0)
    engine._measure(Generated(samples=(sampled(1),), seconds=0.8, steps=1), 0.0)
    assert engine.full_rollouts_per_s == pytest.approx(2.0, rel=0.05)
