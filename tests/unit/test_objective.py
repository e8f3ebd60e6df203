"""The objective against a slow and obvious one in float64, and the batch that it is computed on."""

from __future__ import annotations

import math

import pytest
import torch

from swarm.learner.batch import collate, has_variance, reward_figures
from swarm.learner.messages import TrainGroup, TrainRollout
from swarm.learner.objective import CLIP_HIGH, CLIP_LOW, RATIO_CAP, clipped_loss, group_advantages
from tests.builders import floats, ints

CPU = torch.device("cpu")


def plain_loss(
    now: list[list[float]], before: list[list[float]], advantages: list[float], mask: list[list[int]], tokens: float
) -> float:
    """min(ratio * A, clip(ratio) * A), token by token, as the papers write it, with our cap on the ratio."""
    total = 0.0
    for row, advantage in enumerate(advantages):
        for at, counts in enumerate(mask[row]):
            ratio = min(math.exp(now[row][at] - before[row][at]), RATIO_CAP)
            bounded = min(max(ratio, 1 - CLIP_LOW), 1 + CLIP_HIGH)
            total += counts * min(ratio * advantage, bounded * advantage)
    return -total / tokens


LOG_RATIOS = [-2.0, math.log(1 - CLIP_LOW) - 1e-3, math.log(1 - CLIP_LOW) + 1e-3, 0.0]
LOG_RATIOS += [math.log(1 + CLIP_HIGH) - 1e-3, math.log(1 + CLIP_HIGH) + 1e-3, 1.5]


@pytest.mark.parametrize("advantage", [-1.7, 0.0, 0.6])
def test_the_loss_of_one_token_is_the_papers_on_both_sides_of_both_clips(advantage: float) -> None:
    for log_ratio in LOG_RATIOS:
        now = torch.tensor([[-1.0 + log_ratio]], requires_grad=True)
        found = clipped_loss(now, torch.tensor([[-1.0]]), torch.tensor([advantage]), torch.ones(1, 1), 1.0)
        expected = plain_loss([[-1.0 + log_ratio]], [[-1.0]], [advantage], [[1]], 1.0)
        assert found.loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-7)
        (pull,) = torch.autograd.grad(found.loss, now)
        too_low, too_high = log_ratio < math.log(1 - CLIP_LOW), log_ratio > math.log(1 + CLIP_HIGH)
        clipped = (too_low and advantage < 0) or (too_high and advantage > 0)
        assert (found.clipped_low.item(), found.clipped_high.item()) == (too_low and clipped, too_high and clipped)
        expected = 0.0 if clipped else -math.exp(log_ratio) * advantage
        assert pull.item() == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("claim", [-50.0, -1e4])
def test_no_claimed_log_prob_makes_a_gradient_large_or_infinite(advantage: float, claim: float) -> None:
    """The second token is masked, the first one counts: behaviour log-probs are what a sampler says they are."""
    now = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    behaviour = torch.tensor([[claim, claim]])
    found = clipped_loss(now, behaviour, torch.tensor([advantage]), torch.tensor([[1.0, 0.0]]), 1.0)
    (pull,) = torch.autograd.grad(found.loss, now)
    assert abs(found.loss.item()) <= RATIO_CAP * 1.001
    assert pull.tolist() == [[0.0, 0.0]]


def test_the_loss_of_a_batch_is_the_papers_whatever_is_masked() -> None:
    draw = torch.Generator().manual_seed(0)
    before = torch.rand((6, 9), generator=draw) * -3
    now = before + torch.randn((6, 9), generator=draw)
    advantages = torch.randn(6, generator=draw)
    mask = (torch.rand((6, 9), generator=draw) < 0.6).float()
    found = clipped_loss(now, before, advantages, mask, 17.0)
    expected = plain_loss(now.tolist(), before.tolist(), advantages.tolist(), mask.int().tolist(), 17.0)
    assert found.loss.item() == pytest.approx(expected, rel=1e-5)
    assert found.ratio_sum.item() == pytest.approx(
        float(((now - before).double().exp().clamp(max=RATIO_CAP) * mask).sum()), rel=1e-5
    )


def test_a_masked_token_is_neither_counted_nor_pulled() -> None:
    now = torch.tensor([[-1.0, 5.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.0]])
    found = clipped_loss(now, torch.full((1, 2), -1.0), torch.tensor([1.0]), mask, 1.0)
    (pull,) = torch.autograd.grad(found.loss, now)
    assert found.clipped_high.item() == 0
    assert pull[0, 0].item() != 0
    assert pull[0, 1].item() == 0


