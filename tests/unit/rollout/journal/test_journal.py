"""The journal: order and group commit, what survives a kill, a full disk, damage, pruning."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from swarm.errors import Damaged, UserError
from swarm.rollout.journal.entries import (
    BatchTaken,
    BoundSet,
    Entry,
    GroupDropped,
    GroupOpened,
    RecordedGroup,
    RolloutAccepted,
    RolloutReturned,
    RolloutScored,
    SamplesLeased,
    TurnTaken,
    VersionPublished,
)
from swarm.rollout.journal.journal import DATABASE, Journal, JournalFailed
from swarm.rollout.journal.verify import verify_run
from swarm.types import GroupId, NodeId, Observed, Rollout, Score, Span, Turn
from swarm.wire import digest
from tests.builders import ALICE, BOB, ints, rollout, v

SIZE = 2
ASKED = 5  # The prompt of group 0; the other groups have the next ones


@asynccontextmanager
async def opened(directory: Path, *, size: int = SIZE, retry_s: float = 0.001) -> AsyncIterator[Journal]:
    journal = Journal(directory, group_size=size, retry_s=retry_s)
    await journal.start()
    try:
        yield journal
    finally:
        await journal.close()


def answer(number: int, index: int, version: int = 0) -> Rollout:
    return rollout(group_id=f"t{number}", index=index, version=version, tokens=(3, 4, 5, number % 7))


def score_of(number: int, index: int) -> Score:
    parts = {"form": index / 4, "answer": 1.0} if index else {}
    return Score(reward=number + index / 2, exact=index == 0, parts=parts)


def group(number: int, *, version: int = 0, scored: int = SIZE, size: int = SIZE) -> list[Entry]:
    """A group whose samples are all answered, and `scored` of them scored."""
    return [
        GroupOpened(number=number, prompt_number=number + ASKED, version=v(version), max_staleness=2),
        SamplesLeased(number=number, node=ALICE, samples=tuple((i, 0) for i in range(size))),
        *(RolloutAccepted(number=number, node=ALICE, rollout=answer(number, i, version)) for i in range(size)),
        *(RolloutScored(number=number, index=i, score=score_of(number, i)) for i in range(scored)),
    ]


def taken(step: int, *numbers: int) -> BatchTaken:
    return BatchTaken(step=step, max_staleness=2, numbers=numbers)


def dropped(number: int, *, reason: str = "stale", oldest: int = 0, next_batch: int = 3) -> GroupDropped:
    return GroupDropped(
        number=number,
        group_id=GroupId(f"t{number}"),
        reason=reason,
        rollouts=SIZE,
        nodes={ALICE: SIZE},
        oldest=oldest,
        next_batch=next_batch,
        max_staleness=2,
    )


def numbers(groups: Sequence[RecordedGroup]) -> list[int]:
    return [one.number for one in groups]


async def test_what_was_written_is_there_again(tmp_path: Path) -> None:
    """Groups, leases and answers are, as test_model.py has it: here is the rest, and what a kill left unwritten."""
    first = VersionPublished(version=v(0), content=digest(b"weights"))
    bound = BoundSet(max_staleness=2, publish_every_steps=1)
    held_out = replace(dropped(9), number=None, group_id=GroupId("e1-0"))
    async with opened(tmp_path) as journal:
        await journal.write([first, bound, *group(0), *group(1), taken(0, 1, 0), held_out])
        journal.enqueue(group(2))
    async with opened(tmp_path) as journal:
        run = await asyncio.to_thread(journal.load)
        batch = await asyncio.to_thread(journal.batch, 0)
        assert journal.published(0) == first
        assert journal.published(1) is None
    with pytest.raises(JournalFailed, match="closed"):
        journal.enqueue(group(1))
    assert (run.published, run.bound) == (first, bound)
    assert numbers(run.groups) == [2], "closing writes what is queued"
    assert run.given == {ALICE: (3 * SIZE, 3 * SIZE * 4)}
    assert (numbers(batch), batch[1].rollouts[1].node) == ([1, 0], ALICE)


def turn_of(number: int, index: int, turn: int, node: NodeId = ALICE) -> TurnTaken:
    said = Observed(token_ids=ints(7, turn), rewards=(0.5,))
    return TurnTaken(number=number, turn=turn, node=node, drawn=answer(number, index), said=said)


async def test_the_turns_of_episodes_under_way_are_there_again_until_these_end_or_are_given_up(tmp_path: Path) -> None:
    first, second, other, given_up = turn_of(0, 0, 0), turn_of(0, 0, 1, BOB), turn_of(0, 1, 0), turn_of(1, 0, 0)
    async with opened(tmp_path) as journal:
        await journal.write(
            [GroupOpened(number=number, prompt_number=number, version=v(0), max_staleness=2) for number in range(3)]
        )
        await journal.write([first, second, other, given_up, turn_of(2, 0, 0), dropped(2)])
        await journal.write([RolloutReturned(number=1, index=0)])
        returned = [RolloutReturned(number=3, index=i) for i in range(SIZE)]
        await journal.write([*group(3)[:4], *returned, dropped(3)])
        assert kept(tmp_path) == [], "a returned rollout takes its payload along"
    async with opened(tmp_path) as journal:
        run = await asyncio.to_thread(journal.load)
        assert [one.turns for one in run.groups] == [(first, second, other), ()]
        played = structs.replace(answer(0, 0), turns=(Turn(start=0, end=1),))
        await journal.write([RolloutAccepted(number=0, node=BOB, rollout=played)])
        assert [one.turns for one in (await asyncio.to_thread(journal.load)).groups] == [(other,), ()]
        spans = (Span(version=v(0), start=0, end=2, node=ALICE), Span(version=v(0), start=2, end=4))
        handed = structs.replace(answer(0, 1), spans=spans)
        await journal.write([RolloutAccepted(number=0, node=BOB, rollout=handed)])
        group_, _ = (await asyncio.to_thread(journal.load)).groups
        assert (group_.turns, group_.rollouts[1].rollout) == ((), handed)


async def test_a_turn_that_was_changed_on_disk_is_damage(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await journal.write([GroupOpened(number=0, prompt_number=0, version=v(0), max_staleness=2), turn_of(0, 0, 0)])
    with closing(sqlite3.connect(tmp_path / DATABASE)) as found, found:
        found.execute("UPDATE turns SET payload = zeroblob(9)")
    async with opened(tmp_path) as journal:
        with pytest.raises(Damaged, match="turn 0 of t0/0 was changed"):
            await asyncio.to_thread(journal.load)


# -- order and group commit ----------------------------------------------------------------------------------------


async def test_all_that_is_queued_is_one_transaction_bounded_in_entries_and_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as journal:
        sizes: list[tuple[int, int]] = []
        commit = journal._commit

        def counted(entries: Sequence[Entry]) -> None:
            sizes.append((len(entries), sum(isinstance(entry, RolloutAccepted) for entry in entries)))
            commit(entries)

        monkeypatch.setattr(journal, "_commit", counted)
        await asyncio.gather(*(journal.write(group(n)) for n in range(50)))
        assert sum(entries for entries, _ in sizes) == 50 * len(group(0))
        assert len(sizes) <= 2
        sizes.clear()
        monkeypatch.setattr("swarm.rollout.journal.journal.TRANSACTION_ENTRIES", 10)
        monkeypatch.setattr("swarm.rollout.journal.journal.TRANSACTION_BYTES", 100)
        await asyncio.gather(*(journal.write(group(n)) for n in range(50, 70)))
        assert max(entries for entries, _ in sizes) <= 10
        assert max(rollouts for _, rollouts in sizes) == 100 // (4 * 4 + 4 * 4)
        assert len(journal.load().groups) == 70


# -- what cannot be recorded ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (group(0)[2:3], "UNIQUE"),
        (group(0)[:1], "UNIQUE"),
        (group(7)[2:3], "FOREIGN KEY"),
        (group(7)[-1:], "a score of no rollout"),
        ([taken(1, 1)], "does not wait"),
        ([taken(1, 0)], "does not wait"),
        ([taken(2, 2)], "comes before"),
        ([taken(1, 3)], "not complete"),
        ([taken(1, 4)], "not complete"),
        ([dropped(0)], "does not wait"),
        ([dropped(1)], "does not wait"),
        ([VersionPublished(version=v(0), content=digest(b"other"))], "another content"),
    ],
)
async def test_what_contradicts_the_rows_is_refused_loudly(tmp_path: Path, wrong: list[Entry], fault: str) -> None:
    async with opened(tmp_path) as journal:
        first = [VersionPublished(version=v(0), content=digest(b"one"))]
        await journal.write([*first, *group(0), *group(1), *group(2), *group(3, scored=1), *group(4)[:3]])
        await journal.write([taken(0, 0), dropped(1)])
        with pytest.raises(JournalFailed, match=fault):
            await journal.write(wrong)
        with pytest.raises(JournalFailed, match=fault):
            await journal.write(group(9))
    async with opened(tmp_path) as journal:
        assert numbers(journal.load().groups) == [2, 3, 4]


async def test_the_same_version_may_be_announced_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        for incarnation in (0, 0, 1):
            content = digest(bytes(incarnation))
            await journal.write([VersionPublished(version=v(3, incarnation), content=content)])
        found = journal.published(3)
        assert found is not None
        assert found.version == v(3, 1)


def test_another_schema_size_or_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    async def make() -> None:
        async with opened(tmp_path):
            pass

    asyncio.run(make())
    with pytest.raises(UserError, match="groups of 2 samples, not 3"):
        Journal(tmp_path, group_size=3)
    with closing(sqlite3.connect(tmp_path / DATABASE)) as found:
        found.execute("PRAGMA user_version = 99")
    with pytest.raises(UserError, match="schema 99"):
        Journal(tmp_path, group_size=SIZE)
    (tmp_path / DATABASE).write_bytes(b"no database, " * 1000)
    with pytest.raises(UserError, match="is damaged"):
        Journal(tmp_path, group_size=SIZE)


# -- drops, leases, lineage ----------------------------------------------------------------------------------------


async def test_the_groups_that_were_replaced_for_the_next_batch_are_counted(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await journal.write([entry for number in range(6) for entry in group(number)])
        await journal.write([dropped(number, reason="no_variance", next_batch=0) for number in (0, 1)])
        assert journal.load().replaced == 2
        await journal.write([taken(0, 2, 3), dropped(4, reason="no_variance", next_batch=1), dropped(5, next_batch=1)])
        assert journal.load().replaced == 1


async def test_the_lineage_follows_from_what_was_trained_on_in_which_order(tmp_path: Path) -> None:
    found: list[bytes] = []
    for name, order, reward in (("a", (0, 1), 1.0), ("b", (1, 0), 1.0), ("c", (0, 1), 2.0), ("d", (0, 1), 1.0)):
        async with opened(tmp_path / name) as journal:
            entries = [*group(0), *group(1, scored=0)]
            scores = [RolloutScored(number=1, index=i, score=Score(reward=reward, exact=False)) for i in range(SIZE)]
            await journal.write([*entries, *scores])
            assert journal.lineage(0) == b""
            await journal.write([taken(0, *order)])
            found.append(journal.lineage(1))
            with pytest.raises(LookupError):
                journal.lineage(2)
            with pytest.raises(LookupError):
                journal.batch(1)
    assert found[0] == found[3]
    assert len(set(found)) == 3


# -- crashes -------------------------------------------------------------------------------------------------------

WRITING = """
import asyncio, sys
from pathlib import Path
from swarm.rollout.journal.journal import Journal
from tests.unit.rollout.journal.test_journal import group, taken

