"""Episodes that a program plays, with programs of a few lines."""

from __future__ import annotations

import asyncio
import gc
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from swarm.errors import ChildFailed, ProtocolError, UserError
from swarm.inference import episodes as module
from swarm.inference.episodes import ExternalEpisodes, Said
from swarm.rollout.plane.effects import StepWanted
from swarm.tasks.base import SEAT, EpisodeResult
from swarm.tasks.turns import TurnText
from swarm.types import AS_LEASED, GroupId, Observed, Prompt, TurnLimits, Unscored
from tests.unit.inference.scripted import STOP, drawn, letters

Program = Callable[["Played"], Awaitable[EpisodeResult]]

PROMPT = Prompt(prompt_id="train-7", text="", answer="")


class Played(ExternalEpisodes):
    """Episodes of a program that is given them, and makes calls of the episode e."""

    def __init__(self, program: Program, **options: Any) -> None:
        async def run(episode: str, prompt: Prompt) -> EpisodeResult:
            assert prompt == PROMPT
            return await program(self)

        super().__init__(run, TurnText(letters(), None, (STOP,)), **options)

    async def call(
        self, text: str, limits: TurnLimits = AS_LEASED, *, count: int = 1, seeded: bool = False
    ) -> list[str]:
        return [one.message["content"] for one in await self.said(text, limits, count=count, seeded=seeded)]

    async def said(self, text: str, limits: TurnLimits = AS_LEASED, *, count: int = 1, seeded: bool = False) -> Any:
        return await self.ask("e", text, (), limits, count, seeded=seeded)


def wanted(answer: str | None = None) -> StepWanted:
    """What the plane asks for at the beginning, or after a turn."""
    newest = drawn(answer) if answer is not None else None
    return StepWanted(group_id=GroupId("g"), index=3, episode="e", prompt=PROMPT, drawn=(), newest=newest)


async def steps(played: Played, *answers: str) -> list[Observed]:
    """What the program says at the beginning, and after each of these turns."""
    found = list[Observed]()
    for answer in (None, *answers):
        one = await played.step(wanted(answer))
        assert isinstance(one, Observed), one
        found.append(one)
    return found


def texts(found: Sequence[Observed]) -> list[tuple[int, str]]:
    """The streams that go on, and what is read in each."""
    assert not any(one.done for one in found)
    words = [str(letters().decode(list(array("i", one.token_ids)))).replace(" ", "") for one in found]
    return [(one.seat - SEAT, text) for one, text in zip(found, words, strict=True)]


async def one_turn(played: Played) -> EpisodeResult:
    await played.call("a")
    return EpisodeResult(reward=1.0)


async def test_the_end_has_the_reward_and_nothing_is_kept() -> None:
    async def program(played: Played) -> EpisodeResult:
        assert await played.call("hi") == ["b"]
        return EpisodeResult(reward=1.0, parts={"right": 1.0})

    played = Played(program)
    first, end = await steps(played, "b$")
    assert texts([first]) == [(0, "hi")]
    assert end == Observed(seat=SEAT, rewards=(0.0, 1.0), done=True, exact=True, parts={"right": 1.0})
    with pytest.raises(ProtocolError, match="no episode 'e'"):
        await played.call("hi")


async def test_each_answer_says_what_was_drawn_for_it_and_after_how_much() -> None:
    found = list[Said]()

    async def program(played: Played) -> EpisodeResult:
        found.extend(await played.said("abc", count=2))
        return EpisodeResult()

    await steps(Played(program), "x$", "yz")
    assert [(one.message["content"], one.read, one.name) for one in found] == [("x", 3, "turn-0"), ("y z", 3, "turn-1")]
    assert [one.drawn for one in found] == [drawn("x$"), drawn("yz")]


async def test_calls_side_by_side_are_drawn_one_after_another_in_streams_of_their_own() -> None:
    """Every stream gets the whole reward: which of them earned it is not known."""
    answers = list[list[str]]()

    async def program(played: Played) -> EpisodeResult:
        answers.extend(await asyncio.gather(played.call("a", count=2), played.call("b")))
        answers.append(await played.call("axc"))
        return EpisodeResult(reward=0.5)

    *found, end = await steps(Played(program), "x", "y$", "z$", "w")
    assert texts(found) == [(0, "a"), (1, "a"), (2, "b"), (0, "c")], "the last one goes on after its own x"
    assert answers == [["x", "y"], ["z"], ["w"]]
    assert (end.rewards, end.parts["forks"], end.exact) == ((0.0, 0.5, 0.5, 0.5), 2.0, False)


async def test_rewards_of_calls_are_credited_to_them_and_every_stream_ends_with_the_sum() -> None:
    async def program(played: Played) -> EpisodeResult:
        await played.call("a")
        played.reward("e", 0.25, None)
        await played.call("b")
        played.reward("e", 0.5, 0)
        played.reward("e", 0.125, 1)
        return EpisodeResult(reward=1.0)

    _, second, end = await steps(Played(program), "x$", "y$")
    assert (second.seat, second.rewards) == (SEAT + 1, (0.0, 0.25))
    total = 1.0 + 0.25 + 0.5 + 0.125
    assert (end.rewards, end.exact) == ((0.0, total - 0.25, total), True)


async def test_the_control_s_reward_counts_instead_of_all_that_a_program_gives() -> None:
    async def program(played: Played) -> EpisodeResult:
        await played.call("a")
        played.reward("e", 0.5, None)
        await played.call("axc")
        return EpisodeResult(reward=0.5)

    _, second, end = await steps(Played(program, control=lambda wanted: wanted.index / 4), "x", "y$")
    assert (second.rewards, end.rewards, end.exact) == ((), (0.0, 0.75), True)


