"""Regions of any bytes come back bit for bit, and damaged ones are refused or caught by their digest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.broadcast.codec import decode_region, encode_region, tensor_sum
from swarm.broadcast.manifest import ITEM_BYTES, Dtype, Layout, TensorSpec, regions_of
from swarm.errors import ProtocolError

words = st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=300).map(
    lambda values: b"".join(value.to_bytes(2, "little") for value in values)
)
smooth = st.tuples(words, st.integers(1, 40)).map(lambda drawn: drawn[0] * drawn[1])
two_byte_dtypes = st.sampled_from(sorted(dtype for dtype, nbytes in ITEM_BYTES.items() if nbytes == 2))


@given(words | smooth, two_byte_dtypes)
def test_any_16_bit_words_come_back(data: bytes, dtype: Dtype) -> None:
    codec, encoded = encode_region(data, dtype)
    assert bytes(decode_region(codec, encoded, len(data), dtype)) == data
    assert len(encoded) <= len(data)


@given(st.binary(min_size=1, max_size=600), st.sampled_from(["U8", "I8", "BOOL"]))
def test_any_bytes_come_back(data: bytes, dtype: Dtype) -> None:
    codec, encoded = encode_region(data, dtype)
    assert bytes(decode_region(codec, encoded, len(data), dtype)) == data


@given(smooth, st.integers(min_value=0), st.integers(-4, 4).filter(bool))
def test_damage_gives_other_bytes_of_the_right_size_or_is_refused(data: bytes, flip: int, longer: int) -> None:
    codec, encoded = encode_region(data, "BF16")
    damaged = bytearray(encoded)
    damaged[flip // 8 % len(encoded)] ^= 1 << flip % 8
    try:
        assert len(decode_region(codec, bytes(damaged), len(data), "BF16")) == len(data)
    except ProtocolError:
        pass
    with pytest.raises(ProtocolError):
        decode_region(codec, encoded, len(data) + longer, "BF16")


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
