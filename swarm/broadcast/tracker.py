"""How long a version takes to be installed everywhere: `broadcast_s`."""

from __future__ import annotations

import math

from swarm.types import NodeId, VersionId

MAX_SHOWN = 8
"""Versions whose spreading is remembered for `status`."""

SHARES = {"50": 0.5, "90": 0.9, "100": 1.0}
"""Shares of the samplers, by their name in `status`."""

MAX_OPEN = 64
"""Versions followed at once; one that no sampler reaches within 64 publications is no measure of anything."""


class InstallTracker:
    """Publications and installs in, durations out. A newer installed version counts for all older ones."""

    def __init__(self) -> None:
        self._published_at: dict[VersionId, float] = {}
        self._installed: dict[NodeId, VersionId] = {}
        self._spread: dict[VersionId, tuple[float, dict[NodeId, float]]] = {}
        self._prepared_s: dict[VersionId, float] = {}
        self.last_broadcast_s: float | None = None

    def published(self, version: VersionId, *, now: float, prepared_s: float = 0.0) -> None:
        """`prepared_s`: how long before its weights were there, which were encoded and written down since."""
        self._published_at[version] = now
        self._spread[version] = (now, {})
        self._prepared_s[version] = prepared_s
        while len(self._spread) > MAX_SHOWN:
            del self._prepared_s[min(self._spread)], self._spread[min(self._spread)]
        while len(self._published_at) > MAX_OPEN:
            del self._published_at[min(self._published_at)]

    def installed(self, node: NodeId, version: VersionId, *, now: float) -> None:
        """`node` says that its engine holds `version`. What it says only rises (I4)."""
        known = self._installed.get(node)
        if known is None or version > known:
            self._installed[node] = version
            for shown, (published_at, times) in self._spread.items():
                if shown <= version:
                    times.setdefault(node, now - published_at)
            self._settle(now)

    def gone(self, node: NodeId, *, now: float) -> None:
        """Nobody waits for `node` any more."""
        if self._installed.pop(node, None) is not None:
            self._settle(now)

    def install_s(self, node: NodeId, version: VersionId) -> float | None:
        """Seconds from the publication of `version`, one of the last few, until `node` held it or a newer one."""
        return self._spread[version][1].get(node) if version in self._spread else None

    def prepared_s(self, version: VersionId) -> float:
        """Seconds from the weights of `version`, one of the last few, to its publication; 0 for others."""
        return self._prepared_s.get(version, 0.0)

    def spread_s(self, version: VersionId) -> dict[str, float | None]:
        """Seconds until so many percent of today's samplers held `version`; None for what has not come true."""
        _, times = self._spread.get(version, (0.0, {}))
        known = sorted(at for node, at in times.items() if node in self._installed)
        found: dict[str, float | None] = {}
        for name, share in SHARES.items():
            needed = max(1, math.ceil(share * len(self._installed)))
            found[name] = round(known[needed - 1], 4) if needed <= len(known) else None
        return found

    def _settle(self, now: float) -> None:
        if not self._installed:
            return
        reached = min(self._installed.values())
        for version in sorted(v for v in self._published_at if v <= reached):
            self.last_broadcast_s = now - self._published_at.pop(version)
