"""AdamW, and where it keeps its two moments: in float32 or in 8 bits beside the weights, or in the host's memory.

A parameter is stepped by itself, on the rows that this rank holds: all at once would take 4 bytes more of each at the
very peak of a large model's memory. Moments in the host's memory come to the device a piece at a time and go back; the
arithmetic is the same, so "host" gives the numbers of "float32", bit for bit. In 8 bits (arXiv 2110.02861, by
bitsandbytes) each block of 256 elements has a scale of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import cycle
from typing import Any

import torch
from torch.distributed import tensor as distributed
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw as fused_adamw

from swarm.errors import UserError
from swarm.extras import how_to_have
from swarm.learner.copies import PIECE_BYTES, on, pin, stream_of
from swarm.types import OptimizerStates

BETAS = (0.9, 0.95)
EPSILON = 1e-8  # torch's
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # By torch's names: whether they have a sign
BLOCK = 256  # Elements that share a scale: what the kernels of bitsandbytes are built for
MIN_QUANTIZED = 4096  # Elements; bitsandbytes keeps smaller tensors in float32 too: norms and biases
PIECE = PIECE_BYTES // 4  # Elements of a moment that come to the device at once, of two pieces at a time


class AdamW(torch.optim.Optimizer):
    """Decoupled weight decay, arXiv 1711.05101. UserError for 8 bits without bitsandbytes."""

    def __init__(
        self, parameters: Iterable[torch.Tensor], learning_rate: float, weight_decay: float, states: OptimizerStates
    ) -> None:
        super().__init__(parameters, {"lr": learning_rate, "weight_decay": weight_decay})
        self._states = states
        if states == "8bit":
            _bitsandbytes()

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # No closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter] = self.state[parameter] or self.begin(parameter)
                state["step"] += 1
                held = {kind: local(tensor) for kind, tensor in state.items()}
                weight, gradient = local(parameter), local(parameter.grad)
                if not weight.numel():
                    continue
                if scale_of("exp_avg") in state:
                    _step_in_8_bits(weight, gradient, held, group)
                elif self._states == "host":
                    _step_by_pieces(weight, gradient, held, group)
                else:
                    _step(weight, gradient, held, group)

    def begin(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of a parameter that was never stepped. Cut as it is, where ranks share it."""
        state = {"step": torch.tensor(0.0)}
        blocks = blocks_of(parameter) if self._states == "8bit" else None
        for kind in MOMENTS:
            if blocks is not None:
                state[kind] = torch.zeros_like(parameter, dtype=torch.uint8, requires_grad=False)
                state[scale_of(kind)] = _zeros(blocks, like=parameter)
            elif self._states == "host":
                state[kind] = torch.zeros_like(parameter, device="cpu", requires_grad=False)
                pin(local(state[kind]), parameter.device)
            else:
                state[kind] = torch.zeros_like(parameter, requires_grad=False)
        return state


def adamw(
    model: Any, learning_rate: float, weight_decay: float = 0.0, states: OptimizerStates = "float32"
) -> AdamW:
    return AdamW([p for p in model.parameters() if p.requires_grad], learning_rate, weight_decay, states)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The rows that this rank holds."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def scale_of(kind: str) -> str:
    return f"{kind}_scale"


KINDS = ("step", *MOMENTS, *(scale_of(kind) for kind in MOMENTS))
"""Of all that a state may hold."""


def blocks_of(parameter: torch.Tensor) -> tuple[int, int] | None:
    """The shape of the scales of a parameter, which is cut along its rows as the parameter is; None if blocks would
    cross from the rows of one rank to those of the next, or it is small."""
    ranks = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
    rows, width = parameter.shape[0] if parameter.dim() else 1, math.prod(parameter.shape[1:])
    rows_of_blocks = BLOCK // math.gcd(width, BLOCK)
    if parameter.numel() < MIN_QUANTIZED or rows % (rows_of_blocks * (ranks if rows_of_blocks > 1 else 1)):
        return None
    return rows // rows_of_blocks, rows_of_blocks * width // BLOCK


