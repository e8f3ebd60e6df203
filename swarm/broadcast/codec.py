"""Regions of weights to encodings and back, bit-exact, and the sums that prove what an engine holds.

A region is coded whole or as a delta against the same region of the version before. Deltas work on 16-bit words and
on the difference of their patterns modulo 2^16: for bf16 that is the distance in units in the last place (ULP), small
numbers for small steps, and it can be undone for every pair of patterns, NaN and sign crossings included.

  raw     the bytes themselves.
  full    two planes a frame each: exponents, which repeat, and sign with mantissa, which hardly do.
  sparse  few words changed: the gaps between them, and their differences.
  dense   many changed: every word's difference, smallest words of the base first.

One optimiser step moves all weights about equally far, so how many ULPs a word moves, if any, depends on its own
magnitude, which the receiver knows from the base. Hence "dense" sorts by it, so that like stands with like and each
block of zstd gets a code table that fits. "sparse" writes the words under a threshold as a list of their own: gaps
there count small words only. At lr 1e-6 2 % of the words are under it and hold half of all changes.

Every stream is a zstd frame of its own, for its own code table. numpy and zstd release the interpreter lock, so that
several regions are coded at a time by threads.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import zstandard

from swarm.broadcast.manifest import Codec, Dtype
from swarm.errors import ProtocolError
from swarm.wire import decompress

ENTROPY_ONLY = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, search_log=1, window_log=17
)
"""Huffman codes and runs, hardly any search: chance matches among exponents cost more than they save, in size (66.3
against 68.0 % for N(0, 0.02)) and in time (fourfold)."""

SEARCHING_LEVEL = 1
"""For items that are not 16 bits wide: masks and tables repeat in ways that only a search finds."""

ANY_RATIO = 1e9
"""Zero weights compress without bound; the caller's exact size is the cap."""

SUM_BLOCK_BYTES = 4 * 1024 * 1024
"""Words summed at a time: bincount widens them to eight bytes each, and an embedding may have a gigabyte."""

LENGTH_BYTES = 4
"""Before the streams stand their lengths, little-endian. The top bit is set where a stream is not compressed."""

STORED = 1 << 31

PLANED_DTYPES: frozenset[Dtype] = frozenset({"BF16", "F16", "I16"})

SPARSE_MAX_SHARE = 1 / 8
"""Changed words from which on "dense" is smaller (measured: docs of benchmarks/codec.py). A receiver takes no more,
so that a hostile encoding cannot make it widen more positions than that."""

SMALL_MAX_SHARE = 1 / 8
"""Words under the threshold: finding them costs time in proportion, and more of them save little."""

SAMPLE_STEP = 31
"""Every 31st word is looked at to estimate a histogram; odd, because rows have even lengths."""

BLOCK_WORDS = 32 * 1024
"""Words compared at a time: their temporaries stay in a core's cache, and malloc has them without new pages."""

ESCAPE = 255
"""As a gap: 255 words, and the gap goes on in the next byte."""

NIBBLE = 15

Buffer = bytes | bytearray | memoryview
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]
Mask = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.int64]


def encode_region(data: Buffer, dtype: Dtype, base: Buffer | None = None) -> tuple[Codec, bytes]:
    """A codec for `data` and its encoding, never longer than `data`.

    `base` are the bytes of the same region in the version before, of the same length; without it no delta is made.
    The codec is chosen by how many words changed and by the entropy of a sample, not by trying all.
    """
    flat = np.frombuffer(data, dtype=np.uint8)
    codec, encoded = _encode_delta(flat, dtype, base) if base is not None else _encode_full(flat, dtype)
    return (codec, encoded) if len(encoded) < flat.nbytes else ("raw", flat.tobytes())


