"""Copies from a device to the host, beside what the device computes.

CUDA copies to ordinary memory at a fraction of the bus, and holds up whoever asks. So a checkpoint is copied to pinned
memory, which is kept for the next one, and only the next optimiser step waits for that (`wait`). Staged weights go to a
mapped file, which cannot be pinned, by way of two pinned buffers: while a piece crosses the bus, the one before it is
moved to its place. On a CPU both are ordinary copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager
from itertools import cycle
from typing import Any

import torch

PIECE_BYTES = 64 << 20  # Of a pinned buffer; a piece takes 2.5 ms of a bus of 25 GB/s, and starting one 0.02


class Copies:
    """The copies of one rank, on `device`. `by_pieces` is there for tests, which have no bus."""

    def __init__(self, device: torch.device, *, by_pieces: bool | None = None, piece_bytes: int = PIECE_BYTES) -> None:
        self._is_cuda = device.type == "cuda"
        self._device = device
        self._lanes: list[_Lane] = []
        if self._is_cuda if by_pieces is None else by_pieces:
            self._lanes = [_Lane(device, piece_bytes) for _ in range(2)]
        self._beside = stream_of(device)
        self._rooms: list[torch.Tensor] = []
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)

    def begin(self) -> None:
        """Begin a checkpoint: nobody needs the copies of the one before any more. It is of this moment of the device's
        own order of work."""
        self._free.clear()
        for room in self._rooms:
            self._free[room.nbytes].append(room)
        self._follow(self._beside)

    def room(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Host memory for a tensor of the checkpoint that has begun; its content is whatever was there."""
        nbytes = shape.numel() * dtype.itemsize
        free = self._free[nbytes]
        if free:
            room = free.pop()
        else:
            room = torch.empty(nbytes, dtype=torch.uint8)
            self._rooms.append(room)
            pin(room, self._device)
        return room.view(dtype).view(shape)

    def start(self, room: torch.Tensor, tensor: torch.Tensor) -> None:
        """Begin to copy `tensor` into `room`; it must not change before `wait`, nor `room` be read before `finish`."""
        with on(self._device, self._beside):
            room.copy_(tensor.detach(), non_blocking=self._is_cuda)

    def wait(self) -> None:
        """Have the device, and not the host, wait for what was started before it computes anything further."""
        if self._is_cuda:
            torch.cuda.current_stream(self._device).wait_stream(self._beside)

    def finish(self) -> None:
        """Wait for what was started. From any thread."""
        self._beside.synchronize()

    @torch.no_grad()
    def write(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Write each tensor to its place in host memory, in the dtype of the place. On return all is there."""
        if not self._lanes:
            for place, tensor in pairs:
                place.copy_(tensor.detach())
            return
        turns = cycle(self._lanes)
        for place, tensor in pairs:
            count = self._lanes[0].nbytes // place.dtype.itemsize
            pieces = zip(place.view(-1).split(count), tensor.detach().reshape(-1).split(count), strict=True)
            for to, piece in pieces:
                lane = next(turns)
                lane.land()
                self._follow(lane.stream)  # Pieces of packed weights are computed as their turn comes
                lane.send(to, piece)
        for lane in self._lanes:
            lane.land()

    def _follow(self, stream: Any) -> None:
        """Let nothing that `stream` is given now come before what the device was given so far."""
        if self._is_cuda:
            stream.wait_stream(torch.cuda.current_stream(self._device))


class _Lane:
    """A pinned buffer, with the stream that fills it and the place that its content goes to."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.nbytes = nbytes
        self.stream = stream_of(device)
        self._device = device
        self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._to: torch.Tensor | None = None
        self._piece: torch.Tensor | None = None

    def send(self, to: torch.Tensor, piece: torch.Tensor) -> None:
        part = self._buffer[: to.nbytes].view(to.dtype)
        with on(self._device, self.stream):
            # Cast on the device: half as many bytes cross the bus. The cast piece is its stream's own memory, which no
            # other stream gets before the copy is over.
            part.copy_(piece.to(to.dtype), non_blocking=True)
        self._to, self._piece = to, piece

    def land(self) -> None:
        self.stream.synchronize()
        if self._to is not None:
            self._to.copy_(self._buffer[: self._to.nbytes].view(self._to.dtype))
            self._to = self._piece = None


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
