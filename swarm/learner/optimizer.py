"""AdamW with a choice of where it keeps its two moments: in float32 or in 8 bits on the device, or in the host's
memory.

Parameters are stepped one by one, each on the rows that this rank holds: stepping all at once would add 4 bytes a
parameter to the peak of memory. Moments on the host are copied to the device and back a piece at a time; "host" gives
the same numbers as "float32", bit for bit. In 8 bits (arXiv 2110.02861, by bitsandbytes) every 256 elements share a
scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
BLOCK = 256  # Elements that share a scale: the kernels of bitsandbytes are built for it
MIN_QUANTIZED = 4096  # Elements; bitsandbytes keeps smaller tensors in float32 too: norms and biases
_bitsandbytes = partial(import_module, "bitsandbytes.functional")  # Imported when used: it is large, and an extra
PIECE_BYTES = 64 << 20  # Of a moment on the host. Copying a piece takes 2.5 ms at 25 GB/s, starting the copy 0.02 ms.
PIECE = PIECE_BYTES // 4  # Elements of a moment in a piece; two pieces are on the device at a time


class AdamW(torch.optim.Optimizer):
    """Decoupled weight decay, arXiv 1711.05101. `Trainer` has made sure that bitsandbytes is there for 8 bits."""

    def __init__(self, parameters: Iterable[torch.Tensor], states: OptimizerStates, **defaults: float) -> None:
        super().__init__(parameters, defaults)
        self._states = states

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
        """The state of a parameter that was never stepped; sharded as the parameter is."""
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
    """Whether a parameter is large enough for 8 bits, and no block spans two rows, which two ranks may hold."""
    return parameter.numel() >= MIN_QUANTIZED and parameter.dim() > 1 and parameter.shape[-1] % BLOCK == 0


def converted(state: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Convert the whole state of a parameter, on the CPU, to the kinds of `target`: moments as float32, or rounded to 8
    bits. UserError if that needs bitsandbytes and it is missing."""
    found = dict(state)
    for kind, scale in zip(MOMENTS, SCALES, strict=True) if state.keys() != target.keys() else ():
        require("quantized", "a checkpoint of moments in 8 bits")
        codes = _codes(kind, torch.device("cpu"))
        if scale in state:
            found[kind] = (codes[state[kind].int()].view(-1, BLOCK) * state[scale].view(-1, 1)).view(state[kind].shape)
        else:
            found[kind], rest = _bitsandbytes().quantize_blockwise(state[kind], code=codes, blocksize=BLOCK)
            found[scale] = rest.absmax.view(*state[kind].shape[:-1], -1)
    return found


# -- the rows of one parameter: [weight, gradient, moments, scales], which step, learning rate, weight decay -----------


def _whole(tensors: list[torch.Tensor], step: int, rate: float, decay: float) -> None:
    before = torch.full((), step - 1.0, device=tensors[0].device)  # The kernel counts up what it is given
    weight, gradient, first, second = ([tensor] for tensor in tensors)
    torch_adamw(weight, gradient, first, second, [], [before], fused=True, lr=rate, weight_decay=decay, **RULES)


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Two streams, the same for all parameters, since torch reuses freed memory only on the stream that it was freed
    on; none on a CPU."""
    return [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []


def _by_pieces(tensors: list[torch.Tensor], step: int, rate: float, decay: float) -> None:
    """On two streams, so that one piece is copied in while another is copied back. On return the host has all
    pieces."""
    device = tensors[0].device
    streams = _streams(device)
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(device))
    pieces = zip(*(tensor.view(-1).split(PIECE) for tensor in tensors), strict=True)
    for number, (weight, gradient, *kept) in enumerate(pieces):
        with torch.cuda.stream(streams[number % 2] if streams else None):
            moments = [piece.to(device, non_blocking=True, copy=True) for piece in kept]
            _whole([weight, gradient, *moments], step, rate, decay)
            for piece, moment in zip(kept, moments, strict=True):
                piece.copy_(moment, non_blocking=True)
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
    """The values of the 256 codes of a moment, as shares of the scale; the second moment is never negative."""
    codes: torch.Tensor = _bitsandbytes().create_dynamic_map(signed=kind == MOMENTS[0])
    return codes.to(device)


def pin(memory: torch.Tensor, device: torch.device) -> None:
    """Page-lock this contiguous host memory for good, so that a CUDA `device` can copy it asynchronously."""
    if device.type == "cuda" and memory.numel():
        # Torch rounds its own pinned memory up to powers of two. Unchecked, CUDA would report an error in a later call.
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