def decode_region(codec: Codec, encoded: Buffer, nbytes: int, dtype: Dtype, base: Buffer | None = None) -> Buffer:
    """The `nbytes` bytes of a region; `base`, of as many bytes, is needed for deltas and never changed.

    ProtocolError if `encoded` is not such an encoding. Bytes that decode may still be others than the learner's: the
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
    decoded = np.frombuffer(base, dtype=np.uint8).copy()
    words = _words(decoded)
    if codec == "dense":
        _apply_dense(memoryview(encoded), words)
    else:
        _apply_sparse(memoryview(encoded), words)
    return decoded.data


# -- full ------------------------------------------------------------------------------------------------------


def _encode_full(flat: Bytes, dtype: Dtype) -> tuple[Codec, bytes]:
    if not _is_planed(flat.nbytes, dtype):
        return "full", _joined([_frame(flat, _CONTEXTS.searching)])
    words = _words(flat)
    rotated = words << 1 | words >> 15
    return "full", _joined([_frame((rotated >> 8).astype(np.uint8)), _frame(rotated.astype(np.uint8))])


def _decode_full(encoded: memoryview, nbytes: int, dtype: Dtype) -> Buffer:
    if not _is_planed(nbytes, dtype):
        (content,) = _split(encoded, 1)
        return _exactly(_plane(content, nbytes), nbytes).data
    high, low = (_exactly(_plane(stream, nbytes // 2), nbytes // 2) for stream in _split(encoded, 2))
    rotated = np.empty(nbytes // 2, dtype="<u2")
    rotated.view(np.uint8)[0::2] = low
    rotated.view(np.uint8)[1::2] = high
    return (rotated >> 1 | rotated << 15).view(np.uint8).data


def _is_planed(nbytes: int, dtype: Dtype) -> bool:
    return dtype in PLANED_DTYPES and nbytes % 2 == 0


# -- deltas ----------------------------------------------------------------------------------------------------


def _encode_delta(flat: Bytes, dtype: Dtype, base: Buffer) -> tuple[Codec, bytes]:
    before = np.frombuffer(base, dtype=np.uint8)
    if before.nbytes != flat.nbytes:
        raise ValueError(f"the base of a region of {flat.nbytes} bytes has {before.nbytes}")
    if flat.nbytes % 2 and flat[-1] != before[-1]:
        return _encode_full(flat, dtype)
    words, base_words = _words(flat), _words(before)
    changed = _changed(words, base_words, most=int(SPARSE_MAX_SHARE * words.size))
    if changed is not None:
        return "sparse", _encode_sparse(words, base_words, changed)
    if _dense_bits(words, base_words) < _full_bits(words):
        return "dense", _encode_dense(words, base_words)
    return _encode_full(flat, dtype)


def _changed(words: Words, base: Words, *, most: int) -> Positions | None:
    """Where `words` differ from `base`; None if in more than `most` places."""
    found, count = [], 0
    for start in range(0, words.size, BLOCK_WORDS):
        block = slice(start, start + BLOCK_WORDS)
        found.append(start + _where(words[block] != base[block]))
        count += found[-1].size
        if count > most:
            return None
    return np.concatenate(found)


def _encode_dense(words: Words, base: Words) -> bytes:
    codes = _zigzag(words - base)[_by_magnitude(base)]
    return _joined([_frame(codes.astype(np.uint8)), _frame((codes >> 8).astype(np.uint8))])


def _apply_dense(encoded: memoryview, words: Words) -> None:
    low, high = (_exactly(_plane(stream, words.size), words.size) for stream in _split(encoded, 2))
    codes = low | high.astype(np.uint16) << np.uint16(8)
    words[_by_magnitude(words)] += _unzigzag(codes)


def _by_magnitude(base: Words) -> Positions:
    """Positions of all words, those of the smallest magnitude first. Eight bits tell bf16's exponents apart."""
    return np.argsort(_magnitudes(base), kind="stable")


def _magnitudes(words: Words) -> Bytes:
    """For bf16 the exponent; for f16 the exponent and three bits of the mantissa."""
    return (words << 1 >> 8).astype(np.uint8)


# -- sparse ----------------------------------------------------------------------------------------------------


def _encode_sparse(words: Words, base: Words, changed: Positions) -> bytes:
    """The threshold (a byte), then five streams: of the large words the gaps and codes in pairs of nibbles, of the
    small ones the gaps and codes a byte each, and what is too large for its nibble or byte. Only the threshold if
    nothing changed."""
    if not changed.size:
        return bytes(1)
    threshold = _threshold(base, changed)
    is_small = _magnitudes(base[changed]) < threshold
    large, smalls = changed[~is_small], _small(base, threshold)
    ranks = _where(words[smalls] != base[smalls])
    nibbles, large_rest = _capped(_codes(words, base, large), NIBBLE)
    octets, small_rest = _capped(_codes(words, base, smalls[ranks]), ESCAPE)
    rest = np.concatenate([large_rest, small_rest]).view(np.uint8)
    streams = [_gaps(large), _paired(nibbles), _gaps(ranks), octets, rest]
    return bytes([threshold]) + _joined([_frame(stream) for stream in streams])


