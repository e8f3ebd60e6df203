"""Episodes over the learner's HTTP face: turns, environments that fail, questions, and what a sampler may try."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from msgspec import structs

from swarm.errors import EchoError, ProtocolError, UserError
from swarm.rollout import api, scoring
from swarm.rollout.journal.entries import RolloutAccepted, RolloutScored
from swarm.rollout.messages import Answer
from swarm.rollout.plane import plane as plane_module
from swarm.rollout.plane.effects import StepWanted
from swarm.rollout.plane.episodes import EpisodeRules
from swarm.rollout.plane.leases import Group
from swarm.rollout.plane.plane import FORGED
from swarm.rollout.scoring import Said, Scoring
from swarm.sampler.client import TimedLease
from swarm.types import GroupId, NodeId, Observed, Play, Rollout, Turn, Unscored
from tests.builders import RULES, STOP, answering, failed_rollout, floats, ints, new_plane, prompt, rollout, v
from tests.learner_face import ALICE, BOB, WAIT_S, Learner, leases_for, serving

PROMPT = prompt().token_ids
TURN = (4, STOP)
SAID = 7
"""Token of the environment after a turn that is not the last."""

ALONE = Play(task="lake", prompt_id="lake-0", max_turns=3, max_tokens=40)


class Lake:
    """Gives 0.25 for a turn, and 1 for the last one of `turns`. It answers while `open`, and fails `broken` times."""

    def __init__(self, turns: int = 2) -> None:
        self.turns, self.broken = turns, 0
        self.asked: list[StepWanted] = []
        self.open = asyncio.Event()
        self.open.set()

    async def __call__(self, wanted: StepWanted) -> Said:
        self.asked.append(wanted)
        await self.open.wait()
        if self.broken:
            self.broken -= 1
            return Unscored(reason="it fell in")
        return tuple(self._says(turn + 1) for turn in range(wanted.answered, len(wanted.drawn)))

    def _says(self, turn: int) -> Observed:
        is_last = turn == self.turns
        return Observed(
            token_ids=b"" if is_last else ints(SAID), rewards=(1.0 if is_last else 0.25,), done=is_last, exact=is_last
        )


def learner_of(*, size: int = 1, play: Play | None = None, bound: int = 0, max_tokens: int = 40) -> Learner:
    """One group a step, of `size` episodes, and none ahead of it."""
    found = Learner()
    episodes = EpisodeRules(max_turns=3, max_tokens=max_tokens, play=play)
    found.plane = new_plane(max_staleness=bound, groups=1, size=size, newest=None, episodes=episodes)
    return found


@pytest.fixture
def lake() -> Lake:
    return Lake()


@pytest.fixture
async def learner(lake: Lake) -> AsyncIterator[Learner]:
    async with serving(learner_of()) as learner:
        await learner.open(lake)
        yield learner


def turn_of(given: TimedLease, *tokens: int) -> Answer:
    """The turn of the one sample of a lease."""
    (answer,) = answers_to(given, rollout(tokens=tokens or TURN))
    return answer


def answers_to(given: TimedLease, *drawn: Rollout) -> list[Answer]:
    """`drawn` under a lease, for its samples, whatever they say themselves."""
    named = zip(drawn, given.lease.samples, strict=True)
    rollouts = (structs.replace(one, group_id=given.lease.group_id, index=spec.index) for one, spec in named)
    return [answering(given.lease, one) for one in rollouts]


async def lease_for(learner: Learner, node: NodeId) -> TimedLease:
    """The only lease that there is for one more sample."""
    (given,) = await leases_for(learner, node, 1)
    return given


async def verdicts(learner: Learner, node: NodeId, *answers: Answer) -> list[str]:
    return [one.verdict for one in await learner.client(node).submit(answers)]


async def draw(learner: Learner, node: NodeId, *tokens: int) -> TimedLease:
    """Have `node` draw the next turn; the lease under which it did."""
    given = await lease_for(learner, node)
    assert await verdicts(learner, node, turn_of(given, *tokens)) == ["accepted"]
    return given


async def finished(learner: Learner) -> Rollout:
    """The one episode of the next batch."""
    (group,) = await learner.service.next_batch()
    (sample,) = group.samples
    assert sample.rollout is not None
    return sample.rollout


async def ends_unharmed(learner: Learner) -> None:
    """The episode under way, of which the first turn is drawn, ends as if nothing had happened."""
    last = await draw(learner, ALICE, 5, STOP)
    assert (last.lease.turn, last.lease.prompt_token_ids) == (1, (*PROMPT, *TURN, SAID))
    one = await finished(learner)
    assert one.token_ids == ints(*TURN, SAID, 5, STOP)
    assert one.turns == (
        Turn(start=0, end=2, node=ALICE, reward=0.25),
        Turn(start=3, end=5, node=ALICE, reward=1.0),
    )
    accepted = [entry for entry in learner.journal.entries if isinstance(entry, RolloutAccepted)]
    assert [entry.rollout for entry in accepted] == [one]


# -- turns ---------------------------------------------------------------------------------------------------


async def test_turns_drawn_over_the_line_become_an_episode(learner: Learner, lake: Lake) -> None:
    await draw(learner, ALICE)
    await ends_unharmed(learner)
    assert [(one.drawn, one.answered, one.nodes) for one in lake.asked] == [
        ((ints(*TURN),), 0, (ALICE,)),
        ((ints(*TURN), ints(5, STOP)), 1, (ALICE,)),
    ]
    scores = [entry.score.reward for entry in learner.journal.entries if isinstance(entry, RolloutScored)]
    assert scores == [1.25]


async def test_turns_that_are_answered_together_are_leased_together() -> None:
    lake = Lake()
    async with serving(learner_of(size=3)) as learner:
        await learner.open(lake)
        (first,) = await leases_for(learner, ALICE, 3)
        assert await verdicts(learner, ALICE, *answers_to(first, *[rollout(tokens=TURN)] * 3)) == ["accepted"] * 3
        given = await leases_for(learner, ALICE, 3)
        assert [(one.lease.turn, one.lease.samples[0].index) for one in given] == [(1, 0), (1, 1), (1, 2)]


def wanted(index: int) -> StepWanted:
    return StepWanted(group_id=GroupId("t0"), index=index, episode="", prompt=prompt(), drawn=(b"",), answered=0)


class Slow:
    """Environments of which each answers when it is told to, and how their answers went out."""

    def __init__(self) -> None:
        self.told = [asyncio.Event() for _ in range(3)]
        self.went_out: list[list[int]] = []
        self.first = asyncio.Event()

    async def step(self, asked: StepWanted) -> Said:
        await self.told[asked.index].wait()
        return (Observed(),)

    def stepped(self, said: Sequence[tuple[StepWanted, Said]]) -> None:
        self.went_out.append(sorted(asked.index for asked, _ in said))
        self.first.set()

    def scoring(self) -> Scoring:
        async def scorer(wanted: object) -> list[Unscored]:
            raise AssertionError

        return Scoring(scorer, scored=lambda wanted, outcomes: None, stepper=self.step, stepped=self.stepped)


async def all_of(slow: Slow, scoring: Scoring) -> list[list[int]]:
    await asyncio.gather(*scoring._tasks)
    return slow.went_out


async def test_answers_wait_a_moment_for_those_that_were_asked_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "GATHER_S", WAIT_S)
    slow = Slow()
    slow.told[0].set()
    stepping = slow.scoring()
    stepping.step([wanted(index) for index in range(3)])
    for _ in range(10):
        await asyncio.sleep(0)
    assert slow.went_out == []
    for told in slow.told:
        told.set()
    assert await all_of(slow, stepping) == [[0, 1, 2]]


async def test_answers_do_not_wait_for_an_environment_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "GATHER_S", 0.0)
    slow = Slow()
    slow.told[0].set()
    slow.told[1].set()
    stepping = slow.scoring()
    stepping.step([wanted(index) for index in range(3)])
    await slow.first.wait()
    assert slow.went_out == [[0, 1]]
    slow.told[2].set()
    assert await all_of(slow, stepping) == [[0, 1], [2]]


# -- environments that fail ----------------------------------------------------------------------------------


async def test_an_episode_whose_environment_fails_gets_zero_and_counts(learner: Learner, lake: Lake) -> None:
    await draw(learner, ALICE)
    given = await lease_for(learner, ALICE)
    lake.broken = 1
    assert await verdicts(learner, ALICE, turn_of(given)) == ["accepted"]
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


async def test_a_question_is_answered_before_the_run_goes_on(learner: Learner) -> None:
    question = await asking(learner)
    given = await lease_for(learner, ALICE)
    assert (given.lease.purpose, given.lease.prompt_token_ids) == ("ask", (1, 5))
    assert await verdicts(learner, ALICE, turn_of(given, 6, STOP)) == ["accepted"]
    assert (await question).token_ids == ints(6, STOP)
    assert learner.journal.entries == []
    await draw(learner, ALICE)
    await ends_unharmed(learner)


async def test_a_sampler_that_waits_for_leases_gets_a_question_at_once(learner: Learner) -> None:
    await draw(learner, ALICE)
    await lease_for(learner, ALICE)
    waiting = asyncio.create_task(leases_for(learner, BOB, 1))
    await learner.knows(BOB)
    question = asyncio.create_task(learner.service.ask((1, 5), RULES))
    (given,) = await waiting
    await verdicts(learner, BOB, turn_of(given))
    assert (await question).token_ids == ints(*TURN)


async def test_a_question_that_no_sampler_answers_in_time_is_withdrawn(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "QUESTION_S", 0.0)
    with pytest.raises(EchoError, match="no sampler has answered: `echo-node status`"):
        await learner.service.ask((1, 5), RULES)
    assert learner.service.status()["groups_open"] == 0
    assert learner.service._questions == {}


async def test_an_answer_to_a_question_that_was_withdrawn_does_no_harm(learner: Learner) -> None:
    question = await asking(learner)
    given = await lease_for(learner, ALICE)
    question.cancel()
    await asyncio.wait([question])
    assert await verdicts(learner, ALICE, turn_of(given)) == ["duplicate"]
    assert learner.plane.leased.held_by(ALICE) == set()


async def test_a_question_that_samplers_cannot_answer_fails(learner: Learner) -> None:
    question = await asking(learner)
    await verdicts(learner, ALICE, *answers_to(await lease_for(learner, ALICE), failed_rollout()))
    with pytest.raises(EchoError, match="do not draw this"):
        await question


async def test_only_so_many_questions_wait(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane_module, "MAX_QUESTIONS", 1)
    question = await asking(learner)
    with pytest.raises(EchoError, match="too many questions wait"):
        await learner.service.ask((1, 5), RULES)
    await draw(learner, ALICE)
    await question
    assert (await asking(learner)).cancel()


async def test_a_learner_that_has_published_nothing_answers_no_questions(lake: Lake) -> None:
    learner = learner_of()
    with pytest.raises(EchoError, match="published nothing yet"):
        await learner.service.ask((1, 5), RULES)
    learner.service.open(learner.plane, learner._score, learner.journal, stepper=lake)
    with pytest.raises(EchoError, match="published nothing yet"):
        await learner.service.ask((1, 5), RULES)


# -- attacks of a sampler ------------------------------------------------------------------------------------


async def test_a_turn_drawn_twice_counts_once(learner: Learner, lake: Lake) -> None:
    """While its environment thinks, and after it has answered."""
    lake.open.clear()
    first = await draw(learner, ALICE)
    assert await verdicts(learner, ALICE, turn_of(first, 6, STOP)) == ["duplicate"]
    lake.open.set()
    second = await lease_for(learner, ALICE)
    assert await verdicts(learner, ALICE, turn_of(first, 6, STOP)) == ["duplicate"]
    await learner.client(ALICE).release(second.samples(), forget=False)
    await ends_unharmed(learner)
    assert len(lake.asked) == 2


async def test_a_turn_cannot_be_skipped(learner: Learner) -> None:
    await draw(learner, ALICE)
    second = await lease_for(learner, ALICE)
    ahead = structs.replace(turn_of(second), turn=2)
    assert await verdicts(learner, ALICE, ahead) == ["stale"]
    await learner.client(ALICE).release(second.samples(), forget=False)
    await ends_unharmed(learner)


async def test_a_turn_of_another_nodes_episode_is_refused(learner: Learner) -> None:
    await draw(learner, ALICE)
    given = await lease_for(learner, ALICE)
    (judged,) = await learner.client(BOB).submit([turn_of(given)])
    assert (judged.verdict, "not leased to this node" in judged.detail) == ("malformed", True)
    assert learner.plane.leased.held_by(ALICE) == {("t0", 0)}
    with pytest.raises(ProtocolError, match="speaks for"):
        await learner.client(BOB, named=ALICE).submit([turn_of(given)])
    await learner.client(ALICE).release(given.samples(), forget=False)
    await ends_unharmed(learner)


async def other_sample_ends(learner: Learner) -> Group:
    """BOB draws what was taken from ALICE."""
    await draw(learner, BOB)
    (group,) = await learner.service.next_batch()
    return group


async def test_a_turn_of_more_tokens_than_were_leased_is_refused(learner: Learner) -> None:
    first = await lease_for(learner, BOB)
    assert await verdicts(learner, BOB, turn_of(first, *[4] * RULES.max_new_tokens, STOP)) == ["malformed"]
    await draw(learner, ALICE)
    await ends_unharmed(learner)


async def test_a_turn_of_more_tokens_than_the_episode_has_left_is_refused(lake: Lake) -> None:
    """And whoever did it wrong does not keep it from others."""
    async with serving(learner_of(max_tokens=5)) as learner:
        await learner.open(lake)
        await draw(learner, BOB)
        second = await lease_for(learner, BOB)
        assert second.lease.rules.max_new_tokens == 2
        assert await verdicts(learner, BOB, turn_of(second, 4, 4, STOP)) == ["malformed"]
        assert (await draw(learner, ALICE, 5, STOP)).lease.turn == 1
        assert [turn.node for turn in (await finished(learner)).turns] == [BOB, ALICE]


async def test_a_turn_after_the_end_is_refused(learner: Learner, lake: Lake) -> None:
    """Once the episode waits for its batch, and once the batch is taken."""
    first = await draw(learner, ALICE)
    second = await draw(learner, ALICE, 5, STOP)
    await learner.shows(lambda status: status["groups_ready"] == 1)
    assert await verdicts(learner, ALICE, turn_of(first), turn_of(second)) == ["duplicate"] * 2
    one = await finished(learner)
    assert one.token_ids == ints(*TURN, SAID, 5, STOP)
    assert await verdicts(learner, ALICE, turn_of(first), turn_of(second)) == ["duplicate"] * 2
    assert len(lake.asked) == 2


async def test_the_turns_of_a_barred_node_are_taken_from_nobody_else(learner: Learner, lake: Lake) -> None:
    """Its environment thinks, or it holds a turn: either way others draw the episode from the beginning."""
    await draw(learner, BOB)
    given = await lease_for(learner, BOB)
    learner.service.bar(BOB, "it lied")
    (judged,) = await learner.client(BOB).submit([turn_of(given)])
    assert (judged.verdict, judged.detail) == ("barred", "it lied")
    lake.open.clear()
    assert (await draw(learner, ALICE)).lease.turn == 0
    learner.service.bar(ALICE, "so did it")
    learner.service.unbar(BOB)
    lake.open.set()
    assert (await draw(learner, BOB)).lease.turn == 0
    await draw(learner, BOB)
    assert [turn.node for turn in (await finished(learner)).turns] == [BOB, BOB]


# -- attacks of a sampler that plays alone -------------------------------------------------------------------


def played(*tokens: int, turns: Sequence[Turn], change: Callable[[Rollout], Rollout] = lambda one: one) -> Rollout:
    """An episode of a sampler's own: what is in no turn is what its environment is said to have said."""
    drawn = {place for turn in turns for place in range(turn.start, turn.end)}
    return change(
        structs.replace(
            rollout(tokens=tokens),
            logprobs=floats(*(-0.5 if place in drawn else 0.0 for place in range(len(tokens)))),
            spans=tuple(structs.replace(rollout().spans[0], start=turn.start, end=turn.end) for turn in turns),
            turns=tuple(turns),
        )
    )


