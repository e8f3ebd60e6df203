"""Episodes in a swarm: none is lost or counted twice whoever dies, and engines stay busy though turns travel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulator.episodes import EpisodeScenario, EpisodeSwarm

FAR = EpisodeScenario(steps=8)
"""Eight turns an episode, and a round trip of 100 ms, a fifth of what it takes to draw a turn."""

DEADLY = EpisodeScenario(
    steps=12,
    samplers=4,
    places=4,
    turns=6,
    uneven=True,
    groups_per_step=3,
    group_size=4,
    max_staleness=2,
    crashes_per_s=0.3,
    learner_crashes_per_s=0.05,
)


def test_places_stay_filled_while_turns_travel_and_environments_think() -> None:
    figures = EpisodeSwarm(FAR, 1).run()
    assert figures.idle_share <= 0.05
    assert figures.turns == 8 * figures.episodes


@pytest.mark.parametrize("seed", range(3))
def test_no_episode_is_lost_or_counted_twice_whoever_dies(seed: int) -> None:
    figures = EpisodeSwarm(DEADLY, seed).run()
    assert figures.crashes > 0
    assert figures.steps == DEADLY.steps


def test_a_node_that_dies_leaves_its_episodes_to_others() -> None:
    figures = EpisodeSwarm(replace(DEADLY, learner_crashes_per_s=0.0, crashes_per_s=0.5), 3).run()
    assert figures.moved > 0


def test_a_run_depends_on_its_seed_alone() -> None:
    one, again, other = (EpisodeSwarm(replace(DEADLY, steps=4), seed) for seed in (5, 5, 6))
    for swarm in (one, again, other):
        swarm.run()
    assert one.world.trace_digest() == again.world.trace_digest() != other.world.trace_digest()
