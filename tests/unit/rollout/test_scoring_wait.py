"""How many rollouts wait for their rewards, and how long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swarm.rollout.plane.effects import ScoreWanted
from swarm.rollout.scoring import Scoring
from swarm.types import GroupId, Score, Unscored
from tests.builders import ALICE, prompt, rollout


async def test_what_waits_for_its_reward_is_counted_until_it_has_one() -> None:
    asked, go_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def scorer(wanted: Sequence[ScoreWanted]) -> list[Score | Unscored]:
        asked.set()
        await go_on.wait()
        # One by one, as a full pool answers.
        return [Score(reward=1.0, exact=True)]

    scored: list[int] = []

    def note(wanted: Sequence[ScoreWanted], outcomes: object) -> None:
        scored.extend(one.index for one in wanted)
        if len(scored) == 4:
            done.set()

    scoring = Scoring(scorer, scored=note)
    scoring.begin(
        [
            ScoreWanted(group_id=GroupId(group), index=index, node=ALICE, prompt=prompt(), rollout=rollout())
            for group in ("t0", "t1")
            for index in (0, 1)
        ]
    )
    assert scoring.waiting == 4
    await asked.wait()
    assert (scoring.waiting, scoring.took_s) == (4, 0.0)
    go_on.set()
    async with asyncio.timeout(5):
        await done.wait()
    assert scoring.waiting == 0
    assert sorted(scored) == [0, 0, 1, 1]
    assert scoring.took_s > 0
