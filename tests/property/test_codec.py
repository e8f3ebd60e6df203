"""Regions of any bytes come back bit for bit, and damaged ones are refused or caught by their digest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.broadcast.version.codec import decode_region, encode_region, tensor_sum
from swarm.broadcast.version.manifest import ITEM_BYTES, Codec, Dtype, Layout, TensorSpec, regions_of
from swarm.errors import ProtocolError
from swarm.wire import compress

words = st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=300).map(
    lambda values: b"".join(value.to_bytes(2, "little") for value in values)
)
smooth = st.tuples(words, st.integers(1, 40)).map(lambda drawn: drawn[0] * drawn[1])
dtypes = st.sampled_from(sorted(ITEM_BYTES))


@st.composite
def versions(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A base and the version after it, in which a few words, many or none took other values."""
    base = draw(words | smooth)
    items = [base[at : at + 2] for at in range(0, len(base), 2)]
    for at, word in draw(st.dictionaries(st.integers(0, len(items) - 1), st.binary(min_size=2, max_size=2))).items():
        items[at] = word
    tail = draw(st.binary(max_size=1))
    return base + tail, b"".join(items) + tail


alike = st.integers(0, 600).flatmap(lambda n: st.tuples(*[st.binary(min_size=n, max_size=n)] * 2))


@given(versions() | alike, dtypes, st.booleans())
def test_any_version_comes_back_on_any_base_or_none(pair: tuple[bytes, bytes], dtype: Dtype, based: bool) -> None:
    data, base = pair[1], pair[0] if based else None
    codec, encoded = encode_region(data, dtype, base)
    assert bytes(decode_region(codec, encoded, len(data), dtype, base)) == data
    assert len(encoded) <= len(data)


@given(versions(), st.integers(min_value=0), st.integers(min_value=0), st.booleans(), st.integers(-4, 4).filter(bool))
def test_damage_gives_other_bytes_of_the_right_size_or_is_refused(
    pair: tuple[bytes, bytes], flip: int, end: int, based: bool, longer: int
) -> None:
    data, base = pair[1], pair[0] if based else None
    codec, encoded = encode_region(data, "BF16", base)
    damaged = bytearray(encoded)
    damaged[flip // 8 % len(encoded)] ^= 1 << flip % 8
    for hostile in (bytes(damaged), bytes(encoded[: end % len(encoded)])):
        _decode_hostile(codec, hostile, len(data), base)
    with pytest.raises(ProtocolError):
        decode_region(codec, encoded, len(data) + longer, "BF16", base)


@given(st.sampled_from(("full", "dense", "sparse")), st.binary(max_size=80), versions())
def test_random_bytes_are_refused_or_give_bytes_of_the_right_size(
    codec: Codec, encoded: bytes, pair: tuple[bytes, bytes]
) -> None:
    _decode_hostile(codec, encoded, len(pair[0]), pair[0])


stored = st.binary(max_size=12).map(lambda content: (len(content) | 1 << 31, content))
compressed = st.binary(min_size=1, max_size=40).map(compress).map(lambda frame: (len(frame), frame))


@given(st.integers(0, 255), st.lists(stored | compressed, min_size=5, max_size=5), versions())
def test_well_formed_streams_of_anything_are_refused_or_give_bytes_of_the_right_size(
    threshold: int, streams: list[tuple[int, bytes]], pair: tuple[bytes, bytes]
) -> None:
    encoded = bytes([threshold]) + _joined(streams)
    _decode_hostile("sparse", encoded, len(pair[0]), pair[0])
    _decode_hostile("dense", _joined(streams[:2]), len(pair[0]), pair[0])


def _joined(streams: list[tuple[int, bytes]]) -> bytes:
    return b"".join([*(length.to_bytes(4, "little") for length, _ in streams), *(content for _, content in streams)])


def _decode_hostile(codec: Codec, encoded: bytes, nbytes: int, base: bytes | None) -> None:
    """Whatever comes, nothing but ProtocolError is raised."""
    try:
        assert len(decode_region(codec, encoded, nbytes, "BF16", base)) == nbytes
    except ProtocolError:
        pass


@given(words, st.data())
def test_a_sum_is_the_same_in_any_order_and_of_any_shards(data: bytes, draw: st.DataObject) -> None:
    items = [data[at : at + 2] for at in range(0, len(data), 2)]
    shuffled = draw.draw(st.permutations(items))
    cut = draw.draw(st.integers(0, len(items)))
    assert tensor_sum(b"".join(shuffled)) == tensor_sum(data)
    shards = tensor_sum(b"".join(items[:cut])) + tensor_sum(b"".join(items[cut:]))
    assert shards % 2**64 == tensor_sum(data)


@given(words, st.integers(min_value=0))
def test_a_sum_sees_every_flipped_bit(data: bytes, flip: int) -> None:
    flipped = bytearray(data)
    flipped[flip // 8 % len(data)] ^= 1 << flip % 8
    assert tensor_sum(flipped) != tensor_sum(data)


shapes = st.lists(st.integers(0, 300), max_size=3).map(tuple)
tensors = st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEM_BYTES))), min_size=1, max_size=6)


@given(tensors)
def test_regions_cover_any_layout_once_and_hold_whole_items_of_one_dtype(
    drawn: list[tuple[tuple[int, ...], Dtype]],
) -> None:
    specs = tuple(TensorSpec(name=f"t{i}", dtype=dtype, shape=shape) for i, (shape, dtype) in enumerate(drawn))
    layout = Layout(tensors=specs, files=())
    runs = [(spec.dtype, at) for spec, at in zip(specs, _starts(specs), strict=True) if spec.nbytes]
    at = 0
    for span in regions_of(layout):
        assert span.start == at
        at += span.nbytes
        inside = {dtype for dtype, start in runs if span.start <= start < at}
        holder = [dtype for dtype, start in runs if start <= span.start][-1]
        assert inside <= {holder}
        assert span.nbytes % ITEM_BYTES[holder] == 0
        assert span.nbytes > 0
    assert at == layout.total_bytes


def _starts(specs: tuple[TensorSpec, ...]) -> list[int]:
    starts, at = [], 0
    for spec in specs:
        starts.append(at)
        at += spec.nbytes
    return starts
