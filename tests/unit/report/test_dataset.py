"""A run as a dataset."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import UserError
from swarm.report.dataset import Exported, export_rollouts
from tests.builders import ALICE, BOB, floats, prompt
from tests.unit.episodes import TWO, played, record, record_episodes
from tests.unit.rollout.journal.test_journal import damage, dropped, group, taken
from tests.unit.runs import json_lines


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    later = [taken(1), *group(2), taken(2, 0), dropped(2), *group(3)[:3]]
    record(tmp_path / "run", [*group(0), taken(0), *group(1)], later)
    return tmp_path / "run"


def text_of(tokens: Sequence[int]) -> str:
    return "é" + "+".join(map(str, tokens))


def exported(run_dir: Path, to: Path) -> Exported:
    return export_rollouts(run_dir, to, prompt=prompt, decode_text=text_of)


def test_each_rollout_is_a_row_with_all_that_is_known_of_it(run_dir: Path, tmp_path: Path) -> None:
    to = tmp_path / "rollouts.jsonl"
    assert exported(run_dir, to) == Exported(rollouts=7, left_out=0)
    rows = json_lines(to)
    assert [(row["group"], row["index"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]
    assert [row["step"] for row in rows] == [2, 2, None, None, None, None, None]
    assert [row["staleness"] for row in rows] == [2, 2, None, None, None, None, None]
    assert [row["dropped"] for row in rows] == [None, None, None, None, "stale", "stale", None]
    assert [row.pop("rewards") for row in rows[:2]] == [{}, {"form": 0.25, "answer": 1.0}]
    known = {"step": 2, "dropped": None, "group": 0, "index": 1, "node": ALICE, "finish": "stop"}
    asked = {"prompt_id": "p5", "prompt": "5=", "answer": "5", "prompt_token_ids": [1, 3, 13]}
    drawn: dict[str, Any] = {"completion": "é3+4+5+0", "token_ids": [3, 4, 5, 0], "turns": [], "seats": []}
    drawn["logprobs"] = array("f", floats(-0.5, -0.5, -0.5, -0.5)).tolist()
    drawn["spans"] = [{"incarnation": 0, "version": 0, "start": 0, "end": 4, "node": ALICE}]
    assert rows[1] == {**known, **asked, **drawn, "staleness": 2, "reward": 0.5, "exact": False}
    assert (rows[-1]["reward"], rows[-1]["exact"]) == (None, None)
    assert list(tmp_path.glob("*.partial")) == []


def test_what_is_damaged_is_left_out_and_counted(run_dir: Path, tmp_path: Path) -> None:
    damage(run_dir, 0, 0)
    damage(run_dir, 0, 1)
    assert exported(run_dir, tmp_path / "rollouts.jsonl") == Exported(rollouts=5, left_out=2)
    assert [row["group"] for row in json_lines(tmp_path / "rollouts.jsonl")] == [1, 1, 2, 2, 3]


def test_a_file_is_never_overwritten(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        exported(run_dir, tmp_path / "rollouts.jsonl")
    assert (tmp_path / "rollouts.jsonl").read_text() == "mine"


def test_nothing_is_left_of_an_export_that_failed(run_dir: Path, tmp_path: Path) -> None:
    def refuse(tokens: Sequence[int]) -> str:
        raise ValueError("no tokenizer")

    with pytest.raises(ValueError, match="no tokenizer"):
        export_rollouts(run_dir, tmp_path / "rollouts.jsonl", prompt=prompt, decode_text=refuse)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(("name", "fault"), [("x.parquet", "ends in .jsonl"), ("no/x.jsonl", "not a directory")])
def test_another_place_or_suffix_is_refused(run_dir: Path, tmp_path: Path, name: str, fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        exported(run_dir, tmp_path / name)


def test_an_episode_has_its_turns_and_where_its_players_begin(tmp_path: Path) -> None:
    record_episodes(tmp_path / "run", played(TWO, seats=(0, 3)))
    to = tmp_path / "rollouts.jsonl"
    exported(tmp_path / "run", to)
    two, alone = json_lines(to)
    assert two["turns"] == [
        {"start": 0, "end": 2, "node": ALICE, "reward": 1.0, "seat": 0},
        {"start": 4, "end": 6, "node": BOB, "reward": -1.0, "seat": 1},
    ]
    assert (two["seats"], alone["seats"], len(alone["turns"])) == ([0, 3], [], 2)
