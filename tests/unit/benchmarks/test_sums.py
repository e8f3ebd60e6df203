"""The sums that examples/sums.jsonl asks, and how they are split."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from benchmarks.sums import WORKED, WORKED_PAIRS, lines
from swarm.tasks import load_task
from swarm.tasks.base import TaskOptions
from swarm.types import Prompt

FILE = Path(__file__).parents[3] / "examples" / "sums.jsonl"
TASK = load_task(TaskOptions(name=f"jsonl:{FILE}", rewards={"numeric": 1.0}))


def _pairs(prompts: Iterable[Prompt]) -> list[tuple[int, ...]]:
    asked = [re.fullmatch(r"(\d+)[+-](\d+)=", prompt.text.removeprefix(WORKED)) for prompt in prompts]
    return [tuple(sorted(map(int, found.groups()))) for found in asked if found]


def test_the_file_is_what_the_script_writes() -> None:
    assert FILE.read_text() == "".join(lines())


def test_no_pair_of_numbers_is_on_both_sides() -> None:
    held_out, train = _pairs(TASK.held_out(10_000)), _pairs(map(TASK.prompt, range(TASK.size or 0)))
    assert len(held_out) + len(train) == len(lines())
    assert not set(held_out) & set(train)
    assert not {*held_out, *train} & {*WORKED_PAIRS}


def test_the_first_300_held_out_questions_are_a_mix() -> None:
    held_out = TASK.held_out(300)
    assert len(held_out) == 300
    for some in (held_out[:100], held_out[100:200], held_out[200:]):
        assert 20 <= sum("-" in prompt.text.removeprefix(WORKED) for prompt in some) <= 47


def test_answers_are_right_and_are_what_the_reward_reads() -> None:
    for prompt in TASK.held_out(300):
        left, sign, right = re.split(r"([+-])", prompt.text.removeprefix(WORKED).removesuffix("="))
        assert prompt.answer == str(int(left) + int(right) if sign == "+" else int(left) - int(right))
        assert TASK.score(prompt, prompt.answer + "\n").exact
