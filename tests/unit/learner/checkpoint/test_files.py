"""Checkpoint directories as files: what is whole, which is the newest, what goes."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarm.broadcast.store import disk
from swarm.broadcast.store.disk import DiskFull
from swarm.errors import UserError
from swarm.learner.checkpoint.files import (
    DIGESTS,
    STATE,
    TENSORS,
    TrainerState,
    being_written,
    checkpoint_path,
    clear_up,
    in_stream_dtype,
    is_whole,
    newest_whole,
    prune,
    read_state,
    whole_checkpoints,
)


def save(root: Path, step: int, *, state: TrainerState | None = None) -> Path:
    """A checkpoint whose tensors are any bytes."""
    directory = checkpoint_path(root, step)
    with being_written(directory, 100) as partial:
        (partial / STATE).write_bytes(
            msgspec.json.encode(state or TrainerState(step=step, lineage=bytes([step]).hex(), parameters=3))
        )
        (partial / TENSORS).write_bytes(bytes(range(100)))
        (partial / "deeper").mkdir()
        (partial / "deeper" / "file").write_bytes(b"")
    return directory


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.is_dir()}


def steps(root: Path) -> list[int]:
    return [found.step for found in whole_checkpoints(root)]


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes] | None]] = {
    "cut": (TENSORS, lambda content: content[:-1]),
    "flipped": (TENSORS, lambda content: bytes([content[0] ^ 1]) + content[1:]),
    "state changed": (STATE, lambda content: content.replace(b'"02"', b'"03"')),
    "file lost": ("deeper/file", None),
    "digests lost": (DIGESTS, None),
    "digests empty": (DIGESTS, lambda content: b"{}"),
    "digests torn": (DIGESTS, lambda content: content[:20]),
}


def damage(directory: Path, how: str) -> None:
    name, change = DAMAGES[how]
    content = (directory / name).read_bytes()
    (directory / name).unlink()
    if change is not None:
        (directory / name).write_bytes(change(content))


def test_the_newest_is_found_with_its_step_and_lineage(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    prune(root, 1)
    assert (newest_whole(root), steps(root)) == (None, [])
    for step in (3, 1, 2):
        assert is_whole(save(root, step))
    newest = newest_whole(root)
    assert newest is not None
    assert (newest.step, newest.path, newest.lineage) == (3, root / "step-000003", b"\3")
    for step in (1_000_000, 999_999):
        save(root, step, state=TrainerState(step=step, lineage="", parameters=3))
    assert steps(root) == [1, 2, 3, 999_999, 1_000_000], "in their order beyond six digits too"


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_one_is_not_whole_goes_and_leaves_the_one_before(tmp_path: Path, how: str) -> None:
    whole, damaged = save(tmp_path, 1), save(tmp_path, 2)
    damage(damaged, how)
    assert not is_whole(damaged)
    assert steps(tmp_path) == ([1] if how == "digests lost" else [1, 2]), "a listing looks at no content"
    newest = newest_whole(tmp_path)
    assert newest is not None
    assert newest.path == whole
    prune(tmp_path, 1)
    assert names(tmp_path) == {"step-000001"}
    assert is_whole(whole)


def test_one_under_the_name_of_another_step_is_not_used(tmp_path: Path) -> None:
    first = save(tmp_path, 1)
    shutil.copytree(first, tmp_path / "step-000002")
    newest = newest_whole(tmp_path)
    assert newest is not None
    assert newest.path == first


def test_every_byte_and_name_is_on_the_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        calls.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    def watched_rename(old: Path, new: Path) -> None:
        rename(old, new)
        calls.append("rename")

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    directory = save(tmp_path, 1)
    partial = f"{directory}.partial"
    inside = [str(path).replace(str(directory), partial) for path in directory.rglob("*")]
    at = calls.index("rename")
    assert set(calls[:at]) == {*inside, partial}
    # A directory after the names in it are final: digests.json was the last of them.
    assert calls.index(partial) > calls.index(f"{partial}/{DIGESTS}")
    assert calls[at + 1 :] == [str(tmp_path)]


def test_what_a_crash_left_half_written_is_ignored_and_written_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    left = tmp_path / "step-000002.partial"
    shutil.copytree(tmp_path / "step-000001", left)
    (left / "left over").write_text("by a crash")
    assert steps(tmp_path) == [1]
    assert not (save(tmp_path, 2) / "left over").exists()
    assert names(tmp_path) == {"step-000001", "step-000002"}
    damage(tmp_path / "step-000001", "flipped")
    assert is_whole(save(tmp_path, 1)), "nor does a damaged one stay"


def test_a_fault_while_writing_leaves_only_what_was_there(tmp_path: Path) -> None:
    save(tmp_path, 1)
    beside: list[set[str]] = []

    def write_and_fail() -> None:
        with being_written(checkpoint_path(tmp_path, 2), 1) as partial:
            (partial / STATE).write_bytes(b"{}")
            beside.append(names(tmp_path))
            raise OSError("too hot")

    with pytest.raises(OSError, match="too hot"):
        write_and_fail()
    assert beside == [{"step-000001", "step-000002.partial"}]
    assert names(tmp_path) == {"step-000001"}


def test_without_room_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr(disk, "SPARE_BYTES", 1 << 60)
    with pytest.raises(DiskFull, match=r"no room for the checkpoint step-000002: free \d+ MB there$"):
        save(tmp_path, 2)
    assert names(tmp_path) == {"step-000001"}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"step":1,"lineage":"no","parameters":1}', b'{"step":-1,"lineage":"","parameters":1}'],
)
def test_a_state_that_is_none_is_the_users_to_know(tmp_path: Path, content: bytes) -> None:
    (tmp_path / STATE).write_bytes(content)
    with pytest.raises(UserError, match=r"is not a checkpoint.*trainer.json"):
        read_state(tmp_path)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_all_files_may_be_read_by_the_same(tmp_path: Path, umask: int, mode: int) -> None:
    """Whatever made them: safetensors' files are their owner's alone."""
    before = os.umask(umask)
    try:
        directory = checkpoint_path(tmp_path, 1)
        with being_written(directory, 100) as partial:
            (partial / STATE).write_bytes(msgspec.json.encode(TrainerState(step=1, lineage="", parameters=3)))
            os.close(os.open(partial / TENSORS, os.O_CREAT | os.O_WRONLY, 0o600))
            (partial / "deeper").mkdir()
            (partial / "deeper/file").write_bytes(b"")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {mode}
    assert stat.S_IMODE((directory / "deeper").stat().st_mode) == stat.S_IMODE(directory.stat().st_mode)


@pytest.mark.parametrize(
    ("config", "stated"),
    [
        ({}, {"dtype": "bfloat16"}),
        ({"dtype": "float32", "a": [1]}, {"a": [1], "dtype": "bfloat16"}),
        ({"torch_dtype": "float16"}, {"dtype": "bfloat16"}),
        (
            {"text_config": {"dtype": "float32", "b": 1}, "vision_config": {}},
            {"dtype": "bfloat16", "text_config": {"b": 1, "dtype": "bfloat16"}, "vision_config": {}},
        ),
    ],
)
def test_a_config_beside_stored_weights_says_their_dtype(config: dict[str, Any], stated: dict[str, Any]) -> None:
    content = json.dumps(config).encode()
    assert json.loads(in_stream_dtype("config.json", content)) == stated
    assert in_stream_dtype("tokenizer.json", content) == content


# -- prune ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "left"), [(0, [4]), (1, [4]), (2, [3, 4]), (4, [1, 2, 3, 4]), (5, [1, 2, 3, 4])])
def test_the_newest_are_kept(tmp_path: Path, keep: int, left: list[int]) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    prune(tmp_path, keep)
    assert steps(tmp_path) == left
    assert names(tmp_path) == {f"step-{step:06}" for step in left}


def test_a_torn_older_one_does_not_count_as_kept_and_if_none_is_whole_all_are_left_for_a_person(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    damage(tmp_path / "step-000002", "cut")
    prune(tmp_path, 2)
    assert names(tmp_path) == {"step-000001", "step-000003"}
    for name in names(tmp_path):
        damage(tmp_path / name, "flipped")
    prune(tmp_path, 1)
    assert names(tmp_path) == {"step-000001", "step-000003"}


@pytest.mark.parametrize("remove", [lambda root: prune(root, 1), clear_up], ids=["prune", "clear_up"])
def test_what_crashes_left_is_removed_but_nothing_that_is_not_ours(
    tmp_path: Path, remove: Callable[[Path], None]
) -> None:
    save(tmp_path, 1)
    for name in ("step-000002.partial", "step-000001.removed.partial", "mine.partial", "step-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"")
    remove(tmp_path)
    assert names(tmp_path) == {"step-000001", "mine.partial", "step-1"}


def test_what_is_being_written_is_left_alone(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    damage(tmp_path / "step-000003", "flipped")
    with being_written(checkpoint_path(tmp_path, 4), 1) as partial:
        clear_up(tmp_path)
        assert names(tmp_path) == {"step-000001", "step-000002", "step-000003", partial.name}
        prune(tmp_path, 1)
        assert names(tmp_path) == {"step-000002", "step-000003", partial.name}
