"""What an estimator keeps of each sampler and of each device class."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from swarm.capacity.windows import Window

MAX_CLASSES = 256
"""Device classes that are told apart; a node names its own, so what comes later counts as OTHER."""

OTHER = "other"

CLAIMS = 9
"""Beats whose claims are remembered: four may be nonsense."""

INSTALLS = 9

STARTS = 33
"""Starts of a class that are remembered."""

PROVEN_RATES = 33
"""Rates of a class that are remembered of samplers that left."""


@dataclass(slots=True, kw_only=True)
class SamplerSeen:
    """What is known of one sampler. `active_since` is None on standby, `began_at` is set until its first rollout."""

    device_class: str
    joined_at: float
    cost_per_hour: float
    down_cost_per_gb: float
    up_cost_per_gb: float
    samples_at_once: int = 1
    lockstep: bool = False
    uplink_bytes_per_s: float = 0.0
    downlink_bytes_per_s: float = 0.0
    public: bool = False
    claims: Window = field(default_factory=lambda: Window(CLAIMS))
    installs: Window = field(default_factory=lambda: Window(INSTALLS))
    active_since: float | None = None
    began_at: float | None = None
    active_s: float = 0.0
    accepted: float = 0.0
    proven: bool = False

    def active_until(self, now: float) -> float:
        """Seconds in all."""
        return self.active_s + (0.0 if self.active_since is None else max(0.0, now - self.active_since))


@dataclass(slots=True, kw_only=True)
class ClassSeen:
    """What is known of a device class. `hours` of samplers that are gone; those present are added when asked."""

    hours: float = 0.0
    vanished: float = 0.0
    starts: Window = field(default_factory=lambda: Window(STARTS))
    proven: Window = field(default_factory=lambda: Window(PROVEN_RATES))


def class_among(known: Collection[str], device_class: str) -> str:
    """The class under which one of `device_class` is kept, where these are known already."""
    return device_class if device_class in known or len(known) < MAX_CLASSES - 1 else OTHER
