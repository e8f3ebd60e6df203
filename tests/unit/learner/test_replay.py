"""Replays of draws of the real engine, by a policy with the same weights, with others, and with other rules."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs
from numpy.typing import NDArray

from swarm.learner.messages import Audit, Audited, AuditRollout, Train, TrainerConfig
from swarm.learner.policy import Policy
from swarm.learner.ranks import Ranks
from swarm.learner.replay import audit
from swarm.sampler.engine import Generate, Job, Sampled
from swarm.sampler.transformers import TransformersEngine
from swarm.types import SamplingRules
from tests.builders import floats, ints
from tests.unit.models import Staged, published, stage, stage_model
from tests.unit.trainers import group, trainer_in

SAMPLES, LENGTH = 40, 12
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Staged, Staged]:
    return stage(tmp_path_factory.mktemp("one")), stage(tmp_path_factory.mktemp("two"), seed=1)


def jobs(temperature: float) -> list[Job]:
    rules = SamplingRules(temperature=temperature, max_new_tokens=LENGTH, stop_token_ids=())
    prompts = [(1, 3, 4), (1, 3, 4, 5, 6, 13)]
    return [
        Job(prompt_token_ids=prompts[seed % 2], seed=2**61 + seed, rules=rules, time_limit_s=60.0)
        for seed in range(SAMPLES)
    ]


def draw(staged: Staged, temperature: float = 1.0) -> tuple[Sampled, ...]:
    engine = TransformersEngine()
    engine.start(staged.start(), lambda: None)
    engine.install(staged.install(), lambda: None)
    return engine.generate(Generate(jobs=tuple(jobs(temperature))), lambda: None).samples


def claims(samples: Sequence[Sampled], temperature: float = 1.0) -> list[AuditRollout]:
    pairs = zip(jobs(temperature), samples, strict=True)
    return [AuditRollout(job.prompt_token_ids, one.token_ids, one.logprobs, job.seed) for job, one in pairs]


def audited(
    model: torch.nn.Module,
    rollouts: Sequence[AuditRollout],
    *,
    temperature: float = 1.0,
    rules: TrainerConfig | None = None,
    weights: dict[str, torch.Tensor] | None = None,
) -> Audited:
    rules = rules or TrainerConfig()
    return audit(Policy(model, rules, temperature=temperature), rollouts, rules, CPU, weights, ranks=Ranks())


def whole(parts: tuple[bytes, ...]) -> NDArray[np.float32]:
    return np.frombuffer(b"".join(parts), np.float32)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("rules", [TrainerConfig(), TrainerConfig.model_construct(tokens_per_micro_batch=40)])
def test_an_honest_engine_s_tokens_are_the_best_under_their_noise(
    staged: tuple[Staged, Staged], temperature: float, rules: TrainerConfig
) -> None:
    rollouts = claims(draw(staged[0], temperature), temperature)
    found = audited(published(staged[0].model), rollouts, temperature=temperature, rules=rules)
    assert len(whole(found.margins)) == SAMPLES * LENGTH
    assert whole(found.margins).min() >= 0.0
    assert whole(found.margins).max() < 1e-3
    assert np.abs(whole(found.errors)).max() < 1e-4


def test_other_weights_are_seen_and_can_be_named(staged: tuple[Staged, Staged]) -> None:
    """A few tokens in a hundred would be drawn by both."""
    rollouts, (own, other) = claims(draw(staged[1])), (published(one.model) for one in staged)
    assert (whole(audited(own, rollouts).margins) > 0.05).mean() > 0.2
    weights = {f"model.{name}": tensor for name, tensor in other.named_parameters()}
    assert whole(audited(own, rollouts, weights=weights).margins).max() < 1e-3


def test_another_temperature_is_seen(staged: tuple[Staged, Staged]) -> None:
    found = audited(published(staged[0].model), claims(draw(staged[0], 0.8)))
    assert (whole(found.margins) > 0.05).mean() > 0.02


def test_one_token_put_in_another_s_place_is_seen(staged: tuple[Staged, Staged]) -> None:
    first, *others = claims(draw(staged[0]))
    tokens = array("i", first.token_ids)
    tokens[4] = next(token for token in range(3, 9) if token != tokens[4])
    found = audited(published(staged[0].model), [structs.replace(first, token_ids=tokens.tobytes()), *others])
    assert array("f", found.margins[0])[4] > 0.05
    assert whole(found.margins[1:]).max() < 1e-3


def test_greedy_answers_are_the_best_without_noise(staged: tuple[Staged, Staged]) -> None:
    model, prompt = published(staged[0].model), jobs(1.0)[0].prompt_token_ids
    with torch.no_grad():
        best = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
    rollouts = [AuditRollout(prompt, ints(token), floats(0.0), seed=None) for token in (best, best - 1)]
    margins = whole(audited(model, rollouts).margins)
    assert margins[0] == 0.0 < margins[1]


def test_a_trainer_audits_with_weights_that_it_no_longer_has(tmp_path: Path) -> None:
    """Staged weights are kept under another name; the trainer goes on; what they drew is still what they draw."""
    trainer = trainer_in(tmp_path)
    trainer.prepared()
    kept = tmp_path / "kept.bin"
    kept.write_bytes((tmp_path / "staging.bin").read_bytes())
    (tmp_path / "sampler").mkdir()
    drawn = draw(stage_model(published(trainer._model), tmp_path / "sampler"))
    trainer.step(Train(step=0, groups=(group([1.0, 0.0, 0.0, 0.0]),)))
    trainer.stage()
    *honest, last = claims(drawn)
    asked = (*honest, structs.replace(last, seed=jobs(1.0)[-1].seed + 1))
    found = trainer.audit(Audit(path=str(kept), rollouts=asked))
    assert whole(found.margins)[:-LENGTH].max() < 1e-3
    assert (whole(found.margins)[-LENGTH:] > 1e-3).sum() > 3, "with another seed it draws other tokens"
    assert np.abs(whole(found.errors)).max() < 1e-3
    now = trainer.audit(Audit(path=str(tmp_path / "staging.bin"), rollouts=asked))
    assert whole(now.margins)[:-LENGTH].max() > 1e-3
    assert np.abs(whole(now.errors)).max() > 1e-3
    assert trainer.audit(Audit(path=str(tmp_path / "none.bin"), rollouts=asked)).errors == ()
