"""Ends of vLLM's processes: whoever is killed, every call ends and nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from swarm.errors import ChildFailed
from swarm.process import Child
from swarm.sampler.engine import Generate, Generated, Installed, NotInstalled, Started
from swarm.sampler.vllm.engine import VllmEngine
from swarm.sampler.vllm.swap import UNPROVEN
from swarm.sampler.vllm.versions import engine_dead_error
from tests.builders import v
from tests.conformance import job
from tests.unit.models import Staged
from tests.vllm.support import Signal, end, installed, staged_pair, started

ENDS_S = 50.0
"""Less than any limit of a swap: deaths are noticed, not waited for. It takes seconds on a quiet machine."""

LONG = job(0, limit=1000, stops=())


async def child_of(staged: Staged, directory: Path, *, hang_s: float = 120.0) -> Child:
    """An engine child that holds version 0, of the kind that a sampler's node starts."""
    child = Child("engine", "swarm.sampler.engine_child", "vllm", log=directory / "engine.log", hang_s=hang_s)
    await child.start()
    await child.call(staged.start(places=8), Started)
    done: object = await child.call(staged.install(0), Installed | NotInstalled)
    assert isinstance(done, Installed), done
    return child


def below(pid: int | None) -> list[psutil.Process]:
    """vLLM's processes under an engine's."""
    found = psutil.Process(pid).children(recursive=True)
    return [process for process in found if "resource_tracker" not in " ".join(process.cmdline())]


async def ended(processes: list[psutil.Process]) -> None:
    assert processes
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, ENDS_S)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.long
async def test_a_core_that_is_killed_in_a_generation_ends_the_call_and_no_engine_process_outlives_its_node_s(
    tmp_path: Path,
) -> None:
    child = await child_of(staged_pair(tmp_path)[0], tmp_path)
    cores = below(child.pid)
    generating = asyncio.create_task(child.call(Generate((LONG,) * 8), Generated))
    await asyncio.sleep(0)
    for core in cores:
        core.kill()
    with pytest.raises(ChildFailed):
        await asyncio.wait_for(generating, ENDS_S)
    await child.kill()
    await ended(cores)


@pytest.mark.long
async def test_an_engine_that_is_killed_in_a_swap_beneath_samples_ends_all_calls_and_vllm_s_processes(
    tmp_path: Path,
) -> None:
    """Killed alone, not its group: as when it ends itself because its node is gone."""
    pair = staged_pair(tmp_path)
    child = await child_of(pair[0], tmp_path)
    cores = below(child.pid)
    assert child.pid is not None
    generating = asyncio.create_task(child.call(Generate((LONG,) * 8), Generated))
    swapping = asyncio.create_task(child.call(pair[1].install(1), Installed | NotInstalled))
    link = pair[1].staging.with_name(f"{pair[1].staging.name}.{v(1)}")
    async with asyncio.timeout(ENDS_S):
        # It is there from the check of the file to the end of the proof.
        while not link.exists():  # noqa: ASYNC110 - a file system tells nobody
            await asyncio.sleep(0)
    os.kill(child.pid, signal.SIGKILL)
    for call in (generating, swapping):
        with pytest.raises(ChildFailed):
            await asyncio.wait_for(call, ENDS_S)
    await ended(cores)
    await child.kill()


@pytest.mark.long
async def test_an_engine_that_hangs_while_it_is_busy_is_killed_with_all_below_it(tmp_path: Path) -> None:
    child = await child_of(staged_pair(tmp_path)[0], tmp_path, hang_s=30.0)
    cores = below(child.pid)
    generating = asyncio.create_task(child.call(Generate((LONG,) * 8), Generated))
    await asyncio.sleep(0)
    for core in cores:
        core.suspend()
    with pytest.raises(ChildFailed, match="made no progress for 30 s"):
        await asyncio.wait_for(generating, ENDS_S)
    await ended(cores)


@pytest.mark.long
async def test_a_worker_that_dies_in_the_middle_of_a_swap_ends_the_swap_and_the_samples_beneath_it(
    tmp_path: Path,
) -> None:
    pair = staged_pair(tmp_path)
    engine = VllmEngine("tests.vllm.extensions.Dying")
    try:
        await started(engine, pair[0])
        await installed(engine, pair[0], 0)
        drawing = Signal()
        sample = asyncio.create_task(engine.generate(Generate((LONG,)), drawing))
        await drawing.told()
        with pytest.raises(engine_dead_error()):
            await asyncio.wait_for(engine.install(pair[1].install(1), lambda: None), ENDS_S)
        with pytest.raises(engine_dead_error()):
            await asyncio.wait_for(sample, ENDS_S)
        (after,) = (await asyncio.wait_for(engine.generate(Generate((LONG,)), lambda: None), ENDS_S)).samples
        assert after.fault.startswith(UNPROVEN)
    finally:
        end(engine)
