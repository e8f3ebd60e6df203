"""Writes the readable part of a damaged run into a new run directory, which `lead --resume` can continue. Blocking.

The damaged run is only read. Everything is copied first and checked afterwards. Checkpoints and the best model are kept
if their digests are right, lines of figures if they are JSON, and the journal as far as it is consistent
(rollout/journal/salvage.py). config.json must be readable, because it says what the run is.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from swarm.broadcast.store.disk import require_room
from swarm.errors import UserError
from swarm.learner.checkpoint.files import fault_of, step_directories, whole_checkpoints
from swarm.node.best import ABOUT, NAME
from swarm.node.identity import load_or_create_key, load_or_create_tls, write_privately
from swarm.node.prompts import RECORD, open_tokenizer, read_record
from swarm.node.rundir import BASE, ENVIRONMENT, ORIGIN, locked, read_values, resumed_config, write_config
from swarm.rollout.journal.journal import DATABASE, SEGMENTS
from swarm.rollout.journal.salvage import salvage_journal
from swarm.rollout.journal.segments import sync_path

CHECKPOINTS, MODEL, IDENTITY = "checkpoints", "model", "identity"
COPIED = (CHECKPOINTS, NAME, MODEL, BASE, SEGMENTS, IDENTITY, DATABASE)  # The parts of a run that take room
PARTIAL = ".partial"


@dataclass(slots=True, kw_only=True)
class Salvage:
    """What became of a run: the step that it continues from, its batches, and lines on what was lost."""

    step: int = 0
    batches: int = 0
    lost: list[str] = field(default_factory=list)


def salvage(run_dir: Path, to: Path) -> Salvage:
    """Write the readable part of the run in `run_dir` to the new directory `to`. Raise UserError if the settings cannot
    be read, if a learner leads the run, or if `to` is not empty or inside it."""
    config = resumed_config(run_dir, {}, finished=True)
    if to.resolve().is_relative_to(run_dir.resolve()) or (to.exists() and (not to.is_dir() or any(to.iterdir()))):
        raise UserError(f"{to} is not a new directory outside of {run_dir}: name another one with --salvage")
    partial = to.with_name(to.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    # Keep learners away: what one writes meanwhile would look like damage.
    with locked(run_dir, only_read=True):
        try:
            partial.mkdir(parents=True)
            require_room(partial, _size(run_dir), to.name)
            done = Salvage()
            _copy_models(run_dir, partial, done)
            checkpoints = whole_checkpoints(partial / CHECKPOINTS)
            journal = salvage_journal(
                run_dir,
                partial,
                groups_per_step=config.groups_per_step,
                group_size=config.group_size,
                max_staleness=config.max_staleness,
                checkpoints=[(one.step, one.lineage) for one in checkpoints],
            )
            done.step, done.batches = max(journal.checkpoints, default=0), journal.batches
            done.lost += journal.lost
            for one in checkpoints:
                if one.step not in journal.checkpoints:
                    shutil.rmtree(one.path)
                    done.lost.append(f"{CHECKPOINTS}/{one.path.name}: the batches that it was trained on are lost")
            _copy_small_files(run_dir, partial, done)
            # Sync before the rename, which makes the directory count: its journal claims to survive a power cut.
            for path in (*partial.rglob("*"), partial):
                sync_path(path)
            os.replace(partial, to)
            write_config(to, config, read_values(run_dir).get(ORIGIN))
        except OSError as error:
            raise UserError(f"cannot write to {to}: {error.strerror} ({error.filename})") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return done


def _size(run_dir: Path) -> int:
    files = [path for name in COPIED for path in (run_dir / name, *(run_dir / name).rglob("*")) if path.is_file()]
    return sum(path.stat().st_size for path in files)


def _copy_models(run_dir: Path, to: Path, done: Salvage) -> None:
    """Copy checkpoints, the best model and the model's small files: each directory whole or not at all."""
    for path in step_directories(run_dir / CHECKPOINTS):
        _copy_directory(path, to / CHECKPOINTS / path.name, fault_of, done)
    checks: dict[str, Callable[[Path], str]] = {
        NAME: lambda copy: fault_of(copy, (ABOUT,)),
        MODEL: _fault_of_files,
        # A fork's first model has no digests. A run with a checkpoint reads only the model's configuration.
        BASE: lambda copy: "",
    }
    for name, fault_in in checks.items():
        if (run_dir / name).is_dir():
            _copy_directory(run_dir / name, to / name, fault_in, done)