async def main():
    journal = Journal(Path(sys.argv[1]), group_size=2)
    first = journal.load().opened
    await journal.start()
    for number in range(first, first + 100_000):
        await journal.write(group(number, version=number))
        await journal.write([taken(number, number)])
        print(number, flush=True)

asyncio.run(main())
"""


def kill_after(directory: Path, answers: int) -> int:
    """Kill a writer when it has said `answers` times that a step is committed; the last step that it said."""
    command = [sys.executable, "-c", WRITING, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        said = [writer.stdout.readline() for _ in range(answers)]
        os.kill(writer.pid, signal.SIGKILL)
        return int([*said, *writer.stdout.read().splitlines()][-1])


async def test_a_kill_at_any_moment_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """The kills come after different numbers of answers, and at whatever point the writer has reached meanwhile."""
    for more in (1, 3, 17, 41):
        acknowledged = await asyncio.to_thread(kill_after, tmp_path, more)
        assert (tmp_path / (DATABASE + "-wal")).stat().st_size > 0
        report = verify_run(tmp_path, groups_per_step=1, group_size=SIZE)
        assert (report.breaches, report.batches > acknowledged) == ([], True), "it reads what is still in the log"
        async with opened(tmp_path) as journal:
            run = journal.load()
            assert run.next_batch in (acknowledged + 1, acknowledged + 2)
            assert len(run.groups) <= 1
            for step in range(run.next_batch):
                (found,) = journal.batch(step)
                assert [one.rollout for one in found.rollouts] == [answer(step, 0, step), answer(step, 1, step)]
            for ready in run.groups:
                await journal.write([taken(run.next_batch, ready.number)])


# -- a full disk ---------------------------------------------------------------------------------------------------


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """No file of this process may grow past `nbytes`: a real error of a real write, which needs no root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def until_fault(journal: Journal) -> None:
    for _ in range(1_000_000):
        if journal.fault:
            return
        await asyncio.sleep(0)
    raise AssertionError("the disk did not become full")


