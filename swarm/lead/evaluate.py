"""How well a model that is not trained answers a task's held-out prompts, on this machine and with no swarm."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf, sqrt
from pathlib import Path
from typing import Any

import msgspec

from swarm.errors import EchoError, UserError
from swarm.lead.answering import sampling_rules
from swarm.lead.check import check_rewards, reward_pool
from swarm.learner.messages import FROZEN, SMALL_FILES, WEIGHTS, Frozen
from swarm.rollout.plane.groups import sample_seed
from swarm.run.directory import LOGS
from swarm.run.local import last_words, start_node, stop_nodes
from swarm.run.prompts import ProgressLine, TaskRecord, most_prompt_tokens, open_prompts, open_task
from swarm.sampler.engine import EngineKind, EngineOptions, Job, Sampled
from swarm.sampler.worker import EngineWorker
from swarm.settings import LeadConfig
from swarm.tasks.reward_pool import Completion, RewardPool
from swarm.types import GroupId, Prompt, Score, VersionId

SAMPLE_S = 1e6  # For one answer: nobody waits for the machine, and an engine that stands still is noticed
Z = 1.96  # Standard deviations on either side of a mean that hold 95 %


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer to the prompt number `prompt`. `score` is None if the reward failed."""

    prompt: int
    tokens: int
    is_cut: bool
    score: Score | None


async def evaluate(
    config: LeadConfig,
    kind: EngineKind,
    options: EngineOptions,
    say: Callable[[str], None],
    loaded: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Draw `eval_samples` answers to each of `eval_prompts` held-out prompts, and return figures of them. `loaded` is
    called once the files of the model are not needed any more."""
    progress = ProgressLine(say)
    task = open_task(config, progress)
    if task.player is not None or task.is_external:
        raise UserError(f"{config.task} is played turn by turn: `echo-node lead` measures it at its first step")
    with tempfile.TemporaryDirectory(prefix="echo-node-") as made:
        directory = Path(made)
        (directory / LOGS).mkdir()
        frozen = await _frozen(config, directory)
        loaded()
        record = TaskRecord(
            data_digest=task.data_digest,
            most_tokens=most_prompt_tokens(config, task, frozen.context_tokens),
            began=datetime.now().replace(microsecond=0),
            stop_token_ids=frozen.stop_token_ids,
        )
        prompts = open_prompts(config, task, directory / SMALL_FILES, record, say)
        held_out = prompts.held_out(config.eval_prompts)
        engine = EngineWorker(directory, kind=kind, options=options)
        pool = reward_pool(config, directory / SMALL_FILES, frozen.stop_token_ids)
        try:
            await pool.start()
            if line := await check_rewards(pool, config, held_out[0]):
                say(line)
            await engine.launch()
            started = await engine.load(frozen.layout)
            say(f"engine: {started.engine} on {started.device} in {started.dtype}; {len(held_out)} held-out prompts")
            version = VersionId(incarnation=0, version=0)
            if refused := await engine.install(version, frozen.tensor_sums, directory / WEIGHTS):
                raise EchoError(f"the engine does not hold the model: {refused.why}")
            rules = sampling_rules(config, task, frozen.stop_token_ids)
            if config.eval_samples == 1:
                rules = msgspec.structs.replace(rules, temperature=0.0)
            jobs = [
                Job(prompt.token_ids, sample_seed(config.seed, GroupId(f"eval-{i}"), sample), rules, SAMPLE_S)
                for i, prompt in enumerate(held_out)
                for sample in range(config.eval_samples)
            ]
            return figures(await _answers(engine, pool, held_out, jobs, progress), config.eval_samples)
        finally:
            await engine.stop()
            await pool.close()


async def _frozen(config: LeadConfig, directory: Path) -> Frozen:
    """Have a process of its own load the model, whose libraries are gone with it."""
    log = directory / LOGS / "model.log"
    words = (config.model, str(config.seed), str(directory))
    child = await start_node(log, *words, module="swarm.learner.frozen")
    try:
        if await child.wait():
            raise UserError(last_words(log).partition(" (log: ")[0])
    finally:
        await stop_nodes([child])
    return msgspec.msgpack.decode((directory / FROZEN).read_bytes(), type=Frozen)


async def _answers(
    engine: EngineWorker, pool: RewardPool, prompts: Sequence[Prompt], jobs: Sequence[Job], say: Callable[[str], None]
) -> list[Answered]:
    """Draw and score all jobs, which come prompt by prompt: in batches, or as many side by side as there are places."""
    each, size = len(jobs) // len(prompts), engine.places if engine.lockstep else 1
    places, done = asyncio.Semaphore(1 if engine.lockstep else engine.places), list[Answered]()

    async def draw(first: int) -> None:
        async with places:
            drawn = (await engine.generate(jobs[first : first + size])).samples
        numbers = [(first + i) // each for i in range(len(drawn))]
        done.extend(await _scored(pool, prompts, numbers, drawn))
        right = sum(one.score is not None and one.score.exact for one in done)
        say(f"{len(done)} of {len(jobs)} answers, {right} right")

    await asyncio.gather(*(draw(first) for first in range(0, len(jobs), size)))
    return done


async def _scored(
    pool: RewardPool, prompts: Sequence[Prompt], numbers: Sequence[int], drawn: Sequence[Sampled]
) -> list[Answered]:
    if fault := next((one.fault for one in drawn if one.fault), ""):
        raise EchoError(f"the engine drew no answer: {fault}")
    pairs = zip(numbers, drawn, strict=True)
    scores = await pool.score([Completion(prompt=prompts[i], token_ids=one.token_ids) for i, one in pairs], inf)
    return [
        Answered(
            prompt=number,
            tokens=len(array("i", one.token_ids)),
            is_cut=one.finish == "length",
            score=score if isinstance(score, Score) else None,
        )
        for number, one, score in zip(numbers, drawn, scores, strict=True)
    ]


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
