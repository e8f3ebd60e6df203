"""A learner step on episodes: the gradient of the masked formula, written out; and who answers for which claims."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from swarm.learner import update
from swarm.learner.advantages import row_of
from swarm.learner.messages import Train, TrainerConfig, TrainGroup, TrainRollout
from swarm.learner.policy import Policy
from swarm.learner.trainer import Trainer
from swarm.types import Turn
from tests.builders import floats, ints
from tests.unit.trainers import trainer_in, weights

PROMPT = (1, 4)
EPISODES = (
    ((3, 7, 9, 9, 5, 2), (Turn(start=0, end=2, reward=0.5), Turn(start=4, end=6, reward=0.5))),
    ((8, 9, 6, 2, 9), (Turn(start=0, end=1, reward=0.0), Turn(start=2, end=4, reward=0.25))),
)
RETURNS = {"episode": ((1.0, 1.0), (0.25, 0.25)), "turn": ((0.75, 0.5), (0.125, 0.25))}
DISCOUNT, CLAIMED, LONGEST = 0.5, -2.5, 8


def rollouts() -> tuple[TrainRollout, ...]:
    made = []
    for ids, turns in EPISODES:
        drawn = [any(turn.start <= at < turn.end for turn in turns) for at in range(len(ids))]
        reward = sum(turn.reward for turn in turns)
        logprobs = floats(*(CLAIMED if one else 0.0 for one in drawn))
        made.append(TrainRollout(token_ids=ints(*ids), logprobs=logprobs, reward=reward, staleness=0, turns=turns))
    return tuple(made)


def test_of_a_completion_that_was_handed_over_each_token_is_claimed_by_who_drew_it() -> None:
    parts = (Turn(start=0, end=2, node="alice"), Turn(start=2, end=3, node="bob"))
    one = TrainRollout(token_ids=ints(3, 7, 2), logprobs=floats(-1, -2, -3), reward=1.0, staleness=0, sampler="bob")
    alone, both = row_of(PROMPT, one), row_of(PROMPT, structs.replace(one, parts=parts))
    assert (alone.samplers, both.samplers) == (("bob",), ("alice", "bob"))
    assert both.drawn_by is not None
    assert both.drawn_by.tolist() == [0, 0, 1]
    for name in ("token_ids", "behaviour", "drawn"):
        assert torch.equal(getattr(alone, name), getattr(both, name)), name
    assert (alone.advantage, alone.prompt_tokens) == (both.advantage, both.prompt_tokens)


def moved_trainer(
    directory: Path, rules: TrainerConfig, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[Trainer, list[torch.Tensor]]:
    """A trainer whose policy is no longer its reference, and which keeps its gradients instead of stepping."""
    trainer = trainer_in(directory, **rules.model_dump(exclude_unset=True), **settings, minibatches=1)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer._model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=draw)
    kept: list[torch.Tensor] = []

    monkeypatch.setattr(
        trainer._update._at.optimizer,
        "step",
        lambda: kept.extend(parameter.grad.clone() for parameter in trainer._model.parameters()),
    )
    return trainer, kept


def masked_step(model: Any, reference: Any, rules: TrainerConfig) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradient in float64, with a mask over all tokens after the prompt."""
    model, reference = copy.deepcopy(model).double(), copy.deepcopy(reference).double()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for number, (ids, turns) in enumerate(EPISODES):
        whole = torch.tensor([[*PROMPT, *ids]])
        now, then = (one(input_ids=whole).logits[0, 1:-1].log_softmax(-1) for one in (model, reference))
        mask, advantages = torch.zeros(len(ids)), torch.zeros(len(ids), dtype=torch.float64)
        for turn_number, turn in enumerate(turns):
            every = [value for own in RETURNS[rules.credit] for value in own]
            mean = sum(own[turn_number] for own in RETURNS[rules.credit]) / 2
            spread = math.sqrt(sum((one - sum(every) / 4) ** 2 for one in every) / 4) + 1e-4
            mask[turn.start : turn.end] = 1
            advantages[turn.start : turn.end] = (RETURNS[rules.credit][number][turn_number] - mean) / spread
        places, targets = torch.arange(len(ids)), torch.tensor(ids)
        mine, theirs = now[places, targets], then[places, targets].detach()
        ratio = (mine - CLAIMED).exp()
        each = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
        each = each + rules.kl_weight * ((theirs - mine).exp() - (theirs - mine) - 1)
        each = each + rules.entropy_weight * (now.exp() * now).sum(-1)
        divisors = {"tokens": 1, "rollouts": len(EPISODES) * mask.sum(), "constant": len(EPISODES) * LONGEST}
        total = total + (each * mask / divisors[rules.resolved_normalisation]).sum()
        tokens += int(mask.sum())
    loss = total / tokens if rules.resolved_normalisation == "tokens" else total
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("tokens_per_micro_batch", [None, 16])
@pytest.mark.parametrize(
    "rules",
    [
        TrainerConfig(),
        TrainerConfig(task="frozen-lake", credit="turn", turn_discount=DISCOUNT),
        TrainerConfig(loss_normalisation="constant", longest_completion=LONGEST),
        TrainerConfig(loss_normalisation="rollouts", kl_weight=0.3, entropy_weight=0.1),
        TrainerConfig(task="frozen-lake", credit="turn", turn_discount=DISCOUNT, loss_normalisation="rollouts"),
    ],
    ids=lambda rules: f"{rules.credit}, {rules.loss_normalisation}, kl {rules.kl_weight}",
)
def test_the_gradient_is_that_of_the_masked_formula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: TrainerConfig, tokens_per_micro_batch: int | None
) -> None:
    trainer, kept = moved_trainer(tmp_path, rules, monkeypatch, tokens_per_micro_batch=tokens_per_micro_batch)
    reference = trainer._update._at.reference
    other = reference.module.model if isinstance(reference, Policy) else trainer._model
    expected, gradients = masked_step(trainer._model, other, rules)
    batch = (TrainGroup(prompt_token_ids=PROMPT, rollouts=rollouts()),)
    figures = trainer.step(Train(step=0, groups=batch)).metrics
    assert figures["loss"] == pytest.approx(expected, rel=1e-5)
    assert figures["episode/turns/mean"] == 2
    norm, largest = max(1.0, figures["grad_norm"]), max(float(one.abs().max()) for one in gradients)
    for found, one in zip(kept, gradients, strict=True):
        torch.testing.assert_close(norm * found.double(), one, atol=2e-6 * largest, rtol=1e-4)


