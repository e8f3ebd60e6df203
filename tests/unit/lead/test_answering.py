"""The limits of a run's episodes from its settings and its environment, and what ends those that were given up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.errors import ProtocolError
from swarm.inference.episodes import ExternalEpisodes
from swarm.lead.answering import Answering, episode_rules, sampling_rules
from swarm.rollout.plane.effects import StepWanted
from swarm.rollout.plane.episodes import EpisodeRules
from swarm.run.prompts import open_task
from swarm.settings import LeadConfig
from swarm.tasks.base import EpisodeResult
from swarm.tasks.turns import TurnText
from swarm.types import AS_LEASED, GroupId, Prompt, SamplingRules
from tests.builders import prompt
from tests.unit.inference.scripted import letters
from tests.unit.runs import run_in


def rules_of(*, is_external: bool = False, **settings: Any) -> EpisodeRules | None:
    config = LeadConfig(**{"task": "frozen-lake", **settings})
    task = open_task(config)
    task.is_external = is_external
    return episode_rules(config, task, context_tokens=4096)


def test_the_environment_limits_an_episode_unless_the_user_does() -> None:
    assert rules_of() == EpisodeRules(max_turns=8, max_tokens=72)
    assert rules_of(max_turns=3, max_episode_tokens=20) == EpisodeRules(max_turns=3, max_tokens=20)
    assert rules_of(task="copy") is None


def test_a_program_that_plays_says_first_what_is_read_and_gives_rewards_of_its_own() -> None:
    rules = rules_of(is_external=True, rewards={"random": 1.0})
    assert rules is not None
    assert rules.begins


@pytest.mark.parametrize(("settings", "most"), [({}, 1), ({"max_new_tokens": 7}, 7), ({"max_new_tokens": 99}, 72)])
def test_a_turn_is_no_longer_than_its_episode(settings: dict[str, Any], most: int) -> None:
    config = LeadConfig(task="frozen-lake", temperature=0.5, stop=("x",), **settings)
    expected = SamplingRules(temperature=0.5, max_new_tokens=most, stop_token_ids=(2,), stop=("x",))
    assert sampling_rules(config, open_task(config), (2,)) == expected


async def test_a_program_whose_episode_was_given_up_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.lead.answering.SWEEP_S", 0.0)
    heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def play(episode: str, prompt: Prompt) -> EpisodeResult:
        try:
            await played.ask(episode, "1", (), AS_LEASED, 1, seeded=False)
        except ProtocolError as refused:
            heard.set_result(f"{episode}: {refused}")
        return EpisodeResult()

    text = TurnText(letters(), None, ())
    config, played = LeadConfig(task="frozen-lake"), ExternalEpisodes(play, text)
    service = cast(Any, SimpleNamespace(ask=None))
    answering = Answering(run_in(tmp_path, config=config), open_task(config), cast(Any, None), service)
    await answering.sweep(list)  # Without such a program it ends at once
    answering._external = played
    for index, name in enumerate(("given up", "open")):
        group = GroupId("t0")
        await answering.step(StepWanted(group_id=group, index=index, episode=name, prompt=prompt(), drawn=()))
    sweeping = asyncio.create_task(answering.sweep(lambda: ["open"]))
    assert await heard == "given up: this episode was given up"
    sweeping.cancel()
    played.end("open")
