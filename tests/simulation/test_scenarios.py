"""The swarm on a virtual clock holds every invariant: named scenarios, random ones, and the same run twice.

Each run checks I1, I3 to I5, I7, the pacing rule, the leases and liveness after every event; a
failure's message ends with the command that replays it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest

from tests.simulator.rollouts.cluster import Cluster
from tests.simulator.rollouts.learner import Figures
from tests.simulator.rollouts.scenario import NAMED, RANDOM, Scenario, scenario_named

REFUSED_LATE = 1_512  # An answer is refused once a batch was chosen without its group
SEEDS = [range(seed, seed + 1) for seed in (*range(40), REFUSED_LATE)]
"""With seeds 1 (a restarted sampler's old leases) and 13, 22, 23 (a failure counted twice), which found bugs."""

LONG = [pytest.param(range(first, first + 100), marks=pytest.mark.long) for first in range(40, 2000, 100)]


@cache
def run(name: str, seed: int) -> Figures:
    return Cluster(scenario_named(name, seed), seed).run()


@pytest.mark.parametrize("seeds", [*SEEDS, *LONG], ids=str)
def test_random_swarms_hold_every_invariant(seeds: range) -> None:
    for seed in seeds:
        scenario, figures = Scenario.random(seed), run(RANDOM, seed)
        bounds = (scenario.max_staleness, *(change.max_staleness for change in scenario.bound_changes))
        assert figures.steps == scenario.steps
        assert figures.staleness_max <= max(bounds)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("name", [name for name in NAMED if name != "paced"])
def test_a_named_swarm_takes_all_its_steps_and_measures_the_last_version(name: str, seed: int) -> None:
    figures = run(name, seed)
    assert figures.steps == NAMED[name].steps
    assert figures.evaluations >= 2


@pytest.mark.parametrize("period", [1, 2, 3, 4, 5])
def test_the_longest_allowed_period_uses_the_whole_bound(period: int) -> None:
    assert NAMED[f"period-{period}"].publish_every_steps == period
    assert run(f"period-{period}", 0).staleness_max == period - 1


@pytest.mark.parametrize(
    ("name", "happens"),
    [
        ("polite", lambda found: found.verdicts["handed"] > 10),
        ("slow-broadcast", lambda found: found.idle_share > run("default", 0).idle_share),
        ("lossy", lambda found: found.verdicts["duplicate"] > 0 and found.trained == found.steps * 16),
        ("partition", lambda found: found.verdicts["duplicate"] > 0 and found.samples_lost > 0),
        ("failing-generations", lambda found: found.verdicts["failed"] > found.trained * 0.3),
        ("failing-generations", lambda found: found.trained == found.steps * 16),
        ("churn", lambda found: found.samples_lost > 0),
        ("episodes", lambda found: found.samples_lost > 0),
    ],
    ids=[
        *("what was begun is handed over", "a slow broadcast slows the learner", "lost answers come again"),
        *("answers come again across a partition", "generations fail", "and are not trained on"),
        *("a crash leaves samples to others", "and episodes"),
    ],
)
def test_in_a_named_swarm_happens_what_it_is_for(name: str, happens: Callable[[Figures], bool]) -> None:
    assert happens(run(name, 0))


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5])
def test_a_sampler_that_leaves_politely_leaves_no_sample_behind(seed: int) -> None:
    """With seed 2 a farewell overtakes the question sent 8 ms before it, whose leases then wait for silence."""
    assert run("polite", seed).samples_lost == 0


def test_a_late_joiner_contributes() -> None:
    lines: list[str] = []
    Cluster(NAMED["late-joiners"], 0, tell=lines.append).run()
    joined_at_s = next(float(line.split()[0]) for line in lines if line.endswith("s2 joins"))
    accepted_at_s = next(float(line.split()[0]) for line in lines if line.endswith("of s2 is accepted"))
    assert joined_at_s == 30.0
    assert accepted_at_s > joined_at_s


@pytest.mark.parametrize("seed", [0, 1])
def test_constant_lengths_and_enough_samplers_neither_idle_nor_discard(seed: int) -> None:
    figures = run("paced", seed)
    assert figures.idle_share < 0.005
    assert sum(figures.dropped.values()) == 0
    assert figures.verdicts["stale"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", ["--seed 3 --scenario churn", "--seed 13", "--gossip --seed 3", "--broadcast --seed 270"]
)
def test_the_same_seed_gives_the_same_trace_whatever_the_hash_seed(arguments: str) -> None:
    """In 270 nodes that nobody links to starved once."""
    command = [sys.executable, "-m", "tests.simulator", *arguments.split()]
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in ("1", "2")]
    said = [subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout for env in environments]
    assert "digest" in said[0]
    assert said[0] == said[1]
