"""Where a model runs."""

from __future__ import annotations

import pytest
import torch

from swarm.errors import UserError
from swarm.models.device import PERIOD, as_streamed, pick_device, put_back, round_off

STEP = 2.0**-8  # From 1 to the next number of bf16, halved: magnitudes from 0.5 on are this far apart


def test_a_tenth_of_the_weights_is_published_as_moved_once_all_have_moved_by_a_tenth_of_a_step() -> None:
    begun = (0.5 + torch.arange(64) * STEP).repeat(1 << 14).reshape(1024, 1024) * torch.tensor([1.0, -1.0]).repeat(512)
    moved = as_streamed(begun + begun.sign() * STEP / 10).float() != begun
    for share in (moved.float().mean(0), moved.float().mean(1), moved.float().mean().unsqueeze(0)):
        assert ((share - 0.1).abs() < 0.01).all(), "whole rows and columns move alike"
    nearest = (begun + begun.sign() * STEP / 10).bfloat16().float()
    assert torch.equal(nearest, begun), "of what is rounded to the nearest nothing moves"


def test_a_weight_moves_once_on_its_way_and_not_back() -> None:
    begun = torch.full((1000,), 0.75)
    ways = torch.stack([as_streamed(begun + part / 50 * STEP).float() for part in range(51)])
    assert (ways.diff(dim=0) >= 0).all()
    assert ((ways.diff(dim=0) > 0).sum(0) == 1).all()
    assert torch.equal(ways[-1], begun + STEP)


def test_numbers_of_bf16_are_published_as_they_are() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    every = bits.view(torch.bfloat16)
    found = as_streamed(every.float())
    assert torch.equal(found.view(torch.int16), bits)
    assert torch.isnan(found[torch.isnan(every)]).all()
    assert as_streamed(every).data_ptr() == every.data_ptr()
    assert as_streamed(torch.tensor([3])).dtype == torch.int64


def test_a_part_is_published_as_in_the_whole() -> None:
    whole = torch.randn(PERIOD + 1000, generator=torch.Generator().manual_seed(0))
    for first in (0, 7, PERIOD - 3, PERIOD + 5):
        assert torch.equal(as_streamed(whole[first:], first), as_streamed(whole)[first:])


@pytest.mark.parametrize("first", [0, 7, PERIOD - 3])
def test_the_nearest_of_what_is_rounded_off_is_what_is_published_and_its_last_bit_alone_is_lost(first: int) -> None:
    lower = torch.arange(1 << 16, dtype=torch.int32)
    bits = torch.cat([upper << 16 | lower for upper in (0, 0x3F7F, 0x3FFF, -0x4081)])
    held = bits.clone().view(torch.float32)
    round_off(held, first)
    even = bits + (bits & 1) * ((bits & 2) - 1)
    assert torch.equal(held.bfloat16(), as_streamed(even.view(torch.float32), first))
    put_back(held, first)
    assert torch.equal(held.view(torch.int32), even)


def test_the_cpu_is_taken_where_there_is_nothing_else_and_no_attention_is_planned_anew_for_each_shape() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="a Mac has what this wants to miss")
def test_the_gpu_of_a_mac_is_refused_elsewhere_in_one_line() -> None:
    with pytest.raises(UserError, match=r"^--device mps cannot be used here \(.*\); auto, cpu, .* mps may be$"):
        pick_device("mps")


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="mps is on Macs with Apple silicon alone")
def test_the_gpu_of_a_mac_is_taken_by_name() -> None:
    assert pick_device("mps").type == "mps"
