"""Exports a run's model or adapter as a directory that any program can load, without the trainer's files. Blocking.

Files are copied, never linked: editing the copy must not change the checkpoint that the run goes on from. Each copy is
checked, so that nothing is exported from a checkpoint that is damaged, or that its run removes meanwhile.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from swarm.errors import UserError
from swarm.learner.checkpoint.files import (
    ADAPTER_CONFIG,
    DIGESTS,
    PARTIAL,
    best_checkpoint,
    checkpoint_path,
    digest_of,
    newer_than,
    read_digests,
    whole_checkpoints,
)

CONFIG = "config.json"
CARD = "README.md"
OF_THE_RUN = ("trainer", DIGESTS)  # Beginnings of the names of files that are not exported
Card = Callable[[int], str]  # Makes the model card for the weights after a number of learner steps
Merge = Callable[[Path], None]  # Turns a directory with an adapter into one with the whole model


class Torn(UserError):
    """A checkpoint whose files are not what was written to them."""


def export_model(
    run_dir: Path,
    to: Path,
    card: Card | None,
    *,
    step: int | None = None,
    best: bool = False,
    merge: Merge | None = None,
) -> int:
    """Export the newest whole checkpoint, that of `step`, or the best, with its `card`, to the directory `to`. Return
    its step. An adapter is written alone, or merged into the model by `merge`. UserError if `to` is not empty or cannot
    be made, or if there is no such checkpoint or it is damaged."""
    check_target(to)
    if best:
        if (found := best_checkpoint(run_dir)) is None:
            raise UserError(f"there is no best model in {run_dir}: one is kept once held-out prompts were evaluated")
        step = int(found.name.removeprefix("step-"))
    root = run_dir / "checkpoints"
    steps = [checkpoint.step for checkpoint in whole_checkpoints(root)]
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        what = "torn" if checkpoint_path(root, step).is_dir() else "not there"
        raise UserError(f"the checkpoint of step {step} is {what}; in {root} are those of: {there}")
    for chosen in reversed(steps) if step is None else [step]:
        try:
            _export(checkpoint_path(root, chosen), to, card and card(chosen), merge)
        except Torn:
            if step is not None:
                raise
            continue
        return chosen
    if newer_than(root, None):
        raise UserError(f"no checkpoint in {root} is whole: `echo-node verify {run_dir}` says what is wrong with each")
    raise UserError(f"{run_dir} has no checkpoint yet: one is written every checkpoint_every_steps, and at the end")


def _export(source: Path, to: Path, card: str | None, merge: Merge | None) -> None:
    """Copy `source` to a directory next to `to`, and rename it once everything is checked. Torn if a file is
    damaged."""
    digests = {name: digest for name, digest in read_digests(source).items() if not name.startswith(OF_THE_RUN)}
    if not {CONFIG, ADAPTER_CONFIG} & set(digests) or not any(name.endswith(".safetensors") for name in digests):
        raise Torn(f"{source} holds no whole model: its {DIGESTS} names none")
    partial = to.with_name(to.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for name, digest in digests.items():
            (partial / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, partial / name)
            if digest_of(partial / name) != digest:
                raise Torn(f"{source / name} is torn: it is not what was written there")
        if merge is not None and ADAPTER_CONFIG in digests:
            merge(partial)
        if card is not None:
            (partial / CARD).write_text(card, encoding="utf-8")
        os.replace(partial, to)
    except FileNotFoundError as error:
        raise Torn(f"{error.filename} is missing: if the run goes on and has replaced it, export again") from error
    except OSError as error:
        raise UserError(f"cannot export {source} to {to}: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_target(to: Path) -> None:
    if to.is_symlink() or (to.exists() and not to.is_dir()):
        raise UserError(f"{to} exists and is not a directory: name another place with --to")
    if to.resolve() == Path.cwd():
        # It is replaced as a whole, which would leave the shell in a directory that is gone.
        raise UserError(f"{to} is the directory you are in: name one to make with --to")
    if to.is_dir() and any(to.iterdir()):
        raise UserError(f"{to} is not empty: name another directory with --to, or empty it")
