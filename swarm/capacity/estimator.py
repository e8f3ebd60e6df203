"""Running estimates of what the model needs, from what the swarm measures.

Every figure is a median over a bounded window, so that one stall moves nothing. A sampler's rate has two sources: its
own claim, in every beat, and the rollouts that were accepted from it while it was active. The second is less than it
could do, since pacing lets samplers wait; but it is so for all alike. So a claim is believed up to CLAIM_FACTOR times
what the sampler's accepted rollouts say when scaled as they are for the others, and before it has proven anything up to
what proven samplers of its class do, or did before they left. In a class that has proven nothing a claim counts up to
CLAIM_FACTOR times what the best class does, and is passed on as it is: one of them may be tried. A claim of 1e9 gains
nothing, and a sampler that gives nothing for JUDGED_S counts for nothing.

Figures that make no sense are counted in `ignored` and change nothing.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low

from swarm.capacity.fleet import Demand, Lengths, Worker
from swarm.capacity.prices import HOUR_S

HALF_TRUSTED = 4
"""Observations after which an estimate is trusted by half if they agree: a median of fewer is one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure. `confidence` is 0 for a start value, and nears 1 with many `samples` that agree."""

    value: float
    confidence: float
    samples: int


def confidence(values: Sequence[float]) -> float:
    """n / (n + HALF_TRUSTED), less the median deviation over the median (at most all of it)."""
    if not values:
        return 0.0
    middle = median(values)
    if middle == 0:
        spread = 0.0 if not any(values) else 1.0
    else:
        spread = min(1.0, median(abs(value - middle) for value in values) / abs(middle))
    return len(values) / (len(values) + HALF_TRUSTED) * (1.0 - spread)


class Window:
    """The last `size` observations of one figure, all finite."""

    __slots__ = ("_values",)

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque(maxlen=size)

    def add(self, value: float) -> None:
        assert math.isfinite(value)
        self._values.append(value)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def values(self) -> Sequence[float]:
        return self._values

    @property
    def median(self) -> float | None:
        """None without observations."""
        return median(self._values) if self._values else None

    def estimate(self, start: float) -> Estimate:
        """The median, or `start` without confidence where nothing was observed."""
        if not self._values:
            return Estimate(value=start, confidence=0.0, samples=0)
        return Estimate(value=median(self._values), confidence=confidence(self._values), samples=len(self._values))


MAX_CLASSES = 256  # Device classes that are told apart; a node names its own, so what comes later counts as OTHER
OTHER = "other"
CLAIMS = 9  # Beats whose claims are remembered: four may be nonsense
INSTALLS = 9
STARTS = 33  # Starts of a class that are remembered
PROVEN_RATES = 33  # Rates of a class that are remembered of samplers that left


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


MAX_NODES = 4096  # Samplers that are remembered, as many as the table of leases

STEPS = 15
"""Steps whose training time is remembered: seven may have been disturbed, and a new length of batches shows soon."""

IDLE_STEPS = 9
LENGTHS = 4096  # Completions whose lengths are remembered: the 99th percentile is among them forty times
LENGTHS_A_CALL = 256  # Of one report: no sampler's batch crowds out all others

PROVEN_ROLLOUTS = 16
"""Accepted rollouts from which on a sampler's rate counts as proven: their number is then good to 25 %."""

PROVEN_HALF_S = 3600.0
"""Active seconds after which what was accepted counts half: a card that grew slower shows within an hour or two."""

MIN_RATE = 1e-6
"""Rollouts per second below which a claim is none: one in eleven days. The model can not divide by less."""

CLAIM_FACTOR = 2.0
"""How much better than others' a sampler's claim over its accepted rollouts may be: places, lengths and luck differ by
less."""

JUDGED_S = 3600.0
"""Active seconds after which a sampler may be judged though it never gave PROVEN_ROLLOUTS: if others of its claim would
have. A cold start takes a quarter of it."""

PRIOR_HOURS = 24.0
"""Sampler-hours for which the start value of departures stands: a class nobody left for a day counts half."""

REMEMBERED_HOURS = 1000.0  # Sampler-hours of a class after which what was seen counts half


@dataclass(frozen=True, slots=True, kw_only=True)
class StartValues:
    """What is supposed of what was not observed yet. None: there is no demand before it was observed.

    `start_s`: cold start of marketplace and home samplers, 10 minutes in the median. `departures_per_hour`: between
    marketplace hosts (1 in 150 h) and homes (1 in 24 h).
    """

    train_step_s: float | None = None
    lengths: Lengths | None = None
    install_s: float = 30.0
    start_s: float = 600.0
    departures_per_hour: float = 0.02


