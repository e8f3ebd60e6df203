"""How long a version takes to be installed everywhere: `broadcast_s`."""

from __future__ import annotations

from swarm.types import NodeId, VersionId

MAX_OPEN = 64
"""Versions followed at once; one that no sampler reaches within 64 publications is no measure of anything."""


class InstallTracker:
    """Publications and installs in, durations out. A newer installed version counts for all older ones."""

    def __init__(self) -> None:
        self._published_at: dict[VersionId, float] = {}
        self._installed: dict[NodeId, VersionId] = {}
        self.last_broadcast_s: float | None = None

    def published(self, version: VersionId, *, now: float) -> None:
        self._published_at[version] = now
        while len(self._published_at) > MAX_OPEN:
            del self._published_at[min(self._published_at)]

    def installed(self, node: NodeId, version: VersionId, *, now: float) -> None:
        """`node` says that its engine holds `version`. What it says only rises (I4)."""
        known = self._installed.get(node)
        if known is None or version > known:
            self._installed[node] = version
            self._settle(now)

    def gone(self, node: NodeId, *, now: float) -> None:
        """Nobody waits for `node` any more."""
        if self._installed.pop(node, None) is not None:
            self._settle(now)

    def _settle(self, now: float) -> None:
        if not self._installed:
            return
        reached = min(self._installed.values())
        for version in sorted(v for v in self._published_at if v <= reached):
            self.last_broadcast_s = now - self._published_at.pop(version)
