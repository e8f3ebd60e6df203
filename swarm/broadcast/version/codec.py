"""Encode regions of weights and decode them, bit-exact; and the sums that prove what an engine holds.

A region is coded whole or as a delta against the same region of the version before. Deltas work on 16-bit words and on
the difference of their patterns modulo 2^16. For bf16 that is the distance in units in the last place (ULP): small
numbers for small steps, and it can be undone for every pair of patterns, NaN and sign crossings included.

  raw     the bytes themselves.
  full    two planes: exponents, which repeat, and sign with mantissa, which hardly do.
  sparse  few words changed: the gaps between them, and their differences.
  dense   many changed: every word's difference, smallest words of the base first.

One optimiser step moves all weights about equally far. So how many ULPs a word moves, if any, depends on its own
magnitude, which the receiver knows from the base. Hence "dense" sorts by magnitude: similar differences stand together,
and each block of zstd gets a code table that fits. "sparse" lists the words under a threshold separately, and gaps in
that list count small words only. At lr 1e-6, 2 % of the words are under the threshold and hold half of all changes.

numpy and zstd release the interpreter lock, so threads can code several regions at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

from swarm.broadcast.version.manifest import Codec, Dtype
from swarm.errors import ProtocolError
from swarm.wire import decompress

ENTROPY_ONLY = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, search_log=1, window_log=17
)
"""Huffman codes and runs, with hardly any search: chance matches among exponents cost more than they save, in size
(66.3 against 68.0 % for N(0, 0.02)) and in time (fourfold)."""

FULL_RATIO = 0.68  # Size of the full encoding of 16-bit weights relative to their bytes, measured for N(0, 0.02)
SEARCHING_LEVEL = 1  # For items that are not 16 bits wide: masks and tables repeat in ways that only a search finds
ANY_RATIO = 1e9  # Zero weights compress without bound; the caller's exact size is the cap

SUM_BLOCK_BYTES = 4 * 1024 * 1024
"""Bytes summed at a time: bincount widens each word to eight bytes, and an embedding may have a gigabyte."""

LENGTH_BYTES = 4
STORED = 1 << 31
"""The streams' lengths come before the streams, little-endian. This bit marks a stream that is not compressed."""

PLANED_DTYPES: frozenset[Dtype] = frozenset({"BF16", "F16", "I16"})

SPARSE_MAX_SHARE = 3 / 8
"""Share of changed words from which "dense" is smaller. A receiver takes no more, because it widens each position to
eight bytes."""

SMALL_MAX_SHARE = 1 / 8
"""Share of words under the threshold: finding them takes time in proportion, and more of them save little."""

SMALL_COST_BITS = 0.05  # What a small word must save to be worth its time
SAMPLE_WORDS = 8 * 1024  # About this many words are looked at to estimate a histogram

BLOCK_WORDS = 64 * 1024
"""Words taken at a time where temporaries are as large: they then stay in a core's cache, on pages in use."""

WORTH_EIGHTS = 4096
EIGHTS_MAX_SHARE = 0.57
"""If a tenth of a mask is set at random, this share of its groups of eight has a set bit. From a tenth on
np.flatnonzero itself does not branch."""

UNCHANGED = bytes(1)  # The whole encoding of a sparse region in which nothing changed, of any dtype
ESCAPE = 255  # As a gap: 255 words, and the gap goes on in the next byte
NIBBLE = 15

