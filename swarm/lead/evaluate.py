"""How well a model that is not trained answers a task's held-out prompts, on this machine and with no swarm."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from math import inf, sqrt
from pathlib import Path
from typing import Any

import msgspec

from swarm.errors import UserError
from swarm.inference.episodes import ExternalEpisodes
from swarm.inference.server import ADDRESS, Endpoint, serving
from swarm.lead.answering import episode_rules, program_runs, sampling_rules
from swarm.lead.check import check_rewards, reward_pool
from swarm.lead.frozen import SAMPLE_S, Drawing, drawing, lay_out
from swarm.learner.messages import SMALL_FILES
from swarm.rollout.plane.effects import StepWanted
from swarm.rollout.plane.episodes import Episode, seat_seed
from swarm.rollout.plane.groups import sample_seed
from swarm.run.directory import LOGS
from swarm.run.prompts import ProgressLine, Prompts, TaskRecord, most_prompt_tokens, open_prompts, open_task
from swarm.sampler.engine import EngineKind, EngineOptions, Job
from swarm.settings import LeadConfig
from swarm.tasks.reward_pool import Completion, RewardPool
from swarm.types import GroupId, NodeId, Prompt, Rollout, SamplingRules, Score, Unscored

SIDE_BY_SIDE = 512  # Answers begun at a time: each of an agent's has connections
Z = 1.96  # Standard deviations on either side of a mean that hold 95 %


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer to the prompt number `prompt`. `score` is None if the reward failed."""

    prompt: int
    tokens: int
    is_cut: bool
    score: Score | None


Answerer = Callable[[int, Prompt, int], Awaitable[Answered]]
"""Answers a prompt, by its number, with a seed."""


