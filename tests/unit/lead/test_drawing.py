"""Samplers of the learner's own machine: how many by default, where, and with which share of the trainer's GPU."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from swarm.broadcast.version.manifest import Layout, TensorSpec
from swarm.lead import drawing
from swarm.lead.drawing import arguments, default_count, other_gpus
from swarm.learner.messages import Prepared
from swarm.run.directory import LOGS

GIB = 1 << 30
LAYOUT = Layout(tensors=(TensorSpec(name="w", dtype="BF16", shape=(1 << 15, 1 << 15)),), files=())  # 2 GiB in bf16


def prepared(device: str, left_bytes: int = 0, whole_bytes: int = 0) -> Prepared:
    return Prepared(
        layout=LAYOUT,
        parameters=1 << 30,
        trained=1 << 30,
        vocab_size=1 << 15,
        context_tokens=4096,
        stop_token_ids=(),
        device=device,
        left_bytes=left_bytes,
        whole_bytes=whole_bytes,
    )


@pytest.mark.parametrize(
    ("device", "left_bytes", "count"),
    [("cpu", 20 * GIB, 1), ("cpu", 4 * GIB, 0), ("cuda:0", 6 * GIB, 1), ("cuda:0", 2 * GIB, 0), ("cpu", 0, 0)],
)
def test_one_draws_by_default_where_the_weights_and_a_few_samples_fit_into_what_a_step_leaves(
    device: str, left_bytes: int, count: int
) -> None:
    found, why = default_count(prepared(device, left_bytes), 512)
    assert found == count
    assert bool(why) is (count == 0)
    if why:
        assert why.startswith("this machine draws no samples, only others do (--samplers 1 tries): too little memory:")
        assert "\n" not in why


@pytest.mark.parametrize(
    ("device", "ranks", "gpus", "others"),
    [
        ("cpu", 1, ["0", "1"], []),
        ("cuda", 1, ["0"], []),
        ("cuda", 1, ["0", "1", "2"], ["1", "2"]),
        ("cuda:1", 1, ["4", "5", "6"], ["4", "6"]),
        ("cuda:0", 2, ["0", "1", "2"], ["2"]),
        ("cuda:0", 4, ["0", "1", "2", "3"], []),
    ],
)
def test_samplers_take_the_gpus_that_the_trainer_leaves_alone(
    device: str, ranks: int, gpus: list[str], others: list[str]
) -> None:
    assert other_gpus(device, ranks, gpus) == others


def test_on_the_trainers_gpu_it_is_given_what_a_step_leaves() -> None:
    shared = prepared("cuda:0", 8 * GIB, 32 * GIB)
    assert arguments(shared, "echo1:x", sharing=1)[-2:] == ["--gpu-memory-share", "0.25"]
    assert arguments(shared, "echo1:x", sharing=2)[-1] == "0.12"
    for trainer, sharing in ((shared, 0), (prepared("cpu", 8 * GIB), 1)):
        assert "--gpu-memory-share" not in arguments(trainer, "echo1:x", sharing=sharing)


@pytest.mark.parametrize(
    ("statuses", "again"), [([0], []), ([2], [False]), ([1, 0], [True]), ([1, 1, 1], [True, True, False])]
)
async def test_one_that_died_is_started_again_and_one_that_cannot_work_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statuses: list[int], again: list[bool]
) -> None:
    monkeypatch.setattr(drawing, "AGAIN_S", 0.0)
    (tmp_path / LOGS).mkdir()
    ends, said, is_over = list(statuses), asyncio.Queue[str](), asyncio.Event()

    async def start(log: Path, *words: str, **_: object) -> asyncio.subprocess.Process:
        with log.open("wb") as output:
            program = f"print('why'); raise SystemExit({ends.pop(0)})"
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=output)
        await process.wait()
        if not ends:
            is_over.set()
        return process

    monkeypatch.setattr(drawing, "start_node", start)
    async with drawing.drawing(1, tmp_path, (), (), said.put_nowait):
        await is_over.wait()
        lines = [await said.get() for _ in again]
    assert [line.endswith("starting it again") for line in lines] == again
    assert all("ended: why (log: " in line for line in lines)
    assert said.empty()