HONEST = played(*TURN, SAID, *TURN, turns=[Turn(start=0, end=2), Turn(start=3, end=5)])
LIES = {
    "an observation": played(*TURN, 8, *TURN, turns=[Turn(start=0, end=2), Turn(start=3, end=5)]),
    "more observation": played(*TURN, SAID, 8, *TURN, turns=[Turn(start=0, end=2), Turn(start=4, end=6)]),
    "less observation": played(*TURN, *TURN, turns=[Turn(start=0, end=2), Turn(start=2, end=4)]),
    "an early end": played(*TURN, SAID, turns=[Turn(start=0, end=2)]),
    "a late end": played(*TURN, SAID, *TURN, SAID, *TURN, turns=[Turn(start=at, end=at + 2) for at in (0, 3, 6)]),
    "how it ended": structs.replace(HONEST, finish="length"),
}


@pytest.fixture
async def alone(lake: Lake) -> AsyncIterator[Learner]:
    async with serving(learner_of(play=ALONE)) as learner:
        await learner.open(lake)
        yield learner


@pytest.mark.parametrize("lie", LIES)
async def test_a_forged_episode_is_found_out_and_drawn_by_another(alone: Learner, lie: str) -> None:
    given = await lease_for(alone, BOB)
    assert await verdicts(alone, BOB, *answers_to(given, LIES[lie])) == ["accepted"]
    again = await lease_for(alone, ALICE)
    assert (again.lease.turn, again.lease.samples[0].seed) == (0, given.lease.samples[0].seed)
    told = [(fields["node"], fields["reason"]) for kind, fields in alone.events if kind == "generation_failed"]
    assert told == [(BOB, FORGED)]
    assert await verdicts(alone, ALICE, *answers_to(again, HONEST)) == ["accepted"]
    one = await finished(alone)
    assert (one.token_ids, [turn.node for turn in one.turns]) == (HONEST.token_ids, [ALICE, ALICE])