class Estimator:
    """Times are monotonic seconds. A node that did not join, or has left, is unknown: what is said of it is ignored."""

    def __init__(self, start: StartValues) -> None:
        self._start = start
        self._samplers: dict[str, SamplerSeen] = {}
        self._classes: dict[str, ClassSeen] = {}
        self._train = Window(STEPS)
        self._idle = Window(IDLE_STEPS)
        self._lengths: deque[int] = deque(maxlen=LENGTHS)
        self.ignored: Counter[str] = Counter()

    # -- what the learner sees --------------------------------------------------------------------------------

    def trained(self, train_step_s: float, *, now: float) -> None:
        """A step took so long."""
        if self._sane("train_step_s", train_step_s, positive=True):
            self._train.add(train_step_s)

    def idle(self, idle_share: float, *, now: float) -> None:
        """The learner waited for this share of a step."""
        if self._sane("idle_share", idle_share) and idle_share <= 1:
            self._idle.add(idle_share)

    def generated(self, node: str, tokens: Sequence[int], *, now: float) -> None:
        """Completions of these lengths were accepted from `node`."""
        sampler = self._samplers.get(node)
        if sampler is None or any(count < 1 for count in tokens):
            self.ignored["generated"] += 1
            return
        self._lengths.extend(tokens[:LENGTHS_A_CALL])
        if sampler.began_at is not None and tokens:
            # What it did while it started says nothing of its rate: that is counted from here on.
            self._classes[sampler.device_class].starts.add(now - sampler.began_at)
            sampler.began_at, sampler.active_since = None, now
            return
        self._count_active(sampler, now)
        sampler.accepted += len(tokens)
        sampler.proven = sampler.proven or sampler.accepted >= PROVEN_ROLLOUTS

    # -- what becomes of samplers -----------------------------------------------------------------------------

    def joined(
        self,
        node: str,
        device_class: str,
        cost_per_hour: float,
        down_cost_per_gb: float,
        up_cost_per_gb: float,
        *,
        now: float,
    ) -> str | None:
        """A sampler is there, on standby; price 0 is a volunteer. What is wrong if it can not be taken, in one line."""
        prices = (cost_per_hour, down_cost_per_gb, up_cost_per_gb)
        if not all(math.isfinite(price) and price >= 0 for price in prices):
            self.ignored["joined"] += 1
            return "prices must be numbers of at least 0: correct them and join again"
        known = self._samplers.get(node)
        if known is None and len(self._samplers) >= MAX_NODES:
            self.ignored["joined"] += 1
            return f"{MAX_NODES} samplers are known already: join another swarm"
        if known is not None:
            known.cost_per_hour, known.down_cost_per_gb, known.up_cost_per_gb = prices
            return None
        self._samplers[node] = SamplerSeen(
            device_class=self._class_name(device_class),
            joined_at=now,
            cost_per_hour=cost_per_hour,
            down_cost_per_gb=down_cost_per_gb,
            up_cost_per_gb=up_cost_per_gb,
        )
        return None

    def rate(self, node: str, rollouts_per_s: float, samples_at_once: int, lockstep: bool, *, now: float) -> None:
        """What a sampler says that it does at full load, in places that are filled together or one by one."""
        sampler = self._samplers.get(node)
        sane = self._sane("rate", rollouts_per_s, positive=True) and rollouts_per_s >= MIN_RATE
        if sampler is None or not sane or samples_at_once < 1:
            self.ignored["rate"] += 1
            return
        sampler.claims.add(rollouts_per_s)
        sampler.samples_at_once, sampler.lockstep = samples_at_once, lockstep

    def link(
        self, node: str, uplink_bytes_per_s: float, downlink_bytes_per_s: float, public: bool, *, now: float
    ) -> None:
        """What is measured of a sampler's links; 0 is unknown."""
        sampler = self._samplers.get(node)
        if sampler is None or not (self._sane("link", uplink_bytes_per_s) and self._sane("link", downlink_bytes_per_s)):
            self.ignored["link"] += 1
            return
        sampler.uplink_bytes_per_s, sampler.downlink_bytes_per_s = uplink_bytes_per_s, downlink_bytes_per_s
        sampler.public = public

    def installed(self, node: str, install_s: float, *, now: float) -> None:
        """A version was in use there so long after its publication."""
        sampler = self._samplers.get(node)
        if sampler is None or not self._sane("installed", install_s):
            self.ignored["installed"] += 1
            return
        sampler.installs.add(install_s)

    def activated(self, node: str, *, now: float) -> None:
        """It is given work from now on."""
        sampler = self._samplers.get(node)
        if sampler is not None and sampler.active_since is None:
            sampler.active_since = sampler.began_at = now

    def stood_by(self, node: str, *, now: float) -> None:
        sampler = self._samplers.get(node)
        if sampler is not None and sampler.active_since is not None:
            if sampler.began_at is None:
                self._count_active(sampler, now)
            sampler.active_since = sampler.began_at = None

    def left(self, node: str, *, vanished: bool, now: float) -> None:
        """It is gone; `vanished`: without a word."""
        sampler = self._samplers.get(node)
        if sampler is None:
            return
        group = self._classes[sampler.device_class]
        if sampler.proven and (rate := self._believed(now).get(node)):
            group.proven.add(rate)
        del self._samplers[node]
        group.hours += max(0.0, now - sampler.joined_at) / HOUR_S
        group.vanished += vanished
        if group.hours > REMEMBERED_HOURS:
            group.hours, group.vanished = group.hours / 2, group.vanished / 2

    # -- the estimates ----------------------------------------------------------------------------------------

    def workers(self, now: float) -> list[Worker]:
        """All samplers. A rate of 0 is unknown: neither the sampler nor a proven one of its class has said one that
        can be believed."""
        rates, proven = self._rates(now), self._proven_classes(self._believed(now))
        present = self._present_hours(now)
        habits = {name: (self.start_s(name).value, self._departures(name, present)) for name in self._classes}
        return [
            self._worker(
                node,
                sampler,
                rates[node],
                *habits[sampler.device_class],
                is_proven=not proven or sampler.device_class in proven,
            )
            for node, sampler in self._samplers.items()
        ]

    def demand(
        self, *, groups_per_step: int, group_size: int, publish_every_steps: int, max_staleness: int
    ) -> Demand | None:
        """What the learner needs; None while no step or no length is known."""
        lengths = self.lengths()
        train_step_s = self._train.median or self._start.train_step_s
        if lengths is None or train_step_s is None:
            return None
        return Demand(
            train_step_s=train_step_s,
            groups_per_step=groups_per_step,
            group_size=group_size,
            publish_every_steps=publish_every_steps,
            max_staleness=max_staleness,
            lengths=lengths,
        )

    def lengths(self) -> Lengths | None:
        """Of accepted completions; None where they are neither observed nor supposed."""
        return Lengths.of(self._lengths) if self._lengths else self._start.lengths

    def train_step_s(self) -> Estimate | None:
        """None where it is neither observed nor supposed."""
        if not self._train and self._start.train_step_s is None:
            return None
        return self._train.estimate(self._start.train_step_s or 0.0)

    def idle_share(self) -> Estimate | None:
        """Of the last steps; None before the first."""
        return self._idle.estimate(0.0) if self._idle else None

    def install_s(self, node: str) -> Estimate:
        """A sampler's own, else its class's without confidence, else the start value."""
        sampler = self._samplers.get(node)
        if sampler is None or sampler.installs:
            return (sampler.installs if sampler else Window(1)).estimate(self._start.install_s)
        alike = [
            other.installs.median
            for other in self._samplers.values()
            if other.device_class == sampler.device_class and other.installs.median is not None
        ]
        return Estimate(value=median(alike) if alike else self._start.install_s, confidence=0.0, samples=0)

    def rollouts_per_s(self, node: str, *, now: float) -> Estimate:
        """The rate that is reckoned with: 0 is unknown. The confidence is that of the sampler's own claims once it has
        proven itself, else 0."""
        sampler = self._samplers.get(node)
        if sampler is None:
            return Estimate(value=0.0, confidence=0.0, samples=0)
        value, own = self._rates(now)[node], sampler.claims.estimate(0.0)
        return Estimate(value=value, confidence=own.confidence if sampler.proven else 0.0, samples=own.samples)

    def start_s(self, device_class: str) -> Estimate:
        """From being activated to the first accepted rollout, its generation included."""
        group = self._classes.get(device_class)
        return (group.starts if group else Window(1)).estimate(self._start.start_s)

    def departures_per_hour(self, device_class: str, *, now: float) -> float:
        """Samplers of this class that vanished, per sampler-hour; as if PRIOR_HOURS at the start value had been seen
        before, so that a class that nobody has left yet is not thought immortal."""
        return self._departures(device_class, self._present_hours(now))

    def _departures(self, device_class: str, present_hours: Mapping[str, float]) -> float:
        group = self._classes.get(device_class, ClassSeen())
        hours = group.hours + present_hours.get(device_class, 0.0)
        return (group.vanished + self._start.departures_per_hour * PRIOR_HOURS) / (hours + PRIOR_HOURS)

    def _present_hours(self, now: float) -> dict[str, float]:
        hours: dict[str, float] = {}
        for sampler in self._samplers.values():
            spent = max(0.0, now - sampler.joined_at) / HOUR_S
            hours[sampler.device_class] = hours.get(sampler.device_class, 0.0) + spent
        return hours

    # -- rates ------------------------------------------------------------------------------------------------

    def _rates(self, now: float) -> dict[str, float]:
        """Of each sampler, from its claims within what was accepted; see the head of this file."""
        believed = self._believed(now)
        usual = self._proven_classes(believed)
        most = CLAIM_FACTOR * max(usual.values()) if usual else math.inf
        rates = {}
        for node, sampler in self._samplers.items():
            claim = sampler.claims.median
            if node in believed:
                rates[node] = believed[node]
            elif claim is None:
                rates[node] = usual.get(sampler.device_class, 0.0)
            else:
                rates[node] = min(claim, usual.get(sampler.device_class, most))
        return rates

    def _proven_classes(self, believed: Mapping[str, float]) -> dict[str, float]:
        """What those of each class do who have proven it: who is there, else who was. One that gives nothing says
        nothing of its class: it may still be fetching its first version."""
        by_class: dict[str, list[float]] = {}
        for node, own in believed.items():
            if self._samplers[node].proven:
                by_class.setdefault(self._samplers[node].device_class, []).append(own)
        gone = {name: rate for name, group in self._classes.items() if (rate := group.proven.median) is not None}
        return gone | {name: median_low(rates) for name, rates in by_class.items()}

    def _believed(self, now: float) -> dict[str, float]:
        """Claims of samplers that can be judged, each limited by its own accepted rollouts: those that have proven
        themselves, and those that would have by now if they were like these."""
        claims = {node: sampler.claims.median or 0.0 for node, sampler in self._samplers.items() if sampler.claims}
        # The time in which it gave none counts too: who stopped would be believed for ever.
        active = {node: self._samplers[node].active_until(now) for node in claims}
        proven = {node: self._samplers[node] for node in claims if self._samplers[node].proven and active[node] > 0}
        if not proven:
            return {}
        usual = median_low(claims[node] * active[node] / sampler.accepted for node, sampler in proven.items())
        believed = {}
        for node, claim in claims.items():
            late = active[node] >= JUDGED_S and claim * active[node] / usual >= PROVEN_ROLLOUTS
            if node in proven or late:
                least = MIN_RATE if node in proven else 0.0
                accepted_per_s = self._samplers[node].accepted / active[node]
                believed[node] = max(least, min(claim, CLAIM_FACTOR * usual * accepted_per_s))
        return believed

    def _count_active(self, sampler: SamplerSeen, now: float) -> None:
        if sampler.active_since is None:
            return
        sampler.active_s, sampler.active_since = sampler.active_until(now), now
        if sampler.proven and sampler.active_s > PROVEN_HALF_S:
            sampler.active_s, sampler.accepted = sampler.active_s / 2, sampler.accepted / 2

    def _worker(
        self,
        node: str,
        sampler: SamplerSeen,
        rate: float,
        start_s: float,
        departures_per_hour: float,
        *,
        is_proven: bool,
    ) -> Worker:
        return Worker(
            name=node,
            device_class=sampler.device_class,
            rollouts_per_s=rate,
            claimed_rollouts_per_s=0.0 if is_proven else sampler.claims.median or 0.0,
            samples_at_once=sampler.samples_at_once,
            lockstep=sampler.lockstep,
            cost_per_hour=sampler.cost_per_hour,
            down_cost_per_gb=sampler.down_cost_per_gb,
            up_cost_per_gb=sampler.up_cost_per_gb,
            uplink_bytes_per_s=sampler.uplink_bytes_per_s,
            downlink_bytes_per_s=sampler.downlink_bytes_per_s,
            public=sampler.public,
            start_s=start_s,
            departures_per_hour=departures_per_hour,
        )

    # -- tables -----------------------------------------------------------------------------------------------

    def _class_name(self, device_class: str) -> str:
        name = class_among(self._classes, device_class)
        self._classes.setdefault(name, ClassSeen())
        return name

    def _sane(self, what: str, value: float, *, positive: bool = False) -> bool:
        if math.isfinite(value) and (value > 0 or (value == 0 and not positive)):
            return True
        self.ignored[what] += 1
        return False
