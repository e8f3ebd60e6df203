"""The warm start: what the base learns before reinforcement. tests/integration/test_sort.py elicits one skill of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.learner import tiny as models
from swarm.learner.checkpoint.model_files import load_model
from swarm.learner.tiny import four_skills, tiny_model, warm_model
from swarm.tasks.digits import SKILLS, is_held_out


def weights(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_what_is_made_is_the_same_for_the_same_seed_has_learned_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "WARM_STEPS", 12)
    before = weights(tiny_model(0))
    one, other, third = warm_model(0, tmp_path), warm_model(0), warm_model(1)
    assert torch.equal(weights(one), weights(other))
    assert not torch.equal(weights(one), weights(third))
    assert not torch.equal(weights(one), before)
    monkeypatch.setattr(models, "WARM_STEPS", 0)
    assert torch.equal(weights(load_model("tiny-warm", 0, tmp_path)[0]), weights(one)), "it is not made again"


def test_lessons_leave_the_held_out_numbers_alone_and_are_of_all_skills() -> None:
    lessons = [four_skills(0, index) for index in range(2_000)]
    numbers = [prompt.removesuffix("=") for prompt, _ in lessons]
    assert not any(is_held_out(number) for number in numbers)
    for skill in SKILLS.values():
        shown = sum(said == skill(number) for (_, said), number in zip(lessons, numbers, strict=True))
        assert 450 < shown < 650
