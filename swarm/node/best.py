"""The version with the best held-out result, kept on disk as a Hugging Face model: RUN_DIR/best.

Its weights are the published ones, so they cost the trainer nothing. Before a version is measured, the file with its
weights gets a second name (`hold_weights`). That copies no bytes, and the link count tells Training not to overwrite
the file. Once the result is known, the bytes are copied as the tensors of a safetensors file, which has the same
layout, if the version is the best; then the second name is removed. Of an adapter run the adapter alone is held, as a
copy with a hole in place of the base, and kept as peft has it.

`best.json` in the directory says which version it is; a resumed run reads it. Blocking parts run in threads.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from swarm.broadcast.store.disk import COPY_BYTES, DiskFull, copy_parts, disk_error, require_room
from swarm.broadcast.version.manifest import Layout, ModelFile, trained_spans
from swarm.learner.checkpoint.files import (
    ADAPTER_WEIGHTS,
    DIGESTS,
    OF_A_WHOLE_MODEL,
    PARTIAL,
    adapter_metadata,
    commit,
    in_stream_dtype,
    name_in_adapter,
)
from swarm.types import VersionId

NAME = "best"
ABOUT = "best.json"
WEIGHTS = "model.safetensors"


class BestModel:
    """Keeps the best version. `held` is the second name of a weights file; Training removes it if the disk has no room
    for both files."""

    def __init__(self, run_dir: Path, held: Path, *, emit: Callable[..., None], say: Callable[[str], None]) -> None:
        self.directory = run_dir / NAME
        self._held = held
        self._emit = emit
        self._say = say
        self._clear_up()
        self.known: dict[str, Any] | None = _read(self.directory / ABOUT)
        """Version and figures of the kept version; None while there is none."""

    def is_better(self, figures: Mapping[str, float]) -> bool:
        """Return whether this result beats the kept version's: more right answers, or as many and a higher mean reward.
        Of equals the first stays."""
        return self.known is None or _rank(figures) > _rank(self.known)

    async def keep(self, version: VersionId, figures: Mapping[str, float], layout: Layout) -> None:
        """Replace the kept version by `version`, whose weights are in `held`, or report why that failed."""
        if not self._held.exists():
            self._give_up(version, "the disk had no room for its weights beside the next ones")
            return
        about = {"version": version.version, "incarnation": version.incarnation, **figures}
        try:
            await asyncio.to_thread(self._write, layout, about)
        except (OSError, DiskFull) as error:
            self._give_up(version, str(error))
            return
        self.known = about
        self._emit("best", **about)

    def _give_up(self, version: VersionId, why: str) -> None:
        self._say(f"version {version} is the best so far and could not be kept: {why}")
        self._emit("best_failed", version=version.version, reason=why)

    def forget(self) -> None:
        """Remove the second name, once the version is kept or rejected."""
        self._held.unlink(missing_ok=True)

    # -- files -----------------------------------------------------------------------------------------------

    def _write(self, layout: Layout, about: Mapping[str, Any]) -> None:
        partial = self._partial
        shutil.rmtree(partial, ignore_errors=True)
        nbytes = sum(span.nbytes for span in trained_spans(layout.tensors))
        require_room(self.directory.parent, nbytes, NAME)
        try:
            partial.mkdir()
            for file in layout.files if layout.adapter is None else _beside_adapter(layout):
                (partial / file.name).write_bytes(in_stream_dtype(file.name, file.content))
            (partial / ABOUT).write_text(json.dumps(about) + "\n")
            _write_tensors(partial / (WEIGHTS if layout.adapter is None else ADAPTER_WEIGHTS), self._held, layout)
            commit(partial, self.directory)
        except OSError as error:
            raise disk_error(error, partial, nbytes) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    @property
    def _partial(self) -> Path:
        return self.directory.with_name(NAME + PARTIAL)

    def _clear_up(self) -> None:
        """Clean up after a crash: move a whole directory into place, and remove everything else."""
        self._held.unlink(missing_ok=True)
        before = self.directory.with_name(f"{NAME}.removed{PARTIAL}")
        for left in (self._partial, before):
            if not self.directory.exists() and (left / DIGESTS).exists():
                os.rename(left, self.directory)
            shutil.rmtree(left, ignore_errors=True)


def hold_weights(weights: Path, held: Path, layout: Layout) -> None:
    """Give the weights file the second name `held`. Copy it if the file system has no hard links; of an adapter run
    copy what is not frozen, so that the file can be staged over without its base being written again."""
    held.unlink(missing_ok=True)
    if layout.adapter is not None:
        copy_parts(weights, held, trained_spans(layout.tensors))
        return
    try:
        os.link(weights, held)
    except OSError:
        require_room(held.parent, weights.stat().st_size, held.name)
        shutil.copyfile(weights, held)


def _write_tensors(path: Path, weights: Path, layout: Layout) -> None:
    """Write a safetensors file: the length of its header (8 bytes, little-endian), the header, padded to a multiple of
    8, and the tensors end to end, as `weights` holds them. https://github.com/huggingface/safetensors#format"""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    if layout.adapter is not None:
        header["__metadata__"] = adapter_metadata(layout.adapter.base.hex())
    end = 0
    for tensor in layout.tensors:
        if not tensor.frozen:
            name = tensor.name if layout.adapter is None else name_in_adapter(tensor.name)
            offsets = [end, end + tensor.nbytes]
            header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
            end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file, weights.open("rb") as source:
        file.write(len(text).to_bytes(8, "little") + text)
        for span in trained_spans(layout.tensors):
            for at in range(span.start, span.start + span.nbytes, COPY_BYTES):
                file.write(os.pread(source.fileno(), min(COPY_BYTES, span.start + span.nbytes - at), at))


def _beside_adapter(layout: Layout) -> list[ModelFile]:
    return [file for file in layout.files if file.name not in OF_A_WHOLE_MODEL]


def _rank(figures: Mapping[str, Any]) -> tuple[float, float]:
    # Results from an older release have no reward.
    return float(figures["exact_match"]), float(figures.get("reward", 0.0))


def _read(path: Path) -> dict[str, Any] | None:
    """Return the content of best.json, or None if it is missing or damaged, so that the next version replaces it."""
    try:
        found = json.loads(path.read_text())
        _rank(found)
        int(found["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dict(found)