def _apply_sparse(encoded: memoryview, words: Words) -> None:
    if len(encoded) == 1 and encoded[0] == 0:
        return
    if not encoded:
        raise ProtocolError("a sparse region has no threshold")
    smalls = _small(words, encoded[0])
    cap = int(SPARSE_MAX_SHARE * words.size)
    streams = [_plane(stream, 2 * cap) for stream in _split(encoded[1:], 5)]
    large_at, small_at = _positions(streams[0], words.size), smalls[_positions(streams[2], smalls.size)]
    nibbles, octets = _unpaired(streams[1], large_at.size), _exactly(streams[3], small_at.size)
    if streams[4].size % 2:
        raise ProtocolError("a sparse region has half a word too many")
    rest = streams[4].view("<u2")
    large_rest = np.count_nonzero(nibbles == NIBBLE)
    large_codes = _uncapped(nibbles, NIBBLE, rest[:large_rest])
    small_codes = _uncapped(octets, ESCAPE, rest[large_rest:])
    words[large_at] += large_codes
    words[small_at] += small_codes


def _threshold(base: Words, changed: Positions) -> int:
    """The magnitude under which words count as small: 0 to 255, where gaps are estimated to be cheapest.

    n words of which c changed need n*H(c/n) bits, H being the binary entropy; the large ones' gaps run over all words.
    """
    all_words = SAMPLE_STEP * np.cumsum(np.bincount(_magnitudes(base[::SAMPLE_STEP]), minlength=256)).astype(float)
    changes = np.cumsum(np.bincount(_magnitudes(base[changed]), minlength=256)).astype(float)
    all_words, changes = np.insert(all_words, 0, 0)[:256], np.insert(changes, 0, 0)[:256]
    bits = _gap_bits(base.size, changed.size - changes) + _gap_bits(all_words, changes)
    return int(np.argmin(np.where(all_words <= SMALL_MAX_SHARE * base.size, bits, np.inf)))


