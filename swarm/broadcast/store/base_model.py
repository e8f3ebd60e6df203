"""A local copy of the model that training began with, as safetensors files.

A node takes a version's regions from it instead of from the network where their digests match. Tensors are plain bytes:
the digest of the region that they fill proves them.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from swarm.broadcast.store.store import SignedVersion
from swarm.broadcast.store.weight_map import WeightMap
from swarm.broadcast.version.manifest import ByteSpan, Layout, TensorSpec, by_expert, tensor_spans
from swarm.errors import UserError

MAX_FILES = 1024  # Files of one model: 4 TiB in the usual 5 GB parts
LENGTH_BYTES = 8  # A file begins with its header's length, little-endian


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a tensor's bytes lie."""

    path: Path
    start: int
    dtype: str
    shape: tuple[int, ...]


class BaseModel:
    """The tensors of a directory of safetensors files, by name."""

    def __init__(self, directory: Path) -> None:
        """Raise UserError if there are no such files, or one of them is damaged."""
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise UserError(f"there is no .safetensors file in {directory}: pass a directory of a Hugging Face model")
        if len(paths) > MAX_FILES:
            raise UserError(f"{directory} has over {MAX_FILES} .safetensors files: pass the model's own directory")
        self.directory = directory
        self._places: dict[str, _Place] = {}
        for path in paths:
            self._places |= _read_header(path)

    def named_as_here(self, layout: Layout) -> Layout:
        """Return the layout of the same stream with experts grouped only where they are in these files."""
        return by_expert(layout, groups=self._places)

    def fill(self, layout: Layout, tensors: Sequence[ByteSpan], span: ByteSpan) -> bytes | None:
        """Return the bytes of a span of the stream, whose tensors lie at `tensors`, or None if one of them is not here
        in the same dtype and shape."""
        content = bytearray(span.nbytes)
        # Empty tensors share their start with the next one.
        index = bisect_right(tensors, span.start, key=lambda tensor: tensor.start) - 1
        while index < len(tensors) and tensors[index].start < span.end:
            whole = tensors[index]
            first, last = max(span.start, whole.start), min(span.end, whole.end)
            if first < last:
                place = self._place(layout.tensors[index])
                part = _read(place, first - whole.start, last - first) if place is not None else None
                if part is None:
                    return None
                content[first - span.start : last - span.start] = part
            index += 1
        return bytes(content)

    def _place(self, tensor: TensorSpec) -> _Place | None:
        for name in (tensor.name, *tensor.aliases):
            place = self._places.get(name)
            if place is not None and place.dtype == tensor.dtype and place.shape == tensor.shape:
                return place
        return None


def begin_from_base(base: BaseModel, weights: WeightMap, version: SignedVersion) -> int:
    """Fill the map with what the base model has of a version. Return the bytes left: at 0 the map holds the version.
    Blocking."""
    weights.begin_fill(version)
    layout = base.named_as_here(weights.layout)
    tensors = tensor_spans(layout)
    left = 0
    for index in weights.lacking(version.table):
        content = base.fill(layout, tensors, weights.regions[index])
        if content is None or not weights.put_region(index, "raw", content):
            left += weights.regions[index].nbytes
    if not left:
        weights.finish()
    return left


def find_base(name: str) -> Path:
    """Return the directory that `--base` names: a path, or a model in the Hugging Face cache. UserError if none."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    # With the extra `sampler`, as safetensors below: only samplers have a base model
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        config = None
    if not isinstance(config, str):
        cache = constants.HF_HUB_CACHE
        raise UserError(f"{name!r} is neither a directory nor a model in the Hugging Face cache ({cache})")
    return Path(config).parent


def _read_header(path: Path) -> dict[str, _Place]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass  # Checks the header, which has at most 100 MB, and that the file is as long as it says
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            entries = msgspec.json.decode(file.read(length))
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} is no whole safetensors file ({error}): download it again or leave --base out"
        ) from error
    entries.pop("__metadata__", None)
    return {
        name: _Place(
            path=path,
            start=LENGTH_BYTES + length + entry["data_offsets"][0],
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
        )
        for name, entry in entries.items()
    }


def _read(place: _Place, offset: int, nbytes: int) -> bytes | None:
    """Return part of a tensor, or None if the file has changed since its header was read."""
    with place.path.open("rb") as file:
        part = os.pread(file.fileno(), nbytes, place.start + offset)
    return part if len(part) == nbytes else None
