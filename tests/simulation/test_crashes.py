"""The learner dies, its trainer or both: before every effect of a small run, and again and again in larger ones.

Each run checks that what was told to anybody is on record, that steps trained again consume the same rollouts in the
same order, and that what was acknowledged is trained on once or dropped for a true reason (swarm/sim/lineage.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.sim.cluster import Cluster
from swarm.sim.scenario import DEATHS, NAMED, TINY, UNLIMITED_HOLD, Crash, Death, scenario_named


def effects_of(seed: int) -> int:
    """How many effects the small run has without a crash."""
    cluster = Cluster(TINY, seed)
    cluster.run()
    return cluster.points


@pytest.mark.parametrize("what", DEATHS)
def test_a_crash_before_any_one_effect_is_survived(what: Death) -> None:
    effects = effects_of(0)
    assert effects > 200
    for effect in range(1, effects + 1):
        figures = Cluster(replace(TINY, crashes=(Crash(effect=effect, what=what),)), 0).run()
        assert (figures.crashes, figures.steps) == (1, TINY.steps)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("what", DEATHS)
def test_a_crash_before_any_one_effect_is_survived_whatever_the_seed(what: Death, seed: int) -> None:
    for effect in range(1, effects_of(seed) + 1):
        Cluster(replace(TINY, crashes=(Crash(effect=effect, what=what),)), seed).run()


@pytest.mark.parametrize("first", range(1, 200, 8))
def test_a_crash_soon_after_another_is_survived(first: int) -> None:
    """The second one falls into the recovery, or shortly after it."""
    for apart in (1, 2, 3, 5, 8, 13, 21):
        crashes = (Crash(effect=first, what="both"), Crash(effect=first + apart, what=DEATHS[apart % 3]))
        assert Cluster(replace(TINY, crashes=crashes), 0).run().crashes == 2


@pytest.mark.parametrize("name", ["crashes", "crashes-sequential"])
def test_a_run_with_many_crashes_takes_all_its_steps(name: str) -> None:
    figures = Cluster(NAMED[name], 0).run()
    assert figures.crashes >= 10
    assert figures.steps == NAMED[name].steps


def test_a_sampler_carries_on_by_itself_after_a_crash() -> None:
    """Answers to leases of before the crash are accepted after it."""
    lines: list[str] = []
    crash = Crash(effect=60, what="both")
    Cluster(replace(TINY, crashes=(crash,)), 0, tell=lines.append).run()
    (crashed,) = (i for i, line in enumerate(lines) if line.endswith(f"crash both at effect {crash.effect}"))
    restarted = next(i for i, line in enumerate(lines) if line.endswith("learner restarts"))
    first_install = next(i for i, line in enumerate(lines[restarted:], restarted) if "has 0." in line)
    accepted = [i for i, line in enumerate(lines) if line.endswith("is accepted")]
    assert any(restarted < i < first_install for i in accepted)
    assert not any(crashed < i < restarted for i in accepted)


@pytest.mark.parametrize("seed", range(6))
def test_a_crash_makes_nothing_stale_while_hold_is_unlimited(seed: int) -> None:
    scenario = scenario_named(UNLIMITED_HOLD, seed)
    crashes = tuple(Crash(effect=200 * (i + 1), what=DEATHS[(seed + i) % 3]) for i in range(4))
    figures = Cluster(replace(scenario, crashes=crashes), seed).run()
    assert figures.crashes >= 1
    assert (figures.verdicts["stale"], figures.dropped["stale"]) == (0, 0)
