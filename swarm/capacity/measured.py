"""Install times that were measured, in place of planned ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from swarm.capacity.fleet import Disseminate, Dissemination, Worker


def measured_first(planned: Disseminate, installs_s: Mapping[str, float]) -> Disseminate:
    """`planned`, with the install times that were measured in place of planned ones. Who is on standby gets every
    version too, so a measured time holds for any set. Where it was not measured the median of its class stands, or of
    all; a plan on unknown uplinks is believed only where nothing was measured at all."""

    def disseminate(workers: Sequence[Worker]) -> Dissemination:
        plan = planned(workers)
        usual: dict[str | None, list[float]] = {}
        for worker in workers:
            if (measured := installs_s.get(worker.name)) is not None:
                usual.setdefault(worker.device_class, []).append(measured)
        everybody = median(installs_s.values()) if installs_s else None
        return replace(
            plan,
            install_s=tuple(
                _first(
                    installs_s.get(worker.name),
                    median(usual[worker.device_class]) if worker.device_class in usual else None,
                    everybody,
                    install_s if math.isfinite(install_s) else None,
                )
                for worker, install_s in zip(workers, plan.install_s, strict=True)
            ),
        )

    return disseminate


def _first(*values: float | None) -> float:
    return next((value for value in values if value is not None), 0.0)