def test_micro_batches_add_up_to_the_whole() -> None:
    draw = torch.Generator().manual_seed(1)
    before, now = -torch.rand((4, 5), generator=draw), -torch.rand((4, 5), generator=draw)
    advantages, mask = torch.randn(4, generator=draw), torch.ones(4, 5)
    whole = clipped_loss(now, before, advantages, mask, 20.0).loss
    parts = [clipped_loss(now[i : i + 1], before[i : i + 1], advantages[i : i + 1], mask[:1], 20.0) for i in range(4)]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.item(), rel=1e-5)


def test_advantages_are_centred_and_scaled_within_each_group() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.2, 0.2, 0.2, 0.2], [5.0, 1.0, 3.0, 3.0]])
    found = group_advantages(rewards)
    for row, group in enumerate(rewards.double().tolist()):
        mean = sum(group) / len(group)
        spread = math.sqrt(sum((reward - mean) ** 2 for reward in group) / len(group))
        expected = [(reward - mean) / (spread + 1e-4) for reward in group]
        assert found[row].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-3)
    assert found[1].abs().max().item() < 1e-2


def one(tokens: list[int], reward: float, *, mask: list[int] | None = None, staleness: int = 0) -> TrainRollout:
    """A rollout whose log-probs are -1, -2, ... so that a shift would show."""
    return TrainRollout(
        token_ids=ints(*tokens),
        logprobs=floats(*(-1.0 - i for i in range(len(tokens)))),
        loss_mask=bytes(mask or [1] * len(tokens)),
        reward=reward,
        staleness=staleness,
    )


GROUPS = (
    TrainGroup(prompt_token_ids=(1, 5, 6), rollouts=(one([7, 8, 2], 1.0, staleness=2), one([9], 0.0))),
    TrainGroup(prompt_token_ids=(1,), rollouts=(one([3, 4, 5, 6], 0.5, mask=[1, 0, 1, 1]), one([2], 0.5))),
)


def test_each_place_of_a_batch_predicts_the_token_after_it() -> None:
    batch = collate(GROUPS, CPU)
    pairs = [(group.prompt_token_ids, rollout) for group in GROUPS for rollout in group.rollouts]
    assert batch.token_ids.shape == (4, 6)
    for row, (prompt, rollout) in enumerate(pairs):
        tokens = torch.frombuffer(bytearray(rollout.token_ids), dtype=torch.int32).tolist()
        whole = [*prompt, *tokens]
        assert batch.token_ids[row].tolist() == whole + [0] * (6 - len(whole))
        assert batch.attention[row].tolist() == [1] * len(whole) + [0] * (6 - len(whole))
        for place, (token, counts) in enumerate(zip(tokens, rollout.loss_mask, strict=True)):
            at = len(prompt) - 1 + place
            assert batch.token_ids[row, at + 1].item() == token
            assert batch.behaviour[row, at].item() == -1.0 - place
            assert batch.mask[row, at].item() == counts
        assert batch.mask[row].sum().item() == sum(rollout.loss_mask)
    assert batch.staleness.tolist() == [2, 0, 0, 0]
    assert batch.advantages.tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-3)


def test_rows_of_a_batch_stay_together() -> None:
    batch = collate(GROUPS, CPU)
    part = batch.rows(torch.tensor([2, 0]))
    assert part.token_ids.tolist() == [batch.token_ids[2].tolist(), batch.token_ids[0].tolist()]
    assert part.advantages.tolist() == [batch.advantages[2].item(), batch.advantages[0].item()]
    assert part.mask.tolist() == [batch.mask[2].tolist(), batch.mask[0].tolist()]
    assert part.behaviour.tolist() == [batch.behaviour[2].tolist(), batch.behaviour[0].tolist()]
    assert part.staleness.tolist() == [0, 2]


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    assert [has_variance(group) for group in GROUPS] == [True, False]


def test_the_figures_of_a_batch_need_no_model() -> None:
    figures = reward_figures(GROUPS)
    expected = {
        "reward": 0.5,
        "reward_std": 0.25,
        "frac_reward_zero_std": 0.5,
        "completions/mean_length": 9 / 4,
        "completions/max_length": 4.0,
        "staleness/mean": 0.5,
        "staleness/max": 2.0,
    }
    assert figures == pytest.approx(expected)
