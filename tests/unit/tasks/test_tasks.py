"""The copy task's split and rewards, and the control reward."""

from __future__ import annotations

import pytest

from swarm.errors import UserError
from swarm.tasks import TASKS, load_task
from swarm.tasks.base import Task, TaskOptions, random_score
from swarm.tasks.digits import CopyTask, is_held_out
from swarm.types import Prompt

TASK = CopyTask(0)
PROMPT = Prompt(prompt_id="copy-3141", text="3141=", answer="3141")


def test_no_training_prompt_is_ever_held_out() -> None:
    trained = {TASK.prompt(i).answer for i in range(5_000)}
    held_out = {prompt.answer for prompt in TASK.held_out(900)}
    assert len(trained) > 3_000
    assert len(held_out) == 900
    assert not trained & held_out


def test_the_split_is_the_same_for_every_seed() -> None:
    assert not any(is_held_out(CopyTask(seed).prompt(i).answer) for seed in range(5) for i in range(200))
    assert all(is_held_out(prompt.answer) for prompt in CopyTask(9).held_out(200))


def test_about_a_tenth_is_held_out() -> None:
    assert 900 < sum(is_held_out(f"{i:04}") for i in range(10_000)) < 1_100


def test_prompts_are_a_pure_function_of_seed_and_index() -> None:
    backwards = [CopyTask(3).prompt(i) for i in reversed(range(50))]
    assert backwards[::-1] == [CopyTask(3).prompt(i) for i in range(50)]
    assert CopyTask(3).held_out(10) == CopyTask(3).held_out(10)
    assert [CopyTask(3).prompt(i) for i in range(9)] != [CopyTask(4).prompt(i) for i in range(9)]


def test_asked_for_more_held_out_prompts_than_there_are_it_gives_all() -> None:
    numbers = {prompt.answer for prompt in TASK.held_out(10_000)}
    assert numbers == {f"{i:04}" for i in range(10_000) if is_held_out(f"{i:04}")}


def test_a_prompt_asks_for_what_its_answer_is() -> None:
    for prompt in [TASK.prompt(0), *TASK.held_out(3)]:
        assert prompt.text == prompt.answer + "="
        assert len(prompt.answer) == 4


@pytest.mark.parametrize(
    ("completion", "reward", "exact"),
    [
        ("3141", 1.0, True),
        ("3142", 0.2 + 0.375, False),
        ("1413", 0.2, False),
        ("0000", 0.2, False),
        ("3", 0.125, False),
        ("31415", 0.5, False),
        ("314=", 0.375, False),
        ("3141 ", 0.5, False),
        ("", 0.0, False),
        ("=3141", 0.0, False),
    ],
)
def test_the_reward_is_shaped(completion: str, reward: float, exact: bool) -> None:
    score = TASK.score(PROMPT, completion)
    assert score.reward == pytest.approx(reward)
    assert score.exact is exact


def test_the_control_reward_is_blind_to_the_completion_and_the_same_for_the_same_seed() -> None:
    right, wrong = random_score(TASK, PROMPT, "3141", 5), random_score(TASK, PROMPT, "junk", 5)
    assert right.reward == wrong.reward
    assert (right.exact, wrong.exact) == (True, False)
    rewards = [random_score(TASK, PROMPT, "3141", seed).reward for seed in range(200)]
    assert len(set(rewards)) == 200
    assert all(0 <= reward < 1 for reward in rewards)


def test_a_task_is_found_by_name_or_the_names_are_said() -> None:
    task: Task = load_task(TaskOptions(name="copy", seed=1))
    assert task.name == "copy"
    with pytest.raises(UserError, match="no task 'cpy'; known tasks: copy"):
        load_task(TaskOptions(name="cpy"))
    assert all(load_task(TaskOptions(name=name)).name == name for name in TASKS)
