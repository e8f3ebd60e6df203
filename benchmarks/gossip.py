"""How fast membership learns, what it wrongly believes and what it costs: real cores on the simulator's clock.

bin/python -m benchmarks.gossip --nodes 1000 --leaf-share 0.9 --loss 0.1 --seeds 5 --json

One seed is one swarm, in this order: it settles; heads are published; publics join; nothing happens for a long time but
stalls of event loops, and no node may be declared dead; then publics and leaves crash, one after another. A message is
lost with the given chance, the answer too, and the caller learns of it at its time limit. CPU time is that of the cores
and the simulator, which checks the signature of a record once for all nodes: the checks that nodes ask for are counted.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain

from benchmarks import Figures, ended, parser_of, said
from swarm.gossip.records import Appeared, Died, Effect, LeafGone
from swarm.types import NodeId, VersionId
from tests.simulator.gossip.swarm import GossipNode, GossipScenario, GossipSwarm

SETTLE_S = 90.0  # After the last join, and the last stall: all that is periodic (at most 72 s) has come round once
HEAD_INTERVAL_S = 30.0
LONGEST_QUIET_S = 1800.0  # Of one seed: few nodes would take days to make many node-hours
PATIENCE_S = 120.0  # After that what has not become known counts as never known; a dead public is found out at 60 s


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured. `node_hours` are those of the quiet phase, over all seeds."""

    nodes: int
    leaf_share: float = 0.9
    loss: float = 0.1
    seeds: int = 5
    heads: int = 5
    newcomers: int = 3
    crashes: int = 4
    leaf_crashes: int = 4
    stall_s: float = 5.0
    node_hours: float = 1100.0

    @property
    def quiet_s(self) -> float:
        return min(LONGEST_QUIET_S, 3600 * self.node_hours / (self.nodes * self.seeds))


@dataclass(slots=True, kw_only=True)
class Spread:
    """For each thing to learn, seconds until 99 % and until all of those concerned knew it."""

    p99_s: list[float] = field(default_factory=list)
    all_s: list[float] = field(default_factory=list)

    def add(self, since: float, times: list[float], of: int) -> None:
        self.p99_s.append(time_of_share(times, of, 0.99) - since)
        self.all_s.append(time_of_share(times, of, 1.0) - since)


@dataclass(slots=True, kw_only=True)
class Measured:
    heads: Spread = field(default_factory=Spread)
    records: Spread = field(default_factory=Spread)
    crashes: Spread = field(default_factory=Spread)
    leaf_crashes_s: list[float] = field(default_factory=list)
    false_deaths: int = 0
    false_deaths_elsewhere: int = 0
    node_hours: float = 0.0
    public_bytes_per_s: list[float] = field(default_factory=list)
    leaf_bytes_per_s: list[float] = field(default_factory=list)
    learner_bytes_per_s: float = 0.0
    leaves_without_homes: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0
    cpu_per_minute_s: float = 0.0
    settle_cpu_per_minute_s: float = 0.0
    checks_per_minute: float = 0.0
    settle_checks_per_minute: float = 0.0


class Watch:
    """Collects what the nodes of one swarm learn, and when."""

    def __init__(self, swarm: GossipSwarm) -> None:
        self._swarm = swarm
        self.heads: dict[VersionId, list[float]] = {}
        self.appeared: dict[NodeId, list[float]] = {}
        self.died: dict[NodeId, list[float]] = {}
        self.public_at: dict[NodeId, float] = {}
        self.crashed: set[NodeId] = set()
        self.leaf_ended_at: dict[NodeId, float] = {}
        self.false_deaths = 0
        self._newest: dict[NodeId, VersionId] = {}
        swarm.on_head = self._on_head
        swarm.on_change = self._on_change
        swarm.on_public = self._on_public

    def _on_head(self, node: GossipNode, version: VersionId) -> None:
        before = self._newest.get(node.node)
        self._newest[node.node] = version
        for head, times in self.heads.items():
            # Who learns of a newer head needs the older one no more.
            if head <= version and (before is None or head > before):
                times.append(self._swarm.world.now)

    def _on_public(self, node: GossipNode) -> None:
        self.public_at[node.node] = self._swarm.world.now

    def _on_change(self, observer: GossipNode, effect: Effect) -> None:
        now = self._swarm.world.now
        match effect:
            case Appeared(signed=signed) if observer.is_public and signed.node in self.appeared:
                self.appeared[signed.node].append(now)
            case Died(node=node) if node in self.crashed:
                self.died[node].append(now)
            case Died():
                self.false_deaths += 1
            case LeafGone(node=node) if not self._leased(node):
                if node in self.crashed:
                    self.leaf_ended_at[node] = now
                elif not self._swarm.by_node[node].is_public:
                    self.false_deaths += 1
            case _:
                pass

    def _leased(self, node: NodeId) -> bool:
        return any(node in home.core.view.leases.leaves for home in self._swarm.publics())


