"""Which samplers are active: the selection, carried out without flapping.

decide() is called once a publication period, and in between where calls_for_decision() says so. In this order:

    nothing known yet (no step, no length, no rate), or `activate` all -> everybody is active
    samplers that were active are gone and the rest lacks its margin   -> others step in, at once; nobody is stood by
    the active ones are predicted to leave the learner idle beyond the goal, LITTLE_DECISIONS times in a row; or it is
    measured to wait although they should suffice, and a larger margin is set
                                                                       -> others step in; nobody is stood by
    a set costs less by SAVING, for as many decisions in a row as dwell_decisions() says of the least of them
                                                                       -> it is exchanged for that

So a set grows at once and shrinks slowly, the slower the less there is to save, and what it shrinks to would have been
enough all the while: what it lacked at any of those decisions was added to it. After any change the count begins anew:
a sampler that was just activated stays. Those whose rate is unknown are tried, a few at a time, and one of each class
that nobody has proven, if by what it claims it would cost less than the dearest of the active.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import swarm.capacity.model as capacity_model
from swarm.capacity.fleet import Demand, Disseminate, Worker
from swarm.capacity.prices import fault_of
from swarm.capacity.selection import Model, Rules, Search, Selection

SAVING = 0.05  # Least relative saving for which samplers are exchanged: each exchange pays a start

DWELL_DECISIONS = 20
"""Decisions for which a cheaper set must save: what noise of 10 % in every figure asks for at most in so many, it
hardly ever exceeds later."""

NOISE_SAVING = 0.15
"""Least saving in a row up to which that may be noise: what is larger needs fewer decisions, by the square of it."""

QUICKEST_DECISIONS = 4  # However large: figures of a sampler that just came are of its first beats

LITTLE_DECISIONS = 3
"""Decisions in a row that must find the learner idle for want of samplers, where none was lost: noise gives two."""

BEST_EFFORT_SLACK = 0.03
"""Idle share beyond the goal that is borne where the target can not be met: at the edge of what is possible predictions
differ by so much between like sets."""

OVER_BUDGET = 1.02
"""Cost of the active set over the budget at which it is given up at once: the price of traffic wavers with the
learner's step time. What is chosen is always within the budget."""

EFFORT_DECISIONS = 8
"""Decisions after which the model is asked again what a rollout's worth of samplers is; between them it only checks."""

MORE_PART = 0.1
"""Of those who were there when the model was asked last: so many newcomers, and what could not be met then may be."""

MEASURED_STEP = 0.05  # By how much the margin grows when the learner is idle although the model says that it is not
MAX_MEASURED = 0.5  # Largest such correction: beyond it the cause is none that more samplers mend

MEASURE_AFTER = 6
"""Decisions after a change before what is measured is held against the model: starts, and the median of the last steps,
take as long."""

MEASURED_KEPT = 0.98  # What is left of it after a decision at which the learner was not idle: halved in 35

LOST_SHARE = 0.02
"""Of the active samplers, gone since the last decision, for which another one does not wait for the period to end: less
than the least margin that is kept. A decision about a thousand samplers takes half a second of computing."""

GATHER_S = 10.0  # From the news to that decision, at most: of a class that vanishes many more are gone by then
GATHER_PART = 0.05  # Of a publication period, the same

LATE_PERIODS = 2.0
"""Publication periods after which a decision is due though no version was published: the learner waits, and what it
waits for may never come."""

