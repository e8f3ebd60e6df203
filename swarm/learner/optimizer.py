"""AdamW, and where it keeps its two moments: in float32 or in 8 bits beside the weights, or in the host's memory.

A parameter is stepped by itself, on the rows that this rank holds: all at once would take 4 bytes more of each at the
very peak of a large model's memory. Moments on the host come to the device a piece at a time and go back; "host" gives
the numbers of "float32", bit for bit. In 8 bits (arXiv 2110.02861, by bitsandbytes) each 256 elements share a scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw as torch_adamw

from swarm.extras import require
from swarm.types import OptimizerStates

BETAS, EPSILON = (0.9, 0.95), 1e-8
RULES: dict[str, Any] = {"beta1": BETAS[0], "beta2": BETAS[1], "eps": EPSILON, "amsgrad": False, "maximize": False}
MOMENTS, SCALES = ("exp_avg", "exp_avg_sq"), ("exp_avg_scale", "exp_avg_sq_scale")
BLOCK = 256  # Elements that share a scale: what the kernels of bitsandbytes are built for
MIN_QUANTIZED = 4096  # Elements; bitsandbytes keeps smaller tensors in float32 too: norms and biases
_bitsandbytes = partial(import_module, "bitsandbytes.functional")  # Imported when used: it is large, and an extra
PIECE_BYTES = 64 << 20  # Of a moment on the host; a piece takes 2.5 ms of a bus of 25 GB/s, and starting one 0.02
PIECE = PIECE_BYTES // 4  # Elements of a moment that come to the device at once; two pieces are there at a time


class AdamW(torch.optim.Optimizer):
    """Decoupled weight decay, arXiv 1711.05101. UserError for 8 bits without bitsandbytes."""

    def __init__(self, parameters: Iterable[torch.Tensor], states: OptimizerStates, **defaults: float) -> None:
        super().__init__(parameters, defaults)
        self._states = states
        if states == "8bit":
            require("quantized", 'optimizer_states = "8bit"')

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # Without closure
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                state = self.state[parameter] = self.state[parameter] or self.begin(parameter)
                state["step"] += 1
                by = _in_8_bits if SCALES[0] in state else _by_pieces if self._states == "host" else _whole
                tensors = (parameter, parameter.grad, *(state[kind] for kind in (*MOMENTS, *SCALES) if kind in state))
                by([local(tensor) for tensor in tensors], int(state["step"]), group["lr"], group["weight_decay"])

    def begin(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of a parameter that was never stepped, cut as it is where ranks share it."""
        state = {"step": torch.tensor(0.0)}
        in_8_bits = self._states == "8bit" and has_blocks(parameter)
        dtype, device = torch.uint8 if in_8_bits else torch.float32, "cpu" if self._states == "host" else None
        for kind in MOMENTS:
            state[kind] = torch.zeros_like(parameter, dtype=dtype, device=device, requires_grad=False)
            if self._states == "host":
                pin(local(state[kind]), parameter.device)
        for kind in SCALES if in_8_bits else ():
            state[kind] = state[MOMENTS[0]][..., ::BLOCK].float().contiguous()
        return state


def adamw(model: Any, learning_rate: float, weight_decay: float = 0.0, states: OptimizerStates = "float32") -> AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return AdamW(trained, states, lr=learning_rate, weight_decay=weight_decay)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The rows that this rank holds."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def has_blocks(parameter: torch.Tensor) -> bool:
    """Whether a parameter is large, and no block crosses from one row to the next, which another rank may hold."""
    return parameter.numel() >= MIN_QUANTIZED and parameter.dim() > 1 and parameter.shape[-1] % BLOCK == 0


def converted(held: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The whole state of a parameter, on the CPU: as it is if it has the kinds of `wanted`, else with its moments as
    float32, or rounded to 8 bits. UserError without bitsandbytes."""
    found = dict(held)
    for kind, scale in zip(MOMENTS, SCALES, strict=True) if held.keys() != wanted.keys() else ():
        require("quantized", "a checkpoint of moments in 8 bits")
        codes = _codes(kind, torch.device("cpu"))
        if scale in held:
            found[kind] = (codes[held[kind].int()].view(-1, BLOCK) * held[scale].view(-1, 1)).view(held[kind].shape)
        else:
            found[kind], rest = _bitsandbytes().quantize_blockwise(held[kind], code=codes, blocksize=BLOCK)
            found[scale] = rest.absmax.view(*held[kind].shape[:-1], -1)
    return found


# -- the rows of one parameter: [weight, gradient, moments, scales], which step, learning rate, weight decay -----------


def _whole(tensors: list[torch.Tensor], step: int, rate: float, decay: float) -> None:
    before = torch.full((), step - 1.0, device=tensors[0].device)  # The kernel counts up what it is given
    weight, gradient, first, second = ([tensor] for tensor in tensors)
    torch_adamw(weight, gradient, first, second, [], [before], fused=True, lr=rate, weight_decay=decay, **RULES)


@cache
def _streams(device: torch.device) -> list[Any]:
    """The same for all parameters: what is freed on one stream is used again on that one alone."""
    return [stream_of(device) for _ in range(2)]


def _by_pieces(tensors: list[torch.Tensor], step: int, rate: float, decay: float) -> None:
    """By two streams, so that one piece comes while the other goes. On return the host has all."""
    device, is_cuda = tensors[0].device, tensors[0].is_cuda
    streams = _streams(device)
    for stream in streams if is_cuda else ():
        stream.wait_stream(torch.cuda.current_stream(device))
    pieces = zip(*(tensor.view(-1).split(PIECE) for tensor in tensors), strict=True)
    for number, (weight, gradient, *kept) in enumerate(pieces):
        with on(device, streams[number % 2]):
            moments = [piece.to(device, non_blocking=is_cuda, copy=True) for piece in kept]
            _whole([weight, gradient, *moments], step, rate, decay)
            for piece, moment in zip(kept, moments, strict=True):
                piece.copy_(moment, non_blocking=is_cuda)
    for stream in streams:
        stream.synchronize()


def _in_8_bits(tensors: list[torch.Tensor], step: int, rate: float, decay: float) -> None:
    weight, gradient, *moments, first, second = tensors
    codes = [_codes(kind, weight.device) for kind in MOMENTS]
    rest = (*BETAS, 0.0, 0.0, EPSILON, step, rate, *codes, first.view(-1), second.view(-1), decay)
    if weight.numel():
        _bitsandbytes().optimizer_update_8bit_blockwise("adam", gradient, weight, *moments, *rest)


@cache
def _codes(kind: str, device: torch.device) -> torch.Tensor:
    """What the 256 codes of a moment stand for, as shares of the scale; one is a square, without sign."""
    codes: torch.Tensor = _bitsandbytes().create_dynamic_map(signed=kind == MOMENTS[0])
    return codes.to(device)


def pin(memory: torch.Tensor, device: torch.device) -> None:
    """Let a CUDA `device` copy to and from this contiguous host memory by itself. For good."""
    if device.type == "cuda" and memory.numel():
        # Torch's own pinned memory comes in powers of two. CUDA would tell a fault of some later call.
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


class _Now(torch.cpu.Stream):
    """A CPU's work is over when the call returns."""

    def synchronize(self) -> None:
        pass


def stream_of(device: torch.device) -> Any:
    return torch.cuda.Stream(device) if device.type == "cuda" else _Now()


def on(device: torch.device, stream: Any) -> AbstractContextManager[None]:
    return (torch.cuda if device.type == "cuda" else torch.cpu).stream(stream)  # type: ignore[no-any-return]
