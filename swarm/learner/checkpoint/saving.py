"""Saves and restores a trainer's state. A thread writes it; an optimiser step that would change the tensors waits.

trainer.safetensors has the state bit for bit: `weight/NAME` (fp32 masters and buffers, or only the adapter if other
weights are frozen), `adam/KIND/NAME` (the step count and the moments of each parameter that has been stepped, float32,
or uint8 with scales), `rng/KIND` (states of the generators, uint8). Tied tensors are in it once, under their first
name.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from swarm.errors import UserError
from swarm.learner.adapter import is_adapted, parameters_of, save_adapter
from swarm.learner.checkpoint.files import STATE, TENSORS, TrainerState, being_written, read_state
from swarm.learner.checkpoint.model_files import save_model, stream_tensors
from swarm.learner.messages import AlarmState, ClaimState, Saved
from swarm.learner.optimizer import MOMENTS, SCALES, AdamW, converted
from swarm.learner.ranks import Ranks
from swarm.models.device import TORCH_DTYPES, as_streamed


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a trainer that change as it trains."""

    model: Any
    optimizer: AdamW
    shuffle: torch.Generator
    device: torch.device
    ranks: Ranks
    progress: Callable[[], None]
    base: bytes = b""  # Digest of the frozen weights, with an adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state at one moment, in rank 0's CPU memory: at most 12 bytes a parameter, and 2 more while it is written.
    `is_shared`: some of `tensors` are the trainer's own, not copies, and an optimiser step would change them."""

    tensors: dict[str, torch.Tensor]
    state: TrainerState
    is_shared: bool


def take(parts: Parts, *, step: int, lineage: bytes, alarms: AlarmState, claims: ClaimState) -> Snapshot:
    """Take a snapshot of everything that a learner step changes. A single rank on a CPU does not copy tensors that only
    an optimiser step changes: for a small model the copy would take half as much memory as its training."""
    kept: dict[str, torch.Tensor] = {}
    is_shared = False
    own = _weights(parts.model)
    for name, tensor in {**own, **_moments(parts), **_generators(parts)}.items():
        if parts.ranks.count == 1 and tensor.device.type == "cpu" and (name not in own or tensor.requires_grad):
            kept[name] = tensor.detach()
            is_shared = True
        elif (copy := parts.ranks.copy_whole(tensor)) is not None:
            kept[name] = copy
        parts.progress()
    state = TrainerState(
        step=step,
        lineage=lineage.hex(),
        parameters=parameters_of(parts.model),
        alarms=alarms,
        claims=claims,
        base=parts.base.hex(),
    )
    return Snapshot(tensors=kept, state=state, is_shared=is_shared)


def write(snapshot: Snapshot, model: Any, tokenizer: Any, directory: Path) -> None:
    """Write a checkpoint to `directory`: the snapshot, and the model or adapter in bf16 in a format that other programs
    load. DiskFull, or what a failed write raises. Of `model` only names and configuration are read."""
    trained = [spec.name for spec in stream_tensors(model) if not spec.frozen]
    half = {name: as_streamed(snapshot.tensors[f"weight/{name}"]) for name in trained}
    nbytes = sum(tensor.nbytes for tensor in (*snapshot.tensors.values(), *half.values()))
    with being_written(directory, nbytes) as partial:
        save_file({name: tensor.contiguous() for name, tensor in snapshot.tensors.items()}, partial / TENSORS)
        (partial / STATE).write_bytes(msgspec.json.encode(snapshot.state))
        if is_adapted(model):
            save_adapter(model, tokenizer, partial, half, snapshot.state.base)
        else:
            save_model(model, tokenizer, partial, half)


@torch.no_grad()
def restore(parts: Parts, directory: Path) -> TrainerState:
    """Restore the state that was saved to `directory`. UserError if it is damaged or of another model. The state of a
    CUDA generator is restored only on a CUDA device."""
    ranks = parts.ranks
    held = ranks.together(lambda: _Held(parts, directory) if ranks.rank == 0 else None)
    first = ranks.from_first((held.state, held.small()) if held else None)
    assert first is not None
    state, small = first
    for name, tensor in _weights(parts.model).items():
        ranks.fill(tensor, held.tensor(name) if held else None)
        parts.progress()
    for name, parameter in parts.model.named_parameters():
        if parameter.requires_grad and f"adam/step/{name}" in small:
            _restore_state(parts, parameter, name, small[f"adam/step/{name}"], held)
            parts.progress()
    parts.shuffle.set_state(small["rng/shuffle"])
    torch.set_rng_state(small["rng/torch"])
    if parts.device.type == "cuda" and "rng/cuda" in small:
        torch.cuda.set_rng_state(small["rng/cuda"], parts.device)
    return state


