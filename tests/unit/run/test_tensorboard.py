"""TensorBoard's files, read back with its own reader: the numbers of metrics.jsonl, each step once, over lives too."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from swarm.errors import UserError
from swarm.lead.learner import LearnerNode
from swarm.run import log as eventfiles
from swarm.run.log import RunLog
from swarm.settings import LeadConfig
from tests.unit.runs import json_lines

Curve = list[tuple[int, float]]


def read_back(run_dir: Path) -> dict[str, Curve]:
    found = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {name: [(one.step, one.value) for one in found.Scalars(name)] for name in found.Tags()["scalars"]}


def figures(step: int) -> dict[str, Any]:
    other = {"time": 1e9 + step, "kl": None, "eval_reward": 9}
    return {"step": step, "reward": step / 64, "rewards/exact/mean": step % 2, **other}


def log_life(run_dir: Path, steps: Iterable[int], evaluated: Iterable[int] = (), *, tensorboard: bool = True) -> None:
    with closing(RunLog(run_dir, tensorboard=tensorboard)) as log:
        for step in steps:
            log.metrics(figures(step))
        for version in evaluated:
            log.event("evaluated", version=version, exact_match=version / 8, prompts=8, **{"pass@4": 0.5})
        log.event("checkpoint", step=3)


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_resumed_run_has_every_figure_once_from_its_start_on(tmp_path: Path, from_the_start: bool) -> None:
    log_life(tmp_path, range(1, 8), evaluated=[0, 5], tensorboard=from_the_start)
    if from_the_start:
        (path,) = (tmp_path / "tensorboard").iterdir()
        path.write_bytes(path.read_bytes()[:-100])  # As a crash may leave it
    log_life(tmp_path, range(6, 12), evaluated=[10])
    found = read_back(tmp_path)
    assert set(found) == {"train/reward", "train/rewards/exact/mean", "eval/exact_match", "eval/pass@4"}
    for name in ("reward", "rewards/exact/mean"):
        assert found[f"train/{name}"] == [(line["step"], line[name]) for line in json_lines(tmp_path / "metrics.jsonl")]
    assert [step for step, _ in found["train/reward"]] == list(range(1, 12))
    assert found["eval/exact_match"] == [(0, 0.0), (5, 0.625), (10, 1.25)]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def stuck(monkeypatch: pytest.MonkeyPatch, write: Callable[[], None]) -> None:
    """Have every record wait for, or fail with, `write`."""
    written = RecordWriter.write

    def through(self: RecordWriter, data: bytes) -> None:
        write()
        written(self, data)

    monkeypatch.setattr(RecordWriter, "write", through)


def test_nobody_waits_for_a_disk_that_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, go_on = RunLog(tmp_path, tensorboard=True), threading.Event()
    stuck(monkeypatch, lambda: assert_true(go_on.wait(60)))
    for step in range(1, 11):
        log.metrics(figures(step))
    go_on.set()
    log.close()
    assert [step for step, _ in read_back(tmp_path)["train/reward"]] == list(range(1, 11))


def assert_true(value: bool) -> None:
    assert value


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_disk_that_fails_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_the_start: bool) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    if from_the_start:
        stuck(monkeypatch, fail)
    with closing(RunLog(tmp_path, tensorboard=True)) as log:
        if (board := log._board) is not None:
            stuck(monkeypatch, fail)
            log.metrics(figures(1))  # May find the failure already
            board._writer._async_writer._worker.join()
        log.event("checkpoint", step=1)
        log.metrics(figures(2))
    events = json_lines(tmp_path / "events.jsonl")
    (failed,) = [event for event in events if event["kind"] == "tensorboard_failed"]
    assert "No space left" in failed["reason"]
    assert len(events) == 2
    assert json_lines(tmp_path / "metrics.jsonl")[-1]["step"] == 2


async def test_without_the_package_a_run_ends_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eventfiles, "find_spec", lambda name: None)
    node = LearnerNode(
        LeadConfig(run_dir=tmp_path / "run", host="127.0.0.1", port=0, tensorboard=True), lambda line: None
    )
    with pytest.raises(UserError, match=r"pip install '\.\[tensorboard\]'"):
        await node.run()
    assert not (tmp_path / "run").exists()


def test_writing_needs_no_torch_and_the_command_line_no_tensorboard(tmp_path: Path) -> None:
    program = f"""
import sys, swarm.cli.run, swarm.lead.learner
assert "tensorboard" not in sys.modules
from pathlib import Path
from swarm.run.log import RunLog
log = RunLog(Path({str(tmp_path)!r}), tensorboard=True)
log.metrics({{"step": 1, "reward": 0.5}})
log.close()
print(sorted({{"torch", "tensorflow", "transformers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert read_back(tmp_path) == {"train/reward": [(1, 0.5)]}
