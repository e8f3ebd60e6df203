"""The front door: `echo-node demo` as real processes. What it promises is checked on what it leaves behind."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from swarm.tasks.digits import DIGITS, CopyTask
from tests.integration.processes import Node, command, eventually, run_command


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A demo in which a sampler is killed half-way; the summary that it prints."""
    run_dir = tmp_path_factory.mktemp("demo") / "run"
    done = run_command("demo", "--kill-one", "--seed", "1", "--json", "--run-dir", str(run_dir), timeout_s=560)
    assert done.returncode == 0, done.stderr[-3000:]
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**summary, "said": done.stderr}


def test_it_learns_within_the_bound_although_a_sampler_is_killed(learned: dict[str, Any]) -> None:
    assert learned["sampler_killed"]
    assert learned["held_out_before"] < 0.1
    assert learned["held_out_after"] >= 0.9
    assert learned["steps"] <= 200
    assert learned["rollouts_accepted"] >= learned["steps"] * 32 * 16
    run_dir = Path(learned["run_dir"])
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == learned["steps"]
    assert max(step["staleness/max"] for step in steps) == learned["max_staleness_seen"] <= learned["max_staleness"]
    assert "sampler_silent" in (run_dir / "events.jsonl").read_text()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["alarm"], summary["stopped_by"]) == (None, "")


def test_it_says_what_to_do_next(learned: dict[str, Any]) -> None:
    said = learned["said"].splitlines()
    assert any(line.startswith("It learned") for line in said)
    named = [line.strip().split()[1] for line in said if line.startswith("  echo-node ")]
    assert named == ["dashboard", "verify", "export", "lead"]
    run_dir = Path(learned["run_dir"])
    assert [path.name for path in run_dir.parent.iterdir()] == ["run"]
    assert {"learner.log", "sampler-2.log"} <= {path.name for path in (run_dir / "logs").iterdir()}
    assert command("verify", str(run_dir)).returncode == 0


def test_the_models_that_it_leaves_answer_with_the_digits_and_their_stop_token(
    learned: dict[str, Any], tmp_path: Path
) -> None:
    """Raw, as anybody who loads them gets them: a special token between the digits would be a wrong answer."""
    done = command("export", "model", learned["run_dir"], "--to", str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr
    assert right_answers(tmp_path / "model") >= 40
    assert right_answers(Path(learned["run_dir"]) / "best") >= 40


def right_answers(directory: Path) -> int:
    """Of 50 held-out numbers: how many the model in `directory` answers with the number and its stop token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    prompts = CopyTask(seed=1).held_out(50)
    asked = tokenizer([prompt.text for prompt in prompts], return_tensors="pt")
    answers = model.generate(**asked, do_sample=False, max_new_tokens=DIGITS + 1)[:, asked.input_ids.shape[1] :]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=False)
    return sum(text == f"{prompt.answer}<eos>" for prompt, text in zip(prompts, texts, strict=True))


@pytest.mark.long
def test_a_random_reward_does_not_teach(tmp_path: Path) -> None:
    done = run_command("demo", "--reward", "random", "--steps", "40", "--json", "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert not summary["learned"]
    assert "that is the success" in done.stderr
    assert summary["held_out_after"] < 0.1
    assert summary["steps"] == 40


@pytest.mark.long
def test_a_real_model_is_fetched_and_trained(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two steps it learns nothing; all else is as in a whole demo."""
    directory = tmp_path_factory.mktemp("real")
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    run_dir = directory / "run"
    done = run_command("demo", "--real", "--steps", "2", "--json", "--run-dir", str(run_dir), timeout_s=580)
    if done.returncode == 2 and "cannot be fetched" in done.stderr:
        pytest.skip(f"no package index: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 1, done.stderr[-3000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["steps"], summary["verified"], summary["samplers"]) == (2, True, 1)
    assert 0.05 < summary["held_out_before"] < 0.4
    assert min(summary["setup_s"], summary["cpu_s"], summary["largest_process_mb"]) > 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL])
def test_no_process_outlives_the_demo(tmp_path: Path, number: signal.Signals) -> None:
    demo = Node(tmp_path, "demo", "demo", "--samplers", "1", "--run-dir", str(tmp_path / "run"))
    try:
        # Two nodes, a trainer, an engine and a reward process; short-lived ones come and go.
        eventually(lambda: len(demo.children()) >= 5, demo, "the swarm is up")
        started = demo.children()
        demo.signal(number)
        assert demo.wait() != 0
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive, [process.cmdline() for process in alive]
    finally:
        demo.end()


@pytest.mark.long
def test_a_sampler_with_mlx_draws_with_an_adapter_for_a_learner(tmp_path: Path) -> None:
    asked = ("--adapter", "8", "--engine", "mlx", "--samplers", "1", "--steps", "4")
    done = run_command("demo", *asked, "--run-dir", str(tmp_path / "run"), "--json", timeout_s=300)
    assert done.returncode == 1, done.stderr[-3000:]  # in 4 steps nothing is learned
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["steps"], summary["verified"]) == (4, True)
    assert summary["base_unchanged"]
    assert [sampler["engine"] for sampler in summary["by_sampler"]] == ["mlx"]
    assert summary["rollouts_accepted"] >= 4 * 32 * 16
    assert "engine: mlx on cpu in float32" in (tmp_path / "run" / "logs" / "sampler-0.log").read_text()
