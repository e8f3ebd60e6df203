"""What vLLM is given in place of a matrix, read as compressed-tensors checkpoints are, and what it stands for."""

from __future__ import annotations

import pytest
import torch

from swarm.errors import UserError
from swarm.sampler.vllm.rounding import check, computed_with, loaded, rounded_inputs
from swarm.types import Rounding
from tests.builders import layout

MATRIX = torch.randn((6, 96), generator=torch.Generator().manual_seed(0)).bfloat16()


def read(parts: dict[str, torch.Tensor], precision: Rounding) -> torch.Tensor:
    """As the format says: a number times its row's or its group's scale; with int4 kernels multiply bf16 numbers."""
    scales = parts["w.weight_scale"].float()
    if precision != "int4":
        return parts["w.weight"].float() * scales
    rows, columns = parts["w.weight_shape"].tolist()
    words = parts["w.weight_packed"].long()
    numbers = torch.stack([(words >> (4 * place)) & 15 for place in range(8)], -1).view(rows, columns) - 8
    return (numbers.bfloat16() * scales.bfloat16().repeat_interleave(32, dim=1)).float()


@pytest.mark.parametrize(("precision", "error"), [("fp8", 2**-4), ("int8", 0.5 / 127), ("int4", 0.52 / 7)])
def test_a_checkpoint_holds_what_is_computed_with_and_that_is_near_the_matrix(
    precision: Rounding, error: float
) -> None:
    held = computed_with(MATRIX, precision)
    assert torch.equal(read(loaded("w.weight", MATRIX, precision), precision), held)
    off = (held - MATRIX.float()).abs()
    # Of fp8 the error is a share of the number itself, of the others a share of the largest that shares its scale.
    bound = MATRIX.float().abs() if precision == "fp8" else MATRIX.float().abs().amax(-1, keepdim=True)
    assert (off <= error * bound + 1e-3).all()
    assert off.max() > 0


@pytest.mark.parametrize("precision", ["fp8", "int8", "int4"])
def test_rows_are_rounded_by_themselves_so_that_shards_and_fused_matrices_hold_the_same(precision: Rounding) -> None:
    whole = computed_with(MATRIX, precision)
    assert torch.equal(torch.cat([computed_with(part, precision) for part in (MATRIX[:2], MATRIX[2:])]), whole)
    assert torch.equal(computed_with(torch.zeros(2, 32), precision), torch.zeros(2, 32))


def test_inputs_are_rounded_token_by_token_where_kernels_do() -> None:
    inputs = torch.randn((2, 3, 32), generator=torch.Generator().manual_seed(1))
    assert torch.equal(rounded_inputs(inputs, "int4"), inputs)
    seen = rounded_inputs(inputs, "int8")
    assert torch.equal(rounded_inputs(inputs[1], "int8"), seen[1])
    assert 0 < (seen - inputs).abs().max() < 0.02


def test_what_vllm_cannot_round_is_refused() -> None:
    narrow = layout(("layers.0.a.weight", "BF16", (32, 48)), ("embed.weight", "BF16", (10, 48)))
    check(narrow, "int8", is_cuda=True)
    with pytest.raises(UserError, match=r"int4 wants rows of whole 32s, unlike layers\.0\.a\.weight: take int8"):
        check(narrow, "int4", is_cuda=True)
    with pytest.raises(UserError, match="a model of experts"):
        check(layout(("layers.0.experts.down_proj", "BF16", (4, 32, 32))), "int8", is_cuda=True)


def test_int4_is_refused_on_a_processor_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = layout(("layers.0.a.weight", "BF16", (32, 64)))
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    check(wide, "int4", is_cuda=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    check(wide, "int4", is_cuda=True)
    with pytest.raises(UserError, match="with AVX-512, which this one lacks: take fp8"):
        check(wide, "int4", is_cuda=False)
