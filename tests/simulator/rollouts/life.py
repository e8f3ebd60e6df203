"""What one life of the learner's node has in memory, besides the plane."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.types import NodeId, VersionId

Held = Callable[[bool], bool]
"""Tries to answer a held question; the argument says that its time is over. True once it is answered."""


@dataclass(slots=True, kw_only=True)
class Life:
    """What the node knows of its run. `held` are open questions, with who would be leased to. `made` counts the steps
    that the trainer has ended, `recorded` is the newest version whose publication is enqueued, `hurry` says that one is
    to be published at once."""

    held: dict[int, tuple[NodeId | None, Held]] = field(default_factory=dict)
    installed: dict[NodeId, VersionId] = field(default_factory=dict)
    made: int = 0
    recorded: int = -1
    period: int = 1
    hurry: bool = False
    training: bool = False
    waiting_since: float | None = None
    held_until: float | None = None

    def note_install(self, node: NodeId, version: VersionId) -> bool:
        """Whether it is news that `node` holds `version`."""
        known = self.installed.get(node)
        self.installed[node] = version
        return version != known

    def forget(self, node: NodeId) -> None:
        """It goes, and its open questions with it: they would bring it back."""
        self.held = {number: held for number, held in self.held.items() if held[0] != node}
        self.installed.pop(node, None)
