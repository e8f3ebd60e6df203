"""The arithmetic example and its benchmark: questions, tokenizer, base, and its curve."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from benchmarks.arithmetic import lead_settings, read_curve
from benchmarks.arithmetic_words import (
    EXAMPLES,
    LARGEST,
    QUESTIONS,
    VOCABULARY,
    Curriculum,
    asked,
    lesson,
    make_base,
    questions,
    word_tokenizer,
    write_jsonl,
)
from benchmarks.learning_forced import OneProcess
from swarm.learner.checkpoint.model_files import load_model
from swarm.settings import LeadConfig
from swarm.settings_file import load_config
from swarm.tasks import load_task, task_options
from swarm.tasks.chat import load_chat_template
from swarm.tasks.rewards import numeric

ODD = "Zoë has 3 äpfel, 苹果 and\ttwo 🍏.\n <b>How many?</b>"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> LeadConfig:
    """The example, read where a user stands."""
    monkeypatch.chdir(EXAMPLES.parent)
    return load_config(LeadConfig, EXAMPLES / "arithmetic.toml", {})


# -- what it is made of --------------------------------------------------------------------------------------


def test_questions_are_different_small_and_the_same_every_time() -> None:
    found = questions("a", 2_000)
    assert found == questions("a", 2_000) != questions("b", 2_000)
    assert len({one.text for one in found}) == 2_000
    assert all(str(one.left) in one.text and str(one.right) in one.text for one in found)
    assert all(1 <= one.left <= LARGEST and 1 <= one.right <= LARGEST and one.answer >= 0 for one in found)
    signs = Counter(one.sign for one in found)
    assert 900 < signs["+"] < 1_100


def test_an_answer_is_right_alone_and_after_its_calculation() -> None:
    for one in questions("a", 200):
        assert one.answer == (one.left + one.right if one.sign == "+" else one.left - one.right)
        assert numeric(str(one.answer), str(one.answer)) == numeric(one.working, str(one.answer)) == 1.0
        assert numeric(one.working + "0", str(one.answer)) == 0.0 or one.answer == 0


def test_a_word_and_a_digit_are_a_token_each_and_every_text_is_given_back(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    saved = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert saved.encode("Tom has 13 eggs").tokens == ["Tom", "Ġhas", "Ġ", "1", "3", "Ġeggs"]
    token_ids = saved.encode(ODD).ids
    assert saved.decode(token_ids) == ODD
    assert tokenizer(ODD)["input_ids"] == token_ids
    assert len(tokenizer) == VOCABULARY


def test_a_node_asks_as_the_course_did() -> None:
    template = load_chat_template(EXAMPLES / "arithmetic", began=datetime.now(UTC), arguments={})
    assert template is not None
    assert template.render([("user", ODD)]) == asked(word_tokenizer(), ODD) == f"<user>{ODD}<assistant>"


def test_lessons_are_none_of_the_data_and_show_both_ways_to_answer() -> None:
    tokenizer = word_tokenizer()
    draw = Random(0)
    shown = [lesson(tokenizer, 0, index, frozenset()) for index in range(200)]
    taken = {str(one.prompt).removeprefix("<user>").removesuffix("<assistant>") for one in draw.sample(shown, 50)}
    again = {lesson(tokenizer, 0, index, taken).prompt for index in range(200)}
    assert not again & {f"<user>{text}<assistant>" for text in taken}
    assert 70 < sum("=" in one.completion for one in shown) < 130


# -- what is shipped -----------------------------------------------------------------------------------------


def test_the_questions_are_those_that_are_made(tmp_path: Path) -> None:
    write_jsonl(questions("data", QUESTIONS), tmp_path / "questions.jsonl")
    assert (tmp_path / "questions.jsonl").read_text() == (EXAMPLES / "questions.jsonl").read_text()


def test_the_base_is_a_model_like_one_that_is_made(tmp_path: Path) -> None:
    make_base(tmp_path, (), Curriculum(steps=2, batch=4, learning_rate=1e-3))
    for made in tmp_path.iterdir():
        shipped = EXAMPLES / "arithmetic" / made.name
        if made.suffix == ".json":
            found, expected = json.loads(shipped.read_text()), json.loads(made.read_text())
            # A newer release of transformers may have made it.
            found.pop("transformers_version", None), expected.pop("transformers_version", None)
            assert found == expected
        else:
            assert shipped.stat().st_size == made.stat().st_size
    model, tokenizer = load_model(str(EXAMPLES / "arithmetic"), 0)
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id


def test_the_data_is_a_task_with_a_part_held_out(config: LeadConfig) -> None:
    task = load_task(task_options(config))
    held_out, first = task.held_out(1_000), task.prompt(0)
    assert len(held_out) >= config.eval_prompts
    assert first.text not in {prompt.text for prompt in held_out}
    assert task.score(first, f"1+1={first.answer}").reward == 1.0
    assert task.score(first, f"{first.answer}5").reward == 0.0


def test_the_base_knows_a_little_and_takes_learner_steps(config: LeadConfig, tmp_path: Path) -> None:
    few = config.model_copy(update={"groups_per_step": 16, "eval_prompts": 4})
    process = OneProcess(few, tmp_path)
    # What is drawn here is without the chat template, so what it earns is less than in a run.
    assert [0 <= process.step(number).reward <= 1 for number in range(2)] == [True, True]


@pytest.mark.parametrize(("adapter", "learning_rate", "used"), [(None, None, 3e-4), (8, None, 3e-3), (8, 1e-3, 1e-3)])
def test_the_benchmark_runs_the_example_without_its_end_and_an_adapter_at_ten_times_its_rate(
    config: LeadConfig, adapter: int | None, learning_rate: float | None, used: float
) -> None:
    found = lead_settings(eval_every=20, seed=3, steps=400, adapter=adapter, learning_rate=learning_rate)
    assert (found.eval_every_steps, found.seed, found.steps, found.target) == (20, 3, 400, None)
    assert (found.adapter, found.learning_rate, found.own_rewards) == (adapter, used, config.rewards)
    assert Path(found.model).samefile(config.model)


def test_a_curve_is_read_from_a_run(tmp_path: Path) -> None:
    rounds = [
        {"kind": "evaluated", "version": 0, "exact_match": 0.2, "prompts": 400, "time": 60.0},
        {"kind": "saved", "time": 61.0},
        {"kind": "evaluated", "version": 3, "exact_match": 0.5, "prompts": 400, "time": 120.0},
    ]
    steps = [{"step": n, "reward": n / 10} for n in range(1, 6)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rounds))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    first, last = read_curve(tmp_path)
    assert (first["step"], first["minutes"], first["reward"]) == (0, 0.0, None)
    assert (last["step"], last["minutes"], last["pass_at_1"]) == (3, 1.0, 0.5)
    assert last["reward"] == pytest.approx(0.2)