async def test_what_a_sampler_says_of_its_rewards_and_of_who_drew_is_not_believed(alone: Learner) -> None:
    boast = tuple(structs.replace(turn, node=ALICE, reward=100.0) for turn in HONEST.turns)
    given = await lease_for(alone, BOB)
    assert await verdicts(alone, BOB, *answers_to(given, structs.replace(HONEST, turns=boast))) == ["accepted"]
    one = await finished(alone)
    assert [(turn.node, turn.reward) for turn in one.turns] == [(BOB, 0.25), (BOB, 1.0)]


async def test_log_probs_that_a_sampler_gives_the_environments_words_are_not_believed(alone: Learner) -> None:
    given = await lease_for(alone, BOB)
    loud = structs.replace(HONEST, logprobs=floats(-0.5, -0.5, -9.0, -0.5, -0.5))
    await verdicts(alone, BOB, *answers_to(given, loud))
    assert (await finished(alone)).logprobs == HONEST.logprobs


async def test_episodes_that_are_over_before_they_begin_end_the_run() -> None:
    """As where what is read first is longer than an episode: no turn is ever leased, and no reward fails."""
    found = Learner()
    episodes = EpisodeRules(max_turns=3, max_tokens=40, begins=True)
    found.plane = new_plane(max_staleness=0, groups=1, size=1, newest=None, episodes=episodes)

    async def over(wanted: StepWanted) -> Said:
        return (Observed(token_ids=ints(*range(41))),)

    async with serving(found) as learner:
        await learner.open(over)
        watch = asyncio.create_task(learner.service.watch_silence())
        while not watch.done():
            await learner.client(ALICE).ask(v(0), 1, 0.05, holding=())
        with pytest.raises(UserError, match=r"64 groups in a row were lost .* --max-episode-tokens"):
            await watch
