"""Blocks behind a file that is mapped into memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swarm.broadcast.store.disk import BLOCK_BYTES, DiskFull, allocate, file_bytes, set_most_bytes

NBYTES = 3 * 1024 * 1024 + 5


@pytest.mark.parametrize("system", ["linux", "macos"])
def test_a_file_has_its_size_and_blocks_behind_it(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if system == "macos":
        monkeypatch.delattr(os, "posix_fallocate")
    path = tmp_path / "weights.bin"
    path.write_bytes(b"kept")
    with path.open("r+b") as file:
        allocate(file.fileno(), NBYTES, path)
    state = path.stat()
    assert state.st_size == NBYTES
    assert state.st_blocks * BLOCK_BYTES >= NBYTES
    with path.open("r+b") as file:
        assert file.read(6) == b"kept\0\0"
        allocate(file.fileno(), 2, path)
    assert path.read_bytes() == b"ke"


def test_an_owner_says_how_much_the_files_of_a_directory_may_take(tmp_path: Path) -> None:
    """The blocks of all files in it and below, those of one that grows but once; what is there stays when less is
    allowed."""
    inside, outside = tmp_path / "swarms" / "one", tmp_path / "spool"
    for directory in (inside, outside):
        directory.mkdir(parents=True)

    def make(directory: Path, name: str, nbytes: int) -> None:
        with (directory / name).open("a+b") as file:
            allocate(file.fileno(), nbytes, directory / name)

    set_most_bytes(inside.parent, 3_000_000)
    try:
        make(inside, "first", 1_000_000)
        make(inside, "second", 1_000_000)
        make(inside, "second", 1_900_000)
        make(outside, "other", 4_000_000)
        with pytest.raises(
            DiskFull,
            match=r"take 0\.00[34]\d* GB of the disk .*third, and max-disk allows 0\.003: allow more, or leave",
        ):
            make(inside, "third", 1_000_000)
        set_most_bytes(inside.parent, 1_000_000)
        assert (inside / "second").stat().st_size == 1_900_000
        with pytest.raises(DiskFull):
            make(inside, "fourth", 1_000)
    finally:
        set_most_bytes(inside.parent, None)
    make(inside, "fourth", 1_000_000)


def test_what_is_removed_while_the_disk_is_counted_takes_nothing(tmp_path: Path) -> None:
    (tmp_path / "here").write_bytes(bytes(5000))
    (tmp_path / "link").symlink_to("here")
    assert file_bytes(tmp_path / "here") >= 5000
    assert [file_bytes(tmp_path / name) for name in ("gone", "link", ".")] == [0, 0, 0]
