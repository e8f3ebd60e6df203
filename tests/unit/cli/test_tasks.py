"""`echo-node tasks` and `tasks try`: what can be learned, and what answers earn, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm.cli.run import app
from swarm.errors import UserError
from swarm.learner.tiny import tiny_tokenizer
from swarm.tasks import ENVIRONMENTS, KINDS, TASKS


def _said(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["tasks", *arguments])
    if done.exception is not None:
        raise done.exception
    return done.output


@pytest.fixture
def sums(tmp_path: Path) -> str:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) + "\n" for n in range(99)))
    return f"jsonl:{path}"


def test_every_task_has_its_line() -> None:
    lines = _said().splitlines()
    assert [line.split()[0].partition(":")[0] for line in lines[:-1]] == [*TASKS, *ENVIRONMENTS, *KINDS]
    assert lines[-1].endswith("exact, numeric, math, boxed, FILE.py:FUNCTION")


def test_the_right_answer_none_and_a_wrong_one_are_scored(sums: str) -> None:
    said = _said("try", sums, "-n", "2", "--rewards", "numeric=1", "--rewards", "boxed=0.5")
    assert said.count("1.000 solved (numeric 1, boxed 0)  for ") == 2
    assert said.count("0.000        (numeric 0, boxed 0)  for ''") == 2
    assert said.count("+1=") == said.count("  answer: ") == 2
    assert "to train on" in said


def test_given_answers_are_scored(sums: str, tmp_path: Path) -> None:
    assert _said("try", sums, "--answer", "none", "--held-out").count("0.000") == 3
    (tmp_path / "answers").write_text("none\n\nnone\n")
    assert _said("try", sums, "--answers", str(tmp_path / "answers")).count(" for 'none'") == 2
    with pytest.raises(UserError, match="has 3 answers for 4 prompts"):
        _said("try", sums, "-n", "4", "--answers", str(tmp_path / "answers"))
    with pytest.raises(UserError, match="give one of them"):
        _said("try", sums, "--answer", "a", "--answers", str(tmp_path / "answers"))


def test_an_environment_is_played_with_given_or_typed_turns(tmp_path: Path) -> None:
    said = _said("try", "frozen-lake", "-n", "2", "--answer", "x")
    assert said.count(" -0.400        (invalid_moves 1)  for 'x'") == 2
    (tmp_path / "turns").write_text("x\n\n")
    assert _said("try", "frozen-lake", "-n", "1", "--answers", str(tmp_path / "turns")).count("  for ") == 2
    done = CliRunner().invoke(app, ["tasks", "try", "frozen-lake", "-n", "1", "--held-out"], input="0\n" * 8)
    assert "turn 8" in done.output
    assert done.output.count("  for '0'") == 8


def test_a_prompt_is_shown_as_the_model_reads_it(sums: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    tokenizer.save_pretrained(tmp_path / "model")
    said = _said("try", sums, "-n", "1", "--model", str(tmp_path / "model"), "--system-prompt", "Go.")
    assert "| <system>Go.<user>" in said
    assert "+1=<assistant>" in said
    assert " tokens\n" in said
    with pytest.raises(UserError, match="is no directory and no model in the Hugging Face cache"):
        _said("try", sums, "--model", "nobody/nothing")


def test_trying_a_task_loads_no_model_library(sums: str) -> None:
    program = (
        "import sys; from swarm.cli.run import app; app(['tasks', 'try', sys.argv[1]], standalone_mode=False); "
        "print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, sums], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


OWN = """
import os
import time

from swarm.types import Prompt


class Odd:
    def __init__(self, seed):
        pass

    def prompt(self, index):
        return Prompt(prompt_id="p", text="2+2=", answer="4")

    def held_out(self, count):
        return [self.prompt(0)]

    def score(self, prompt, completion):
        print("judging", completion)
        return {
            "raises": lambda: 1 / 0,
            "leaves": lambda: exit(3),
            "nan": lambda: float("nan"),
            "ends": lambda: os._exit(3),
            "hangs": lambda: time.sleep(3600),
        }[completion]()
"""


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("raises", "FAILED: it raised ZeroDivisionError: division by zero"),
        ("leaves", "FAILED: it raised SystemExit: 3"),
        ("nan", "FAILED: it raised ValueError: the reward is nan, which is not a finite number"),
        ("ends", "FAILED: the reward process died; its last words are above"),
        ("hangs", "FAILED: the reward process made no progress for 0.5 s and was killed"),
    ],
)
def test_a_reward_that_fails_is_said_as_a_run_would_say_it(
    answer: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "try_odd.py").write_text(OWN)
    (tmp_path / "run.toml").write_text("[task]\nreward_timeout_s = 0.5\n" if answer == "hangs" else "")
    arguments = ["tasks", "try", "python:try_odd:Odd", "-n", "1", "--answer", answer, "--config", "run.toml"]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, UserError)
    assert str(done.exception).startswith("the reward failed 1 times: a run gives such completions 0")
    assert words in done.stdout
    assert f"judging {answer}" in capfd.readouterr().err
