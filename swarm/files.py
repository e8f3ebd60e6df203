"""Replacing a small file, and waiting for the disk."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes, *, mode: int = 0o666, durable: bool = False) -> None:
    """Replace a file: a reader finds all of the old one or all of `content`, after a crash too. After a power cut that
    is sure only if `durable`, which waits for the disk. Raise OSError, with the old file as it was."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def sync_path(path: Path) -> None:
    """Make a file's content, or a directory's names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
