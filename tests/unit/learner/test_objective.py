"""Every objective, token by token, against a slow and obvious one in plain Python; and what hostile claims can do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.learner.messages import Train, TrainerConfig
from swarm.learner.objective import (
    ICEPOP_HIGH,
    ICEPOP_LOW,
    OBJECTIVES,
    RATIO_CAP,
    REFERENCE_CAP,
    WEIGHT_CAP,
    TokenLoss,
    Tokens,
    kl_to_reference,
)
from swarm.types import ObjectiveName
from tests.unit.trainers import group, saved, trainer_in

RULES = TrainerConfig()
LOW, HIGH = 1 - RULES.resolved_clip[0], 1 + RULES.resolved_clip[1]

NAMES: list[ObjectiveName] = ["grpo", "gspo", "decoupled_ppo", "icepop", "cispo", "tis"]

Claim = tuple[float, float, float, float]
"""Log-prob now, behaviour's, proximal's, advantage."""


def clipped(ratio: float, advantage: float) -> float:
    return min(ratio * advantage, min(max(ratio, LOW), HIGH) * advantage)


def grpo(now: float, behaviour: float, proximal: float, advantage: float) -> float:
    return -clipped(min(math.exp(now - behaviour), RATIO_CAP), advantage)


def decoupled_ppo(now: float, behaviour: float, proximal: float, advantage: float) -> float:
    weight = min(math.exp(proximal - behaviour), WEIGHT_CAP)
    return -weight * clipped(min(math.exp(now - proximal), RATIO_CAP), advantage)


def icepop(now: float, behaviour: float, proximal: float, advantage: float) -> float:
    weight = math.exp(proximal - behaviour)
    if not ICEPOP_LOW <= weight <= ICEPOP_HIGH:
        return 0.0
    return -weight * clipped(min(math.exp(now - proximal), RATIO_CAP), advantage)


def plain(name: str, claim: Claim, moved: float = 0.0) -> float:
    """The loss of one token whose log-prob has moved, as docs/learner.md writes it."""
    now, behaviour, proximal, advantage = claim
    if name in ("cispo", "tis"):
        # The weight is computed where it is, and stays when the log-prob moves.
        cap = HIGH if name == "cispo" else WEIGHT_CAP
        return -min(math.exp(now - behaviour), cap) * advantage * (now + moved)
    # A rollout of one token has the ratio of that token.
    formula = {"grpo": grpo, "gspo": grpo, "decoupled_ppo": decoupled_ppo, "icepop": icepop}[name]
    return formula(now + moved, behaviour, proximal, advantage)


def slope(name: str, claim: Claim) -> float:
    """By central differences: right where no kink is within `step`."""
    step = 1e-6
    return (plain(name, claim, step) - plain(name, claim, -step)) / (2 * step)


def apply(
    name: str, claims: list[Claim], mask: list[int] | None = None, dtype: torch.dtype = torch.float32
) -> tuple[TokenLoss, torch.Tensor]:
    """What the objective makes of the tokens, and the gradient of its masked sum."""
    now, behaviour, proximal, advantages = (torch.tensor(column, dtype=dtype) for column in zip(*claims, strict=True))
    counts = torch.tensor(mask or [1] * len(claims), dtype=dtype)
    tokens = Tokens(
        logprobs=now.requires_grad_(),
        behaviour=behaviour,
        proximal=proximal,
        advantages=advantages,
        mask=counts,
        counts_of=(1,) * len(claims),
    )
    found = OBJECTIVES[name].formula(tokens, RULES)
    (pull,) = torch.autograd.grad((found.loss * counts).sum(), now)
    return found, pull


def beside(bound: float) -> list[float]:
    """Log-ratios just under and just over a bound."""
    return [math.log(bound) - 1e-3, math.log(bound) + 1e-3]


RATIOS = [-4.0, *beside(LOW), 0.0, *beside(HIGH), *beside(WEIGHT_CAP), *beside(RATIO_CAP), 5.0]
WEIGHTS = [-4.0, *beside(ICEPOP_LOW), 0.0, *beside(WEIGHT_CAP), *beside(ICEPOP_HIGH), 4.0]


def test_the_references_are_of_all_objectives() -> None:
    assert sorted(OBJECTIVES) == sorted(NAMES) == sorted(get_args(ObjectiveName))
    assert [name for name in NAMES if OBJECTIVES[name].wants_proximal] == ["decoupled_ppo", "icepop"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("advantage", [-1.7, 0.0, 0.6])
def test_loss_and_gradient_are_the_formulas_on_both_sides_of_every_bound(name: str, advantage: float) -> None:
    """A grid of pi / proximal and proximal / behaviour for those that use it, of pi / behaviour for the others."""
    claims: list[Claim]
    if OBJECTIVES[name].wants_proximal:
        claims = [(-1.0 + r, -1.0 - w, -1.0, advantage) for r in RATIOS for w in WEIGHTS]
    else:
        claims = [(-1.0 + r, -1.0, 0.0, advantage) for r in RATIOS]
    found, pull = apply(name, claims)
    assert found.loss.tolist() == pytest.approx([plain(name, claim) for claim in claims], rel=1e-4, abs=1e-6)
    assert pull.tolist() == pytest.approx([slope(name, claim) for claim in claims], rel=1e-3, abs=1e-5)


log_probs = st.floats(-30, 0)
tokens_drawn = st.lists(
    st.tuples(log_probs, log_probs, log_probs, st.floats(-3, 3), st.integers(0, 1)), min_size=1, max_size=12
)


@pytest.mark.parametrize("name", NAMES)
@given(drawn=tokens_drawn)
@settings(max_examples=40, deadline=None)
def test_any_tokens_add_up_to_the_sum_of_the_formula(name: str, drawn: list[tuple[float, ...]]) -> None:
    claims = [(now, behaviour, proximal, advantage) for now, behaviour, proximal, advantage, _ in drawn]
    mask = [int(row[4]) for row in drawn]
    found, pull = apply(name, claims, mask, torch.float64)
    counts = torch.tensor(mask)
    expected = sum(count * plain(name, claim) for claim, count in zip(claims, mask, strict=True))
    assert (found.loss * counts).sum().item() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert pull[counts == 0].tolist() == [0.0] * mask.count(0)
    halves = [apply(name, claims[at : at + 1], mask[at : at + 1], torch.float64) for at in range(len(claims))]
    assert [part.item() for _, part in halves] == pytest.approx(pull.tolist())
    for figure, value in found.figures.items():
        assert value.item() == pytest.approx(sum(part.figures[figure].item() for part, _ in halves))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_no_claim_makes_a_loss_or_a_gradient_infinite(name: str, advantage: float) -> None:
    """Behaviour log-probs are what a sampler says they are, and its tokens may be ones that no policy would draw."""
    hostile = [-1e4, -50.0, -1.0, 1e-3]
    claims = [(now, behaviour, proximal, advantage) for now in hostile for behaviour in hostile for proximal in hostile]
    masked = [n % 2 for n in range(len(claims))]
    found, pull = apply(name, claims, masked)
    assert torch.isfinite(found.loss).all()
    assert all(torch.isfinite(value) for value in found.figures.values())
    # The largest slope is that of the largest weight times the largest ratio.
    assert pull.abs().max().item() <= max(RATIO_CAP, WEIGHT_CAP * RATIO_CAP, ICEPOP_HIGH * RATIO_CAP) * 1.001
    assert pull[torch.tensor(masked) == 0].tolist() == [0.0] * masked.count(0)
    assert set(pull[torch.tensor(masked) == 1].isfinite().tolist()) == {True}


@pytest.mark.parametrize(
    ("name", "low", "high"), [("grpo", 1, 1), ("decoupled_ppo", 1, 1), ("icepop", 1, 1), ("cispo", 0, 2), ("tis", 0, 0)]
)
def test_figures_are_sums_over_the_tokens_that_count(name: str, low: int, high: int) -> None:
    """Half and one and a half times as likely, for better and worse; one unmoved, one far off that does not count."""
    moves = [(0.5, -1.0), (0.5, 1.0), (1.0, 1.0), (1.5, -1.0), (1.5, 1.0), (9.0, 1.0)]
    claims = [(-3.0 + math.log(ratio), -3.0, -3.0, advantage) for ratio, advantage in moves]
    figures = apply(name, claims, [1, 1, 1, 1, 1, 0])[0].figures
    assert (figures["clip_ratio/low_mean"].item(), figures["clip_ratio/high_mean"].item()) == (low, high)
    if name in ("grpo", "decoupled_ppo"):
        weights = figures["sampling/importance_sampling_ratio/mean"].item()
        assert weights == pytest.approx(5.0)
    assert figures.get("sampling/masked_ratio", torch.zeros(1)).item() == 0


def test_icepop_counts_what_it_leaves_out() -> None:
    claims = [(-3.0, -3.0 - math.log(weight), -3.0, 1.0) for weight in (0.4, 0.6, 4.0, 6.0, 9.0)]
    found, _ = apply("icepop", claims, [1, 1, 1, 1, 0])
    assert found.figures["sampling/masked_ratio"].item() == 2
    assert found.figures["sampling/importance_sampling_ratio/mean"].item() == pytest.approx(4.6)


# -- the distance to the reference -------------------------------------------------------------------------------


def test_the_distance_to_the_reference_is_k3_and_pulls_back_where_nothing_is_masked() -> None:
    now = torch.tensor([-1.0, -1.0, -1.0, -8.0, -1.0, -1e4, -2.0], requires_grad=True)
    reference = torch.tensor([-1.0, -3.0, -0.5, -1.0, -1e4, -1.0, -1.0])
    found = kl_to_reference(now, reference, mask := torch.tensor([1.0] * 6 + [0.0]))
    (pull,) = torch.autograd.grad(found.sum(), now)
    capped = math.log(REFERENCE_CAP)
    for at, (mine, its, counts) in enumerate(zip(now.tolist(), reference.tolist(), mask.tolist(), strict=True)):
        d = min(its - mine, capped)
        assert found[at].item() == pytest.approx(counts * (math.exp(d) - d - 1), rel=1e-5, abs=1e-7)
        expected = 0.0 if its - mine > capped else counts * (1 - math.exp(d))
        assert pull[at].item() == pytest.approx(expected, rel=1e-5, abs=1e-7)


# -- whole rollouts ----------------------------------------------------------------------------------------------


def test_gspo_has_one_ratio_for_all_tokens_of_a_rollout() -> None:
    """Three rollouts, in one of which a token does not count, against sums in plain Python, with the gradient."""
    rules = TrainerConfig(objective="gspo", clip=(3e-2, 4e-2))
    now = torch.tensor([-1.0, -2.0, -0.5, -1.5, -3.0, -1.0], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([-1.01, -2.01, -0.6, -1.0, -3.5, -1e4], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -0.5, -0.5, -0.5, -0.5], dtype=torch.float64)
    mask = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    counts = (2, 3, 1)
    found = OBJECTIVES["gspo"].formula(
        Tokens(logprobs=now, behaviour=behaviour, advantages=advantages, mask=mask, counts_of=counts), rules
    )
    ratios = [math.exp((0.01 + 0.01) / 2), math.exp((0.1 - 0.5) / 2), RATIO_CAP]
    losses = [-1.0 * ratios[0], 0.5 * max(ratios[1], 1 - 3e-2), 0.5 * RATIO_CAP]
    expected = [loss for loss, count in zip(losses, counts, strict=True) for _ in range(count)]
    assert found.loss.tolist() == pytest.approx(expected)
    (pull,) = torch.autograd.grad((found.loss * mask).sum(), now)
    # d s / d log pi of a token is s / length; the clip stops the second rollout, the cap the third.
    assert pull.tolist() == pytest.approx([-ratios[0], -ratios[0], 0.0, 0.0, 0.0, 0.0])
    assert found.figures["clip_ratio/low_mean"].item() == 2


# -- in a learner step -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_step_with_any_objective_makes_rewarded_tokens_likelier_and_hostile_log_probs_leave_finite_weights(
    name: ObjectiveName, tmp_path: Path
) -> None:
    trainer = trainer_in(tmp_path, objective=name)

    def likelihood() -> float:
        logits = trainer._model(input_ids=torch.tensor([[1, 4, 13]])).logits[0, -1]
        return float(logits.log_softmax(-1)[3].detach())

    before = likelihood()
    figures = trainer.step(Train(step=0, groups=(group([1.0, 0.0, 0.0, 0.0]),))).metrics
    assert likelihood() > before
    assert figures["optimizer_steps"] == 2
    assert 0 < figures["sampling/importance_sampling_ratio/mean"] < RATIO_CAP
    assert trainer._update._at.reference is None, "without a weight there is no distance and no second model"
    assert "kl" not in figures
    hostile = (group([1.0, 0.0], logprob=-1e4), group([0.0, 1.0]))
    figures = trainer.step(Train(step=1, groups=hostile)).metrics
    assert all(torch.isfinite(p).all() for p in trainer._model.parameters())
    assert all(math.isfinite(value) for value in figures.values())


def test_the_reference_is_the_model_that_the_run_began_with(tmp_path: Path) -> None:
    """At the first optimiser step the distance is zero; after a resume it is that to the first weights, not the
    checkpoint's."""
    rules: dict[str, Any] = {"kl_weight": 0.1, "minibatches": 1, "learning_rate": 1e-2}
    batch = (group([1.0, 0.0, 0.0]),)
    trainer = trainer_in(tmp_path / "first", **rules)
    assert trainer.step(Train(step=0, groups=batch)).metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    second = trainer.step(Train(step=1, groups=batch)).metrics["kl"]
    assert second > 1e-4
    checkpoint = saved(trainer, tmp_path / "checkpoint-2", 2)
    third = trainer.step(Train(step=2, groups=batch)).metrics["kl"]
    again = trainer_in(tmp_path / "again", **rules, resume=checkpoint)
    assert again.step(Train(step=2, groups=batch)).metrics["kl"] == pytest.approx(third)
    assert third > 1e-3
