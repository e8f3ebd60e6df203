"""Checkpoint directories as plain files: which are whole, which is the newest, which to remove. Needs no torch.
Blocking.

A checkpoint is written to a directory whose name ends with `.partial`, and `commit` renames it. This rename is the only
commit point: a directory without the ending was once complete. Damage since then (a failing disk, an interrupted copy)
is found by `digests.json`, which has the size and BLAKE3 of every other file. A process that writes, or removes what a
dead writer left, holds a lock under the root directory; the system releases it when the process dies.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from blake3 import blake3

from swarm.broadcast.store.disk import require_room
from swarm.errors import UserError
from swarm.files import HERE, sync_path
from swarm.learner.messages import AlarmState, ClaimState
from swarm.settings import EMBEDDED

PARTIAL = ".partial"  # Ending of directories that are being written or removed
LOCK = ".lock"  # The file that is locked; some systems cannot lock a directory (NFS)
DIGESTS = "digests.json"
STATE = "trainer.json"
TENSORS = "trainer.safetensors"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # As peft names them
BEST = "best"  # Symbolic link in the run directory to the checkpoint nearest to the best evaluated version
STEP_NAME = re.compile(r"step-([0-9]{6,18})")  # Names sort as text up to a million steps; the code compares numbers
MAX_JSON_BYTES = 1 << 20  # Of a file that is read; digests.json has 130 bytes for each file, trainer.json about 5,000
BLOCK_BYTES = 1 << 20  # Read at once when a file is hashed; larger blocks were not faster
S = TypeVar("S")


class FileDigest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nbytes: int
    blake3: str


class TrainerState(msgspec.Struct, frozen=True):
    """trainer.json: the number of learner steps, the digest (hexadecimal) of all their batches, the size of the model,
    and the state of the alarms and of the audit of claims. For an adapter also `base`, the digest of its model."""

    step: Annotated[int, msgspec.Meta(ge=0)]
    lineage: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})*$")]
    parameters: int
    alarms: AlarmState = AlarmState()
    claims: ClaimState = ClaimState()
    base: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A directory that a run can go on from."""

    step: int
    path: Path
    lineage: bytes


def checkpoint_path(root: Path, step: int) -> Path:
    """The directory of the checkpoint after `step` learner steps."""
    return root / f"step-{step:06}"


# -- reading -------------------------------------------------------------------------------------------------


def read_state(directory: Path) -> TrainerState:
    """Read trainer.json of a checkpoint. UserError if that fails."""
    state = _read_json(directory / STATE, TrainerState)
    if state is None:
        raise UserError(f"{directory} is not a checkpoint that a run can go on from: its {STATE} cannot be read")
    return state


def is_whole(directory: Path) -> bool:
    """Return whether every file has the size and BLAKE3 in digests.json. Reads all files."""
    return fault_of(directory) == ""


def fault_of(directory: Path, *, only_sizes: bool = False) -> str:
    """Return which file does not match digests.json, and how; "" if all match. Reads all files unless `only_sizes`."""
    digests = read_digests(directory)
    if not {STATE, TENSORS} <= set(digests):
        return f"its {DIGESTS} is missing or torn"
    try:
        for name, digest in digests.items():
            if (nbytes := (directory / name).stat().st_size) != digest.nbytes:
                return f"{name} has {nbytes} bytes instead of {digest.nbytes}"
        for name, digest in () if only_sizes else digests.items():
            if digest_of(directory / name) != digest:
                return f"{name} is not what was written there"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return ""


def damaged_checkpoints(root: Path) -> dict[str, str]:
    """The names of the damaged directories under `root`, with the fault of each. Reads all files."""
    faults = {}
    for path in step_directories(root):
        # Undamaged files may be in a directory with the name of another step.
        fault = fault_of(path) or ("" if _checkpoint(path) else f"its {STATE} is of another step, or none")
        if fault:
            faults[path.name] = fault
    return faults


def whole_checkpoints(root: Path) -> list[Checkpoint]:
    """All checkpoints with a digests.json, oldest first. Only `is_whole` reads the files and finds damage."""
    return [found for path in step_directories(root) if (found := _checkpoint(path)) is not None]


def newer_than(root: Path, step: int | None) -> list[str]:
    """The names of checkpoint directories after `step`, or of all if it is None, whole or not."""
    names = [path.name for path in step_directories(root)]
    return names if step is None else [name for name in names if int(name.removeprefix("step-")) > step]


