"""The simulated benchmarks measure what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import broadcast_sim, capacity, cost, gossip, staleness
from swarm.pay.fleet import Worker
from swarm.pay.model import predict
from swarm.plan.simulate.fixed import run_fixed

Measure = Callable[..., Any]


@pytest.fixture
def measured(capsys: pytest.CaptureFixture[str]) -> Measure:
    """Runs a benchmark: its exit status, and what it found."""

    def run(benchmark: Any, arguments: str) -> tuple[int, Any]:
        status = benchmark.main([*arguments.split(), "--json"])
        return status, json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


@pytest.mark.long
def test_a_forest_on_lossy_paths_with_deaths_meets_the_target(measured: Measure) -> None:
    status, found = measured(broadcast_sim, "--peers 40 --size-mib 48")
    (row,) = found["rows"]
    assert (status, row["scheme"], row["peers"], row["live_peers"]) == (0, "forest", 40, 38)
    assert 1.046 < row["ratio"] <= 1.5
    assert row["ratio"] == pytest.approx(row["last_peer_s"] / row["bound_s"])


def test_a_profile_of_the_namespaces_is_simulated_too(tmp_path: Path, measured: Measure) -> None:
    profile = tmp_path / "equal.toml"
    profile.write_text("[[host]]\nup_mbit = 50\ndown_mbit = 100\n" * 5)
    chain, star = measured(broadcast_sim, f"--profile {profile} --size-mib 8 --schemes chain,star")[1]["rows"]
    assert chain["bound_s"] == star["bound_s"] == pytest.approx(8 * 2**20 / 6.25e6)
    assert 1.046 <= chain["ratio"] <= 1.15
    assert star["ratio"] == pytest.approx(4 * 1.046, rel=0.02)
    _, killed = measured(broadcast_sim, f"--profile {profile} --size-mib 8 --schemes chain --kill 3@0.5")
    assert killed["rows"][0]["live_peers"] == 3


def test_predictions_are_compared_and_a_missed_target_is_the_exit_status(
    measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_cell = {"STALENESS": (1,), "BROADCAST_STEPS": (0.3,), "RATIOS": (0.7,), "STEPS": 5, "MEAN_POINTS": 0.0}
    for name, value in one_cell.items():
        monkeypatch.setattr(capacity, name, value)
    status, found = measured(capacity, "")
    (cell,) = found["cells"]
    assert status == 1
    assert cell["error_points"] == pytest.approx(100 * (cell["predicted_idle"] - cell["simulated_idle"]))
    assert found.keys() >= {"mean_abs_error_points", "median_abs_error_points", "max_abs_error_points"}


@pytest.mark.long
def test_engines_in_lockstep_and_slow_links_beside_others_are_predicted() -> None:
    """Two versions are held at a time, and groups are shared by engines of both kinds: a third is discarded."""
    demand = replace(capacity.KINDS[2].demand(2), groups_per_step=32)
    workers = [Worker(name=f"l{i}", rollouts_per_s=0.6, samples_at_once=24, lockstep=True) for i in range(7)]
    workers += [Worker(name=f"c{i}", rollouts_per_s=0.4, samples_at_once=16) for i in range(10)]
    install_s = [18.0] * 7 + [90.0] * 10
    told = predict(demand, workers, install_s)
    found = run_fixed(demand, workers, install_s, steps=30, warmup_steps=20, seed=1)
    assert told.idle_share == pytest.approx(found.idle_share, abs=0.06)


@pytest.mark.slow
def test_a_lab_saves_about_what_is_reckoned_by_hand(measured: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/capacity.md reckons 35 % against one machine in turn."""
    monkeypatch.setattr(cost, "HOURS", 1.0)
    status, found = measured(cost, "--scenarios lab-4b")
    (row,) = found["rows"]
    assert status == 0
    assert row["saving"]["colocated"] == pytest.approx([0.35, 0.35], abs=0.03)
    assert row["idle_share"][1] <= cost.MAX_IDLE


def test_a_small_swarm_meets_the_targets_of_membership() -> None:
    sizes: dict[str, Any] = {"nodes": 30, "leaf_share": 0.7, "seeds": 1, "node_hours": 3.0}
    row = gossip.run(gossip.Plan(**sizes, heads=2, newcomers=1, crashes=1, leaf_crashes=1))
    limits = {
        **{"head_known_p99_s": 5.0, "head_known_all_s": 15.0, "record_known_p99_s": 15.0},
        **{"crash_known_p99_s": 60.0, "crash_leaf_known_s": 60.0},
        **{"public_bytes_per_s": 12_000.0, "leaf_bytes_per_s": 500.0},
    }
    for key, limit in limits.items():
        assert 0 < row[key] <= limit, (key, row[key])
    assert (row["nodes"], row["publics"], row["seeds"], row["loss"]) == (30, 9, 1, 0.1)
    assert row["false_deaths"] == row["false_deaths_elsewhere"] == row["leaves_without_homes"] == 0
    assert row["node_hours"] == pytest.approx(3.1), "31 nodes: whoever crashes does so afterwards"
    assert row["head_known_p99_s"] <= row["head_known_all_s"] <= row["head_known_all_worst_s"]


def test_deadlines_neither_starve_the_learner_nor_discard_much(
    measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staleness, "STEPS", 80)
    status, found = measured(staleness, "--staleness 2 --broadcast 0.3 --cases single")
    (row,) = found["rows"]
    assert status == bool(row["missed"])
    assert (row["targeted"], row["workers"]) == (True, 13)
    rules = row["rules"]
    assert rules["deadlines, hold"]["discarded"] == 0
    assert rules["deadlines"]["idle"] < 0.01 < 0.1 < rules["deadlines, hold"]["idle"]
    assert 0 < rules["deadlines"]["discarded"] < 0.05
    assert all(figures["max_staleness"] <= 2 for figures in rules.values())
    short, *_, long = rules["deadlines"]["discarded_by_quartile"]
    assert long > 5 * short
