"""A run that trains an adapter, as real processes: it learns beside a base that stays as it was, and outlives a SIGKILL
of its learner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swarm.broadcast.version.manifest import read_layout, trained_spans
from tests.integration.processes import command, run_command
from tests.integration.test_demo import right_answers

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run_dir = tmp_path_factory.mktemp("demo") / "run"
    asked = ("--adapter", "8", "--samplers", "1", "--kill-learner", "1", "--kill-seed", "3", "--seed", "1")
    done = run_command("demo", *asked, "--json", "--run-dir", str(run_dir), timeout_s=560)
    assert done.returncode == 0, done.stderr[-3000:]
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


def test_it_learns_although_its_learner_is_killed(learned: dict[str, Any]) -> None:
    assert (learned["adapter"], learned["learner_killed"]) == (8, 1)
    assert learned["held_out_before"] < 0.5
    assert learned["held_out_after"] >= 0.9
    assert learned["base_unchanged"]
    assert learned["verified"]


def test_later_versions_are_smaller_than_the_adapter(learned: dict[str, Any]) -> None:
    versions = Path(learned["run_dir"]) / "versions"
    layout = read_layout((versions / "layout").read_bytes())
    (adapter,) = trained_spans(layout.tensors)
    newest = max(versions.glob("*.chunks"), key=lambda path: int(path.stem.partition(".")[2]))
    assert newest.stat().st_size < adapter.nbytes
    assert 6 * adapter.nbytes < layout.total_bytes


def test_what_it_learned_is_exported_whole(learned: dict[str, Any], tmp_path: Path) -> None:
    done = command("export", "model", learned["run_dir"], "--merge", "--to", str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr
    assert right_answers(tmp_path / "model") >= 40


def test_the_best_version_is_an_adapter_that_peft_loads(learned: dict[str, Any], tmp_path: Path) -> None:
    from peft import PeftModel

    from swarm.learner.checkpoint.model_files import load_model

    best = Path(learned["run_dir"]) / "best"
    base, tokenizer = load_model("tiny-warm", 1, Path(learned["run_dir"]) / "model")
    whole = PeftModel.from_pretrained(base, best).merge_and_unload()
    whole.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    assert right_answers(tmp_path / "model") >= 40
