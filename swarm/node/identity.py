"""A node's key and state directory on disk."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from swarm.errors import UserError
from swarm.signing import SigningKey

MAX_DEFAULT_STATES = 64
"""Samplers of one user on one machine that find a state directory of their own."""


def load_or_create_key(directory: Path) -> SigningKey:
    """The Ed25519 key in `directory`, made at the first start, readable by its owner alone."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "node.key"
    if path.exists():
        secret = path.read_bytes()
        if len(secret) != 32:
            raise UserError(f"{path} is not a node key; remove it to get a new identity")
        return SigningKey.from_bytes(secret)
    key = SigningKey.generate()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key.secret_bytes())
    return key


class StateDirectory:
    """A sampler's directory, locked while the node lives: two nodes must not share a key."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def claim(cls, wanted: Path | None) -> StateDirectory:
        """Lock `wanted`, or without one the first free directory of this user."""
        if wanted is not None:
            lock = _try_lock(wanted)
            if lock is None:
                raise UserError(f"another node uses {wanted}: stop it or pass another --state-dir")
            return cls(wanted, lock)
        root = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "echo-node"
        for number in range(MAX_DEFAULT_STATES):
            lock = _try_lock(root / f"sampler-{number}")
            if lock is not None:
                return cls(root / f"sampler-{number}", lock)
        raise UserError(f"{MAX_DEFAULT_STATES} nodes already run from {root}: pass --state-dir")

    def release(self) -> None:
        os.close(self._lock)


def _try_lock(directory: Path) -> int | None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UserError(f"cannot use the state directory {directory}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
