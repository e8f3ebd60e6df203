"""The whole swarm on a virtual clock: what `echo-node simulate` runs.

The rollout plane, the relay forest's planner, the estimator, the activation and the cost book are the real ones. Time,
engines (sampler.py), transfers (downloads.py, as a fluid), the lives of nodes (machines.py) and gossip (sampled delays)
are simulated. The rules:
- A volunteer that is present fetches weights, stays warm, and is paid while active. A rented machine starts when it is
  activated, is paid from then on, and is given back once it is on standby and has handed in what it had begun.
- The learner's knowledge is late: it notices a vanished sampler after three missed beats, and a node without an engine
  through gossip. Activation is asked once a publication period, and in between when it says that news requires it.
- FAILED_SHARE of all generations fail; their samples are leased again.
A run depends only on the scenario, the settings and the seed.

The gossip delays were compared with the packet-level simulator with 20 and 100 nodes, half of them public, 5 % loss, 2
s rounds. Newcomers that others can dial were known after 1.2 s at best, 1.2 and 1.2 s (median), 13 and 6.5 s (slowest
of ten); deaths after 38.5 to 41.2 s and 38.6 to 41.4 s. tests/simulation/test_capacity_news.py repeats it. A head
reached everybody within 0.9 s; that is small beside any transfer and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from random import Random
from statistics import fmean

from swarm.gossip.records import GossipRules
from swarm.pay.activation import LATE_PERIODS, Activation, gather_s
from swarm.pay.delivery import sustained
from swarm.pay.estimator import Estimator, StartValues
from swarm.pay.fleet import Demand, Terms, Worker
from swarm.pay.prices import HOUR_S
from swarm.pay.selection import Rules
from swarm.plan.scenario import Departure, Scenario, deltas_to, demand_of
from swarm.plan.simulate.desk import BEAT_S, Desk
from swarm.plan.simulate.downloads import Weights
from swarm.plan.simulate.learner import SimulatedLearner, figures_between, tally_of, warmup_steps
from swarm.plan.simulate.machines import Costs, Node, nodes_of
from swarm.plan.simulate.outcome import Happened, Settings, Sums, SwarmFigures, figures_of
from swarm.plan.simulate.sampler import Occupancy, Sampler
from swarm.plan.simulate.timeline import POINTS, Moment, SimulatedTimeline, StepTaken
from swarm.plan.simulate.world import World
from swarm.rollout.plane.nodes import MISSED_BEATS
from swarm.types import NodeId, Rollout

RULES = GossipRules()
GREETING_S = 1.2  # From a start to a record that others pass on: a hello, its answer, and the dial back
MISSED_SHARE = 0.15  # Newcomers whose record the first push did not spread everywhere; later rounds do
MISSED_ROUNDS = 6  # Most rounds that this took
DEATH_SPREAD_S = 1.6  # The last beat is up to a round old, and the watch notices its absence up to a round late


def newcomer_s(random: Random) -> float:
    """Draw the seconds from a node's start until the learner knows it."""
    if random.random() < MISSED_SHARE:
        return GREETING_S + random.random() * MISSED_ROUNDS * RULES.round_s
    return GREETING_S + 0.5 * random.random()


def death_s(random: Random) -> float:
    """Draw how many seconds after a node's end the learner declares it dead; only the learner watches it."""
    return RULES.dead_rounds * RULES.round_s + random.uniform(-DEATH_SPREAD_S, DEATH_SPREAD_S)