# -- one seed --------------------------------------------------------------------------------------------------


def measure(plan: Plan, seed: int) -> Measured:
    # Events make no cycles, and collecting the garbage of 10,000 nodes takes a quarter of the time.
    gc.disable()
    began, cpu = time.perf_counter(), time.process_time()
    found, swarm = Measured(), GossipSwarm(scenario_of(plan), seed)
    watch = Watch(swarm)
    swarm.populate()
    swarm.run_for(swarm.scenario.join_s + SETTLE_S)
    found.settle_cpu_per_minute_s = 60 * (time.process_time() - cpu) / swarm.world.now
    found.settle_checks_per_minute = 60 * checks(swarm) / swarm.world.now
    found.leaves_without_homes = sum(len(node.core.homes.homes) < 1 for node in swarm.live() if not node.is_public)
    watch.false_deaths = 0
    for phase in (measure_heads, measure_records, measure_quiet, measure_crashes):
        phase(swarm, watch, plan, found)
    found.false_deaths_elsewhere = watch.false_deaths - found.false_deaths
    found.virtual_s, found.wall_s = swarm.world.now, time.perf_counter() - began
    gc.enable()
    return found


def scenario_of(plan: Plan) -> GossipScenario:
    """100 nodes join in a second, or all within 10 s."""
    join_s = max(10.0, plan.nodes / 100)
    return GossipScenario(nodes=plan.nodes, leaf_share=plan.leaf_share, loss_share=plan.loss, join_s=join_s)


def checks(swarm: GossipSwarm) -> int:
    hits, misses, *_ = swarm.open_record.cache_info()
    return hits + misses


def measure_heads(swarm: GossipSwarm, watch: Watch, plan: Plan, found: Measured) -> None:
    """Heads at a steady interval, and the traffic meanwhile."""
    since, cpu, checked = swarm.world.now, time.process_time(), checks(swarm)
    before = {node.node: node.traffic.bytes for node in swarm.nodes}
    published: list[tuple[VersionId, float, int]] = []
    for version in range(1, plan.heads + 1):
        head = VersionId(incarnation=0, version=version)
        watch.heads[head] = []
        published.append((head, swarm.world.now, len(swarm.live())))
        assert swarm.publish(version) == head
        swarm.run_for(HEAD_INTERVAL_S)
    passed_s = swarm.world.now - since
    found.cpu_per_minute_s = 60 * (time.process_time() - cpu) / passed_s
    found.checks_per_minute = 60 * (checks(swarm) - checked) / passed_s
    rates = {node: (node.traffic.bytes - before[node.node]) / passed_s for node in swarm.live()}
    found.learner_bytes_per_s = rates[swarm.nodes[0]]
    found.public_bytes_per_s = [rate for node, rate in rates.items() if node.is_public]
    found.leaf_bytes_per_s = [rate for node, rate in rates.items() if not node.is_public]
    run_while(swarm, lambda: any(len(watch.heads[head]) < of for head, _, of in published))
    for head, at, of in published:
        found.heads.add(at, watch.heads[head], of)


def measure_records(swarm: GossipSwarm, watch: Watch, plan: Plan, found: Measured) -> None:
    """Publics join: when the others know them, from the moment at which they can be called."""
    for _ in range(plan.newcomers):
        others = len(swarm.publics())
        new = swarm.add_new(public=True)
        times = watch.appeared[new.node] = []
        new.start()
        run_while(swarm, lambda times=times, others=others: len(times) < others)  # type: ignore[misc]
        found.records.add(watch.public_at.get(new.node, math.inf), times, others)


def measure_quiet(swarm: GossipSwarm, watch: Watch, plan: Plan, found: Measured) -> None:
    """Nothing but stalls: a node that is declared dead now is alive. What comes after finds a swarm without stalls."""
    before = watch.false_deaths
    if plan.stall_s:
        swarm.start_stalls(plan.stall_s)
    swarm.run_for(plan.quiet_s)
    found.node_hours = len(swarm.live()) * plan.quiet_s / 3600
    found.false_deaths = watch.false_deaths - before
    if plan.stall_s:
        swarm.stall_s = 0.0
        swarm.run_for(SETTLE_S)


def measure_crashes(swarm: GossipSwarm, watch: Watch, plan: Plan, found: Measured) -> None:
    """Publics, never the learner, and leaves end without a word, one after another."""
    for _ in range(plan.crashes):
        victims = [node for node in swarm.publics() if node is not swarm.nodes[0]]
        leaves = [node for node in swarm.live() if not node.can_be_public]
        public = swarm.world.random.choice(victims) if len(victims) > 1 else None
        chosen = swarm.world.random.sample(leaves, min(len(leaves), plan.leaf_crashes))
        at = swarm.world.now
        for node in [*chosen, *([public] if public else [])]:
            watch.crashed.add(node.node)
            watch.died[node.node] = []
            node.crash()
        times = watch.died[public.node] if public else []
        others = len(swarm.publics()) if public else 0
        _until_known(swarm, watch, times, others, chosen)
        if public:
            found.crashes.add(at, times, others)
        found.leaf_crashes_s += [watch.leaf_ended_at.get(leaf.node, math.inf) - at for leaf in chosen]


