"""Size and speed of the learner's journal.

bin/python -m benchmarks.journal --rollouts 1000000 --json

Size: `--rollouts` are recorded with payloads of one token (the rows do not depend on the length), as a run would:
groups opened and leased, answered, scored, and taken in batches. `db_bytes_per_rollout` is what all tables together
take in the database after the payloads of all batches were pruned.

Speed: rollouts of 512 tokens, in submissions of one group; WRITERS of them wait at a time, each for its own commit.
All that a run records is part of the time, and so is the making of the entries. `cpu_us_per_rollout` is of the whole
process; `p50_ms` and `p99_ms` are of `Journal.write` for one submission; `sync_ms` is the longest of the syncs, one of
which follows every 16 batches.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

from msgspec import structs

from benchmarks import Figures, parser_of, said
from swarm.rollout.journal.entries import BatchTaken, Entry, GroupOpened, RolloutAccepted, RolloutScored, SamplesLeased
from swarm.rollout.journal.index import reading
from swarm.rollout.journal.journal import DATABASE, Journal
from swarm.types import NodeId, Rollout, Score, Span, VersionId

BATCH_GROUPS = 16
SYNC_BATCHES = 16
NODES = 64
GROUP_SIZES = (8, 16)
WRITERS = 16
TIMED_ROLLOUTS = 65_536  # Of the speed, for each size of groups
POOL = 256  # Rollouts made beforehand, and used in turn: the journal does not look at what is in them


def pool(tokens: int) -> list[Rollout]:
    draw = random.Random(1)
    return [
        Rollout(
            group_id=f"t{n}",
            index=0,
            token_ids=array("i", (draw.randrange(150_000) for _ in range(tokens))).tobytes(),
            logprobs=array("f", (-draw.expovariate(2.0) for _ in range(tokens))).tobytes(),
            spans=(),
            finish="stop",
        )
        for n in range(POOL)
    ]


class Load:
    """Makes the entries of a run, one group of `size` after the other."""

    def __init__(self, size: int, tokens: int) -> None:
        self.size = size
        self._pool = pool(tokens)
        self._draw = random.Random(1)

    def opening(self, number: int) -> list[Entry]:
        samples = tuple((index, 0) for index in range(self.size))
        return [
            GroupOpened(number=number, prompt_number=number, version=self._version(number), max_staleness=2),
            SamplesLeased(number=number, node=self._node(number), samples=samples),
        ]

    def answers(self, number: int) -> list[Entry]:
        made = self._pool[number % POOL]
        spans = (Span(version=self._version(number), start=0, end=made.length),)
        drawn = [structs.replace(made, group_id=f"t{number}", index=i, spans=spans) for i in range(self.size)]
        return [RolloutAccepted(number=number, node=self._node(number), rollout=one) for one in drawn]

    def scores(self, number: int) -> list[Entry]:
        return [
            RolloutScored(number=number, index=index, score=Score(reward=self._draw.random(), exact=False))
            for index in range(self.size)
        ]

    def batch(self, step: int) -> BatchTaken:
        first = step * BATCH_GROUPS
        return BatchTaken(step=step, max_staleness=2, numbers=tuple(range(first, first + BATCH_GROUPS)))

    def _version(self, number: int) -> VersionId:
        return VersionId(incarnation=0, version=number // BATCH_GROUPS)

    def _node(self, number: int) -> NodeId:
        return NodeId(f"{number % NODES:052d}")


async def submit(journal: Journal, load: Load, groups: Iterator[int], latencies_s: list[float]) -> None:
    """One sampler at a time: open, answer and wait, score."""
    for number in groups:
        journal.enqueue(load.opening(number))
        answers = load.answers(number)
        start = time.perf_counter()
        await journal.write(answers)
        latencies_s.append(time.perf_counter() - start)
        await journal.write(load.scores(number))


async def steps(journal: Journal, load: Load, count: int) -> tuple[list[float], list[float]]:
    """Record `count` batches; the latencies of the submissions and of the syncs, in seconds."""
    latencies_s: list[float] = []
    syncs_s: list[float] = []
    for step in range(count):
        groups = iter(range(step * BATCH_GROUPS, (step + 1) * BATCH_GROUPS))
        await asyncio.gather(*(submit(journal, load, groups, latencies_s) for _ in range(WRITERS)))
        await journal.write([load.batch(step)])
        if step % SYNC_BATCHES == SYNC_BATCHES - 1:
            start = time.perf_counter()
            await journal.sync()
            syncs_s.append(time.perf_counter() - start)
    return latencies_s, syncs_s


def used_bytes(directory: Path) -> int:
    """The pages of the database that are not free to be used again."""
    with reading(directory / DATABASE) as found:
        (nbytes,) = found.execute(
            "SELECT (page_count - freelist_count) * page_size "
            "FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
        ).fetchone()
    return int(nbytes)


async def measure_size(directory: Path, rollouts: int, size: int) -> Figures:
    count = -(-rollouts // (size * BATCH_GROUPS))
    journal = Journal(directory, group_size=size)
    await journal.start()
    start = time.perf_counter()
    await steps(journal, Load(size, 1), count)
    elapsed_s = time.perf_counter() - start
    while await journal.prune(oldest_step=count, keep_rollouts=0):
        pass
    await journal.close()
    nbytes, recorded = used_bytes(directory), count * size * BATCH_GROUPS
    return {
        "rows": recorded,
        "db_mb": round(nbytes / 1e6, 1),
        "db_bytes_per_rollout": round(nbytes / recorded, 1),
        "rows_per_s": round(recorded / elapsed_s),
    }


async def measure_speed(directory: Path, *, rollouts: int, tokens: int, size: int) -> Figures:
    count, load = -(-rollouts // (size * BATCH_GROUPS)), Load(size, tokens)
    journal = Journal(directory, group_size=size)
    await journal.start()
    start, cpu = time.perf_counter(), time.process_time()
    latencies_s, syncs_s = await steps(journal, load, count)
    elapsed_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    await journal.close()
    recorded, cuts = count * size * BATCH_GROUPS, statistics.quantiles(latencies_s, n=100)
    return {
        "group_size": size,
        "rollouts": recorded,
        "rollouts_per_s": round(recorded / elapsed_s),
        "cpu_us_per_rollout": round(1e6 * cpu_s / recorded),
        "p50_ms": round(1e3 * cuts[49], 2),
        "p99_ms": round(1e3 * cuts[98], 2),
        "sync_ms": round(1e3 * max(syncs_s, default=0.0), 1),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rollouts", type=int, default=1_000_000, help="rows of the size")
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    for size in GROUP_SIZES:
        with tempfile.TemporaryDirectory() as directory:
            speed = measure_speed(Path(directory), rollouts=TIMED_ROLLOUTS, tokens=options.tokens, size=size)
            said(asyncio.run(speed))
    with tempfile.TemporaryDirectory() as directory:
        said(asyncio.run(measure_size(Path(directory), options.rollouts, GROUP_SIZES[-1])))


if __name__ == "__main__":
    main()
