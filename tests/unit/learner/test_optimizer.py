"""AdamW against its formula in float64, and the three places of its moments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarm import extras
from swarm.errors import UserError
from swarm.learner import optimizer as module
from swarm.learner.optimizer import BETAS, BLOCK, EPSILON, AdamW, converted
from swarm.types import OptimizerStates
from tests.unit.trainers import trainer_in

RATE, DECAY, STEPS = 1e-2, 0.1, 6
SHAPES = ((40, 2 * BLOCK), (33, 300), (7,))  # Of whole blocks, of parts of one, and a small one


def parameters() -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]


def gradients(step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1 + step)
    return [1e-3 * torch.randn(shape, generator=draw) for shape in SHAPES]


def stepped(states: OptimizerStates) -> tuple[AdamW, list[torch.nn.Parameter]]:
    found = parameters()
    optimizer = AdamW(found, states, lr=RATE, weight_decay=DECAY)
    for step in range(STEPS):
        for parameter, gradient in zip(found, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return optimizer, found


def in_float64() -> list[torch.Tensor]:
    """Loshchilov and Hutter, algorithm 2, as it is written."""
    weights = [p.detach().double() for p in parameters()]
    first, second = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    for step in range(1, STEPS + 1):
        for w, m, v, g in zip(weights, first, second, gradients(step - 1), strict=True):
            m.mul_(BETAS[0]).add_((1 - BETAS[0]) * g.double())
            v.mul_(BETAS[1]).add_((1 - BETAS[1]) * g.double() ** 2)
            w.mul_(1 - RATE * DECAY)
            w -= RATE * (m / (1 - BETAS[0] ** step)) / ((v / (1 - BETAS[1] ** step)).sqrt() + EPSILON)
    return weights


def test_steps_are_those_of_the_formula() -> None:
    for found, expected in zip(stepped("float32")[1], in_float64(), strict=True):
        torch.testing.assert_close(found.detach().double(), expected, rtol=0, atol=4e-6)


@pytest.mark.parametrize("piece", [64, module.PIECE])
def test_moments_on_the_host_give_the_same_bits(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are cut on their way."""
    monkeypatch.setattr(module, "PIECE", piece)
    host, own = stepped("host"), stepped("float32")
    for found, expected in zip(host[1], own[1], strict=True):
        assert torch.equal(found, expected)
        for kind, moment in own[0].state[expected].items():
            assert torch.equal(host[0].state[found][kind], moment)


def test_moments_on_the_host_are_there_whatever_the_device() -> None:
    on_another = torch.nn.Parameter(torch.empty(SHAPES[0], device="meta"))
    for states, device in (("host", "cpu"), ("float32", "meta")):
        optimizer = AdamW([on_another], states, lr=RATE, weight_decay=0.0)  # type: ignore[arg-type]
        assert {t.device.type for kind, t in optimizer.begin(on_another).items() if kind != "step"} == {device}


def test_moments_in_8_bits_take_two_bytes_and_steps_are_near() -> None:
    optimizer, (large, odd, small) = stepped("8bit")
    state = optimizer.state[large]
    nbytes = sum(tensor.nbytes for kind, tensor in state.items() if kind != "step")
    assert nbytes == (2 + 2 * 4 / BLOCK) * large.numel()
    # What cannot be cut into blocks along its rows, and what is small.
    assert all(optimizer.state[p]["exp_avg"].dtype is torch.float32 for p in (odd, small))
    expected = in_float64()
    assert torch.allclose(small.detach().double(), expected[2], rtol=0, atol=1e-6)
    # A step is at most about the rate; the mean error of six is a twentieth of one.
    error = (large.detach().double() - expected[0]).abs()
    moved = (large.detach() - parameters()[0].detach()).abs()
    assert float(error.mean()) < RATE / 20 < float(moved.mean())
    again = stepped("8bit")[1]
    assert all(torch.equal(a, b) for a, b in zip(again, (large, odd, small), strict=True))


def test_states_are_converted_to_and_from_8_bits() -> None:
    eight, (large, *_) = stepped("8bit")
    full, (same, *_) = stepped("float32")
    state, whole = eight.state[large], full.state[same]
    assert converted(state, state) == state
    widened = converted(state, whole)
    for kind in module.MOMENTS:
        off = (widened[kind] - whole[kind]).abs()
        assert float(off.max()) < 0.2 * float(whole[kind].abs().max())
        assert float(off.mean()) < 0.05 * float(whole[kind].abs().mean())
    rounded = converted(whole, state)
    for kind, tensor in state.items():
        assert (rounded[kind].shape, rounded[kind].dtype) == (tensor.shape, tensor.dtype)
    for kind in module.MOMENTS:
        back = converted(rounded, whole)[kind]
        assert float((back - whole[kind]).abs().mean()) < 0.05 * float(whole[kind].abs().mean())


def test_8_bits_without_the_library_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.LIBRARIES, "quantized", ("no_such_module",))
    with pytest.raises(UserError, match=r"^optimizer_states = .8bit. needs the extra `quantized`"):
        trainer_in(tmp_path, optimizer_states="8bit")
