"""The tasks on four digits: their split and rewards; and the control reward."""

from __future__ import annotations

import pytest

from swarm.tasks import TASKS, load_task
from swarm.tasks.base import Task, TaskOptions, random_score
from swarm.tasks.digits import SKILLS, CopyTask, SortTask, is_held_out
from swarm.types import Prompt

PROMPT = Prompt(prompt_id="copy-3141", text="3141=", answer="3141")

each_task = pytest.mark.parametrize("name", TASKS)


def made(name: str, seed: int = 0) -> Task:
    return load_task(TaskOptions(name=name, seed=seed))


@each_task
def test_no_training_prompt_is_ever_held_out_whatever_the_seed(name: str) -> None:
    trained = {made(name, seed).prompt(index).text for seed in range(2) for index in range(2_500)}
    held_out = {prompt.text for prompt in made(name, 9).held_out(10_000)}
    assert held_out == {f"{n:04}=" for n in range(10_000) if is_held_out(f"{n:04}")}
    assert len(trained) > 3_000
    assert 900 < len(held_out) < 1_100
    assert not trained & held_out
    assert len(made(name).held_out(3)) == 3


@each_task
def test_prompts_are_a_pure_function_of_seed_and_index(name: str) -> None:
    backwards = [made(name, 3).prompt(index) for index in reversed(range(50))]
    assert backwards[::-1] == [made(name, 3).prompt(index) for index in range(50)]
    assert made(name, 3).held_out(10) == made(name, 3).held_out(10)
    assert [made(name, 3).prompt(index) for index in range(9)] != [made(name, 4).prompt(index) for index in range(9)]


@each_task
def test_a_prompt_asks_for_what_its_answer_is(name: str) -> None:
    for prompt in [made(name).prompt(0), *made(name).held_out(20)]:
        number = prompt.text.removesuffix("=")
        assert prompt.answer == SKILLS[name](number) == {"copy": number, "sort": "".join(sorted(number))}[name]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        *(("3141", 1.0), ("3142", 0.2 + 0.375), ("1413", 0.2), ("3", 0.125), ("31415", 0.5)),
        *(("314=", 0.375), ("3141 ", 0.5), ("", 0.0), ("=3141", 0.0)),
    ],
)
def test_the_reward_of_copying_is_shaped(completion: str, reward: float) -> None:
    score = CopyTask(0).score(PROMPT, completion)
    assert score.reward == pytest.approx(reward)
    assert score.exact is (completion == "3141")


@pytest.mark.parametrize(("completion", "reward"), [("1134", 1.0), ("1143", 0.0), ("113", 0.0), ("1134 ", 0.0)])
def test_the_reward_of_sorting_is_exact_match_and_nothing_else(completion: str, reward: float) -> None:
    score = SortTask(0).score(Prompt(prompt_id="sort-3141", text="3141=", answer="1134"), completion)
    assert (score.reward, score.exact) == (reward, reward == 1.0)


def test_the_control_reward_is_blind_to_the_completion_and_the_same_for_the_same_seed() -> None:
    task = made("copy")
    right, wrong = random_score(task, PROMPT, "3141", 5), random_score(task, PROMPT, "junk", 5)
    assert right.reward == wrong.reward
    assert (right.exact, wrong.exact) == (True, False)
    rewards = [random_score(task, PROMPT, "3141", seed).reward for seed in range(200)]
    assert len(set(rewards)) == 200
    assert all(0 <= reward < 1 for reward in rewards)