def _gap_bits(words: npt.ArrayLike, changed: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """words * H(changed / words): what positions need at least."""
    words, changed = np.asarray(words, dtype=float), np.asarray(changed, dtype=float)
    same = np.maximum(words - changed, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = changed * np.log2(words / changed) + same * np.log2(words / same)
    return np.where((changed > 0) & (same > 0), bits, 0.0)


def _small(base: Words, threshold: int) -> Positions:
    """Where the magnitude is under `threshold`."""
    limit = np.uint16(threshold << 8)
    starts = range(0, base.size, BLOCK_WORDS)
    return np.concatenate([start + _where(base[start : start + BLOCK_WORDS] << 1 < limit) for start in starts])


def _where(mask: Mask) -> Positions:
    """np.flatnonzero, up to three times as fast where few are set: looks at eight at a time first."""
    whole = mask.size // 8 * 8
    eights = np.flatnonzero(mask[:whole].view(np.uint64) != 0)
    if whole < mask.size or 4 * eights.size > mask.size // 8:
        return np.flatnonzero(mask)
    inside = np.flatnonzero(mask.reshape(-1, 8)[eights])
    found: Positions = (eights[inside >> 3] << 3) + (inside & 7)
    return found


# -- streams ---------------------------------------------------------------------------------------------------


def _gaps(positions: Positions) -> Bytes:
    """Ascending positions as the number of words between each and the one before."""
    gaps = np.diff(positions, prepend=-1) - 1
    escapes = (gaps // ESCAPE).astype(np.uint32)
    ends = np.cumsum(escapes + 1) - 1
    stream = np.full(int(ends[-1]) + 1 if ends.size else 0, ESCAPE, dtype=np.uint8)
    stream[ends] = gaps - escapes * ESCAPE
    return stream


def _positions(gaps: Bytes, size: int) -> Positions:
    """The positions under `size` that `gaps` tell."""
    if gaps.size and gaps[-1] == ESCAPE:
        raise ProtocolError("a sparse region ends within a gap")
    ends = np.flatnonzero(gaps != ESCAPE)
    positions = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(ends.size)
    if ends.size and positions[-1] >= size:
        raise ProtocolError(f"a sparse region changes a word past its {size}")
    return positions


def _codes(words: Words, base: Words, at: Positions) -> Words:
    """Small numbers for small differences at places that differ: none is 0, so codes begin there."""
    return _zigzag(words[at] - base[at]) - np.uint16(1)


def _capped(codes: Words, cap: int) -> tuple[Bytes, Words]:
    """Codes of at most `cap`, and how much the others are over it."""
    return np.minimum(codes, cap).astype(np.uint8), codes[codes >= cap] - np.uint16(cap)


def _uncapped(capped: Bytes, cap: int, rest: Words) -> Words:
    """The differences whose codes are `capped` and `rest`."""
    codes = capped.astype(np.uint16)
    escaped = np.flatnonzero(capped == cap)
    if escaped.size != rest.size:
        raise ProtocolError(f"a sparse region has {rest.size} large differences where it needs {escaped.size}")
    codes[escaped] += rest
    return _unzigzag(codes + np.uint16(1))


def _paired(nibbles: Bytes) -> Bytes:
    """Two to a byte: one would be coded in at least a bit each, and most are one of two."""
    even = np.append(nibbles, np.uint8(0)) if nibbles.size % 2 else nibbles
    return even[0::2] | even[1::2] << np.uint8(4)


def _unpaired(pairs: Bytes, count: int) -> Bytes:
    _exactly(pairs, -(-count // 2))
    return np.stack([pairs & NIBBLE, pairs >> 4], axis=1).reshape(-1)[:count]


def _zigzag(differences: Words) -> Words:
    """0, -1, 1, -2, ... to 0, 1, 2, 3, ..."""
    signed = differences.view(np.int16)
    return (signed << 1 ^ signed >> 15).view(np.uint16)


def _unzigzag(codes: Words) -> Words:
    one = np.uint16(1)
    return codes >> one ^ -(codes & one)


# -- estimates -------------------------------------------------------------------------------------------------


def _dense_bits(words: Words, base: Words) -> float:
    """Bits a word of "dense", at most: sorting saves more."""
    codes = _zigzag(words[::SAMPLE_STEP] - base[::SAMPLE_STEP])
    return _entropy(codes & 0xFF) + _entropy(codes >> 8)


def _full_bits(words: Words) -> float:
    sample = words[::SAMPLE_STEP]
    rotated = sample << 1 | sample >> 15
    return _entropy(rotated & 0xFF) + _entropy(rotated >> 8)


def _entropy(values: npt.NDArray[np.integer]) -> float:
    """Bits a value, by their histogram."""
    counts = np.bincount(values)
    shares = counts[counts > 0] / values.size
    return float(-(shares * np.log2(shares)).sum())


# -- frames ----------------------------------------------------------------------------------------------------


class _Contexts(threading.local):
    """Compressors of one thread: making one takes longer than a small stream, and one serves one thread at a time."""

    def __init__(self) -> None:
        self.entropy_only = zstandard.ZstdCompressor(compression_params=ENTROPY_ONLY)
        self.searching = zstandard.ZstdCompressor(level=SEARCHING_LEVEL)


_CONTEXTS = _Contexts()


def _joined(streams: list[tuple[Buffer, bool]]) -> bytes:
    """The lengths of `streams`, STORED set where one is not compressed, and the streams."""
    lengths = [len(content) | STORED * stored for content, stored in streams]
    return b"".join([np.array(lengths, dtype="<u4").tobytes(), *(content for content, _ in streams)])


def _split(encoded: memoryview, count: int) -> list[tuple[memoryview, bool]]:
    """The `count` streams of `encoded` and which are stored."""
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
    """`plane` compressed, or as it is where that is not smaller."""
    frame = (compressor or _CONTEXTS.entropy_only).compress(np.ascontiguousarray(plane).data)
    return (frame, False) if len(frame) < plane.size else (plane.tobytes(), True)


def _plane(stream: tuple[memoryview, bool], cap_bytes: int) -> Bytes:
    """What a stream holds, at most `cap_bytes`."""
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
    """The little-endian 16-bit words of `flat`, without an odd last byte."""
    return flat[: flat.size // 2 * 2].view("<u2")


# -- sums ------------------------------------------------------------------------------------------------------


def tensor_sum(data: Buffer) -> int:
    """Sum modulo 2^64 of a fixed 64-bit mix of every 16-bit pattern of `data`, whatever the order of its items.

    A bf16 tensor's sum survives fusing, transposing and sharding; it is blind to permutations. Items of other
    widths count as their 16-bit words; an odd last byte as a word of its own.
    """
    flat = np.frombuffer(data, dtype=np.uint8)
    counts = np.zeros(1 << 16, dtype=np.uint64)
    for start in range(0, flat.size // 2 * 2, SUM_BLOCK_BYTES):
        words = flat[start : min(start + SUM_BLOCK_BYTES, flat.size // 2 * 2)].view("<u2")
        counts += np.bincount(words, minlength=1 << 16).astype(np.uint64)
    if flat.size % 2:
        counts[flat[-1]] += np.uint64(1)
    return int((counts * _MIX).sum(dtype=np.uint64))


def _mix_table() -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser over all 16-bit patterns (Steele, Lea, Flood 2014)."""
    z = (np.arange(1 << 16, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


_MIX = _mix_table()
