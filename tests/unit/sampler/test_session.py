"""A session: answers that came meanwhile go together, and what it says of rollouts that the learner dropped."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from swarm.rollout.messages import Answer, DroppedRollouts, Offer, Stepped
from swarm.sampler.session import SAID_AGAIN_S, Batch, Drops, SamplerStatus, Session, refused
from tests.builders import rollout
from tests.unit.wires import many_turns


class Learner:
    """Stands for a RolloutClient: each submission waits until the test lets it go."""

    def __init__(self) -> None:
        self.submitted: list[list[int]] = []
        self.on_its_way = asyncio.Semaphore(0)

    async def submit(self, answers: list[Answer]) -> list[Stepped]:
        self.submitted.append([answer.rollout.index for answer in answers])
        await self.on_its_way.acquire()
        return [refused(answer) for answer in answers]

    async def release(self, samples: object, *, forget: bool) -> None: ...


class NoSpool:
    def files(self) -> list[str]:
        return []


def batch(index: int) -> Batch:
    return Batch({("t0", index)}, [Answer(rollout(index=index))], None)


async def test_answers_that_came_meanwhile_go_in_one_submission() -> None:
    learner, nothing = Learner(), cast(Any, None)
    session = Session(
        client=cast(Any, learner),
        beat_s=1.0,
        engine=nothing,
        launch=nothing,
        spool=cast(Any, NoSpool()),
        receiver=nothing,
        offer=Offer,
        status=SamplerStatus(),
        on_change=lambda: None,
        say=lambda line: None,
    )
    task, handing = asyncio.create_task(session._submit()), asyncio.create_task(session._handing.run())
    await session._settled.wait()
    session._in_hand = {name for index in range(3) for name in batch(index).samples}
    for index in range(3):
        await session._answers.put(batch(index))
        await many_turns()
    assert learner.submitted == [[0]]
    assert len(session._in_hand) == 3
    learner.on_its_way.release()
    await many_turns()
    assert learner.submitted == [[0], [1, 2]]
    assert len(session._in_hand) == 2
    learner.on_its_way.release()
    await session._answers.join()
    assert not session._in_hand
    task.cancel()
    handing.cancel()


def told(**counts: int) -> list[DroppedRollouts]:
    return [DroppedRollouts(reason=reason, rollouts=count) for reason, count in counts.items()]


def test_it_speaks_when_they_grew_and_of_the_growth_alone() -> None:
    drops = Drops()
    assert drops.hear(told(), now=0.0) is None
    assert drops.hear(told(stale=12), now=5.0) == 'the learner dropped 12 of our rollouts: "stale"'
    assert drops.hear(told(stale=12), now=5.0 + SAID_AGAIN_S) is None
    later = drops.hear(told(stale=14, reward_failed=1), now=5.0 + SAID_AGAIN_S)
    assert later == 'the learner dropped 3 of our rollouts: 1 "reward_failed", 2 "stale"'
    assert drops.counts == {"stale": 14, "reward_failed": 1}
    drops.hear(told(), now=400.0)
    again = drops.hear(told(stale=5), now=500.0)
    assert again == 'the learner dropped 5 of our rollouts: "stale"', "a learner that started again counts from zero"


def test_it_speaks_once_a_minute_and_forgets_nothing_meanwhile() -> None:
    drops = Drops()
    lines = [drops.hear(told(stale=1 + second), now=float(second)) for second in range(121)]
    assert [second for second, line in enumerate(lines) if line] == [0, 60, 120]
    assert lines[60] == 'the learner dropped 60 of our rollouts: "stale"'


def test_a_reason_cannot_play_with_the_terminal() -> None:
    line = Drops().hear([DroppedRollouts(reason="\x1b[2Jx", rollouts=1)], now=0.0)
    assert line == 'the learner dropped 1 of our rollouts: "?[2Jx"'
