"""Reads a journal back. Blocking."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec

from swarm.rollout.journal.entries import (
    NO_VARIANCE,
    RECALLED_GROUPS,
    BoundSet,
    RecordedGroup,
    RecordedLease,
    RecordedRollout,
    RecordedRun,
    Tried,
    TurnTaken,
    VersionPublished,
)
from swarm.rollout.journal.index import FINISHES, WAITING, payload_digest
from swarm.types import NodeId, Observed, Parts, Rollout, Score, VersionId
from swarm.wire import Digest

_ROLLOUT = msgspec.msgpack.Decoder(Rollout)
_TURN = msgspec.msgpack.Decoder(tuple[Rollout, Observed])


class RolloutRow(NamedTuple):
    """The row of one accepted rollout, with its node's name."""

    number: int
    idx: int
    node: str
    oldest: int
    tokens: int
    finish: Annotated[int, msgspec.Meta(ge=0, lt=len(FINISHES))]
    reward: float | None
    exact: int | None
    parts: bytes | None
    digest: bytes

    @property
    def score(self) -> Score | None:
        if self.reward is None:
            return None
        parts = {} if self.parts is None else msgspec.msgpack.decode(self.parts, type=Parts)
        return Score(reward=self.reward, exact=bool(self.exact), parts=parts)


class GroupRow(NamedTuple):
    """The row of one group."""

    number: int
    prompt_number: int
    incarnation: int
    version: int
    max_staleness: int
    step: int | None
    place: int | None
    reason: str | None
    dropped_oldest: int | None
    dropped_at: int | None
    dropped_bound: int | None


def count_batches(connection: sqlite3.Connection) -> int:
    """Return how many batches are recorded, which is the number of the next one."""
    (newest,) = connection.execute("SELECT max(step) FROM batches").fetchone()
    return 0 if newest is None else int(newest) + 1


def group_rows(connection: sqlite3.Connection, where: str, *values: int, order: str = "number") -> Iterator[GroupRow]:
    rows = connection.execute(f"SELECT * FROM groups WHERE {where} ORDER BY {order}", values)
    # Check the types: SQLite has no checksums, so a damaged page may hold anything.
    return (msgspec.convert(row, GroupRow) for row in rows)


def batch_rows(connection: sqlite3.Connection, step: int) -> list[GroupRow]:
    """Return the groups of a batch in the batch's order."""
    return list(group_rows(connection, "step = ?", step, order="place"))


def rollout_rows(connection: sqlite3.Connection, number: int) -> list[RolloutRow]:
    """Return the accepted rollouts of a group in order of their indices."""
    rows = connection.execute(
        "SELECT r.number, r.idx, n.name, r.oldest, r.tokens, r.finish, r.reward, r.exact, r.parts, r.digest "
        "FROM rollouts r JOIN nodes n ON n.id = r.node WHERE r.number = ? ORDER BY r.idx",
        (number,),
    )
    return [msgspec.convert(row, RolloutRow) for row in rows]


def read_rollout(connection: sqlite3.Connection, row: RolloutRow) -> Rollout | None:
    """Return the rollout of a row, or None if its payload is pruned or damaged."""
    place = (row.number, row.idx)
    found = connection.execute("SELECT payload FROM payloads WHERE number = ? AND idx = ?", place).fetchone()
    if found is None or payload_digest(found[0]) != row.digest:
        return None
    try:
        return _ROLLOUT.decode(found[0])
    except msgspec.DecodeError:
        return None


MAX_GIVEN = 4096  # Nodes whose rollouts are counted, those that gave most: as many as a learner knows at a time
GIVEN = (
    "SELECT n.name, count(*), sum(r.tokens) FROM rollouts r JOIN nodes n ON n.id = r.node "
    "GROUP BY r.node ORDER BY sum(r.tokens) DESC LIMIT ?"
)

TRIED = (
    "SELECT g.number, g.prompt_number, coalesce(g.step, g.dropped_at) AS at, count(*), sum(r.reward), min(r.reward), "
    "max(r.reward) FROM groups g JOIN rollouts r ON r.number = g.number "
    "WHERE (g.step IS NOT NULL OR g.reason = ?) AND g.number > ? GROUP BY g.number ORDER BY at, g.number"
)


