"""Which samplers are active: the selection, carried out without flapping.

decide() is called once a publication period, and in between when calls_for_decision() says so. In this order:

    nothing is known yet (no step, no length, no rate), or `activate` is all -> everybody is active
    active samplers are gone and the rest lacks its margin -> others step in at once; none goes to standby
    the learner is measured to wait, LITTLE_DECISIONS times in a row
                                    -> others step in, at least the next cheapest one; none goes to standby
    a set costs less by SAVING, for as many decisions in a row as dwell_decisions() says of the smallest saving
                                    -> it replaces the active set

So a set grows at once and shrinks slowly, and more slowly if there is less to save. The smaller set would have been
enough all the while: whatever it lacked at any of those decisions was added to it. Any change restarts the count, so a
sampler that was just activated stays. Samplers with an unknown rate are tried, a few at a time. So is one sampler of
each unproven class, if its claim makes it cheaper than the dearest active one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from swarm.pay.fleet import MAX_NODES, Demand, Disseminate, Worker
from swarm.pay.prices import fault_of
from swarm.pay.selection import Rules, Search, Selection

SAVING = 0.05  # Smallest relative saving for which samplers are exchanged: each exchange pays for a start

DWELL_DECISIONS = 20
"""Decisions in a row for which a cheaper set must save money: the largest need that 10 % noise in every figure shows
within that time is hardly ever exceeded later."""

NOISE_SAVING = 0.15
"""Savings up to this may be noise and need DWELL_DECISIONS in a row; larger ones fewer, by the square of the ratio."""

QUICKEST_DECISIONS = 4  # Fewest decisions, whatever the saving: a newcomer's figures come from its first beats

LITTLE_DECISIONS = 3  # Decisions in a row before which the learner waited: one or two may be a stall
SETTLING_DECISIONS = 4  # More of them after a change: the median of the last steps still tells of the time before

WORTH_ADDING = 0.03
"""Idle share that more samplers must save if the target cannot be met: predictions of similar sets differ by that."""

OVER_BUDGET = 1.02
"""Cost of the active set, relative to the budget, above which it is given up at once: the price of traffic varies with
the learner's step time. A newly chosen set is always within the budget."""

MEASURED_STEP = 0.05  # By which the margin grows, until one more steps in, if the set should have been enough
MAX_MEASURED = 0.5  # Largest such correction: beyond it, more samplers do not cure the cause
MEASURED_KEPT = 0.98  # Factor on the correction after each decision at which the learner was not idle: halved in 35

LOST_SHARE = 0.02
"""Share of the active samplers whose loss since the last decision calls for another one early. It is below the smallest
margin. A decision about a thousand samplers takes half a second of computing."""

GATHER_S = 10.0  # Longest wait from the news to that decision: if a class vanishes, many more are gone by then
GATHER_PART = 0.05  # The same as a part of a publication period

LATE_PERIODS = 2.0
"""Publication periods after which a decision is due without a new version: the learner may wait for something that
never comes."""

PROBES = 2  # Samplers of unknown rate that are tried at a time, if PROBE_PART of the active ones is not more
PROBE_PART = 0.1
PROBE_S = 1800.0  # How long one is tried: enough for a cold start of ten minutes and a slow card's longest completion
NOTHING_KNOWN = "nothing is known yet: everybody is tried"
TRIED = "your rate is not known yet: it is being measured"
PROVES = "no node of your class has been measured yet, so yours is tried"
UNMEASURED = "your rate is not known yet: you are tried when others have been"
DEAR = "your price is more than the whole budget per hour"
SUFFICE = "the active samplers suffice"
RESUMED = "you were active before the learner was restarted"
PATIENCE = "with you the same would cost less: you step in when that has lasted"