PROBES = 2  # Samplers of unknown rate that are tried at a time, or PROBE_PART of those that are active
PROBE_PART = 0.1
PROBE_S = 1800.0  # How long one is tried: a cold start of ten minutes and the longest completion of a slow card fit
MAX_NODES = 4096  # Samplers that a decision considers; the bound of the estimator's table
NOTHING_KNOWN = "nothing is known yet: everybody is tried"
TRIED = "your rate is not known yet: it is being measured"
PROVES = "nobody of your class has shown yet what it can do: you are tried"
UNMEASURED = "your rate is not known yet: you are tried when others have been"
DEAR = "your price is more than the whole budget per hour"
SUFFICE = "the active samplers suffice"
RESUMED = "you were active before the learner was restarted"
PATIENCE = "with you the same would cost less: you step in when that has lasted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Activated:
    """Lease work to `node` from now on."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoodBy:
    """Lease nothing more to `node`; it keeps its weights up to date, finishes what it has, and is told why it waits."""

    node: str
    reason: str


Change = Activated | StoodBy


class Activation:
    """`active` is what the last decision left, `selection` its figures (None until anything was known)."""

    def __init__(self, rules: Rules, *, model: Model = capacity_model) -> None:
        self._rules = rules
        self._model = model
        self._active: set[str] = set()
        self._reasons: dict[str, str] = {}
        self._tried_at: dict[str, float] = {}
        self._probes: frozenset[str] = frozenset()
        self._cheaper_set: tuple[str, ...] | None = None
        self._saved = 0
        self._least_saving = math.inf
        self._little = 0
        self._unchanged = 0
        self._started_at = 0.0
        self._measured = 0.0
        self._decisions = 0
        self._asked: tuple[object, ...] = ()
        self._asked_of: frozenset[str] = frozenset()
        self._best: Selection | None = None
        self.selection: Selection | None = None

    @property
    def active(self) -> frozenset[str]:
        return frozenset(self._active)

    def resume(self, active: Collection[str]) -> None:
        """These are active already, as from before a restart."""
        assert not self._active
        self._active = set(active)
        self._reasons = dict.fromkeys(active, RESUMED)

    def reason(self, node: str) -> str:
        """Why it is active or waits, in one line; an empty string for one that no decision has considered."""
        return self._reasons.get(node, "")

    def calls_for_decision(self, *, gone: Collection[str], came: int) -> bool:
        """Whether a decision is due gather_s() from now instead of with the next version: since the last one, so many
        of the active are `gone`, or so many `came` while those that are there do not suffice."""
        news = len(self._active.intersection(gone))
        if self.selection is None or not (self.selection.feasible and self.selection.has_margin):
            news += came
        return news > 0 and news >= LOST_SHARE * len(self._active)

    def decide(
        self,
        demand: Demand | None,
        workers: Sequence[Worker],
        disseminate: Disseminate,
        *,
        now: float,
        idle_share: float | None = None,
    ) -> list[Change]:
        """What changes. `workers` are all samplers that are there, at most MAX_NODES, with unique names; `idle_share`
        is the learner's as measured over the last steps, None if that is unknown."""
        names = [worker.name for worker in workers]
        assert len(set(names)) == len(names) <= MAX_NODES
        lost = self._active.difference(worker.name for worker in workers if fault_of(worker) is None)
        self._active &= set(names)
        measured = [worker for worker in workers if worker.rollouts_per_s != 0]
        if demand is None or not measured:
            tried = self._tried(workers, len(workers), self._budget, now=now)
            return self._become(names, dict.fromkeys(tried, NOTHING_KNOWN), {w.name: self._untried(w) for w in workers})
        rules = replace(self._rules, least_margin=self._rules.least_margin + self._measured)
        chosen, reason = self._choose(
            demand, measured, disseminate, rules, now=now, lost=bool(lost), idle_share=idle_share
        )
        unknown = [worker for worker in workers if worker.rollouts_per_s == 0]
        room = max(PROBES, round(PROBE_PART * len(chosen.active)))
        if rules.activate == "all":
            room = len(unknown)
        unproven = self._worth_trying(workers, chosen, now=now)
        tried = self._tried([*unknown, *unproven], room, self._budget - chosen.cost_per_hour, now=now)
        self._tried_at = {node: at for node, at in self._tried_at.items() if node in names}
        self._probes = frozenset(tried).intersection(worker.name for worker in unproven)
        why = {name: PROVES if name in self._probes else TRIED for name in tried}
        waiting = {w.name: self._untried(w) if w.rollouts_per_s == 0 else SUFFICE for w in workers}
        changes = self._become(names, {**dict.fromkeys(chosen.active, reason), **why}, {**waiting, **chosen.standby})
        new = {change.node for change in changes if isinstance(change, Activated)}.intersection(chosen.active)
        starts_s = (worker.start_s for worker in workers if worker.name in new)
        self._started_at = max(self._started_at, now + max(starts_s, default=0.0))
        return changes

    # -- the choice ------------------------------------------------------------------------------------------

    def _choose(
        self,
        demand: Demand,
        workers: Sequence[Worker],
        disseminate: Disseminate,
        rules: Rules,
        *,
        now: float,
        lost: bool,
        idle_share: float | None,
    ) -> tuple[Selection, str]:
        """Who is to be active of those whose rate is known, and why those that are not yet."""
        present = {worker.name for worker in workers}
        active = frozenset(self._active & present) - self._probes
        search = Search(demand, workers, disseminate, rules, kept=active, model=self._model)
        best = self._cheapest(search, (demand, tuple(workers), rules, active), present=frozenset(present))
        if rules.activate == "all":
            return self._settled(best, "all samplers are wanted")
        if not active:
            return self._settled(best, best.why)
        held = search.assess(active, after=best)
        if held.cost_per_hour > self._budget * OVER_BUDGET:
            return self._settled(best, "the others cost more than the budget")
        waits = idle_share is not None and idle_share > rules.idle_target
        if idle_share is not None:
            self._learn(held, best, waits=waits, started=now >= self._started_at)
        if self._is_little(held, best, lost=lost, waits=waits):
            grown = search.select(fixed=active, after=best)
            if not grown.feasible and best.prediction.idle_share < grown.prediction.idle_share - BEST_EFFORT_SLACK:
                return self._settled(best, "where the learner has to wait, slow samplers make it wait longer")
            if set(held.active) < set(grown.active) or grown.useful_rollouts_per_s > held.useful_rollouts_per_s:
                return self._settled(
                    grown, f"{'samplers were lost' if lost else 'the learner would wait'}: you step in"
                )
        cheaper = self._cheaper(search, held, best)
        if cheaper is not None:
            return self._settled(cheaper, f"with you the same costs less: {best.why}")
        patience = dict.fromkeys(present.intersection(best.active), PATIENCE)
        self.selection = replace(
            held, standby={n: w for n, w in (patience | best.standby).items() if n not in held.active}
        )
        return self.selection, ""

    def _cheapest(self, search: Search, question: tuple[object, ...], *, present: frozenset[str]) -> Selection:
        """The best set; not searched for again while nothing has changed, and the model asked now and then."""
        self._decisions += 1
        if self._best is None or question != self._asked:
            more = len(present - self._asked_of) > MORE_PART * len(self._asked_of)
            fresh = self._best is None or self._decisions % EFFORT_DECISIONS == 0 or (more and not self._best.feasible)
            self._asked_of = present if fresh else self._asked_of
            self._best = search.select(after=None if fresh else self._best)
            self._asked = question
        return self._best

    def _is_little(self, held: Selection, best: Selection, *, lost: bool, waits: bool) -> bool:
        """Whether samplers are added. Where no set meets the target, what is possible is asked for."""
        slack = 0.0 if best.feasible else BEST_EFFORT_SLACK
        idle = held.prediction.idle_share > best.idle_goal + slack
        idle = idle and best.prediction.idle_share < held.prediction.idle_share
        short = not held.has_margin and held.useful_rollouts_per_s < best.useful_rollouts_per_s
        self._little = self._little + 1 if idle or (waits and short) else 0
        return (lost and short) or self._little >= LITTLE_DECISIONS

    @property
    def _budget(self) -> float:
        return float("inf") if self._rules.budget_per_hour is None else self._rules.budget_per_hour

    def _cheaper(self, search: Search, held: Selection, best: Selection) -> Selection | None:
        """The set that would have saved enough, decision by decision, grown by what it would have lacked; else None.

        It stays the same set, judged by new figures each time: what looks cheapest at one decision owes some of that to
        errors in its favour.
        """
        tried = best
        if self._cheaper_set is not None:
            tried = search.assess(self._cheaper_set, after=best)
            if not tried.has_margin:
                tried = search.select(fixed=self._cheaper_set, after=best)
        saving = relative_saving(tried.cost_per_hour, held.cost_per_hour)
        worse = held.feasible and not tried.feasible
        if worse or saving <= SAVING or not tried.active:
            self._cheaper_set, self._saved, self._least_saving = None, 0, math.inf
            return None
        self._cheaper_set, self._saved = tried.active, self._saved + 1
        self._least_saving = min(self._least_saving, saving)
        return tried if self._saved >= dwell_decisions(self._least_saving) else None

    def _settled(self, selection: Selection, reason: str) -> tuple[Selection, str]:
        self._cheaper_set, self._saved, self._little, self._unchanged = None, 0, 0, 0
        self._least_saving = math.inf
        self.selection = selection
        return selection, reason

    def _learn(self, held: Selection, best: Selection, *, waits: bool, started: bool) -> None:
        """Correct the margin by what is measured, where the model says that the learner should not wait; not while
        samplers that were activated just now may still be starting: what they will give is on its way."""
        self._unchanged += started
        if not waits:
            self._measured *= MEASURED_KEPT
        elif best.feasible and held.has_margin and self._unchanged > MEASURE_AFTER:
            self._measured = min(MAX_MEASURED, self._measured + MEASURED_STEP)

    # -- who is tried -----------------------------------------------------------------------------------------

    def _worth_trying(self, workers: Sequence[Worker], chosen: Selection, *, now: float) -> list[Worker]:
        """Of each class that nobody has proven, and of which nobody is chosen, the one whose turn it is: if its rent
        for what it claims is no more than the most that is paid for a chosen one's. Else a class that is much faster
        than all that are known would be undervalued for ever."""
        shown = {worker.device_class for worker in workers if worker.name in chosen.active}
        most = max((_rent_per_rollout(worker) for worker in workers if worker.name in chosen.active), default=0.0)
        turns: dict[str, Worker] = {}
        for worker in sorted(workers, key=lambda one: (*self._turn(one.name, now=now), _rent_per_rollout(one))):
            is_open = worker.claimed_rollouts_per_s > 0 and worker.device_class not in shown and not fault_of(worker)
            if is_open and _rent_per_rollout(worker) <= most:
                turns.setdefault(worker.device_class, worker)
        return list(turns.values())

    def _tried(self, unknown: Sequence[Worker], most: int, budget_per_hour: float, *, now: float) -> list[str]:
        """Of those whose rate is unknown, `most` within the budget: who is being tried goes on, then who was not tried
        yet, the cheapest first. One that gave no rate in PROBE_S makes room for the next."""
        queue = sorted(unknown, key=lambda worker: (*self._turn(worker.name, now=now), worker.cost_per_hour))
        tried: list[str] = []
        for worker in queue:
            if len(tried) < most and fault_of(worker) is None and worker.cost_per_hour <= budget_per_hour:
                budget_per_hour -= worker.cost_per_hour
                tried.append(worker.name)
        for node in tried:
            if self._turn(node, now=now)[0] > 0:
                self._tried_at[node] = now
        return tried

    def _untried(self, worker: Worker) -> str:
        return fault_of(worker) or (DEAR if worker.cost_per_hour > self._budget else UNMEASURED)

    def _turn(self, node: str, *, now: float) -> tuple[int, float]:
        """Who is being tried, who is new, and then the others by when they were: a pair that ascends."""
        at = self._tried_at.get(node)
        if at is None:
            return (1, 0.0)
        return (0, at) if node in self._active and now - at < PROBE_S else (2, at)

    # -- what changes -----------------------------------------------------------------------------------------

    def _become(self, names: Sequence[str], wanted: Mapping[str, str], standby: Mapping[str, str]) -> list[Change]:
        """The changes, in the order of `names`, that leave those in `wanted` active; both maps say why."""
        changes: list[Change] = []
        reasons: dict[str, str] = {}
        for node in names:
            if node in wanted:
                stays = node in self._active
                reasons[node] = self._reasons[node] if stays else wanted[node]
                if not stays:
                    changes.append(Activated(node=node, reason=reasons[node]))
            else:
                reasons[node] = standby[node]
                if node in self._active:
                    changes.append(StoodBy(node=node, reason=reasons[node]))
        self._active, self._reasons = set(wanted), reasons
        return changes


def relative_saving(cost: float, before: float) -> float:
    """Of the price `before`: 1 - cost / before; 0 of nothing."""
    return 1.0 - cost / before if before > 0 else 0.0


def dwell_decisions(saving: float) -> float:
    """Decisions in a row for which a set must save at least so much: DWELL_DECISIONS (NOISE_SAVING / saving)^2, at most
    DWELL_DECISIONS and at least QUICKEST_DECISIONS."""
    return max(QUICKEST_DECISIONS, DWELL_DECISIONS * min(1.0, NOISE_SAVING / saving) ** 2)


def gather_s(period_s: float) -> float:
    """Seconds from news that call for a decision until it is made, so that news of the same cause are answered
    together: min(GATHER_S, GATHER_PART period_s)."""
    return min(GATHER_S, GATHER_PART * period_s)


def _rent_per_rollout(worker: Worker) -> float:
    """By what it claims, where that is all that is known; infinite without a rate."""
    rate = worker.claimed_rollouts_per_s or worker.rollouts_per_s
    return worker.cost_per_hour / rate if rate > 0 else math.inf