def _until_known(swarm: GossipSwarm, watch: Watch, times: list[float], others: int, leaves: list[GossipNode]) -> None:
    run_while(swarm, lambda: len(times) < others or any(leaf.node not in watch.leaf_ended_at for leaf in leaves))


def run_while(swarm: GossipSwarm, unknown: Callable[[], bool]) -> None:
    """Until all nodes know, or PATIENCE_S are over."""
    until = swarm.world.now + PATIENCE_S
    while unknown() and swarm.world.now < until:
        swarm.run_for(5.0)


def time_of_share(times: list[float], of: int, share: float) -> float:
    """When `share` of all had learned it; infinite if fewer have."""
    needed = math.ceil(share * of)
    return sorted(times)[needed - 1] if 0 < needed <= len(times) else math.inf


# -- all seeds -------------------------------------------------------------------------------------------------


def summarize(plan: Plan, runs: list[Measured]) -> Figures:
    """One row: medians over all things learned in all seeds, and the worst; None where something never was."""
    publics = list(chain.from_iterable(run.public_bytes_per_s for run in runs))
    leaves = list(chain.from_iterable(run.leaf_bytes_per_s for run in runs))
    node_hours, false_deaths = (sum(run.node_hours for run in runs), sum(run.false_deaths for run in runs))
    return {
        "nodes": plan.nodes,
        "publics": len(publics) // len(runs),
        **spread("head_known", [run.heads for run in runs]),
        **spread("record_known", [run.records for run in runs]),
        **spread("crash_known", [run.crashes for run in runs]),
        **median_and_worst("crash_leaf_known", chain.from_iterable(run.leaf_crashes_s for run in runs)),
        "false_deaths": false_deaths,
        "false_deaths_per_1000_node_hours": 1000 * false_deaths / node_hours if node_hours else None,
        "false_deaths_elsewhere": sum(run.false_deaths_elsewhere for run in runs),
        "node_hours": round(node_hours, 1),
        "public_bytes_per_s": mean(publics),
        "public_bytes_per_s_worst": round(max(publics), 2) if publics else None,
        "learner_bytes_per_s": mean(run.learner_bytes_per_s for run in runs),
        "leaf_bytes_per_s": mean(leaves),
        "leaf_bytes_per_s_worst": round(max(leaves), 2) if leaves else None,
        "leaves_without_homes": sum(run.leaves_without_homes for run in runs),
        "cpu_s_per_virtual_minute": mean(run.cpu_per_minute_s for run in runs),
        "settle_cpu_s_per_virtual_minute": mean(run.settle_cpu_per_minute_s for run in runs),
        "signatures_per_virtual_minute": mean(run.checks_per_minute for run in runs),
        "settle_signatures_per_virtual_minute": mean(run.settle_checks_per_minute for run in runs),
        "virtual_s": round(sum(run.virtual_s for run in runs)),
        "wall_s": round(sum(run.wall_s for run in runs)),
        **{name: getattr(plan, name) for name in ("leaf_share", "loss", "seeds", "heads", "stall_s")},
    }


def spread(name: str, spreads: list[Spread]) -> Figures:
    return {
        **median_and_worst(f"{name}_p99", chain.from_iterable(one.p99_s for one in spreads)),
        **median_and_worst(f"{name}_all", chain.from_iterable(one.all_s for one in spreads)),
    }


def median_and_worst(name: str, times: Iterable[float]) -> Figures:
    values = list(times) or [math.inf]
    found = {f"{name}_s": statistics.median(values), f"{name}_worst_s": max(values)}
    return {key: round(value, 2) if math.isfinite(value) else None for key, value in found.items()}


def mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return round(statistics.fmean(found), 2) if found else None


def run(plan: Plan) -> Figures:
    runs: list[Measured] = []
    for seed in range(1, plan.seeds + 1):
        runs.append(measure(plan, seed))
        print(f"{plan.nodes} nodes, seed {seed} of {plan.seeds}: {runs[-1].wall_s:.0f} s", flush=True)
    return summarize(plan, runs)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--nodes", type=int, action="append", help="may be repeated; 10, 100 and 1000 if not given")
    parser.add_argument("--leaf-share", type=float, default=0.9)
    parser.add_argument("--loss", type=float, default=0.1, help="chance of each message, both ways")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    plan = Plan(nodes=0, leaf_share=options.leaf_share, loss=options.loss, seeds=options.seeds)
    rows = [said(run(replace(plan, nodes=nodes))) for nodes in options.nodes or (10, 100, 1000)]
    ended(options, {"sizes": rows} if len(rows) > 1 else rows[0])


if __name__ == "__main__":
    main()
