"""The versions of an adapter that vLLM holds next to a frozen model.

Each version has a name, an id and a directory that no other had: vLLM keeps what it has under an id whatever is loaded
there later, and caches prompts by name. It is loaded before an older one goes. A sample is drawn with the version with
which it begins, to its end, so no version mixes and no cache is dropped; samples wait while a version is read and
compared. Versions without samples are unloaded before the
next one is loaded. If all slots are taken then, the samples of the oldest are given up: with as many slots as the bound
of staleness and two more, the learner would not accept them.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from swarm.broadcast.version.manifest import Layout
from swarm.errors import UserError
from swarm.learner.checkpoint.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, name_in_adapter
from swarm.sampler.vllm import versions as vllm_versions
from swarm.sampler.weights import mapped_tensors
from swarm.types import Rounding, VersionId

DIRECTORY = ".adapter"  # Ends the name of the directory from which a version is loaded
OUTLIVED = "too many newer versions came while it was drawn"
Call = Callable[[Awaitable[Any], str], Awaitable[Any]]  # Waits within a limit for what vLLM was told to do, in words


@dataclass(eq=False, slots=True)
class Adapter:
    """One loaded version; without `request` it is the model alone. `samples` are being drawn, or it is `idle`."""

    version: VersionId | None
    request: Any
    samples: set[str] = field(default_factory=set)
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class Adapters:
    """At most `slots` versions in `engine`, an AsyncLLM, which are `held`, oldest first; new samples are drawn with the
    last one. `give_up` ends samples with a fault."""

    def __init__(self, engine: Any, layout: Layout, slots: int, give_up: Callable[..., None]) -> None:
        self._engine = engine
        self._layout = layout
        self._slots = slots
        self._give_up = give_up
        self.held: list[Adapter] = []
        self._loaded = 0

    @contextmanager
    def drawing(self, sample: str) -> Iterator[Adapter]:
        """Draw a sample with the newest version; with the model alone in a run without adapters."""
        adapter = self.held[-1] if self.held else Adapter(None, None)
        adapter.samples.add(sample)
        adapter.idle.clear()
        try:
            yield adapter
        finally:
            adapter.samples.remove(sample)
            if not adapter.samples:
                adapter.idle.set()

    async def load(self, version: VersionId, path: Path, call: Call) -> Adapter:
        """Have all workers load the adapter of the weights at `path`. It is not `held` yet."""
        await self._make_room(call)
        self._loaded += 1
        directory = path.with_name(path.name + DIRECTORY).absolute()
        request = vllm_versions.adapter_request(f"{version} {self._loaded}", self._loaded, str(directory))
        try:
            await asyncio.to_thread(write_adapter, directory, path, self._layout)
            await call(self._engine.add_lora(request), "load an adapter")
        finally:
            # A worker that wanted to read it again would fail, and not draw with anything else.
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        return Adapter(version, request)

    async def _make_room(self, call: Call) -> None:
        older = self.held[:-1]
        if len(self.held) == self._slots and all(adapter.samples for adapter in older):
            self._give_up(OUTLIVED, older[0].samples)
            # vLLM hears of the end of these samples before it hears that their adapter goes.
            await call(older[0].idle.wait(), "end the samples of an old version")
        for adapter in older:
            if not adapter.samples:
                await call(self._engine.remove_lora(adapter.request.lora_int_id), "unload an adapter")
                self.held.remove(adapter)


def check(layout: Layout, precision: Rounding, *, is_cuda: bool) -> None:
    """Raise UserError where vLLM cannot draw with the adapter of `layout`. On CPUs its int8 kernel keeps no matrix to
    put an adapter next to, and experts would get a kernel that is for GPUs."""
    if precision != "none":
        raise UserError("--precision cannot round a model beside an adapter in vLLM yet: leave it out")
    if not is_cuda and any(len(tensor.shape) > 2 for tensor in layout.tensors):
        raise UserError("vLLM for CPUs draws with no adapter of a model of experts: join with --engine transformers")


def write_adapter(directory: Path, path: Path, layout: Layout) -> None:
    """Write the adapter of the weights at `path` into a new directory, in peft's form. Blocking."""
    assert layout.adapter is not None
    directory.mkdir()
    trained = ((spec.name, tensor) for spec, tensor in mapped_tensors(str(path), layout) if not spec.frozen)
    matrices = {name_in_adapter(name): tensor.clone() for name, tensor in trained}
    save_file(matrices, directory / ADAPTER_WEIGHTS)
    shape = {"r": layout.adapter.rank, "lora_alpha": layout.adapter.alpha, "target_modules": layout.adapted}
    (directory / ADAPTER_CONFIG).write_text(json.dumps({"peft_type": "LORA", **shape}))
