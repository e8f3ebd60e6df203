"""Settings of the rings. Hypothesis draws the same examples at every run, so that a red run is red again."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "default",
    derandomize=True,
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("long", parent=settings.get_profile("default"), derandomize=False, max_examples=2_000)
settings.load_profile("default")
