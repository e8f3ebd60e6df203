"""Size and speed of the codec and of others: full weights and the delta of one Adam step, bf16.

bin/python -m benchmarks.codec --json
bin/python -m benchmarks.codec --real DIR --json    # versions of a real model: benchmarks/codec_real.py

Weights are N(0, 0.02) in float32, their bf16 casts are what is sent. A step moves each master weight by
lr * m / (sqrt(v) + eps), where m and v have settled over gradients N(0, s) with s log-normal over the weights; its
delta is coded against the cast from before the step. For a delta the other codecs get the XOR of the two casts, and
the XOR is part of their time. All of them encode and decode the same regions one after another, on one core.

Speeds are MB (10^6 bytes) of raw bf16 per second of CPU time: the median of the repeats, after one that is not counted.
Every decoded region is compared with what was encoded. zipnn and blosc2 are absent from the result where not installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from benchmarks import codec_real
from benchmarks.payload import to_bf16
from swarm.broadcast.version.codec import decode_region, encode_region
from swarm.broadcast.version.manifest import Codec

LEARNING_RATES = ("1e-6", "3e-6", "1e-5", "1e-3")

WEIGHT_STD = 0.02
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8
SETTLING_STEPS = 50
"""After these m / sqrt(v) is spread as it stays: about 0.23, which is sqrt((1 - BETA_1) / (1 + BETA_1))."""

BLOCK = 1 << 20
"""Weights simulated at a time: their gradients and moments stay small whatever the size."""

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint16]
Encoded = Any
Case = tuple[str, list[bytes], list[bytes] | None]
"""A name, the regions, and those of the base if it is a delta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A codec. Neither function may keep or change what it is given, but zipnn's encode overwrites `data`."""

    name: str
    encode: Callable[[bytearray, bytes | None], Encoded]
    decode: Callable[[Encoded, int, bytes | None], Any]
    size: Callable[[Encoded], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    ratio: float
    encode_mb_s: float
    decode_mb_s: float


# -- weights ---------------------------------------------------------------------------------------------------


def normal(count: int, rng: np.random.Generator) -> Floats:
    return rng.standard_normal(count, dtype=np.float32)


def adam_direction(count: int, rng: np.random.Generator) -> Floats:
    """m / (sqrt(v) + eps) after SETTLING_STEPS, bias corrected: the update of a step at learning rate 1."""
    scale = np.exp(normal(count, rng))
    m, v = np.zeros(count, dtype=np.float32), np.zeros(count, dtype=np.float32)
    for _ in range(SETTLING_STEPS):
        gradient = scale * normal(count, rng)
        m = np.float32(BETA_1) * m + np.float32(1 - BETA_1) * gradient
        v = np.float32(BETA_2) * v + np.float32(1 - BETA_2) * gradient * gradient
    m /= 1 - BETA_1**SETTLING_STEPS
    v /= 1 - BETA_2**SETTLING_STEPS
    return (m / (np.sqrt(v) + np.float32(EPSILON))).astype(np.float32)


def cases(nbytes: int, region_bytes: int, seed: int) -> list[Case]:
    """Full weights, and for each learning rate the weights one step later with the first as base."""
    rng = np.random.default_rng(seed)
    stages: dict[str, list[Words]] = {name: [] for name in ("full", *LEARNING_RATES)}
    for start in range(0, nbytes // 2, BLOCK):
        count = min(BLOCK, nbytes // 2 - start)
        masters = np.float32(WEIGHT_STD) * normal(count, rng)
        direction = adam_direction(count, rng)
        stages["full"].append(to_bf16(masters))
        for rate in LEARNING_RATES:
            stages[rate].append(to_bf16(masters - np.float32(rate) * direction))
    streams = {name: np.concatenate(blocks) for name, blocks in stages.items()}
    for rate in LEARNING_RATES:
        changed = np.count_nonzero(streams[rate] != streams["full"]) / streams["full"].size
        print(f"lr {rate}: one step changes {100 * changed:.2f} % of the weights", flush=True)
    regions = {name: cut(stream.tobytes(), region_bytes) for name, stream in streams.items()}
    return [(name, of, None if name == "full" else regions["full"]) for name, of in regions.items()]


def cut(stream: bytes, size: int) -> list[bytes]:
    return [stream[at : at + size] for at in range(0, len(stream), size)]


# -- contenders ------------------------------------------------------------------------------------------------


def ours(codecs: Counter[Codec]) -> Contender:
    """The codec of this repository; counts in `codecs` which ones it chose."""

    def encode(data: bytearray, base: bytes | None) -> Encoded:
        codec, encoded = encode_region(data, "BF16", base)
        codecs[codec] += 1
        return codec, encoded

    return Contender(
        name="echo-node",
        encode=encode,
        decode=lambda encoded, nbytes, base: decode_region(encoded[0], encoded[1], nbytes, "BF16", base),
        size=lambda encoded: len(encoded[1]),
    )


def plain_zstd() -> Contender:
    pack, unpack = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    return Contender(
        name="zstd-1",
        encode=lambda data, base: pack.compress(xor(data, base)),
        decode=lambda frame, _, base: xor(unpack.decompress(frame), base),
        size=len,
    )


def planes_zstd() -> Contender:
    pack, unpack = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def encode(data: bytearray, base: bytes | None) -> Encoded:
        flat = np.frombuffer(xor(data, base), dtype=np.uint8)
        return [pack.compress(np.ascontiguousarray(flat[plane::2]).data) for plane in (0, 1)]

    def decode(frames: Encoded, nbytes: int, base: bytes | None) -> Any:
        flat = np.empty(nbytes, dtype=np.uint8)
        for plane in (0, 1):
            flat[plane::2] = np.frombuffer(unpack.decompress(frames[plane]), dtype=np.uint8)
        return xor(flat.data, base)

    return Contender(
        name="planes + zstd-1", encode=encode, decode=decode, size=lambda frames: sum(len(frame) for frame in frames)
    )


def zipnn() -> Contender:
    codec = importlib.import_module("zipnn").ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)
    return Contender(
        name="zipnn",
        encode=lambda data, base: codec.compress(xor(data, base)),
        decode=lambda packed, _, base: xor(codec.decompress(packed), base),
        size=len,
    )


def blosc2() -> Contender:
    library = importlib.import_module("blosc2")
    library.set_nthreads(1)
    options = {"typesize": 2, "clevel": 1, "filter": library.Filter.SHUFFLE, "codec": library.Codec.ZSTD}
    return Contender(
        name="blosc2 shuffle, zstd-1",
        encode=lambda data, base: library.compress(bytes(xor(data, base)), **options),
        decode=lambda packed, _, base: xor(library.decompress(packed), base),
        size=len,
    )


def xor(data: Any, base: bytes | None) -> Any:
    """`data` with `base` removed or put back; itself without a base."""
    if base is None:
        return data
    return bytearray((np.frombuffer(data, dtype=np.uint64) ^ np.frombuffer(base, dtype=np.uint64)).data)


def peers() -> list[Contender]:
    found = [plain_zstd(), planes_zstd()]
    for name, contender in (("zipnn", zipnn), ("blosc2", blosc2)):
        if importlib.util.find_spec(name):
            found.append(contender())
        else:
            print(f"{name} is not installed and not compared (pip install {name})", flush=True)
    return found


# -- measuring -------------------------------------------------------------------------------------------------


def measure(contender: Contender, case: Case, repeat: int) -> Figure:
    """The figures of one codec for one case. RuntimeError if what is decoded is not what was encoded."""
    name, regions, bases = case
    nbytes = sum(map(len, regions))
    before: Sequence[bytes | None] = bases or [None] * len(regions)
    encode_s, decode_s, size = [], [], 0
    for _ in range(repeat + 1):
        encode_s.append(0.0)
        decode_s.append(0.0)
        size = 0
        for region, base in zip(regions, before, strict=True):
            copy = bytearray(region)
            start = time.process_time()
            encoded = contender.encode(copy, base)
            between = time.process_time()
            decoded = contender.decode(encoded, len(region), base)
            decode_s[-1] += time.process_time() - between
            encode_s[-1] += between - start
            size += contender.size(encoded)
            if bytes(decoded) != region:
                raise RuntimeError(f"{contender.name} does not give back what it was given for {name}")
    return Figure(
        ratio=size / nbytes,
        encode_mb_s=nbytes / 1e6 / statistics.median(encode_s[1:]),
        decode_mb_s=nbytes / 1e6 / statistics.median(decode_s[1:]),
    )


def summary(figures: dict[str, Figure]) -> dict[str, Any]:
    """The keys of one codec; those of the speeds are "full" and the learning rates."""
    return {
        "full_ratio": round(figures["full"].ratio, 5),
        "delta_ratio": {rate: round(figures[rate].ratio, 6) for rate in LEARNING_RATES},
        "encode_mb_s": {case: round(figure.encode_mb_s) for case, figure in figures.items()},
        "decode_mb_s": {case: round(figure.decode_mb_s) for case, figure in figures.items()},
    }


def run(nbytes: int, region_bytes: int, repeat: int, seed: int) -> dict[str, Any]:
    codecs: dict[str, list[str]] = {}
    rows: dict[str, dict[str, Figure]] = {}
    chosen: Counter[Codec] = Counter()
    contenders = [ours(chosen), *peers()]
    for case in cases(nbytes, region_bytes, seed):
        chosen.clear()
        for contender in contenders:
            figure = measure(contender, case, repeat)
            rows.setdefault(contender.name, {})[case[0]] = figure
            print(json.dumps({"case": case[0], "codec": contender.name, **asdict(figure)}), flush=True)
        codecs[case[0]] = sorted(chosen)
    own, *others = (contender.name for contender in contenders)
    return {
        **summary(rows[own]),
        "codecs": codecs,
        "region_bytes": region_bytes,
        "peers": {name: summary(rows[name]) for name in others},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mib", type=int, default=16, help="of weights, in bf16")
    parser.add_argument("--region-kib", type=int, default=1024, help="64 to 4096, as the model's size has it")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--real", type=Path, nargs="+", metavar="PATH", help="versions of a model in bf16, or where")
    options = parser.parse_args()
    figures: Any
    if options.real:
        figures = codec_real.run(options.real)
    else:
        figures = run(options.size_mib << 20, options.region_kib << 10, options.repeat, seed=1)
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
