"""Blocks behind a file that is mapped into memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swarm.broadcast.store.disk import BLOCK_BYTES, allocate

NBYTES = 3 * 1024 * 1024 + 5


@pytest.mark.parametrize("system", ["linux", "macos"])
def test_a_file_has_its_size_and_blocks_behind_all_of_it(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
