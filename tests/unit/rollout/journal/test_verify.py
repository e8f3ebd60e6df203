"""What `verify` finds: nothing in a run that went well, and each breach that is made by hand in its database."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from swarm.errors import UserError
from swarm.rollout.journal.index import payload_digest
from swarm.rollout.journal.journal import DATABASE
from swarm.rollout.journal.verify import MAX_BREACHES, Report, verify_run
from swarm.types import Rollout, Span
from tests.builders import v
from tests.unit.episodes import ALONE, TWO, played, record_episodes
from tests.unit.rollout.journal.test_journal import SIZE, damage, dropped, group, opened, taken

GROUPS = 2
STEPS = 4


async def _record(directory: Path) -> list[bytes]:
    """Four batches of two groups, one group dropped as stale, one for a reward that failed, one that waits, and one
    that is half answered; the lineages."""
    async with opened(directory) as journal:
        for step in range(STEPS):
            number = step * GROUPS
            await journal.write([*group(number, version=step), *group(number + 1, version=step)])
            await journal.write([taken(step, number + 1, number)])
        await journal.write([*group(8), dropped(8, oldest=0, next_batch=3)])
        await journal.write([*group(9, version=3)[:-1], dropped(9, reason="unscorable", oldest=3)])
        await journal.write([*group(10, version=4), *group(11, version=4)[:3]])
        return [journal.lineage(step) for step in range(STEPS + 1)]


@pytest.fixture
def lineages(tmp_path: Path) -> list[bytes]:
    """A recorded run under tmp_path."""
    return asyncio.run(_record(tmp_path))


def verified(directory: Path, checkpoints: Sequence[tuple[int, bytes]] = ()) -> Report:
    return verify_run(directory, groups_per_step=GROUPS, group_size=SIZE, checkpoints=checkpoints)


def change(directory: Path, *statements: str) -> None:
    with closing(sqlite3.connect(directory / DATABASE)) as found, found:
        for statement in statements:
            found.execute(statement)


def test_a_run_that_went_well_has_no_breach(tmp_path: Path, lineages: list[bytes]) -> None:
    assert verified(tmp_path, [(2, lineages[2]), (4, lineages[4]), (0, b"")]) == Report(
        groups_per_step=GROUPS,
        group_size=SIZE,
        batches=STEPS,
        groups=12,
        accepted=2 * 2 * STEPS + 2 + 2 + 2 + 1,
        trained=2 * 2 * STEPS,
        dropped=4,
        waiting=3,
        payloads=23,
        pruned=0,
        damaged=0,
        breaches=[],
    )


def test_a_group_whose_rewards_are_equal_may_have_been_replaced(tmp_path: Path, lineages: list[bytes]) -> None:
    change(
        tmp_path,
        "UPDATE groups SET reason = 'no_variance' WHERE number = 8",
        "UPDATE rollouts SET reward = 1 WHERE number = 8",
    )
    assert verified(tmp_path).breaches == []


@pytest.mark.parametrize(
    ("statement", "breach"),
    [
        ("UPDATE rollouts SET oldest = 0 WHERE number = 6", "batch 3 trains on version 0 in group 6: over 2 old (I1)"),
        ("UPDATE batches SET max_staleness = -1 WHERE step = 1", "batch 1 trains on version 1 in group 3"),
        ("DELETE FROM rollouts WHERE number = 4 AND idx = 1", "group 4 of batch 2 has 1 rollouts instead of 2"),
        ("DELETE FROM rollouts WHERE number = 4 AND idx = 0", "group 4 of batch 2 lacks a sample"),
        ("UPDATE groups SET step = NULL, place = NULL WHERE number = 4", "batch 2 has 1 groups instead of 2"),
        ("UPDATE groups SET place = 7 WHERE number = 4", "or not in one order"),
        ("UPDATE groups SET place = NULL WHERE number = 4", "has a batch or a place in one, and not both"),
        ("UPDATE groups SET step = 9 WHERE number = 4", "group 4 is in batch 9, which is not recorded"),
        ("DELETE FROM batches WHERE step = 1", "batch 1 is not recorded, but batch 2 is"),
        ("UPDATE groups SET reason = 'stale' WHERE number = 4", "group 4 is in batch 2 and was dropped as stale (I3)"),
        ("UPDATE groups SET dropped_at = 2 WHERE number = 8", "though version 0 was within the bound of 2 (I3)"),
        (
            "UPDATE groups SET dropped_at = 2, reason = 'bound_lowered' WHERE number = 8",
            "dropped as bound_lowered before batch 2",
        ),
        ("UPDATE groups SET dropped_oldest = -1 WHERE number = 8", "for version -1, of which it has no token"),
        ("UPDATE groups SET dropped_bound = NULL WHERE number = 8", "was dropped, but not at which age"),
        ("UPDATE groups SET reason = 'no_variance' WHERE number = 8", "group 8 was dropped for want of variance, but"),
        (
            "UPDATE groups SET reason = 'no_variance' WHERE number = 9",
            "group 9 was dropped for want of variance, but its rewards are not all there",
        ),
        (
            "UPDATE rollouts SET number = 99 WHERE number = 10",
            "23 rollouts were accepted, but 16 trained on, 4 dropped",
        ),
        ("DELETE FROM groups WHERE number = 3", "group 3 is not recorded, but a later one is"),
        (
            "INSERT INTO rollouts SELECT number, 2, node, oldest, tokens, finish, reward, exact, parts, digest "
            "FROM rollouts WHERE number = 10 AND idx = 1",
            "group 10 has 3 rollouts, more than its 2 samples (I3)",
        ),
        ("UPDATE rollouts SET idx = 2 WHERE number = 10 AND idx = 1", "the payload of t10/2 is damaged"),
        ("UPDATE rollouts SET tokens = 99 WHERE number = 10 AND idx = 1", "row of t10/1 says something else"),
        ("UPDATE groups SET version = 5 WHERE number = 10", "older than the version 5 that it was opened for"),
        ("UPDATE rollouts SET reward = 9 WHERE number = 2 AND idx = 1", "lineage after batch 1 is not the recorded"),
        ("UPDATE rollouts SET reward = NULL WHERE number = 2 AND idx = 1", "batch 1 has a rollout without a reward"),
        ("UPDATE rollouts SET digest = zeroblob(16) WHERE number = 2", "payload of t2/0 is damaged"),
        ("UPDATE rollouts SET digest = zeroblob(16) WHERE number = 2", "lineage after batch 1 is not the recorded"),
        ("UPDATE batches SET lineage = zeroblob(32) WHERE step = 3", "lineage after batch 3 is not the recorded"),
        ("UPDATE batches SET lineage = zeroblob(32) WHERE step = 3", "the checkpoint of step 4 was trained on other"),
    ],
)
def test_each_breach_is_found(tmp_path: Path, lineages: list[bytes], statement: str, breach: str) -> None:
    change(tmp_path, statement)
    found = verified(tmp_path, [(4, lineages[4])]).breaches
    assert [line for line in found if breach in line], found


def test_two_groups_that_changed_places_are_found(tmp_path: Path, lineages: list[bytes]) -> None:
    # The unique index allows no two groups in one place, not even for a moment.
    places = {2: 5, 3: 1}
    change(tmp_path, *(f"UPDATE groups SET place = {place} WHERE number = {n}" for n, place in places.items()))
    change(tmp_path, "UPDATE groups SET place = 0 WHERE number = 2")
    assert verified(tmp_path).breaches == ["the lineage after batch 1 is not the recorded one: its rows were changed"]


def test_a_checkpoint_of_another_story_is_found(tmp_path: Path, lineages: list[bytes]) -> None:
    assert verified(tmp_path, [(2, lineages[3]), (3, lineages[3]), (5, b"later")]).breaches == [
        "the checkpoint of step 2 was trained on other batches than the journal has",
        "a checkpoint holds 5 batches, the journal 4",
    ]


async def test_a_group_that_lacks_answers_may_be_dropped_for_the_version_that_it_was_opened_for(tmp_path: Path) -> None:
    opening = group(0, version=0)[0]
    async with opened(tmp_path) as journal:
        await journal.write([opening, *group(0, version=2)[2:3], dropped(0, oldest=0, next_batch=3)])
        await journal.write([*group(1, version=2), dropped(1, oldest=2, next_batch=5)])
    assert verified(tmp_path).breaches == []
    change(tmp_path, "UPDATE groups SET dropped_oldest = 1, dropped_at = 9, version = 1 WHERE number = 1")
    assert verified(tmp_path).breaches == ["group 1 was dropped as stale for version 1, of which it has no token (I3)"]


def test_a_damaged_payload_is_a_breach(tmp_path: Path, lineages: list[bytes]) -> None:
    damage(tmp_path, 10, 0)
    change(tmp_path, "DELETE FROM payloads WHERE number = 5 AND idx = 1")  # And it was not pruned
    report = verified(tmp_path)
    assert report.breaches == ["the payload of t5/1 is damaged", "the payload of t10/0 is damaged"]
    assert report.damaged == 2


async def test_pruned_payloads_are_counted_and_no_breach(tmp_path: Path) -> None:
    lineages = await _record(tmp_path)
    async with opened(tmp_path) as journal:
        assert await journal.prune(oldest_step=1, keep_rollouts=0)
    report = verified(tmp_path, [(4, lineages[4])])
    assert (report.payloads, report.pruned, report.damaged, report.breaches) == (19, 4, 0, [])


def test_a_payload_that_is_no_rollout_is_found(tmp_path: Path, lineages: list[bytes]) -> None:
    other = msgspec.msgpack.encode("no rollout")
    with closing(sqlite3.connect(tmp_path / DATABASE)) as found, found:
        found.execute("UPDATE payloads SET payload = ? WHERE number = 5 AND idx = 1", (other,))
        found.execute("UPDATE rollouts SET digest = ? WHERE number = 5 AND idx = 1", (payload_digest(other),))
    assert "the payload of t5/1 is damaged" in verified(tmp_path).breaches


def test_the_lines_are_bounded(tmp_path: Path, lineages: list[bytes]) -> None:
    change(tmp_path, "UPDATE groups SET number = number * 1000", "UPDATE rollouts SET number = number * 1000")
    report = verify_run(tmp_path, groups_per_step=9, group_size=9)
    assert 20 < len(report.breaches) <= MAX_BREACHES


def test_a_directory_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not there"):
        verified(tmp_path)
    (tmp_path / DATABASE).write_bytes(b"no database, " * 1000)
    with pytest.raises(UserError, match="is damaged"):
        verified(tmp_path)


# -- episodes ----------------------------------------------------------------------------------------------------


def span(start: int, end: int) -> Span:
    return Span(version=v(0), start=start, end=end)


def verified_episodes(directory: Path) -> Report:
    return verify_run(directory, groups_per_step=1, group_size=SIZE)


@pytest.mark.parametrize(
    ("first", "reward"),
    [
        (played(), 1.25),
        (played(TWO, seats=(0, 3)), 1.0),
        (played(spans=(Span(version=v(0), start=0, end=1), *played(ALONE[1:]).spans, span(1, 2))), 1.25),
        (played(tuple(structs.replace(turn, reward=0.0) for turn in ALONE)), 0.0),
    ],
    ids=["alone", "two players", "two versions in a turn", "its environment failed"],
)
def test_episodes_that_went_well_have_no_breach(tmp_path: Path, first: Rollout, reward: float) -> None:
    record_episodes(tmp_path, first, reward=reward)
    report = verified_episodes(tmp_path)
    assert (report.breaches, report.payloads) == ([], 2)


@pytest.mark.parametrize(
    ("first", "reward", "breach"),
    [
        (played(ALONE, length=4, spans=(span(0, 2),)), 1.25, "lie outside"),
        (played((ALONE[0], structs.replace(ALONE[1], start=1))), 1.25, "overlap"),
        (played((ALONE[0], structs.replace(ALONE[1], end=4))), 1.25, "are empty"),
        (played(TWO, seats=(0, 4)), 1.0, "lie outside"),
        (played(TWO, seats=(0, 3, 2)), 1.0, "lie outside"),
        (played(TWO), 1.0, "lie outside"),
        (played((), seats=(0, 3), spans=(span(0, 7),)), 0.0, "has versions for other tokens"),
        (played(spans=(span(0, 2),)), 1.25, "has versions for other tokens"),
        (played(spans=(span(0, 2), span(4, 5), span(2, 3), span(2, 3))), 1.25, "has versions for other tokens"),
        (played(), 0.0, "has another reward"),
        (played(TWO, seats=(0, 3)), -1.0, "has another reward"),
    ],
)
def test_each_fault_of_an_episode_is_found(tmp_path: Path, first: Rollout, reward: float, breach: str) -> None:
    record_episodes(tmp_path, first, reward=reward)
    (line,) = verified_episodes(tmp_path).breaches
    assert line.startswith("the episode t0/0 ")
    assert breach in line
