"""Size and speed of the codec: full weights and the delta of one Adam step, bf16.

bin/python -m benchmarks.codec --json

Weights are N(0, 0.02) in float32, their bf16 casts are what is sent. A step moves each master weight by
lr * m / (sqrt(v) + eps), where m and v have settled over gradients N(0, s) with s log-normal over the weights; its
delta is coded against the cast from before the step. Speeds are MB (10^6 bytes) of raw bf16 per second of CPU time, one
region after another on one core: the median of the repeats, after one that is not counted. Every region is compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmarks import Figures, ended, parser_of, said
from benchmarks.payload import WEIGHT_SD, to_bf16
from swarm.broadcast.version.codec import decode_region, encode_region

LEARNING_RATES = ("1e-6", "3e-6", "1e-5", "1e-3")
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8
SETTLING_STEPS = 50  # After these m / sqrt(v) is spread as it stays
BLOCK = 1 << 20  # Weights simulated at a time: their gradients and moments stay small whatever the size

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint16]
Case = tuple[str, list[bytes], list[bytes] | None]  # A name, the regions, and those of the base if it is a delta


def normal(count: int, rng: np.random.Generator) -> Floats:
    return rng.standard_normal(count, dtype=np.float32)


def adam_direction(count: int, rng: np.random.Generator) -> Floats:
    """What a step at learning rate 1 adds."""
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
        masters, direction = np.float32(WEIGHT_SD) * normal(count, rng), adam_direction(count, rng)
        stages["full"].append(to_bf16(masters))
        for rate in LEARNING_RATES:
            stages[rate].append(to_bf16(masters - np.float32(rate) * direction))
    streams = {name: np.concatenate(blocks).tobytes() for name, blocks in stages.items()}
    regions = {
        name: [stream[at : at + region_bytes] for at in range(0, nbytes, region_bytes)]
        for name, stream in streams.items()
    }
    return [(name, of, None if name == "full" else regions["full"]) for name, of in regions.items()]


def measure(case: Case, repeat: int) -> Figures:
    """RuntimeError if what is decoded is not what was encoded."""
    name, regions, bases = case
    before: Sequence[bytes | None] = bases or [None] * len(regions)
    nbytes, chosen, encode_s, decode_s, size = sum(map(len, regions)), set[str](), list[float](), list[float](), 0
    for _ in range(repeat + 1):
        encode_s.append(0.0)
        decode_s.append(0.0)
        size = 0
        for region, base in zip(regions, before, strict=True):
            start = time.process_time()
            codec, encoded = encode_region(region, "BF16", base)
            between = time.process_time()
            decoded = decode_region(codec, encoded, len(region), "BF16", base)
            decode_s[-1] += time.process_time() - between
            encode_s[-1] += between - start
            size += len(encoded)
            chosen.add(codec)
            if bytes(decoded) != region:
                raise RuntimeError(f"the codec does not give back what it was given for {name}")
    return {
        "case": name,
        "ratio": size / nbytes,
        "encode_mb_s": nbytes / 1e6 / statistics.median(encode_s[1:]),
        "decode_mb_s": nbytes / 1e6 / statistics.median(decode_s[1:]),
        "codecs": sorted(chosen),
    }


def run(nbytes: int, region_bytes: int, repeat: int, seed: int) -> Figures:
    found = {case[0]: said(measure(case, repeat)) for case in cases(nbytes, region_bytes, seed)}
    return {
        "full_ratio": round(found["full"]["ratio"], 5),
        "delta_ratio": {rate: round(found[rate]["ratio"], 6) for rate in LEARNING_RATES},
        **{speed: {name: round(one[speed]) for name, one in found.items()} for speed in ("encode_mb_s", "decode_mb_s")},
        "codecs": {name: one["codecs"] for name, one in found.items()},
        "region_bytes": region_bytes,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--size-mib", type=int, default=16, help="of weights, in bf16")
    parser.add_argument("--region-kib", type=int, default=1024, help="64 to 4096, as the model's size has it")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    ended(options, run(options.size_mib << 20, options.region_kib << 10, options.repeat, seed=1))


if __name__ == "__main__":
    main()
