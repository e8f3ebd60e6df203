"""What a version is made of: a signed head that names a layout and a chunk table by their digests.

The weights are one flat byte stream, the tensors end to end in layout order. It is cut into *regions* of one dtype
each, at places that follow from the layout alone. Each region has an encoding. The encodings, laid end to end, are cut
into *chunks*, the unit of transfer. For each region the table states the codec, the encoded size and the digest of the
decoded bytes; for each chunk the digest of its encoded bytes; for each tensor a sum that its holder in another form
(fused, transposed, sharded) can recompute.

Regions may be encoded in *segments*, as many as the learner likes. No chunk lies in two of them. A segment's part of
the table is signed as soon as it is encoded, so that its chunks can leave while the next one is encoded. The head comes
last. A version is what its head names, whatever segments were signed before.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Annotated, ClassVar, Literal

import msgspec

from swarm.errors import ProtocolError
from swarm.net.signing import PublicKeyField, SigningKey, swarm_id_of, unseal
from swarm.types import Count, Id, VersionId
from swarm.wire import DigestField, Message, decode, digest, encode

HEAD_BYTES = 1024  # Heads travel in gossip's answers

LAYOUT_BYTES = 32 * 1024 * 1024
"""A tokenizer of 200,000 words is 12 MB; tensor names of a 1,000-layer model are under 2 MB."""

MAX_TENSORS = 128 * 1024
"""A model with 384 experts in each of 60 layers, one by one, has 70,000. A layout of so many tensors takes up to 120 MB
once it is read, whatever these are: less than four times LAYOUT_BYTES."""

TABLE_BYTES = 8 * 1024 * 1024  # 1,024 regions and 65,536 chunks are under 4 MB
MIN_REGION_BYTES = 64 * 1024
MAX_REGION_BYTES = 4 * 1024 * 1024
REGIONS_AIMED_AT = 1024
"""Regions are independent units of coding: enough of them to spread over cores, large enough to compress."""

MODEL_BYTES = 400 * 10**9
"""Largest model: 200 billion parameters in bf16. Its 95,000 regions take most of the objects that a table may have. A
layout that claims more would only cost memory for its regions."""

SEGMENT_BYTES = 128 * 1024 * 1024
"""Weights encoded in about a tenth of a second: while they travel, which takes a home line as long, so do the next."""

MAX_SEGMENTS = 32  # Of a version; each has its own courier
SEGMENT_TABLE_BYTES = 512 * 1024  # A larger one is not signed early: what it describes takes far longer to send

MIN_CHUNK_BYTES = 16 * 1024
MAX_CHUNK_BYTES = 4 * 1024 * 1024

Codec = Literal["raw", "full", "dense", "sparse", "frozen"]
"""How a region is encoded. "dense" and "sparse" are deltas against the same region of the head's base. "frozen" is
nothing: the region is the same in every version after the first."""
Dtype = Literal["BF16", "F16", "F32", "F64", "I64", "I32", "I16", "I8", "U8", "BOOL"]  # Named as in safetensors

ITEM_BYTES: dict[Dtype, int] = {
    "BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip

GROUPED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The matrices of experts as transformers groups them: in a tensor [experts, rows of all its matrices, columns]."""

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
OF_PEFT = re.compile(r"\.base_layer(?=\.\w+$)|(?<=\.lora_[AB])\.default(?=\.weight$)")
"""What peft puts into names: a layer with an adapter wraps the model's own, and adapters have names themselves."""

DELTAS: tuple[Codec, ...] = ("dense", "sparse")
WHOLE: tuple[Codec, ...] = ("raw", "full")
HEAD_CONTEXT = "head"
SEGMENT_CONTEXT = "segment"

TensorName = Annotated[str, msgspec.Meta(max_length=300, pattern=r"^[ -~]+\Z")]  # Others take up to four bytes a letter
FileName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(?!(?i:con|prn|aux|nul|com\d|lpt\d)\.)[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.(?:json|txt|model|jinja)\Z"
    ),
]
"""A plain name of data, with no separator, not hidden and no device, so that it neither leaves its directory nor is
taken for code or for a pickle."""


