"""What a trainer is made of beside its code: copied out of training, written by a thread, and put back.

A snapshot is taken between two learner steps, so it is one moment of the run; from then on training and writing share
nothing. trainer.safetensors holds it bit for bit: `weight/NAME` (fp32 masters and buffers), `adam/KIND/NAME` (the
moments and the step count of each parameter that has been stepped), `rng/KIND` (states of the generators, uint8).
Tied tensors are in it once, under their first name.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from swarm.errors import UserError
from swarm.learner.checkpoint import save_model, stream_tensors, torch_stream_dtype
from swarm.learner.checkpoints import STATE, TENSORS, TrainerState, being_written, read_state
from swarm.learner.messages import AlarmState, Saved

ADAM_KINDS = ("exp_avg", "exp_avg_sq", "step")
"""The state of torch's AdamW, without amsgrad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What of a trainer changes as it trains."""

    model: Any
    optimizer: torch.optim.AdamW
    shuffle: torch.Generator
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One moment of a run, in CPU memory of its own: 12 bytes a parameter, and 2 more while it is written."""

    tensors: dict[str, torch.Tensor]
    state: TrainerState


def take(parts: Parts, *, step: int, lineage: bytes, alarms: AlarmState | None = None) -> Snapshot:
    """A copy of everything, of now."""
    live = {**_weights(parts.model), **_moments(parts), **_generators(parts)}
    copies = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in live.items()
    }
    state = TrainerState(step=step, lineage=lineage.hex(), parameters=_size(parts.model), alarms=alarms or AlarmState())
    return Snapshot(tensors=copies, state=state)


def write(snapshot: Snapshot, model: Any, tokenizer: Any, directory: Path) -> None:
    """A checkpoint at `directory`: the snapshot, and the model in bf16 as anybody loads it. DiskFull or OSError.

    Of `model` only names and configuration are read.
    """
    half = {name: tensor.to(torch_stream_dtype(tensor)) for name, tensor in _published(snapshot, model).items()}
    nbytes = sum(tensor.nbytes for tensor in (*snapshot.tensors.values(), *half.values()))
    with being_written(directory, nbytes) as partial:
        save_file(snapshot.tensors, partial / TENSORS)
        (partial / STATE).write_bytes(msgspec.json.encode(snapshot.state))
        save_model(model, tokenizer, partial, half)


@torch.no_grad()
def restore(parts: Parts, directory: Path) -> TrainerState:
    """Put everything back as it was when `directory` was saved. UserError if that is another model's, or torn.

    The state of a CUDA generator is put back only on a CUDA device.
    """
    state = read_state(directory)
    if state.parameters != (own := _size(parts.model)):
        raise UserError(
            f"the checkpoint {directory} is of a model of {state.parameters:,} parameters, not of one of {own:,}: "
            "resume with the model that it was trained from"
        )
    try:
        with safe_open(directory / TENSORS, framework="pt") as file:
            _put_back(parts, {name: file.get_tensor(name) for name in file.keys()}, directory)  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{directory / TENSORS} cannot be read: {error}") from error
    return state


class Saver:
    """Writes one checkpoint at a time on a thread of its own. `report` says what became of them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "saver")
        self._running: Future[None] | None = None
        self._step = 0
        self._saved_step: int | None = None
        self._fault = ""

    def start(self, step: int, write: Callable[[], None]) -> None:
        """Begin to write the checkpoint of `step`; none is being written."""
        assert self._running is None
        self._step, self._running = step, self._pool.submit(write)

    def wait(self) -> None:
        """Until none is being written."""
        if self._running is not None:
            self._collect(self._running)

    def report(self) -> Saved:
        """The newest step that is on the disk, and the last fault if there is one not yet reported."""
        if self._running is not None and self._running.done():
            self._collect(self._running)
        fault, self._fault = self._fault, ""
        return Saved(step=self._saved_step, fault=fault)

    def _collect(self, running: Future[None]) -> None:
        """Every fault becomes a line: a run goes on without one checkpoint, whatever was wrong with it."""
        error = running.exception()
        self._running = None
        if error is None:
            self._saved_step = self._step
        elif isinstance(error, UserError):
            self._fault = str(error)
        else:
            traceback.print_exception(error)
            self._fault = f"the checkpoint of step {self._step} could not be saved: {error}"


def _put_back(parts: Parts, held: dict[str, torch.Tensor], directory: Path) -> None:
    """`held` may be mapped from the file, so all of it is copied."""
    weights = _weights(parts.model)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}
    found = {name: (tensor.shape, tensor.dtype) for name, tensor in held.items() if name.startswith("weight/")}
    if found != shapes:
        name = next(name for name in (*shapes, *found) if found.get(name) != shapes.get(name))
        raise UserError(
            f"the checkpoint {directory} is of another model: {name.removeprefix('weight/')} differs; "
            "resume with the model that it was trained from"
        )
    for name, tensor in weights.items():
        tensor.copy_(held[name])
    for name, parameter in parts.model.named_parameters():
        moments = {kind: held.get(f"adam/{kind}/{name}") for kind in ADAM_KINDS}
        parts.optimizer.state[parameter] = {
            # The step count stays on the CPU, where AdamW made it.
            kind: tensor.clone() if kind == "step" else torch.zeros_like(parameter).copy_(tensor)
            for kind, tensor in moments.items()
            if tensor is not None
        }
    parts.shuffle.set_state(held["rng/shuffle"].clone())
    torch.set_rng_state(held["rng/torch"].clone())
    if parts.device.type == "cuda" and "rng/cuda" in held:
        torch.cuda.set_rng_state(held["rng/cuda"].clone(), parts.device)


def _weights(model: Any) -> dict[str, torch.Tensor]:
    """Everything of the model, buffers that `state_dict` leaves out too; tied tensors once."""
    streamed = {spec.name: tensor for spec, tensor in stream_tensors(model).items()}
    known = set(model.state_dict(keep_vars=True))
    rest = {name: buffer for name, buffer in model.named_buffers() if name not in known}
    return {f"weight/{name}": tensor for name, tensor in {**streamed, **rest}.items()}


def _published(snapshot: Snapshot, model: Any) -> dict[str, torch.Tensor]:
    """The snapshot's tensors that are in the stream, by name."""
    return {spec.name: snapshot.tensors[f"weight/{spec.name}"] for spec in stream_tensors(model)}


def _moments(parts: Parts) -> dict[str, torch.Tensor]:
    """The optimiser's tensors; none for a parameter that was never stepped."""
    return {
        f"adam/{kind}/{name}": tensor
        for name, parameter in parts.model.named_parameters()
        if parameter in parts.optimizer.state
        for kind, tensor in parts.optimizer.state[parameter].items()
    }


def _generators(parts: Parts) -> dict[str, torch.Tensor]:
    states = {"rng/shuffle": parts.shuffle.get_state(), "rng/torch": torch.get_rng_state()}
    if parts.device.type == "cuda":
        states["rng/cuda"] = torch.cuda.get_rng_state(parts.device)
    return states


def _size(model: Any) -> int:
    return sum(int(p.numel()) for p in model.parameters())
