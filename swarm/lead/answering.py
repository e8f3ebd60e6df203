"""Answers the turns of a run's episodes, and questions to the policy that are not part of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack

from swarm.errors import UserError
from swarm.inference.episodes import ExternalEpisodes
from swarm.inference.server import Endpoint, serving
from swarm.learner.messages import Prepared
from swarm.rollout.api import RolloutService
from swarm.rollout.plane.effects import StepWanted
from swarm.rollout.plane.episodes import EpisodeRules
from swarm.rollout.plane.groups import sample_seed
from swarm.rollout.scoring import Said
from swarm.run.prompts import Prompts, longest_completion, longest_turn
from swarm.run.run import Run
from swarm.settings import LeadConfig
from swarm.tasks.base import Task
from swarm.tasks.reward_pool import RewardPool, StepCall
from swarm.tasks.turns import TurnText
from swarm.types import GroupId, SamplingRules

SWEEP_S = 5.0  # Between two checks for programs whose episodes were given up: until then they wait for a turn in vain


def episode_rules(config: LeadConfig, task: Task, *, context_tokens: int) -> EpisodeRules | None:
    """Return the limits of the task's episodes; None if it has no episodes."""
    if (environment := task.player) is None:
        return None
    turns, tokens = config.max_turns or environment.max_turns, longest_completion(config, task, context_tokens)
    if task.is_external and config.is_control:
        raise UserError(f"{config.task} computes its own rewards, so it can have no random control: leave --reward out")
    return EpisodeRules(max_turns=turns, max_tokens=tokens, begins=task.is_external)


def sampling_rules(config: LeadConfig, task: Task, stop_token_ids: tuple[int, ...]) -> SamplingRules:
    return SamplingRules(
        temperature=config.temperature,
        max_new_tokens=min(longest_turn(config, task), longest_completion(config, task)),
        stop_token_ids=stop_token_ids,
        stop=config.stop,
    )


class Answering:
    """Lets environments answer, in the reward processes `rewards` or in another program, and serves the endpoint
    (swarm/inference) on this machine. What `open` starts is closed with its `exits`."""

    def __init__(self, run: Run, task: Task, rewards: RewardPool, rollouts: RolloutService) -> None:
        self._config, self._task, self._rewards, self._run_dir = run.config, task, rewards, run.directory
        self._external: ExternalEpisodes | None = None
        self._rollouts = rollouts

    async def open(self, prompts: Prompts, prepared: Prepared, exits: AsyncExitStack) -> None:
        """Serve the endpoint, for people's questions and for a program that plays episodes."""
        template, stops = prompts.template, prepared.stop_token_ids
        text = prompts.turns or TurnText(prompts.tokenizer, template, stops, self._config.system_prompt)
        rules = sampling_rules(self._config, self._task, stops)
        sizes = {"context": prepared.context_tokens, "vocabulary": prepared.vocab_size}
        endpoint = Endpoint(self._rollouts.ask, text, rules, **sizes)
        url = await exits.enter_async_context(serving(endpoint, self._run_dir))
        if self._task.is_external:
            from swarm.tasks.verifiers import TasksetBegin, VerifiersRuns

            begin = TasksetBegin(
                module=self._config.task.partition(":")[2],
                files=str(self._run_dir / "model"),
                url=url,
                sampling={"temperature": rules.temperature, "max_tokens": rules.max_new_tokens},
                stop_token_ids=stops,
                began=prompts.record.began if template is not None else None,
                arguments=self._config.chat_arguments,
                system_prompt=self._config.system_prompt,
            )
            runs = VerifiersRuns(begin, endpoint.token, self._run_dir / "environment.log")
            exits.push_async_callback(runs.close)
            await runs.begin()
            self._external = endpoint.episodes = ExternalEpisodes(runs.run)

    async def step(self, wanted: StepWanted) -> Said:
        """Return what the environment says to a player's turn."""
        if self._external is not None:
            return await self._external.step(wanted)
        seed = control_seed(self._config.seed, wanted.group_id, wanted.index)
        asked = StepCall(episode=wanted.episode, prompt=wanted.prompt, seed=seed, drawn=wanted.drawn)
        return await self._rewards.step(asked)

    async def sweep(self, open_ones: Callable[[], Iterable[str]]) -> None:
        """Give up programs whose episodes are no longer open, until cancelled."""
        while self._external is not None:
            await asyncio.sleep(SWEEP_S)
            self._external.keep(set(open_ones()))


def control_seed(run_seed: int, group_id: GroupId, index: int) -> int:
    """Return the seed of a step and of the random control reward; the run's seed and the rollout decide it."""
    return sample_seed(run_seed + 1, group_id, index)
