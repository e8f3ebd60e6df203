"""Several ranks under torchrun, each of which holds some rows of every parameter (FSDP2).

Rank 0 receives commands from the node and passes them to the others. A tensor is sharded along its first dimension, as
by torch.chunk, so a rank's part is contiguous in the tensor and in the stream of published weights: publishing needs no
gather. Weights move one tensor at a time, so no rank holds a second copy of the model.

A fault in `together` is raised on all ranks; rank 0 reports it, and all go on. Any other fault ends its rank, since the
others may wait for it; torchrun then ends all of them.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from swarm.broadcast.version.manifest import ITEM_BYTES, TensorSpec
from swarm.errors import EchoError, UserError
from swarm.learner.checkpoint.model_files import load_model, read_stored, streamed_bytes
from swarm.learner.memory import whole_gradient_bytes
from swarm.learner.optimizer import local as _local
from swarm.learner.policy import PolicyModel, layers_of
from swarm.learner.ranks import TORCHRUN_VARIABLE, Ranks
from swarm.models.device import TORCH_DTYPES, as_streamed, pick_device

PATIENCE = timedelta(days=365)  # Timeout of a collective: commands may be hours apart, and the node notices hangs

PR_SET_PDEATHSIG = 1  # Option of Linux's prctl: which signal a process gets when its parent dies
R = TypeVar("R")


class SharedFault(UserError):
    """Something that the user has to change, raised on every rank."""


class SharedFailure(EchoError):
    """A fault of the program on some rank, raised on every rank."""


class Sharded(Ranks):
    def __init__(self) -> None:
        _end_with_parent()
        dist.init_process_group("gloo", timeout=PATIENCE)
        self.rank = dist.get_rank()
        self.count = dist.get_world_size()
        self._mesh: DeviceMesh | None = None
        self._machines: list[int] = self._from_all(int(os.environ["GROUP_RANK"]))

    # -- commands --------------------------------------------------------------------------------------------

    def send_command(self, command: bytes) -> None:
        dist.broadcast(torch.tensor([len(command)]), 0)
        dist.broadcast(torch.frombuffer(bytearray(command), dtype=torch.uint8), 0)

    def receive_command(self) -> bytes | None:
        """The next command from rank 0; None when rank 0 is gone."""
        size = torch.zeros(1, dtype=torch.long)
        try:
            dist.broadcast(size, 0)
            body = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(body, 0)
        except RuntimeError:
            return None
        return body.numpy().tobytes()

    # -- decisions of all ranks -----------------------------------------------------------------------------

    def together(self, work: Callable[[], R]) -> R:
        fault, is_user_error = "", False
        try:
            done = work()
        except Exception as error:  # noqa: BLE001 - every fault has to be raised on all ranks
            is_user_error = isinstance(error, UserError)
            if not is_user_error:
                traceback.print_exc()
            fault = str(error) if is_user_error else f"{type(error).__name__}: {error}"
        faults = self._from_all((fault, is_user_error))
        for rank, (line, is_from_user) in enumerate(faults):
            if is_from_user:
                raise SharedFault(line)
            if line:
                raise SharedFailure(f"rank {rank}: {line}")
        return done

    def from_first(self, value: R) -> R:
        values: list[Any] = [value]
        dist.broadcast_object_list(values, 0)
        first: R = values[0]
        return first

    def most(self, count: int) -> int:
        return max(self._from_all(count))

    def add_up(self, sums: dict[str, float]) -> dict[str, float]:
        found = self._from_all(sums)
        return {name: sum(each[name] for each in found) for name in sums}

    def merge(self, found: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        merged: dict[int, torch.Tensor] = {}
        for each in self._from_all(found):
            merged |= each
        return merged

    def _from_all(self, value: R) -> list[R]:
        held: list[Any] = [None] * self.count
        dist.all_gather_object(held, value)
        return held

    # -- a learner step --------------------------------------------------------------------------------------

    def share(self, tokens: Sequence[int]) -> list[int]:
        """Assign rows, the longest first, each to the rank with the fewest tokens so far."""
        load = [0] * self.count
        own: list[int] = []
        for place in sorted(range(len(tokens)), key=lambda place: -tokens[place]):
            rank = load.index(min(load))
            load[rank] += tokens[place]
            if rank == self.rank:
                own.append(place)
        return sorted(own)

    def backward(self, loss: torch.Tensor, module: PolicyModel, *, is_last: bool) -> None:
        assert isinstance(module, FSDPModule)
        # Then ranks add up once, at the last pass.
        keeps_whole_gradient = whole_gradient_bytes(sum(p.numel() for p in module.parameters())) > 0
        module.set_requires_gradient_sync(is_last or not keeps_whole_gradient)
        loss.backward()

    def clip_gradient(self, model: Any, limit: float) -> float:
        """The same as torch.nn.utils.clip_grad_norm_, over the rows of all ranks."""
        gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
        held = [gradient for gradient in gradients if gradient is not None]
        norm = math.sqrt(sum(self._from_all(float(torch.nn.utils.get_total_norm(held)) ** 2)))
        if not math.isfinite(norm):
            return math.nan
        if norm > limit:
            torch._foreach_mul_(held, limit / (norm + 1e-6))
        return norm

    # -- the model -------------------------------------------------------------------------------------------

    def device(self, wanted: str) -> torch.device:
        device = self.together(lambda: _own_device(wanted))
        if self._mesh is None:
            group = dist.new_group(backend="nccl", timeout=PATIENCE) if device.type == "cuda" else dist.group.WORLD
            assert group is not None
            self._mesh = DeviceMesh.from_group(group, device.type)
        return device

    def read(self, name: str, seed: int, made_in: Path, tell: Callable[[str], None]) -> tuple[Any, Any, Any]:
        """Rank 0 reads the model into its CPU memory. The other ranks get one without weights, and need no files."""
        source, tokenizer = self.together(
            lambda: load_model(name, seed, made_in, tell) if self.rank == 0 else (None, None)
        )
        kind, config, generation = self.from_first(
            (type(source), source.config, source.generation_config) if source is not None else (None, None, None)
        )
        assert kind is not None
        with torch.device("meta"):
            model = kind(config)
        model.generation_config = generation
        return model, tokenizer, source

    def place(self, module: PolicyModel, source: Any, device: torch.device, *, half: bool) -> None:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32)
        for part in (*layers_of(module), module):
            cut = fully_shard(part, mesh=self._mesh, reshard_after_forward=True, mp_policy=precision)
            # FSDP would average the ranks' gradients; here they are parts of one sum.
            cut.set_gradient_divide_factor(1.0)
            # Gloo cannot scale while it adds up.
            cut.set_force_sum_reduction_for_comms(True)
        module.weights_in_half = half
        module.to_empty(device=device)
        held = _named_tensors(source) if source is not None else {}
        for name, tensor in _named_tensors(module.model).items():
            self.fill(tensor, held.get(name))

    def copy_whole(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(tensor, DTensor):
            return super().copy_whole(tensor) if self.rank == 0 else None
        local = _local(tensor)
        if self.rank != 0:
            self._send(local)
            return None
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        whole[self._rows(tensor, 0)].copy_(local)
        for rank in range(1, self.count):
            self._receive(whole[self._rows(tensor, rank)], rank)
        return whole

    @torch.no_grad()
    def fill(self, tensor: torch.Tensor, whole: torch.Tensor | None) -> None:
        assert self._mesh is not None
        if not isinstance(tensor, DTensor):
            held = tensor.detach() if whole is None else whole.detach().to(tensor.device, tensor.dtype)
            held = held.contiguous()
            dist.broadcast(held, 0, group=self._mesh.get_group())
            tensor.copy_(held)
            return
        local = _local(tensor)
        if whole is None:
            self._receive(local, 0)
            return
        for rank in range(self.count)[::-1]:
            part = whole[self._rows(tensor, rank)].to(local.device, local.dtype)
            if rank == 0:
                local.copy_(part)
            else:
                self._send(part, rank)

    @contextmanager
    def with_weights(self, tensors: dict[TensorSpec, torch.Tensor], path: Path) -> Iterator[None]:
        """Replace each rank's rows with the stored ones, which rank 0 reads one tensor at a time, and restore them from
        host memory at the end."""
        if not self.from_first(path.exists()):
            raise FileNotFoundError(path)
        own = [_local(tensor).detach().to("cpu", copy=True) for tensor in tensors.values()]
        stored = read_stored(tensors, path) if self.rank == 0 else ((spec, None) for spec in tensors)
        try:
            for spec, whole in stored:
                self.fill(tensors[spec], whole)
            yield
        finally:
            with torch.no_grad():
                for tensor, kept in zip(tensors.values(), own, strict=True):
                    _local(tensor).copy_(kept)

    @torch.no_grad()
    def stage(self, tensors: dict[TensorSpec, torch.Tensor], path: Path) -> None:
        """Ranks on rank 0's machine write their rows into the file themselves; other ranks send them to rank 0."""
        far = [rank for rank, machine in enumerate(self._machines) if machine != self._machines[0]]
        if self.rank in far:
            for tensor in tensors.values():
                if isinstance(tensor, DTensor):
                    self._send(as_streamed(_local(tensor), self.first(tensor)))
        else:
            path.touch()
            start = 0
            with path.open("r+b") as file:
                for spec, tensor in tensors.items():
                    for first, rows in self._written_here(spec, tensor, far):
                        file.seek(start + first * ITEM_BYTES[spec.dtype])
                        file.write(streamed_bytes(rows, first))
                    start += spec.nbytes
        # The file is complete only when every rank has written.
        dist.barrier()

    # -- rows -----------------------------------------------------------------------------------------------

    def _written_here(
        self, spec: TensorSpec, tensor: torch.Tensor, far: Sequence[int]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield this rank's rows, and on rank 0 those of the ranks `far`, each with the index of their first item. A
        tensor that is not sharded belongs to rank 0."""
        if not isinstance(tensor, DTensor):
            if self.rank == 0:
                yield 0, tensor
            return
        yield self.first(tensor), _local(tensor)
        for rank in far if self.rank == 0 else ():
            rows = self._rows(tensor, rank)
            part = torch.empty((rows.stop - rows.start, *tensor.shape[1:]), dtype=TORCH_DTYPES[spec.dtype])
            self._receive(part, rank)
            yield rows.start * tensor.shape[1:].numel(), part

    def first(self, tensor: torch.Tensor) -> int:
        return int(self._rows(tensor, self.rank).start) * tensor.shape[1:].numel() if isinstance(tensor, DTensor) else 0

    def _rows(self, tensor: torch.Tensor, rank: int) -> slice:
        """The rows of a sharded tensor that a rank holds; the last ranks may hold fewer, or none."""
        rows = -(-tensor.shape[0] // self.count)
        return slice(min(rank * rows, tensor.shape[0]), min((rank + 1) * rows, tensor.shape[0]))

    def _send(self, part: torch.Tensor, rank: int = 0) -> None:
        assert self._mesh is not None
        if part.numel():
            dist.send(part.contiguous().to(self._mesh.device_type), rank, group=self._mesh.get_group())

    def _receive(self, place: torch.Tensor, rank: int) -> None:
        """Receive into `place`, through a buffer on the device that ranks send from."""
        assert self._mesh is not None
        if place.numel():
            part = torch.empty(place.shape, dtype=place.dtype, device=self._mesh.device_type)
            dist.recv(part, rank, group=self._mesh.get_group())
            place.copy_(part)


def _named_tensors(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _own_device(wanted: str) -> torch.device:
    """This rank's own device on its machine. UserError if the machine has too few."""
    own, count = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = pick_device(wanted)
    if device.type != "cuda":
        return device
    if wanted not in ("auto", "cuda"):
        raise UserError(
            f'device = "{wanted}" is one device, and each of {count} trainer ranks takes its own: leave it out'
        )
    there = torch.cuda.device_count()
    if count > there:
        raise UserError(
            f"--trainer-ranks {count}: this machine has {there} CUDA device{'s' if there != 1 else ''}, and each rank "
            f"takes one; --trainer-ranks {there} uses them all"
        )
    device = torch.device("cuda", own)
    torch.cuda.set_device(device)
    return device


def _end_with_parent() -> None:
    """Have this rank end with torchrun: a signal to torchrun's process group does not reach its ranks, which have
    sessions of their own. On systems other than Linux a rank ends at its next exchange with the others."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    check_parent()


def check_parent() -> None:
    """End if torchrun ended while this rank was still starting: then neither a signal nor another rank will come."""
    if os.environ.get(TORCHRUN_VARIABLE, str(os.getppid())) != str(os.getppid()):
        sys.exit("the torchrun that started this rank is gone")
