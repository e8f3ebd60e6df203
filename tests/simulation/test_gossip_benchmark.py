"""The benchmark of membership measures what it says: on a small swarm, and on one whose detector is broken."""

from __future__ import annotations

import math

import pytest

from benchmarks import gossip
from benchmarks.gossip import Figures, Plan, measure, run, scenario_of, summarize, time_of_share
from swarm.gossip.records import Effect, GossipRules
from swarm.gossip.table import Table
from tests.simulator.gossip.swarm import GossipScenario, GossipSwarm

PLAN = Plan(nodes=30, leaf_share=0.7, seeds=1, heads=2, newcomers=1, crashes=1, leaf_crashes=1, node_hours=3.0)

TARGETS = {
    "head_known_p99_s": 5.0,
    "head_known_all_s": 15.0,
    "record_known_p99_s": 15.0,
    "crash_known_p99_s": 60.0,
    "crash_leaf_known_s": 60.0,
    "public_bytes_per_s": 12_000.0,
    "leaf_bytes_per_s": 500.0,
}


def figures(plan: Plan = PLAN) -> Figures:
    return summarize(plan, [measure(plan, 1)])


def test_a_small_swarm_meets_the_targets() -> None:
    row = figures()
    for key, limit in TARGETS.items():
        assert 0 < row[key] <= limit, (key, row[key])
    assert (row["nodes"], row["publics"], row["seeds"], row["loss"]) == (30, 9, 1, 0.1)
    assert row["false_deaths"] == row["false_deaths_elsewhere"] == row["leaves_without_homes"] == 0
    assert row["false_deaths_per_1000_node_hours"] == 0.0
    assert row["node_hours"] == pytest.approx(3.1), "31 nodes: whoever crashes does so afterwards"
    assert row["head_known_p99_s"] <= row["head_known_all_s"] <= row["head_known_all_worst_s"]


def test_nobody_who_dies_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def expire(self: Table, *, now: float, patience: float) -> list[Effect]:
        return []

    monkeypatch.setattr(Table, "expire", expire)
    row = figures(Plan(nodes=30, leaf_share=0.7, seeds=1, heads=1, newcomers=0, crashes=1, node_hours=0.0))
    assert row["crash_known_p99_s"] is row["crash_known_all_worst_s"] is None
    assert row["record_known_p99_s"] is None
    assert row["crash_leaf_known_s"] is not None
    assert row["false_deaths_per_1000_node_hours"] is None


@pytest.mark.slow
def test_a_hasty_detector_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    hasty = GossipRules(dead_rounds=2, lease_rounds=5)
    scenario = scenario_of(PLAN)
    monkeypatch.setattr(
        gossip,
        "scenario_of",
        lambda plan: GossipScenario(
            nodes=plan.nodes, leaf_share=0.7, loss_share=0.1, join_s=scenario.join_s, rules=hasty
        ),
    )
    assert figures()["false_deaths_per_1000_node_hours"] > 100


def test_a_head_that_reaches_no_leaf_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = GossipSwarm.publish

    def to_publics_alone(self: GossipSwarm, version: int, *, incarnation: int = 0) -> object:
        for node in self.nodes:
            if not node.is_public:
                self.network.cut([str(node.number)])
        return publish(self, version, incarnation=incarnation)

    monkeypatch.setattr(GossipSwarm, "publish", to_publics_alone)
    row = figures(Plan(nodes=30, leaf_share=0.7, seeds=1, heads=1, newcomers=0, crashes=0, node_hours=0.0))
    assert row["head_known_p99_s"] is row["head_known_all_s"] is None


def test_time_of_a_share() -> None:
    times = [float(second) for second in range(100, 0, -1)]
    assert time_of_share(times, 100, 0.99) == 99.0
    assert time_of_share(times, 100, 1.0) == 100.0
    assert time_of_share(times, 101, 1.0) == math.inf
    assert time_of_share([], 0, 1.0) == math.inf


def test_a_seed_gives_the_same_figures_twice() -> None:
    plan = Plan(nodes=10, leaf_share=0.5, seeds=1, heads=1, newcomers=1, crashes=1, node_hours=0.1)
    clock = {"cpu_s_per_virtual_minute", "settle_cpu_s_per_virtual_minute", "wall_s"}
    first, second = run(plan, 1), run(plan, 1)
    assert first["settle_signatures_per_virtual_minute"] > 0
    assert {key: value for key, value in first.items() if key not in clock} == {
        key: value for key, value in second.items() if key not in clock
    }
