"""What two models answer before and after a run is asked of both alike, and written where the report finds it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarm.learner import ability
from swarm.settings import LeadConfig

ROOT = Path(__file__).parents[3]


def test_two_models_that_are_the_same_answer_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    model = "examples/arithmetic"
    settings = LeadConfig(model=model, task="jsonl:examples/questions.jsonl", chat=False, max_new_tokens=6, stop=("=",))
    (tmp_path / "config.json").write_text(settings.model_dump_json())
    monkeypatch.setattr(ability, "newest_whole", lambda root: SimpleNamespace(path=ROOT / model))
    monkeypatch.setattr(ability, "TEXT_TOKENS", 64)
    ability.compare(tmp_path, tmp_path / "ability.json")
    found = json.loads((tmp_path / "ability.json").read_text())
    assert found["nll_before"] == found["nll_after"] > 0
    assert math.isfinite(found["nll_before"])
    *answers, nll = found["lines"]
    assert len(answers) == ability.ANSWERS + len(ability.QUESTIONS)
    for line in answers:
        before, _, after = line.partition(" before: ")[2].partition("; after: ")
        assert before == after
    assert not any("=" in line.partition(" before: ")[2] for line in answers[: ability.ANSWERS])
    assert nll.startswith("mean nll of the first 64 tokens of ARCHITECTURE.md")
