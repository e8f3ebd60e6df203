"""Groups out of a journal, newest first: what was taken, what waits, what is lost, and no more text than asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.dashboard.rollouts import read_groups
from swarm.tasks.base import Read
from tests.builders import ALICE, BOB, prompt
from tests.unit.episodes import TWO, played, record, record_episodes
from tests.unit.rollout.journal.test_journal import SIZE, damage, group, opened, taken

READ: Read = (prompt, lambda tokens: "+".join(map(str, tokens)), lambda prompt, said: [])
NEWEST = 2**53


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    batches = [[*group(number), taken(number, number)] for number in range(4)]
    record(tmp_path, *batches, group(4, scored=0), group(5)[:1])
    return tmp_path


def test_groups_come_newest_first_page_by_page(run_dir: Path) -> None:
    first = read_groups(run_dir, READ, before=NEWEST, count=3)
    assert [one["group"] for one in first["groups"]] == [4, 3, 2], "the newest one has no rollout yet"
    assert (first["next"], first["fault"]) == (2, "")
    assert read_groups(run_dir, READ, before=NEWEST, count=0)["groups"] == first["groups"][:1]
    rest = read_groups(run_dir, READ, before=first["next"], count=3)
    assert [one["group"] for one in rest["groups"]] == [1, 0]
    assert rest["next"] is None
    of_step = read_groups(run_dir, READ, before=NEWEST, count=3, step=4)
    assert [(one["group"], one["step"]) for one in of_step["groups"]] == [(3, 4)]


def test_a_rollout_is_told_with_all_that_is_known_of_it(run_dir: Path) -> None:
    waiting, trained, *_ = read_groups(run_dir, READ, before=NEWEST, count=9)["groups"]
    assert (trained["step"], trained["prompt"], len(trained["rollouts"])) == (4, "8=", SIZE)
    one = trained["rollouts"][1]
    assert one["spans"] == [["0.0", one["tokens"]]]
    assert (one["index"], one["node"], one["staleness"], one["finish"]) == (1, ALICE, 3, "stop")
    assert one["completion"].count("+") == one["tokens"] - 1
    assert not one["lost"]
    assert (waiting["step"], waiting["rollouts"][0]["reward"], waiting["rollouts"][0]["staleness"]) == (None,) * 3


async def test_what_is_pruned_or_damaged_is_said(run_dir: Path) -> None:
    async with opened(run_dir) as journal:
        assert await journal.prune(oldest_step=1, keep_rollouts=0)
    for index in range(SIZE):
        damage(run_dir, 4, index)
    found = read_groups(run_dir, READ, before=NEWEST, count=9)
    lost = {one["group"] for one in found["groups"] if all(rollout["lost"] for rollout in one["rollouts"])}
    assert lost == {0, 4}
    assert found["fault"] == f"the texts of {len(lost) * SIZE} rollouts are damaged or no longer kept"
    (run_dir / "journal.db").write_bytes(b"no database at all" * 1000)
    assert "damaged" in read_groups(run_dir, READ, before=NEWEST, count=9)["fault"]
    assert read_groups(run_dir / "nowhere", READ, before=0, count=9)["fault"] == "the run has recorded nothing yet"


def test_long_texts_are_cut_and_an_answer_ends_early(run_dir: Path) -> None:
    long: Read = (prompt, lambda tokens: "x" * 1000, lambda prompt, said: [])
    found = read_groups(run_dir, long, before=NEWEST, count=9, chars=100)
    assert {len(rollout["completion"]) for rollout in found["groups"][0]["rollouts"]} == {100 // SIZE}
    assert (len(found["groups"]), found["next"]) == (1, 4)


def test_an_episode_is_told_turn_by_turn(tmp_path: Path) -> None:
    record_episodes(tmp_path, played(TWO, seats=(0, 3)))
    (group,) = read_groups(tmp_path, READ, before=NEWEST, count=1)["groups"]
    two, alone = group["rollouts"]
    assert two["completion"] == alone["completion"] == ""
    assert two["turns"] == [
        {"player": 1, "text": "3+4", "node": ALICE, "reward": 1.0, "versions": ["0.0"]},
        {"player": 1, "text": "5"},
        {"player": 2, "text": "6"},
        {"player": 2, "text": "7+8", "node": BOB, "reward": -1.0, "versions": ["0.1"]},
        {"player": 2, "text": "9"},
    ]
    assert [one["player"] for one in alone["turns"]] == [None] * 4


def test_the_texts_of_an_episode_are_cut_together(tmp_path: Path) -> None:
    record_episodes(tmp_path, played())
    read: Read = (prompt, lambda tokens: "x" * 10, lambda prompt, said: [])
    found = read_groups(tmp_path, read, before=NEWEST, count=9, chars=30)
    assert [[len(turn["text"]) for turn in one["turns"]] for one in found["groups"][0]["rollouts"]] == [[10, 5]] * 2
