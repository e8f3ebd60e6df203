"""Answers on disk until their verdicts are here: whole or not at all, bounded, and never a reason to stop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm.broadcast.store import disk
from swarm.rollout.messages import Answer
from swarm.sampler.spool import MAX_AGE_S, Spool
from tests.builders import ints, rollout


def batch(number: int, *, samples: int = 2, tokens: int = 4) -> list[Answer]:
    drawn = (rollout(group_id=f"t{number}", index=index, tokens=(3,) * tokens) for index in range(samples))
    return [Answer(one, attempt=1, turn=number) for one in drawn]


def silent(line: str) -> None:
    raise AssertionError(f"nothing was to be said: {line}")


def spool_in(directory: Path, said: Callable[[str], None] = silent) -> Spool:
    return Spool(directory, "swarm", said)


def kept_in(spool: Spool) -> list[list[Answer]]:
    return [spool.read(path) for path in spool.files()]


def test_what_is_kept_is_there_for_the_next_life_in_its_order(tmp_path: Path) -> None:
    first = spool_in(tmp_path)
    kept = [first.keep(batch(number)) for number in range(3)]
    assert kept[1] is not None
    first.remove(kept[1])
    second = spool_in(tmp_path)
    assert kept_in(second) == [batch(0), batch(2)]
    second.keep(batch(3))
    assert kept_in(second)[-1] == batch(3)


def other_token(content: bytes) -> bytes:
    before, three, after = content.partition(ints(3))
    assert three
    return before + ints(4) + after


@pytest.mark.parametrize("damage", [lambda old: old[:-1], other_token, lambda old: b""])
def test_a_damaged_file_is_left_out_and_removed(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    said: list[str] = []
    spool = spool_in(tmp_path, said.append)
    path = spool.keep(batch(0))
    assert path is not None
    spool.keep(batch(1))
    path.write_bytes(damage(path.read_bytes()))
    assert kept_in(spool) == [[], batch(1)]
    assert len(said) == 1
    assert kept_in(spool_in(tmp_path)) == [batch(1)]


def test_what_is_of_another_swarm_too_old_or_half_written_is_removed(tmp_path: Path) -> None:
    Spool(tmp_path, "other", silent).keep(batch(0))
    (tmp_path / "swarm").mkdir()
    (tmp_path / "swarm" / "000000000009.batch.partial").write_bytes(b"half")
    spool = spool_in(tmp_path)
    old = spool.keep(batch(1))
    assert old is not None
    spool.keep(batch(2))
    long_ago = time.time() - MAX_AGE_S - 60
    os.utime(old, (long_ago, long_ago))
    assert kept_in(spool_in(tmp_path)) == [batch(2)]
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_a_full_disk_is_said_once_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    spool = spool_in(tmp_path, said.append)
    with monkeypatch.context() as full:
        full.setattr(disk, "SPARE_BYTES", 1 << 62)
        assert [spool.keep(batch(number)) for number in range(3)] == [None] * 3
    assert len(said) == 1
    assert "free" in said[0]
    assert spool.keep(batch(3)) is not None
    assert kept_in(spool) == [batch(3)]


def test_a_directory_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "spool").write_bytes(b"a file where the directory should be")
    said: list[str] = []
    assert spool_in(tmp_path / "spool", said.append).keep(batch(0)) is None
    assert len(said) == 1


def test_what_nobody_wants_any_more_is_gone(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    spool.keep(batch(0))
    spool.clear()
    assert spool.files() == []
    assert spool.keep(batch(1)) is not None