def read_run(connection: sqlite3.Connection) -> RecordedRun:
    """Return where the run stands. Raise DatabaseError if the payload of a waiting rollout is damaged."""
    groups = tuple(_read_group(connection, row) for row in list(group_rows(connection, WAITING)))
    (last,) = connection.execute("SELECT max(number) FROM groups").fetchone()
    batches = count_batches(connection)
    (replaced,) = connection.execute(
        "SELECT count(*) FROM groups WHERE reason = ? AND dropped_at = ?", (NO_VARIANCE, batches)
    ).fetchone()
    return RecordedRun(
        next_batch=batches,
        opened=0 if last is None else last + 1,
        groups=groups,
        published=read_version(connection),
        bound=read_bound(connection),
        replaced=replaced,
        tried=tuple(
            msgspec.convert(row, Tried)
            for row in connection.execute(TRIED, (NO_VARIANCE, (last or 0) - RECALLED_GROUPS))
        ),
        given={node: (rollouts, tokens) for node, rollouts, tokens in connection.execute(GIVEN, (MAX_GIVEN,))},
    )


def read_bound(connection: sqlite3.Connection, step: int | None = None) -> BoundSet | None:
    """Return the bound that was set last before batch `step`, or at all if that is None."""
    row = connection.execute(
        "SELECT max_staleness, publish_every_steps, step, learning_rate FROM bounds WHERE ?1 IS NULL OR step <= ?1 "
        "ORDER BY id DESC LIMIT 1",
        (step,),
    ).fetchone()
    names = ("max_staleness", "publish_every_steps", "step", "learning_rate")
    return BoundSet(**dict(zip(names, row, strict=True))) if row else None


def read_batch(connection: sqlite3.Connection, step: int) -> list[RecordedGroup]:
    """Return a recorded batch in its order. Raise DatabaseError if one of its payloads is pruned or damaged,
    LookupError if there is no such batch."""
    rows = batch_rows(connection, step)
    if not rows:
        raise LookupError(f"batch {step} is not recorded")
    return [_read_group(connection, row) for row in rows]


def _read_group(connection: sqlite3.Connection, row: GroupRow) -> RecordedGroup:
    leases = connection.execute(
        "SELECT l.idx, n.name, l.attempt FROM leases l JOIN nodes n ON n.id = l.node "
        "WHERE l.number = ? ORDER BY l.rowid",
        (row.number,),
    )
    return RecordedGroup(
        number=row.number,
        prompt_number=row.prompt_number,
        version=VersionId(incarnation=row.incarnation, version=row.version),
        max_staleness=row.max_staleness,
        rollouts=tuple(_read_recorded(connection, one) for one in rollout_rows(connection, row.number)),
        leases=tuple(RecordedLease(*msgspec.convert(one, tuple[int, NodeId, int])) for one in leases),
        turns=_read_turns(connection, row.number),
    )


def _read_turns(connection: sqlite3.Connection, number: int) -> tuple[TurnTaken, ...]:
    rows = connection.execute(
        "SELECT t.idx, t.turn, n.name, t.digest, t.payload FROM turns t JOIN nodes n ON n.id = t.node "
        "WHERE t.number = ? ORDER BY t.idx, t.turn",
        (number,),
    )
    turns = []
    for row in rows:
        index, turn, node, digest, payload = msgspec.convert(row, tuple[int, int, NodeId, bytes, bytes])
        if payload_digest(payload) != digest:
            raise sqlite3.DatabaseError(f"the payload of turn {turn} of t{number}/{index} was changed")
        drawn, said = _TURN.decode(payload)
        turns.append(TurnTaken(number=number, turn=turn, node=node, drawn=drawn, said=said))
    return tuple(turns)


def _read_recorded(connection: sqlite3.Connection, row: RolloutRow) -> RecordedRollout:
    if (rollout := read_rollout(connection, row)) is None:
        raise sqlite3.DatabaseError(f"the payload of t{row.number}/{row.idx} is lost or was changed")
    return RecordedRollout(node=NodeId(row.node), rollout=rollout, score=row.score)


def read_version(connection: sqlite3.Connection, version: int | None = None) -> VersionPublished | None:
    """Return the last publication of version number `version`, or the last one at all if that is None."""
    row = connection.execute(
        "SELECT incarnation, version, content FROM versions WHERE ?1 IS NULL OR version = ?1 "
        "ORDER BY incarnation DESC, version DESC LIMIT 1",
        (version,),
    ).fetchone()
    if row is None:
        return None
    return VersionPublished(version=VersionId(incarnation=row[0], version=row[1]), content=Digest(bytes(row[2])))
