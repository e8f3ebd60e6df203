"""Replacing a small file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from swarm.files import write_atomically


def test_a_file_is_replaced_as_a_whole_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "key"
    (tmp_path / "key.partial").write_bytes(b"left by a crash, and readable by all")
    write_atomically(path, b"one", mode=0o600, durable=True)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"one", 0o600)
    write_atomically(path, b"two", mode=0o600)
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("durable", [False, True])
def test_a_disk_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "key"
    write_atomically(path, b"one")
    monkeypatch.setattr(os, "fsync" if durable else "open", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"two", durable=durable)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"one"