def best_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint to which RUN_DIR/best links, whole or not; None if there is no such link."""
    try:
        name = (run_dir / BEST).readlink().name
    except OSError:
        return None
    return run_dir / "checkpoints" / name if STEP_NAME.fullmatch(name) else None


def newest_whole(root: Path) -> Checkpoint | None:
    return _newest_whole(step_directories(root))


# -- writing -------------------------------------------------------------------------------------------------


@contextmanager
def being_written(directory: Path, nbytes: int) -> Iterator[Path]:
    """Yield an empty directory for a checkpoint of about `nbytes`; at the end of the block it is committed as
    `directory`. DiskFull if there is no room. If anything is raised, the disk is left as it was."""
    root, partial = directory.parent, directory.with_name(directory.name + PARTIAL)
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root, wait=True):
        shutil.rmtree(partial, ignore_errors=True)
        require_room(directory.parent, nbytes, f"the checkpoint {directory.name}")
        try:
            partial.mkdir()
            yield partial
            commit(partial, directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def commit(partial: Path, directory: Path) -> None:
    """Rename `partial` to the checkpoint `directory`, so that neither a crash nor a power cut undoes it. An existing
    one is replaced; for a moment, between the two renames, there is neither."""
    entries = sorted(partial.rglob("*"))
    digests = {path.relative_to(partial).as_posix(): digest_of(path) for path in entries if path.is_file()}
    (partial / DIGESTS).write_bytes(msgspec.json.format(msgspec.json.encode(digests)))
    # Libraries make some files readable only for their owner; here all files get the same mode.
    mode = stat.S_IMODE((partial / DIGESTS).stat().st_mode)
    for path in entries:
        path.chmod(mode if path.is_file() else partial.stat().st_mode)
    for path in (*entries, partial / DIGESTS, partial):
        sync_path(path)
    gone = _set_aside(directory) if directory.exists() else None
    # Only now, when every byte is on the disk: after this line the checkpoint counts.
    os.rename(partial, directory)
    sync_path(directory.parent)
    if gone is not None:
        shutil.rmtree(gone)


def clear_up(root: Path) -> None:
    """Remove partial directories that crashes left, unless a checkpoint is being written."""
    if not root.is_dir():
        return
    with _locked(root, wait=False) as alone:
        if alone:
            _remove_partial(root)


def link_best(root: Path, step: int) -> None:
    """Link RUN_DIR/best to the checkpoint nearest to `step`, the older of two equally near ones."""
    whole = whole_checkpoints(root)
    if not whole:
        return
    nearest, fresh = min(whole, key=lambda one: abs(one.step - step)), root.with_name(BEST + PARTIAL)
    with suppress(OSError):  # The disk is full, or its file system has no links; the next call tries again
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(Path(root.name, nearest.path.name))
        fresh.replace(root.with_name(BEST))


def prune(root: Path, keep: int) -> None:
    """Keep the newest `keep` (at least one) checkpoints and the best; remove the others and what crashes left. The
    newest one is read completely; of older ones only the sizes are compared. If no checkpoint is whole, only partial
    directories are removed. While a checkpoint is being written, partial directories and those newer than the newest
    whole one stay."""
    if not root.is_dir():
        return
    with _locked(root, wait=False) as alone:
        # Listed first, so that a checkpoint that is committed from now on is not removed.
        listed = step_directories(root)
        if alone:
            _remove_partial(root)
        newest = _newest_whole(listed)
        if newest is None:
            return
        at = listed.index(newest.path)
        older = [path for path in listed[:at] if not fault_of(path, only_sizes=True)]
        kept = {newest.path, *older[::-1][: max(0, keep - 1)], best_checkpoint(root.parent)}
        for path in listed if alone else listed[:at]:
            if path not in kept:
                # If this is interrupted, a partial directory is left.
                shutil.rmtree(_set_aside(path))


def _set_aside(directory: Path) -> Path:
    gone = directory.with_name(f"{directory.name}.removed{PARTIAL}")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(directory, gone)
    return gone


@contextmanager
def _locked(root: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of `root` in the block, and yield whether it is held: without `wait`, not if another process has
    it."""
    descriptor = os.open(root / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def in_stream_dtype(name: str, content: bytes) -> bytes:
    """The content of a small file of a model, with the dtype of the stream: config.json has to say bfloat16, not the
    dtype in memory."""
    if name != "config.json":
        return content
    config: dict[str, Any] = {**json.loads(content), "dtype": "bfloat16"}
    config.pop("torch_dtype", None)  # an older name of it
    for part in config.values():
        # A model of several parts, such as text and images, has a configuration for each.
        if isinstance(part, dict) and "dtype" in part:
            part["dtype"] = "bfloat16"
    return json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"


def name_in_adapter(name: str) -> str:
    """The name of a tensor of the stream in peft's files."""
    return f"base_model.model.{name}"


def is_hub_name(model: str) -> bool:
    """Whether a model has a name of the hub (NAME or OWNER/NAME), which others can use, and is not a directory here
    with such a name."""
    named = model not in EMBEDDED and model.count("/") <= 1 and not model.startswith(HERE)
    return named and not Path(model).exists()


# -- files ---------------------------------------------------------------------------------------------------


def step_directories(root: Path) -> list[Path]:
    """All directories with the name of a checkpoint, by step, whether whole or not."""
    found = {path: match for path in _directories(root) if (match := STEP_NAME.fullmatch(path.name))}
    return sorted(found, key=lambda path: int(found[path][1]))


def _remove_partial(root: Path) -> None:
    for path in _directories(root):
        if path.name.startswith("step-") and path.name.endswith(PARTIAL):
            shutil.rmtree(path)


def _directories(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []


def _newest_whole(paths: list[Path]) -> Checkpoint | None:
    found = (_checkpoint(path) for path in reversed(paths) if is_whole(path))
    return next((checkpoint for checkpoint in found if checkpoint is not None), None)


def _checkpoint(path: Path) -> Checkpoint | None:
    match, state = STEP_NAME.fullmatch(path.name), _read_json(path / STATE, TrainerState)
    if match is None or state is None or state.step != int(match[1]) or not (path / DIGESTS).is_file():
        return None
    return Checkpoint(step=state.step, path=path, lineage=bytes.fromhex(state.lineage))


def read_digests(directory: Path) -> dict[str, FileDigest]:
    """The digest of every file except digests.json itself; empty if that is missing or damaged."""
    return _read_json(directory / DIGESTS, dict[str, FileDigest]) or {}


def digest_of(path: Path) -> FileDigest:
    """The digest of a file. It is read in blocks, not mapped: so a fault of the disk is an OSError, not a SIGBUS."""
    hashed, nbytes = blake3(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            hashed.update(block)
            nbytes += len(block)
    return FileDigest(nbytes=nbytes, blake3=hashed.hexdigest())


def _read_json(path: Path, kind: type[S]) -> S | None:
    """The content of a file as a `kind`; None if it cannot be read as one."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MAX_JSON_BYTES), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
