"""Encoding by child processes: the same bytes as by threads, also when children die."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swarm.broadcast import coding, encoding
from swarm.broadcast.coding import IN_HAND, in_order
from swarm.broadcast.encoding import JOB_BYTES, Encoded, Encoders, Region, jobs
from swarm.broadcast.version.manifest import ByteSpan
from tests.builders import MIXED_LAYOUT
from tests.publishers import Publisher


async def published(directory: Path, encoders: Encoders, kill: int = 0) -> list[bytes]:
    """The tables of a full version and three deltas. After the first, `kill` children are killed."""
    publisher = Publisher(directory)
    await encoders.start(MIXED_LAYOUT.total_bytes)
    publisher.submit = encoders.submit
    tables = []
    for number in range(4):
        held = await asyncio.to_thread(publisher.publish, number)
        tables.append(held.table_bytes)
        for child in encoders._children[:kill] if number == 0 else ():
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
    return tables


@pytest.mark.parametrize("killed", [0, 1, 2])
async def test_children_encode_what_threads_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: int) -> None:
    by_hand = Publisher(tmp_path / "threads")
    wanted = [by_hand.publish(number).table_bytes for number in range(4)]
    monkeypatch.setattr(encoding, "WORTH_CHILDREN_BYTES", 0)
    monkeypatch.setattr(encoding, "JOB_BYTES", 1 << 17)
    with ThreadPoolExecutor(2) as pool:
        encoders = Encoders(2, pool, tmp_path)
        try:
            assert await published(tmp_path / "children", encoders, killed) == wanted
            assert len([child for child in encoders._children if child.pid]) == 2
        finally:
            await encoders.stop()


def test_a_place_in_the_spool_is_reused_once_its_job_was_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Publisher(tmp_path / "in large jobs").publish(0).table_bytes
    for module in (encoding, coding):
        monkeypatch.setattr(module, "IN_HAND", 3)
    monkeypatch.setattr(encoding, "JOB_BYTES", 1 << 17)
    publisher = Publisher(tmp_path / "in small jobs")
    assert publisher.publish(0).table_bytes == wanted
    assert not list(publisher.published.store.directory.glob("*.partial"))


async def test_a_small_model_starts_no_children(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        encoders = Encoders(2, pool, tmp_path)
        assert len(await published(tmp_path / "learner", encoders)) == 4
        assert encoders._children == []


def test_jobs_are_whole_regions_in_order_of_a_few_megabytes(tmp_path: Path) -> None:
    sizes = [JOB_BYTES, 10, JOB_BYTES - 10, 1, JOB_BYTES // 2, JOB_BYTES // 2, 7]
    regions = [Region(ByteSpan(start=0, nbytes=size), "BF16", ()) for size in sizes]
    found = list(jobs(tmp_path, None, 100, regions, tmp_path / "spool"))
    assert [[region.span.nbytes for region in job.regions] for job in found] == [
        [JOB_BYTES],
        [10, JOB_BYTES - 10],
        [1, JOB_BYTES // 2],
        [JOB_BYTES // 2, 7],
    ]
    assert [job.at for job in found] == [number * JOB_BYTES for number in range(4)]


def test_results_come_in_order_and_few_wait() -> None:
    begun, most = 0, 0
    with ThreadPoolExecutor(4) as pool:

        def submit(number: int) -> object:
            nonlocal begun
            begun += 1
            return pool.submit(lambda: number)

        for taken, result in enumerate(in_order(submit, range(200))):  # type: ignore[arg-type, var-annotated]
            most = max(most, begun - taken)
            assert result == taken
    assert most <= IN_HAND


def test_a_fault_is_raised_when_all_that_was_begun_has_ended() -> None:
    ended: list[int] = []

    def work(number: int) -> Encoded:
        if number == 3:
            raise OSError("no room")
        ended.append(number)
        return Encoded(regions=())

    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(OSError, match="no room"):
            list(in_order(lambda number: pool.submit(work, number), range(10)))
        assert sorted(ended) == [0, 1, 2, *range(4, 10)]
