"""Which samplers are active, and what the run costs: the shell around estimator, activation and cost book.

A decision goes like this: read the swarm's measurements on the event loop, choose in a thread, carry out the choice on
the loop again. Only one decision runs at a time. There is one after each publication period, and one in between when
the activation says that arrivals and departures call for it. Decisions are rarer where they would take more than a
fifth of a core.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from heapq import nlargest
from statistics import median
from typing import Any, Literal

from swarm.bounded import Bounded
from swarm.broadcast.service import BroadcastService
from swarm.lead.publication import InstallTracker
from swarm.node.network import NodeNetwork
from swarm.pay.activation import LATE_PERIODS, Activation, gather_s
from swarm.pay.cost import CostBook, CostFigures
from swarm.pay.delivery import disseminate_by, measured_first, sustained
from swarm.pay.estimator import Estimator, StartValues
from swarm.pay.fleet import MAX_NODES, Disseminate, Terms
from swarm.pay.selection import Rules
from swarm.rollout.api import RolloutService
from swarm.rollout.journal.entries import BoundSet
from swarm.rollout.messages import Offer
from swarm.rollout.tally import SamplerWatch
from swarm.run.run import Run
from swarm.types import NodeId, VersionId

TICK_S = 1.0  # How often the cost is checked while no step ends
INSTALLS = 9
"""How many installs of a sampler are remembered. Four of nine may stall without moving the median, and one of nine
probably finds the engine idle, so the smallest lag is that of the install alone."""

DECIDING_SHARE = 0.2  # Largest share of a core that decisions may take: they share the event loop's core
WATCHING_SHARE = 0.02  # The same where all samplers are active anyway and a decision only makes a prediction

LEADERS = 100  # Samplers that gave most, as `status` names them

BUDGET_TRIES_NOBODY = "to try any of them costs more than --budget-per-hour, so the learner waits: resume it with more"
"""Said when no rate is known yet and no sampler is active."""


class Provisioning(SamplerWatch):
    """`given` is what samplers gave to earlier lives of the run (rollouts and tokens). `clock` returns monotonic
    seconds. `spent` is set once the run has reached `max_cost`, which may be changed."""

    def __init__(
        self,
        run: Run,
        tracker: InstallTracker,
        network: NodeNetwork,
        broadcast: BroadcastService,
        *,
        given: Mapping[NodeId, tuple[int, int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._config = config = run.config
        self._tracker = tracker
        self._network = network
        self._broadcast = broadcast
        self._before = run.log.spent
        self._absent = frozenset(run.log.absent)
        self._given = {node: ("", *given) for node, given in (given or {}).items()}
        self._clock = clock
        self._estimator = Estimator(StartValues())
        self._book = CostBook(
            learner_cost_per_hour=config.cost_per_hour, learner_up_cost_per_gb=config.traffic_cost_per_gb, now=clock()
        )
        self._rules = Rules(activate=self._mode(priced=False), budget_per_hour=config.budget_per_hour)
        self._activation = Activation(self._rules)
        self._offers: dict[NodeId, Offer] = {}
        self._held: dict[NodeId, VersionId] = {}
        self._counted: Bounded[NodeId, tuple[int, int]] = Bounded(MAX_NODES)
        self._installs_s: dict[str, float] = {}
        self._last_installs_s: dict[NodeId, deque[float]] = {}
        self._lags_s: dict[NodeId, deque[float]] = {}
        self._active: set[str] = set()
        self._standby: dict[NodeId, str] = {}
        self._sent_bytes = 0
        self._steps = 0
        self._steps_decided = 0
        self._not_before = 0.0
        self._decided_at = clock()
        self._deciding = False
        self._gone: set[NodeId] = set()
        self._came = 0
        self._due = asyncio.Event()
        self._opened = asyncio.Event()
        self.spent = asyncio.Event()
        self.max_cost = config.max_cost

    # -- news of samplers ------------------------------------------------------------------------------------

    def offered(self, node: NodeId, offer: Offer) -> None:
        now = self._clock()
        before = self._offers.get(node)
        self._offers[node] = offer
        if before is None or _terms(before) != _terms(offer):
            self._estimator.joined(node, _terms(offer), now=now)
            self._book.joined(node, _terms(offer), now=now)
        public = bool(self._network.public_at(node))
        self._estimator.link(node, offer.uplink_bytes_per_s, offer.downlink_bytes_per_s, public)
        if offer.full_rollouts_per_s > 0:
            self._estimator.rate(node, offer.full_rollouts_per_s, offer.samples_at_once, offer.lockstep)
        self._count_traffic(node, offer)
        if before is None:
            self._came += 1
            self._hurry()

    def installed(self, node: NodeId, version: VersionId) -> None:
        now = self._clock()
        self._tracker.installed(node, version, now=now)
        held = self._held.get(node)
        if held == version:
            return
        self._held[node] = version
        # A newcomer's first install says when it came, not how long an install takes.
        if held is not None and (install_s := self._without_waiting(node, version)) is not None:
            last_s = self._last_installs_s.setdefault(node, deque(maxlen=INSTALLS))
            last_s.append(install_s + self._tracker.skipped_s(held, version))
            self._installs_s[node] = median(last_s)

    def _without_waiting(self, node: NodeId, version: VersionId) -> float | None:
        """Return the seconds from the step that made `version` until `node` could have begun with it, with encoding. An
        engine installs between two batches, and the capacity model counts that wait itself. So of the time between
        holding and installing a version, only the recent minimum counts."""
        installed_s = self._tracker.install_s(node, version)
        complete_s = self._broadcast.complete_s(node, version)
        if installed_s is None or complete_s is None:
            return None
        lags = self._lags_s.setdefault(node, deque(maxlen=INSTALLS))
        lags.append(max(0.0, installed_s - complete_s))
        return self._tracker.prepared_s(version) + complete_s + min(lags)

    def accepted(self, node: NodeId, tokens: Sequence[int]) -> None:
        name, rollouts, count = self._given.get(node, ("", 0, 0))
        if node in self._offers:
            name = self._offers[node].nickname
        self._given[node] = name, rollouts + len(tokens), count + sum(tokens)
        if len(self._given) > MAX_NODES:
            del self._given[min(self._given.keys() - {node}, key=lambda one: self._given[one][2])]
        self._estimator.generated(node, tokens, now=self._clock())
        self._book.accepted(node, rollouts=len(tokens), tokens=sum(tokens))

    def gone(self, node: NodeId, *, vanished: bool) -> None:
        now = self._clock()
        self._tracker.gone(node, now=now)
        self._estimator.left(node, vanished=vanished, now=now)
        self._book.left(node, now=now)
        self._held.pop(node, None)
        self._installs_s.pop(node, None)
        self._last_installs_s.pop(node, None)
        self._lags_s.pop(node, None)
        # It may be back before the next decision, which then activates it again.
        self._active.discard(node)
        if self._offers.pop(node, None) is not None:
            self._gone.add(node)
            self._hurry()

    # -- news of steps ---------------------------------------------------------------------------------------

    def stepped(self, *, waited_s: float, period_s: float) -> dict[str, Any]:
        """Note that a step ended `period_s` after the previous one, `waited_s` of it spent waiting for the batch.
        Return the figures that metrics.jsonl gets about capacity and cost."""
        now = self._clock()
        self._estimator.trained(period_s - waited_s)
        idle_share = min(1.0, waited_s / period_s)
        if self._steps:
            # The first step does not count: no samplers were there yet.
            self._estimator.idle(idle_share)
        self._steps += 1
        self._book.stepped()
        period = self._bound().publish_every_steps
        if self._steps - self._steps_decided >= period and now >= self._not_before:
            self._due.set()
        figures = self._check_cost()
        selection = self._activation.selection
        return {
            "idle_share": round(idle_share, 4),
            "predicted_idle_share": round(selection.prediction.idle_share, 4) if selection is not None else None,
            "active": len(self._active),
            "standby": len(self._standby),
            **self._costs(figures),
        }

    # -- deciding --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Decide whenever something calls for it, for ever. Begins once samplers are answered (`open`)."""
        await self._opened.wait()
        while True:
            try:
                async with asyncio.timeout(TICK_S):
                    await self._due.wait()
            except TimeoutError:
                self._check_cost()
                if self._period_s and self._clock() - self._decided_at > LATE_PERIODS * self._period_s:
                    await self.decide()
            else:
                wait_s = gather_s(self._period_s) if self._is_urgent else 0.0
                # Samplers that keep coming and going must not make the learner do nothing but decide.
                await asyncio.sleep(max(wait_s, self._not_before - self._clock()))
                await self.decide()

    def open(self, rollouts: RolloutService, bound: Callable[[], BoundSet]) -> None:
        """Note that `rollouts` answers samplers from now on. `bound` is the present one."""
        self._rollouts, self._bound = rollouts, bound
        self._opened.set()

    @property
    def _period_s(self) -> float:
        """Seconds from one publication to the next without any waiting; 0 before the first step."""
        return (self._estimator.train_step_s() or 0.0) * self._bound().publish_every_steps

    @property
    def _is_urgent(self) -> bool:
        """Whether arrivals and departures since the last decision call for another one."""
        return self._activation.calls_for_decision(gone=self._gone, came=self._came)

    def _hurry(self) -> None:
        """Ask for a decision if one is urgent. News during a decision waits until it is done."""
        if not (self._deciding or self._due.is_set()) and self._is_urgent:
            self._due.set()

    async def decide(self) -> None:
        """Choose the active samplers by what is known now."""
        self._due.clear()
        self._deciding, self._gone, self._came = True, set(), 0
        self._steps_decided = self._steps
        self._decided_at = self._clock()
        await self._choose()
        self._deciding = False
        self._hurry()

    async def _choose(self) -> None:
        now, bound = self._clock(), self._bound()
        self._follow_prices()
        demand = self._estimator.demand(
            groups_per_step=self._config.groups_per_step,
            group_size=round(self._config.group_size * self._rollouts.tally.turns),
            publish_every_steps=bound.publish_every_steps,
            max_staleness=bound.max_staleness,
            freshness=self._config.freshness,
        )
        workers = self._estimator.workers(now)
        choose = partial(
            self._activation.decide,
            # Until an install was timed, its duration is only a guess: too weak to choose by.
            demand if self._installs_s else None,
            workers,
            self._disseminate(),
            now=now,
            idle_share=self._estimator.idle_share(),
        )
        try:
            took_s = await asyncio.to_thread(_cpu_time_of, choose)
        except (ArithmeticError, ValueError) as fault:
            # The choice uses figures that samplers report. An odd one must not end the run.
            self._run.log.event("decision_failed", reason=repr(fault), step=self._step)
            self._run.say(f"who is active stays as it is: the choice failed with {fault!r}; please report it")
            return
        share = DECIDING_SHARE if self._rules.activate == "cheapest" else WATCHING_SHARE
        self._not_before = self._clock() + took_s / share
        self._carry_out({NodeId(worker.name) for worker in workers})

    def _carry_out(self, considered: Collection[NodeId]) -> None:
        """Activate samplers and put others on standby. One that came during the decision works until the next one."""
        now, activation = self._clock(), self._activation
        active = activation.active
        standby = {n: activation.reason(n) for n in self._offers if n in considered and n not in active}
        for node in sorted(self._offers):
            if node in active and node not in self._active:
                self._estimator.activated(node, now=now)
                self._book.activated(node, now=now)
                self._run.log.event("activated", node=node, reason=activation.reason(node), step=self._step)
            elif node in standby and node not in self._standby:
                self._estimator.stood_by(node, now=now)
                self._book.stood_by(node, now=now)
                self._run.log.event("stood_by", node=node, reason=standby[node], step=self._step)
        changed = standby.keys() != self._standby.keys()
        self._active = set(active & self._offers.keys())
        if standby != self._standby:
            self._standby = standby
            self._rollouts.set_standby(standby)
        if changed and (activation.selection is not None or (standby and not self._active)):
            why = activation.selection.why if activation.selection is not None else BUDGET_TRIES_NOBODY
            self._run.say(f"{len(self._active)} samplers active, {len(standby)} on standby: {why}")

    def _follow_prices(self) -> None:
        """Switch to `cheapest` for good once any sampler has a price, unless the user set `activate`."""
        priced = any(any(_terms(offer).prices) for offer in self._offers.values())
        if self._rules.activate == "all" and self._mode(priced=priced) == "cheapest":
            self._rules = replace(self._rules, activate="cheapest")
            self._activation = Activation(self._rules)
            self._activation.resume(self._active)

    def _mode(self, *, priced: bool) -> Literal["all", "cheapest"]:
        if self._config.activate is not None:
            return self._config.activate
        return "cheapest" if priced or self._config.budget_per_hour is not None else "all"

    def _disseminate(self) -> Disseminate:
        planned = disseminate_by(
            learner_uplink_bytes_per_s=self._broadcast.uplink_bytes_per_s,
            encoded_bytes=self._broadcast.version_bytes,
            apply_s=0.0,
        )
        # A measured install has waited its turn already: to sustain it would count the wait twice.
        many = sustained(planned, period_s=self._period_s) if self._period_s else planned
        return measured_first(many, dict(self._installs_s))

    # -- costs -----------------------------------------------------------------------------------------------

    @property
    def _step(self) -> int:
        return self._before.steps + self._steps

    def _count_traffic(self, node: NodeId, offer: Offer) -> None:
        """Count what a sampler has received and sent since its last report. Traffic from before this life of the
        learner is in the accounts of an earlier one."""
        received, sent = offer.received_bytes, offer.sent_bytes
        known = self._counted.get(node, (received, sent) if node in self._absent else (0, 0))
        if received < known[0] or sent < known[1]:
            known = (0, 0)  # The node was restarted.
        self._book.traffic(node, down_bytes=received - known[0], up_bytes=sent - known[1])
        self._counted[node] = (received, sent)

    def _count_egress(self) -> None:
        sent = self._network.station.upload.total_bytes
        self._book.learner_sent(sent - self._sent_bytes)
        self._sent_bytes = sent

    def _check_cost(self) -> CostFigures:
        """Return what this life has cost. Report it once when the run has reached its maximum cost."""
        self._count_egress()
        figures = self._book.figures(self._clock())
        total, most = self._before.total + figures.total, self.max_cost
        if most is not None and total >= most and not self.spent.is_set():
            self.spent.set()
            self._run.log.event("cost_reached", cost_total=total, max_cost=most, step=self._step)
            self._run.say(
                f"the run has cost {total:.2f} and --max-cost is {most:g}: it ends here; to go on, resume it with more"
            )
        return figures

    def account(self) -> dict[str, Any]:
        """Return what the run has cost in all its lives, for the next life to continue from."""
        self._count_egress()
        return self._costs(self._book.figures(self._clock()))

    def _costs(self, figures: CostFigures) -> dict[str, Any]:
        spent = self._before.and_more(
            total=figures.total, steps=figures.steps, rollouts=figures.rollouts, tokens=figures.tokens
        )
        return {
            "cost_total": spent.total,
            "cost_per_step": spent.over(spent.steps),
            "cost_per_rollout": spent.over(spent.rollouts),
            "cost_per_token": spent.over(spent.tokens),
            "rollouts_accepted": spent.rollouts,
            "tokens_accepted": spent.tokens,
        }

    # -- what `status` says ----------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return the figures for `status`. The keys are described in docs/protocol.md."""
        selection = self._activation.selection
        now = self._clock()
        figures = self._book.figures(now)
        idle = self._estimator.idle_share()
        chosen = {} if selection is None else _said_of(selection.prediction.binds, selection)
        capacity = {
            "activate": self._rules.activate,
            "active": len(self._active),
            "standby": len(self._standby),
            "idle_share": round(idle, 4) if idle is not None else None,
            **chosen,
            "inputs": self._inputs(),
        }
        cost = {
            **self._costs(figures),
            "tokens_accepted_here": figures.tokens,
            "max_cost": self.max_cost,
            "cost_per_hour": figures.rate_per_hour,
            "standby": figures.standby,
            "by_class": {name: asdict(tally) | {"cost": tally.cost} for name, tally in figures.by_class.items()},
            "by_node": {node: round(tally.cost, 6) for node, tally in self._book.by_node(now).items()},
        }
        leaders = nlargest(LEADERS, self._given.items(), key=lambda one: one[1][2])
        return {"capacity": capacity, "cost": cost, "leaders": [[node, *given] for node, given in leaders]}

    def _inputs(self) -> dict[str, Any]:
        train_step_s, lengths = self._estimator.train_step_s(), self._estimator.lengths()
        return {
            "train_step_s": round(train_step_s, 4) if train_step_s is not None else None,
            "lengths": list(lengths.tokens) if lengths is not None else [],
            "by_node": {
                worker.name: {
                    "rollouts_per_s": worker.rollouts_per_s,
                    "samples_at_once": worker.samples_at_once,
                    "lockstep": worker.lockstep,
                    "install_s": self._installs_s.get(worker.name),
                }
                for worker in self._estimator.workers(self._clock())
            },
        }


def _cpu_time_of(work: Callable[[], object]) -> float:
    """Run `work` and return the seconds of CPU time that it took in this thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def _said_of(binds: str, selection: Any) -> dict[str, Any]:
    needed = selection.needed_rollouts_per_s
    return {
        "predicted_idle_share": round(selection.prediction.idle_share, 4),
        "binds": binds,
        "rollouts_per_s_useful": round(selection.useful_rollouts_per_s, 3),
        "rollouts_per_s_needed": round(needed, 3) if math.isfinite(needed) else None,
        "feasible": selection.feasible,
        "why": selection.why,
    }


def _terms(offer: Offer) -> Terms:
    traffic = offer.traffic_cost_per_gb
    return Terms(offer.device_class, (offer.cost_per_hour, traffic, traffic))
