"""Regions to encodings and back, every bit of them, and the sums that prove an install."""

from __future__ import annotations

import random

import pytest

from swarm.broadcast.codec import decode_region, encode_region, tensor_sum
from swarm.broadcast.manifest import ITEM_BYTES, Dtype
from swarm.errors import ProtocolError
from swarm.wire import compress
from tests.builders import layout, weights_of

ALL_PATTERNS = b"".join(pattern.to_bytes(2, "little") for pattern in range(1 << 16))
NOISE = random.Random(0).randbytes(4096)


def test_every_bf16_pattern_comes_back_bit_for_bit() -> None:
    codec, encoded = encode_region(ALL_PATTERNS, "BF16")
    assert codec == "full"
    assert bytes(decode_region(codec, encoded, len(ALL_PATTERNS), "BF16")) == ALL_PATTERNS


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("content", [bytes(4096), NOISE, b"\x3f\x80" * 2048], ids=["zeros", "noise", "pattern"])
def test_every_dtype_comes_back_bit_for_bit(dtype: Dtype, content: bytes) -> None:
    codec, encoded = encode_region(content, dtype)
    assert len(encoded) <= len(content)
    assert bytes(decode_region(codec, encoded, len(content), dtype)) == content


def test_what_does_not_compress_is_sent_as_it_is() -> None:
    assert encode_region(NOISE, "BF16") == ("raw", NOISE)
    assert encode_region(b"ab", "BF16") == ("raw", b"ab")


def test_splitting_bytes_into_planes_is_what_makes_weights_compress() -> None:
    weights = weights_of(layout(("w", "BF16", (131_072,))), 0)
    planed, flat = encode_region(weights, "BF16")[1], encode_region(weights, "U8")[1]
    assert len(planed) < 0.72 * len(weights)
    assert len(planed) < 0.92 * len(flat)


def test_a_wrong_size_is_refused() -> None:
    codec, encoded = encode_region(ALL_PATTERNS, "BF16")
    for nbytes in (len(ALL_PATTERNS) - 2, len(ALL_PATTERNS) + 2, 0):
        with pytest.raises(ProtocolError):
            decode_region(codec, encoded, nbytes, "BF16")
        with pytest.raises(ProtocolError):
            decode_region("raw", ALL_PATTERNS, nbytes, "BF16")


def test_an_encoding_that_is_none_is_refused() -> None:
    for encoded in (b"", b"junk" * 100, compress(b"x" * 100)[:-1], compress(b"x" * 100) + b"x"):
        with pytest.raises(ProtocolError):
            decode_region("full", encoded, 100, "U8")


def test_a_sum_ignores_order_and_nothing_else() -> None:
    words = [NOISE[at : at + 2] for at in range(0, len(NOISE), 2)]
    shuffled = random.Random(1).sample(words, len(words))
    assert shuffled != words
    assert tensor_sum(b"".join(shuffled)) == tensor_sum(NOISE)
    # Shards add up, so replicas counted once give the whole tensor's sum.
    assert (tensor_sum(NOISE[:1000]) + tensor_sum(NOISE[1000:])) % 2**64 == tensor_sum(NOISE)


def test_every_flipped_bit_of_a_pattern_changes_the_sum() -> None:
    for pattern in range(0, 1 << 16, 251):
        flips = [pattern, *(pattern ^ 1 << bit for bit in range(16))]
        assert len({tensor_sum(flip.to_bytes(2, "little")) for flip in flips}) == 17, pattern


def test_a_flip_in_a_large_tensor_is_seen() -> None:
    whole = tensor_sum(NOISE)
    for place in range(0, 8 * len(NOISE), 61):
        flipped = bytearray(NOISE)
        flipped[place // 8] ^= 1 << place % 8
        assert tensor_sum(flipped) != whole


def test_zeros_count_so_that_a_lost_shard_of_zeros_is_seen() -> None:
    assert tensor_sum(bytes(2)) != 0
    assert tensor_sum(bytes(4)) != tensor_sum(bytes(2))


def test_an_odd_last_byte_counts() -> None:
    assert tensor_sum(b"abc") == (tensor_sum(b"ab") + tensor_sum(b"c\0")) % 2**64
    assert tensor_sum(b"") == 0


def test_the_mix_is_fixed_for_ever() -> None:
    assert tensor_sum(b"\x80\x3f") == 5933182405100350238
