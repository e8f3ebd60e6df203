"""Every process dies: the learner, its trainer or both before every effect of a small run, and again and again in
larger ones; a sampler before every action of a small run.

Each run checks that what was told to anybody is on record, that steps trained again consume the same rollouts in the
same order, and that what was acknowledged is trained on once or dropped for a true reason.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.types import NodeId
from tests.simulator.rollouts.cluster import Cluster
from tests.simulator.rollouts.scenario import (
    DEATHS,
    TINY,
    TINY_EPISODES,
    TINY_SEQUENTIAL,
    UNLIMITED_HOLD,
    Crash,
    Death,
    SamplerCrash,
    Scenario,
    scenario_named,
)

pytestmark = pytest.mark.slow

SMALL = pytest.mark.parametrize("small", [TINY, TINY_SEQUENTIAL, TINY_EPISODES], ids=lambda small: small.name)
SEEDS = pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 9))])


def crash_before_each_effect(small: Scenario, what: Death, seed: int) -> None:
    whole = Cluster(small, seed)
    whole.run()
    assert whole.points > 200
    for effect in range(1, whole.points + 1):
        figures = Cluster(replace(small, crashes=(Crash(effect=effect, what=what),)), seed).run()
        assert (figures.crashes, figures.steps) == (1, small.steps)


def crash_before_each_action(small: Scenario, node: NodeId, seed: int) -> int:
    """How many rollouts were accepted from the spool of a former life and trained on, over all these runs."""
    whole = Cluster(small, seed)
    whole.run()
    assert whole.actions(node) > 40
    saved = 0
    for action in range(1, whole.actions(node) + 1):
        lines: list[str] = []
        crash = SamplerCrash(action=action, node=node)
        figures = Cluster(replace(small, crashes=(crash,)), seed, tell=lines.append).run()
        assert figures.steps == small.steps
        assert sum(line.endswith(f"at action {action}") for line in lines) == 1
        saved += len(saved_by_the_spool(node, lines))
    return saved


def saved_by_the_spool(node: NodeId, lines: list[str]) -> set[str]:
    """Rollouts that were accepted of a life that had not generated anything yet, and were trained on."""
    accepted: set[str] = set()
    returned = next((i for i, line in enumerate(lines) if line.endswith(f"{node} returns")), len(lines))
    for line in lines[returned:]:
        words = line.split()
        if line.endswith(f"{node} generated"):
            break
        if line.endswith(f"of {node} is accepted"):
            accepted.add(words[1])
    trained = {word for line in lines if " takes " in line for word in line.split()[4:]}
    return accepted & trained


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[] if what == "both" else pytest.mark.long) for what in DEATHS]
)
@SEEDS
@SMALL
def test_a_crash_before_any_one_effect_is_survived(small: Scenario, seed: int, what: Death) -> None:
    crash_before_each_effect(small, what, seed)


@SEEDS
@pytest.mark.parametrize("node", [NodeId(f"s{i}") for i in range(TINY.samplers)])
@SMALL
def test_a_crash_of_a_sampler_before_any_one_action_is_survived_and_its_spool_counts(
    small: Scenario, node: NodeId, seed: int
) -> None:
    assert crash_before_each_action(small, node, seed) > 0 or seed


@pytest.mark.parametrize("what", DEATHS)
def test_a_sampler_and_the_learner_may_both_crash(what: Death) -> None:
    """The spool of a life that is over meets a learner that is down, comes up, or has come up since."""
    for at in range(4, 60, 2):
        crashes = (SamplerCrash(action=at, node=NodeId("s0")), Crash(effect=3 * at, what=what))
        assert Cluster(replace(TINY, crashes=crashes), 0).run().steps == TINY.steps


@pytest.mark.parametrize("first", range(1, 200, 8))
def test_a_crash_soon_after_another_is_survived(first: int) -> None:
    """The second one falls into the recovery, or shortly after it."""
    for apart in (1, 2, 3, 5, 8, 13, 21):
        crashes = (Crash(effect=first, what="both"), Crash(effect=first + apart, what=DEATHS[apart % 3]))
        assert Cluster(replace(TINY, crashes=crashes), 0).run().crashes == 2


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
