"""Regions to encodings and back, every bit of them, and the sums that prove an install."""

from __future__ import annotations

import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from swarm.broadcast.version.codec import Buffer, decode_region, difference, encode_region, sum_change, tensor_sum
from swarm.broadcast.version.manifest import ITEM_BYTES, Codec, Dtype
from swarm.errors import ProtocolError
from swarm.wire import compress
from tests.builders import layout, weights_of

ALL_PATTERNS = b"".join(pattern.to_bytes(2, "little") for pattern in range(1 << 16))
NOISE = random.Random(0).randbytes(4096)
WEIGHTS = weights_of(layout(("w", "BF16", (65_536,))), 0)


def stepped(base: bytes, share: float, most: int, seed: int = 0) -> bytes:
    """`base` with about `share` of its 16-bit words moved by 1 to `most` patterns up or down."""
    rng = np.random.default_rng(seed)
    words = np.frombuffer(base, dtype="<u2").copy()
    moves = rng.integers(1, most + 1, words.size) * rng.choice((-1, 1), words.size) * (rng.random(words.size) < share)
    return bytes((words + moves).astype("<u2").data.cast("B"))


def there_and_back(data: bytes, dtype: Dtype, base: bytes | None = None) -> tuple[Codec, int]:
    """The codec chosen for `data` and the size of its encoding, which gives back every bit."""
    codec, encoded = encode_region(data, dtype, base)
    assert bytes(decode_region(codec, encoded, len(data), dtype, base)) == data
    assert len(encoded) <= len(data)
    return codec, len(encoded)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("content", [bytes(4096), NOISE, ALL_PATTERNS], ids=["zeros", "noise", "all patterns"])
def test_every_dtype_comes_back_bit_for_bit(dtype: Dtype, content: bytes) -> None:
    codec, _ = there_and_back(content, dtype)
    assert (dtype, content) != ("BF16", ALL_PATTERNS) or codec == "full"


def test_what_does_not_compress_is_sent_as_it_is() -> None:
    assert encode_region(NOISE, "BF16") == ("raw", NOISE)
    assert encode_region(b"ab", "BF16") == ("raw", b"ab")


def test_an_encoding_that_is_none_is_refused() -> None:
    for encoded in (b"", b"junk" * 100, compress(b"x" * 100)[:-1], compress(b"x" * 100) + b"x"):
        with pytest.raises(ProtocolError):
            decode_region("full", encoded, 100, "U8")


def test_exponents_are_coded_and_mantissas_left_alone() -> None:
    weights = np.random.default_rng(0).normal(0, 0.02, 1 << 18).astype("<f4").view("<u4") >> 16
    codec, nbytes = there_and_back(weights.astype("<u2").tobytes(), "BF16")
    assert codec == "full"
    assert nbytes < 0.67 * 2 * weights.size


@pytest.mark.parametrize(
    ("share", "most", "codec"),
    [(0.001, 1, "sparse"), (0.01, 3, "sparse"), (0.1, 40, "sparse"), (0.3, 70_000, "sparse"), (0.9, 50, "dense")],
)
def test_a_delta_is_sparse_or_dense_by_how_much_changed(share: float, most: int, codec: Codec) -> None:
    data = stepped(WEIGHTS, share, most)
    assert there_and_back(data, "BF16", WEIGHTS)[0] == codec
    assert there_and_back(data, "BF16", WEIGHTS)[1] < there_and_back(data, "BF16")[1]


def test_weights_that_have_nothing_to_do_with_the_base_are_sent_whole() -> None:
    assert there_and_back(WEIGHTS, "BF16", random.Random(1).randbytes(len(WEIGHTS)))[0] == "full"
    assert there_and_back(NOISE, "BF16", bytes(len(NOISE)))[0] == "raw"


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("nbytes", [1, 2, 7, 4096])
def test_what_did_not_change_costs_one_byte(dtype: Dtype, nbytes: int) -> None:
    assert there_and_back(NOISE[:nbytes], dtype, NOISE[:nbytes]) == ("sparse" if nbytes > 1 else "raw", 1)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("at", [0, 1, 1999, 3999, 4000])
def test_one_changed_byte_of_any_dtype_comes_back(dtype: Dtype, at: int) -> None:
    data = bytearray(WEIGHTS[:4001])
    data[at] ^= 0x80
    codec, nbytes = there_and_back(bytes(data), dtype, WEIGHTS[:4001])
    # An odd last byte is no word, and words are what deltas are made of.
    assert (codec, nbytes < 40) == (("sparse", True) if at < 4000 else ("full", False))


