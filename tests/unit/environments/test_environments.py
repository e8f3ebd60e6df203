"""What every environment keeps: the same episode for the same seed, and no reward for not playing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples.environments.puzzles import KnightsAndKnaves, Sokoban
from swarm.environments.base import Environment
from swarm.environments.frozen_lake import IDLE, PENALTY, PROGRESS, FrozenLake
from swarm.learner.tiny import CHARACTERS
from tests.unit.environments import players
from tests.unit.environments.players import earned, guesser, local_walker, play, random_of, shortest_walker

MAKERS: dict[str, Callable[[], Environment]]
MAKERS = {"frozen-lake": FrozenLake, "sokoban": Sokoban, "knights-and-knaves": KnightsAndKnaves}
LEAST = {"frozen-lake": -PENALTY - 8 * IDLE, "sokoban": 0.0, "knights-and-knaves": 0.0}
every = pytest.mark.parametrize("name", MAKERS)
WORDS = st.sampled_from(["0", "1", "2", "3", "RRRR", "DDDD", "LU", "Ava is a knight", "", "\x00", "9" * 99])


@every
def test_an_episode_is_a_function_of_its_seed_and_what_was_said(name: str) -> None:
    said = random_of("0123LRUD", 3, 1)
    texts = [said("") for _ in range(20)]
    first, again = MAKERS[name](), MAKERS[name]()
    again.reset(99)
    again.step("R")
    for seed in (0, 1, 1 << 62):
        assert first.reset(seed) == again.reset(seed)
        assert [first.step(text) for text in texts] == [again.step(text) for text in texts]
    assert len({tuple(first.reset(seed)) for seed in range(30)}) > 20


@every
def test_silence_and_nonsense_earn_nothing(name: str) -> None:
    for text in ("", " ", "\n", "I do not want to play.", "0123" * 9, "a" * 10_000):
        found = [earned(MAKERS[name](), seed, lambda read, text=text: text) for seed in range(20)]  # type: ignore[misc]
        assert max(reward for reward, _ in found) <= 0
        assert not any(solved for _, solved in found)


@every
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_is_said_rewards_are_finite_and_bounded(name: str, data: st.DataObject) -> None:
    environment = MAKERS[name]()
    environment.reset(data.draw(st.integers(0, 5)))
    total = 0.0
    for text in data.draw(st.lists(st.one_of(st.text(max_size=30), WORDS), max_size=environment.max_turns)):
        step = environment.step(text)
        assert all(math.isfinite(reward) for reward in step.rewards)
        total += step.rewards[0]
        assert LEAST[name] - 1e-9 <= total <= 1 + 1e-9
        assert step.done or not step.solved
        if step.done:
            break


# -- frozen lake ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lake", [FrozenLake(), FrozenLake(size=6, holes=8), FrozenLake(size=2, holes=1)])
def test_every_lake_has_a_way_that_earns_all(lake: FrozenLake) -> None:
    for seed in range(100):
        reward, solved = earned(lake, seed, shortest_walker())
        assert solved
        assert reward == pytest.approx(1)


def test_the_tiny_model_knows_all_that_is_said() -> None:
    lake = FrozenLake()
    for seed in range(20):
        said = [content for _, content in lake.reset(seed)]
        said += [content for step in play(lake, seed, random_of("0123", 1, seed)) for _, content in step.messages]
        assert set("".join(said)) <= set(CHARACTERS)


def test_without_the_goal_there_is_what_coming_nearer_gives_at_most() -> None:
    lake, endings = FrozenLake(), set[str]()
    for seed in range(300):
        steps = list(play(lake, seed, random_of("12", 1, seed)))
        total, idle = sum(step.rewards[0] for step in steps), sum(step.parts["invalid_moves"] for step in steps)
        ending = "goal" if steps[-1].solved else "hole" if steps[-1].done else "limit"
        least, most = {"goal": (1.0, 1.0), "hole": (-PENALTY, PROGRESS - PENALTY), "limit": (0.0, PROGRESS)}[ending]
        assert least - 1e-9 <= total + IDLE * idle < most + 1e-9
        endings.add(ending)
    assert endings == {"goal", "hole", "limit"}


def test_walking_blindly_earns_little_on_the_lake() -> None:
    lake = FrozenLake()
    for move in "0123":
        assert not any(earned(lake, seed, lambda read, move=move: move)[1] for seed in range(50))  # type: ignore[misc]
    blind = [earned(lake, seed, random_of("12", 1, seed)) for seed in range(200)]
    seeing = [earned(lake, seed, local_walker) for seed in range(200)]
    assert sum(reward for reward, _ in blind) < 0.3 * 200 < 0.5 * 200 < sum(reward for reward, _ in seeing)


# -- Sokoban -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sokoban", [Sokoban(), Sokoban(size=4, boxes=2)])
def test_every_board_begins_unsolved_and_can_be_solved(sokoban: Sokoban) -> None:
    for seed in range(20):
        assert "@" in sokoban.reset(seed)[0][1].split("\n", 2)[2]
        reward, solved = earned(sokoban, seed, players.sokoban_solver)
        assert solved
        assert reward == pytest.approx(1)


def test_pushing_a_box_off_its_goal_takes_its_reward_back() -> None:
    sokoban = Sokoban(boxes=2)
    sokoban.reset(0)
    sokoban._board = list("+++++++*@X-++@-X-++----++----+++++++")
    sokoban._share = 0.5
    assert sokoban.step("R").rewards == (0.5,)
    assert sokoban.step("R").rewards == (-0.5,)
    assert sokoban.step("I go R, then RR").parts == {"invalid_moves": 1.0}


def test_a_turn_is_four_moves_and_ends_at_what_cannot_be_done() -> None:
    sokoban = Sokoban()
    sokoban.reset(0)
    sokoban._board = list("+++++++*---++----++-@--++--X-+++++++")
    assert sokoban.step("RRRD").parts == {"invalid_moves": 0.0}
    assert sokoban._board.index("*") == 16
    assert sokoban.step("LLLUUUU").parts == {"invalid_moves": 0.0}
    assert sokoban._board.index("*") == 7
    assert sokoban.step("URR").parts == {"invalid_moves": 1.0}
    assert sokoban._board.index("*") == 7


# -- Knights and Knaves --------------------------------------------------------------------------------------


def test_the_truth_earns_all_at_once_and_less_later() -> None:
    knights = KnightsAndKnaves()
    for seed in range(10):
        knights.reset(seed)
        truth = ", ".join(f"{name} is a {role}" for name, role in knights._truth.items())
        assert knights.step(truth).rewards == (1.0,)
        knights.reset(seed)
        told = knights.step(truth.rpartition(",")[0]).messages[0][1]
        assert all(name in told for name in knights._truth)
        step = knights.step(truth)
        assert (step.rewards, step.done, step.solved) == ((0.2,), True, True)


def test_naming_both_roles_is_one_claim() -> None:
    knights = KnightsAndKnaves()
    knights.reset(3)
    (name, role), *_ = knights._truth.items()
    other = next(term for term in knights._terms if term != role)
    rest = ", ".join(f"{one} is a {its}" for one, its in knights._truth.items())
    assert not knights.step(f"{rest}. {name} is a {role}. {name} is a {other}.").solved
    assert knights.step(f"{name}: {other}. {rest.upper()}").solved


def test_guessing_pays_far_less_than_reasoning() -> None:
    knights = KnightsAndKnaves()
    for listens, most in ((False, 0.2), (True, 0.3)):
        assert sum(earned(knights, seed, guesser(seed, listens=listens))[0] for seed in range(200)) < most * 200
