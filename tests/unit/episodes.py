"""What a journal has, and episodes in it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from swarm.rollout.journal.entries import Entry, GroupOpened, RolloutAccepted, RolloutScored, SamplesLeased
from swarm.types import Rollout, Score, Span, Turn
from tests.builders import ALICE, BOB, floats, ints, v
from tests.unit.rollout.journal.test_journal import ASKED, SIZE, opened, taken

ALONE = (Turn(start=0, end=2, node=ALICE, reward=0.25), Turn(start=4, end=5, node=BOB, reward=1.0))
TWO = (Turn(start=0, end=2, node=ALICE, reward=1.0), Turn(start=4, end=6, node=BOB, reward=-1.0, seat=1))


def played(
    turns: tuple[Turn, ...] = ALONE,
    *,
    length: int = 7,
    seats: tuple[int, ...] = (),
    spans: tuple[Span, ...] | None = None,
    number: int = 0,
    index: int = 0,
) -> Rollout:
    """Tokens 3, 4, ... of which version 0 drew the first turn, and version 1 all later ones."""
    drawn = {place for turn in turns for place in range(turn.start, turn.end)}
    own = tuple(Span(version=v(int(n > 0)), start=turn.start, end=turn.end) for n, turn in enumerate(turns))
    return Rollout(
        group_id=f"t{number}",
        index=index,
        token_ids=ints(*range(3, 3 + length)),
        logprobs=floats(*(-0.5 if at in drawn else 0.0 for at in range(length))),
        spans=own if spans is None else spans,
        finish="stop",
        turns=turns,
        seats=seats,
    )


def group_of_episodes(first: Rollout, *, reward: float = 1.25) -> list[Entry]:
    """Group 0, of `first` with this reward and one that is played() and earns its turns' rewards."""
    rollouts = (first, played(index=1))
    return [
        GroupOpened(number=0, prompt_number=ASKED, version=v(0), max_staleness=2),
        SamplesLeased(number=0, node=ALICE, samples=tuple((i, 0) for i in range(SIZE))),
        *(RolloutAccepted(number=0, node=BOB, rollout=one) for one in rollouts),
        RolloutScored(number=0, index=0, score=Score(reward=reward, exact=True)),
        RolloutScored(number=0, index=1, score=Score(reward=1.25, exact=True)),
    ]


def record(directory: Path, *batches: Sequence[Entry]) -> None:
    """Write a journal, each batch of entries in one go."""

    async def write() -> None:
        async with opened(directory) as journal:
            for entries in batches:
                await journal.write(entries)

    asyncio.run(write())


def record_episodes(directory: Path, first: Rollout, *, reward: float = 1.25) -> None:
    record(directory, [*group_of_episodes(first, reward=reward), taken(0, 0)])
