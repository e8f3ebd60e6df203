"""Environments of gymnasium in words."""

from __future__ import annotations

import pytest

from swarm.errors import UserError
from swarm.extras import missing
from swarm.tasks import load_task
from swarm.tasks.base import TaskOptions
from tests.unit.environments.players import earned, play

needs_gymnasium = pytest.mark.skipif(bool(missing("gymnasium")), reason="gymnasium is not installed")


@pytest.mark.skipif(not missing("gymnasium"), reason="gymnasium is installed")
def test_without_the_package_a_line_says_how_to_have_it() -> None:
    with pytest.raises(UserError, match=r"gymnasium:Taxi-v4 needs the extra `gymnasium`"):
        load_task(TaskOptions(name="gymnasium:Taxi-v4"))


@needs_gymnasium
def test_an_episode_is_a_function_of_its_seed() -> None:
    task = load_task(TaskOptions(name="gymnasium:FrozenLake-v1"))
    one, other = task.environment(), task.environment()
    assert one is not None
    assert other is not None
    steps = [list(play(environment, 1 << 62, lambda read: "I go 2")) for environment in (one, other)]
    assert steps[0] == steps[1]
    assert "[S]FFF" in one.reset(3)[0][1]
    assert one.max_turns == 100
    assert one.step("nothing").parts == {"invalid_moves": 1.0}
    assert {prompt.prompt_id for prompt in task.held_out(5)}.isdisjoint(task.prompt(i).prompt_id for i in range(50))


@needs_gymnasium
def test_silence_earns_no_more_than_random_play() -> None:
    for name, most in (("Blackjack-v1", 0.0), ("CliffWalking-v1", -50.0), ("FrozenLake-v1", 0.1)):
        environment = load_task(TaskOptions(name=f"gymnasium:{name}")).environment()
        assert sum(earned(environment, seed, lambda read: "")[0] for seed in range(50)) / 50 <= most


@needs_gymnasium
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("CartPole-v1", "no words for its observations"),
        ("Nowhere-v1", "cannot be made: .*Nowhere"),
        ("Taxi-v3", "cannot be made: .*Taxi-v4"),
    ],
)
def test_what_cannot_be_said_is_told_in_a_line(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        load_task(TaskOptions(name=f"gymnasium:{name}"))
    assert "\n" not in str(caught.value)


@needs_gymnasium
def test_no_colour_is_left_where_the_passenger_is_in_the_taxi() -> None:
    environment = load_task(TaskOptions(name="gymnasium:Taxi-v4")).environment()
    texts = [environment.reset(seed)[0][1] for seed in range(30)]
    assert not any("\x1b" in text for text in texts)
    assert all(text.count("[") == text.count("]") >= 2 for text in texts)
    assert "[Y]" in texts[5]