def test_each_node_answers_for_the_turns_that_it_drew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two lies about its turn: its own is left out, and the other's moves the weights as if it were alone."""
    monkeypatch.setattr(update, "MIN_TOKENS", 2)  # As many as a turn has here
    ends = []
    for second in ((Turn(start=4, end=6, node="liar"),), ()):
        trainer = trainer_in(tmp_path / str(len(second)), minibatches=1)
        made = []
        for number, (ids, (first, _)) in enumerate(EPISODES):
            ids = (*ids, 6)[:6]
            logits = trainer._model(input_ids=torch.tensor([[*PROMPT, *ids]])).logits[0, 1:-1].log_softmax(-1)
            true = [float(logits[at, token].detach()) if at < 2 else 0.0 for at, token in enumerate(ids)]
            claims = true if not second else [*true[:4], true[4] - 9, true[5] - 9]
            turns = (structs.replace(first, node="honest", reward=float(number)), *second)
            one = TrainRollout(token_ids=ints(*ids), logprobs=floats(*claims), reward=float(number), staleness=0)
            made.append(structs.replace(one, sampler="liar", turns=turns))
        rules = {"loss_normalisation": "constant", "longest_completion": 8}
        trainer._update._config = trainer._update._config.model_copy(update=rules)
        done = trainer.step(Train(step=0, groups=(TrainGroup(prompt_token_ids=PROMPT, rollouts=tuple(made)),)))
        assert done.withheld == ({"liar": 2} if second else {})
        if second:
            assert done.mismatches["honest"][0] == pytest.approx(0.0, abs=1e-5)
            assert done.mismatches["liar"][0] > 1
        ends.append(weights(trainer))
    torch.testing.assert_close(ends[0], ends[1])
