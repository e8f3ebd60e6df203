"""Who of the samplers is active: the shell around estimator, activation and cost book."""

from __future__ import annotations

import time

from swarm.broadcast.tracker import InstallTracker
from swarm.rollout.watch import SamplerWatch
from swarm.types import NodeId, VersionId


class Provisioning(SamplerWatch):
    """Hears of samplers and steps."""

    def __init__(self, tracker: InstallTracker) -> None:
        self._tracker = tracker

    def installed(self, node: NodeId, version: VersionId) -> None:
        self._tracker.installed(node, version, now=time.monotonic())

    def gone(self, node: NodeId, *, vanished: bool) -> None:
        self._tracker.gone(node, now=time.monotonic())
