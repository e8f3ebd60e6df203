"""Replacing a small file, and waiting for the disk."""

from __future__ import annotations

import os
from pathlib import Path

HERE = (".", "/", "~")  # A name that begins so is a path on this machine and not one on the hub


def without_directories(name: str) -> str:
    """Return the name of a model, of a task such as jsonl:FILE, or of a reward, without the directories of this
    machine."""
    kind, colon, rest = ("", "", name) if _is_path(name) else name.partition(":")
    return f"{kind}{colon}{Path(rest).name if _is_path(rest) else rest}"


def _is_path(name: str) -> bool:
    # Unlike Path.exists it bears names that no file can have.
    return name.startswith(HERE) or os.path.exists(name)


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