class TensorSpec(Message, frozen=True):
    """One tensor of the stream. `aliases` are names that share its storage (tied embeddings). A `frozen` one is the
    same in all versions."""

    name: TensorName
    dtype: Dtype
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=6)]
    aliases: Annotated[tuple[TensorName, ...], msgspec.Meta(max_length=4)] = ()
    frozen: bool = False

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class ModelFile(Message, frozen=True):
    """A small file that belongs to the model: config.json, tokenizer.json, ..."""

    name: FileName
    content: bytes


class AdapterShape(Message, frozen=True):
    """Next to NAME.weight, W, the stream of a model with an adapter has NAME.lora_A.weight, A of [rank, columns], and
    NAME.lora_B.weight, B of [rows, rank]; the model computes with W + alpha / rank · B A. All but A and B is frozen,
    and `base` is its digest, in the order of the stream."""

    rank: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    alpha: Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)]
    base: DigestField


class Layout(Message, frozen=True):
    """The tensors of the stream, in order, and the model's small files. All versions of a run share it. Tensors are
    frozen only in a run with an `adapter`."""

    max_objects: ClassVar[int] = 8 * MAX_TENSORS + 1000  # Eight for a matrix
    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(min_length=1, max_length=MAX_TENSORS)]
    files: Annotated[tuple[ModelFile, ...], msgspec.Meta(max_length=64)]
    adapter: AdapterShape | None = None

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def adapted(self) -> list[str]:
        """The names of the modules that have an adapter."""
        names = [tensor.name for tensor in self.tensors if not tensor.frozen]
        return [name.removesuffix(LORA_A) for name in names if name.endswith(LORA_A)] if self.adapter else []


class RegionEntry(Message, frozen=True):
    """How one region is encoded and what it must decode to."""

    codec: Codec
    encoded_bytes: Count
    decoded_digest: DigestField


class FullRegion(Message, frozen=True):
    """One region encoded for a single node that asked. Only the decoded digest in the signed table proves it."""

    codec: Literal["raw", "full"]
    encoded: bytes


class ChunkTable(Message, frozen=True):
    """Regions, chunks and tensor sums of one version. `cuts` are the numbers of regions in its segments. While the
    version is being encoded, a table describes the first segments only, and has no sums."""

    max_objects: ClassVar[int] = 470_000  # Four for a region, and one for a chunk or a sum: see MODEL_BYTES
    regions: Annotated[tuple[RegionEntry, ...], msgspec.Meta(min_length=1, max_length=2_000_000)]
    cuts: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1, max_length=MAX_SEGMENTS)]
    chunk_bytes: Annotated[int, msgspec.Meta(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)]
    chunk_digests: Annotated[tuple[DigestField, ...], msgspec.Meta(max_length=4_000_000)]
    tensor_sums: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=MAX_TENSORS)]

    @property
    def encoded_bytes(self) -> int:
        return sum(region.encoded_bytes for region in self.regions)

    @property
    def is_whole(self) -> bool:
        return bool(self.tensor_sums)

    def begins_with(self, first: ChunkTable) -> bool:
        """Return whether `first` describes the first segments of this table."""
        return (
            self.chunk_bytes == first.chunk_bytes
            and self.cuts[: len(first.cuts)] == first.cuts
            and self.regions[: len(first.regions)] == first.regions
            and self.chunk_digests[: len(first.chunk_digests)] == first.chunk_digests
        )

    def with_segment(self, segment: ChunkTable) -> ChunkTable:
        """Return a table that describes the next segment too."""
        return msgspec.structs.replace(
            self,
            regions=self.regions + segment.regions,
            cuts=self.cuts + segment.cuts,
            chunk_digests=self.chunk_digests + segment.chunk_digests,
        )


