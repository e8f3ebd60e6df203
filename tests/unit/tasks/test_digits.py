"""The sort task: its split, its reward, and that it does not say more than it shows."""

from __future__ import annotations

import pytest

from swarm.tasks import load_task
from swarm.tasks.base import TaskOptions
from swarm.tasks.digits import SKILLS, SortTask, is_held_out
from swarm.types import Prompt

TASK = SortTask(0)
PROMPT = Prompt(prompt_id="sort-3141", text="3141=", answer="1134")


def test_no_training_prompt_is_ever_held_out() -> None:
    trained = {TASK.prompt(index).text for index in range(5_000)}
    held_out = {prompt.text for prompt in TASK.held_out(10_000)}
    assert len(trained) > 3_000
    assert held_out == {f"{n:04}=" for n in range(10_000) if is_held_out(f"{n:04}")}
    assert not trained & held_out


def test_prompts_are_a_pure_function_of_seed_and_index() -> None:
    backwards = [SortTask(3).prompt(index) for index in reversed(range(50))]
    assert backwards[::-1] == [SortTask(3).prompt(index) for index in range(50)]
    assert [SortTask(3).prompt(index) for index in range(9)] != [SortTask(4).prompt(index) for index in range(9)]


def test_a_prompt_asks_for_its_digits_in_ascending_order() -> None:
    for prompt in [TASK.prompt(0), *TASK.held_out(20)]:
        number = prompt.text.removesuffix("=")
        assert prompt.answer == SKILLS["sort"](number) == "".join(sorted(number))


@pytest.mark.parametrize(
    ("completion", "reward"), [("1134", 1.0), ("1143", 0.0), ("3141", 0.0), ("113", 0.0), ("1134 ", 0.0), ("", 0.0)]
)
def test_the_reward_is_exact_match_and_nothing_else(completion: str, reward: float) -> None:
    score = TASK.score(PROMPT, completion)
    assert (score.reward, score.exact) == (reward, reward == 1.0)


def test_it_is_found_by_name_and_says_that_it_elicits() -> None:
    task = load_task(TaskOptions(name="sort"))
    assert isinstance(task, SortTask)
    assert "elicits a skill that the base" in task.description
