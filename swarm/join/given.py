"""What a node has given, kept for its owner alone: by swarm, over all its lives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from swarm.files import write_atomically

FILE = "given.json"
KEEP_S = 60.0  # Between two writes: what is lost with a node that is killed

Gifts = dict[str, tuple[str, dict[str, float]]]
"""By swarm what it is for, and how many `rollouts` and `tokens` its learner accepted, `passed_bytes` and `seconds`."""


class Given:
    """The file in a node's state directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._by_swarm = read_given(path)
        self._counted: Counter[str] = Counter()

    def keep(self, swarm: str, what: str, so_far: dict[str, float]) -> None:
        """Count for `swarm` what this process has given on top of what it had at the last call, to whichever swarm.
        Blocking; OSError if the disk is full."""
        more, self._counted = Counter(so_far) - self._counted, Counter(so_far)
        self._by_swarm = together([self._by_swarm, {swarm: (what, dict(more))}])
        write_atomically(self._path, msgspec.json.encode(self._by_swarm))


def read_given(path: Path) -> Gifts:
    """Return what a node gave; nothing if the file is not there or is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Gifts)
    except (OSError, msgspec.DecodeError):
        return {}


def together(nodes: Iterable[Gifts]) -> Gifts:
    """Return what several nodes gave, or one in several lives."""
    found: Gifts = {}
    for node in nodes:
        for swarm, (what, counts) in node.items():
            before = found.get(swarm, (what, {}))[1]
            found[swarm] = what, dict(Counter(before) + Counter(counts))
    return found