class Head(Message, frozen=True):
    """The newest version in under 1 KiB. Deltas refer to the version `base`, which is None if all regions are full."""

    swarm: Id
    learner_key: PublicKeyField
    version: VersionId
    base: VersionId | None
    layout_digest: DigestField
    layout_bytes: Annotated[int, msgspec.Meta(ge=1, le=LAYOUT_BYTES)]
    table_digest: DigestField
    table_bytes: Annotated[int, msgspec.Meta(ge=1, le=TABLE_BYTES)]


class Segment(Message, frozen=True):
    """One segment of a version that is still being encoded: its part of the table, which begins with region `first`.
    Deltas refer to `base`."""

    max_objects: ClassVar[int] = 20_000  # 1,024 regions of four objects, and digests up to SEGMENT_TABLE_BYTES
    swarm: Id
    version: VersionId
    base: VersionId | None
    layout_digest: DigestField
    number: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEGMENTS - 1)]
    first: Count
    table: ChunkTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteSpan:
    """Bytes from `start` to `start` + `nbytes` of a stream."""

    start: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    @property
    def at(self) -> slice:
        """Where it lies: `stream[span.at]`."""
        return slice(self.start, self.end)


def regions_of(layout: Layout) -> list[ByteSpan]:
    """Return the regions of a layout: runs of one dtype, frozen or not, cut at about a 1,024th of the whole."""
    size = region_bytes(layout.total_bytes)
    spans: list[ByteSpan] = []
    start = at = 0
    kind = layout.tensors[0].dtype, layout.tensors[0].frozen
    for tensor in layout.tensors:
        if (tensor.dtype, tensor.frozen) != kind:
            spans += _cut(start, at, size)
            start, kind = at, (tensor.dtype, tensor.frozen)
        at += tensor.nbytes
    return spans + _cut(start, at, size)


def region_dtypes(layout: Layout) -> list[Dtype]:
    """Return the dtype of each region of a layout."""
    return [tensor.dtype for tensor in _first_tensors(layout)]


def frozen_regions(layout: Layout) -> list[bool]:
    """Return which regions of a layout are the same in all versions."""
    return [tensor.frozen for tensor in _first_tensors(layout)]


def region_tensors(layout: Layout) -> list[list[tuple[int, ByteSpan]]]:
    """Return for each region which tensors it holds parts of: their indices, and where in the region each part lies."""
    tensors, at = tensor_spans(layout), 0
    found: list[list[tuple[int, ByteSpan]]] = []
    for region in regions_of(layout):
        parts: list[tuple[int, ByteSpan]] = []
        while at < len(tensors) and tensors[at].start < region.end:
            start, last = max(region.start, tensors[at].start), min(region.end, tensors[at].end)
            if last > start:
                parts.append((at, ByteSpan(start=start - region.start, nbytes=last - start)))
            if tensors[at].end > region.end:
                break
            at += 1
        found.append(parts)
    return found


def tensor_spans(layout: Layout) -> list[ByteSpan]:
    """Return where each tensor lies in the stream."""
    ends = accumulate((tensor.nbytes for tensor in layout.tensors), initial=0)
    return [ByteSpan(start=at, nbytes=tensor.nbytes) for at, tensor in zip(ends, layout.tensors, strict=False)]


def trained_spans(tensors: Sequence[TensorSpec]) -> list[ByteSpan]:
    """Return where the tensors lie that are not frozen: the whole stream, or an adapter."""
    found: list[ByteSpan] = []
    at = 0
    for tensor in tensors:
        if not tensor.frozen:
            before = found.pop() if found and found[-1].end == at else ByteSpan(start=at, nbytes=0)
            found.append(ByteSpan(start=before.start, nbytes=before.nbytes + tensor.nbytes))
        at += tensor.nbytes
    return found


def stream_name(name: str) -> str:
    """Return the name in the stream of a parameter of a model that peft has given an adapter: the model's own where
    that has one, so that a node's copy of the base is found by it."""
    return OF_PEFT.sub("", name)


