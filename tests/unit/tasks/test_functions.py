"""Rewards that are functions of the user's: how they are called, and what is said of those that cannot be."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from swarm.errors import UserError
from swarm.lead.check import check_rewards, reward_pool
from swarm.settings import LeadConfig
from swarm.settings_file import load_config
from swarm.tasks import hub, load_task, questions, task_options
from swarm.tasks.questions import QuestionTask
from swarm.types import Score

JUDGE = """
import neighbour

def plain(prompt, completion, answer):
    return float((prompt, completion, answer) == ("What is 1 + 1?", "2", "2")) + neighbour.NOTHING

def of_column(completion, difficulty):
    return difficulty

def trl(prompts, completions, answer, difficulty, **columns):
    assert prompts == ["What is 1 + 1?"] and columns == {"topic": ["sums"], "held_out": [True]}, (prompts, columns)
    return [d if c == a else 0 for c, a, d in zip(completions, answer, difficulty)]

def trl_of_chats(prompts, completions, **columns):
    assert prompts == [[{"role": "user", "content": "What is 1 + 1?"}]], prompts
    return [float(completion[0]["content"] == "2") for completion in completions]

async def slow(completions, **columns):
    return [None]

def of_its_own_column(question, completions, *args, **columns):
    return [float(question == ["What is 1 + 1?"])]

def wrong(x, y):
    return 0

def needs(completion, colour):
    return 0

def raises(completion):
    return 1 / len(completion)
"""
ASKED = "What is 1 + 1?"
LINE = {"answer": 2, "difficulty": 0.5, "topic": "sums"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("judge.py").write_text(JUDGE)
    Path("neighbour.py").write_text("NOTHING = 0\n")
    for name, held_out in {"texts": ASKED, "chats": [{"role": "user", "content": ASKED}]}.items():
        lines = [{"prompt": held_out, "held_out": True} | LINE, {"prompt": "-", "held_out": False} | LINE]
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    Path("rows.csv").write_text(f"prompt,answer,difficulty,topic\n{ASKED},2,0.5,sums\n")


def _config(*rewards: str, task: str = "texts.jsonl") -> LeadConfig:
    return load_config(LeadConfig, None, {"model": "m", "task": task, "rewards": list(rewards)})


def _earned(answer: str, *rewards: str, task: str = "texts.jsonl") -> Score:
    made = load_task(task_options(_config(*rewards, task=task)))
    return made.score(made.prompt(0) if task == "rows.csv" else made.held_out(1)[0], answer)


@pytest.mark.parametrize(
    ("reward", "task", "right", "wrong"),
    [
        ("judge.py:plain", "texts.jsonl", 1, 0),
        ("judge.py:of_column", "texts.jsonl", 0.5, 0.5),
        ("judge.py:trl", "texts.jsonl", 0.5, 0),
        ("judge.py:trl_of_chats", "chats.jsonl", 1, 0),
        ("judge.py:slow", "texts.jsonl", 0, 0),
    ],
)
def test_a_function_is_called_as_its_signature_says(reward: str, task: str, right: float, wrong: float) -> None:
    assert (_earned("2", reward, task=task).reward, _earned("3", reward, task=task).reward) == (right, wrong)


def test_a_data_set_of_another_format_has_its_other_columns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "split", lambda found, options: (found.train, found.train))
    assert _earned("2", "judge.py:of_column", task="rows.csv").reward == 0.5
    kept = load_task(task_options(_config("exact", task="rows.csv"))).prompt(0)
    assert kept.row == ""  # Nobody would read it


def test_columns_have_their_own_names_and_numbers_are_numbers_in_every_format() -> None:
    Path("rows.json").write_text(json.dumps([{"question": ASKED, "answer": 2, "difficulty": 0.5}] * 2))
    for task, reward in (("rows.json", "judge.py:of_its_own_column"), ("rows.json", "judge.py:of_column")):
        flags = {"model": "m", "task": task, "rewards": [reward], "columns": ("question", "answer")}
        made = load_task(task_options(load_config(LeadConfig, None, flags)))
        assert isinstance(made, QuestionTask)
        assert made.score(made._questions.train[0], "2").reward == (0.5 if "of_column" in reward else 1)


def test_text_formats_need_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    assert load_task(task_options(_config("exact", task="rows.csv"))).name == "hf:rows.csv"
    with pytest.raises(UserError, match="needs a package that is not installed"):
        load_task(task_options(_config("exact", task="hf:rows.parquet")))


def test_two_functions_that_would_have_one_name_in_the_figures_are_refused() -> None:
    Path("other").mkdir()
    Path("other/judge.py").write_text(JUDGE)
    with pytest.raises(UserError, match="two rewards have one name"):
        load_task(task_options(_config("judge.py:trl", "other/judge.py:trl")))


def test_a_file_may_take_longer_to_load_than_an_answer_may_take() -> None:
    Path("slow.py").write_text("import time; time.sleep(2.5)\ndef score(completion): return 1")
    assert _checked("slow.py:score", reward_timeout_s=1.5).startswith("slow.py:score: 1 for '2'")


def test_functions_add_up_with_other_rewards_and_one_of_one_or_more_is_right() -> None:
    assert _earned("2", "judge.py:plain") == Score(reward=1, exact=True, parts={"judge.py:plain": 1})
    assert not _earned("2", "judge.py:of_column").exact
    both = _earned("so 2", f"{Path.cwd()}/judge.py:of_column=2", "numeric=0.5")
    assert both == Score(reward=1.5, exact=True, parts={"judge.py:of_column": 0.5, "numeric": 1})
    assert _earned("2", "judge.py:slow").parts == {}


def test_a_function_judges_three_answers_before_anything_starts() -> None:
    assert _checked("judge.py:plain") == "judge.py:plain: 1 for '2', 0 for '', 0 for 'this is not the answer'"
    assert _checked("numeric") == ""


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("judge.py:wrong", r"takes x, y: write it as score\(prompt, completion, answer\) or"),
        ("judge.py:needs", "asks for colour; there is answer, completion, difficulty, held_out, prompt, topic"),
        ("judge.py:raises", "for the answer '' to q-.*: it raised ZeroDivisionError"),
        ("judge.py:missing", "judge.py has no function missing"),
        ("broken.py:score", "broken.py raised SyntaxError"),
        ("nowhere.py:score", "needs nowhere.py, which is not in /"),
    ],
)
def test_one_that_cannot_judge_is_refused_in_a_line(reward: str, words: str) -> None:
    Path("broken.py").write_text("def score(:")
    with pytest.raises(UserError, match=words) as caught:
        _checked(reward)
    assert "\n" not in str(caught.value)


def _checked(reward: str, **settings: float) -> str:
    """What is said of it, from a real reward process."""
    config = _config(reward).model_copy(update=settings)

    async def check() -> str:
        pool = reward_pool(config, processes=1)
        try:
            await pool.start()
            return await check_rewards(pool, config, load_task(task_options(config)).held_out(1)[0])
        finally:
            await pool.close()

    return asyncio.run(check())