class Choice:
    """Decides which samplers are active. A node reports its rate and links when it joins; a machine for rent is known
    by its market data. Figures of the scenario stand in until they are observed."""

    def __init__(self, scenario: Scenario, demand: Demand, rules: Rules) -> None:
        self._demand = demand
        self._estimator = Estimator(StartValues(train_step_s=demand.train_step_s, lengths=demand.lengths))
        self._activation = Activation(rules)
        self._everybody = rules.activate == "all" and rules.budget_per_hour is None
        self._changed = True
        self._gone: set[str] = set()
        self._came = 0
        self.deltas_to = lru_cache(maxsize=16)(partial(deltas_to, scenario))
        self._sustained = sustained(self.deltas_to(demand.publish_every_steps), period_s=demand.period_s)

    def joined(self, worker: Worker, *, now: float) -> None:
        """The learner has learned of a node or of an offer."""
        estimator, name = self._estimator, worker.name
        prices = (worker.cost_per_hour, worker.down_cost_per_gb, worker.up_cost_per_gb)
        estimator.joined(name, Terms(worker.device_class, prices), now=now)
        self._changed = True
        self._came += 1
        estimator.rate(name, worker.rollouts_per_s, worker.samples_at_once, worker.lockstep)
        estimator.link(name, worker.uplink_bytes_per_s, worker.downlink_bytes_per_s, worker.public)

    def left(self, name: str, *, vanished: bool, now: float) -> None:
        self._estimator.left(name, vanished=vanished, now=now)
        self._changed = True
        self._gone.add(name)

    def generated(self, name: str, tokens: Sequence[float], *, now: float) -> None:
        """Rollouts of these lengths were accepted."""
        self._estimator.generated(name, [max(1, round(count)) for count in tokens], now=now)

    def stepped(self, train_step_s: float, waited_s: float, *, now: float) -> None:
        """The learner took a batch after waiting for `waited_s`."""
        self._estimator.trained(train_step_s)
        self._estimator.idle(waited_s / (waited_s + train_step_s))

    @property
    def calls_for_decision(self) -> bool:
        """Whether news since the last decision requires another one soon."""
        return self._activation.calls_for_decision(gone=self._gone, came=self._came)

    def decide(self, *, now: float) -> tuple[list[str], list[str]]:
        """Return the nodes to activate and the nodes to put on standby."""
        if self._everybody and not self._changed:
            return [], []  # The activation would ask the model even so, which takes long.
        self._changed = False
        self._gone, self._came = set(), 0
        demand = self._estimator.demand(
            groups_per_step=self._demand.groups_per_step,
            group_size=self._demand.group_size,
            publish_every_steps=self._demand.publish_every_steps,
            max_staleness=self._demand.max_staleness,
            freshness=self._demand.freshness,
        )
        workers, before = self._estimator.workers(now), self._activation.active
        self._activation.decide(demand, workers, self._sustained, now=now, idle_share=self._estimator.idle_share())
        active = self._activation.active
        activated = [one.name for one in workers if one.name in active - before]
        stood_by = [one.name for one in workers if one.name in before - active]
        for name in activated:
            self._estimator.activated(name, now=now)
        for name in stood_by:
            self._estimator.stood_by(name, now=now)
        return activated, stood_by


FAILED_SHARE = 0.001
"""Share of generations that fail, such as an engine out of memory or a box restarted by its owner. Nobody publishes the
figure; one in a thousand is visible and decides nothing."""

NOTICE_S = MISSED_BEATS * BEAT_S + 0.01  # Until the learner notices that a vanished sampler is silent

WARMUP_SHARE = 0.25  # Most of the time that is left out: engines start and places are empty


