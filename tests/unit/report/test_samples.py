"""The best episode of a run's end, for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from swarm.report.samples import last_episode
from swarm.tasks.base import Read
from swarm.types import Prompt
from tests.builders import prompt
from tests.unit.episodes import TWO, played, record, record_episodes
from tests.unit.rollout.journal.test_journal import group, taken


def readers(text_of: Callable[[Sequence[int]], str]) -> Callable[[], Read]:
    return lambda: (prompt, text_of, lambda prompt, said: [])


def test_the_last_episode_is_told_in_lines_for_a_terminal(tmp_path: Path) -> None:
    record_episodes(tmp_path / "played", played(TWO, seats=(0, 3)), reward=1.0)
    lines = last_episode(tmp_path / "played", readers(lambda tokens: f"a board\n\x1b[2J{len(tokens)}"))
    assert lines[0].startswith("last batch, step 1, group 0, sample 1: reward 1.25, exact")
    assert lines[1:6] == [
        "5=",
        "-- model: reward 0.25, version 0.0, sampler alice",
        "a board",
        "?[2J2",
        "-- environment",
    ]
    record(tmp_path / "answers", [*group(0), taken(0, 0)])
    assert last_episode(tmp_path / "answers", readers(lambda tokens: "no episode")) == []


def test_a_board_takes_the_place_of_what_the_environment_said(tmp_path: Path) -> None:
    record_episodes(tmp_path, played(), reward=1.25)

    def boards_of(asked: Prompt, said: Sequence[str]) -> list[str]:
        return [f"{asked.text} board after {words}" for words in said]

    lines = last_episode(tmp_path, lambda: (prompt, lambda tokens: f"{len(tokens)} tokens", boards_of))
    assert [line for line in lines[1:] if not line.startswith("-- model: ")] == [
        *("5=", "2 tokens", "5= board after 2 tokens"),
        *("1 tokens", "5= board after 1 tokens"),
    ]
