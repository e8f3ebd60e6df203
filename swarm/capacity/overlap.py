"""What becomes of versions that follow one another faster than they can be sent."""

from __future__ import annotations

import math
from collections.abc import Sequence

from swarm.capacity.fleet import Disseminate, Dissemination, Worker


def versions_apart(*, install_s: float, period_s: float) -> int:
    """Every which version a worker takes that needs `install_s` for one, where one is published every `period_s`: it
    begins the newest when the one before is there, ceil(install_s / period_s)."""
    return max(1, math.ceil(install_s / period_s))


def sustained(once: Disseminate, *, period_s: float) -> Disseminate:
    """`once` says how a single version travels; this, how one does of many, published every `period_s`. Who needs
    longer than a period takes every m-th version: what it holds is older by up to m - 1 periods, as if each came so
    much later, and per version published it moves an m-th of the bytes."""

    def disseminate(workers: Sequence[Worker]) -> Dissemination:
        plan = once(workers)
        apart = [versions_apart(install_s=install_s, period_s=period_s) for install_s in plan.install_s]
        if max(apart, default=1) == 1:
            return plan
        received = sum(down / m for down, m in zip(plan.down_bytes, apart, strict=True))
        return Dissemination(
            install_s=tuple(s + (m - 1) * period_s for s, m in zip(plan.install_s, apart, strict=True)),
            down_bytes=tuple(down / m for down, m in zip(plan.down_bytes, apart, strict=True)),
            up_bytes=tuple(up / m for up, m in zip(plan.up_bytes, apart, strict=True)),
            learner_up_bytes=plan.learner_up_bytes * received / sum(plan.down_bytes),
        )

    return disseminate
