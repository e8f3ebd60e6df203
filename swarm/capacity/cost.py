"""What a run costs, by node and class: rent while active, traffic both ways, and the learner's own price.

A sampler on standby is not charged: whether its owner is paid for waiting is between them, and nothing here depends on
it. Prices are per hour and per GB in one currency. All figures count from when the book was opened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarm.capacity.fleet import GB
from swarm.capacity.prices import HOUR_S

MAX_NODES = 4096
"""Accounts that are open at a time, as many as samplers are known; of those who left the oldest are closed first, and
remain in the sums of their class."""

MAX_CLASSES = 256
"""Device classes with sums of their own; a node names its own, so the rest is OTHER."""

OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What one node or class has cost and given."""

    rent: float = 0.0
    traffic: float = 0.0
    active_s: float = 0.0
    rollouts: int = 0
    tokens: int = 0

    @property
    def cost(self) -> float:
        return self.rent + self.traffic

    @property
    def per_rollout(self) -> float | None:
        """None before the first accepted rollout."""
        return self.cost / self.rollouts if self.rollouts else None

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            rent=self.rent + other.rent,
            traffic=self.traffic + other.traffic,
            active_s=self.active_s + other.active_s,
            rollouts=self.rollouts + other.rollouts,
            tokens=self.tokens + other.tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFigures:
    """`total` is of learner, samplers' rent and all traffic; what is per step, rollout or token is of the total, and
    None before the first. `per_hour` is the mean so far, `rate_per_hour` what rent runs at now."""

    total: float
    learner: float
    rent: float
    traffic: float
    hours: float
    steps: int
    rollouts: int
    tokens: int
    per_step: float | None
    per_rollout: float | None
    per_token: float | None
    per_hour: float | None
    rate_per_hour: float
    by_node: dict[str, Tally]
    by_class: dict[str, Tally]


@dataclass(slots=True, kw_only=True)
class _Account:
    """One sampler. `tally` was added to its class already."""

    device_class: str
    cost_per_hour: float
    down_cost_per_gb: float
    up_cost_per_gb: float
    active: bool = False
    tally: Tally = Tally()


