"""A run's model as a clean Hugging Face directory: what anybody loads, without what only the trainer needs. Blocking.

Files are copied, never linked: who edits the copy must not change the checkpoint that the run goes on from. Each is
hashed on its way, so that a checkpoint which is torn, or is removed meanwhile by the run that made it, gives nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
from blake3 import blake3

from swarm.errors import UserError
from swarm.learner.checkpoints import (
    BLOCK_BYTES,
    DIGESTS,
    Checkpoint,
    FileDigest,
    checkpoint_path,
    read_digests,
    whole_checkpoints,
)

CONFIG = "config.json"
CARD = "README.md"
WEIGHTS = "*.safetensors"
INDEX = "model.safetensors.index.json"
PARTIAL = ".partial"

OF_THE_TRAINER = ("trainer", DIGESTS)
"""How names begin of what belongs to the run alone."""

BEST = "best"
"""The directory of a run in which the best model so far is kept."""

HEADER_BYTES = 100 << 20
"""Longest header of a safetensors file; the format's own limit."""

Card = Callable[[int | None], str]
"""The model card of the weights after so many steps, if that is known."""


class Torn(UserError):
    """A directory that does not hold what it should."""


def export_model(run_dir: Path, to: Path, card: Card, *, step: int | None = None, best: bool = False) -> int | None:
    """Write the newest whole checkpoint, that of `step`, or the best model to `to`; after how many steps it is, if known.

    UserError if `to` is not empty or cannot be made, or there is no such model or only a torn one.
    """
    _check_target(to)
    if best:
        return _export_best(run_dir / BEST, to, card)
    root = run_dir / "checkpoints"
    found = whole_checkpoints(root)
    if not found:
        raise UserError(f"{run_dir} has no checkpoint yet: the first is written after checkpoint_every_steps steps")
    if step is not None:
        _require(root, step, found)
        found = [checkpoint for checkpoint in found if checkpoint.step == step]
    for checkpoint in reversed(found):
        try:
            _export(checkpoint.path, read_digests(checkpoint.path), to, card(checkpoint.step))
        except Torn as torn:
            if step is not None:
                raise UserError(f"{torn}: export another step, or the best") from torn
        else:
            return checkpoint.step
    raise UserError(f"no checkpoint in {root} is whole: each lacks a file or holds another one than was written")


def _require(root: Path, step: int, found: list[Checkpoint]) -> None:
    if not any(checkpoint.step == step for checkpoint in found):
        there = ", ".join(str(checkpoint.step) for checkpoint in found)
        what = "is torn" if checkpoint_path(root, step).is_dir() else "is not there"
        raise UserError(f"the checkpoint of step {step} {what}: {root} has those of {there}")


def _export_best(source: Path, to: Path, card: Card) -> int | None:
    """What `source` holds; its digests are checked if it has any, else that its weights are complete."""
    if not source.is_dir():
        raise UserError(f"there is no {source}: the best model is kept once held-out prompts were evaluated")
    digests = read_digests(source)
    step = _step_of(source)
    try:
        if not digests:
            _check_weights(source)
        _export(source, digests, to, card(step))
    except Torn as torn:
        raise UserError(f"{torn}: export a checkpoint instead") from torn
    return step


def _export(source: Path, digests: Mapping[str, FileDigest], to: Path, card: str) -> None:
    """Copy `source` beside `to`, and move it there when all of it was right. Torn if it is not."""
    partial = to.with_name(to.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        names = sorted(digests) if digests else sorted(_names(source))
        for name in (name for name in names if not name.startswith(OF_THE_TRAINER)):
            _copy(source / name, partial / name, digests.get(name))
        _check_weights(partial)
        (partial / CARD).write_text(card, encoding="utf-8")
        os.replace(partial, to)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not source.is_dir():
            raise Torn(f"{source} was removed meanwhile by the run that made it") from error
        raise UserError(f"cannot export {source} to {to}: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy(source: Path, to: Path, expected: FileDigest | None) -> None:
    hashed, nbytes = blake3(), 0
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        reading = source.open("rb", buffering=0)
    except FileNotFoundError as error:
        raise Torn(f"{source} is missing") from error
    with reading, to.open("wb") as writing:
        while block := reading.read(BLOCK_BYTES):
            hashed.update(block)
            nbytes += len(block)
            writing.write(block)
    if expected is not None and expected != FileDigest(nbytes=nbytes, blake3=hashed.hexdigest()):
        raise Torn(f"{source} is not what was written there")


def _check_weights(directory: Path) -> None:
    """Torn unless a configuration is there, and weights that end where they say; all files that an index names."""
    if not (directory / CONFIG).is_file():
        raise Torn(f"{directory} has no {CONFIG}")
    there = {path.name: path for path in directory.glob(WEIGHTS) if not path.name.startswith(OF_THE_TRAINER)}
    missing = _indexed(directory / INDEX) - set(there)
    if missing or not there:
        raise Torn(f"{directory} lacks weights: {', '.join(sorted(missing)) or 'there is no safetensors file'}")
    for path in there.values():
        if not _ends_where_it_says(path):
            raise Torn(f"{path} is cut off")


def _indexed(path: Path) -> set[str]:
    """The files that an index of shards names; none without an index."""
    if not path.is_file():
        return set()
    try:
        shards: dict[str, str] = msgspec.json.decode(path.read_bytes())["weight_map"]
        return set(shards.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Torn(f"{path} cannot be read") from error


def _ends_where_it_says(path: Path) -> bool:
    """Whether a safetensors file is as long as its header wants: 8 bytes of length, the header, the tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= HEADER_BYTES:
            return False
        try:
            header = msgspec.json.decode(file.read(length), type=dict[str, dict[str, object]])
            ends = [int(one["data_offsets"][1]) for name, one in header.items() if name != "__metadata__"]  # type: ignore[index]
        except (ValueError, KeyError, TypeError, IndexError):
            return False
    return path.stat().st_size == 8 + length + max(ends, default=0)


def _names(directory: Path) -> Iterator[str]:
    return (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def _step_of(directory: Path) -> int | None:
    """By whatever JSON of the run's lies beside the weights, under the keys that say it."""
    for name in ("best.json", "trainer.json"):
        try:
            found = msgspec.json.decode((directory / name).read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            step = found.get("step", found.get("version"))
            if isinstance(step, int):
                return step
    return None


def _check_target(to: Path) -> None:
    if to.is_symlink() or (to.exists() and not to.is_dir()):
        raise UserError(f"{to} is there and no directory: name another place with --to")
    if to.is_dir() and any(to.iterdir()):
        raise UserError(f"{to} is not empty: name another directory with --to, or empty it")