class CapacitySimulation:
    """One run. `tell` gets a line for each event of interest, `progress` the share of the time that has passed."""

    def __init__(
        self,
        scenario: Scenario,
        settings: Settings,
        *,
        seed: int,
        rules: Rules,
        tell: Callable[[str], None] | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.scenario = scenario
        self.settings = settings
        self.timeline = SimulatedTimeline()
        self.world = World(Random(f"world {seed}"))
        self._fates = Random(f"fates {seed}")
        self._tell = tell
        self._progress = progress
        self._happened = Happened()
        self._demand = demand_of(
            scenario, max_staleness=settings.max_staleness, publish_every_steps=settings.publish_every_steps
        )
        self._choice = Choice(scenario, self._demand, rules)
        self.desk = Desk(self._demand, seed=seed)
        self.occupancy = Occupancy()
        self.nodes = nodes_of(scenario, Random(f"fleet {seed}"))
        self.costs = Costs(scenario, self.nodes.values())
        self.weights = Weights(
            scenario,
            world=self.world,
            random=Random(f"weights {seed}"),
            deltas_to=self._choice.deltas_to,
            moved=self.costs.moved,
            installed=self._installed,
        )
        self.learner = SimulatedLearner(
            self._demand, world=self.world, desk=self.desk, publish=self.weights.publish, taken=self._taken
        )
        self._end_s = settings.hours * HOUR_S
        self._period_s = self._demand.period_s
        self._deciding = False
        self._since_decided = 0
        self._decided_at = 0.0

    def run(self) -> SwarmFigures:
        """Run from an empty swarm to the end."""
        self.learner.publish(0)
        for node in self.nodes.values():
            if node.there:
                self._arrive(node, known_s=0.0)
            else:
                self.world.schedule(node.absence_s(self._fates), f"comes {node.name}", partial(self._come, node))
        for departure in self.scenario.simulation.departures:
            self.world.schedule(departure.at_h * HOUR_S, "departure", partial(self._depart, departure))
        self._watch()
        self._decide()
        self._run_until(self._warmup_s())
        before = self._sums()
        self._run_until(self._end_s)
        self.timeline.versions = self.weights.carried_to_active
        return self._figures(before, self._sums())

    def _warmup_s(self) -> float:
        return min(WARMUP_SHARE * self._end_s, warmup_steps(self._demand) * self._demand.train_step_s)

    def _run_until(self, at_s: float) -> None:
        over = False

        def end() -> None:
            nonlocal over
            over = True

        self.world.schedule(at_s - self.world.now, "end of phase", end)
        self.world.run_until(lambda: over)

    # -- nodes come and go -----------------------------------------------------------------------------------

    def _come(self, node: Node) -> None:
        """Let a node come back, or come for the first time."""
        if node.there:
            return
        if node.known:
            # The node announces itself before its silence is noticed.
            self.desk.leave(NodeId(node.name))
            self._forgotten(node, vanished=True)
        self._arrive(node, known_s=newcomer_s(self._fates) if node.kind.volunteer else 0.0)

    def _arrive(self, node: Node, *, known_s: float) -> None:
        node.there = True
        node.life += 1
        self._later(node, node.session_s(self._fates), "goes", self._go)
        if known_s:
            self._later(node, known_s, "is known", self._meet)
        else:
            self._meet(node)
        if node.kind.volunteer:
            node.running = True
            self.weights.fetch(node)

    def _meet(self, node: Node) -> None:
        node.known = True
        self._choice.joined(node.worker, now=self.world.now)
        self._hurry()

    def _later(self, node: Node, delay_s: float, label: str, action: Callable[[Node], None]) -> None:
        life = node.life
        self.world.schedule(delay_s, f"{node.name} {label}", lambda: action(node) if node.life == life else None)

    def _depart(self, departure: Departure) -> None:
        gone = [node for node in self.nodes.values() if node.there and node.kind.name == departure.fleet]
        self._say(f"all {len(gone)} of {departure.fleet} vanish")
        for node in gone:
            self._later(node, self._fates.random() * departure.within_s, "vanishes", self._vanish)

    def _go(self, node: Node) -> None:
        if node.vanishes(self._fates):
            self._vanish(node)
        else:
            self._leave(node)

    def _leave(self, node: Node) -> None:
        """Leave with notice: the node's leases are free for others at once."""
        self._happened.left += node.running
        self._say(f"{node.name} leaves", node.running)
        self._end_life(node)
        self.desk.leave(NodeId(node.name))
        self._forgotten(node, vanished=False)
        self.learner.look()

    def _vanish(self, node: Node) -> None:
        sampling, running = node.ready, node.running
        self._happened.vanished += running
        self._say(f"{node.name} vanishes", running)
        if sampling:
            self.desk.plane.beat(NodeId(node.name), now=self.world.now)
        self._end_life(node)
        self.weights.vanished(node)
        if sampling:
            self._later(node, NOTICE_S, "is silent", self._silent)
        else:
            self._later(node, death_s(self._fates) if running else 0.0, "is dead", self._dead)

    def _end_life(self, node: Node) -> None:
        node.there = node.running = node.busy = False
        node.life += 1
        if node.sampler is not None:
            node.sampler.vanish()
            node.sampler = None
        self._pay(node)
        self.world.schedule(node.absence_s(self._fates), f"comes {node.name}", partial(self._come, node))

    def _silent(self, node: Node) -> None:
        alive = [NodeId(other.name) for other in self.nodes.values() if other.ready]
        self.desk.silent(alive, now=self.world.now)
        self._dead(node)
        self.learner.look()

    def _dead(self, node: Node) -> None:
        if node.known:
            self._forgotten(node, vanished=True)

    def _forgotten(self, node: Node, *, vanished: bool) -> None:
        """The learner knows that `node` is gone."""
        node.wanted = node.known = False
        self.weights.forget(node)
        self._choice.left(node.name, vanished=vanished, now=self.world.now)
        self._hurry()

    # -- weights ---------------------------------------------------------------------------------------------

    def _installed(self, node: Node, version: int) -> None:
        """A node holds a version and its engine is running."""
        if node.sampler is None:
            node.sampler = Sampler(
                node.worker,
                lengths=self._demand.lengths,
                world=self.world,
                desk=self.desk,
                occupancy=self.occupancy,
                over=partial(self._handed_in, node),
                failing=FAILED_SHARE,
                fates=self._fates,
            )
            if node.wanted:
                node.sampler.activate()
                self._pay(node)
        node.sampler.install(version)

    # -- active and standby ----------------------------------------------------------------------------------

    def _hurry(self) -> None:
        if self.world.now and not self._deciding and self._choice.calls_for_decision:
            self._deciding = True
            self.world.schedule(gather_s(self._period_s), "decide", self._decide)

    def _decide_late(self, decided_at: float) -> None:
        if self._decided_at == decided_at:
            self._decide()

    def _decide(self) -> None:
        now = self._decided_at = self.world.now
        self._deciding, self._since_decided = False, 0
        self.world.schedule(LATE_PERIODS * self._period_s, "decide late", lambda: self._decide_late(now))
        activated, stood_by = self._choice.decide(now=self.world.now)
        for name in stood_by:
            self._stand_by(self.nodes[name])
        for name in activated:
            self._activate(self.nodes[name])

    def _activate(self, node: Node) -> None:
        self._happened.activated += 1
        self._say(f"{node.name} is activated")
        node.wanted = True
        if node.there and not node.running:
            node.running = True
            self.weights.fetch(node)
        elif node.sampler is not None:
            node.sampler.activate()
        self._pay(node)

    def _stand_by(self, node: Node) -> None:
        self._happened.stood_by += 1
        self._say(f"{node.name} is on standby")
        node.wanted = False
        if node.sampler is not None:
            node.sampler.stand_by()
        self._pay(node)
        self._give_back(node)

    def _handed_in(self, node: Node) -> None:
        self._account(node)
        if not node.wanted:
            self._give_back(node)
        self.learner.look()

    def _give_back(self, node: Node) -> None:
        """Return a rented machine that has nothing left to do; its disk is lost."""
        if node.kind.volunteer or not node.running or (node.sampler is not None and not node.sampler.idle):
            return
        self.desk.plane.leave(NodeId(node.name))
        self.weights.forget(node)
        node.running = node.busy = False
        node.sampler = node.disk = None
        node.life += 1
        self._later(node, node.session_s(self._fates), "goes", self._go)
        self._pay(node)

    def _pay(self, node: Node) -> None:
        self.costs.pay(node, now=self.world.now)

    # -- batches ---------------------------------------------------------------------------------------------

    def _taken(self, batch: list[Rollout], waited_s: float) -> None:
        now, step = self.world.now, self.learner.steps
        ages = [step - oldest for rollout in batch if (oldest := rollout.oldest) is not None]
        self.costs.stepped(now=now)
        self.timeline.steps.append(StepTaken(at_s=now, waited_s=waited_s))
        self._say(f"batch {step} taken after {waited_s:.0f} s, staleness {fmean(ages):.2f}")
        self._choice.stepped(self._demand.train_step_s, waited_s, now=now)
        self._since_decided += 1
        if self._since_decided >= self.settings.publish_every_steps:
            self._decide()

    def _account(self, node: Node) -> None:
        if node.sampler is not None and (tokens := node.sampler.tokens):
            node.sampler.tokens = []
            self._choice.generated(node.name, tokens, now=self.world.now)
            self.costs.generated(node, tokens)

    # -- what is seen ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        nodes = self.nodes.values()
        there, active = sum(node.there for node in nodes), sum(node.wanted and node.ready for node in nodes)
        self.timeline.moments.append(Moment(at_s=self.world.now, there=there, active=active))
        if self._progress is not None:
            self._progress(self.world.now / self._end_s)
        self.world.schedule(self._end_s / POINTS, "moment", self._watch)

    def _say(self, text: str, really: bool = True) -> None:
        if self._tell is not None and really:
            minutes, seconds = divmod(int(self.world.now), 60)
            self._tell(f"{minutes // 60:3d}:{minutes % 60:02d}:{seconds:02d} {text}")

    def _sums(self) -> Sums:
        return Sums(
            tally=tally_of(self.learner, self.desk, self.occupancy, now=self.world.now),
            costs=self.costs.figures(now=self.world.now),
            traffic=replace(self.weights.traffic),
            moments=len(self.timeline.moments),
        )

    def _figures(self, before: Sums, after: Sums) -> SwarmFigures:
        counts = self.desk.counts
        return figures_of(
            before,
            after,
            self.timeline,
            capacity=figures_between(before.tally, after.tally, self._demand, self.world.trace_digest()),
            happened=replace(
                self._happened,
                joins=self.weights.traffic.joins,
                rollouts_lost=counts.lost,
                rollouts_failed=counts.failed,
            ),
        )
