"""Heads, layouts and chunk tables: what is cut where, and that no other bytes pass for them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from swarm.broadcast.store.store import HeldVersion
from swarm.broadcast.version.manifest import (
    HEAD_BYTES,
    HEAD_CONTEXT,
    LAYOUT_BYTES,
    MAX_CHUNK_BYTES,
    MAX_REGION_BYTES,
    MAX_TENSORS,
    MIN_REGION_BYTES,
    MODEL_BYTES,
    TABLE_BYTES,
    ByteSpan,
    ChunkTable,
    Head,
    Layout,
    RegionEntry,
    by_expert,
    chunk_spans,
    open_head,
    open_layout,
    open_table,
    read_layout,
    region_bytes,
    regions_of,
    sign_head,
    tensor_spans,
)
from swarm.errors import ProtocolError
from swarm.types import VersionId
from swarm.wire import Digest, decode, digest, encode
from tests.builders import KEY, MIXED_LAYOUT, OTHER_KEY, SWARM_OF_KEY, layout, publish, v, weights_of


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> HeldVersion:
    return publish(tmp_path_factory.mktemp("learner"), MIXED_LAYOUT, weights_of(MIXED_LAYOUT, 0))


def head_of(*, layout_bytes: bytes = b"?", table_bytes: bytes = b"?", version: VersionId | None = None) -> Head:
    """A head that truly names these two objects."""
    return Head(
        swarm=SWARM_OF_KEY,
        learner_key=KEY.public_bytes,
        version=version or v(0),
        base=None,
        layout_digest=digest(layout_bytes),
        layout_bytes=len(layout_bytes),
        table_digest=digest(table_bytes),
        table_bytes=len(table_bytes),
    )


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        (1, MIN_REGION_BYTES),
        (64 << 20, MIN_REGION_BYTES),
        ((64 << 20) + 1, MIN_REGION_BYTES + 8),
        (1 << 30, 1 << 20),
        (8 << 30, MAX_REGION_BYTES),
        (1 << 40, MAX_REGION_BYTES),
    ],
)
def test_a_region_is_a_1024th_between_its_bounds_and_holds_whole_items(total: int, expected: int) -> None:
    assert region_bytes(total) == expected
    assert region_bytes(total) % 8 == 0


def test_regions_are_of_one_dtype_and_pass_over_tensors() -> None:
    spans = regions_of(MIXED_LAYOUT)
    assert {1_331_200, 1_491_200} <= {span.start for span in spans}
    assert len(spans) == 21 + 3 + 1
    assert regions_of(layout(("a", "BF16", (3,)), ("b", "BF16", (5,)))) == [ByteSpan(start=0, nbytes=16)]


GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def test_grouped_experts_are_named_one_by_one_where_they_lie() -> None:
    grouped = layout(("norm", "F32", (4,)), (GATE_UP, "BF16", (2, 6, 4)), (DOWN, "BF16", (2, 4, 3)))
    single = by_expert(grouped)
    rows = [f"mlp.experts.{expert}.{name}_proj.weight" for expert in (0, 1) for name in ("gate", "up")]
    columns = [f"mlp.experts.{expert}.down_proj.weight" for expert in (0, 1)]
    assert [tensor.name for tensor in single.tensors] == ["norm", *rows, *columns]
    assert [tensor.shape for tensor in single.tensors] == [(4,), *[(3, 4)] * 4, *[(4, 3)] * 2]
    assert [span.start for span in tensor_spans(single)] == [0, 16, 40, 64, 88, 112, 136]
    assert (single.total_bytes, regions_of(single)) == (grouped.total_bytes, regions_of(grouped))


@pytest.mark.parametrize(
    ("gate_up", "down", "kept"),
    [
        pytest.param((2, 4, 6), (2, 3, 4), (), id="transposed"),
        pytest.param((6, 4), (4, 3), (), id="no experts"),
        pytest.param((2, 6, 4), (2, 4, 3), (GATE_UP, DOWN), id="grouped here"),
    ],
)
def test_what_checkpoints_hold_in_groups_stays_grouped(
    gate_up: tuple[int, ...], down: tuple[int, ...], kept: tuple[str, ...]
) -> None:
    grouped = layout((GATE_UP, "BF16", gate_up), (DOWN, "BF16", down), ("gate_up_proj.weight", "BF16", (6, 4)))
    assert by_expert(grouped, kept) == grouped


def test_chunks_cut_the_encodings_at_equal_places(published: HeldVersion) -> None:
    table = published.table
    (spans,) = chunk_spans(table)
    assert [span.start for span in spans] == [i * table.chunk_bytes for i in range(len(spans))]
    assert {span.nbytes for span in spans[:-1]} == {table.chunk_bytes}
    assert sum(span.nbytes for span in spans) == table.encoded_bytes == published.chunks.path.stat().st_size


def test_the_largest_head_is_under_a_kilobyte() -> None:
    most = 2**53
    largest = msgspec.structs.replace(
        head_of(version=v(most, incarnation=most)),
        base=v(most, incarnation=most),
        layout_bytes=32 << 20,
        table_bytes=8 << 20,
    )
    sealed = sign_head(largest, KEY)
    assert len(sealed) < HEAD_BYTES
    assert open_head(sealed, KEY.public_bytes) == largest


def test_a_head_by_another_key_or_of_another_swarm_is_refused() -> None:
    head = head_of()
    with pytest.raises(ProtocolError):
        open_head(sign_head(head, OTHER_KEY), KEY.public_bytes)
    for change in ({"swarm": "another"}, {"learner_key": OTHER_KEY.public_bytes}):
        with pytest.raises(ProtocolError, match="another swarm"):
            open_head(sign_head(msgspec.structs.replace(head, **change), KEY), KEY.public_bytes)
    for body in (encode(v(0)), bytes(HEAD_BYTES)):
        with pytest.raises(ProtocolError):
            open_head(KEY.seal(HEAD_CONTEXT, body), KEY.public_bytes)


def test_a_layout_opens_from_exactly_the_bytes_that_the_head_names() -> None:
    data = encode(MIXED_LAYOUT)
    head = head_of(layout_bytes=data)
    assert open_layout(data, head) == MIXED_LAYOUT
    for other in (data + b"\0", data[:-1], bytes([data[0] ^ 1]) + data[1:], b""):
        with pytest.raises(ProtocolError, match="not the one that the head names"):
            open_layout(other, head)


def opened_layout(data: bytes) -> Layout:
    """`data` opened under a head that truly names it."""
    return open_layout(data, head_of(layout_bytes=data))


def raw_layout(**changes: Any) -> bytes:
    """A layout with one tensor and one file, as bytes; `changes` need not be valid."""
    name, file = changes.get("name", "w"), changes.get("file", "config.json")
    tensor = [name, changes.get("dtype", "U8"), changes.get("shape", [1]), changes.get("aliases", [])]
    return msgspec.msgpack.encode([changes.get("tensors", [tensor]), changes.get("files", [[file, b"{}"]])])


PATHS = ("", ".", "..", "../config.json", "/etc/passwd", "a/b", "a\\b", ".hidden", ".json", "C:evil", "NUL.json")
ODD = ("nul\0byte", "config.json\n", "\nconfig.json", "config\0.json", "spa ce", "é.json", "x" * 101 + ".json", "_x")
CODE = ("modeling.py", "pytorch_model.bin", "model.pt", "model.pkl", "kernel.so", "model.safetensors", "com1.txt")


@pytest.mark.parametrize("name", PATHS + ODD + CODE)
def test_a_file_name_that_could_leave_its_directory_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError):
        opened_layout(raw_layout(file=name))


@pytest.mark.parametrize("name", ["config.json", "a_config.json", "merges.txt", "1.model", "_x.json", "a..b.jinja"])
def test_a_plain_file_name_passes(name: str) -> None:
    assert opened_layout(raw_layout(file=name)).files[0].name == name


NONSENSE: dict[str, dict[str, Any]] = {
    "no tensors": {"tensors": []},
    "an unknown dtype": {"dtype": "F8"},
    "a negative extent": {"shape": [-1]},
    "too many axes": {"shape": [1] * 7},
    "too many aliases": {"aliases": list("abcde")},
    "a name of which each letter takes four bytes": {"name": "x" * 299 + "\U0001f600"},
    "a vocabulary of a quadrillion": {"shape": [10**15, 1]},
    "more layers than a model has parts": {"tensors": [[str(i), "U8", [1]] for i in range(MAX_TENSORS + 1)]},
    "a nameless tensor": {"name": ""},
    "a name without end": {"name": "x" * 301},
    "too many files": {"files": [[f"f{i}.json", b""] for i in range(65)]},
    "a file twice where case does not count": {"files": [["a.json", b""], ["A.json", b""]]},
    "a tensor twice": {"tensors": [["a", "U8", [1], []], ["a", "U8", [1], []]]},
    "an alias that is a tensor": {"tensors": [["a", "U8", [1], []], ["b", "U8", [1], ["a"]]]},
    "an alias twice": {"aliases": ["x", "x"]},
    "more bytes than any model has": {"shape": [2**40] * 2},
}


@pytest.mark.parametrize("changes", NONSENSE.values(), ids=NONSENSE)
def test_a_layout_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        opened_layout(raw_layout(**changes))


def allocated_by(data: bytes) -> int:
    """The most bytes that reading a layout takes, whether it is refused or not, on top of its own."""
    tracemalloc.start()
    try:
        read_layout(data)
    except ProtocolError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


SHARE = 64
"""A test that reads a 64th of the largest layout counts it 64 times: each tensor takes as much as the one before."""


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(lambda i: [f"{i:x}", "U8", [], []], id="as small as can be"),
        pytest.param(
            lambda i: [f"{i:x}", "U8", [1, 1, 1, 1, 1, 300 + i], [f"{i:x}{j}" for j in "wxyz"]], id="many parts"
        ),
        pytest.param(lambda i: [f"{i:0300x}", "BOOL", [2**40 + i] * 5 + [0], []], id="long"),
        pytest.param(lambda i: ["w", "U8", [1], []], id="all alike"),
    ],
)
def test_no_layout_allocates_more_than_four_times_the_largest(tensor: Callable[[int], list[Any]]) -> None:
    most = min(MAX_TENSORS, Layout.max_objects // objects_in(tensor(0)))
    data = raw_layout(tensors=[tensor(i) for i in range(most // SHARE)])
    assert allocated_by(data) * SHARE <= 4 * LAYOUT_BYTES


def objects_in(value: Any) -> int:
    return 1 + sum(map(objects_in, value)) if isinstance(value, list) else 1


def test_layout_and_table_of_the_largest_models_pass() -> None:
    tensors = [[f"layers.{i // 384}.experts.{i % 384}.w", "BF16", [1, 2], []] for i in range(MAX_TENSORS)]
    assert len(read_layout(raw_layout(tensors=tensors)).tensors) == MAX_TENSORS
    count = MODEL_BYTES // MAX_REGION_BYTES
    entry = RegionEntry(codec="full", encoded_bytes=3 << 20, decoded_digest=Digest(bytes(32)))
    table = ChunkTable(
        regions=(entry,) * count,
        cuts=(count,),
        chunk_bytes=MAX_CHUNK_BYTES,
        chunk_digests=(Digest(bytes(32)),) * (count * 3 // 4),
        tensor_sums=(1,) * 2000,
    )
    assert decode(encode(table), ChunkTable, cap_bytes=TABLE_BYTES) == table


def test_a_layout_over_its_caps_is_refused_and_takes_no_more_than_the_largest() -> None:
    for data in (
        raw_layout(tensors=[[f"{i:x}", "U8", [1], []] for i in range(2 * MAX_TENSORS)]),
        raw_layout(tensors=[[f"{i:x}", "U8", [1], []] for i in range(MAX_TENSORS)] + [["x" * 301]]),
    ):
        with pytest.raises(ProtocolError):
            read_layout(data)
        assert allocated_by(data) <= 4 * LAYOUT_BYTES
    files = raw_layout(files=[["config.json", bytes(1 << 20)]])
    assert allocated_by(files) <= 4 * len(files)


def opened_table(table: ChunkTable) -> ChunkTable:
    """`table` opened under a head that truly names it."""
    data = encode(table)
    return open_table(data, head_of(table_bytes=data), MIXED_LAYOUT)


def test_a_table_opens_from_exactly_the_bytes_that_the_head_names(published: HeldVersion) -> None:
    head, data = published.head, published.table_bytes
    assert open_table(data, head, MIXED_LAYOUT) == published.table
    for other in (data + b"\0", data[:-1], data[:-1] + bytes([data[-1] ^ 1])):
        with pytest.raises(ProtocolError, match="not the one that the head names"):
            open_table(other, head, MIXED_LAYOUT)


def _resized(table: ChunkTable, nbytes: int) -> tuple[RegionEntry, ...]:
    first = msgspec.structs.replace(table.regions[0], encoded_bytes=nbytes)
    return (first, *table.regions[1:])


def test_a_table_that_does_not_fit_the_layout_is_refused(published: HeldVersion) -> None:
    table = published.table
    assert opened_table(table) == table
    digests, regions, sums = table.chunk_digests, table.regions, table.tensor_sums
    changes: list[dict[str, Any]] = [
        {"regions": regions[:-1]},
        {"regions": (*regions, regions[0])},
        {"tensor_sums": sums[:-1]},
        {"tensor_sums": (*sums, 1)},
        {"chunk_digests": digests[:-1]},
        {"chunk_digests": (*digests, digests[0])},
        {"chunk_digests": ()},
        {"regions": _resized(table, MIN_REGION_BYTES + 1)},
        {"regions": _resized(table, 2**53)},
        *({"chunk_bytes": nbytes} for nbytes in (0, 1, 16 * 1024 - 1, 1 << 20, 4 * 1024 * 1024 + 1)),
    ]
    for change in changes:
        with pytest.raises(ProtocolError):
            opened_table(msgspec.structs.replace(table, **change))
