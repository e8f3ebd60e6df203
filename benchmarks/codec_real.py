"""The size of real deltas: `python -m benchmarks.codec --real PATH...`, over versions of one model in bf16.

A PATH is a model's directory, a .safetensors file, a file of bf16 words and nothing else (such as a weight map), or a
directory of such, which are taken in the order of the numbers in their names. Each is compared with the one before.

    echo-node        the codec of this repository, in regions of the size that the model has in a run
    PULSE            as in 2602.03839 and grail: per tensor rows and columns of what changed, each as the distance
                     to the one before in the narrowest integers that hold it, and the new values; zstd-1 over all
    TRL              a sparse safetensors file as in TRL's pull request 5937 (not in 1.16): per tensor int32 positions
                     and new values, without compression

PULSE and TRL are written here after their descriptions, without their headers. Every region of ours is decoded and
compared. What stands beside a delta (chunk table, names of tensors) is counted for none of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from swarm.broadcast.version.codec import decode_region, encode_region
from swarm.broadcast.version.manifest import region_bytes

Words = npt.NDArray[np.uint16]
Weights = dict[str, Words]
"""Tensors by name, as rows of 16-bit words."""


def versions_in(paths: Sequence[Path]) -> list[Path]:
    """The versions that are named, or those in the one directory that is."""
    if len(paths) != 1 or not paths[0].is_dir() or _weight_files(paths[0]):
        return list(paths)
    found = [one for one in paths[0].iterdir() if one.is_file() or _weight_files(one)]
    return sorted(found, key=lambda one: [int(number) for number in re.findall(r"\d+", one.name)])


def read_weights(path: Path) -> Weights:
    """The tensors of a version. SystemExit for one that is not in bf16."""
    files = _weight_files(path) if path.is_dir() else [path]
    found = {name: words for file in files for name, words in _tensors(file)}
    if not found:
        raise SystemExit(f"{path} holds no .safetensors file")
    return found


def _weight_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else []


def _tensors(file: Path) -> Iterator[tuple[str, Words]]:
    if file.suffix != ".safetensors":
        yield "weights", np.fromfile(file, dtype="<u2").reshape(1, -1)
        return
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items()):
        if entry["dtype"] != "BF16":
            raise SystemExit(f"{file}: {name} is {entry['dtype']}, and only BF16 is compared here")
        start, end = entry["data_offsets"]
        words = np.memmap(file, dtype="<u2", mode="r", offset=8 + size + start, shape=((end - start) // 2,))
        yield name, words.reshape(-1, entry["shape"][-1] if entry["shape"] else 1)


# -- three forms of a delta --------------------------------------------------------------------------------------


def ours(base: Weights, new: Weights) -> int:
    """Bytes of the encoded regions."""
    before, after = (np.concatenate([one[name].ravel() for name in new]).tobytes() for one in (base, new))
    size, total = region_bytes(len(after)), 0
    for at in range(0, len(after), size):
        region, old = after[at : at + size], before[at : at + size]
        codec, encoded = encode_region(region, "BF16", old)
        if bytes(decode_region(codec, encoded, len(region), "BF16", old)) != region:
            raise RuntimeError("the codec does not give back what it was given")
        total += len(encoded)
    return total


def pulse(base: Weights, new: Weights) -> int:
    """Bytes of the compressed coordinates and values."""
    parts = []
    for name, words in new.items():
        rows, columns = np.nonzero(words != base[name])
        row_steps = np.diff(rows, prepend=0)
        # A column counts from the one before in its row, and from 0 in a new row.
        column_steps = np.where(row_steps > 0, columns, np.diff(columns, prepend=0))
        parts += [_narrowest(row_steps), _narrowest(column_steps), words[rows, columns].tobytes()]
    return len(zstandard.ZstdCompressor(level=1).compress(b"".join(parts)))


def _narrowest(steps: npt.NDArray[np.int64]) -> bytes:
    return steps.astype(np.min_scalar_type(int(steps.max(initial=0)))).tobytes()


def trl(base: Weights, new: Weights) -> int:
    """Bytes of positions and values."""
    return (4 + 2) * changed(base, new)


def changed(base: Weights, new: Weights) -> int:
    return sum(int(np.count_nonzero(words != base[name])) for name, words in new.items())


FORMS = {"echo-node": ours, "PULSE": pulse, "TRL": trl}


def run(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """A row for each version after the first, which is also printed. SystemExit if there are fewer than two, or they
    are not of one model."""
    versions, rows = versions_in(paths), list[dict[str, Any]]()
    if len(versions) < 2:
        raise SystemExit("--real compares versions: name two or more, or a directory that holds them")
    for first, second in pairwise(versions):
        base, new = read_weights(first), read_weights(second)
        if {name: words.shape for name, words in base.items()} != {name: words.shape for name, words in new.items()}:
            raise SystemExit(f"{first} and {second} are not versions of one model")
        raw = sum(words.nbytes for words in new.values())
        sizes = {name: form(base, new) for name, form in FORMS.items()}
        rows.append({"from": first.name, "to": second.name, "raw_bytes": raw, **sizes, "changed": changed(base, new)})
        shown = ", ".join(f"{name} {size:,} ({100 * size / raw:.3f} %)" for name, size in sizes.items())
        ratio = sizes["echo-node"] / max(1, min(sizes["PULSE"], sizes["TRL"]))
        print(f"{second.name}: {200 * rows[-1]['changed'] / raw:.2f} % changed; {shown}; {ratio:.2f} of the smaller")
    return rows
