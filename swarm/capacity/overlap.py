"""What becomes of versions that follow one another faster than they can be sent."""

from __future__ import annotations

import math
from collections.abc import Sequence

from swarm.capacity.fleet import Disseminate, Dissemination, Worker


def versions_apart(*, install_s: float, period_s: float) -> int:
    """How many versions apart those are at most that a worker takes one after the other, if it needs `install_s` for
    one, one is published every `period_s`, and it begins the newest when the one before is there."""
    return max(1, math.ceil(install_s / period_s))


def versions_taken(*, install_s: float, period_s: float) -> float:
    """Share of the versions published that it takes: one in `install_s` if that is longer than a period, else all."""
    return 1.0 if install_s <= period_s else period_s / install_s


def sustained(once: Disseminate, *, period_s: float) -> Disseminate:
    """`once` says how a single version travels; this, how one does of many, published every `period_s`. Who needs
    longer than a period misses some: it begins the newest when the one before is there. What it holds is older by up to
    m - 1 periods, as if each came so much later, and it moves a version in its `install_s`, not in each period: its
    line is never idle."""

    def disseminate(workers: Sequence[Worker]) -> Dissemination:
        plan = once(workers)
        apart = [versions_apart(install_s=install_s, period_s=period_s) for install_s in plan.install_s]
        if max(apart, default=1) == 1:
            return plan
        taken = [versions_taken(install_s=install_s, period_s=period_s) for install_s in plan.install_s]
        received = sum(down * share for down, share in zip(plan.down_bytes, taken, strict=True))
        return Dissemination(
            install_s=tuple(s + (m - 1) * period_s for s, m in zip(plan.install_s, apart, strict=True)),
            down_bytes=tuple(down * share for down, share in zip(plan.down_bytes, taken, strict=True)),
            up_bytes=tuple(up * share for up, share in zip(plan.up_bytes, taken, strict=True)),
            learner_up_bytes=plan.learner_up_bytes * received / sum(plan.down_bytes),
        )

    return disseminate
