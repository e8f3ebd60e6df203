"""A run's model as a clean Hugging Face directory: what anybody loads, without what only the trainer needs. Blocking.

Files are copied, never linked: who edits the copy must not change the checkpoint that the run goes on from. Each is
hashed on its way, so that a directory which is torn, or is removed meanwhile by the run that made it, gives nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
from blake3 import blake3

from swarm.errors import UserError
from swarm.learner.checkpoint.files import (
    BLOCK_BYTES,
    DIGESTS,
    PARTIAL,
    Checkpoint,
    FileDigest,
    checkpoint_path,
    newer_than,
    read_digests,
    whole_checkpoints,
)

CONFIG = "config.json"
CARD = "README.md"
BEST = "best"  # The directory of a run that holds the model which was best on held-out prompts, and best.json about it
OF_THE_RUN = ("trainer", "best.json", DIGESTS)  # How names begin of what is for the run alone
Card = Callable[[int], str]  # The model card of the weights after so many learner steps


class Torn(UserError):
    """A directory that does not hold what was written to it."""


def export_model(run_dir: Path, to: Path, card: Card | None, *, step: int | None = None, best: bool = False) -> int:
    """Write the newest whole checkpoint, that of `step`, or the best model to `to`, with its `card` if there is one;
    after how many steps it is.

    UserError if `to` is not empty or cannot be made, or there is no such model or only a torn one.
    """
    _check_target(to)
    if best:
        return _export_best(run_dir / BEST, to, card)
    root = run_dir / "checkpoints"
    found = whole_checkpoints(root)
    if step is not None:
        return _export_step(root, step, found, to, card)
    for checkpoint in reversed(found):
        try:
            _export(checkpoint.path, to, card and card(checkpoint.step))
        except Torn:
            continue
        return checkpoint.step
    if newer_than(root, None):
        raise UserError(
            f"no checkpoint in {root} is whole: `echo-node verify {run_dir}` says what is wrong with each, and --best "
            "exports the best model"
        )
    raise UserError(f"{run_dir} has no checkpoint yet: one is written every checkpoint_every_steps, and at the end")


def _export_step(root: Path, step: int, found: list[Checkpoint], to: Path, card: Card | None) -> int:
    if not any(checkpoint.step == step for checkpoint in found):
        there = ", ".join(str(checkpoint.step) for checkpoint in found) or "none"
        what = "torn" if checkpoint_path(root, step).is_dir() else "not there"
        raise UserError(f"the checkpoint of step {step} is {what}; in {root} are those of: {there}")
    _export(checkpoint_path(root, step), to, card and card(step))
    return step


def _export_best(source: Path, to: Path, card: Card | None) -> int:
    try:
        about = msgspec.json.decode((source / "best.json").read_bytes(), type=dict[str, object])
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(
            f"there is no best model in {source}: one is kept once held-out prompts were evaluated"
        ) from error
    step = about.get("version")
    if not isinstance(step, int):
        raise Torn(f"{source / 'best.json'} does not say which version it is about")
    _export(source, to, card and card(step))
    return step


def _export(source: Path, to: Path, card: str | None) -> None:
    """Copy `source` beside `to`, and move it there when all of it was right. Torn if it is not."""
    digests = {name: digest for name, digest in read_digests(source).items() if not name.startswith(OF_THE_RUN)}
    if CONFIG not in digests or not any(name.endswith(".safetensors") for name in digests):
        raise Torn(f"{source} holds no whole model: its {DIGESTS} names none")
    partial = to.with_name(to.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for name, digest in digests.items():
            _copy(source / name, partial / name, digest)
        if card is not None:
            (partial / CARD).write_text(card, encoding="utf-8")
        os.replace(partial, to)
    except OSError as error:
        raise UserError(f"cannot export {source} to {to}: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy(source: Path, to: Path, expected: FileDigest) -> None:
    hashed, nbytes = blake3(), 0
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        reading = source.open("rb", buffering=0)
    except FileNotFoundError as error:
        raise Torn(f"{source} is missing: if the run goes on and has replaced it, export again") from error
    with reading, to.open("wb") as writing:
        while block := reading.read(BLOCK_BYTES):
            hashed.update(block)
            nbytes += len(block)
            writing.write(block)
    if expected != FileDigest(nbytes=nbytes, blake3=hashed.hexdigest()):
        raise Torn(f"{source} is torn: it is not what was written there")


def _check_target(to: Path) -> None:
    if to.is_symlink() or (to.exists() and not to.is_dir()):
        raise UserError(f"{to} is there and no directory: name another place with --to")
    if to.resolve() == Path.cwd():
        # It is replaced as a whole, and whoever stood in it would stand nowhere.
        raise UserError(f"{to} is the directory you are in: name one to make with --to")
    if to.is_dir() and any(to.iterdir()):
        raise UserError(f"{to} is not empty: name another directory with --to, or empty it")
