"""A local copy of the model that training began with: its safetensors files, read without any library.

A node takes a version's regions from it instead of from the network where their digests match. Only a file's header is
parsed, with caps. Tensors are plain bytes: the digest of the region that they fill proves them.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from swarm.broadcast.store.store import SignedVersion
from swarm.broadcast.store.weight_map import WeightMap
from swarm.broadcast.version.manifest import ITEM_BYTES, ByteSpan, Layout, TensorSpec, by_expert, tensor_spans
from swarm.errors import ProtocolError, UserError

HEADER_BYTES = 32 * 1024 * 1024
"""Largest header of a safetensors file: a million tensors at 30 bytes. The format's own cap is 100 MB."""

MAX_FILES = 1024  # Files of one model: 4 TiB in the usual 5 GB parts
LENGTH_BYTES = 8  # A file begins with its header's length, little-endian


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in the header of a safetensors file. Offsets count from the header's end."""

    dtype: str
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=2**53)], ...], msgspec.Meta(max_length=16)]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0, le=2**53)], Annotated[int, msgspec.Meta(ge=0, le=2**53)]]


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
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}"
    try:
        revision = (cache / "refs" / "main").read_text().strip()
    except OSError:
        revision = ""
    snapshot = cache / "snapshots" / revision
    if not revision or not snapshot.is_dir():
        raise UserError(f"{name!r} is neither a directory nor a model in the Hugging Face cache ({cache.parent})")
    return snapshot


def _read_header(path: Path) -> dict[str, _Place]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if length > min(HEADER_BYTES, size - LENGTH_BYTES):
                raise ProtocolError(f"its header claims {length} bytes")
            header = file.read(length)
        return _places(path, header, LENGTH_BYTES + length, size)
    except (OSError, ProtocolError, msgspec.DecodeError) as error:
        raise UserError(
            f"{path} is no whole safetensors file ({error}): download it again or leave --base out"
        ) from error


def _places(path: Path, header: bytes, data_start: int, size: int) -> dict[str, _Place]:
    entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    places: dict[str, _Place] = {}
    for name, raw in entries.items():
        if name == "__metadata__":
            continue
        entry = msgspec.json.decode(raw, type=_Entry)
        begin, end = entry.data_offsets
        if not begin <= end <= size - data_start:
            raise ProtocolError(f"tensor {name[:100]!r} lies outside of the file")
        place = _Place(path=path, start=data_start + begin, dtype=entry.dtype, shape=entry.shape)
        if _nbytes(entry) == end - begin:
            places[name] = place
    return places


def _nbytes(entry: _Entry) -> int | None:
    """Return a tensor's bytes by dtype and shape, or None for a dtype that no layout has."""
    item_bytes = next((nbytes for dtype, nbytes in ITEM_BYTES.items() if dtype == entry.dtype), None)
    if item_bytes is None:
        return None
    items = 1
    for extent in entry.shape:
        items *= extent
    return items * item_bytes


def _read(place: _Place, offset: int, nbytes: int) -> bytes | None:
    """Return part of a tensor, or None if the file has changed since its header was read."""
    with place.path.open("rb") as file:
        part = os.pread(file.fileno(), nbytes, place.start + offset)
    return part if len(part) == nbytes else None
