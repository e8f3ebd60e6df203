"""Scenario files: what they mean, and the one line that refuses a bad one."""

from __future__ import annotations

import math
import re
from pathlib import Path
from random import Random

import pytest

from swarm.errors import UserError
from swarm.pay.fleet import Worker
from swarm.plan.scenario import Scenario, class_workers, delta_bytes, demand_of, lengths_of, online_of
from swarm.settings_file import load_file

EXAMPLES = Path(__file__).parents[3] / "examples"
TEXT = (EXAMPLES / "lab-4b.toml").read_text()


def load(name: str) -> Scenario:
    return load_file(Scenario, EXAMPLES / f"{name}.toml")


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("price_per_h = 0.40 ", "price_per_h = -1.0 ", "fleet vast-4090: price_per_h = -1.0: input should be greater"),
        ("price_per_h = 0.40 ", "", "fleet vast-4090: price_per_h is missing"),
        ("tokens_per_s = 1120", "tokens_per_s = inf", "vast-4090: tokens_per_s = inf: input should be a finite number"),
        ("gen_s = 170", "gen_s = -170", "baseline.colocated.gen_s = -170: input should be greater than 0"),
        ("margin = 1.05", "margin = 0.5", "baseline.async_dc.margin = 0.5: input should be greater than or equal to 1"),
        ("group_size = 8", "group_size = 7", "learner: rollouts_per_step 512 is no multiple of group_size 7"),
        ("S = [2, 3, 6, 11]", "S = []", "staleness.S: Tuple should have at least 1 item"),
        ("S = [2, 3, 6, 11]", "S = [2, -1]", "staleness.S number 2 = -1: input should be greater than or equal to 0"),
        ("S = [2, 3, 6, 11]", "S = [2]\nfreshness = 'on'", "staleness.freshness = 'on': input should be 'adaptive' or"),
        ("cap = 8192", "cap = 1000", "rollout: cap 1000 is below the median 1800"),
        ("sigma = 0.90", "sigma = 0.90\nmu = 7.0", "rollout: mu 7 is not the logarithm of the median, 7.496"),
        ('name = "vast-4090"', 'name = "vast-3090"', "two classes of the fleet are named vast-3090"),
        ('name = "vast-4090"', "", "fleet number 2: name is missing"),
        ("hours = 24", "[[simulation.departures]]\nfleet = 'x'\nat_h = 1", "no class of the fleet is named x: vast-30"),
        ("[delta]", "[deltas]", "deltas is no key of this file: did you mean delta?"),
    ],
)
def test_a_bad_scenario_is_one_line_that_names_file_and_key(tmp_path: Path, old: str, new: str, line: str) -> None:
    assert old in TEXT
    file = tmp_path / "bad.toml"
    file.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(UserError) as caught:
        load_file(Scenario, file)
    told = str(caught.value)
    assert re.match(rf"{re.escape(str(file))}(, line \d+)?: ", told)
    assert line in told
    assert "\n" not in told


def test_a_file_with_many_faults_is_still_refused_in_one_readable_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(TEXT.replace("tokens_per_s = ", "tokens_per_s = -"))
    with pytest.raises(UserError, match=r"bad.toml, line \d+: fleet vast-3090: tokens_per_s = -890: .*; and 2 more$"):
        load_file(Scenario, file)


def of_class(scenario: Scenario, name: str, random: Random | None = None) -> list[Worker]:
    one = next(one for one in scenario.fleet if one.name == name)
    return class_workers(scenario, one, one.count, random=random)


@pytest.mark.parametrize(
    ("name", "nodes", "online"),
    [
        ("lab-4b", 14, 14),
        ("volunteers-8b", 140, 83),
        ("volunteers-8b-fp8", 140, 83),
        ("internet-32b", 520, 475),
        ("internet-32b-fp8", 1000, 740),
        ("published-30b-a3b", 32, 32),
    ],
)
def test_an_example_has_the_nodes_that_its_head_speaks_of(name: str, nodes: int, online: int) -> None:
    scenario = load(name)
    assert sum(one.count for one in scenario.fleet) == nodes
    assert len(online_of(scenario, random=None)) == pytest.approx(online, abs=10 if nodes == 1000 else 0)


@pytest.mark.parametrize(("steps", "megabytes"), [(1, 80.4), (2, 126.16), (8, 310.65), (10**6, 8040.0)])
def test_a_delta_grows_with_the_steps_between_but_never_beyond_all(steps: int, megabytes: float) -> None:
    assert delta_bytes(load("lab-4b"), steps) / 1e6 == pytest.approx(megabytes, rel=1e-3)


def test_a_worker_is_what_its_class_says() -> None:
    scenario = load("lab-4b")
    worker = of_class(scenario, "vast-4090")[0]
    mean = lengths_of(scenario).mean
    assert mean == pytest.approx(2492, rel=0.01)
    assert worker.rollouts_per_s == pytest.approx(1120 / mean)
    assert worker.samples_at_once == round(1120 * 0.030)
    assert worker.place_s == pytest.approx(mean * 0.030, rel=0.02)
    assert worker.departures_per_hour == pytest.approx(1 / 150)
    assert worker.start_s > 45 + 8.04e9 / 2.5e8


def test_what_the_learner_needs_is_in_groups(tmp_path: Path) -> None:
    file = tmp_path / "early.toml"
    file.write_text(TEXT.replace("[staleness]", "[staleness]\nfreshness = 'off'"))
    for freshness, scenario in (("adaptive", load("lab-4b")), ("off", load_file(Scenario, file))):
        demand = demand_of(scenario, max_staleness=3, publish_every_steps=2)
        assert (demand.groups_per_step, demand.group_size, demand.freshness) == (64, 8, freshness)
        assert (demand.max_staleness, demand.publish_every_steps, demand.train_step_s) == (3, 2, 120)


def test_links_without_chance_have_the_median_and_share_of_their_class() -> None:
    workers = of_class(load("volunteers-8b"), "home-3090")
    downs = sorted(one.downlink_bytes_per_s for one in workers)
    assert downs[len(downs) // 2] == pytest.approx(250e6 / 8)
    assert sum(one.public for one in workers) == round(0.70 * 45)
    assert math.prod(one.uplink_bytes_per_s / 5e6 for one in workers) == pytest.approx(1)


def test_links_by_chance_are_drawn_by_the_seed() -> None:
    scenario = load("volunteers-8b")
    once, again, other = (of_class(scenario, "home-3090", random=Random(seed)) for seed in (1, 1, 2))
    assert once == again
    assert once != other
    downs = sorted(one.downlink_bytes_per_s for one in once)
    assert downs[0] < 250e6 / 8 / 1.5 < 250e6 / 8 * 1.5 < downs[-1]
