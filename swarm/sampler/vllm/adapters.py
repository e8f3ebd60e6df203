"""The versions of an adapter that vLLM holds beside a frozen model.

Each version has a name, an id and a directory that no other had: vLLM keeps what it has under an id whatever is loaded
there later, and caches prompts by name. It is loaded before an older one goes. A sample is drawn with the version with
which it begins, to its end, so nothing pauses and no version mixes. Versions without samples are unloaded before the
next one is loaded. If all slots are taken then, the samples of the oldest are given up: with as many slots as the bound
of staleness and two more, nobody would accept them.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from safetensors.torch import save_file

from swarm.broadcast.version.manifest import Layout
from swarm.learner.checkpoint.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, name_in_adapter
from swarm.sampler.weights import mapped_tensors
from swarm.types import Span, VersionId

DIRECTORY = ".adapter"  # Ends the name of the directory from which a version is loaded
OUTLIVED = "too many newer versions came while it was drawn"
R = TypeVar("R")


class Call(Protocol):
    """Wait for a call of vLLM within its time limit; `what` it is to do."""

    def __call__(self, work: Awaitable[R], what: str) -> Awaitable[R]: ...


class Adapter:
    """One loaded version. `request` has vLLM draw with it."""

    def __init__(self, version: VersionId, request: Any) -> None:
        self.version = version
        self.request = request
        self.samples: set[str] = set()
        self.idle = asyncio.Event()
        self.idle.set()

    def span(self, tokens: int) -> tuple[Span, ...]:
        return (Span(version=self.version, start=0, end=tokens),)


class Adapters:
    """At most `slots` versions in `engine`, an AsyncLLM. `give_up` ends a sample with a fault."""

    def __init__(self, engine: Any, layout: Layout, slots: int, give_up: Callable[[str, str], None]) -> None:
        self._engine = engine
        self._layout = layout
        self._slots = slots
        self._give_up = give_up
        self._held: list[Adapter] = []
        self._loaded = 0

    @contextmanager
    def drawing(self, sample: str) -> Iterator[Adapter | None]:
        """Draw a sample with the newest version; None before the first."""
        adapter = self._held[-1] if self._held else None
        if adapter is not None:
            adapter.samples.add(sample)
            adapter.idle.clear()
        try:
            yield adapter
        finally:
            if adapter is not None:
                adapter.samples.remove(sample)
                if not adapter.samples:
                    adapter.idle.set()

    async def load(self, version: VersionId, path: Path, call: Call) -> Adapter:
        """Have all workers load the adapter of the weights at `path`. No sample is drawn with it before `serve`."""
        from vllm.lora.request import LoRARequest

        await self._make_room(call)
        self._loaded += 1
        directory = path.with_name(path.name + DIRECTORY)
        try:
            await asyncio.to_thread(write_adapter, directory, path, self._layout)
            request = LoRARequest(str(version), self._loaded, str(directory.absolute()))
            await call(self._engine.add_lora(request), "load an adapter")
        finally:
            # A worker that wanted to read it again would fail, and not draw with anything else.
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        return Adapter(version, request)

    def serve(self, adapter: Adapter) -> None:
        """Draw new samples with it."""
        self._held.append(adapter)

    async def _make_room(self, call: Call) -> None:
        older = self._held[:-1]
        if len(self._held) == self._slots and all(adapter.samples for adapter in older):
            for sample in list(older[0].samples):
                self._give_up(sample, OUTLIVED)
            # vLLM hears of the end of these samples before it hears that their adapter goes.
            await call(older[0].idle.wait(), "end the samples of an old version")
        for adapter in older:
            if not adapter.samples:
                await call(self._engine.remove_lora(adapter.request.lora_int_id), "unload an adapter")
                self._held.remove(adapter)


def write_adapter(directory: Path, path: Path, layout: Layout) -> None:
    """Write the adapter of the weights at `path` into a new directory, as peft names it and vLLM reads it. Blocking."""
    assert layout.adapter is not None
    directory.mkdir()
    trained = ((spec.name, tensor) for spec, tensor in mapped_tensors(str(path), layout) if not spec.frozen)
    save_file({name_in_adapter(name): tensor.clone() for name, tensor in trained}, directory / ADAPTER_WEIGHTS)
    shape = {"r": layout.adapter.rank, "lora_alpha": layout.adapter.alpha, "target_modules": layout.adapted}
    (directory / ADAPTER_CONFIG).write_text(json.dumps({"peft_type": "LORA", **shape}))
