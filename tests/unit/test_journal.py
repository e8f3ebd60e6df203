"""The journal: order and group commit, what survives a kill, a full disk, damage, pruning."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from swarm.errors import UserError
from swarm.rollout.entries import (
    BatchTaken,
    BoundSet,
    Entry,
    GroupDropped,
    GroupOpened,
    RecordedGroup,
    RolloutAccepted,
    RolloutScored,
    SamplesLeased,
    VersionPublished,
)
from swarm.rollout.journal import DATABASE, SEGMENTS, Journal, JournalFailed
from swarm.types import GroupId, Rollout, Score
from swarm.wire import digest
from tests.builders import ALICE, BOB, rollout, v

SIZE = 2


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


def group(number: int, *, batch: int = 0, version: int = 0, scored: int = SIZE, size: int = SIZE) -> list[Entry]:
    """A group whose samples are all answered, and `scored` of them scored."""
    return [
        GroupOpened(number=number, version=v(version), max_staleness=2),
        SamplesLeased(number=number, node=ALICE, indices=tuple(range(size))),
        *(
            RolloutAccepted(number=number, node=ALICE, rollout=answer(number, i, version), next_batch=batch)
            for i in range(size)
        ),
        *(
            RolloutScored(number=number, index=i, score=Score(reward=number + i / 2, exact=i == 0))
            for i in range(scored)
        ),
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
    first = VersionPublished(version=v(0), content=digest(b"weights"))
    async with opened(tmp_path) as journal:
        await journal.write([first, BoundSet(max_staleness=2, publish_every_steps=1), *group(0), *group(1), *group(2)])
        await journal.write([GroupOpened(number=3, version=v(0), max_staleness=2)])
        await journal.write([SamplesLeased(number=3, node=ALICE, indices=(0, 1))])
        await journal.write([SamplesLeased(number=3, node=BOB, indices=(1,))])
        await journal.write([taken(0, 1, 0)])
    async with opened(tmp_path) as journal:
        run = await asyncio.to_thread(journal.load)
        batch = await asyncio.to_thread(journal.batch, 0)
        assert journal.published(0) == first
        assert journal.published(1) is None
    assert (run.next_batch, run.opened, run.published) == (1, 4, first)
    assert run.bound == BoundSet(max_staleness=2, publish_every_steps=1)
    assert numbers(run.groups) == [2, 3]
    assert [one.rollout for one in run.groups[0].rollouts] == [answer(2, 0), answer(2, 1)]
    assert [one.score for one in run.groups[0].rollouts] == [
        Score(reward=2.0, exact=True),
        Score(reward=2.5, exact=False),
    ]
    assert run.groups[1].holders == {0: ALICE, 1: BOB}
    assert numbers(batch) == [1, 0]
    assert batch[1].rollouts[1].rollout == answer(0, 1)
    assert batch[1].rollouts[1].node == ALICE