Buffer = bytes | bytearray | memoryview
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]
Mask = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Difference:
    """Which 16-bit words of two equally long regions differ: as a mask, and the positions in it."""

    mask: Mask
    at: Positions

    def within(self, start: int, nbytes: int) -> Positions:
        """Return the positions in a part of the regions that begins with a word, counted from its start."""
        first, last = np.searchsorted(self.at, [start // 2, (start + nbytes) // 2])
        return self.at[first:last] - start // 2


def difference(data: Buffer, base: Buffer) -> Difference:
    """Compare two regions."""
    flat, before = np.frombuffer(data, dtype=np.uint8), np.frombuffer(base, dtype=np.uint8)
    if before.nbytes != flat.nbytes:
        raise ValueError(f"the base of a region of {flat.nbytes} bytes has {before.nbytes}")
    mask = _words(flat) != _words(before)
    return Difference(mask, _where(mask))


def encode_region(
    data: Buffer, dtype: Dtype, base: Buffer | None = None, differs: Difference | None = None
) -> tuple[Codec, bytes]:
    """Return a codec for `data` and its encoding, never longer than `data`.

    `base` holds the bytes of the same region in the version before, equally many; without it no delta is made.
    `differs` says where the two differ, if that is known. The codec follows from how many words changed and from the
    entropy of a sample. Not all codecs are tried.
    """
    flat = np.frombuffer(data, dtype=np.uint8)
    if base is None:
        codec, encoded = _encode_full(flat, dtype)
    else:
        codec, encoded = _encode_delta(flat, dtype, base, differs or difference(data, base))
    return (codec, encoded) if len(encoded) < flat.nbytes else ("raw", flat.tobytes())


def decode_region(codec: Codec, encoded: Buffer, nbytes: int, dtype: Dtype, base: Buffer | None = None) -> Buffer:
    """Return the `nbytes` bytes of a region. Deltas and what is frozen need `base`, which is equally long and stays
    unchanged.

    Raise ProtocolError if `encoded` is not such an encoding. Bytes that decode may still differ from the learner's: the
    region's digest tells. Whatever `encoded` says, memory stays under 16 times `nbytes`.
    """
    if codec == "raw":
        if len(encoded) != nbytes:
            raise ProtocolError(f"a raw region has {len(encoded)} bytes instead of {nbytes}")
        return encoded
    if codec == "full":
        return _decode_full(memoryview(encoded), nbytes, dtype)
    if base is None or len(base) != nbytes:
        raise ProtocolError(f"a {codec} region of {nbytes} bytes came without the {nbytes} bytes of its base")
    if codec == "frozen":
        return base
    decoded = np.frombuffer(base, dtype=np.uint8).copy()
    words = _words(decoded)
    apply = _apply_dense if codec == "dense" else _apply_sparse
    apply(memoryview(encoded), words)
    return decoded.data


def decode_changes(encoded: Buffer, base: Buffer) -> tuple[Positions, Words]:
    """Return which 16-bit words of its base a sparse region changes, in no order, and what they become. Raise
    ProtocolError as `decode_region` does."""
    return _sparse_changes(memoryview(encoded), _words(np.frombuffer(base, dtype=np.uint8)))


# -- full ------------------------------------------------------------------------------------------------------


def _encode_full(flat: Bytes, dtype: Dtype) -> tuple[Codec, bytes]:
    if dtype not in PLANED_DTYPES or flat.nbytes % 2:
        return "full", _joined([_frame(flat, _CONTEXTS.searching)])
    words = _words(flat)
    planes = high, low = np.empty((2, words.size), dtype=np.uint8)
    for block in _blocks(words.size):
        rotated = _rotated(words[block])
        high[block], low[block] = rotated >> 8, rotated
    return "full", _joined([_frame(plane) for plane in planes])


def _decode_full(encoded: memoryview, nbytes: int, dtype: Dtype) -> Buffer:
    if dtype not in PLANED_DTYPES or nbytes % 2:
        (content,) = _split(encoded, 1)
        return _exactly(_plane(content, nbytes), nbytes).data
    high, low = (_exactly(_plane(stream, nbytes // 2), nbytes // 2) for stream in _split(encoded, 2))
    words = np.empty(nbytes // 2, dtype="<u2")
    for block in _blocks(words.size):
        rotated = high[block].astype(np.uint16) << np.uint16(8) | low[block]
        words[block] = rotated >> 1 | rotated << 15
    return words.view(np.uint8).data


def _rotated(words: Words) -> Words:
    """Move the sign behind the mantissa, so that bf16's exponent is the high byte."""
    return words << np.uint16(1) | words >> np.uint16(15)


# -- deltas ----------------------------------------------------------------------------------------------------


def _encode_delta(flat: Bytes, dtype: Dtype, base: Buffer, differs: Difference) -> tuple[Codec, bytes]:
    before = np.frombuffer(base, dtype=np.uint8)
    if flat.nbytes % 2 and flat[-1] != before[-1]:
        return _encode_full(flat, dtype)
    words, base_words = _words(flat), _words(before)
    if differs.at.size <= SPARSE_MAX_SHARE * words.size:
        return "sparse", _encode_sparse(words, base_words, differs)
    sample = _sample(words)
    # Sorting makes "dense" still smaller than this estimate.
    if _plane_bits(_zigzag(sample - _sample(base_words))) < _plane_bits(_rotated(sample)):
        return "dense", _encode_dense(words, base_words)
    return _encode_full(flat, dtype)


def _encode_dense(words: Words, base: Words) -> bytes:
    codes = _zigzag(words - base)[_by_magnitude(base)]
    return _joined([_frame(codes.astype(np.uint8)), _frame((codes >> 8).astype(np.uint8))])


def _apply_dense(encoded: memoryview, words: Words) -> None:
    low, high = (_exactly(_plane(stream, words.size), words.size) for stream in _split(encoded, 2))
    codes = low | high.astype(np.uint16) << np.uint16(8)
    words[_by_magnitude(words)] += _unzigzag(codes)


def _by_magnitude(base: Words) -> Positions:
    """Return the positions of all words, smallest magnitude first."""
    return np.argsort(_magnitudes(base), kind="stable")


def _magnitudes(words: Words) -> Bytes:
    """Return the exponent for bf16; for f16 the exponent and three bits of the mantissa."""
    return (words << 1 >> 8).astype(np.uint8)


def _sample(words: Words) -> Words:
    return words[:: words.size // SAMPLE_WORDS | 1]  # an odd step, because rows have round lengths


def _plane_bits(sample: Words) -> float:
    """Estimate from histograms how many bits a word takes in two planes, one of low and one of high bytes."""
    shares = [np.bincount(plane, minlength=256) / sample.size for plane in (sample & np.uint16(255), sample >> 8)]
    return -float(sum((share * np.log2(np.maximum(share, 1e-9))).sum() for share in shares))


# -- sparse ----------------------------------------------------------------------------------------------------


def _encode_sparse(words: Words, base: Words, differs: Difference) -> bytes:
    """Return the threshold (a byte), then five streams: the large words' gaps and codes in pairs of nibbles, the small
    words' gaps and codes a byte each, and what is too large for its nibble or byte. UNCHANGED if nothing did."""
    changed = differs.at
    if not changed.size:
        return UNCHANGED
    threshold = _threshold(base, changed)
    large = changed[np.flatnonzero(_magnitudes(base[changed]) >= threshold)]
    smalls = _small(base, threshold)
    ranks = _where(differs.mask[smalls])
    nibbles, large_rest = _capped(_codes(words, base, large), NIBBLE)
    octets, small_rest = _capped(_codes(words, base, smalls[ranks]), ESCAPE)
    rest = np.concatenate([large_rest, small_rest]).view(np.uint8)
    streams = [_gaps(large), _paired(nibbles), _gaps(ranks), octets, rest]
    return bytes([threshold]) + _joined([_frame(stream) for stream in streams])


def _apply_sparse(encoded: memoryview, words: Words) -> None:
    at, new = _sparse_changes(encoded, words)
    words[at] = new


def _sparse_changes(encoded: memoryview, words: Words) -> tuple[Positions, Words]:
    """Return which of the base's `words` change, in no order, and what they become."""
    if bytes(encoded[:2]) == UNCHANGED:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype="<u2")
    if not encoded:
        raise ProtocolError("a sparse region has no threshold")
    smalls = _small(words, encoded[0])
    most = int(SPARSE_MAX_SHARE * words.size)
    gaps = most + words.size // ESCAPE
    caps = (gaps, most, gaps, most, 2 * most)
    streams = [_plane(stream, cap) for stream, cap in zip(_split(encoded[1:], 5), caps, strict=True)]
    large_at, small_at = _positions(streams[0], words.size), smalls[_positions(streams[2], smalls.size)]
    nibbles, octets = _unpaired(streams[1], large_at.size), _exactly(streams[3], small_at.size)
    if streams[4].size % 2:
        raise ProtocolError("a sparse region has half a word too many")
    rest = streams[4].view("<u2")
    large_rest = np.count_nonzero(nibbles == NIBBLE)
    large_codes = _uncapped(nibbles, NIBBLE, rest[:large_rest])
    small_codes = _uncapped(octets, ESCAPE, rest[large_rest:])
    at = np.concatenate([large_at, small_at])
    return at, words[at] + np.concatenate([large_codes, small_codes])


def _threshold(base: Words, changed: Positions) -> int:
    """Return the magnitude under which words count as small, 0 to 255: where the gaps are estimated to be cheapest.

    c changes among n words need n*H(c/n) bits, where H is the binary entropy. Large words' gaps run over all words.
    """
    sample = _sample(base)
    words = base.size / sample.size * _below(sample)
    changes = _below(base[changed])
    bits = (
        _gap_bits(np.full(256, float(base.size)), changed.size - changes)
        + _gap_bits(words, changes)
        + SMALL_COST_BITS * words
    )
    return int(np.argmin(np.where(words <= SMALL_MAX_SHARE * base.size, bits, np.inf)))


def _below(words: Words) -> Floats:
    """Return how many of `words` have a magnitude under 0, 1, ... 255."""
    counts = np.bincount(_magnitudes(words), minlength=256)
    return (np.cumsum(counts) - counts).astype(float)


def _gap_bits(words: Floats, changed: Floats) -> Floats:
    return _x_log_x(words) - _x_log_x(changed) - _x_log_x(words - changed)


def _x_log_x(x: Floats) -> Floats:
    return x * np.log2(np.maximum(x, 1))


def _small(base: Words, threshold: int) -> Positions:
    """Return the positions of words with a magnitude under `threshold`."""
    mask = np.empty(base.size, dtype=np.bool_)
    for block in _blocks(base.size):
        np.less(base[block] + base[block], np.uint16(threshold << 8), out=mask[block])
    return _where(mask)


def _where(mask: Mask) -> Positions:
    """Do what np.flatnonzero does, in a third of the time for masks with few bits set. It looks at groups of eight
    first: of the bits it then looks at one by one at least an eighth is set, so no branch has to be guessed."""
    whole = mask.size // 8 * 8
    eights = mask[:whole].view(np.uint64) != 0
    found = _where(eights) if eights.size > WORTH_EIGHTS else np.flatnonzero(eights)
    if whole < mask.size or found.size > EIGHTS_MAX_SHARE * eights.size:
        return np.flatnonzero(mask)
    inside = np.flatnonzero(mask[:whole].view(np.uint64)[found].view(np.bool_))
    positions: Positions = (found[inside >> 3] << 3) + (inside & 7)
    return positions


def _gaps(positions: Positions) -> Bytes:
    """Return the number of words between each position and the one before. Positions ascend."""
    gaps = np.diff(positions, prepend=-1).astype(np.uint32) - np.uint32(1)
    escapes = gaps // np.uint32(ESCAPE)
    ends = np.cumsum(escapes, dtype=np.int64) + np.arange(gaps.size)
    stream = np.full(positions.size + int(escapes.sum()), ESCAPE, dtype=np.uint8)
    stream[ends] = gaps - escapes * np.uint32(ESCAPE)
    return stream


def _positions(gaps: Bytes, size: int) -> Positions:
    """Return the positions that `gaps` describe. They must be under `size`."""
    if gaps.size and gaps[-1] == ESCAPE:
        raise ProtocolError("a sparse region ends within a gap")
    ends = np.flatnonzero(gaps != ESCAPE)
    positions = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(ends.size)
    if ends.size and positions[-1] >= size:
        raise ProtocolError(f"a sparse region changes a word past its {size}")
    return positions


def _codes(words: Words, base: Words, at: Positions) -> Words:
    """Return small codes for small differences. No difference at `at` is 0, so code 0 stands for the next number."""
    return _zigzag(words[at] - base[at]) - np.uint16(1)


def _capped(codes: Words, cap: int) -> tuple[Bytes, Words]:
    """Cut codes at `cap`. Return them, and by how much each one that reached the cap exceeds it."""
    return np.minimum(codes, cap).astype(np.uint8), codes[codes >= cap] - np.uint16(cap)


def _uncapped(capped: Bytes, cap: int, rest: Words) -> Words:
    """Return the differences whose codes are `capped` and `rest`."""
    codes = capped.astype(np.uint16)
    escaped = np.flatnonzero(capped == cap)
    if escaped.size != rest.size:
        raise ProtocolError(f"a sparse region has {rest.size} large differences where it needs {escaped.size}")
    codes[escaped] += rest
    return _unzigzag(codes + np.uint16(1))


def _paired(nibbles: Bytes) -> Bytes:
    """Put two nibbles into a byte: coded alone, each would take at least a bit, and most have one of two values."""
    even = np.append(nibbles, np.uint8(0)) if nibbles.size % 2 else nibbles
    return even[0::2] | even[1::2] << np.uint8(4)


def _unpaired(pairs: Bytes, count: int) -> Bytes:
    _exactly(pairs, -(-count // 2))
    return np.stack([pairs & NIBBLE, pairs >> 4], axis=1).reshape(-1)[:count]


def _zigzag(differences: Words) -> Words:
    """Map 0, -1, 1, -2, ... to 0, 1, 2, 3, ..."""
    signed = differences.view(np.int16)
    return (signed << 1 ^ signed >> 15).view(np.uint16)


def _unzigzag(codes: Words) -> Words:
    one = np.uint16(1)
    return codes >> one ^ -(codes & one)


class _Contexts(threading.local):
    """One thread's compressors. Creating one takes longer than a small stream, and each serves one thread at a time."""

    def __init__(self) -> None:
        self.entropy_only = zstandard.ZstdCompressor(compression_params=ENTROPY_ONLY)
        self.searching = zstandard.ZstdCompressor(level=SEARCHING_LEVEL)


_CONTEXTS = _Contexts()


def _joined(streams: list[tuple[Buffer, bool]]) -> bytes:
    """Return the lengths of `streams`, with STORED set for those that are not compressed, and then the streams."""
    lengths = [len(content) | STORED * stored for content, stored in streams]
    return b"".join([np.array(lengths, dtype="<u4").tobytes(), *(content for content, _ in streams)])


def _split(encoded: memoryview, count: int) -> list[tuple[memoryview, bool]]:
    """Return the `count` streams of `encoded`, and which of them are stored."""
    at = count * LENGTH_BYTES
    if len(encoded) < at:
        raise ProtocolError(f"a region's encoding of {len(encoded)} bytes is shorter than its {count} lengths")
    streams = []
    for field in np.frombuffer(encoded[:at], dtype="<u4").tolist():
        end = at + (field & ~STORED)
        streams.append((encoded[at:end], field >= STORED))
        at = end
    if at != len(encoded):
        raise ProtocolError(f"a region's encoding has {len(encoded)} bytes where its lengths say {at}")
    return streams


def _frame(plane: Bytes, compressor: zstandard.ZstdCompressor | None = None) -> tuple[Buffer, bool]:
    """Return `plane` compressed, or as it is if that is not larger."""
    frame = (compressor or _CONTEXTS.entropy_only).compress(np.ascontiguousarray(plane).data)
    return (frame, False) if len(frame) < plane.size else (plane.tobytes(), True)


def _plane(stream: tuple[memoryview, bool], cap_bytes: int) -> Bytes:
    """Return the content of a stream, at most `cap_bytes`."""
    content, stored = stream
    if stored and len(content) > cap_bytes:
        raise ProtocolError(f"a region's stream has {len(content)} bytes where {cap_bytes} are possible")
    plain = content if stored else decompress(content, cap_bytes=cap_bytes, max_ratio=ANY_RATIO)
    return np.frombuffer(plain, dtype=np.uint8)


def _exactly(plane: Bytes, size: int) -> Bytes:
    if plane.size != size:
        raise ProtocolError(f"a region's stream has {plane.size} bytes instead of {size}")
    return plane


def _words(flat: Bytes) -> Words:
    """Return the little-endian 16-bit words of `flat`, without an odd last byte."""
    return flat[: flat.size // 2 * 2].view("<u2")


def _blocks(words: int) -> Iterator[slice]:
    return (slice(start, start + BLOCK_WORDS) for start in range(0, words, BLOCK_WORDS))


def tensor_sum(data: Buffer) -> int:
    """Return the sum modulo 2^64 of a fixed 64-bit mix of every 16-bit pattern in `data`, in whatever order.

    A bf16 tensor's sum survives fusing, transposing and sharding, and so does not notice permutations. Items of other
    widths count as their 16-bit words, an odd last byte as one more word.
    """
    flat = np.frombuffer(data, dtype=np.uint8)
    counts = np.zeros(1 << 16, dtype=np.uint64)
    for start in range(0, flat.size // 2 * 2, SUM_BLOCK_BYTES):
        words = flat[start : min(start + SUM_BLOCK_BYTES, flat.size // 2 * 2)].view("<u2")
        counts += np.bincount(words, minlength=1 << 16).astype(np.uint64)
    if flat.size % 2:
        counts[flat[-1]] += np.uint64(1)
    return int((counts * MIX).sum(dtype=np.uint64))


def sum_change(data: Buffer, base: Buffer, at: Positions) -> int:
    """Return by how much the `tensor_sum` of `data` exceeds that of `base`, which is equally long and differs in the
    words `at`, modulo 2^64."""
    after, before = np.frombuffer(data, dtype=np.uint8), np.frombuffer(base, dtype=np.uint8)
    new, old = _words(after), _words(before)
    change = int(MIX[new[at]].sum(dtype=np.uint64)) - int(MIX[old[at]].sum(dtype=np.uint64))
    if after.size % 2:
        change += int(MIX[after[-1]]) - int(MIX[before[-1]])
    return change % 2**64


def _mix_table() -> npt.NDArray[np.uint64]:
    """Apply splitmix64's finaliser to all 16-bit patterns (Steele, Lea, Flood 2014)."""
    z = (np.arange(1 << 16, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


MIX = _mix_table()
