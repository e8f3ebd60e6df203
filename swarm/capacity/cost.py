"""What a run costs, by node and class: rent while active, traffic both ways, and the learner's own price.

A sampler on standby is not charged: whether its owner is paid for waiting is between them, and nothing here depends on
it. Prices are per hour and per GB in one currency. All figures count from when the book was opened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarm.capacity.estimator import class_among
from swarm.capacity.fleet import GB
from swarm.capacity.prices import HOUR_S

MAX_NODES = 4096
"""Accounts that are open at a time, as many as samplers are known; of those who left the oldest are closed first, and
remain in the sums of their class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What one node or class has cost and given."""

    rent: float
    traffic: float
    active_s: float
    rollouts: int
    tokens: int

    @property
    def cost(self) -> float:
        return self.rent + self.traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFigures:
    """`total` is of learner, samplers' rent and all traffic; `rate_per_hour` what rent runs at now."""

    total: float
    steps: int
    rollouts: int
    tokens: int
    rate_per_hour: float
    by_class: dict[str, Tally]


@dataclass(slots=True, kw_only=True)
class _Sums:
    """Of one node or class, rent up to `charged_at`. `price_per_hour` is that of the `active` ones together."""

    charged_at: float
    price_per_hour: float = 0.0
    active: int = 0
    rent: float = 0.0
    traffic: float = 0.0
    active_s: float = 0.0
    rollouts: int = 0
    tokens: int = 0

    def change(self, *, active: int, price_per_hour: float, now: float) -> None:
        """So many more are active from now on, at so much more."""
        self.charge(now)
        self.active += active
        # Exactly nothing where nobody is: sums of what came and went are off in the last digit.
        self.price_per_hour = self.price_per_hour + price_per_hour if self.active else 0.0

    def charge(self, now: float) -> None:
        """Charge what time has cost since it was last charged."""
        elapsed_s = now - self.charged_at
        assert elapsed_s >= 0
        self.charged_at = now
        self.rent += self.price_per_hour * elapsed_s / HOUR_S
        self.active_s += self.active * elapsed_s

    def tally(self, now: float) -> Tally:
        self.charge(now)
        return Tally(
            rent=self.rent,
            traffic=self.traffic,
            active_s=self.active_s,
            rollouts=self.rollouts,
            tokens=self.tokens,
        )


@dataclass(slots=True, kw_only=True)
class _Account:
    """One sampler."""

    device_class: str
    sums: _Sums
    cost_per_hour: float = 0.0
    down_cost_per_gb: float = 0.0
    up_cost_per_gb: float = 0.0


class CostBook:
    """Times are monotonic seconds and never go back. What is said of a node without an account is counted in the totals
    of work, since it was done, and costs nothing.

    Classes are charged by the summed price of their active ones, so an event takes no time that grows with the swarm:
    thousands may leave at once.
    """

    def __init__(
        self,
        *,
        learner_cost_per_hour: float,
        learner_up_cost_per_gb: float = 0.0,
        now: float,
    ) -> None:
        self._learner_price = _price(learner_cost_per_hour)
        self._learner_up_price = _price(learner_up_cost_per_gb)
        self._opened_at = now
        self._learner_traffic = 0.0
        self._steps = 0
        self._strangers = _Sums(charged_at=now)
        self._accounts: dict[str, _Account] = {}
        self._left: dict[str, None] = {}
        self._classes: dict[str, _Sums] = {}

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
        prices = (_price(cost_per_hour), _price(down_cost_per_gb), _price(up_cost_per_gb))
        self._left.pop(node, None)
        account = self._accounts.get(node)
        if account is None:
            self._make_room()
            name = self._class_name(device_class, now)
            account = self._accounts[node] = _Account(device_class=name, sums=_Sums(charged_at=now))
        if account.sums.active:
            self._change(account, active=0, price_per_hour=cost_per_hour - account.cost_per_hour, now=now)
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
            price = (down_bytes * account.down_cost_per_gb + up_bytes * account.up_cost_per_gb) / GB
            for sums in self._sums_of(account):
                sums.traffic += price

    def learner_sent(self, nbytes: float) -> None:
        assert nbytes >= 0
        self._learner_traffic += nbytes * self._learner_up_price / GB

    def accepted(self, node: str, *, rollouts: int, tokens: int) -> None:
        """Rollouts of a sampler were accepted, with so many completion tokens in all."""
        assert rollouts >= 0
        assert tokens >= 0
        account = self._accounts.get(node)
        for sums in (self._strangers,) if account is None else self._sums_of(account):
            sums.rollouts += rollouts
            sums.tokens += tokens

    def stepped(self) -> None:
        """The learner made a step."""
        self._steps += 1

    # -- what it comes to -------------------------------------------------------------------------------------

    def figures(self, now: float) -> CostFigures:
        """Everything up to now."""
        by_class = {name: sums.tally(now) for name, sums in self._classes.items()}
        tallies = [*by_class.values(), self._strangers.tally(now)]
        learner = self._learner_price * (now - self._opened_at) / HOUR_S
        return CostFigures(
            total=learner + self._learner_traffic + sum(tally.cost for tally in tallies),
            steps=self._steps,
            rollouts=sum(tally.rollouts for tally in tallies),
            tokens=sum(tally.tokens for tally in tallies),
            rate_per_hour=self._learner_price + sum(sums.price_per_hour for sums in self._classes.values()),
            by_class=by_class,
        )

    def by_node(self, now: float) -> dict[str, Tally]:
        """The accounts up to now."""
        return {node: account.sums.tally(now) for node, account in self._accounts.items()}

    # -- accounts ---------------------------------------------------------------------------------------------

    def _set_active(self, node: str, active: bool, now: float) -> None:
        account = self._accounts.get(node)
        if account is not None and account.sums.active != active:
            sign = 1 if active else -1
            self._change(account, active=sign, price_per_hour=sign * account.cost_per_hour, now=now)

    def _change(self, account: _Account, *, active: int, price_per_hour: float, now: float) -> None:
        for sums in self._sums_of(account):
            sums.change(active=active, price_per_hour=price_per_hour, now=now)

    def _sums_of(self, account: _Account) -> tuple[_Sums, _Sums]:
        return account.sums, self._classes[account.device_class]

    def _make_room(self) -> None:
        """Close the account of the one that left first, if the book is full."""
        if len(self._accounts) >= MAX_NODES:
            assert self._left, "more samplers are there than the estimator takes"
            oldest = next(iter(self._left))
            del self._left[oldest], self._accounts[oldest]

    def _class_name(self, device_class: str, now: float) -> str:
        name = class_among(self._classes, device_class)
        self._classes.setdefault(name, _Sums(charged_at=now))
        return name


def _price(value: float) -> float:
    """ValueError in one line if it is no price."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"a price must be a number of at least 0, not {value}")
    return value
