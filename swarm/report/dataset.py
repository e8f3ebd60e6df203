"""Exports a run's rollouts as a dataset, one per line (.jsonl). The run is only read."""

from __future__ import annotations

import json
import sqlite3
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from swarm.errors import UserError
from swarm.rollout.journal.index import FINISHES, reading
from swarm.rollout.journal.journal import DATABASE
from swarm.rollout.journal.reading import GroupRow, RolloutRow, group_rows, read_rollout, rollout_rows
from swarm.types import Prompt, Rollout, Span

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """How many rollouts are in the file, and how many were left out because their payloads are pruned or damaged."""

    rollouts: int
    left_out: int


def export_rollouts(
    run_dir: Path, to: Path, *, prompt: Callable[[int], Prompt], decode_text: Callable[[Sequence[int]], str]
) -> Exported:
    """Write every accepted rollout that still has its payload to `to`, in order of group and index. `prompt` returns a
    group's prompt by number, `decode_text` the text of token ids. Raise UserError if `to` exists or has another suffix,
    or if its directory is missing."""
    if to.suffix != ".jsonl":
        raise UserError(f"cannot write {to.name}: name a file that ends in .jsonl")
    if to.exists():
        raise UserError(f"{to} is there already: remove it, or name another file")
    if not to.absolute().parent.is_dir():
        raise UserError(f"{to.parent} is not a directory: make it, or name another file")
    partial = to.with_name(to.name + ".partial")
    written = left_out = 0
    with reading(run_dir / DATABASE) as found:
        try:
            with partial.open("w", encoding="utf-8") as file:
                for row in _rows(found, prompt, decode_text):
                    if row is None:
                        left_out += 1
                    else:
                        file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
                        written += 1
            partial.replace(to)
        finally:
            partial.unlink(missing_ok=True)
    return Exported(rollouts=written, left_out=left_out)


def _rows(
    connection: sqlite3.Connection, prompt: Callable[[int], Prompt], decode_text: Callable[[Sequence[int]], str]
) -> Iterator[Row | None]:
    """Yield a row for each accepted rollout, None in place of one whose payload is not there."""
    for group in group_rows(connection, "TRUE"):
        question = prompt(group.prompt_number)
        for one in rollout_rows(connection, group.number):
            rollout = read_rollout(connection, one)
            yield None if rollout is None else _row(group, one, question, rollout, decode_text)


def _span(span: Span, author: str) -> Row:
    return {**structs.asdict(span.version), "start": span.start, "end": span.end, "node": span.node or author}


def _row(
    group: GroupRow, row: RolloutRow, prompt: Prompt, rollout: Rollout, decode_text: Callable[[Sequence[int]], str]
) -> Row:
    """Return the row of a rollout. `step` and `staleness` (in learner steps) are None unless it was trained on."""
    tokens = rollout.tokens().tolist()
    return {
        "step": group.step,
        "dropped": group.reason,
        "group": group.number,
        "index": row.idx,
        "prompt_id": prompt.prompt_id,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "prompt_token_ids": list(prompt.token_ids),
        "completion": decode_text(tokens),
        "token_ids": tokens,
        "logprobs": array("f", rollout.logprobs).tolist(),
        "spans": [_span(span, row.node) for span in rollout.spans],
        "staleness": None if group.step is None else group.step - row.oldest,
        "reward": row.reward,
        "exact": None if row.exact is None else bool(row.exact),
        "rewards": score.parts if (score := row.score) else {},
        "node": row.node,
        "finish": FINISHES[row.finish],
        "turns": [structs.asdict(turn) for turn in rollout.turns],
        "seats": list(rollout.seats),
    }