async def evaluate(
    config: LeadConfig,
    kind: EngineKind,
    options: EngineOptions,
    say: Callable[[str], None],
    loaded: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Draw `eval_samples` answers to each of `eval_prompts` held-out prompts, or have a program play them as often, and
    return figures of that. `loaded` is called once the files of the model are not needed any more."""
    progress = ProgressLine(say)
    task = open_task(config, progress)
    if task.player is not None and not task.is_external:
        raise UserError(f"{config.task} is played turn by turn: `echo-node lead` measures it at its first step")
    async with AsyncExitStack() as exits:
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="echo-node-")))
        frozen = await lay_out(config, directory)
        loaded()
        record = TaskRecord(
            data_digest=task.data_digest,
            most_tokens=most_prompt_tokens(config, task, frozen.context_tokens),
            began=datetime.now().replace(microsecond=0),
            stop_token_ids=frozen.stop_token_ids,
        )
        prompts = open_prompts(config, task, directory / SMALL_FILES, record, say)
        held_out = prompts.held_out(config.eval_prompts)
        rules = sampling_rules(config, task, frozen.stop_token_ids)
        if config.eval_samples == 1:
            rules = msgspec.structs.replace(rules, temperature=0.0)
        pool = None
        if not task.is_external:
            pool = reward_pool(config, directory / SMALL_FILES, frozen.stop_token_ids)
            exits.push_async_callback(pool.close)
            await pool.start()
            if line := await check_rewards(pool, config, held_out[0]):
                say(line)
        engine = await exits.enter_async_context(drawing(frozen, directory, kind, options, config.seed, say))
        say(f"{len(held_out)} held-out prompts")
        answer: Answerer
        if pool is None:
            answer = await _played(config, prompts, rules, engine, directory, exits, frozen.context_tokens, say)
        else:
            answer = partial(_scored, engine, pool, rules)
        done = list[Answered]()

        places = asyncio.Semaphore(SIDE_BY_SIDE)

        async def one(number: int, sample: int) -> None:
            seed = sample_seed(config.seed, GroupId(f"eval-{number}"), sample)
            async with places:
                done.append(await answer(number, held_out[number], seed))
            right = sum(one.score is not None and one.score.exact for one in done)
            progress(f"{len(done)} of {len(held_out) * config.eval_samples} answers, {right} right")

        await asyncio.gather(*(one(i, sample) for i in range(len(held_out)) for sample in range(config.eval_samples)))
        return figures(done, config.eval_samples)


async def _scored(
    engine: Drawing, pool: RewardPool, rules: SamplingRules, number: int, prompt: Prompt, seed: int
) -> Answered:
    one = await engine.draw(Job(prompt.token_ids, seed, rules, SAMPLE_S))
    (score,) = await pool.score([Completion(prompt=prompt, token_ids=one.token_ids)], inf)
    tokens = len(array("i", one.token_ids))
    return Answered(number, tokens, one.finish == "length", score if isinstance(score, Score) else None)


async def _played(
    config: LeadConfig,
    prompts: Prompts,
    rules: SamplingRules,
    engine: Drawing,
    directory: Path,
    exits: AsyncExitStack,
    context_tokens: int,
    say: Callable[[str], None],
) -> Answerer:
    """Return what plays a prompt as the rollout plane has an episode played, with one engine."""
    assert prompts.turns is not None
    asked = sampling_rules(config, prompts.task, rules.stop_token_ids)  # What a client may name, greedy or not
    endpoint = Endpoint(
        engine.ask, prompts.turns, asked, context=context_tokens, model=config.model, judge=config.judge
    )
    place = await exits.enter_async_context(serving(endpoint, directory))
    runs = program_runs(config, asked, endpoint, place, [directory / ADDRESS], directory / LOGS / "agent.log")
    exits.push_async_callback(runs.close)
    if line := await runs.begin():
        say(line)
    episodes = endpoint.episodes = ExternalEpisodes(runs.run, prompts.turns, stop=rules.stop)
    limits = episode_rules(config, prompts.task, context_tokens=context_tokens)
    assert limits is not None

    async def play(number: int, prompt: Prompt, seed: int) -> Answered:
        episode = Episode(name=f"eval-{number}/{seed}")
        newest: Rollout | None = None
        while True:
            wanted = StepWanted(
                group_id=GroupId("eval"), index=number, episode=episode.name, prompt=prompt, drawn=(), newest=newest
            )
            said = await episodes.step(wanted)
            if isinstance(said, Unscored):
                say(f"the agent failed for prompt {prompt.prompt_id}: {said.reason}")
                return Answered(number, sum(one.length for _, _, one in episode.drawn), False, None)
            ended = episode.observe(said, limits)
            if ended:
                episodes.end(episode.name)
                if not episode.drawn:
                    say(f"prompt {prompt.prompt_id}: the agent asked for nothing, or its first call is too long")
                tokens = sum(one.length for _, _, one in episode.drawn)
                return Answered(number, tokens, ended == "length", episode.scored(limits) if episode.drawn else None)
            reads, seat = array("i", bytes(episode.streams[said.seat].token_ids)), said.seat
            own = said.limits.on(rules)
            most = min(own.max_new_tokens, episode.tokens_left(limits), context_tokens - len(reads))
            own = msgspec.structs.replace(own, max_new_tokens=most)
            one = await engine.draw(Job(tuple(reads), seat_seed(seed, seat), own, SAMPLE_S))
            newest = Rollout("eval", number, one.token_ids, one.logprobs, one.spans, one.finish)
            episode.take(NodeId("-"), newest)

    return play


def figures(answers: Sequence[Answered], samples: int) -> dict[str, Any]:
    """Return shares, and with `accuracy` the 95 % interval of what more prompts of the kind would give (Wilson's, as if
    the answers to a prompt were one, so that it is never too narrow)."""
    right: dict[int, list[bool]] = {}
    for one in answers:
        right.setdefault(one.prompt, []).append(one.score is not None and one.score.exact)
    accuracy = statistics.mean(statistics.mean(map(float, tries)) for tries in right.values())
    low, high = wilson(accuracy, len(right))
    found = {
        "prompts": len(right),
        "samples": samples,
        "accuracy": accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
        "pass_at_k": statistics.mean(float(any(tries)) for tries in right.values()),
        "reward": statistics.mean(one.score.reward if one.score is not None else 0.0 for one in answers),
        "tokens_mean": statistics.mean(one.tokens for one in answers),
        "tokens_max": max(one.tokens for one in answers),
        "cut_share": statistics.mean(float(one.is_cut) for one in answers),
        "reward_failed": sum(one.score is None for one in answers),
    }
    return {name: round(value, 4) for name, value in found.items()}


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the bounds of a share that was seen in `count` trials (Wilson, 1927)."""
    middle = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    width = Z / (1 + Z**2 / count) * sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    return max(0.0, middle - width), min(1.0, middle + width)