async def test_what_is_no_turn_or_no_number_is_not_credited() -> None:
    def refused(played: Played, reward: float, turn: int | None) -> None:
        with pytest.raises(ProtocolError, match="no such turn"):
            played.reward("e", reward, turn)

    async def program(played: Played) -> EpisodeResult:
        refused(played, 1.0, None)
        await played.call("a")
        for reward, turn in ((float("nan"), None), (1.0, 1), (1.0, -1)):
            refused(played, reward, turn)
        return EpisodeResult()

    assert (await steps(Played(program), "x$"))[-1].rewards == (0.0, 0.0)


async def test_the_limits_of_a_call_are_those_of_its_turn_and_a_seed_is_counted() -> None:
    limits = TurnLimits(max_new_tokens=2, stop=("\n",))

    async def program(played: Played) -> EpisodeResult:
        await played.call("a", limits, seeded=True)
        return EpisodeResult()

    first, end = await steps(Played(program), "x$")
    assert (first.limits, end.parts) == (limits, {"seeds_ignored": 1.0})


async def test_a_call_that_cannot_be_read_is_its_asker_s_fault_and_the_episode_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def program(played: Played) -> EpisodeResult:
        with pytest.raises(UserError, match="refused"):
            await played.ask("e", [{"role": "user", "content": "x"}], (), AS_LEASED, 1, seeded=False)
        await played.call("a")
        return EpisodeResult()

    def refuse(self: TurnText, messages: Any, tools: Any = ()) -> list[int]:
        if tools == () and isinstance(messages[0], dict):
            raise UserError("refused")
        return [1]

    monkeypatch.setattr(TurnText, "opening", refuse)
    assert texts(await steps(Played(program))) == [(0, "a")]


async def test_too_many_calls_of_one_episode_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CALLS", 2)

    async def program(played: Played) -> EpisodeResult:
        with pytest.raises(ProtocolError, match="wait already"):
            await played.call("a", count=3)
        await played.call("a", count=2)
        return EpisodeResult()

    assert texts(await steps(Played(program))) == [(0, "a")]


async def test_what_an_asker_gave_up_before_it_was_drawn_is_not_drawn() -> None:
    async def program(played: Played) -> EpisodeResult:
        first, second = asyncio.create_task(played.call("a")), asyncio.create_task(played.call("b"))
        await asyncio.sleep(0)
        second.cancel()
        await first
        await played.call("c")
        return EpisodeResult()

    assert texts(await steps(Played(program), "x$")) == [(0, "a"), (1, "c")]


async def test_a_program_that_dies_or_thinks_too_long_costs_its_episode() -> None:
    async def dies(played: Played) -> EpisodeResult:
        raise ChildFailed("the agent process died")

    async def thinks(played: Played) -> EpisodeResult:
        await asyncio.Event().wait()
        return EpisodeResult()

    assert await Played(dies).step(wanted()) == Unscored(reason="the agent process died")
    assert await Played(thinks, step_s=0.01).step(wanted()) == Unscored(reason="it took longer than 0.01 s")


@pytest.mark.parametrize("ended", [EpisodeResult(reward=float("nan")), EpisodeResult(parts={"right": float("inf")})])
async def test_a_reward_that_is_no_number_is_none(ended: EpisodeResult) -> None:
    async def program(played: Played) -> EpisodeResult:
        return ended

    assert isinstance(await Played(program).step(wanted()), Unscored)


async def test_an_episode_begins_again_after_its_process_died_by_another_s_fault_unless_it_asked() -> None:
    lives = list[str]()

    async def program(played: Played) -> EpisodeResult:
        lives.append("life")
        if len(lives) == 1:
            raise ChildFailed("the agent process died")
        await played.call("a")
        raise ChildFailed("the agent process died again")

    played = Played(program)
    assert texts(await steps(played)) == [(0, "a")]
    assert await played.step(wanted("x$")) == Unscored(reason="the agent process died again")
    assert len(lives) == 2


async def test_a_stop_string_ends_what_the_program_reads_and_stays_in_the_stream() -> None:
    heard = list[list[str]]()

    async def program(played: Played) -> EpisodeResult:
        heard.append(await played.call("a", TurnLimits(stop=("\n",))))
        heard.append(await played.call("ab \nc"))  # This tokenizer writes a space between tokens
        heard.append(await played.call("ab"))
        return EpisodeResult()

    *found, _ = await steps(Played(program, stop=("!",)), "b\n", "d!", "e$")
    assert texts(found) == [(0, "a"), (0, "c"), (1, "ab")], "c goes on after the string"
    assert heard[:2] == [["b "], ["d "]]


async def test_turns_of_a_life_before_cannot_be_played_again() -> None:
    assert isinstance(await Played(one_turn).step(wanted("x")), Unscored)


async def test_only_episodes_that_are_open_go_on() -> None:
    played = Played(one_turn)
    for name in ("f", "e"):
        await played.step(replace(wanted(), episode=name))
    played.keep({"e"})
    with pytest.raises(ProtocolError, match="no episode 'f'"):
        played.reward("f", 1.0, None)
    assert isinstance(await played.step(replace(wanted("x"), episode="f")), Unscored)


async def test_a_fault_of_an_episode_that_was_given_up_troubles_nobody() -> None:
    told: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))

    played = Played(one_turn)
    await played.step(wanted())
    played.end("e")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del played
    gc.collect()
    assert told == []
