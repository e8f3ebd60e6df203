"""Writes the readable part of a damaged journal as a new, consistent one. Blocking.

Rows are copied as far as SQLite can read them from either end of each table. The new journal ends before the first
batch that has a missing or changed row (by its lineage), or that lacks a payload after the checkpoint from which the
run continues. Later batches are undone, as after a power cut: their groups wait, with the remaining answers whose
weights can be made again. Versions and leases are not copied. So the run continues under another incarnation, which is
newer for samplers than everything that was lost, and leases its samples again.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from swarm.rollout.journal.index import Index, next_lineage
from swarm.rollout.journal.journal import DATABASE, SEGMENTS
from swarm.rollout.journal.reading import GroupRow, RolloutRow, batch_rows, group_rows, rollout_rows
from swarm.rollout.journal.segments import read_payload, segment_path, segments_of
from swarm.rollout.journal.verify import Report, check_batch, fate_faults, says_the_same

NO_SEGMENT = -1  # In the row of a lost payload: it names no file, as if the payload had been pruned

SPARSE = 1000  # A group number above this plus twice the number of rows read counts as damage: gaps get filled


TABLES: dict[str, tuple[dict[str, Any], int]] = {
    "nodes": ({"id": int, "name": str}, 1),
    "groups": (get_type_hints(GroupRow), 1),
    "rollouts": ({**get_type_hints(RolloutRow, include_extras=True), "node": int}, 2),
    "batches": ({"step": int, "max_staleness": int, "lineage": bytes}, 1),
    "bounds": (
        {"id": int, "max_staleness": int, "publish_every_steps": int, "step": int, "learning_rate": float | None},
        1,
    ),
}
"""The tables to copy: the types of their columns, and how many of the first columns are the primary key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvaged:
    """How many batches the new journal holds, the steps of the checkpoints that fit them, and lines on what is lost."""

    batches: int
    checkpoints: tuple[int, ...]
    lost: tuple[str, ...]


def salvage_journal(
    run_dir: Path,
    to: Path,
    *,
    groups_per_step: int,
    group_size: int,
    max_staleness: int,
    checkpoints: Sequence[tuple[int, bytes]],
) -> Salvaged:
    """Write a journal to the directory `to` from the one in `run_dir`, which stays as it is. `checkpoints` holds step
    and lineage of each whole checkpoint."""
    lost = _copy_segments(run_dir / SEGMENTS, to / SEGMENTS)
    with closing(Index(to / DATABASE, group_size=group_size)) as index:
        new = index.connection
        new.execute("PRAGMA foreign_keys = OFF")
        with _copy_of(run_dir, to / "damaged") as old:
            index.transact(lambda: lost.extend(_copy_rows(old, new)))
        index.transact(lambda: _mend_rows(new, group_size, max_staleness))
        lineages, lacking = _look_through(new, to / SEGMENTS, Report(groups_per_step, group_size))
        known = [step for step, lineage in checkpoints if lineages[step : step + 1] == [lineage]]
        step = max(known, default=0)
        # Batches before the checkpoint are not trained on again, so their payloads may be missing, as if pruned.
        batches = min((at for at in lacking if at >= step), default=len(lineages) - 1)
        index.transact(lambda: lost.extend(_cut(new, batches)))
        index.transact(
            lambda: _let_go_of_lost(new, to / SEGMENTS, batches, Report(groups_per_step, group_size, batches))
        )
    return Salvaged(batches=batches, checkpoints=tuple(known), lost=tuple(lost))


def _copy_segments(source: Path, to: Path) -> list[str]:
    to.mkdir(parents=True)
    lost = []
    for segment in segments_of(source):
        try:
            shutil.copyfile(segment_path(source, segment), segment_path(to, segment))
        except OSError as error:
            lost.append(f"{SEGMENTS}/{segment_path(source, segment).name}: {error.strerror}")
    return lost


@contextmanager
def _copy_of(path: Path, scratch: Path) -> Iterator[sqlite3.Connection]:
    """Open a copy of the database, empty if it is gone: SQLite writes files beside a database that it reads."""
    scratch.mkdir()
    for name in (DATABASE, DATABASE + "-wal"):
        if (path / name).is_file():
            shutil.copyfile(path / name, scratch / name)
    with closing(sqlite3.connect(scratch / DATABASE, isolation_level=None)) as found:
        yield found
    shutil.rmtree(scratch)


def _copy_rows(old: sqlite3.Connection, new: sqlite3.Connection) -> list[str]:
    """Copy the readable rows, and return lines on what was lost."""
    lost: list[str] = []
    for table in TABLES:
        slots = ",".join("?" * len(TABLES[table][0]))
        new.executemany(f"INSERT OR IGNORE INTO {table} VALUES ({slots})", _readable_rows(old, table, lost))
    return lost


def _readable_rows(old: sqlite3.Connection, table: str, lost: list[str]) -> Iterator[tuple[Any, ...]]:
    """Read from the first row as far as SQLite gets, and if that is not the end, from the last row backwards."""
    columns, keys = TABLES[table]
    kind: Any = tuple[tuple(columns.values())]  # type: ignore[misc]
    odd = 0
    for order in ("ASC", "DESC"):
        by = ", ".join(f"{column} {order}" for column in list(columns)[:keys])
        try:
            for row in old.execute(f"SELECT {', '.join(columns)} FROM {table} NOT INDEXED ORDER BY {by}"):
                try:
                    yield msgspec.convert(row, kind)
                except (msgspec.ValidationError, UnicodeError):
                    odd += 1
        except sqlite3.DatabaseError as error:
            if order == "ASC":
                lost.append(f"rows of {table} in {DATABASE}: {error}")
        else:
            break
    if odd:
        lost.append(f"rows of {table} in {DATABASE} with values that no such row has: {odd}")


