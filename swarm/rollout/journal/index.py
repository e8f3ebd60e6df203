"""The journal's SQLite database: one small row for each rollout, group, batch and version, and the payloads.

Primary keys make it impossible to accept a sample twice or to train on a group twice. An entry that contradicts the
rows raises Contradiction, and its whole transaction is rolled back. A payload, an encoded Rollout, is written in the
transaction of its row. Rows stay for ever, payloads until they are pruned; their pages are then used again. All calls
block. In a learner, only the journal's thread writes.

The lineage is a digest of all batches in order: h_0 is empty, and h_{t+1} = BLAKE3(h_t, t, samples of batch t in
order). Each sample contributes its group's number, its index, its payload's digest and its reward. LINEAGE_STEP and
LINEAGE_SAMPLE are the packed formats.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec
from blake3 import blake3

from swarm.errors import Damaged, EchoError, UserError
from swarm.rollout.journal.entries import (
    BatchTaken,
    BoundSet,
    Entry,
    GroupDropped,
    GroupOpened,
    RolloutAccepted,
    RolloutReturned,
    RolloutScored,
    SamplesLeased,
    TurnTaken,
    VersionPublished,
)
from swarm.types import NodeId
from swarm.wire import digest, encode

SCHEMA_VERSION = 7  # Version of the tables below, kept in the database's user_version

WAL_PAGES = 16384  # Pages of 4 kB in the log before SQLite moves them to the database, which delays one commit
BUSY_S = 30.0  # Longest wait for another process; readers such as `verify` hold no lock that a writer waits for
MAX_ROWS = 256  # Rows in one statement: with 10 columns, a tenth of the parameters that SQLite allows
FINISHES = ("stop", "length", "failed")  # Rows hold the position in this tuple
LINEAGE_STEP = struct.Struct("<q")
DIGEST_BYTES = 16  # Bytes of BLAKE3 in each row: half of the digest is enough to rule out chance and damage
LINEAGE_SAMPLE = struct.Struct("<qq16sd")  # Little-endian: number and index of 8 bytes, digest, reward as float64

SPARE_BYTES = 16 * 1024 * 1024
"""Left free on the disk, for what others write before SQLite moves the write-ahead log to the database. The broadcast
leaves four times as much, so that versions pause before the journal does."""

ROOM_ERRORS = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_SHMSIZE,
    sqlite3.SQLITE_IOERR_TRUNCATE,
)
"""Errors that mean that a file could not grow. ENOSPC becomes SQLITE_FULL, an exceeded quota becomes another."""

NOT_DAMAGE = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_FULL,
)
"""Errors that do not mean a damaged database: another process uses it, access is denied, or the disk is full."""

SCHEMA = """
CREATE TABLE meta(name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE nodes(id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT;
CREATE TABLE groups(
    number INTEGER PRIMARY KEY, prompt_number INTEGER NOT NULL,
    incarnation INTEGER NOT NULL, version INTEGER NOT NULL, max_staleness INTEGER NOT NULL,
    step INTEGER, place INTEGER,
    reason TEXT, dropped_oldest INTEGER, dropped_at INTEGER, dropped_bound INTEGER
) STRICT;
CREATE UNIQUE INDEX groups_by_step ON groups(step, place) WHERE step IS NOT NULL;
CREATE INDEX groups_by_drop ON groups(dropped_at) WHERE dropped_at IS NOT NULL;
CREATE INDEX groups_waiting ON groups(number) WHERE step IS NULL AND reason IS NULL;
CREATE TABLE rollouts(
    number INTEGER NOT NULL REFERENCES groups(number), idx INTEGER NOT NULL, node INTEGER NOT NULL,
    oldest INTEGER NOT NULL, tokens INTEGER NOT NULL, finish INTEGER NOT NULL, reward REAL, exact INTEGER, parts BLOB,
    digest BLOB NOT NULL, PRIMARY KEY(number, idx)
) STRICT, WITHOUT ROWID;
CREATE TABLE payloads(
    number INTEGER NOT NULL, idx INTEGER NOT NULL, payload BLOB NOT NULL, PRIMARY KEY(number, idx),
    FOREIGN KEY(number, idx) REFERENCES rollouts(number, idx) ON DELETE CASCADE
) STRICT;
CREATE TABLE leases(
    number INTEGER NOT NULL, idx INTEGER NOT NULL, node INTEGER NOT NULL, attempt INTEGER NOT NULL,
    PRIMARY KEY(number, idx, node)
) STRICT;
CREATE TABLE turns(
    number INTEGER NOT NULL REFERENCES groups(number), idx INTEGER NOT NULL, turn INTEGER NOT NULL,
    node INTEGER NOT NULL, digest BLOB NOT NULL, payload BLOB NOT NULL, PRIMARY KEY(number, idx, turn)
) STRICT;
CREATE TABLE batches(step INTEGER PRIMARY KEY, max_staleness INTEGER NOT NULL, lineage BLOB NOT NULL) STRICT;
CREATE TABLE versions(
    version INTEGER NOT NULL, incarnation INTEGER NOT NULL, content BLOB NOT NULL, PRIMARY KEY(version, incarnation)
) STRICT, WITHOUT ROWID;
CREATE TABLE bounds(
    id INTEGER PRIMARY KEY, max_staleness INTEGER NOT NULL, publish_every_steps INTEGER NOT NULL,
    step INTEGER NOT NULL, learning_rate REAL
) STRICT;
"""
"""`batches.lineage` is h_{step + 1}. `rollouts.parts` is a msgpack map of rewards by name, NULL if there are none. The
rows of `leases` are in the order of leasing. `turns` has what was drawn and said in episodes under way. `meta` holds
`group_size` and `pruned`: the payloads of batches below it, and of groups dropped before those were taken, are
deleted."""

WAITING = "step IS NULL AND reason IS NULL"  # SQL condition for a group that is open or ready


class Contradiction(EchoError):
    """An entry contradicts an earlier record. This is a bug in the program."""


class NoRoom(EchoError):
    """The disk has no room for the journal. The message says how much to free, and where."""

    def __init__(self, directory: Path, missing: int) -> None:
        super().__init__(
            f"the disk of {directory} has no room for the journal: free {max(1, -(-missing // 1_000_000))} MB there; "
            "the run waits and then goes on by itself"
        )


def require_room(directory: Path, nbytes: int) -> None:
    """Raise NoRoom unless `nbytes` more fit on the disk of `directory`."""
    found = os.statvfs(directory)
    missing = nbytes + SPARE_BYTES - found.f_bavail * found.f_frsize
    if missing > 0:
        raise NoRoom(directory, missing)


def payload_digest(payload: bytes) -> bytes:
    return digest(payload)[:DIGEST_BYTES]


def next_lineage(before: bytes, step: int, samples: Iterable[tuple[int, int, bytes, float]]) -> bytes:
    """Return h_{step + 1} from h_step. `samples` holds number, index, digest and reward, in the batch's order."""
    rows = b"".join(LINEAGE_SAMPLE.pack(*sample) for sample in samples)
    return blake3(before + LINEAGE_STEP.pack(step) + rows).digest()


def require_database(path: Path) -> None:
    """Raise Damaged if the database is missing or empty, which SQLite would take for a new one."""
    if not path.is_file() or not path.stat().st_size:
        raise Damaged(path.parent, path.name, "it is empty" if path.exists() else "it is not there")


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a read-only snapshot of the database. A learner may be writing to it, or may have been killed. Raise Damaged
    if the database is missing or empty, or if the block finds values that no journal holds."""
    require_database(path)
    with telling_damage(path):
        found = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S, isolation_level=None)
        with closing(found):
            _check_schema(found, path)
            found.execute("BEGIN")
            yield found


@contextmanager
def telling_damage(path: Path) -> Iterator[None]:
    """Raise Damaged where SQLite or the types of rows show damage, UserError for errors in NOT_DAMAGE."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF in NOT_DAMAGE:
            raise UserError(f"{path} cannot be read or written ({error}): see who owns and who uses it") from error
        raise Damaged(path.parent, path.name, error) from error
    except (sqlite3.DatabaseError, msgspec.ValidationError, msgspec.DecodeError) as error:
        raise Damaged(path.parent, path.name, error) from error


def check_pages(connection: sqlite3.Connection, *, payloads: bool) -> None:
    """Raise DatabaseError if a page, row or index contradicts another. Reads the whole database, or all but the
    payloads, which are most of it and have digests."""
    tables = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' AND name != 'payloads'").fetchall()
    for what in ["1"] if payloads else [f'"{name}"' for (name,) in tables]:
        (found,) = connection.execute(f"PRAGMA integrity_check({what})").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)


def _check_schema(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path} is a journal of schema {version}, this echo-node reads {SCHEMA_VERSION}: "
            "use the release that wrote it, or another run directory"
        )