def test_every_difference_of_patterns_comes_back() -> None:
    """NaN payloads, infinities, both zeros, subnormals and sign crossings are among them."""
    words = np.frombuffer(ALL_PATTERNS, dtype="<u2")
    for distance in (1, 2, 7, 8, 127, 128, 254, 255, 256, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        moved = words + np.uint16(distance)
        there_and_back(moved.tobytes(), "BF16", ALL_PATTERNS)
        few = np.where(words % 7 == 3, moved, words)
        assert there_and_back(few.tobytes(), "BF16", ALL_PATTERNS)[0] == "sparse"


@pytest.mark.parametrize("gap", [1, 253, 254, 255, 256, 509, 510, 511, 30_000])
def test_a_gap_of_any_length_comes_back(gap: int) -> None:
    words = np.zeros(65_536, dtype="<u2")
    words[gap - 1 :: gap] = 3
    base = np.full(65_536, 4, dtype="<u2")
    there_and_back(words.tobytes(), "BF16", base.tobytes())
    there_and_back(np.where(words == 3, words, base).tobytes(), "BF16", base.tobytes())


def test_small_weights_move_by_more_patterns_and_that_is_used() -> None:
    """One step of 1e-6 on N(0, 0.02): plain gaps would take more than 0.62 % by their entropy alone."""
    rng = np.random.default_rng(0)
    masters = rng.normal(0, 0.02, 1 << 19).astype("<f4")
    after = (masters - 1e-6 * rng.normal(0, 0.23, masters.size)).astype("<f4")
    base, data = (((w.view("<u4") + 0x8000) >> 16).astype("<u2").tobytes() for w in (masters, after))
    codec, nbytes = there_and_back(data, "BF16", base)
    assert codec == "sparse"
    assert nbytes < 0.006 * len(data)


@pytest.mark.parametrize("share", [0.01, 0.9])
def test_a_delta_without_its_base_is_refused(share: float) -> None:
    codec, encoded = encode_region(stepped(WEIGHTS, share, 3), "BF16", WEIGHTS)
    for base in (None, b"", WEIGHTS[:-2]):
        with pytest.raises(ProtocolError, match="base"):
            decode_region(codec, encoded, len(WEIGHTS), "BF16", base)
    with pytest.raises(ValueError, match="base"):
        encode_region(WEIGHTS, "BF16", WEIGHTS[:-2])


def parts(*lengths: int, data: bytes = b"") -> bytes:
    """A sparse region of five parts of these lengths, stored as they are."""
    whole = (*lengths, *[0] * 5)[:5]
    return b"\0" + b"".join((STORED + length).to_bytes(4, "little") for length in whole) + data


def compressed_parts(threshold: bytes, *frames: bytes) -> bytes:
    """A region of these frames; one without a byte is stored as it is."""
    lengths = b"".join((len(frame) or STORED).to_bytes(4, "little") for frame in frames)
    return threshold + lengths + b"".join(frames)


STORED = 1 << 31


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"\1",
        b"\0" + bytes(16),
        parts(9),
        parts(data=b"x"),
        parts(1, data=b"\7"),
        parts(1, data=b"\xff"),
        parts(1, 1, data=b"\x40\0"),
        parts(1, 1, 0, 0, 2, data=b"\0\0\0\0"),
        parts(1, 1, data=b"\0\x0f"),
        parts(1, 1, 0, 0, 1, data=b"\0\x0f\0"),
        parts(0, 0, 1, 1, data=b"\0\0"),
        parts(99, data=bytes(99)),
        compressed_parts(b"\0", compress(bytes(99)), b"", b"", b"", b""),
    ],
)
def test_a_sparse_region_that_contradicts_itself_is_refused(encoded: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_region("sparse", encoded, 128, "BF16", bytes(range(128)))


def peak_bytes(codec: Codec, encoded: Buffer, nbytes: int, base: bytes) -> int:
    tracemalloc.start()
    try:
        decode_region(codec, encoded, nbytes, "BF16", base)
    except ProtocolError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def test_no_encoding_makes_a_receiver_allocate_much() -> None:
    nbytes = 1 << 20
    base = bytes(nbytes)
    for claimed in (nbytes // 8, 3 * nbytes // 16, 3 * nbytes // 8, nbytes // 2, nbytes, 1 << 28):
        frame, half = compress(bytes(claimed)), compress(bytes(-(-claimed // 2)))
        planes = compressed_parts(b"", frame, frame)
        sparse = compressed_parts(b"\xff", frame, half, frame, frame, b"")
        cases: list[tuple[Codec, bytes]] = [("sparse", sparse), ("dense", planes), ("full", planes)]
        for codec, encoded in cases:
            assert peak_bytes(codec, encoded, nbytes, base) < 16 * nbytes, (codec, claimed)


def test_threads_share_no_compressor() -> None:
    pieces = [stepped(WEIGHTS, 0.02, 3, seed) for seed in range(16)]
    expected = [encode_region(piece, "BF16", WEIGHTS) for piece in pieces]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda piece: encode_region(piece, "BF16", WEIGHTS), pieces)) == expected


def test_zeros_and_an_odd_last_byte_count_so_that_a_lost_shard_of_zeros_is_seen() -> None:
    assert tensor_sum(bytes(2)) != 0
    assert tensor_sum(bytes(4)) != tensor_sum(bytes(2))
    assert tensor_sum(b"abc") == (tensor_sum(b"ab") + tensor_sum(b"c\0")) % 2**64
    assert tensor_sum(b"") == 0


@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_a_sum_changes_by_the_words_that_changed(share: float) -> None:
    after = stepped(WEIGHTS, share, 3, 1) + b"x"
    before = WEIGHTS + b"y"
    assert (tensor_sum(before) + sum_change(after, before, difference(after, before).at)) % 2**64 == tensor_sum(after)


def test_the_mix_is_fixed_for_ever() -> None:
    assert tensor_sum(b"\x80\x3f") == 5933182405100350238
