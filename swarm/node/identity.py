"""A node's key and state directory on disk."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from swarm.errors import UserError
from swarm.net.signing import SigningKey
from swarm.net.tls import write_privately

MAX_DEFAULT_STATES = 64  # Nodes of one role, user and machine that get a state directory without naming one
MAX_GENERATION = 65_535  # Starts of one identity: daily ones last 179 years, and a record stays short


def load_or_create_key(directory: Path) -> SigningKey:
    """The Ed25519 key in `directory`, made at the first start, readable by its owner alone."""
    path = directory / "node.key"
    if path.exists():
        secret = path.read_bytes()
        if len(secret) != 32:
            raise UserError(f"{path} is not a node key; remove it to get a new identity")
        return SigningKey.from_bytes(secret)
    if (directory / "generation").exists():
        raise UserError(
            f"{path} is gone, by which others know this node: put it back, or remove {directory / 'generation'} to "
            "have a new identity (a learner's samplers then need its new join line)"
        )
    key = SigningKey.generate()
    write_privately(path, key.secret_bytes())
    return key


def next_generation(directory: Path) -> int:
    """How often the identity in `directory` has been started, this time included: 1, 2, 3 and so on."""
    return raise_generation(directory, _generation(directory) + 1)


def raise_generation(directory: Path, least: int) -> int:
    """Raise the generation to `least` if it is lower: others may remember one that our disk lost. Returns it."""
    generation = max(_generation(directory), least)
    if generation > MAX_GENERATION:
        raise UserError(f"{directory} was started {MAX_GENERATION} times: remove node.key and generation in it")
    write_privately(directory / "generation", f"{generation}\n".encode())
    return generation


def _generation(directory: Path) -> int:
    path = directory / "generation"
    if not path.exists():
        return 0
    text = path.read_bytes().strip()
    if not text.isdigit() or len(text) > len(str(MAX_GENERATION)):
        raise UserError(f"{path} is not a number of starts; remove it together with node.key to get a new identity")
    return int(text)


class StateDirectory:
    """A node's directory, locked while the node lives: two nodes must not share a key."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def claim(cls, wanted: Path | None, role: str = "sampler") -> StateDirectory:
        """Lock `wanted`, or without it the first free directory of this user for that role."""
        if wanted is not None:
            if (lock := _try_lock(wanted)) is None:
                raise UserError(f"another node uses {wanted}: stop it or pass another --state-dir")
            return cls(wanted, lock)
        root = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "echo-node"
        for number in range(MAX_DEFAULT_STATES):
            path = root / f"{role}-{number}"
            if (lock := _try_lock(path)) is not None:
                return cls(path, lock)
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