class Activation:
    """`active` is the set after the last decision, `selection` its figures (None until anything is known). Samplers of
    that set are leased work. The others keep their weights current and finish their work; `reason` says why they wait.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._active: set[str] = set()
        self._reasons: dict[str, str] = {}
        self._tried_at: dict[str, float] = {}
        self._probes: frozenset[str] = frozenset()
        self._cheaper_set: tuple[str, ...] | None = None
        self._saved = 0
        self._least_saving = math.inf
        self._little = 0
        self._started_at = 0.0
        self._measured = 0.0
        self.selection: Selection | None = None

    @property
    def active(self) -> frozenset[str]:
        return frozenset(self._active)

    def resume(self, active: Collection[str]) -> None:
        """Take these as active already, as before a restart."""
        assert not self._active
        self._active = set(active)
        self._reasons = dict.fromkeys(active, RESUMED)

    def reason(self, node: str) -> str:
        """Return in one line why `node` is active or waits, or "" if no decision has considered it."""
        return self._reasons.get(node, "")

    def calls_for_decision(self, *, gone: Collection[str], came: int) -> bool:
        """Return whether a decision is due in gather_s() rather than with the next version: LOST_SHARE of the active
        samplers are `gone`. The `came` newcomers count too while the active set does not suffice."""
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
    ) -> None:
        """Choose who is active from now on. `workers` are all present samplers, at most MAX_NODES, with unique names;
        `idle_share` is the learner's measured share over the last steps, None if it is unknown."""
        names = {worker.name for worker in workers}
        assert len(names) == len(workers) <= MAX_NODES
        lost = self._active.difference(worker.name for worker in workers if fault_of(worker) is None)
        self._active &= names
        measured = [worker for worker in workers if worker.rollouts_per_s != 0]
        if demand is None or not measured:
            tried = self._tried(workers, len(workers), self._budget, now=now)
            self._become(dict.fromkeys(tried, NOTHING_KNOWN), {w.name: self._untried(w) for w in workers})
            return
        waits = None if idle_share is None else idle_share > self._rules.idle_target
        self._count_waits(waits, now=now)
        chosen, reason = self._choose(demand, measured, disseminate, lost=bool(lost))
        unknown = [worker for worker in workers if worker.rollouts_per_s == 0]
        # Those that are being tried go on: the first rate that is known must not send the others away.
        trying = sum(self._turn(worker.name, now=now)[0] == 0 for worker in unknown)
        room = max(PROBES, round(PROBE_PART * len(chosen.active)), trying)
        if self._rules.activate == "all":
            room = len(unknown)
        unproven = self._worth_trying(workers, chosen, now=now)
        tried = self._tried([*unknown, *unproven], room, self._budget - chosen.cost_per_hour, now=now)
        self._tried_at = {node: at for node, at in self._tried_at.items() if node in names}
        self._probes = frozenset(tried).intersection(worker.name for worker in unproven)
        why = {name: PROVES if name in self._probes else TRIED for name in tried}
        waiting = {w.name: self._untried(w) if w.rollouts_per_s == 0 else SUFFICE for w in workers}
        new = set(chosen.active) - self._active
        starts_s = (worker.start_s for worker in workers if worker.name in new)
        self._started_at = max(self._started_at, now + max(starts_s, default=0.0))
        self._become({**dict.fromkeys(chosen.active, reason), **why}, {**waiting, **chosen.standby})

    # -- the choice ------------------------------------------------------------------------------------------

    def _choose(
        self, demand: Demand, workers: Sequence[Worker], disseminate: Disseminate, *, lost: bool
    ) -> tuple[Selection, str]:
        """Return which samplers of known rate are active, and the reason for newly activated ones."""
        present = {worker.name for worker in workers}
        active = frozenset(self._active & present) - self._probes

        search = Search(demand, workers, disseminate, self._rules, kept=active)
        best = search.select(more_margin=self._measured)
        if self._rules.activate == "all":
            return self._settled(best, "all samplers are wanted")
        if not active:
            return self._settled(best, best.why)
        held = search.assess(active, best.least_rollouts_per_s)
        if held.cost_per_hour > self._budget * OVER_BUDGET:
            return self._settled(best, "the others cost more than the budget")
        if (grown := self._grown(search, held, best, lost=lost)) is not None:
            return self._settled(grown, f"{'samplers were lost' if lost else 'the learner waits'}: you step in")
        cheaper = self._cheaper(search, held, best)
        if cheaper is not None:
            return self._settled(cheaper, f"with you the same costs less: {best.why}")
        patience = dict.fromkeys(present.intersection(best.active), PATIENCE)
        self.selection = replace(
            held, standby={n: w for n, w in (patience | best.standby).items() if n not in held.active}
        )
        return self.selection, ""

    def _count_waits(self, waits: bool | None, *, now: float) -> None:
        """Count decisions before which the learner waited, but not while newly activated samplers are starting."""
        if waits and now >= self._started_at:
            self._little += 1
        elif waits is False:
            self._little = min(0, self._little + 1)
            self._measured *= MEASURED_KEPT

    def _grown(self, search: Search, held: Selection, best: Selection, *, lost: bool) -> Selection | None:
        """Return the active set with others added, if it lacks any. If the closed form thinks that it lacks none, the
        margin grows until the next cheapest is added."""
        short = not held.has_margin and held.useful_rollouts_per_s < best.useful_rollouts_per_s
        if not (lost and short) and self._little < LITTLE_DECISIONS:
            return None
        margin, present = self._measured, set(held.active)
        grown = search.select(fixed=present, more_margin=margin)
        while best.feasible and not present < set(grown.active) and margin < MAX_MEASURED:
            margin += MEASURED_STEP
            grown = search.select(fixed=present, more_margin=margin)
        saved = held.prediction.idle_share - grown.prediction.idle_share
        if not present < set(grown.active) or not (best.feasible or saved > WORTH_ADDING):
            return None
        self._measured = margin
        return grown

    @property
    def _budget(self) -> float:
        return float("inf") if self._rules.budget_per_hour is None else self._rules.budget_per_hour

    def _cheaper(self, search: Search, held: Selection, best: Selection) -> Selection | None:
        """Return the set that has saved enough for enough decisions, grown by whatever it would have lacked, or None.

        It stays the same set and is judged by new figures each time: the set that looks cheapest at one decision owes
        part of that to errors in its favour.
        """
        tried = best
        if self._cheaper_set is not None:
            tried = search.assess(self._cheaper_set, best.least_rollouts_per_s)
            if not tried.has_margin:
                tried = search.select(fixed=self._cheaper_set, more_margin=self._measured)
        saving = relative_saving(tried.cost_per_hour, held.cost_per_hour)
        worse = held.feasible and not tried.feasible
        if worse or saving <= SAVING or not tried.active:
            self._cheaper_set, self._saved, self._least_saving = None, 0, math.inf
            return None
        self._cheaper_set, self._saved = tried.active, self._saved + 1
        self._least_saving = min(self._least_saving, saving)
        return tried if self._saved >= dwell_decisions(self._least_saving) else None

    def _settled(self, selection: Selection, reason: str) -> tuple[Selection, str]:
        self._cheaper_set, self._saved, self._little = None, 0, -SETTLING_DECISIONS
        self._least_saving = math.inf
        self.selection = selection
        return selection, reason

    # -- who is tried -----------------------------------------------------------------------------------------

    def _worth_trying(self, workers: Sequence[Worker], chosen: Selection, *, now: float) -> list[Worker]:
        """Return one sampler, the next in turn, of each class that is unproven and not among the chosen ones, if its
        rent per claimed rollout is at most the highest rent per rollout of a chosen sampler. Otherwise a class that is
        much faster than all known ones would be undervalued for ever."""
        shown = {worker.device_class for worker in workers if worker.name in chosen.active}
        most = max((_rent_per_rollout(worker) for worker in workers if worker.name in chosen.active), default=0.0)
        turns: dict[str, Worker] = {}
        for worker in sorted(workers, key=lambda one: (*self._turn(one.name, now=now), _rent_per_rollout(one))):
            is_open = worker.claimed_rollouts_per_s > 0 and worker.device_class not in shown and not fault_of(worker)
            if is_open and _rent_per_rollout(worker) <= most:
                turns.setdefault(worker.device_class, worker)
        return list(turns.values())

    def _tried(self, unknown: Sequence[Worker], most: int, budget_per_hour: float, *, now: float) -> list[str]:
        """Return at most `most` of `unknown`, within the budget. Samplers being tried come first, then those never
        tried, the cheapest first. One that gave no rate within PROBE_S makes room for the next."""
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
        """Return a sort key: samplers being tried, then new ones, then the others by when they were tried."""
        at = self._tried_at.get(node)
        if at is None:
            return (1, 0.0)
        return (0, at) if node in self._active and now - at < PROBE_S else (2, at)

    # -- what changes -----------------------------------------------------------------------------------------

    def _become(self, wanted: Mapping[str, str], standby: Mapping[str, str]) -> None:
        """Leave exactly `wanted` active. Both maps hold reasons; who was active before keeps its own."""
        kept = {node: self._reasons[node] for node in wanted if node in self._active}
        self._active, self._reasons = set(wanted), {**standby, **wanted, **kept}


def relative_saving(cost: float, before: float) -> float:
    """Return 1 - cost / before, or 0 if `before` is 0."""
    return 1.0 - cost / before if before > 0 else 0.0


def dwell_decisions(saving: float) -> float:
    """Return for how many decisions in a row a set must save at least this much: DWELL_DECISIONS (NOISE_SAVING /
    saving)^2, between QUICKEST_DECISIONS and DWELL_DECISIONS."""
    return max(QUICKEST_DECISIONS, DWELL_DECISIONS * min(1.0, NOISE_SAVING / saving) ** 2)


def gather_s(period_s: float) -> float:
    """Return the seconds from news to the decision that it requires: min(GATHER_S, GATHER_PART period_s). The wait lets
    one decision answer all news of one cause."""
    return min(GATHER_S, GATHER_PART * period_s)


def _rent_per_rollout(worker: Worker) -> float:
    """Return its rent per rollout, by its claim if it is unproven; infinite without a rate."""
    rate = worker.claimed_rollouts_per_s or worker.rollouts_per_s
    return worker.cost_per_hour / rate if rate > 0 else math.inf
