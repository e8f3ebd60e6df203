"""Replays of draws of the real engine, by a policy with the same weights, with others, and with other rules."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from swarm.learner.batch import Row
from swarm.learner.messages import Audit, AuditRollout, Train, TrainerConfig
from swarm.learner.policy import Policy, Replayed
from swarm.learner.ranks import Ranks
from swarm.learner.replay import replay, row_of
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


def replayed(
    model: torch.nn.Module,
    samples: tuple[Sampled, ...],
    *,
    temperature: float = 1.0,
    rules: TrainerConfig | None = None,
    weights: dict[str, torch.Tensor] | None = None,
) -> list[Replayed]:
    rows = [
        Row(
            token_ids=torch.tensor([*job.prompt_token_ids, *array("i", sampled.token_ids)]),
            prompt_tokens=len(job.prompt_token_ids),
            behaviour=torch.tensor(array("f", sampled.logprobs)),
            mask=torch.ones(LENGTH),
            advantage=0.0,
            staleness=0,
        )
        for job, sampled in zip(jobs(temperature), samples, strict=True)
    ]
    rules = rules or TrainerConfig()
    policy = Policy(model, rules, temperature=temperature)
    return replay(policy, rows, [job.seed for job in jobs(temperature)], rules, CPU, weights, ranks=Ranks())


def margins(found: list[Replayed]) -> torch.Tensor:
    return torch.cat([one.margins for one in found])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    "rules", [TrainerConfig(), TrainerConfig.model_construct(tokens_per_micro_batch=40), TrainerConfig(packing=True)]
)
def test_an_honest_engine_s_tokens_are_the_best_under_their_noise(
    staged: tuple[Staged, Staged], temperature: float, rules: TrainerConfig
) -> None:
    samples = draw(staged[0], temperature)
    found = replayed(published(staged[0].model), samples, temperature=temperature, rules=rules)
    assert len(margins(found)) == SAMPLES * LENGTH
    assert float(margins(found).min()) >= 0.0
    assert float(margins(found).max()) < 1e-3
    for one, sampled in zip(found, samples, strict=True):
        assert one.logprobs.tolist() == pytest.approx(array("f", sampled.logprobs).tolist(), abs=1e-4)


def test_other_weights_are_seen_and_can_be_named(staged: tuple[Staged, Staged]) -> None:
    """A few tokens in a hundred would be drawn by both."""
    samples, (own, other) = draw(staged[1]), (published(one.model) for one in staged)
    missed = margins(replayed(own, samples))
    assert float((missed > 0.05).float().mean()) > 0.2
    weights = {f"model.{name}": tensor for name, tensor in other.named_parameters()}
    assert float(margins(replayed(own, samples, weights=weights)).max()) < 1e-3


def test_another_temperature_is_seen(staged: tuple[Staged, Staged]) -> None:
    missed = margins(replayed(published(staged[0].model), draw(staged[0], 0.8)))
    assert float((missed > 0.05).float().mean()) > 0.02


def test_one_token_put_in_another_s_place_is_seen(staged: tuple[Staged, Staged]) -> None:
    samples = list(draw(staged[0]))
    tokens = array("i", samples[0].token_ids)
    tokens[4] = next(token for token in range(3, 9) if token != tokens[4])
    found = replayed(published(staged[0].model), (replace_tokens(samples[0], tokens), *samples[1:]))
    assert float(found[0].margins[4]) > 0.05
    assert float(margins(found[1:]).max()) < 1e-3


def replace_tokens(sampled: Sampled, tokens: array[int]) -> Sampled:
    return Sampled(token_ids=tokens.tobytes(), logprobs=sampled.logprobs, spans=sampled.spans, finish=sampled.finish)


def whole(parts: tuple[bytes, ...]) -> NDArray[np.float32]:
    return np.concatenate([np.frombuffer(one, np.float32) for one in parts])


def test_greedy_answers_are_the_best_without_noise(staged: tuple[Staged, Staged]) -> None:
    model = published(staged[0].model)
    policy, prompt = (
        Policy(model, TrainerConfig(), temperature=1.0),
        torch.tensor([list(jobs(1.0)[0].prompt_token_ids)]),
    )
    with torch.no_grad():
        best = int(model(prompt).logits[0, -1].argmax())
        for token, is_best in ((best, True), (best - 1, False)):
            row = row_of(AuditRollout(tuple(prompt[0].tolist()), ints(token), floats(0.0), seed=None))
            (found,) = replay(policy, [row], [None], TrainerConfig(), CPU, ranks=Ranks())
            assert (float(found.margins[0]) == 0.0) == is_best


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
    asked = tuple(
        AuditRollout(
            prompt_token_ids=job.prompt_token_ids,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            seed=job.seed + lied,
        )
        for job, sampled, lied in zip(jobs(1.0), drawn, [0] * (SAMPLES - 1) + [1], strict=True)
    )
    found = trainer.audit(Audit(path=str(kept), rollouts=asked))
    assert whole(found.margins)[:-LENGTH].max() < 1e-3
    assert (whole(found.margins)[-LENGTH:] > 1e-3).sum() > 3, "with another seed it draws other tokens"
    assert np.abs(whole(found.errors)).max() < 1e-3
    now = trainer.audit(Audit(path=str(tmp_path / "staging.bin"), rollouts=asked))
    assert whole(now.margins)[:-LENGTH].max() > 1e-3
    assert np.abs(whole(now.errors)).max() > 1e-3
    assert trainer.audit(Audit(path=str(tmp_path / "none.bin"), rollouts=asked)).errors == ()