class Index:
    """The database, opened for writing. Only one thread at a time may call its methods."""

    def __init__(self, path: Path, *, group_size: int) -> None:
        self._path = path
        self._group_size = group_size
        self.connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            with telling_damage(path):
                self._prepare()
        except BaseException:
            self.connection.close()
            raise

    def apply(self, entries: Sequence[Entry]) -> None:
        """Record the entries in one transaction. Entries are applied kind by kind: nobody sees the order within a
        transaction, and no kind refers to a later one. NoRoom and Contradiction leave everything as it was."""
        some = list[Entry]()
        with self._transaction():
            for entry in entries:
                if isinstance(entry, RolloutReturned):
                    # The one kind whose order matters: the sample may be answered again afterwards.
                    self._apply_kinds(some)
                    self._return(entry)
                    some = []
                else:
                    some.append(entry)
            self._apply_kinds(some)

    def prune(self, step: int) -> None:
        """Delete the payloads of batch `step`, and of what was dropped since the batch before it. Those of earlier
        batches are deleted already."""
        pruned = "SELECT number FROM groups WHERE step = ?1 OR dropped_at = ?1"
        with self._transaction():
            self.connection.execute(f"DELETE FROM payloads WHERE number IN ({pruned})", (step,))
            self.connection.execute("UPDATE meta SET value = ? WHERE name = 'pruned'", (step + 1,))

    def empty_log(self) -> None:
        """Move the log to the database as far as no reader needs it, which would delay a commit later."""
        with suppress(sqlite3.OperationalError):  # Without room, as in a commit: the log waits for the next time
            self.connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Make the block one transaction, and roll back if it raises anything."""
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            yield
            self.connection.execute("COMMIT")
        except BaseException as error:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.IntegrityError):
                raise Contradiction(f"the journal refuses what it is told: {error}") from error
            if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode in ROOM_ERRORS:
                raise NoRoom(self._path.parent, WAL_PAGES * 4096) from error
            raise

    def close(self) -> None:
        self.connection.close()

    def _prepare(self) -> None:
        (version,) = self.connection.execute("PRAGMA user_version").fetchone()
        (tables,) = self.connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables or version:
            _check_schema(self.connection, self._path)
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("PRAGMA synchronous = NORMAL")
        self.connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        self.connection.execute(f"PRAGMA journal_size_limit = {WAL_PAGES * 4096}")
        self.connection.execute("PRAGMA foreign_keys = ON")
        self.connection.execute("PRAGMA secure_delete = OFF")  # Some builds of SQLite would write zeros over payloads
        if not tables:
            with self._transaction():
                self._create()
        size = read_meta(self.connection, "group_size")
        if size != self._group_size:
            raise UserError(f"{self._path} was written with groups of {size} samples, not {self._group_size}")

    def _create(self) -> None:
        for statement in SCHEMA.split(";\n"):
            self.connection.execute(statement)
        self.connection.execute("INSERT INTO meta VALUES ('group_size', ?), ('pruned', 0)", (self._group_size,))
        self.connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    # -- the kinds of entries --------------------------------------------------------------------------------

    def _apply_kinds(self, entries: Sequence[Entry]) -> None:
        self.connection.executemany(
            "INSERT INTO groups(number, prompt_number, incarnation, version, max_staleness) VALUES (?, ?, ?, ?, ?)",
            [
                (e.number, e.prompt_number, e.version.incarnation, e.version.version, e.max_staleness)
                for e in entries
                if isinstance(e, GroupOpened)
            ],
        )
        leased = [e for e in entries if isinstance(e, SamplesLeased)]
        accepted = [e for e in entries if isinstance(e, RolloutAccepted)]
        turns = [e for e in entries if isinstance(e, TurnTaken)]
        nodes = self._node_rows({e.node for some in (leased, turns, accepted) for e in some})
        rows = [(e.number, index, nodes[e.node], attempt) for e in leased for index, attempt in e.samples]
        self._many("INSERT OR REPLACE INTO leases(number, idx, node, attempt) VALUES {}", rows)
        self._play(turns, nodes)
        self._accept(accepted, nodes)
        self._score([e for e in entries if isinstance(e, RolloutScored)])
        self._drop([e for e in entries if isinstance(e, GroupDropped) and e.number is not None])
        for entry in entries:
            if isinstance(entry, BatchTaken):
                self._take(entry)
            elif isinstance(entry, VersionPublished):
                self._publish(entry)
            elif isinstance(entry, BoundSet):
                self.connection.execute(
                    "INSERT INTO bounds(max_staleness, publish_every_steps, step, learning_rate) VALUES (?, ?, ?, ?)",
                    (entry.max_staleness, entry.publish_every_steps, entry.step, entry.learning_rate),
                )

    def _play(self, entries: Sequence[TurnTaken], nodes: Mapping[str, int]) -> None:
        payloads = [msgspec.msgpack.encode((e.drawn, e.said)) for e in entries]
        rows = [
            (e.number, e.drawn.index, e.turn, nodes[e.node], payload_digest(payload), payload)
            for e, payload in zip(entries, payloads, strict=True)
        ]
        self._many("INSERT INTO turns VALUES {}", rows)

    def _end_episodes(self, samples: Sequence[tuple[int, int]]) -> int:
        return self.connection.executemany("DELETE FROM turns WHERE number = ? AND idx = ?", samples).rowcount

    def _accept(self, entries: Sequence[RolloutAccepted], nodes: Mapping[str, int]) -> None:
        payloads = [(e.number, e.rollout.index, msgspec.msgpack.encode(e.rollout)) for e in entries]
        rows = [
            (number, index, nodes[e.node], r.oldest, r.length, FINISHES.index(r.finish), payload_digest(payload))
            for (number, index, payload), e in zip(payloads, entries, strict=True)
            for r in [e.rollout]
        ]
        self._many("INSERT INTO rollouts(number, idx, node, oldest, tokens, finish, digest) VALUES {}", rows)
        self._many("INSERT INTO payloads VALUES {}", payloads)
        self._end_episodes([(e.number, e.rollout.index) for e in entries if e.rollout.turns or e.rollout.spans[0].node])

    def _return(self, entry: RolloutReturned) -> None:
        if self._end_episodes([(entry.number, entry.index)]) > 0:
            return
        self._each(
            "DELETE FROM rollouts WHERE number = ? AND idx = ? "
            f"AND number IN (SELECT number FROM groups WHERE {WAITING})",
            [(entry.number, entry.index)],
            "the return of a rollout that is not there, or in a batch",
        )

    def _score(self, entries: Sequence[RolloutScored]) -> None:
        rows = [
            (e.score.reward, e.score.exact, encode(e.score.parts) if e.score.parts else None, e.number, e.index)
            for e in entries
        ]
        changed = self._many(
            "UPDATE rollouts SET reward = column1, exact = column2, parts = column3 FROM (VALUES {}) "
            "WHERE rollouts.number = column4 AND rollouts.idx = column5",
            rows,
        )
        if changed != len(rows):
            raise Contradiction("the journal refuses what it is told: a score of no rollout")

    def _drop(self, entries: Sequence[GroupDropped]) -> None:
        self._each(
            "UPDATE groups SET reason = ?, dropped_oldest = ?, dropped_at = ?, dropped_bound = ? "
            f"WHERE number = ? AND {WAITING}",
            [(e.reason, e.oldest, e.next_batch, e.max_staleness, e.number) for e in entries],
            "a drop of a group that does not wait",
        )
        self._end_leases([e.number for e in entries if e.number is not None])

    def _take(self, taken: BatchTaken) -> None:
        try:
            before = read_lineage(self.connection, taken.step)
        except LookupError as error:
            raise Contradiction(f"batch {taken.step} comes before the ones before it") from error
        self._each(
            f"UPDATE groups SET step = ?, place = ? WHERE number = ? AND {WAITING}",
            [(taken.step, place, number) for place, number in enumerate(taken.numbers)],
            f"batch {taken.step} has a group that does not wait",
        )
        samples = read_samples(self.connection, taken.step)
        scored = sum(reward is not None for _, _, _, reward in samples)
        if not len(taken.numbers) * self._group_size == len(samples) == scored:
            raise Contradiction(f"batch {taken.step} has a group that is not complete")
        self.connection.execute(
            "INSERT INTO batches VALUES (?, ?, ?)",
            (taken.step, taken.max_staleness, next_lineage(before, taken.step, samples)),
        )
        self._end_leases(taken.numbers)

    def _publish(self, entry: VersionPublished) -> None:
        self._each(
            "INSERT INTO versions VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET content = excluded.content "
            "WHERE content = excluded.content",
            [(entry.version.version, entry.version.incarnation, bytes(entry.content))],
            f"version {entry.version} was published with another content",
        )

    def _end_leases(self, numbers: Sequence[int]) -> None:
        for table in ("leases", "turns"):
            self.connection.executemany(f"DELETE FROM {table} WHERE number = ?", [(number,) for number in numbers])

    def _many(self, sql: str, rows: Sequence[tuple[object, ...]]) -> int:
        """Run a statement with `rows` as its VALUES, and return how many rows it changed. Python releases its lock for
        each step of SQLite and waits up to 5 ms to get it back from a busy event loop. `executemany` would do so for
        each row. Row counts are powers of two, to keep the prepared statements few."""
        changed, start = 0, 0
        while start < len(rows):
            count = min(MAX_ROWS, 1 << ((len(rows) - start).bit_length() - 1))
            some = rows[start : start + count]
            values = ",".join(["(" + ",".join("?" * len(some[0])) + ")"] * count)
            changed += self.connection.execute(sql.format(values), [value for row in some for value in row]).rowcount
            start += count
        return changed

    def _each(self, sql: str, rows: Sequence[tuple[object, ...]], fault: str) -> None:
        """Run a statement for each of `rows`. Raise Contradiction unless each changes one row."""
        if rows and self.connection.executemany(sql, rows).rowcount != len(rows):
            raise Contradiction(f"the journal refuses what it is told: {fault}")

    def _node_rows(self, names: Collection[NodeId]) -> dict[str, int]:
        """Return the row numbers of nodes, after adding rows for new ones."""
        self._many("INSERT OR IGNORE INTO nodes(name) VALUES {}", [(name,) for name in sorted(names)])
        slots = ",".join("?" * len(names))
        return dict(self.connection.execute(f"SELECT name, id FROM nodes WHERE name IN ({slots})", [*names]).fetchall())


def read_meta(connection: sqlite3.Connection, name: str) -> int:
    row = connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return msgspec.convert(row, tuple[int])[0]


def read_lineage(connection: sqlite3.Connection, step: int) -> bytes:
    """Return the recorded digest of all batches before `step`. Raise LookupError if they are not all recorded."""
    if step == 0:
        return b""
    row = connection.execute("SELECT lineage FROM batches WHERE step = ?", (step - 1,)).fetchone()
    if row is None:
        raise LookupError(f"batch {step - 1} is not recorded")
    return bytes(row[0])


def read_samples(connection: sqlite3.Connection, step: int) -> list[tuple[int, int, bytes, float]]:
    """Return number, index, digest and reward of each sample of a batch, in the batch's order."""
    return connection.execute(
        "SELECT r.number, r.idx, r.digest, r.reward FROM groups g JOIN rollouts r ON r.number = g.number "
        "WHERE g.step = ? ORDER BY g.place, r.idx",
        (step,),
    ).fetchall()
