"""What a node has given, kept for its owner alone: by swarm, over all its lives."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from swarm.files import write_atomically

FILE = "given.json"
KEEP_S = 60.0  # Between two writes: what is lost with a node that is killed


class Gift(msgspec.Struct, frozen=True):
    """Given to one swarm, which is for `what`. Rollouts and their tokens are those that the learner accepted."""

    what: str = ""
    rollouts: int = 0
    tokens: int = 0
    passed_bytes: int = 0
    seconds: float = 0.0

    def and_more(self, more: Gift) -> Gift:
        counts = {name: getattr(self, name) + getattr(more, name) for name in self.__struct_fields__ if name != "what"}
        return Gift(what=more.what or self.what, **counts)

    def since(self, before: Gift) -> Gift:
        """Return what came on top of `before`."""
        counts = {
            name: getattr(self, name) - getattr(before, name) for name in self.__struct_fields__ if name != "what"
        }
        return Gift(what=self.what, **counts)


class Given:
    """The file in a node's state directory. `keep` takes what this process has given in all swarms so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._by_swarm = read_given(path)
        self._counted = Gift()

    def keep(self, swarm: str, so_far: Gift) -> None:
        """Count for `swarm` what came since the last call. Blocking; OSError if the disk is full."""
        more, self._counted = so_far.since(self._counted), so_far
        self._by_swarm[swarm] = self._by_swarm.get(swarm, Gift()).and_more(more)
        write_atomically(self._path, msgspec.json.encode(self._by_swarm))


def read_given(path: Path) -> dict[str, Gift]:
    """Return what a node gave by swarm; nothing if the file is not there or is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Gift])
    except (OSError, msgspec.DecodeError):
        return {}


def together(nodes: Iterable[dict[str, Gift]]) -> dict[str, Gift]:
    """Return what several nodes gave by swarm."""
    found: dict[str, Gift] = {}
    for node in nodes:
        for swarm, gift in node.items():
            found[swarm] = found.get(swarm, Gift()).and_more(gift)
    return found
