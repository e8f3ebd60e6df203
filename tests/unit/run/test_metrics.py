"""A run's figures on disk: whole lines, each step once, whatever cut the last ones off."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest

from swarm.run.log import RunLog, Spent
from tests.unit.runs import json_lines


def test_a_step_that_is_taken_again_is_written_once(tmp_path: Path) -> None:
    with closing(RunLog(tmp_path)) as log:
        for step in (1, 2):
            log.metrics({"step": step, "reward": 0.5, "staleness/max": step})
    with closing(RunLog(tmp_path)) as again:
        assert again.last == {"step": 2, "reward": 0.5, "staleness/max": 2}
        assert again.max_staleness_seen == 2
        for step in (2, 3):
            again.metrics({"step": step, "reward": 0.75})
    written = [(line["step"], line["reward"]) for line in json_lines(tmp_path / "metrics.jsonl")]
    assert written == [(1, 0.5), (2, 0.5), (3, 0.75)]


@pytest.mark.parametrize(
    ("torn", "lines"), [(b'{"step": 2, "ki', 2), (b"\0\0\0\n7\n\xff\n", 5)], ids=["cut off", "damaged"]
)
def test_a_line_that_was_cut_off_is_removed_and_a_damaged_one_passed(tmp_path: Path, torn: bytes, lines: int) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / name).write_bytes(b'{"step": 1, "kind": "a"}\n' + torn)
    with closing(RunLog(tmp_path)) as log:
        log.metrics({"step": 2})
        log.event("prepared")
    assert log.last == {"step": 2}
    for name, last in (("metrics.jsonl", b'{"step": 2}'), ("events.jsonl", b'"prepared"}')):
        written = (tmp_path / name).read_bytes().splitlines()
        assert (len(written), written[-1].endswith(last)) == (lines, True)


def test_a_long_run_is_not_read_into_memory(tmp_path: Path) -> None:
    """100,000 steps of 40 figures would take 700 MB."""
    line = json.dumps({"step": 1, "kind": "x", **{f"figure {number}": number / 7 for number in range(40)}}) + "\n"
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / name).write_text(line * 2000)
    tracemalloc.start()
    with closing(RunLog(tmp_path)) as log:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert log.last["step"] == 1
    assert most < 2000 * len(line) / 4


def test_what_a_former_life_measured_and_who_was_there_is_known(tmp_path: Path) -> None:
    with closing(RunLog(tmp_path)) as log:
        log.event("evaluated", version=4, exact_match=0.5, prompts=8)
        for kind, node in [
            ("sampler_joined", "stays"),
            ("sampler_joined", "leaves"),
            ("sampler_left", "leaves"),
            ("sampler_joined", "falls silent"),
            ("sampler_silent", "falls silent"),
            ("sampler_joined", "stays"),
        ]:
            log.event(kind, node=node)
    with closing(RunLog(tmp_path)) as again:
        assert again.held_out == [{"version": 4, "exact_match": 0.5}]
        assert again.absent == {"stays"}


def test_what_does_not_fit_is_written_when_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with room for some of a line, then for none, then for all."""
    log = RunLog(tmp_path)
    log.metrics({"step": 1})
    write, room = os.write, [5, 0]

    def full(descriptor: int, data: bytes) -> int:
        if left := room.pop(0):
            return write(descriptor, data[:left])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    log.metrics({"step": 2})
    assert [line["step"] for line in json_lines(tmp_path / "metrics.jsonl")] == [1]
    log.metrics({"step": 3})
    monkeypatch.setattr(os, "write", write)
    log.metrics({"step": 4})
    log.close()
    assert [line["step"] for line in json_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_another_fault_of_the_disk_is_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(tmp_path)

    def broken(descriptor: int, data: bytes) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", broken)
    with pytest.raises(OSError, match="Input/output error"):
        log.event("prepared")
    log.close()


def test_what_a_run_has_cost_survives(tmp_path: Path) -> None:
    with closing(RunLog(tmp_path)) as log:
        assert log.spent == Spent()
        log.metrics({"step": 7, "cost_total": 2.5, "rollouts_accepted": 100, "tokens_accepted": 4000})
        log.metrics({"step": 8, "reward": 0.5})
    with closing(RunLog(tmp_path)) as again:
        assert again.spent == Spent(total=2.5, steps=7, rollouts=100, tokens=4000)
        more = again.spent.and_more(total=0.5, steps=1, rollouts=20, tokens=800)
        assert (more.over(more.rollouts), more.over(0)) == (3.0 / 120, None)
        # After its last step: a learner that waited for hours, and was stopped, was paid for.
        again.event("cost_reached", cost_total=9.0, max_cost=9.0, step=7)
        for state, step in (("finished", 7), ("starting", 0)):
            again.event("stopped", state=state, step=step, cost_total=9.5, rollouts_accepted=110, tokens_accepted=4400)
    with closing(RunLog(tmp_path)) as last:
        assert last.spent == Spent(total=9.5, steps=7, rollouts=110, tokens=4400)
