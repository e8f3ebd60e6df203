"""Episodes that a program drives, with programs of a few lines."""

from __future__ import annotations

import asyncio
import gc
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import ChildFailed, ProtocolError
from swarm.inference.episodes import ExternalEpisodes
from swarm.rollout.plane.effects import StepWanted
from swarm.tasks.base import SEAT, EpisodeResult
from swarm.types import GroupId, Observed, Prompt, Rollout, Unscored

Ask = Callable[[Sequence[int]], Awaitable[list[int]]]
Program = Callable[[Ask], Awaitable[EpisodeResult]]
"""Plays an episode: it is given what asks for a turn with token ids, and returns what was drawn."""

PROMPT = Prompt(prompt_id="train-7", text="", answer="")


def episodes(program: Program, **options: float) -> ExternalEpisodes:
    async def run(episode: str, prompt_id: str) -> EpisodeResult:
        assert prompt_id == PROMPT.prompt_id

        async def ask(token_ids: Sequence[int]) -> list[int]:
            return list((await found.continue_episode(episode, token_ids)).tokens())

        return await program(ask)

    found = ExternalEpisodes(run, **options)
    return found


def wanted(*turns: Sequence[int]) -> StepWanted:
    drawn = tuple(array("i", turn).tobytes() for turn in turns)
    newest = turn(*turns[-1]) if turns else None
    return StepWanted(group_id=GroupId("g"), index=3, episode="e", prompt=PROMPT, drawn=drawn, newest=newest)


async def one_turn(ask: Ask) -> EpisodeResult:
    """The program of an episode with one turn."""
    await ask([1])
    return EpisodeResult(reward=1.0)


def turn(*token_ids: int) -> Rollout:
    logprobs = array("f", [-1.0] * len(token_ids))
    return Rollout("g", 3, array("i", token_ids).tobytes(), logprobs.tobytes(), (), "stop")


def read(one: Observed | Unscored) -> list[int]:
    assert isinstance(one, Observed)
    assert (one.seat, one.done) == (SEAT, False)
    return list(array("i", one.token_ids))


async def test_the_end_has_the_reward_and_nothing_is_kept() -> None:
    async def program(ask: Ask) -> EpisodeResult:
        await ask([1, 2])
        return EpisodeResult(reward=1.0, parts={"right": 1.0})

    played = episodes(program)
    assert read(await played.step(wanted())) == [1, 2]
    end = Observed(seat=SEAT, rewards=(0.0, 1.0), done=True, exact=True, parts={"right": 1.0})
    assert await played.step(wanted([3])) == end
    with pytest.raises(ProtocolError, match="no episode 'e'"):
        await played.continue_episode("e", [1])


TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)


@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=6))
def test_what_is_observed_and_drawn_is_what_the_program_saw(turns: list[tuple[list[int], list[int]]]) -> None:
    """The stream that is trained on is the program's last request and the turn that answered it."""
    seen: list[int] = []

    async def program(ask: Ask) -> EpisodeResult:
        for said, _ in turns:
            seen.extend(said)
            seen.extend(await ask(list(seen)))
        return EpisodeResult()

    async def play() -> list[int]:
        played, stream = episodes(program), list[int]()
        observed = await played.step(wanted())
        for number, (_, answer) in enumerate(turns):
            stream += [*read(observed), *answer]
            observed = await played.step(wanted(*(a for _, a in turns[: number + 1])))
        assert isinstance(observed, Observed)
        assert observed.done
        return stream

    assert asyncio.run(play()) == seen


@pytest.mark.parametrize("second", [[1, 2, 9, 4], [1, 2], [1, 2, 3], [9], []])
async def test_a_conversation_that_drifted_is_refused_and_not_scored(second: list[int]) -> None:
    async def program(ask: Ask) -> EpisodeResult:
        await ask([1, 2])
        try:
            await ask(second)
        except ProtocolError as error:
            return EpisodeResult(fault=str(error))
        raise AssertionError

    played = episodes(program)
    await played.step(wanted())
    outcome = await played.step(wanted([3]))
    assert isinstance(outcome, Unscored)
    assert "drifted" in outcome.reason


async def test_an_episode_has_one_conversation() -> None:
    played = episodes(one_turn)
    await played.step(wanted())
    with pytest.raises(ProtocolError, match="one conversation"):
        await played.continue_episode("e", [1])


async def test_a_program_that_dies_or_thinks_too_long_costs_its_episode() -> None:
    async def dies(ask: Ask) -> EpisodeResult:
        raise ChildFailed("the environment server died")

    async def thinks(ask: Ask) -> EpisodeResult:
        await asyncio.Event().wait()
        return EpisodeResult()

    assert await episodes(dies).step(wanted()) == Unscored(reason="the environment server died")
    outcome = await episodes(thinks, step_s=0.01).step(wanted())
    assert outcome == Unscored(reason="it took longer than 0.01 s")


@pytest.mark.parametrize("ended", [EpisodeResult(reward=float("nan")), EpisodeResult(parts={"right": float("inf")})])
async def test_a_reward_that_is_no_number_is_none(ended: EpisodeResult) -> None:
    async def program(ask: Ask) -> EpisodeResult:
        return ended

    assert isinstance(await episodes(program).step(wanted()), Unscored)


async def test_turns_of_a_life_before_cannot_be_played_again() -> None:
    assert isinstance(await episodes(one_turn).step(wanted([3])), Unscored)


async def test_a_program_hears_that_its_episode_was_given_up() -> None:
    heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def program(ask: Ask) -> EpisodeResult:
        try:
            await ask([1])
        except ProtocolError as error:
            heard.set_result(str(error))
        return EpisodeResult()

    played = episodes(program)
    await played.step(wanted())
    played.end("e")
    played.end("e")
    assert await heard == "this episode was given up"


async def test_only_episodes_that_are_open_go_on() -> None:
    played = episodes(one_turn)
    for name in ("e", "f"):
        await played.step(replace(wanted(), episode=name))
    played.keep({"e"})
    with pytest.raises(ProtocolError, match="no episode 'f'"):
        await played.continue_episode("f", [1])
    assert isinstance(await played.step(replace(wanted([3]), episode="f")), Unscored)
    assert isinstance(await played.step(wanted([3])), Observed)


async def test_a_fault_of_an_episode_that_was_given_up_troubles_nobody() -> None:
    told: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))

    played = episodes(one_turn)
    await played.step(wanted())
    played.end("e")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del played
    gc.collect()
    assert told == []