def _mend_rows(new: sqlite3.Connection, group_size: int, max_staleness: int) -> None:
    """Give every rollout a node and a group, and fill gaps in the groups' numbers: a lost group can be treated like one
    that was opened and not answered."""
    (count,) = new.execute("SELECT count(*) FROM groups").fetchone()
    new.execute("DELETE FROM groups WHERE number < 0 OR number > ?", (2 * count + SPARSE,))
    (last,) = new.execute("SELECT coalesce(max(number), -1) FROM groups").fetchone()
    new.executemany(
        "INSERT OR IGNORE INTO groups(number, incarnation, version, max_staleness) VALUES (?, 0, 0, ?)",
        ((number, max_staleness) for number in range(last + 1)),
    )
    new.execute(
        "DELETE FROM rollouts WHERE number NOT IN (SELECT number FROM groups) OR idx NOT BETWEEN 0 AND ?",
        (group_size - 1,),
    )
    # Training does not depend on a rollout's author.
    new.execute("INSERT OR IGNORE INTO nodes SELECT DISTINCT node, printf('%032x', node) FROM rollouts")


def _look_through(new: sqlite3.Connection, segments: Path, report: Report) -> tuple[list[bytes], list[int]]:
    """Return the lineages up to the first batch that is not whole, beginning with the empty one, and the batches that
    lack a payload."""
    lineages: list[bytes] = [b""]
    lacking: list[int] = []
    recorded = new.execute("SELECT step, max_staleness, lineage FROM batches ORDER BY step").fetchall()
    report.batches = len(recorded)
    for place, (step, bound, lineage) in enumerate(recorded):
        if step != place:
            break
        groups = [(row, rollout_rows(new, row.number)) for row in batch_rows(new, step)]
        rollouts = [one for _, ones in groups for one in ones]
        samples = check_batch(new, step, bound, report)
        faults = [fault for row, ones in groups for fault in fate_faults(row, ones, report)]
        payloads = [(one, read_payload(segments, one.place)) for one in rollouts]
        differ = any(payload is not None and not says_the_same(one, payload) for one, payload in payloads)
        if report.breaches or faults or differ or samples is None:
            break
        if next_lineage(lineages[-1], step, samples) != lineage:
            break
        lineages.append(lineage)
        if any(payload is None for _, payload in payloads):
            lacking.append(step)
    return lineages, lacking


def _cut(new: sqlite3.Connection, batches: int) -> list[str]:
    """End the journal before batch `batches`, and return a line on what is lost, if anything."""
    (newest,) = new.execute("SELECT max(step) FROM batches").fetchone()
    new.execute("UPDATE groups SET step = NULL, place = NULL WHERE step >= ?", (batches,))
    new.execute("UPDATE groups SET place = NULL WHERE step IS NULL")
    new.execute("DELETE FROM batches WHERE step < 0 OR step >= ?", (batches,))
    new.execute("UPDATE meta SET value = ? WHERE name = 'synced'", (batches,))
    if newest is None or newest < batches:
        return []
    return [f"batches {batches} to {newest}: not all of batch {batches} is there as it was recorded"]


def _let_go_of_lost(new: sqlite3.Connection, segments: Path, batches: int, report: Report) -> None:
    """Make every row agree with its payload, and give every group exactly one fate, which is true."""
    for group in list(group_rows(new, "TRUE")):
        rollouts = rollout_rows(new, group.number)
        payloads = {one.idx: read_payload(segments, one.place) for one in rollouts}
        gone = {idx for idx, payload in payloads.items() if payload is None}
        odd = {one.idx for one in rollouts if (held := payloads[one.idx]) is not None and not says_the_same(one, held)}
        is_dropped = group.reason is not None
        if group.step is not None or (is_dropped and not odd and not list(fate_faults(group, rollouts, report))):
            rows = [(NO_SEGMENT, group.number, idx) for idx in gone]
            new.executemany("UPDATE rollouts SET segment = ? WHERE number = ? AND idx = ?", rows)
            continue
        # The group waits. Answers drawn with lost weights cannot be in a batch before these weights are made again.
        future = {one.idx for one in rollouts if is_dropped or not group.version <= one.oldest <= batches}
        _draw_again(new, group.number, gone | odd | future, batches, answered=len(rollouts))


def _draw_again(new: sqlite3.Connection, number: int, samples: set[int], batches: int, *, answered: int) -> None:
    """Make a group wait without the answers to `samples`. If no answer is left, it counts as opened for version
    `batches`."""
    new.executemany("DELETE FROM rollouts WHERE number = ? AND idx = ?", [(number, idx) for idx in samples])
    version = "min(version, ?)" if len(samples) < answered else "?"
    new.execute(
        f"UPDATE groups SET version = {version}, incarnation = 0, reason = NULL, dropped_oldest = NULL, "
        "dropped_at = NULL, dropped_bound = NULL WHERE number = ?",
        (batches, number),
    )
