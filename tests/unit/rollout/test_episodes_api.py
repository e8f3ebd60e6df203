"""Episodes over the learner's HTTP face: turns, environments that fail, questions, and what a sampler may try."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from swarm.errors import EchoError, UserError
from swarm.rollout import api, stepping
from swarm.rollout.journal.entries import RolloutAccepted, RolloutScored, TurnTaken
from swarm.rollout.messages import Answer, Stepped
from swarm.rollout.plane import plane
from swarm.rollout.plane.effects import StepWanted
from swarm.rollout.plane.episodes import EpisodeRules
from swarm.rollout.scoring import Said
from swarm.rollout.stepping import MAX_OPEN, Stepping
from swarm.types import Lease, NodeId, Observed, Rollout, Turn, Unscored
from tests.builders import RULES, STOP, answering, failed_rollout, ints, new_plane, rollout, v
from tests.learner_face import ALICE, BOB, WAIT_S, Learner, leases_for, serving

TURN = (4, STOP)
SAID = 7
"""Token of the environment after a turn that is not the last."""


class Lake:
    """Gives 0.25 for a turn, and 1 for the last one of `turns`. It answers the samples of `slow` once `open`, and fails
    `broken` times."""

    def __init__(self, turns: int = 2) -> None:
        self.turns, self.broken = turns, 0
        self.asked: list[StepWanted] = []
        self.slow: set[int] = set()
        self.open = asyncio.Event()

    async def __call__(self, wanted: StepWanted) -> Said:
        self.asked.append(wanted)
        if wanted.index in self.slow:
            await self.open.wait()
        if self.broken:
            self.broken -= 1
            return Unscored(reason="it fell in")
        is_last = len(wanted.drawn) == self.turns
        return Observed(
            token_ids=b"" if is_last else ints(SAID), rewards=(1.0 if is_last else 0.25,), done=is_last, exact=is_last
        )


def learner_of(*, size: int = 1, begins: bool = False) -> Learner:
    """One group a step, of `size` episodes, and none ahead of it."""
    found = Learner()
    episodes = EpisodeRules(max_turns=3, max_tokens=40, begins=begins)
    found.plane = new_plane(max_staleness=0, groups=1, size=size, newest=None, episodes=episodes)
    return found


@pytest.fixture
def lake() -> Lake:
    return Lake()


@pytest.fixture
async def learner(lake: Lake) -> AsyncIterator[Learner]:
    async with serving(learner_of()) as learner:
        await learner.open(lake)
        yield learner


def turn_of(given: Lease, number: int, *tokens: int, index: int = 0) -> Answer:
    """A turn of an episode of a lease."""
    drawn = rollout(group_id=given.group_id, index=index, tokens=tokens or TURN)
    return answering(given, drawn, number)


async def lease_for(learner: Learner, node: NodeId) -> Lease:
    """The only lease that there is for one more sample."""
    (given,) = await leases_for(learner, node, 1)
    return given


async def step(learner: Learner, node: NodeId, *turns: Answer) -> list[Stepped]:
    return await learner.client(node).submit(turns)


async def one_step(learner: Learner, node: NodeId, turn: Answer) -> Stepped:
    (said,) = await step(learner, node, turn)
    return said


async def verdicts(learner: Learner, node: NodeId, *answers: Answer) -> list[str]:
    return [one.verdict for one in await learner.client(node).submit(answers)]


async def finished(learner: Learner) -> Rollout:
    """The one episode of the next batch."""
    (group,) = await learner.service.next_batch()
    (sample,) = group.samples
    assert sample.rollout is not None
    return sample.rollout


async def ends_unharmed(learner: Learner, given: Lease, node: NodeId = ALICE) -> None:
    """The episode, of which ALICE drew the first turn, ends as if nothing had happened."""
    last = await one_step(learner, node, turn_of(given, 1, 5, STOP))
    assert (last.verdict, last.ended) == ("accepted", True)
    one = await finished(learner)
    assert one.token_ids == ints(*TURN, SAID, 5, STOP)
    assert one.turns == (Turn(start=0, end=2, node=ALICE, reward=0.25), Turn(start=3, end=5, node=node, reward=1.0))
    accepted = [entry for entry in learner.journal.entries if isinstance(entry, RolloutAccepted)]
    assert [entry.rollout for entry in accepted] == [one]


# -- turns ---------------------------------------------------------------------------------------------------


async def test_turns_drawn_over_the_line_become_an_episode(learner: Learner, lake: Lake) -> None:
    given = await lease_for(learner, ALICE)
    said = await one_step(learner, ALICE, turn_of(given, 0))
    assert said == Stepped(group_id="t0", index=0, turn=0, verdict="accepted", token_ids=ints(SAID))
    assert [type(entry) for entry in learner.journal.entries if isinstance(entry, TurnTaken)] == [TurnTaken]
    await ends_unharmed(learner, given)
    assert [one.drawn for one in lake.asked] == [(ints(*TURN),), (ints(*TURN), ints(5, STOP))]
    scores = [entry.score.reward for entry in learner.journal.entries if isinstance(entry, RolloutScored)]
    assert scores == [1.25]


@pytest.mark.parametrize("slow", [{1}, set()])
async def test_quick_turns_do_not_wait_for_slow_ones(
    monkeypatch: pytest.MonkeyPatch, lake: Lake, slow: set[int]
) -> None:
    """Those that are answered within a moment come together."""
    monkeypatch.setattr(stepping, "GATHER_S", 0.0 if slow else WAIT_S)
    monkeypatch.setattr(stepping, "HOLD_S", WAIT_S)
    lake.slow = slow
    async with serving(learner_of(size=3)) as learner:
        await learner.open(lake)
        (given,) = await leases_for(learner, ALICE, 3)
        turns = [turn_of(given, 0, index=index) for index in range(3)]
        assert {one.index for one in await step(learner, ALICE, *turns)} == {0, 1, 2} - slow
        lake.open.set()
        if slow:
            again = await one_step(learner, ALICE, turns[1])
            assert (again.verdict, again.token_ids) == ("accepted", ints(SAID))
        assert len(lake.asked) == 3


async def test_a_request_with_nothing_but_slow_turns_is_answered_with_none_of_them(
    monkeypatch: pytest.MonkeyPatch, lake: Lake, learner: Learner
) -> None:
    monkeypatch.setattr(stepping, "HOLD_S", 0.0)
    lake.slow = {0}
    given = await lease_for(learner, ALICE)
    assert await step(learner, ALICE, turn_of(given, 0)) == []
    assert learner.service._stepping._waiting == {}


async def test_a_node_has_only_so_many_requests_held_open() -> None:
    desk = Stepping()
    turns = [Answer(rollout(index=index)) for index in range(MAX_OPEN)]
    held = [asyncio.create_task(desk.wait(ALICE, [turn], lambda turn: False)) for turn in turns]
    await asyncio.sleep(0)
    await desk.wait(ALICE, turns[:1], lambda turn: False)
    assert not any(task.done() for task in held)
    for task in held:
        task.cancel()
    await asyncio.wait(held)
    assert (desk._waiting, dict(desk._open)) == ({}, {})


async def test_a_reply_has_no_more_than_its_cap(monkeypatch: pytest.MonkeyPatch, lake: Lake) -> None:
    monkeypatch.setattr(stepping, "STEP_REPLY_BYTES", 16)
    monkeypatch.setattr(stepping, "GATHER_S", WAIT_S)
    async with serving(learner_of(size=3)) as learner:
        await learner.open(lake)
        (given,) = await leases_for(learner, ALICE, 3)
        turns = [turn_of(given, 0, index=index) for index in range(3)]
        assert [one.index for one in await step(learner, ALICE, *turns)] == [0, 1]
        assert [one.index for one in await step(learner, ALICE, *turns[2:])] == [2]


# -- environments that fail ----------------------------------------------------------------------------------


async def test_an_episode_whose_environment_fails_gets_zero_and_counts(learner: Learner, lake: Lake) -> None:
    given = await lease_for(learner, ALICE)
    await one_step(learner, ALICE, turn_of(given, 0))
    lake.broken = 1
    said = await one_step(learner, ALICE, turn_of(given, 1))
    assert (said.verdict, said.ended) == ("accepted", True)
    one = await finished(learner)
    assert [turn.reward for turn in one.turns] == [0.0, 0.0]
    assert one.token_ids == ints(*TURN, SAID, *TURN)
    (told,) = [fields for kind, fields in learner.events if kind == "reward_failed"]
    assert told == {"prompt": "p0", "rollout": "t0/0", "reason": "it fell in", "rollouts": 1}


# -- questions -----------------------------------------------------------------------------------------------


async def asking(learner: Learner) -> asyncio.Task[Rollout]:
    """A question that waits for a sampler."""
    question = asyncio.create_task(learner.service.ask((1, 5), RULES))
    await learner.shows(lambda status: status["groups_open"] > 0)
    return question


async def test_a_sampler_that_waits_for_leases_gets_a_question_at_once(learner: Learner) -> None:
    await lease_for(learner, ALICE)
    waiting = asyncio.create_task(leases_for(learner, BOB, 1))
    await learner.knows(BOB)
    question = asyncio.create_task(learner.service.ask((1, 5), RULES))
    (given,) = await waiting
    await verdicts(learner, BOB, turn_of(given, 0))
    assert (await question).token_ids == ints(*TURN)


async def test_a_question_that_no_sampler_answers_in_time_is_withdrawn(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "QUESTION_S", 0.0)
    with pytest.raises(EchoError, match="no sampler has answered: `echo-node status`"):
        await learner.service.ask((1, 5), RULES)
    assert learner.service.status()["groups_open"] == 0
    assert learner.service._questions == {}


async def test_a_question_that_samplers_cannot_answer_fails(learner: Learner) -> None:
    question = await asking(learner)
    given = await lease_for(learner, ALICE)
    await verdicts(learner, ALICE, answering(given, failed_rollout(group_id=given.group_id)))
    with pytest.raises(EchoError, match="do not draw this"):
        await question


async def test_only_so_many_questions_wait(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane, "MAX_QUESTIONS", 1)
    question = await asking(learner)
    with pytest.raises(EchoError, match="too many questions wait"):
        await learner.service.ask((1, 5), RULES)
    await verdicts(learner, ALICE, turn_of(await lease_for(learner, ALICE), 0))
    await question
    (await asking(learner)).cancel()


async def test_a_learner_that_has_published_nothing_answers_no_questions(lake: Lake) -> None:
    learner = learner_of()
    learner.service.open(learner.plane, learner._score, stepper=lake)
    with pytest.raises(EchoError, match="published nothing yet"):
        await learner.service.ask((1, 5), RULES)


# -- attacks of a sampler ------------------------------------------------------------------------------------


async def test_the_turns_of_a_barred_node_are_taken_from_nobody_else(learner: Learner, lake: Lake) -> None:
    """Its environment thinks, or it draws a turn: either way others draw the episode from the beginning."""
    given = await lease_for(learner, BOB)
    await one_step(learner, BOB, turn_of(given, 0))
    learner.service.bar(BOB, "it lied")
    said = await one_step(learner, BOB, turn_of(given, 1))
    assert (said.verdict, said.detail, said.ended) == ("barred", "it lied", True)
    lake.slow = {0}
    mine = await lease_for(learner, ALICE)
    waiting = asyncio.create_task(step(learner, ALICE, turn_of(mine, 0)))
    await learner.shows(lambda status: len(lake.asked) == 2)
    learner.service.bar(ALICE, "so did it")
    learner.service.unbar(BOB)
    lake.open.set()
    assert [one.ended for one in await waiting] == [True]
    again = await lease_for(learner, BOB)
    for number in range(2):
        await one_step(learner, BOB, turn_of(again, number))
    assert [turn.node for turn in (await finished(learner)).turns] == [BOB, BOB]


async def test_episodes_that_are_over_before_they_begin_end_the_run() -> None:
    """As where what is read first is longer than an episode: no turn is ever leased, and no reward fails."""

    async def over(wanted: StepWanted) -> Said:
        return Observed(token_ids=ints(*range(41)))

    async with serving(learner_of(begins=True)) as learner:
        await learner.open(over)
        watch = asyncio.create_task(learner.service.watch_silence())
        while not watch.done():
            await learner.client(ALICE).ask(v(0), 1, 0.05, holding=())
        with pytest.raises(UserError, match=r"64 groups in a row were lost .* --max-episode-tokens"):
            await watch
