"""How answers leave a session: those that came while others were on their way go together."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from swarm.rollout.messages import Answer, Offer, Stepped
from swarm.sampler.session import Batch, SamplerStatus, Session, refused
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
