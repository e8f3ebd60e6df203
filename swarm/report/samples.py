"""A few rollouts of a run, from its beginning, its middle and its end: question, answer and reward."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

from swarm.errors import Damaged, UserError
from swarm.report.words import shown
from swarm.rollout.journal.index import FINISHES, read_meta, reading
from swarm.rollout.journal.journal import DATABASE
from swarm.rollout.journal.reading import GroupRow, RolloutRow, batch_rows, read_rollout, rollout_rows
from swarm.tasks.base import Read
from swarm.types import Rollout, Turn, VersionId, printable

STEPS_TRIED = 8  # Batches from a place on that are searched for one with intact payloads
LINES_SHOWN = 400  # Of an episode in a terminal: more scrolls by unread
GROUPS_TRIED = 64  # Groups of a batch among which the one whose rewards differ most is chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One rollout: a line about it, and the texts as the task, the model and strangers made them. Of an episode `said`
    has a line about each text, and the completion is ""."""

    head: str
    prompt: str
    wanted: str
    completion: str
    said: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Journaled:
    """The page's part of the journal. `versions` counts those published, `fault` says why there are no samples."""

    samples: tuple[Sample, ...] = ()
    versions: int = 0
    fault: str = ""
    is_damaged: bool = False


def read_journal(run_dir: Path, readers: Callable[[], Read]) -> Journaled:
    """Versions and samples of the run. `readers` is called when there is something to read, and may raise UserError."""
    if not (run_dir / DATABASE).is_file():
        return Journaled(fault="the run has recorded nothing yet")
    try:
        with reading(run_dir / DATABASE) as found:
            (versions,) = found.execute("SELECT count(*) FROM versions").fetchone()
            steps = [step for (step,) in found.execute("SELECT step FROM batches ORDER BY step")]
            if not steps:
                return Journaled(versions=versions, fault="no batch was trained on yet")
            try:
                samples = tuple(_samples(found, steps, readers()))
            except UserError as fault:
                return Journaled(versions=versions, fault=str(fault))
    except Damaged as fault:
        return Journaled(fault=str(fault), is_damaged=True)
    except UserError as fault:
        return Journaled(fault=f"the journal cannot be read: {fault}")
    return Journaled(
        samples=samples, versions=versions, fault="" if samples else "the run no longer keeps its rollouts"
    )


def last_episode(run_dir: Path, readers: Callable[[], Read]) -> list[str]:
    """Return the best episode of a group in the last batch that is kept, as lines for a terminal; none if there is no
    episode. Raise UserError or Damaged if the run cannot be read."""
    with reading(run_dir / DATABASE) as found:
        read, steps = readers(), found.execute("SELECT step FROM batches ORDER BY step DESC LIMIT ?", (STEPS_TRIED,))
        for (step,) in steps.fetchall():
            for sample in islice(_of_step(found, step, "last batch", read), 1):
                said = (words for head, text in sample.said for words in (f"-- {head}", text))
                texts = "\n".join((sample.head, sample.prompt, *said))
                return [*map(printable, texts.splitlines())][:LINES_SHOWN] if sample.said else []
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


def _samples(found: sqlite3.Connection, steps: Sequence[int], read: Read) -> Iterator[Sample]:
    """From the first batch that is kept, the middle one and the last; from the next one where that is damaged."""
    kept = steps[read_meta(found, "pruned") :]
    taken: set[int] = set()
    for place, at in (("early", 0), ("middle", len(kept) // 2), ("late", len(kept) - 1)):
        for step in kept[max(0, at) :][:STEPS_TRIED]:
            picked = [] if step in taken else list(_of_step(found, step, place, read))
            taken.add(step)
            yield from picked
            if picked:
                break


def _of_step(found: sqlite3.Connection, step: int, place: str, read: Read) -> Iterator[Sample]:
    """The best, the middle and the worst rollout of the group whose rewards differ most."""
    groups = [(group, rollout_rows(found, group.number)) for group in batch_rows(found, step)[:GROUPS_TRIED]]
    if not groups:
        return
    group, rows = max(groups, key=lambda one: _spread(one[1]))
    ranked = sorted(rows, key=lambda row: (row.reward or 0.0, row.idx))
    picked = {ranked[at].idx: ranked[at] for at in (len(ranked) - 1, len(ranked) // 2, 0)}
    for row in picked.values():
        if (rollout := read_rollout(found, row)) is not None:
            yield _sample(group, row, rollout, place, read)


def _spread(rows: Sequence[RolloutRow]) -> float:
    rewards = [row.reward for row in rows if row.reward is not None]
    return max(rewards) - min(rewards) if rewards else -1.0


def _sample(group: GroupRow, row: RolloutRow, rollout: Rollout, place: str, read: Read) -> Sample:
    prompt_of, decode_text, boards_of = read
    assert group.step is not None
    prompt = prompt_of(group.number)
    length = f"{len(rollout.turns)} turns, {rollout.drawn}" if rollout.turns else str(rollout.length)
    head = (
        f"{place}, step {group.step + 1}, group {group.number}, sample {row.idx}: reward {shown(row.reward)}"
        f"{', exact' if row.exact else ''}, staleness {group.step - row.oldest}, {length} tokens, "
        f"{FINISHES[row.finish]}, sampler {row.node[:12]}"
    )
    said = tuple(_said(rollout, decode_text)) if rollout.turns else ()
    if boards := boards_of(prompt, [words for head, words in said if head.startswith("model")]):
        said = tuple(_with_boards(said, boards))
    completion = "" if said else decode_text(rollout.tokens().tolist())
    return Sample(head=head, prompt=prompt.text, wanted=prompt.answer, completion=completion, said=said)
