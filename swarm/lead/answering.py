"""Answers the turns of a run's episodes, and questions to the policy that are not part of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

from swarm.inference.episodes import ExternalEpisodes
from swarm.inference.server import ADDRESS, Endpoint, Place, serving
from swarm.learner.messages import Prepared
from swarm.node.control import SOCKET
from swarm.node.identity import SECRETS
from swarm.rollout.api import RolloutService
from swarm.rollout.plane.effects import StepWanted
from swarm.rollout.plane.episodes import EpisodeRules
from swarm.rollout.plane.groups import sample_seed
from swarm.rollout.scoring import Said
from swarm.run.prompts import Prompts, longest_completion, longest_turn
from swarm.run.run import Run
from swarm.settings import LeadConfig
from swarm.tasks.base import Task
from swarm.tasks.programs import ProgramBegin, ProgramRuns
from swarm.tasks.reward_pool import RewardPool, StepCall
from swarm.tasks.turns import TurnText
from swarm.types import GroupId, SamplingRules

SWEEP_S = 5.0  # Between two checks for programs whose episodes were given up: until then they wait for a turn in vain


def episode_rules(config: LeadConfig, task: Task, *, context_tokens: int) -> EpisodeRules | None:
    """Return the limits of the task's episodes; None if it has no episodes."""
    if (environment := task.player) is None:
        return None
    turns, tokens = config.max_turns or environment.max_turns, longest_completion(config, task, context_tokens)
    return EpisodeRules(max_turns=turns, max_tokens=tokens, begins=task.is_external)


def sampling_rules(config: LeadConfig, task: Task, stop_token_ids: tuple[int, ...]) -> SamplingRules:
    return SamplingRules(
        temperature=config.temperature,
        max_new_tokens=min(longest_turn(config, task), longest_completion(config, task)),
        stop_token_ids=stop_token_ids,
        stop=config.stop,
    )


def program_runs(
    config: LeadConfig, rules: SamplingRules, endpoint: Endpoint, place: Place, secrets: Iterable[Path], log: Path
) -> ProgramRuns:
    """Return what plays the run's episodes."""
    kind, _, rest = config.task.partition(":")
    what, _, data = rest.partition("@")
    begin = ProgramBegin(
        what=what,
        url=place.url,
        socket=place.socket,
        secrets=tuple(map(str, secrets)),
        network=bool(config.task_options.get("network")),
        has_data=bool(data),
        sampling={"temperature": rules.temperature, "max_tokens": rules.max_new_tokens},
    )
    return ProgramRuns(f"swarm.tasks.{kind}_child", begin, endpoint.key_of, log)


class Answering:
    """Lets environments answer, in the reward processes `rewards` or in another program, and serves the endpoint
    (swarm/inference) on this machine. What `open` starts is closed with its `exits`."""

    def __init__(self, run: Run, task: Task, rewards: RewardPool, rollouts: RolloutService) -> None:
        self._config, self._task, self._rewards, self._run_dir = run.config, task, rewards, run.directory
        self._external: ExternalEpisodes | None = None
        self._rollouts = rollouts

    async def open(
        self, prompts: Prompts, prepared: Prepared, exits: AsyncExitStack, identity: Path, say: Callable[[str], None]
    ) -> None:
        """Serve the endpoint, for people's questions and for a program that plays episodes, from which the `identity`
        is hidden."""
        config, stops = self._config, prepared.stop_token_ids
        text = prompts.turns or TurnText(prompts.tokenizer, prompts.template, stops, config.system_prompt)
        rules = sampling_rules(config, self._task, stops)
        endpoint = Endpoint(
            self._rollouts.ask, text, rules, context=prepared.context_tokens, model=config.model, judge=config.judge
        )
        place = await exits.enter_async_context(serving(endpoint, self._run_dir))
        if self._task.is_external:
            secrets = [*(identity / name for name in SECRETS), self._run_dir / ADDRESS, self._run_dir / SOCKET]
            runs = program_runs(config, rules, endpoint, place, secrets, self._run_dir / "environment.log")
            exits.push_async_callback(runs.close)
            if line := await runs.begin():
                say(line)
            control = self._control if config.is_control else None
            self._external = endpoint.episodes = ExternalEpisodes(runs.run, text, stop=rules.stop, control=control)

    async def step(self, wanted: StepWanted) -> Said:
        """Return what the environment says to a player's turn."""
        if self._external is not None:
            return await self._external.step(wanted)
        seed = self._seed_of(wanted)
        asked = StepCall(episode=wanted.episode, prompt=wanted.prompt, seed=seed, drawn=wanted.drawn)
        return await self._rewards.step(asked)

    def _seed_of(self, wanted: StepWanted) -> int:
        return control_seed(self._config.seed, wanted.group_id, wanted.index)

    def _control(self, wanted: StepWanted) -> float:
        return Random(self._seed_of(wanted)).random()

    async def sweep(self, open_ones: Callable[[], Iterable[str]]) -> None:
        """Give up programs whose episodes are no longer open, until cancelled."""
        while self._external is not None:
            await asyncio.sleep(SWEEP_S)
            self._external.keep(set(open_ones()))


def control_seed(run_seed: int, group_id: GroupId, index: int) -> int:
    """Return the seed of a step and of the random control reward; the run's seed and the rollout decide it."""
    return sample_seed(run_seed + 1, group_id, index)
