"""The learner's journal: a redo log in SQLite (WAL), with payloads in segment files, written by one thread.

Theory of operation. Entries queue in the order in which the plane returned them. When the writing thread is free, the
queued entries become one transaction: payloads are appended to their segments first, then the rows that name them are
committed. `write` returns when its entries are committed. So a verdict is sent, a batch trained on and a version
announced only after they are recorded.

What survives. When `write` returns, the transaction is in the page cache (PRAGMA synchronous = NORMAL: no fsync for
each). So killing the process loses nothing that was acknowledged. A power cut may lose what was acknowledged since the
last `sync`, and nothing else. SQLite recovers the longest whole prefix of transactions, and a payload whose digest does
not match its row counts as not accepted. A waiting group loses such a sample, which is leased again. A batch with such
a payload was taken after the last sync. `load` undoes it and all later ones, as if the power had failed before them.
Nothing is trained on twice (I3): a checkpoint is begun only after its batches are synced, so no checkpoint holds an
undone batch, and training continues from a checkpoint.

Disk full: the transaction is rolled back, the segments are cut back, `fault` says what to do, and the same entries are
tried again each second. Nothing is lost or reordered; callers wait. Any other error is final.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec

from swarm.aio import Changes
from swarm.errors import Damaged, EchoError
from swarm.rollout.journal.entries import Entry, RecordedGroup, RecordedRun, RolloutAccepted, VersionPublished
from swarm.rollout.journal.index import (
    WAITING,
    Index,
    check_pages,
    next_lineage,
    read_lineage,
    read_samples,
    reading,
    telling_damage,
)
from swarm.rollout.journal.reading import (
    count_batches,
    has_whole_batch,
    read_batch,
    read_bound,
    read_run,
    read_version,
    synced_batches,
)
from swarm.rollout.journal.segments import (
    NoRoom,
    SegmentWriter,
    require_room,
    segments_of,
    sync_path,
)

DATABASE = "journal.db"
SEGMENTS = "rollouts"
TRANSACTION_ENTRIES = 4096
TRANSACTION_BYTES = 32 * 1024 * 1024
"""Bounds of one transaction, about 0.1 s of work, so that a caller does not wait for the whole queue."""

ROW_BYTES = 256  # Room that an entry may need in database and log together, besides its payload

PRUNED_AT_ONCE = 64  # Segments that one call of `prune` deletes, at 2 ms each; nothing is written meanwhile
RETRY_S = 1.0  # Pause between tries while the disk is full
T = TypeVar("T")


class JournalFailed(EchoError):
    """The journal can no longer be written. Entries that were not acknowledged may be lost."""


class Journal:
    """The journal of the run in `directory`, which is created if necessary. Only one process may have it open. Raise
    UserError if it has another schema or group size, Damaged if its database is missing."""

    def __init__(self, directory: Path, *, group_size: int, retry_s: float = RETRY_S) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._retry_s = retry_s
        database = directory / DATABASE
        if segments_of(directory / SEGMENTS) and not (database.is_file() and database.stat().st_size):
            # SQLite would take an empty file for a new database, and the run would silently start over.
            raise Damaged(directory, DATABASE, "it is empty or not there")
        self._index = Index(database, group_size=group_size)
        unsynced = [s for s in segments_of(directory / SEGMENTS) if s >= synced_batches(self._index.connection)]
        self._segments = SegmentWriter(directory / SEGMENTS, unsynced=unsynced)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._queue: deque[Entry] = deque()
        self._queued = self._written = 0
        self._progress = Changes()
        self._wake, self._closing = asyncio.Event(), asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._failed: BaseException | None = None
        self.pending_bytes = 0  # Payloads that are queued or being written
        self.fault = ""  # Why writing is paused

    async def start(self) -> None:
        """Begin to write queued entries."""
        self._writer = asyncio.get_running_loop().create_task(self._write_all(), name="journal")
        self._writer.add_done_callback(self._ended)

    async def close(self) -> None:
        """Write the queue, unless the disk is full, and close. Callers that still wait get JournalFailed."""
        self._closing.set()
        self._wake.set()
        if self._writer is not None:
            await asyncio.wait([self._writer])
        self._end(JournalFailed("the journal is closed"))
        await self._in_thread(self._index.close)
        self._thread.shutdown()

    def enqueue(self, entries: Sequence[Entry]) -> None:
        """Queue entries to be written. Raise JournalFailed if the journal can no longer be written."""
        self._check()
        self._queue.extend(entries)
        self._queued += len(entries)
        self.pending_bytes += sum(map(_payload_bytes, entries))
        self._wake.set()

    async def write(self, entries: Sequence[Entry]) -> None:
        """Return when these entries and all those queued before them are committed."""
        self.enqueue(entries)
        needed = self._queued
        while self._written < needed:
            self._check()
            await self._progress.wait(self._progress.count, None)

    async def sync(self) -> None:
        """Return when everything queued so far would survive a power cut. Call it before a checkpoint is begun."""
        await self.write(())
        await self._retried(self._sync)

    async def prune(self, *, oldest_step: int, keep_rollouts: int | None) -> int:
        """Delete up to PRUNED_AT_ONCE segments that are not needed, and return how many were deleted. A payload is
        needed if its group waits, or if its batch is from `oldest_step` (of the oldest checkpoint) on or one of the
        last `keep_rollouts`. None keeps all."""
        if keep_rollouts is None:
            return 0
        return await self._in_thread(lambda: self._prune(oldest_step, keep_rollouts))

    # -- reading, blocking: call these in a thread -----------------------------------------------------------

    def load(self) -> RecordedRun:
        """Return where the run stood, after undoing what a power cut left half done. Call it before writing anything.
        Raise Damaged if the database is not whole."""
        with telling_damage(self._directory / DATABASE):
            return self._thread.submit(self._load).result()

    def batch(self, step: int) -> list[RecordedGroup]:
        """Return a recorded batch in its order. Raise UserError if one of its payloads is lost, LookupError if it is
        not recorded."""
        with reading(self._directory / DATABASE) as found:
            return read_batch(found, self._directory / SEGMENTS, step)

    def published(self, version: int) -> VersionPublished | None:
        """Return the last record under a version's number, in any incarnation."""
        with reading(self._directory / DATABASE) as found:
            return read_version(found, version)

    def lineage(self, step: int) -> bytes:
        """Return the digest of all batches before `step`, empty for 0. Raise LookupError if they are not recorded."""
        with reading(self._directory / DATABASE) as found:
            return read_lineage(found, step)

    def learning_rate(self, step: int) -> float | None:
        """Return the peak of the learning rate that was set for batch `step`; None if none was."""
        with reading(self._directory / DATABASE) as found:
            bound = read_bound(found, step)
        return bound.learning_rate if bound else None

    def check_batches(self, first: int) -> None:
        """Raise Damaged unless all recorded batches from `first` on are unchanged and can be trained on again."""
        with reading(self._directory / DATABASE) as found:
            for step in range(first, count_batches(found)):
                samples = msgspec.convert(read_samples(found, step), list[tuple[int, int, bytes, float]])
                if next_lineage(read_lineage(found, step), step, samples) != read_lineage(found, step + 1):
                    raise Damaged(self._directory, DATABASE, f"the rows of batch {step} were changed")
                if not has_whole_batch(found, self._directory / SEGMENTS, step):
                    raise Damaged(self._directory, SEGMENTS, f"rollouts of batch {step} are lost")

    # -- on the event loop -----------------------------------------------------------------------------------

    async def _write_all(self) -> None:
        while self._queue or not self._closing.is_set():
            entries = self._next_entries()
            if not entries:
                self._wake.clear()
                await self._wake.wait()
                continue
            await self._retried(partial(self._commit, entries))
            for _ in entries:
                self._queue.popleft()
            self._written += len(entries)
            self.pending_bytes -= sum(map(_payload_bytes, entries))
            self._progress.tell()

    def _next_entries(self) -> list[Entry]:
        """Return the queued entries for the next transaction: at least one unless the queue is empty."""
        entries: list[Entry] = []
        nbytes = 0
        for entry in islice(self._queue, TRANSACTION_ENTRIES):
            nbytes += _payload_bytes(entry)
            if entries and nbytes > TRANSACTION_BYTES:
                break
            entries.append(entry)
        return entries

    async def _retried(self, work: Callable[[], None]) -> None:
        """Do `work` in the thread, and repeat it while the disk is full."""
        while True:
            try:
                await self._in_thread(work)
            except NoRoom as error:
                self.fault = str(error)
                if self._closing.is_set():
                    raise
            else:
                self.fault = ""
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(self._retry_s):
                    await self._closing.wait()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _ended(self, writer: asyncio.Task[None]) -> None:
        error = JournalFailed("its task was cancelled") if writer.cancelled() else writer.exception()
        if error is not None:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        self._failed = self._failed or error
        self._progress.tell()

    def _check(self) -> None:
        if self._failed is not None:
            raise JournalFailed(f"the journal cannot be written: {self._failed}") from self._failed

    # -- in the thread ---------------------------------------------------------------------------------------

    def _commit(self, entries: Sequence[Entry]) -> None:
        accepted = [entry for entry in entries if isinstance(entry, RolloutAccepted)]
        payloads = [(entry.next_batch, msgspec.msgpack.encode(entry.rollout)) for entry in accepted]
        require_room(self._directory, sum(len(payload) for _, payload in payloads) + ROW_BYTES * len(entries))
        stored = self._segments.append(payloads)
        try:
            self._index.apply(entries, stored)
        except BaseException:
            self._segments.undo()
            raise

    def _sync(self) -> None:
        # Segments first: then every row that survives has its payload, and `synced` never claims too much.
        self._segments.sync()
        batches = count_batches(self._index.connection)
        self._index.transact(
            lambda: self._index.connection.execute("UPDATE meta SET value = ? WHERE name = 'synced'", (batches,))
        )
        # Whatever is not yet in the database is in the log. A WAL checkpoint would sync it too, but not while another
        # process reads.
        sync_path(self._directory / (DATABASE + "-wal"))
        sync_path(self._directory)

    def _load(self) -> RecordedRun:
        connection = self._index.connection
        check_pages(connection)
        for step in range(synced_batches(connection), count_batches(connection)):
            if not has_whole_batch(connection, self._directory / SEGMENTS, step):
                self._index.transact(partial(self._undo_batches, step))
                break
        run, lost = read_run(connection, self._directory / SEGMENTS)
        if lost:
            self._index.transact(
                lambda: connection.executemany("DELETE FROM rollouts WHERE number = ? AND idx = ?", lost)
            )
        return run

    def _undo_batches(self, first: int) -> None:
        self._index.connection.execute("UPDATE groups SET step = NULL, place = NULL WHERE step >= ?", (first,))
        self._index.connection.execute("DELETE FROM batches WHERE step >= ?", (first,))

    def _prune(self, oldest_step: int, keep_rollouts: int) -> int:
        connection = self._index.connection
        # Not past the last sync: `load` would think that a power cut took the missing payloads.
        first = min(oldest_step, synced_batches(connection), count_batches(connection) - keep_rollouts)
        needed = connection.execute(
            "SELECT DISTINCT r.segment FROM rollouts r JOIN groups g ON g.number = r.number "
            "WHERE g.step >= ? UNION SELECT r.segment FROM rollouts r JOIN groups g ON g.number = r.number "
            f"WHERE {WAITING}",
            (first,),
        )
        kept = {segment for (segment,) in needed}
        gone = [s for s in segments_of(self._directory / SEGMENTS) if s < count_batches(connection) and s not in kept]
        self._segments.remove(gone[:PRUNED_AT_ONCE])
        return min(len(gone), PRUNED_AT_ONCE)


def _payload_bytes(entry: Entry) -> int:
    if not isinstance(entry, RolloutAccepted):
        return 0
    rollout = entry.rollout
    return len(rollout.token_ids) + len(rollout.logprobs)
