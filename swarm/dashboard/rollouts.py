"""Groups of rollouts out of a run's journal, newest first. Blocking; a run that goes on is only read."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from swarm.errors import Damaged, UserError
from swarm.report.samples import conversation, has_players, versions_of
from swarm.rollout.journal.index import FINISHES, read_meta, reading
from swarm.rollout.journal.journal import DATABASE
from swarm.rollout.journal.reading import GroupRow, RolloutRow, group_rows, read_rollout, rollout_rows
from swarm.tasks.base import Read
from swarm.types import Rollout

TEXT_CHARS = 20_000  # Of one text: more than anybody reads in a list
ANSWER_CHARS = 2_000_000  # Of one answer: with a thousand rollouts in a group each is cut shorter
GROUPS = 50  # In one answer

ANY_ROLLOUT = "number < ? AND (? = 0 OR step = ?) AND EXISTS (SELECT 1 FROM rollouts WHERE number = groups.number)"


def sampled_steps(run_dir: Path) -> list[int]:
    """Return the first, the middle and the last step whose rollouts are kept, 1 for the run's first; none if the run
    has recorded no step. Raise UserError or Damaged if the journal cannot be read."""
    if not (run_dir / DATABASE).is_file():
        return []
    with reading(run_dir / DATABASE) as journal:
        steps = [step + 1 for (step,) in journal.execute("SELECT step FROM batches ORDER BY step")]
        kept = steps[read_meta(journal, "pruned") :]
    return sorted({kept[0], kept[len(kept) // 2], kept[-1]}) if kept else []


def read_groups(
    run_dir: Path, read: Read, *, before: int, count: int, step: int = 0, chars: int = ANSWER_CHARS
) -> dict[str, Any]:
    """Return up to `count` groups below number `before`, as the page shows them, and the number to go on from. With a
    `step`, 1 for the first, only those that it trained on. `chars` bounds their texts."""
    if not (run_dir / DATABASE).is_file():
        return {"groups": [], "next": None, "fault": "the run has recorded nothing yet"}
    found: list[dict[str, Any]] = []
    count = max(1, min(count, GROUPS))
    left, lost = chars, 0
    try:
        with reading(run_dir / DATABASE) as journal:
            order = f"number DESC LIMIT {count + 1}"
            rows = list(group_rows(journal, ANY_ROLLOUT, before, step, step - 1, order=order))
            for group in rows[:count]:
                if left <= 0:
                    break
                one = _group(journal, group, read, chars)
                texts = (t for r in one["rollouts"] for t in (r["completion"], *(turn["text"] for turn in r["turns"])))
                left -= sum(map(len, texts))
                lost += sum(rollout["lost"] for rollout in one["rollouts"])
                found.append(one)
    except (Damaged, UserError) as fault:
        return {"groups": found, "next": None, "fault": str(fault)}
    words = f"the texts of {lost} rollouts are damaged or no longer kept" if lost else ""
    return {"groups": found, "next": found[-1]["group"] if len(found) < len(rows) else None, "fault": words}


def _group(journal: sqlite3.Connection, group: GroupRow, read: Read, chars: int) -> dict[str, Any]:
    prompt, rows = read[0](group.prompt_number), rollout_rows(journal, group.number)
    chars = min(TEXT_CHARS, chars // max(1, len(rows)))
    return {
        "group": group.number,
        "step": None if group.step is None else group.step + 1,
        "dropped": group.reason,
        "prompt": prompt.text[:TEXT_CHARS],
        "wanted": prompt.answer[:TEXT_CHARS],
        "rollouts": [_rollout(group, row, read_rollout(journal, row), read, chars) for row in rows],
    }


def _rollout(group: GroupRow, row: RolloutRow, rollout: Rollout | None, read: Read, chars: int) -> dict[str, Any]:
    score = row.score
    return {
        "index": row.idx,
        "reward": row.reward,
        "exact": None if row.exact is None else bool(row.exact),
        "finish": FINISHES[row.finish],
        "tokens": row.tokens,
        "node": row.node,
        "staleness": None if group.step is None else group.step - row.oldest,
        "spans": [[str(span.version), span.end - span.start] for span in rollout.spans] if rollout else [],
        "parts": {name[:64]: value for name, value in score.parts.items()} if score else {},
        "completion": read[1](rollout.tokens().tolist())[:chars] if rollout and not rollout.turns else "",
        "turns": _turns(rollout, read, chars) if rollout else [],
        "lost": rollout is None,
    }


def _turns(rollout: Rollout, read: Read, chars: int) -> list[dict[str, Any]]:
    """An episode's texts until they have `chars`; what the environment said has no node."""
    found: list[dict[str, Any]] = []
    for seat, turn, text in conversation(rollout, read[1]) if rollout.turns else ():
        found.append({"player": seat + 1 if has_players(rollout) else None, "text": text[:chars]})
        if turn:
            versions = [str(one) for one in versions_of(rollout, turn)[:32]]
            found[-1] |= {"node": turn.node, "reward": turn.reward, "versions": versions}
        chars -= len(text)
        if chars <= 0:
            break
    return found