def _copy_directory(source: Path, to: Path, fault_in: Callable[[Path], str], done: Salvage) -> None:
    try:
        shutil.copytree(source, to, copy_function=shutil.copyfile)
        fault = fault_in(to)
    except (OSError, shutil.Error) as error:
        fault = str(error.args[0])
    if fault:
        shutil.rmtree(to, ignore_errors=True)
        done.lost.append(f"{to.parent.name + '/' if to.parent.name == CHECKPOINTS else ''}{to.name}: {fault}")


def _fault_of_files(directory: Path) -> str:
    """Return what is wrong with the model's small files, "" if nothing. A learner writes them again at its start."""
    try:
        for path in directory.glob("*.json"):
            json.loads(path.read_bytes())
        open_tokenizer(NAME, directory)
    except (ValueError, UserError) as error:
        return f"{error} (it is written again when the run is resumed)"
    return ""


def _copy_small_files(run_dir: Path, to: Path, done: Salvage) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        _copy_lines(run_dir / name, to / name, done)
    for name in (RECORD, "node.json", ENVIRONMENT):
        try:
            content = (run_dir / name).read_bytes()
            json.loads(content)
            if name == RECORD:
                read_record(run_dir)
            (to / name).write_bytes(content)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, UserError):
            done.lost.append(f"{name}: it cannot be read")
    _copy_identity(run_dir / IDENTITY, to / IDENTITY, done)


def _copy_lines(source: Path, to: Path, done: Salvage) -> None:
    """Copy lines that are JSON objects, but lines of steps only up to the journal's last batch."""
    torn = later = 0
    try:
        with source.open("rb") as lines, to.open("wb") as kept:
            for line in lines:
                try:
                    found = json.loads(line)
                except ValueError:
                    found = None
                if not isinstance(found, dict) or not line.endswith(b"\n"):
                    torn += 1
                elif source.name == "metrics.jsonl" and not (
                    isinstance(step := found.get("step"), int) and step <= done.batches
                ):
                    later += 1
                else:
                    kept.write(line)
    except FileNotFoundError:
        return
    except OSError as error:
        done.lost.append(f"{source.name}: {error.strerror}")
    if torn:
        done.lost.append(f"{source.name}: lines that cannot be read: {torn}")
    if later:
        done.lost.append(f"{source.name}: lines of steps after {done.batches}, which are taken again: {later}")


def _copy_identity(source: Path, to: Path, done: Salvage) -> None:
    """Copy the node's key, certificate and generation if they are valid. Without the key or the certificate, samplers
    need a new join line."""
    if not source.is_dir():
        return
    checks: dict[str, Callable[[Path], object]] = {
        "node.key": load_or_create_key,
        "tls.pem": load_or_create_tls,
        "generation": lambda directory: int((directory / "generation").read_text()),
    }
    for name, check in checks.items():
        if name == "tls.pem" and not (source / name).exists():
            continue  # The learner never listened beyond this machine
        try:
            if not (source / name).is_file() or (name == "generation" and not (to / "node.key").exists()):
                raise UserError("it is not there, or of a key that was lost")
            write_privately(to / name, (source / name).read_bytes())
            check(to)
        except (OSError, ValueError, UserError) as error:
            (to / name).unlink(missing_ok=True)
            more = "" if name == "generation" else "; samplers need the new join line"
            done.lost.append(f"{IDENTITY}/{name}: {str(error).replace(str(to), str(source))}{more}")
