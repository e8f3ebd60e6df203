"""The learner's journal: a redo log in SQLite (WAL), written by one thread.

Theory of operation. Entries queue in the order in which the plane returned them. When the writing thread is free, the
queued entries become one transaction, with the payloads of rollouts. `write` returns when its entries are committed. So
a verdict is sent, a batch trained on and a version announced only after they are recorded.

What survives. When `write` returns, the transaction is in the page cache (PRAGMA synchronous = NORMAL: no fsync for
each). So killing the process loses nothing that was acknowledged. A power cut may lose what was acknowledged since the
last `sync`, and nothing else: SQLite recovers the longest whole prefix of transactions. Nothing is trained on twice
(I3): a checkpoint is begun only after its batches are synced, so no checkpoint holds a lost batch, and training
continues from a checkpoint.

Disk full: the transaction is rolled back, `fault` says what to do, and the same entries are tried again each second.
Nothing is lost or reordered; callers wait. Any other error is final.
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
from swarm.files import sync_path
from swarm.rollout.journal.entries import Entry, RecordedGroup, RecordedRun, RolloutAccepted, VersionPublished
from swarm.rollout.journal.index import (
    Index,
    NoRoom,
    check_pages,
    next_lineage,
    read_lineage,
    read_meta,
    read_samples,
    reading,
    require_room,
    telling_damage,
)
from swarm.rollout.journal.reading import count_batches, read_batch, read_bound, read_run, read_version

DATABASE = "journal.db"
TRANSACTION_ENTRIES = 4096
TRANSACTION_BYTES = 32 * 1024 * 1024
"""Bounds of one transaction, about 0.1 s of work, so that a caller does not wait for the whole queue."""

ROW_BYTES = 256  # Room that an entry may need in database and log together, besides its payload, which is in both

RETRY_S = 1.0  # Pause between tries while the disk is full
T = TypeVar("T")


class JournalFailed(EchoError):
    """The journal can no longer be written. Entries that were not acknowledged may be lost."""


class Journal:
    """The journal of the run in `directory`, which is created if necessary. Only one process may have it open. Raise
    UserError if it has another schema or group size."""

    def __init__(self, directory: Path, *, group_size: int, retry_s: float = RETRY_S) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._retry_s = retry_s
        self._index = Index(directory / DATABASE, group_size=group_size)
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

    async def prune(self, *, oldest_step: int, keep_rollouts: int | None) -> bool:
        """Delete the payloads of one batch that are not needed, and of what was dropped before it was taken. Return
        whether there was one. A payload is needed if its group waits, or if its batch is from `oldest_step` (of the
        oldest checkpoint) on or one of the last `keep_rollouts`. None keeps all."""
        if keep_rollouts is None:
            return False
        return await self._retried(lambda: self._prune(oldest_step, keep_rollouts))

    # -- reading, blocking: call these in a thread -----------------------------------------------------------

    def load(self) -> RecordedRun:
        """Return where the run stood. Call it before writing anything. Raise Damaged if the database is not whole."""
        with telling_damage(self._directory / DATABASE):
            return self._thread.submit(self._load).result()

    def batch(self, step: int) -> list[RecordedGroup]:
        """Return a recorded batch in its order. Raise Damaged if one of its payloads is lost, LookupError if it is not
        recorded."""
        with reading(self._directory / DATABASE) as found:
            return read_batch(found, step)

    def published(self, version: int) -> VersionPublished | None:
        """Return the last record under a version's number, in any incarnation."""
        with reading(self._directory / DATABASE) as found:
            return read_version(found, version)

    def lineage(self, step: int) -> bytes:
        """Return the digest of all batches before `step`, empty for 0. Raise LookupError if they are not recorded."""
        with reading(self._directory / DATABASE) as found:
            return read_lineage(found, step)

    def trained_as(self, step: int) -> tuple[bytes, float | None]:
        """Return the digest of all batches up to and with `step`, and the peak of the learning rate that was set for
        it; None if none was. Raise LookupError if they are not recorded."""
        with reading(self._directory / DATABASE) as found:
            bound = read_bound(found, step)
            return read_lineage(found, step + 1), bound.learning_rate if bound else None

    def check_batches(self, first: int) -> None:
        """Raise Damaged unless all recorded batches from `first` on are unchanged and can be trained on again."""
        with reading(self._directory / DATABASE) as found:
            for step in range(first, count_batches(found)):
                samples = msgspec.convert(read_samples(found, step), list[tuple[int, int, bytes, float]])
                if next_lineage(read_lineage(found, step), step, samples) != read_lineage(found, step + 1):
                    raise Damaged(self._directory, DATABASE, f"the rows of batch {step} were changed")
                read_batch(found, step)

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

    async def _retried(self, work: Callable[[], T]) -> T:
        """Do `work` in the thread, and repeat it while the disk is full."""
        while True:
            try:
                result = await self._in_thread(work)
            except NoRoom as error:
                self.fault = str(error)
                if self._closing.is_set():
                    raise
            else:
                self.fault = ""
                return result
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
        require_room(self._directory, 2 * sum(map(_payload_bytes, entries)) + ROW_BYTES * len(entries))
        self._index.apply(entries)

    def _sync(self) -> None:
        # Whatever is not yet in the database is in the log. `empty_log` would sync it too, but not while another
        # process reads.
        sync_path(self._directory / (DATABASE + "-wal"))
        sync_path(self._directory)
        self._index.empty_log()

    def _load(self) -> RecordedRun:
        check_pages(self._index.connection, payloads=False)
        return read_run(self._index.connection)

    def _prune(self, oldest_step: int, keep_rollouts: int) -> bool:
        connection = self._index.connection
        step = read_meta(connection, "pruned")
        if step >= min(oldest_step, count_batches(connection) - keep_rollouts):
            return False
        self._index.prune(step)
        return True


def _payload_bytes(entry: Entry) -> int:
    if not isinstance(entry, RolloutAccepted):
        return 0
    rollout = entry.rollout
    return len(rollout.token_ids) + len(rollout.logprobs)
