"""Running estimates of the model's inputs, from what the swarm measures.

Every figure is a median over a bounded window, so one stall moves nothing. A sampler's rate has two sources: its own
claim, in every beat, and the rollouts accepted from it while it was active. The second understates what it can do,
since pacing makes samplers wait: all of them, and the slowest most, which are needed least. So a claim counts up to
CLAIM_FACTOR times the sampler's accepted rate, scaled as for the others. Before a sampler has proven anything, its
claim counts up to the rate of the proven samplers of its class, present or former. In an unproven class a claim counts
up to CLAIM_FACTOR times the rate of the best class, and the claim itself is passed on, so that one of the class may be
tried. A claim of 1e9 gains nothing, and a sampler that gives nothing for JUDGED_S counts for nothing.

Figures that make no sense change nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median, median_low

from swarm.pay.fleet import MAX_NODES, Demand, Lengths, Terms, Worker
from swarm.pay.prices import HOUR_S
from swarm.types import Freshness

MAX_CLASSES = 256  # Device classes told apart; nodes name their own, so any further class counts as OTHER
OTHER = "other"

CLAIMS = 9  # Beats whose claims are remembered: four may be nonsense
CLASS_WINDOW = 33  # Starts of a class that are remembered, and rates of its samplers that left

STEPS = 15  # Steps whose training time is remembered: seven may have been disturbed, and a new batch length shows soon

IDLE_STEPS = 9
LENGTHS = 4096  # Completion lengths that are remembered: forty lie above the 99th percentile
LENGTHS_A_CALL = 256  # Lengths taken from one report: one sampler's batch must not crowd out all others

PROVEN_ROLLOUTS = 16  # Accepted rollouts after which a sampler's rate counts as proven: the count is then good to 25 %.

PROVEN_HALF_S = 3600.0
"""Active seconds after which older work counts half: a card that became slower shows within an hour or two."""

MIN_RATE = 1e-6
"""Rollouts per second below which a claim is ignored: one in eleven days. The model cannot divide by less."""

CLAIM_FACTOR = 2.0
"""How far a sampler's claim may exceed its accepted rollouts, compared with others: places, lengths and luck differ by
less."""

JUDGED_S = 3600.0
"""Active seconds after which a sampler may be judged although it never gave PROVEN_ROLLOUTS, if others with its claim
would have. A cold start takes a quarter of this."""

PRIOR_HOURS = 24.0
"""Sampler-hours at the start value that departures begin with, so that a class without a departure still has a rate.
"""

REMEMBERED_HOURS = 1000.0  # Sampler-hours of a class after which its history is halved


@dataclass(frozen=True, slots=True, kw_only=True)
class StartValues:
    """What is assumed until it is observed. If a field is None, there is no demand before that.

    `start_s`: cold start of marketplace and home samplers, 10 minutes in the median. `departures_per_hour`: between
    marketplace hosts (1 in 150 h) and homes (1 in 24 h).
    """

    train_step_s: float | None = None
    lengths: Lengths | None = None
    start_s: float = 600.0
    departures_per_hour: float = 0.02


@dataclass(slots=True, kw_only=True)
class SamplerSeen:
    """What is known of one sampler. `profile` is what it says of itself, except its rate. `active_since` is None on
    standby; `began_at` is set from its activation until its first rollout."""

    profile: Worker
    joined_at: float
    claims: deque[float] = field(default_factory=partial(deque, maxlen=CLAIMS))
    active_since: float | None = None
    began_at: float | None = None
    active_s: float = 0.0
    accepted: float = 0.0
    proven: bool = False

    @property
    def device_class(self) -> str:
        return self.profile.device_class

    @property
    def claim(self) -> float | None:
        return median(self.claims) if self.claims else None

    def active_until(self, now: float) -> float:
        """Return its active seconds in all."""
        return self.active_s + (0.0 if self.active_since is None else max(0.0, now - self.active_since))

    def credible(self, usual: float, now: float) -> float | None:
        """Return its claim, limited by what it gave, of which proven samplers usually claim `usual` times as much. None
        if it cannot be judged: it would have to be proven by now if it worked like these."""
        # Time without output counts too: otherwise a sampler that stopped would be believed for ever.
        claim, active_s = self.claim, self.active_until(now)
        if claim is None or active_s == 0:
            return None
        if not self.proven and (active_s < JUDGED_S or claim * active_s / usual < PROVEN_ROLLOUTS):
            return None
        return max(MIN_RATE if self.proven else 0.0, min(claim, CLAIM_FACTOR * usual * self.accepted / active_s))


@dataclass(slots=True, kw_only=True)
class ClassSeen:
    """What is known of a device class. `hours` are of departed samplers; those present are added when asked."""

    hours: float = 0.0
    vanished: float = 0.0
    starts_s: deque[float] = field(default_factory=partial(deque, maxlen=CLASS_WINDOW))
    proven: deque[float] = field(default_factory=partial(deque, maxlen=CLASS_WINDOW))


def class_among(known: Collection[str], device_class: str) -> str:
    """Return the name under which a node of `device_class` is kept, given the `known` classes."""
    return device_class if device_class in known or len(known) < MAX_CLASSES - 1 else OTHER


class Estimator:
    """Times are monotonic seconds. Reports about a node that has not joined, or has left, are ignored."""

    def __init__(self, start: StartValues) -> None:
        self._start = start
        self._samplers: dict[str, SamplerSeen] = {}
        self._classes: dict[str, ClassSeen] = {}
        self._train_s: deque[float] = deque(maxlen=STEPS)
        self._idle: deque[float] = deque(maxlen=IDLE_STEPS)
        self._lengths: deque[int] = deque(maxlen=LENGTHS)
        self._usual = 0.0  # Claims of proven samplers over what was accepted of them, in the median; 0: unknown

    # -- what the learner sees --------------------------------------------------------------------------------

    def trained(self, train_step_s: float) -> None:
        """A step took this long."""
        if 0 < train_step_s < math.inf:
            self._train_s.append(train_step_s)

    def idle(self, idle_share: float) -> None:
        """The learner waited for this share of a step."""
        if 0 <= idle_share <= 1:
            self._idle.append(idle_share)

    def generated(self, node: str, tokens: Sequence[int], *, now: float) -> None:
        """Completions of these lengths were accepted from `node`."""
        sampler = self._samplers.get(node)
        if sampler is None or any(count < 1 for count in tokens):
            return
        self._lengths.extend(tokens[:LENGTHS_A_CALL])
        if sampler.began_at is not None and tokens:
            # Work during the start says nothing about its rate: count from here on.
            self._classes[sampler.device_class].starts_s.append(now - sampler.began_at)
            sampler.began_at, sampler.active_since = None, now
            return
        self._count_active(sampler, now)
        sampler.accepted += len(tokens)
        sampler.proven = sampler.proven or sampler.accepted >= PROVEN_ROLLOUTS

    # -- what becomes of samplers -----------------------------------------------------------------------------

    def joined(self, node: str, terms: Terms, *, now: float) -> None:
        """A sampler is present, on standby. Price 0 is a volunteer. For a known sampler only the prices change."""
        sampler = self._samplers.get(node)
        if sampler is None:
            if len(self._samplers) >= MAX_NODES:
                return
            name = class_among(self._classes, terms.device_class)
            self._classes.setdefault(name, ClassSeen())
            profile = Worker(name=node, device_class=name, rollouts_per_s=0.0)
            sampler = self._samplers[node] = SamplerSeen(profile=profile, joined_at=now)
        hourly, down, up = terms.prices
        sampler.profile = replace(sampler.profile, cost_per_hour=hourly, down_cost_per_gb=down, up_cost_per_gb=up)

    def rate(self, node: str, rollouts_per_s: float, samples_at_once: int, lockstep: bool) -> None:
        """Take a sampler's claimed rate at full load; its places are filled together (`lockstep`) or one by one."""
        sampler = self._samplers.get(node)
        if sampler is not None and MIN_RATE <= rollouts_per_s < math.inf and samples_at_once >= 1:
            sampler.claims.append(rollouts_per_s)
            sampler.profile = replace(sampler.profile, samples_at_once=samples_at_once, lockstep=lockstep)

    def link(self, node: str, uplink_bytes_per_s: float, downlink_bytes_per_s: float, public: bool) -> None:
        """Take the measured speeds of a sampler's links; 0 is unknown."""
        sampler = self._samplers.get(node)
        if sampler is not None and 0 <= uplink_bytes_per_s < math.inf and 0 <= downlink_bytes_per_s < math.inf:
            sampler.profile = replace(
                sampler.profile,
                uplink_bytes_per_s=uplink_bytes_per_s,
                downlink_bytes_per_s=downlink_bytes_per_s,
                public=public,
            )

    def activated(self, node: str, *, now: float) -> None:
        """The sampler is given work from now on."""
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
        """The sampler is gone, without notice if it `vanished`."""
        sampler = self._samplers.get(node)
        if sampler is None:
            return
        group = self._classes[sampler.device_class]
        if sampler.proven and not self._usual:
            self._believed(now)
        # By the last estimates: when thousands leave together, each must not cost a pass over all others.
        if sampler.proven and (rate := sampler.credible(self._usual, now)) is not None:
            group.proven.append(rate)
        del self._samplers[node]
        group.hours += max(0.0, now - sampler.joined_at) / HOUR_S
        group.vanished += vanished
        if group.hours > REMEMBERED_HOURS:
            group.hours, group.vanished = group.hours / 2, group.vanished / 2

    # -- the estimates ----------------------------------------------------------------------------------------

    def workers(self, now: float) -> list[Worker]:
        """Return all samplers. `start_s` is the time from activation to the first accepted rollout, including its
        generation. A rate of 0 is unknown: neither the sampler nor a proven one of its class has a credible rate."""
        believed = self._believed(now)
        proven = self._proven_classes(believed)
        rates = self._rates(believed, proven)
        present = self._present_hours(now)
        departures = {
            name: (group.vanished + self._start.departures_per_hour * PRIOR_HOURS)
            / (group.hours + present.get(name, 0.0) + PRIOR_HOURS)
            for name, group in self._classes.items()
        }
        starts_s = {
            name: median(group.starts_s) if group.starts_s else self._start.start_s
            for name, group in self._classes.items()
        }
        workers = []
        for node, sampler in self._samplers.items():
            name = sampler.device_class
            is_proven = not proven or name in proven
            workers.append(
                replace(
                    sampler.profile,
                    rollouts_per_s=rates[node],
                    claimed_rollouts_per_s=0.0 if is_proven else sampler.claim or 0.0,
                    start_s=starts_s[name],
                    departures_per_hour=departures[name],
                )
            )
        return workers

    def demand(
        self,
        *,
        groups_per_step: int,
        group_size: int,
        publish_every_steps: int,
        max_staleness: int,
        freshness: Freshness,
    ) -> Demand | None:
        """Return what the learner needs, or None while no step or no length is known."""
        lengths = self.lengths()
        train_step_s = self.train_step_s()
        if lengths is None or train_step_s is None:
            return None
        return Demand(
            train_step_s=train_step_s,
            groups_per_step=groups_per_step,
            group_size=group_size,
            publish_every_steps=publish_every_steps,
            max_staleness=max_staleness,
            lengths=lengths,
            freshness=freshness,
        )

    def lengths(self) -> Lengths | None:
        """Return the lengths of accepted completions, or None if they are neither observed nor assumed."""
        return Lengths.of(self._lengths) if self._lengths else self._start.lengths

    def train_step_s(self) -> float | None:
        """Return the training time of a step, or None if it is neither observed nor assumed."""
        return median(self._train_s) if self._train_s else self._start.train_step_s

    def idle_share(self) -> float | None:
        """Return the idle share over the last steps, or None before the first."""
        return median(self._idle) if self._idle else None

    def _present_hours(self, now: float) -> dict[str, float]:
        hours: dict[str, float] = {}
        for sampler in self._samplers.values():
            spent = max(0.0, now - sampler.joined_at) / HOUR_S
            hours[sampler.device_class] = hours.get(sampler.device_class, 0.0) + spent
        return hours

    # -- rates ------------------------------------------------------------------------------------------------

    def _rates(self, believed: Mapping[str, float], usual: Mapping[str, float]) -> dict[str, float]:
        """Return each sampler's rate: its claim, limited as the head of this file says. `usual` are the classes'."""
        most = CLAIM_FACTOR * max(usual.values()) if usual else math.inf
        rates = {}
        for node, sampler in self._samplers.items():
            claim = sampler.claim
            if node in believed:
                rates[node] = believed[node]
            elif claim is None:
                rates[node] = usual.get(sampler.device_class, 0.0)
            else:
                rates[node] = min(claim, usual.get(sampler.device_class, most))
        return rates

    def _proven_classes(self, believed: Mapping[str, float]) -> dict[str, float]:
        """Return the rate of each proven class: its present proven samplers, else its former ones. A sampler that gives
        nothing says nothing about its class: it may still be fetching its first version."""
        by_class: dict[str, list[float]] = {}
        for node, own in believed.items():
            if self._samplers[node].proven:
                by_class.setdefault(self._samplers[node].device_class, []).append(own)
        gone = {name: median(group.proven) for name, group in self._classes.items() if group.proven}
        return gone | {name: median_low(rates) for name, rates in by_class.items()}

    def _believed(self, now: float) -> dict[str, float]:
        """Return the claims of samplers that can be judged, each limited by its own accepted rollouts: the proven
        samplers, and those that would be proven by now if they worked like these."""
        excess = [
            claim * active_s / sampler.accepted
            for sampler in self._samplers.values()
            if sampler.proven and (claim := sampler.claim) is not None and (active_s := sampler.active_until(now)) > 0
        ]
        if not excess:
            return {}
        self._usual = median_low(excess)
        rates = {node: sampler.credible(self._usual, now) for node, sampler in self._samplers.items()}
        return {node: rate for node, rate in rates.items() if rate is not None}

    def _count_active(self, sampler: SamplerSeen, now: float) -> None:
        if sampler.active_since is None:
            return
        sampler.active_s, sampler.active_since = sampler.active_until(now), now
        if sampler.proven and sampler.active_s > PROVEN_HALF_S:
            sampler.active_s, sampler.accepted = sampler.active_s / 2, sampler.accepted / 2
