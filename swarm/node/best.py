"""The version with the best held-out result, kept on disk as a Hugging Face model: RUN_DIR/best.

Its weights are those that were published, so they cost the trainer nothing. When a version is to be measured, the file
with its weights gets a second name (`hold_weights`): no byte is copied, and the trainer sees by the link count that it
must not write over that file (Training). Once the result is known, the bytes become the tensors of one safetensors
file, which has the same layout, or the second name is removed.

`best.json` in the directory says which version it is; a resumed run reads it. Blocking parts run in threads.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from swarm.broadcast.store.disk import DiskFull, disk_error, require_room
from swarm.broadcast.version.manifest import Layout
from swarm.learner.checkpoint.files import DIGESTS, PARTIAL, commit, in_stream_dtype
from swarm.types import VersionId

NAME = "best"
ABOUT = "best.json"
WEIGHTS = "model.safetensors"

COPY_BYTES = 64 * 1024 * 1024  # Copied at once, so that it takes little of the page cache


class BestModel:
    """`held` is the second name that a file of weights gets; Training removes it if the disk has no room for both."""

    def __init__(self, run_dir: Path, held: Path, *, emit: Callable[..., None], say: Callable[[str], None]) -> None:
        self.directory = run_dir / NAME
        self._held = held
        self._emit = emit
        self._say = say
        self._clear_up()
        self.known: dict[str, Any] | None = _read(self.directory / ABOUT)
        """Version and figures of what the directory holds; None while there is none."""

    def is_better(self, figures: Mapping[str, float]) -> bool:
        """Whether this result is better than that of the version kept: more are right, or as many are and the mean
        reward is higher. The first of equals stays."""
        return self.known is None or _rank(figures) > _rank(self.known)

    async def keep(self, version: VersionId, figures: Mapping[str, float], layout: Layout) -> None:
        """Replace what is kept by the weights of `version`, which `held` names; or say why that failed."""
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
        """Remove the second name: the version is kept by now, or is not to be."""
        self._held.unlink(missing_ok=True)

    # -- files -----------------------------------------------------------------------------------------------

    def _write(self, layout: Layout, about: Mapping[str, Any]) -> None:
        partial = self._partial
        shutil.rmtree(partial, ignore_errors=True)
        require_room(self.directory.parent, layout.total_bytes, NAME)
        try:
            partial.mkdir()
            for file in layout.files:
                (partial / file.name).write_bytes(in_stream_dtype(file.name, file.content))
            (partial / ABOUT).write_text(json.dumps(about) + "\n")
            _write_tensors(partial / WEIGHTS, self._held, layout)
            commit(partial, self.directory)
        except OSError as error:
            raise disk_error(error, partial, layout.total_bytes) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    @property
    def _partial(self) -> Path:
        return self.directory.with_name(NAME + PARTIAL)

    def _clear_up(self) -> None:
        """After a crash: a whole directory takes its place, anything else is removed."""
        self._held.unlink(missing_ok=True)
        before = self.directory.with_name(f"{NAME}.removed{PARTIAL}")
        for left in (self._partial, before):
            if not self.directory.exists() and (left / DIGESTS).exists():
                os.rename(left, self.directory)
            shutil.rmtree(left, ignore_errors=True)


def hold_weights(weights: Path, held: Path) -> None:
    """Give the file of weights the name `held` too; a copy where files cannot have two."""
    held.unlink(missing_ok=True)
    try:
        os.link(weights, held)
    except OSError:
        require_room(held.parent, weights.stat().st_size, held.name)
        shutil.copyfile(weights, held)


def _write_tensors(path: Path, weights: Path, layout: Layout) -> None:
    """One safetensors file: the length of its header (8 bytes, little-endian), the header, padded to a multiple of 8,
    and the tensors end to end, which is what `weights` holds. https://github.com/huggingface/safetensors#format"""
    ends = list(accumulate(tensor.nbytes for tensor in layout.tensors))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor, end in zip(layout.tensors, ends, strict=True):
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [end - tensor.nbytes, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file, weights.open("rb") as source:
        file.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(source, file, COPY_BYTES)


def _rank(figures: Mapping[str, Any]) -> tuple[float, float]:
    # What an older release measured has no reward.
    return float(figures["exact_match"]), float(figures.get("reward", 0.0))


def _read(path: Path) -> dict[str, Any] | None:
    """The content of best.json; None if there is none or it is damaged, so that the next version replaces it."""
    try:
        found = json.loads(path.read_text())
        _rank(found)
        int(found["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dict(found)
