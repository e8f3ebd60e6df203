"""What people type, from a wheel in an environment of its own, at 80 columns: a researcher with questions and a reward
in files, a volunteer, and somebody whose learner was killed and has to move."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

import psutil
import pytest

from tests.integration.processes import Node, Swarm, eventually, swarm_in
from tests.integration.test_install import Light, LightNode

pytestmark = pytest.mark.slow

JUDGE = """
def score(prompt, completion, answer):
    return float(completion.strip() == answer)
"""


class Person:
    """Somebody with a terminal in which the wheel is installed, and files in its directory."""

    def __init__(self, light: Light, swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        self._light, self._swarm = light, swarm
        self.directory = light.directory

    def types(self, *words: str) -> str:
        """A command to its end; what it printed, with nothing cut."""
        done = self._light.run(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "…" not in done.stdout
        return done.stdout

    def sees(self, *words: str) -> str:
        """What a command prints, whether it finds a node yet or not."""
        return self._light.run(*words).stdout

    def starts(self, name: str, *words: str) -> Node:
        """A command that stays."""
        node = LightNode(self._light, self.directory, name, *words)
        self._swarm.nodes.append(node)
        return node


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Light:
    made = Light(tmp_path_factory.mktemp("whole"))
    made.install_offline("learner")
    return made


@pytest.fixture
def person(light: Light, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Person]:
    with swarm_in(tmp_path) as swarm:
        yield Person(light, swarm, monkeypatch)


HERE = ("--host", "127.0.0.1", "--port", "0")


def test_a_researcher_trains_on_a_file_with_a_function_and_measures_by_how_much(person: Person) -> None:
    """Digits to be put in order, which the base `tiny-warm` does a quarter of the time."""
    numbers = sorted({f"{Random(i).randrange(10**4):04}" for i in range(600)})
    lines = [json.dumps({"prompt": f"{number}=", "answer": "".join(sorted(number))}) for number in numbers]
    (person.directory / "questions.jsonl").write_text("\n".join(lines))
    (person.directory / "judge.py").write_text(JUDGE)
    task = ("questions.jsonl", "--reward", "judge.py:score", "--max-new-tokens", "6", "--model", "tiny-warm")
    learner = person.starts("alone", "lead", *task, "--steps", "12", "--run-dir", "run", *HERE)
    assert learner.wait() == 0, learner.output()
    assert learner.says("judge.py:score: 1 for ")
    assert learner.says("this machine draws too: 1 sampler")
    told = json.loads((person.directory / "run" / "summary.json").read_text())["held_out"]
    before, after = (
        json.loads(person.types("eval", *words, "--json").splitlines()[-1])["accuracy"]
        for words in (task, ("--model", "run"))
    )
    # The same prompts as in the run, drawn without a swarm.
    assert [before, after] == pytest.approx([told[0]["exact_match"], told[-1]["exact_match"]], abs=1e-4)
    assert after > before + 0.3


def test_a_volunteer_joins_with_one_line_pauses_goes_on_leaves_and_is_told_what_was_given(person: Person) -> None:
    about = ("--about", "to put digits in order")
    learner = person.starts("led", "lead", "sort", *about, "--samplers", "0", "--run-dir", "led-run", *HERE)
    eventually(lambda: learner.says("a sampler joins with:  echo-node join"), learner, "it prints the line")
    (line,) = [one for one in learner.output().splitlines() if "a sampler joins with:" in one]
    node = person.starts("volunteer", *line.partition("echo-node ")[2].split(), "--lan")
    eventually(lambda: node.says('its owner says: "to put digits in order"'), node, "it is told what for")
    eventually(lambda: "this node draws" in person.sees("status"), node, "it draws")
    assert "paus" in person.types("pause")
    eventually(lambda: node.says("paused: "), node, "it pauses")
    assert "draw" in person.types("resume")
    eventually(lambda: "this node draws" in person.sees("status"), node, "it draws again")
    person.types("leave")
    assert node.wait() == 0
    given = person.types("me")
    assert "to put digits in order" in given
    assert " tokens" in given


def test_a_learner_that_was_killed_goes_on_in_another_place_with_its_own_sampler(person: Person) -> None:
    words = ("lead", "sort", "--model", "tiny-warm", "--steps", "6000", "--run-dir", "here", *HERE)
    learner = person.starts("first", *words)
    eventually(lambda: learner.says("step 1/"), learner, "it trains")
    (own,) = _own_samplers(learner)
    learner.kill()
    eventually(lambda: not own.is_running(), learner, "its sampler ends with it")
    shutil.move(person.directory / "here", person.directory / "there")
    resumed = person.starts("second", "lead", "--resume", "there", "--steps", "3", "--port", "0")
    eventually(lambda: resumed.says("finished at step"), resumed, "it goes on")
    assert "no rollout was too old, lost or used twice" in person.types("verify", "there")


def test_a_sampler_of_the_learners_own_comes_back_when_it_was_killed(person: Person) -> None:
    learner = person.starts("keeper", "lead", "copy", "--steps", "5000", "--run-dir", "kept", *HERE)
    eventually(lambda: learner.says("step 1/"), learner, "it trains alone")
    (own,) = _own_samplers(learner)
    own.kill()
    eventually(lambda: learner.says("the sampler of this machine ended"), learner, "it says so")
    events = person.directory / "kept" / "events.jsonl"
    eventually(lambda: events.read_text().count('"sampler_joined"') == 2, learner, "another one draws")
    (own,) = _own_samplers(learner)
    learner.signal(signal.SIGTERM)
    learner.wait()
    eventually(lambda: not own.is_running(), learner, "its sampler ended with it")
    # The learner answers until its own samplers have left.
    last_words = (person.directory / "kept" / "logs" / "sampler-0.log").read_text()
    assert "left the swarm" in last_words
    assert "the learner could not be told" not in last_words


def _own_samplers(learner: Node) -> list[psutil.Process]:
    found = psutil.Process(learner.process.pid).children()
    return [one for one in found if one.status() != psutil.STATUS_ZOMBIE and "join" in one.cmdline()]