def converted(held: Mapping[str, torch.Tensor], wanted: Iterable[str]) -> Mapping[str, torch.Tensor]:
    """The whole state of a parameter, on the CPU, of the kinds that are `wanted`: as it is if it has these, else its
    moments as float32, or rounded to 8 bits."""
    if set(held) == set(wanted):
        return held
    found = dict(held)
    for kind in MOMENTS:
        scale, values = scale_of(kind), _values(kind, torch.device("cpu"))
        if scale in held:
            blocks = values[held[kind].int()].view(-1, BLOCK) * held[scale].view(-1, 1)
            found[kind] = blocks.view(held[kind].shape)
        else:
            codes, rest = _bitsandbytes().quantize_blockwise(held[kind], code=values, blocksize=BLOCK)
            found |= {kind: codes, scale: rest.absmax}
    return found


# -- one parameter -------------------------------------------------------------------------------------------------


def _step(weight: torch.Tensor, gradient: torch.Tensor, held: Mapping[str, torch.Tensor], group: dict[str, Any]) -> None:
    fused_adamw(
        [weight],
        [gradient],
        [held["exp_avg"]],
        [held["exp_avg_sq"]],
        [],
        [torch.full((), float(held["step"]) - 1, device=weight.device)],  # Counted up there
        fused=True,
        amsgrad=False,
        beta1=BETAS[0],
        beta2=BETAS[1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=EPSILON,
        maximize=False,
    )


def _step_by_pieces(
    weight: torch.Tensor, gradient: torch.Tensor, held: Mapping[str, torch.Tensor], group: dict[str, Any]
) -> None:
    """By two streams, so that one piece comes while the other goes. On return the host has all."""
    device = weight.device
    streams = [stream_of(device) for _ in range(2)]
    if device.type == "cuda":
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(device))
    tensors = (weight, gradient, *(held[kind] for kind in MOMENTS))
    pieces = zip(*(tensor.view(-1).split(PIECE) for tensor in tensors), strict=True)
    for stream, (own, pull, *kept) in zip(cycle(streams), pieces, strict=False):
        with on(device, stream):
            moments = {
                kind: piece.to(device, non_blocking=True, copy=True) for kind, piece in zip(MOMENTS, kept, strict=True)
            }
            _step(own, pull, {**moments, "step": held["step"]}, group)
            for kind, piece in zip(MOMENTS, kept, strict=True):
                piece.copy_(moments[kind], non_blocking=True)
    for stream in streams:
        stream.synchronize()


def _step_in_8_bits(
    weight: torch.Tensor, gradient: torch.Tensor, held: Mapping[str, torch.Tensor], group: dict[str, Any]
) -> None:
    first, second = MOMENTS
    _bitsandbytes().optimizer_update_8bit_blockwise(
        "adam",
        gradient,
        weight,
        held[first],
        held[second],
        *BETAS,
        0.0,
        0.0,
        EPSILON,
        int(held["step"]),
        float(group["lr"]),
        _values(first, weight.device),
        _values(second, weight.device),
        held[scale_of(first)].view(-1),
        held[scale_of(second)].view(-1),
        weight_decay=group["weight_decay"],
    )


_VALUES: dict[tuple[str, torch.device], torch.Tensor] = {}


def _values(kind: str, device: torch.device) -> torch.Tensor:
    """What the 256 codes of a moment stand for, as shares of the scale."""
    if (kind, device) not in _VALUES:
        _VALUES[kind, device] = _bitsandbytes().create_dynamic_map(signed=MOMENTS[kind]).to(device)
    return _VALUES[kind, device]


def _zeros(shape: tuple[int, ...], *, like: torch.Tensor) -> torch.Tensor:
    if isinstance(like, DTensor):
        return distributed.zeros(*shape, device_mesh=like.device_mesh, placements=like.placements)
    return torch.zeros(shape, device=like.device)


def _bitsandbytes() -> Any:
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise UserError(
            f'optimizer_states = "8bit" takes the package bitsandbytes: {how_to_have("quantized")}'
        ) from error
    return functional
