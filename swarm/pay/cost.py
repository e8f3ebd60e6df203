"""What a run costs, by node and class: rent while active, traffic both ways, and the learner's own price.

A sampler on standby is not charged: nothing here depends on whether anybody pays its owner for waiting, and what that
would cost stands apart. Prices are per hour and per GB in one currency. Figures count from when the book was opened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from swarm.pay.estimator import class_among
from swarm.pay.fleet import GB, MAX_NODES, Terms
from swarm.pay.prices import HOUR_S


@dataclass(slots=True, kw_only=True)
class CostTally:
    """What one node or class has cost and given."""

    rent: float = 0.0
    traffic: float = 0.0
    active_s: float = 0.0
    rollouts: int = 0
    tokens: int = 0

    @property
    def cost(self) -> float:
        return self.rent + self.traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFigures:
    """`total` covers the learner, the samplers' rent and all traffic; `rate_per_hour` is the current rent. `standby`,
    which is not in it, is the rent of the samplers that waited."""

    total: float
    steps: int
    rollouts: int
    tokens: int
    rate_per_hour: float
    standby: float
    by_class: dict[str, CostTally]


@dataclass(slots=True, kw_only=True)
class _Sums(CostTally):
    """Sums of one node or class, with rent up to `charged_at`. `price_per_hour` covers all `active` ones together."""

    charged_at: float
    price_per_hour: float = 0.0
    active: int = 0

    def change(self, *, active: int, price_per_hour: float, now: float) -> None:
        """Change the number of active samplers and their summed price by these amounts from now on."""
        self.charge(now)
        self.active += active
        # Exactly 0 without active samplers: a sum that is added to and subtracted from is off in the last digit.
        self.price_per_hour = self.price_per_hour + price_per_hour if self.active else 0.0

    def charge(self, now: float) -> None:
        """Charge for the time since the last charge."""
        elapsed_s = now - self.charged_at
        assert elapsed_s >= 0
        self.charged_at = now
        self.rent += self.price_per_hour * elapsed_s / HOUR_S
        self.active_s += self.active * elapsed_s

    def tally(self, now: float) -> CostTally:
        self.charge(now)
        return CostTally(**{one.name: getattr(self, one.name) for one in fields(CostTally)})


@dataclass(slots=True, kw_only=True)
class _Account:
    device_class: str
    sums: _Sums
    waits: bool = False
    cost_per_hour: float = 0.0
    down_cost_per_gb: float = 0.0
    up_cost_per_gb: float = 0.0


class CostBook:
    """Times are monotonic seconds and never go back. Work by a node without an account is counted in the totals and
    costs nothing.

    A class is charged by the summed price of its active samplers, so the time for an event does not grow with the
    swarm: thousands may leave at once.
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
        self._standby = _Sums(charged_at=now)
        self._accounts: dict[str, _Account] = {}
        self._left: dict[str, None] = {}
        self._classes: dict[str, _Sums] = {}

    # -- what happens -----------------------------------------------------------------------------------------

    def joined(self, node: str, terms: Terms, *, now: float) -> None:
        """Open an account, on standby. For an existing account only the prices change, from now on."""
        prices = [_price(one) for one in terms.prices]
        self._left.pop(node, None)
        account = self._accounts.get(node)
        if account is None:
            self._make_room()
            name = self._class_name(terms.device_class, now)
            account = self._accounts[node] = _Account(device_class=name, sums=_Sums(charged_at=now))
        if account.sums.active:
            self._change(account, active=0, price_per_hour=prices[0] - account.cost_per_hour, now=now)
        self._set_waits(account, False, now)
        account.cost_per_hour, account.down_cost_per_gb, account.up_cost_per_gb = prices
        self._set_waits(account, not account.sums.active, now)

    def activated(self, node: str, *, now: float) -> None:
        """The sampler is paid from now on."""
        self._set_active(node, True, now)

    def stood_by(self, node: str, *, now: float) -> None:
        self._set_active(node, False, now)

    def left(self, node: str, *, now: float) -> None:
        """The sampler is gone. Its account remains visible until its place is needed."""
        self._set_active(node, False, now)
        if (account := self._accounts.get(node)) is not None:
            self._set_waits(account, False, now)
            self._left[node] = None

    def traffic(self, node: str, *, down_bytes: float, up_bytes: float) -> None:
        """Count these additional bytes to and from a sampler."""
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
        """Count accepted rollouts of a sampler and their completion tokens."""
        assert rollouts >= 0
        assert tokens >= 0
        account = self._accounts.get(node)
        for sums in (self._strangers,) if account is None else self._sums_of(account):
            sums.rollouts += rollouts
            sums.tokens += tokens

    def stepped(self) -> None:
        self._steps += 1

    # -- what it comes to -------------------------------------------------------------------------------------

    def figures(self, now: float) -> CostFigures:
        """Return everything up to now."""
        by_class = {name: sums.tally(now) for name, sums in self._classes.items()}
        tallies = [*by_class.values(), self._strangers.tally(now)]
        learner = self._learner_price * (now - self._opened_at) / HOUR_S
        return CostFigures(
            total=learner + self._learner_traffic + sum(tally.cost for tally in tallies),
            steps=self._steps,
            rollouts=sum(tally.rollouts for tally in tallies),
            tokens=sum(tally.tokens for tally in tallies),
            rate_per_hour=self._learner_price + sum(sums.price_per_hour for sums in self._classes.values()),
            standby=self._standby.tally(now).rent,
            by_class=by_class,
        )

    def by_node(self, now: float) -> dict[str, CostTally]:
        """Return the accounts up to now."""
        return {node: account.sums.tally(now) for node, account in self._accounts.items()}

    # -- accounts ---------------------------------------------------------------------------------------------

    def _set_active(self, node: str, active: bool, now: float) -> None:
        account = self._accounts.get(node)
        if account is not None and account.sums.active != active:
            sign = 1 if active else -1
            self._change(account, active=sign, price_per_hour=sign * account.cost_per_hour, now=now)
            self._set_waits(account, not active, now)

    def _set_waits(self, account: _Account, waits: bool, now: float) -> None:
        if account.waits != waits:
            account.waits, sign = waits, 1 if waits else -1
            self._standby.change(active=sign, price_per_hour=sign * account.cost_per_hour, now=now)

    def _change(self, account: _Account, *, active: int, price_per_hour: float, now: float) -> None:
        for sums in self._sums_of(account):
            sums.change(active=active, price_per_hour=price_per_hour, now=now)

    def _sums_of(self, account: _Account) -> tuple[_Sums, _Sums]:
        return account.sums, self._classes[account.device_class]

    def _make_room(self) -> None:
        """If the book is full, close the account of the sampler that left first. The sums of its class keep it."""
        if len(self._accounts) >= MAX_NODES:
            assert self._left, "more samplers are there than the estimator takes"
            oldest = next(iter(self._left))
            del self._left[oldest], self._accounts[oldest]

    def _class_name(self, device_class: str, now: float) -> str:
        name = class_among(self._classes, device_class)
        self._classes.setdefault(name, _Sums(charged_at=now))
        return name


def _price(value: float) -> float:
    """Return `value`, or raise a one-line ValueError if it is not a price."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"a price must be a number of at least 0, not {value}")
    return value
