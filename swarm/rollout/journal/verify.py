"""Checks a run from its journal alone: I1 and I3 of the design, the lineage, and the remaining payloads.

Each property is computed again from the rows. The check only reads, from a snapshot of the database; the run's learner
may be at work, or may have been killed.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isclose
from pathlib import Path

import msgspec

from swarm.rollout.journal.entries import NO_VARIANCE
from swarm.rollout.journal.index import check_pages, next_lineage, read_meta, reading
from swarm.rollout.journal.journal import DATABASE
from swarm.rollout.journal.reading import (
    GroupRow,
    RolloutRow,
    batch_rows,
    count_batches,
    group_rows,
    read_rollout,
    rollout_rows,
)
from swarm.rollout.plane.rules import is_fresh
from swarm.types import Rollout

MAX_BREACHES = 100  # More lines would not explain a run any better
STALE_REASONS = ("stale", "bound_lowered")  # Reasons for a drop that claim something about the group's age


@dataclass(slots=True)
class Report:
    """Counts, and a line for each breach. `payloads` counts right ones, `damaged` those that were changed, or lost
    without being pruned; `turns` and `streams` those of episodes that are kept."""

    groups_per_step: int
    group_size: int
    batches: int = 0
    groups: int = 0
    accepted: int = 0
    trained: int = 0
    dropped: int = 0
    waiting: int = 0
    payloads: int = 0
    turns: int = 0
    streams: int = 0
    pruned: int = 0
    damaged: int = 0
    breaches: list[str] = field(default_factory=list)

    def breach(self, line: str) -> None:
        if len(self.breaches) < MAX_BREACHES:
            self.breaches.append(line)


def verify_run(
    run_dir: Path, *, groups_per_step: int, group_size: int, checkpoints: Sequence[tuple[int, bytes]] = ()
) -> Report:
    """Check the journal of a run. `checkpoints` holds step and lineage of each whole checkpoint. Raise UserError if
    this release cannot read the journal, Damaged if its database is missing or broken."""
    with reading(run_dir / DATABASE) as found:
        check_pages(found, payloads=True)
        report = Report(groups_per_step, group_size, count_batches(found))
        _check_groups(found, report)
        _check_lineage(found, report, checkpoints)
    return report


def _check_groups(connection: sqlite3.Connection, report: Report) -> None:
    """Check I3: each group has exactly one fate, which is true, and each accepted rollout belongs to one group."""
    pruned = read_meta(connection, "pruned")
    for row in group_rows(connection, "TRUE"):
        if row.number != report.groups:
            report.breach(f"group {report.groups} is not recorded, but a later one is")
            report.groups = row.number
        report.groups += 1
        rollouts = rollout_rows(connection, row.number)
        report.accepted += len(rollouts)
        if row.step is not None:
            report.trained += len(rollouts)
        elif row.reason is not None:
            report.dropped += len(rollouts)
        else:
            report.waiting += len(rollouts)
        for line in fate_faults(row, rollouts, report):
            report.breach(f"group {row.number} {line}")
        is_pruned = any(step is not None and step < pruned for step in (row.step, row.dropped_at))
        _check_payloads(connection, row, rollouts, report, is_pruned=is_pruned)
    (accepted,) = connection.execute("SELECT count(*) FROM rollouts").fetchone()
    if accepted != report.accepted:
        report.breach(
            f"{accepted} rollouts were accepted, but {report.trained} trained on, {report.dropped} dropped and "
            f"{report.waiting} waiting (I3)"
        )
    report.accepted = accepted


def fate_faults(row: GroupRow, rollouts: Sequence[RolloutRow], report: Report) -> Iterator[str]:
    """Yield each contradiction in the rows of a group. `report` has the number of batches and the group size."""
    if row.step is not None and row.reason is not None:
        yield f"is in batch {row.step} and was dropped as {row.reason} (I3)"
    if (row.step is None) != (row.place is None):
        yield "has a batch or a place in one, and not both"
    if any(one.idx != place for place, one in enumerate(rollouts)) and row.step is not None:
        yield f"of batch {row.step} lacks a sample"
    if row.step is not None and row.step >= report.batches:
        yield f"is in batch {row.step}, which is not recorded"
    if row.reason is not None and row.step is None:
        yield from _drop_faults(row, [one.oldest for one in rollouts], report.group_size)
    if row.reason == NO_VARIANCE and (len(rollouts) < report.group_size or len({one.reward for one in rollouts}) > 1):
        yield "was dropped for want of variance, but its rewards are not all there and equal (I3)"
    if len(rollouts) > report.group_size:
        yield f"has {len(rollouts)} rollouts, more than its {report.group_size} samples (I3)"
    if any(one.oldest < row.version for one in rollouts):
        yield f"has a rollout older than the version {row.version} that it was opened for"


def _drop_faults(row: GroupRow, oldest: Sequence[int], group_size: int) -> Iterator[str]:
    """Yield each contradiction in the record of a drop. A group that lacks answers is as old as the version that it was
    opened for, or as its oldest answer."""
    possible = {min(oldest, default=row.version)}
    if len(oldest) < group_size:
        possible.add(row.version)
    if row.dropped_oldest is None or row.dropped_at is None or row.dropped_bound is None:
        yield "was dropped, but not at which age"
    elif row.dropped_oldest not in possible:
        yield f"was dropped as {row.reason} for version {row.dropped_oldest}, of which it has no token (I3)"
    elif row.reason in STALE_REASONS and is_fresh(row.dropped_oldest, row.dropped_at, row.dropped_bound):
        yield (
            f"was dropped as {row.reason} before batch {row.dropped_at}, though version {row.dropped_oldest} "
            f"was within the bound of {row.dropped_bound} (I3)"
        )


def _check_payloads(
    connection: sqlite3.Connection, row: GroupRow, rollouts: Sequence[RolloutRow], report: Report, *, is_pruned: bool
) -> None:
    for one in rollouts:
        if (rollout := read_rollout(connection, one)) is not None:
            report.payloads += 1
            report.turns += len(rollout.turns)
            report.streams += len({turn.seat for turn in rollout.turns})
            for line in _payload_faults(one, rollout):
                report.breach(line)
        elif is_pruned:
            report.pruned += 1
        else:
            report.damaged += 1
            report.breach(f"the payload of t{one.number}/{one.idx} is damaged")


def _payload_faults(row: RolloutRow, rollout: Rollout) -> Iterator[str]:
    recorded = (f"t{row.number}", row.idx, row.oldest, row.tokens)
    if recorded != (rollout.group_id, rollout.index, rollout.oldest, rollout.length):
        yield f"the row of t{row.number}/{row.idx} says something else than its payload"
        return
    for line in episode_faults(rollout, row.reward):
        yield f"the episode t{row.number}/{row.idx} {line}"


def episode_faults(rollout: Rollout, reward: float | None) -> Iterator[str]:
    """Yield what is wrong with the turns of an episode, and with its reward if that is known; nothing if it is none."""
    if rollout.seats and not rollout.turns:
        yield "has versions for other tokens than were drawn"
    if not rollout.turns:
        return
    bounds = (*(rollout.seats or (0,)), rollout.length)
    turns = sorted((turn.start, turn.end) for turn in rollout.turns)
    spans = sorted((span.start, span.end) for span in rollout.spans)
    # All that a second player says follows something that it has read.
    inside = bounds[0] == 0 and all(
        turn.seat < len(bounds) - 1
        and bounds[turn.seat] + (turn.seat > 0) <= turn.start < turn.end <= bounds[turn.seat + 1]
        for turn in rollout.turns
    )
    if not inside or _overlap(turns) or list(bounds) != sorted(bounds):
        yield "has turns that are empty, overlap or lie outside of their player's tokens"
    elif _overlap(spans) or _edges(turns) != _edges(spans):
        yield "has versions for other tokens than were drawn"
    first = min(turn.seat for turn in rollout.turns)
    returned = sum(turn.reward for turn in rollout.turns if turn.seat == first)
    if reward is not None and not isclose(reward, returned, abs_tol=1e-9):
        yield "has another reward than its first player's turns"


def _overlap(parts: Sequence[tuple[int, int]]) -> bool:
    return any(one[1] > after[0] for one, after in pairwise(parts))


def _edges(parts: Sequence[tuple[int, int]]) -> set[int]:
    """Where parts begin or end, unless two of them touch there."""
    return {place for place, count in Counter(place for part in parts for place in part).items() if count % 2}


def _check_lineage(connection: sqlite3.Connection, report: Report, checkpoints: Sequence[tuple[int, bytes]]) -> None:
    """Check I1 for each batch, and that rows, batches and checkpoints agree."""
    lineages = [b""]
    batches = connection.execute("SELECT step, max_staleness, lineage FROM batches ORDER BY step").fetchall()
    for place, (step, bound, recorded) in enumerate(msgspec.convert(batches, list[tuple[int, int, bytes]])):
        if step != place:
            report.breach(f"batch {place} is not recorded, but batch {step} is")
            break
        samples = check_batch(connection, step, bound, report)
        lineages.append(next_lineage(lineages[-1], step, samples) if samples is not None else recorded)
        if lineages[-1] != recorded:
            report.breach(f"the lineage after batch {step} is not the recorded one: its rows were changed")
            lineages[-1] = recorded
    for step, lineage in checkpoints:
        if step >= len(lineages):
            report.breach(f"a checkpoint holds {step} batches, the journal {len(lineages) - 1}")
        elif lineages[step] != lineage:
            report.breach(f"the checkpoint of step {step} was trained on other batches than the journal has")


def check_batch(
    connection: sqlite3.Connection, step: int, bound: int, report: Report
) -> list[tuple[int, int, bytes, float]] | None:
    """Check a batch. Return its samples in order for the lineage; None if one has no reward."""
    groups = batch_rows(connection, step)
    if [row.place for row in groups] != list(range(report.groups_per_step)):
        report.breach(f"batch {step} has {len(groups)} groups instead of {report.groups_per_step}, or not in one order")
    rollouts = [rollout_rows(connection, row.number) for row in groups]
    for row, ones in zip(groups, rollouts, strict=True):
        if len(ones) != report.group_size:
            report.breach(f"group {row.number} of batch {step} has {len(ones)} rollouts instead of {report.group_size}")
        late = [one.oldest for one in ones if not is_fresh(one.oldest, step, bound)]
        if late:
            report.breach(f"batch {step} trains on version {min(late)} in group {row.number}: over {bound} old (I1)")
    if any(one.reward is None for ones in rollouts for one in ones):
        report.breach(f"batch {step} has a rollout without a reward")
        return None
    return [(one.number, one.idx, one.digest, one.reward or 0.0) for ones in rollouts for one in ones]
