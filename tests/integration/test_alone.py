"""A researcher with one machine: a file of questions, a reward in a file, one command that trains, and one that
measures."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from random import Random

import psutil
import pytest

from tests.integration.processes import Learner, Node, Swarm, command, eventually

JUDGE = """
def score(prompt, completion, answer):
    return float(completion.strip() == answer)
"""


@pytest.fixture
def task(tmp_path: Path) -> tuple[str, ...]:
    """Digits to be put in order, which the base `tiny-warm` does a quarter of the time."""
    numbers = sorted({f"{Random(i).randrange(10**4):04}" for i in range(600)})
    lines = [json.dumps({"prompt": f"{number}=", "answer": "".join(sorted(number))}) for number in numbers]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    (tmp_path / "judge.py").write_text(JUDGE)
    named = (str(tmp_path / "questions.jsonl"), "--reward", f"{tmp_path / 'judge.py'}:score")
    return (*named, "--max-new-tokens", "6")


def _accuracy(*arguments: str) -> float:
    done = command("eval", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return float(json.loads(done.stdout.splitlines()[-1])["accuracy"])


@pytest.mark.slow
def test_one_command_trains_on_a_file_with_a_function_and_eval_says_by_how_much(
    swarm: Swarm, task: tuple[str, ...], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    place = ("--host", "127.0.0.1", "--port", "0", "--run-dir", str(run_dir))
    learner = Node(tmp_path, "alone", "lead", *task, "--model", "tiny-warm", "--steps", "12", *place)
    swarm.nodes.append(learner)
    assert learner.wait() == 0, learner.output()
    assert learner.says("judge.py:score: 1 for ")
    assert learner.says("this machine draws too: 1 sampler")
    measured = [one["exact_match"] for one in json.loads((run_dir / "summary.json").read_text())["held_out"]]
    before, after = _accuracy(*task, "--model", "tiny-warm"), _accuracy("--model", str(run_dir))
    assert [before, after] == pytest.approx([measured[0], measured[-1]], abs=1e-4)  # The same, without a swarm
    assert after > before + 0.3


def _own_sampler(learner: Learner) -> psutil.Process:
    (own,) = [one for one in psutil.Process(learner.process.pid).children() if "join" in one.cmdline()]
    return own


@pytest.mark.slow
def test_a_sampler_of_the_learners_own_comes_back_when_it_was_killed(swarm: Swarm) -> None:
    learner = swarm.lead("--steps", "5000", "--samplers", "1")
    eventually(lambda: learner.status()["step"] > 0, learner, "it trains alone")
    own = _own_sampler(learner)
    os.kill(own.pid, signal.SIGKILL)
    eventually(lambda: learner.says("the sampler of this machine ended"), learner, "it says so")
    killed_at = learner.status()["step"]
    eventually(lambda: learner.status()["step"] > killed_at + 5, learner, "it trains again")
    own = _own_sampler(learner)
    learner.signal(signal.SIGTERM)
    learner.wait()
    eventually(lambda: not own.is_running(), learner, "its sampler ended with it")
