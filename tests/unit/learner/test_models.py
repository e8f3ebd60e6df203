"""The warm start: what the base can do before reinforcement, and that a few learner steps choose among it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.learning import OneProcess
from swarm.learner import tiny as models
from swarm.learner.checkpoint.model_files import load_model
from swarm.learner.tiny import four_skills, tiny_model, warm_model
from swarm.settings import LeadConfig
from swarm.tasks.digits import SKILLS, SortTask, is_held_out


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


@pytest.mark.long
def test_the_base_has_all_four_skills_and_a_few_learner_steps_elicit_the_one_that_is_rewarded(tmp_path: Path) -> None:
    base = tmp_path / "model"
    model, tokenizer = load_model("tiny-warm", 0, base)
    shown = shares(model.eval(), tokenizer)
    assert all(0.15 < share < 0.32 for share in shown.values()), shown
    assert sum(shown.values()) > 0.75

    config = LeadConfig(model="tiny-warm", task="sort", group_size=8, max_staleness=0, eval_prompts=200)
    assert config.resolved_learning_rate == 3e-4
    process = OneProcess(config, base.parent)
    rewards = [process.step(number).reward for number in range(12)]
    assert sum(rewards[:3]) / 3 < 0.4
    assert sum(rewards[-3:]) / 3 > 0.45
    assert process.accuracy() > 0.6


@torch.inference_mode()
def shares(model: Any, tokenizer: Any) -> dict[str, float]:
    """Of held-out prompts, which share of samples shows each skill. Skills agree on few numbers."""
    prompts = [prompt.text for prompt in SortTask(0).held_out(900)]
    torch.manual_seed(0)
    answers = model.generate(**tokenizer(prompts, return_tensors="pt"), do_sample=True, max_new_tokens=6, top_k=0)
    texts = tokenizer.batch_decode(answers[:, 6:], skip_special_tokens=True)
    pairs = [(prompt.removesuffix("="), text) for prompt, text in zip(prompts, texts, strict=True)]
    return {name: sum(text == skill(n) for n, text in pairs) / len(pairs) for name, skill in SKILLS.items()}