async def test_a_full_disk_pauses_and_the_same_entries_are_written_when_there_is_room(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await journal.write(group(0))
        large = Rollout(
            group_id="t1", index=0, token_ids=bytes(4000), logprobs=bytes(4000), spans=answer(1, 0).spans, finish="stop"
        )
        entries: list[Entry] = [
            GroupOpened(number=1, prompt_number=1, version=v(0), max_staleness=2),
            RolloutAccepted(number=1, node=ALICE, rollout=large),
        ]
        with file_size_limit((tmp_path / (DATABASE + "-wal")).stat().st_size):
            first = asyncio.create_task(journal.write(entries))
            await until_fault(journal)
            assert kept(tmp_path) == [0]
            second = asyncio.create_task(journal.write(group(2)))
            await asyncio.sleep(0)
            assert not first.done()
            assert "free" in journal.fault
            assert str(tmp_path) in journal.fault
            assert journal.pending_bytes == 8000 + 2 * 32
        await asyncio.gather(first, second)
        assert (journal.fault, journal.pending_bytes) == ("", 0)
        run = journal.load()
        assert numbers(run.groups) == [0, 1, 2]
        assert run.groups[1].rollouts[0].rollout == large
        assert [one.rollout for one in run.groups[2].rollouts] == [answer(2, 0), answer(2, 1)]


async def test_too_little_free_room_is_seen_before_it_is_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as journal:
        with monkeypatch.context() as patched:
            patched.setattr("swarm.rollout.journal.index.SPARE_BYTES", 1 << 60)
            waiting = asyncio.create_task(journal.write(group(0)))
            await until_fault(journal)
            assert kept(tmp_path) == []
        await waiting
        assert numbers(journal.load().groups) == [0]


async def test_closing_with_a_full_disk_tells_those_who_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.rollout.journal.index.SPARE_BYTES", 1 << 60)
    journal = Journal(tmp_path, group_size=SIZE, retry_s=3600.0)
    await journal.start()
    waiting = asyncio.create_task(journal.write(group(0)))
    await until_fault(journal)
    await journal.close()
    with pytest.raises(JournalFailed):
        await waiting


# -- damage, syncing, pruning --------------------------------------------------------------------------------------


def damage(directory: Path, number: int, index: int) -> None:
    """Change a payload behind SQLite's back."""
    with closing(sqlite3.connect(directory / DATABASE)) as found, found:
        changed = found.execute(
            "UPDATE payloads SET payload = CAST(substr(payload, 2) AS BLOB) WHERE number = ? AND idx = ?",
            (number, index),
        )
        assert changed.rowcount == 1


def kept(directory: Path) -> list[int]:
    """The groups whose payloads are kept."""
    with closing(sqlite3.connect(directory / DATABASE)) as found:
        return [number for (number,) in found.execute("SELECT DISTINCT number FROM payloads ORDER BY number")]


async def test_a_damaged_payload_is_said_to_be_damaged_in_a_batch_and_in_a_group_that_waits(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await journal.write([*group(0), taken(0, 0)])
        damage(tmp_path, 0, 0)
        assert journal.load().next_batch == 1
        await journal.write(group(1))
        damage(tmp_path, 1, 1)
        with pytest.raises(UserError, match="the payload of t1/1 is lost or was changed"):
            journal.load()
        with pytest.raises(UserError, match="the payload of t0/0"):
            journal.batch(0)
        with pytest.raises(UserError, match="the payload of t0/0"):
            journal.check_batches(0)


async def test_what_was_synced_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk keeps of the log what was there at its last fsync."""
    disk, run_dir, synced = tmp_path / "disk", tmp_path / "run", set()
    disk.mkdir()
    fsync = os.fsync

    def keep(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.add(path.name)
        if path.is_file():
            (disk / path.name).write_bytes(path.read_bytes())
        fsync(descriptor)

    async with opened(run_dir) as journal:
        (disk / DATABASE).write_bytes((run_dir / DATABASE).read_bytes())
        monkeypatch.setattr(os, "fsync", keep)
        await journal.write([*group(0), taken(0, 0)])
        await journal.sync()
        (tmp_path / "moved").mkdir()
        shutil.copy(run_dir / DATABASE, tmp_path / "moved" / DATABASE)
        await journal.write([*group(1), taken(1, 1)])
    async with opened(tmp_path / "moved") as journal:
        assert journal.load().next_batch == 1, "a sync moves the log to the database, so that no commit has to soon"
    assert synced == {DATABASE + "-wal", run_dir.name}
    async with opened(disk) as journal:
        run = journal.load()
        assert (run.next_batch, run.groups) == (1, ())
        assert [one.rollout for one in journal.batch(0)[0].rollouts] == [answer(0, 0), answer(0, 1)]


async def test_pruning_keeps_what_checkpoints_waiting_groups_and_the_user_need(tmp_path: Path) -> None:
    async def prune(oldest_step: int, keep_rollouts: int | None) -> int:
        count = 0
        while await journal.prune(oldest_step=oldest_step, keep_rollouts=keep_rollouts):
            count += 1
        return count

    async with opened(tmp_path) as journal:
        # Batch n holds group n. Group 100 came early and waits; the others were dropped before batches 2 and 8.
        await journal.write([*group(100), *group(101), dropped(101, next_batch=2), *group(102)])
        for n in range(8):
            await journal.write([*group(n), taken(n, n)])
        await journal.write([dropped(102, next_batch=8)])
        assert await prune(8, None) == 0
        assert await prune(2, 2) == 2
        assert kept(tmp_path) == [2, 3, 4, 5, 6, 7, 100, 101, 102]
        assert await prune(8, 6) == 0
        assert await prune(4, 2) == 2
        assert kept(tmp_path) == [4, 5, 6, 7, 100, 102]
    async with opened(tmp_path) as journal:
        assert await prune(8, 0) == 4
        assert kept(tmp_path) == [100, 102]
        assert numbers(journal.load().groups) == [100]
        await journal.write([taken(8, 100)])
        assert await prune(9, 0) == 1
        assert kept(tmp_path) == []