def _restore_state(parts: Parts, parameter: torch.Tensor, name: str, steps: torch.Tensor, held: _Held | None) -> None:
    """Restore the optimiser's state of one parameter, converted if it was saved with other kinds of moments."""
    state = parts.optimizer.state[parameter] = parts.optimizer.begin(parameter)
    whole = parts.ranks.together(lambda: converted(held.moments(name), state) if held else {})
    state["step"].copy_(steps)
    for kind in (kind for kind in state if kind != "step"):
        parts.ranks.fill(state[kind], whole.get(kind))


class _Held:
    """The tensors of a checkpoint, read one at a time. UserError if they are of another model, or cannot be read."""

    def __init__(self, parts: Parts, directory: Path) -> None:
        self._path = directory / TENSORS
        self.state = read_state(directory)
        if self.state.parameters != (own := parameters_of(parts.model)):
            raise UserError(
                f"the checkpoint {directory} is of a model of {self.state.parameters:,} parameters, not of one of "
                f"{own:,}: resume with the model that it was trained from"
            )
        if self.state.base != parts.base.hex():
            raise UserError(
                f"the checkpoint {directory} is of {'an adapter' if self.state.base else 'a whole model'} that was "
                "trained with other frozen weights: resume with the model that the run began with, as it was then"
            )
        try:
            self._file = safe_open(self._path, framework="pt")
            self.names = frozenset(self._file.keys())
        except (OSError, SafetensorError) as error:
            raise self._unreadable(error) from error
        self._check_weights(_weights(parts.model), directory)

    def tensor(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise self._unreadable(error) from error
        return tensor

    def moments(self, name: str) -> dict[str, torch.Tensor]:
        keys = {kind: f"adam/{kind}/{name}" for kind in ("step", *MOMENTS, *SCALES)}
        return {kind: self.tensor(key) for kind, key in keys.items() if key in self.names}

    def small(self) -> dict[str, torch.Tensor]:
        # Cloned, since tensors that were read may be mapped from the file.
        return {name: self.tensor(name).clone() for name in self.names if name.startswith(("adam/step/", "rng/"))}

    def _check_weights(self, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
        expected = {name: (list(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
        found = {
            name: (self._file.get_slice(name).get_shape(), TORCH_DTYPES.get(self._file.get_slice(name).get_dtype()))
            for name in sorted(self.names)
            if name.startswith("weight/")
        }
        if found != expected:
            name = next(name for name in (*expected, *found) if found.get(name) != expected.get(name))
            raise UserError(
                f"the checkpoint {directory} is of another model: {name.removeprefix('weight/')} differs; "
                "resume with the model that it was trained from"
            )

    def _unreadable(self, error: Exception) -> UserError:
        return UserError(f"{self._path} cannot be read: {error}")


class Saver:
    """Writes one checkpoint at a time in a thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "saver")
        self._running: tuple[Snapshot, Future[None]] | None = None
        self._saved_step: int | None = None
        self._fault = ""

    def start(self, snapshot: Snapshot, write: Callable[[], None]) -> None:
        """Begin to write a checkpoint. The caller has waited for the one before."""
        assert self._running is None
        self._running = snapshot, self._pool.submit(write)

    def wait(self, *, only_shared: bool = False) -> None:
        """Wait until no checkpoint is being written; with `only_shared`, none that an optimiser step would change."""
        if self._running is not None and (self._running[0].is_shared or not only_shared):
            self._collect(*self._running)

    def report(self) -> Saved:
        """The newest step that is on the disk, and the last fault unless it was reported before."""
        if self._running is not None and self._running[1].done():
            self._collect(*self._running)
        fault, self._fault = self._fault, ""
        return Saved(step=self._saved_step, fault=fault)

    def _collect(self, snapshot: Snapshot, running: Future[None]) -> None:
        """Turn a fault into a line to report: whatever it was, the run goes on without this checkpoint."""
        error, step = running.exception(), snapshot.state.step
        self._running = None
        if error is None:
            self._saved_step = step
        elif isinstance(error, UserError):
            self._fault = str(error)
        else:
            traceback.print_exception(error)
            self._fault = f"the checkpoint of step {step} could not be saved: {error}"


def _weights(model: Any) -> dict[str, torch.Tensor]:
    """All tensors of the model, including buffers that `state_dict` leaves out, or of its adapter; tied tensors
    once."""
    streamed = {spec.name: tensor for spec, tensor in stream_tensors(model).items() if not spec.frozen}
    if is_adapted(model):
        return {f"weight/{name}": tensor for name, tensor in streamed.items()}
    known = set(model.state_dict(keep_vars=True))
    rest = {name: buffer for name, buffer in model.named_buffers() if name not in known}
    return {f"weight/{name}": tensor for name, tensor in {**streamed, **rest}.items()}


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