def by_expert(layout: Layout, groups: Container[str] = ()) -> Layout:
    """Return the layout of the same stream with the names of checkpoints: one tensor for each matrix of an expert. Only
    `groups` stay together."""
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors if tensor.name not in groups}
    matrices = [matrix for tensor in layout.tensors for matrix in _matrices(tensor, shapes)]
    return msgspec.structs.replace(layout, tensors=tuple(matrices))


def encoded_spans(table: ChunkTable) -> list[ByteSpan]:
    """Return where the encoding of each region lies in the encoded stream."""
    ends = accumulate((entry.encoded_bytes for entry in table.regions), initial=0)
    return [ByteSpan(start=at, nbytes=entry.encoded_bytes) for at, entry in zip(ends, table.regions, strict=False)]


def needs_base(table: ChunkTable) -> bool:
    """Return True if some region can only be decoded with the base."""
    return any(entry.codec in DELTAS for entry in table.regions)


def is_whole_model(table: ChunkTable) -> bool:
    """Return True if every region can be decoded from this version alone."""
    return all(entry.codec in WHOLE for entry in table.regions)


def segment_cuts(total_bytes: int, regions: int) -> tuple[int, ...]:
    """Return how many regions the segments of a model of `total_bytes` should have."""
    count = min(MAX_SEGMENTS, regions, -(-total_bytes // SEGMENT_BYTES))
    ends = [regions * (i + 1) // count for i in range(count)]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def region_bytes(total_bytes: int) -> int:
    """Return a model's region size: a 1,024th, from 64 KiB to 4 MiB, and a multiple of 8 so that items stay whole."""
    aimed = -(-total_bytes // REGIONS_AIMED_AT)
    return min(MAX_REGION_BYTES, max(MIN_REGION_BYTES, -(-aimed // 8) * 8))


def chunk_spans(table: ChunkTable) -> list[list[ByteSpan]]:
    """Return for each segment where its chunks lie in the encoded stream."""
    found, start, region = [], 0, 0
    for count in table.cuts:
        end = start + sum(entry.encoded_bytes for entry in table.regions[region : region + count])
        found.append(_cut(start, end, table.chunk_bytes))
        start, region = end, region + count
    return found


def sign_head(head: Head, key: SigningKey) -> bytes:
    """Seal a head, in at most HEAD_BYTES."""
    sealed = key.seal(HEAD_CONTEXT, encode(head))
    assert len(sealed) <= HEAD_BYTES
    return sealed


def open_head(sealed: bytes, learner_key: bytes) -> Head:
    """Return the head that the owner of `learner_key` sealed. Raise ProtocolError for any other bytes."""
    body = unseal(HEAD_CONTEXT, sealed, learner_key, cap_bytes=HEAD_BYTES)
    head = decode(body, Head, cap_bytes=HEAD_BYTES)
    if head.learner_key != learner_key or head.swarm != swarm_id_of(learner_key):
        raise ProtocolError("this head is of another swarm")
    return head


def sign_segment(segment: Segment, key: SigningKey) -> bytes:
    return key.seal(SEGMENT_CONTEXT, encode(segment))


def open_segment(sealed: bytes, learner_key: bytes) -> Segment:
    """Return the segment that the owner of `learner_key` sealed. Raise ProtocolError for any other bytes."""
    body = unseal(SEGMENT_CONTEXT, sealed, learner_key, cap_bytes=SEGMENT_TABLE_BYTES)
    segment = decode(body, Segment, cap_bytes=SEGMENT_TABLE_BYTES)
    if segment.swarm != swarm_id_of(learner_key):
        raise ProtocolError("this segment is of another swarm")
    return segment


def check_segment(segment: Segment, layout: Layout) -> None:
    """Raise ProtocolError if a segment cannot be one of a model with this layout."""
    table = segment.table
    spans = regions_of(layout)[segment.first : segment.first + len(table.regions)]
    if len(table.cuts) != 1 or table.is_whole:
        raise ProtocolError("the segment does not fit the layout")
    _check_entries(table, spans, segment.base, segment.version)


def open_layout(data: bytes, head: Head) -> Layout:
    """Return the layout that `head` names. Raise ProtocolError for any other."""
    _check_object(data, head.layout_digest, head.layout_bytes, "layout")
    return read_layout(data)


def read_layout(data: bytes) -> Layout:
    """Return a layout from a source that is trusted or proven otherwise. Raise ProtocolError if it makes no sense."""
    layout = decode(data, Layout, cap_bytes=LAYOUT_BYTES)
    if not 0 < layout.total_bytes <= MODEL_BYTES:
        raise ProtocolError(f"a layout of {layout.total_bytes} bytes of weights is no model")
    names = [name for tensor in layout.tensors for name in (tensor.name, *tensor.aliases)]
    # Some file systems ignore case.
    files = {file.name.lower() for file in layout.files}
    if len(set(names)) != len(names) or len(files) != len(layout.files):
        raise ProtocolError("a layout names a tensor or a file twice")
    return layout


def open_table(data: bytes, head: Head, layout: Layout) -> ChunkTable:
    """Return the chunk table that `head` names, checked against the layout. Raise ProtocolError for any other."""
    _check_object(data, head.table_digest, head.table_bytes, "chunk table")
    table = decode(data, ChunkTable, cap_bytes=TABLE_BYTES)
    spans = regions_of(layout)
    if len(table.tensor_sums) != len(layout.tensors):
        raise ProtocolError("the chunk table does not fit the layout")
    _check_entries(table, spans, head.base, head.version)
    return table


def _check_entries(table: ChunkTable, spans: list[ByteSpan], base: VersionId | None, version: VersionId) -> None:
    """Raise ProtocolError unless a table can describe these regions."""
    if len(table.regions) != len(spans) or sum(table.cuts) != len(spans) or 0 in table.cuts:
        raise ProtocolError("the chunk table does not fit the layout")
    # An encoder falls back to "raw", which adds nothing.
    if any(entry.encoded_bytes > span.nbytes for entry, span in zip(table.regions, spans, strict=True)):
        raise ProtocolError("a region's encoding is larger than any encoder makes it")
    if needs_base(table) and (base is None or base >= version):
        raise ProtocolError("the chunk table has deltas, and the head names no older version as their base")
    if sum(map(len, chunk_spans(table))) != len(table.chunk_digests):
        raise ProtocolError("the chunk table names another number of chunks than its regions fill")


def _check_object(data: bytes, expected: bytes, nbytes: int, what: str) -> None:
    if len(data) != nbytes or digest(data) != expected:
        raise ProtocolError(f"this {what} is not the one that the head names")


def _first_tensors(layout: Layout) -> list[TensorSpec]:
    """Return for each region the tensor that it begins with."""
    return [layout.tensors[parts[0][0]] for parts in region_tensors(layout)]


def _cut(start: int, end: int, size: int) -> list[ByteSpan]:
    return [ByteSpan(start=at, nbytes=min(size, end - at)) for at in range(start, end, size)]


def _matrices(tensor: TensorSpec, shapes: dict[str, tuple[int, ...]]) -> list[TensorSpec]:
    group, _, kind = tensor.name.rpartition(".")
    gate_up, down = shapes.get(f"{group}.gate_up_proj", ()), shapes.get(f"{group}.down_proj", ())
    # Groups of other shapes are transposed, and lie so in checkpoints too.
    if kind not in GROUPED or len(down) != 3 or gate_up != (down[0], 2 * down[2], down[1]):
        return [tensor]
    (experts, rows, columns), names = tensor.shape, GROUPED[kind]
    shape = (rows // len(names), columns)
    return [
        TensorSpec(name=f"{group}.{expert}.{name}.weight", dtype=tensor.dtype, shape=shape, frozen=tensor.frozen)
        for expert in range(experts)
        for name in names
    ]