class CostBook:
    """Times are monotonic seconds and never go back. What is said of a node without an account is counted in the totals
    of work, since it was done, and costs nothing."""

    def __init__(
        self,
        *,
        learner_cost_per_hour: float,
        learner_down_cost_per_gb: float = 0.0,
        learner_up_cost_per_gb: float = 0.0,
        now: float,
    ) -> None:
        self._learner_price = _price(learner_cost_per_hour)
        self._learner_down_price = _price(learner_down_cost_per_gb)
        self._learner_up_price = _price(learner_up_cost_per_gb)
        self._opened_at = self._accrued_at = now
        self._learner = 0.0
        self._learner_traffic = 0.0
        self._steps = 0
        self._strangers = Tally()
        self._accounts: dict[str, _Account] = {}
        self._left: dict[str, None] = {}
        self._classes: dict[str, Tally] = {}

    # -- what happens -----------------------------------------------------------------------------------------

    def joined(
        self,
        node: str,
        device_class: str,
        cost_per_hour: float,
        down_cost_per_gb: float,
        up_cost_per_gb: float,
        *,
        now: float,
    ) -> None:
        """Open an account, on standby; of one that is there already only the prices change, from now on."""
        self.accrue(now)
        prices = (_price(cost_per_hour), _price(down_cost_per_gb), _price(up_cost_per_gb))
        self._left.pop(node, None)
        account = self._accounts.get(node)
        if account is None:
            self._make_room()
            name = self._class_name(device_class)
            account = self._accounts[node] = _Account(
                device_class=name, cost_per_hour=0.0, down_cost_per_gb=0.0, up_cost_per_gb=0.0
            )
        account.cost_per_hour, account.down_cost_per_gb, account.up_cost_per_gb = prices

    def activated(self, node: str, *, now: float) -> None:
        """It is paid for from now on."""
        self._set_active(node, True, now)

    def stood_by(self, node: str, *, now: float) -> None:
        self._set_active(node, False, now)

    def left(self, node: str, *, now: float) -> None:
        """It is gone. Its account stays to be seen until its place is needed."""
        self._set_active(node, False, now)
        if node in self._accounts:
            self._left[node] = None

    def traffic(self, node: str, *, down_bytes: float, up_bytes: float) -> None:
        """So much more went to and from a sampler."""
        assert down_bytes >= 0
        assert up_bytes >= 0
        if (account := self._accounts.get(node)) is not None:
            price = down_bytes * account.down_cost_per_gb + up_bytes * account.up_cost_per_gb
            self._add(account, Tally(traffic=price / GB))

    def learner_traffic(self, *, down_bytes: float, up_bytes: float) -> None:
        assert down_bytes >= 0
        assert up_bytes >= 0
        self._learner_traffic += (down_bytes * self._learner_down_price + up_bytes * self._learner_up_price) / GB

    def accepted(self, node: str, *, rollouts: int, tokens: int) -> None:
        """Rollouts of a sampler were accepted, with so many completion tokens in all."""
        assert rollouts >= 0
        assert tokens >= 0
        work = Tally(rollouts=rollouts, tokens=tokens)
        if (account := self._accounts.get(node)) is None:
            self._strangers += work
        else:
            self._add(account, work)

    def stepped(self) -> None:
        """The learner made a step."""
        self._steps += 1

    def accrue(self, now: float) -> None:
        """Charge what time has cost since the last call. Everything that changes prices calls it first."""
        elapsed_s = now - self._accrued_at
        assert elapsed_s >= 0
        if elapsed_s == 0:
            return
        self._accrued_at = now
        self._learner += self._learner_price * elapsed_s / HOUR_S
        for account in self._accounts.values():
            if account.active:
                rent = account.cost_per_hour * elapsed_s / HOUR_S
                self._add(account, Tally(rent=rent, active_s=elapsed_s))

    # -- what it comes to -------------------------------------------------------------------------------------

    def figures(self, now: float) -> CostFigures:
        """Everything up to now."""
        self.accrue(now)
        sums = sum(self._classes.values(), self._strangers)
        total = self._learner + self._learner_traffic + sums.cost
        hours = (now - self._opened_at) / HOUR_S
        active = sum(account.cost_per_hour for account in self._accounts.values() if account.active)
        return CostFigures(
            total=total,
            learner=self._learner,
            rent=sums.rent,
            traffic=sums.traffic + self._learner_traffic,
            hours=hours,
            steps=self._steps,
            rollouts=sums.rollouts,
            tokens=sums.tokens,
            per_step=_over(total, self._steps),
            per_rollout=_over(total, sums.rollouts),
            per_token=_over(total, sums.tokens),
            per_hour=_over(total, hours),
            rate_per_hour=self._learner_price + active,
            by_node={node: account.tally for node, account in self._accounts.items()},
            by_class=dict(self._classes),
        )

    # -- accounts ---------------------------------------------------------------------------------------------

    def _set_active(self, node: str, active: bool, now: float) -> None:
        self.accrue(now)
        if (account := self._accounts.get(node)) is not None:
            account.active = active

    def _add(self, account: _Account, more: Tally) -> None:
        account.tally += more
        self._classes[account.device_class] += more

    def _make_room(self) -> None:
        """Close the account of the one that left first, if the book is full."""
        if len(self._accounts) >= MAX_NODES:
            assert self._left, "more samplers are there than the estimator takes"
            oldest = next(iter(self._left))
            del self._left[oldest], self._accounts[oldest]

    def _class_name(self, device_class: str) -> str:
        name = device_class
        if name not in self._classes and len(self._classes) >= MAX_CLASSES - 1:
            name = OTHER
        self._classes.setdefault(name, Tally())
        return name


def _price(value: float) -> float:
    """ValueError in one line if it is no price."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"a price must be a number of at least 0, not {value}")
    return value


def _over(total: float, count: float) -> float | None:
    return total / count if count > 0 else None
