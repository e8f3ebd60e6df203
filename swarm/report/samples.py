"""What a rollout says, as a person reads it: the turns of an episode, and the best episode of a run's end."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from swarm.report.words import shown
from swarm.rollout.journal.index import FINISHES, reading
from swarm.rollout.journal.journal import DATABASE
from swarm.rollout.journal.reading import GroupRow, RolloutRow, batch_rows, read_rollout, rollout_rows
from swarm.tasks.base import Read
from swarm.types import Rollout, Turn, VersionId, printable

STEPS_TRIED = 8  # Batches from a place on that are searched for one with intact payloads
LINES_SHOWN = 400  # Of an episode in a terminal: more scrolls by unread
GROUPS_TRIED = 64  # Groups of a batch among which the one whose rewards differ most is chosen


def last_episode(run_dir: Path, readers: Callable[[], Read]) -> list[str]:
    """Return the best episode of a group in the last batch that is kept, as lines for a terminal; none if there is no
    episode. Raise UserError or Damaged if the run cannot be read."""
    with reading(run_dir / DATABASE) as found:
        read, steps = readers(), found.execute("SELECT step FROM batches ORDER BY step DESC LIMIT ?", (STEPS_TRIED,))
        for (step,) in steps.fetchall():
            if (best := _best_of(found, step)) is not None:
                return _lines(*best, read)
    return []


def conversation(
    rollout: Rollout, decode_text: Callable[[Sequence[int]], str]
) -> Iterator[tuple[int, Turn | None, str]]:
    """Yield what the players of an episode read and said, one player after the other: which player, its turn (None for
    the environment's words), and the text."""
    tokens = rollout.tokens().tolist()
    for seat, (at, end) in enumerate(pairwise((*(rollout.seats or (0,)), len(tokens)))):
        for turn in (one for one in rollout.turns if one.seat == seat):
            if at < turn.start:
                yield seat, None, decode_text(tokens[at : turn.start])
            yield seat, turn, decode_text(tokens[turn.start : turn.end])
            at = turn.end
        if at < end:
            yield seat, None, decode_text(tokens[at:end])


def has_players(rollout: Rollout) -> bool:
    """Return whether several players spoke. Of a program that plays, the first seat is empty."""
    return len({turn.seat for turn in rollout.turns}) > 1


def versions_of(rollout: Rollout, turn: Turn) -> list[VersionId]:
    """Return the versions that drew a turn, the oldest first."""
    return sorted({span.version for span in rollout.spans if span.start < turn.end and span.end > turn.start})


def _said(rollout: Rollout, decode_text: Callable[[Sequence[int]], str]) -> Iterator[tuple[str, str]]:
    for seat, turn, words in conversation(rollout, decode_text):
        player = f" player {seat + 1}" if has_players(rollout) else ""
        if turn is None:
            yield f"environment{player and ' to' + player}", words
        else:
            drawn_by = f"version {', '.join(map(str, versions_of(rollout, turn)))}, sampler {turn.node[:12]}"
            yield f"model{player and ' as' + player}: reward {shown(turn.reward)}, {drawn_by}", words


def _with_boards(said: Sequence[tuple[str, str]], boards: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Put each board below the turn that led to it, in place of the environment's words."""
    after = iter(boards)
    for head, words in said:
        if head.startswith("model"):
            yield head, f"{words}\n{next(after, '')}"


def _best_of(found: sqlite3.Connection, step: int) -> tuple[GroupRow, RolloutRow, Rollout] | None:
    """The best rollout of the group of a step whose rewards differ most; None if its payload is not there."""
    groups = [(group, rollout_rows(found, group.number)) for group in batch_rows(found, step)[:GROUPS_TRIED]]
    if not groups:
        return None
    group, rows = max(groups, key=lambda one: _spread(one[1]))
    row = max(rows, key=lambda row: (row.reward or 0.0, row.idx))
    rollout = read_rollout(found, row)
    return None if rollout is None else (group, row, rollout)


def _spread(rows: Sequence[RolloutRow]) -> float:
    rewards = [row.reward for row in rows if row.reward is not None]
    return max(rewards) - min(rewards) if rewards else -1.0


def _lines(group: GroupRow, row: RolloutRow, rollout: Rollout, read: Read) -> list[str]:
    prompt_of, decode_text, boards_of = read
    if not rollout.turns:
        return []
    assert group.step is not None
    prompt, said = prompt_of(group.prompt_number), list(_said(rollout, decode_text))
    if boards := boards_of(prompt, [words for head, words in said if head.startswith("model")]):
        said = list(_with_boards(said, boards))
    head = (
        f"last batch, step {group.step + 1}, group {group.number}, sample {row.idx}: reward {shown(row.reward)}"
        f"{', exact' if row.exact else ''}, staleness {group.step - row.oldest}, {len(rollout.turns)} turns, "
        f"{rollout.drawn} tokens, {FINISHES[row.finish]}, sampler {row.node[:12]}"
    )
    texts = "\n".join((head, prompt.text, *(words for head, text in said for words in (f"-- {head}", text))))
    return [*map(printable, texts.splitlines())][:LINES_SHOWN]
