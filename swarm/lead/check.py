"""What a run needs before it may begin, and `lead --check`, which checks all of it without beginning a run.

The check uses what `lead` uses: the same trainer process loads the model and measures the memory, and the same reward
processes score. Their files are in a temporary directory next to the run's.
"""

from __future__ import annotations

import asyncio
import math
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory

import msgspec

from swarm.broadcast.store.disk import SPARE_BYTES, free_bytes
from swarm.errors import ChildFailed, UserError
from swarm.lead.answering import episode_rules
from swarm.lead.training import KEPT_CHECKPOINTS
from swarm.learner.checkpoint.files import newest_whole
from swarm.learner.messages import Prepared, TrainGroup, TrainRollout
from swarm.learner.process import TrainerProcess, torchrun_options
from swarm.net.server import check_port
from swarm.node.network import check_addresses
from swarm.run.directory import LOGS, directory_of, refuse_used, write_json
from swarm.run.prompts import (
    RECORD,
    check_data,
    longest_completion,
    longest_turn,
    open_task,
    prepare_prompts,
    read_record,
)
from swarm.settings import EMBEDDED, LeadConfig
from swarm.tasks import task_options
from swarm.tasks.base import Task
from swarm.tasks.reward_pool import Begin, Completion, RewardPool, StepCall
from swarm.types import Prompt, Unscored

SCORED_PROMPTS = 32  # Of each side: enough to see a reward that fails, or that cannot read some answers
CHECKPOINT_BYTES = 12  # Bytes per trained parameter in a checkpoint: fp32 weights and two moments
TRIED_GROUPS, TRIED_TOKENS = 2, 4096  # Of the step that is tried: seconds, on a GPU or with a small model
LARGE_PARAMETERS, SMALL_PARAMETERS = 500_000_000, 10_000_000
PROCESSES = max(1, min(8, (os.cpu_count() or 1) // 4))  # For rewards: the trainer and the network need the rest
COPIES = 4  # Approximate copies of the published weights on disk: staged, mapped, held for audits, and served versions


async def check_run(config: LeadConfig, say: Callable[[str], None], *, resume: bool) -> None:
    """Report a line about each thing that a run of `config` needs. Raise UserError for the first that is wrong."""
    run_dir = directory_of(config)
    check_addresses(config)
    await check_port(config.host, config.port)
    say(f"port     {config.host}:{config.port} is free" if config.port else "port     any free one")
    check_model(config.model)
    if not resume:
        check_period(config)
    task = await asyncio.to_thread(open_task, config)
    if resume:
        check_data(run_dir, task)
    else:
        refuse_used(run_dir)
    size = "without end" if task.size is None else f"{task.size:,} to train on"
    say(f"task     {config.task}: prompts {size}")
    if config.trainer_machines > 1:
        say("model    not loaded: that takes the trainers of all machines")
        return
    with _directory_beside(run_dir) as directory:
        trainer = TrainerProcess(directory, torchrun=torchrun_options(config), say=say)
        try:
            prepared = await _check_model(trainer, config, task, run_dir if resume else None, say)
            _check_disk(config, prepared, directory.parent, say)
            if (before := read_record(run_dir)) is not None:
                write_json(directory / RECORD, msgspec.to_builtins(before))
            prompts, held_out = await asyncio.to_thread(
                prepare_prompts, directory, config, task, prepared, lambda line: say(f"prompts  {line}")
            )
            episode_rules(config, task, context_tokens=prepared.context_tokens)
            say(f"prompts  {len(held_out)} held out; of {prompts.most_tokens:,} tokens at most")
            say(f"rate     {_rate_words(config, prepared)}")
            if task.player is None:
                tried, longest = [prompts(number) for number in range(TRIED_GROUPS)], longest_turn(config, task)
                say(f"step     {await _try_step(trainer, config, tried, prepared.vocab_size, longest)}")
        finally:
            await trainer.stop()
        pool = reward_pool(config, directory / "model", prepared.stop_token_ids)
        try:
            await pool.start()
            if (environment := task.player) is None:
                await _check_rewards(pool, [*held_out[:SCORED_PROMPTS], *map(prompts, range(SCORED_PROMPTS))], say)
            elif task.is_external:
                say(f"episode  not played: `lead` reads {config.task} when it starts")
            else:
                await _check_environment(pool, held_out[0], config.max_turns or environment.max_turns, say)
        finally:
            await pool.close()
    say("nothing is amiss")


async def _check_model(
    trainer: TrainerProcess, config: LeadConfig, task: Task, resumed: Path | None, say: Callable[[str], None]
) -> Prepared:
    found = await asyncio.to_thread(newest_whole, resumed / "checkpoints") if resumed is not None else None
    try:
        prepared = await trainer.prepare(config, longest_completion(config, task), found.path if found else None)
    except ChildFailed as fault:
        # Leave out the log's path: the log is removed with the directory.
        raise UserError(str(fault).partition(" (log: ")[0]) from fault
    say(f"model    {config.model}: {prepared.parameters:,} parameters, trains on {prepared.device}")
    for note in prepared.notes:
        say(f"memory   {note}")
    return prepared


def _rate_words(config: LeadConfig, prepared: Prepared) -> str:
    """Return the learning rate, and which one is usual for such a model: docs/learner.md, "What to set"."""
    rate, is_large = config.resolved_learning_rate, prepared.parameters >= LARGE_PARAMETERS
    usual, source = (1e-6, "the field's value above 0.5B") if is_large else (1e-5, "measured here on 0.135B")
    if prepared.parameters < SMALL_PARAMETERS:
        usual, source = 1e-3, "measured here on the tiny model"
    if config.adapter:
        usual, source = 10 * usual, f"ten times {source}, as is usual with an adapter"
    far = "" if usual / 5 <= rate <= usual * 5 else ": this one is far from it"
    return f"{rate:g}; usual is {usual:g}, {source}{far}"


async def _try_step(
    trainer: TrainerProcess, config: LeadConfig, prompts: Sequence[Prompt], vocab_size: int, longest: int
) -> str:
    """Return how long a learner step takes at most, from one on a few prompts with answers of random tokens, after one
    that does not count: a first step allocates."""
    size, draw = config.group_size, Random(0)
    length = max(1, min(longest, TRIED_TOKENS // (len(prompts) * size)))
    groups = [_random_group(prompt, size, length, vocab_size, draw) for prompt in prompts]
    await trainer.train(0, groups)
    seconds = (await trainer.train(1, groups)).seconds
    drawn, whole = len(groups) * size * length, config.groups_per_step * size * longest
    most = f"about {seconds * max(1.0, whole / drawn):.2g} s where all answers have {longest:,} tokens"
    return f"{most}: one on {drawn:,} of {whole:,} tokens took {seconds:.2g} s"


def _random_group(prompt: Prompt, size: int, length: int, vocab_size: int, draw: Random) -> TrainGroup:
    """Half of the answers earn something, so that there is something to learn."""
    answers = [array("i", [draw.randrange(vocab_size) for _ in range(length)]).tobytes() for _ in range(size)]
    claims = array("f", [-math.log(vocab_size)] * length).tobytes()
    rollouts = [
        TrainRollout(token_ids=token_ids, logprobs=claims, reward=float(number % 2), staleness=1)
        for number, token_ids in enumerate(answers)
    ]
    return TrainGroup(prompt_token_ids=prompt.token_ids, rollouts=tuple(rollouts))


def _check_disk(config: LeadConfig, prepared: Prepared, place: Path, say: Callable[[str], None]) -> None:
    checkpoints = (KEPT_CHECKPOINTS + 2) * CHECKPOINT_BYTES * prepared.trained
    needed = checkpoints + COPIES * prepared.layout.total_bytes + SPARE_BYTES
    free = free_bytes(place)
    said = f"about {needed / 1e9:.1f} GB for weights and {KEPT_CHECKPOINTS} checkpoints, {free / 1e9:.1f} GB free"
    if free < needed:
        raise UserError(f"the disk of {place} is too small: {said}; pass a --run-dir elsewhere")
    say(f"disk     {said}")


async def _check_rewards(pool: RewardPool, prompts: Sequence[Prompt], say: Callable[[str], None]) -> None:
    """Report the rewards of right answers and of empty ones. Raise UserError if a reward fails."""
    scored: list[list[float]] = []
    for texts in ([prompt.answer for prompt in prompts], [""] * len(prompts)):
        asked = zip(prompts, texts, strict=True)
        rewards: list[float] = []
        for score in await pool.score([Completion(prompt=prompt, text=text) for prompt, text in asked]):
            if isinstance(score, Unscored):
                failed = prompts[len(rewards)].prompt_id
                raise UserError(f"the reward failed for prompt {failed}: {score.reason}")
            rewards.append(score.reward)
        scored.append(rewards)
    unread = [prompt for prompt, own, none in zip(prompts, *scored, strict=True) if own <= none]
    more = f": of {len(unread)} the right answer earns no more than none, as {unread[0].answer!r}" if unread else ""
    means = "{:g} for right answers, {:g} for empty ones".format(*map(fmean, scored))
    say(f"rewards  {means}, in the mean of {len(prompts)} prompts{more}")


async def _check_environment(pool: RewardPool, prompt: Prompt, turns: int, say: Callable[[str], None]) -> None:
    """Report what an episode of empty turns earns. Raise UserError if its environment fails."""
    earned, count, done = 0.0, 0, False
    while not done and count < turns:
        count += 1
        played = await pool.step(StepCall(episode="check", prompt=prompt, drawn=(b"",) * count))
        if isinstance(played, Unscored):
            raise UserError(f"the environment failed for prompt {prompt.prompt_id}: {played.reason}")
        earned, done = earned + sum(played.rewards[:1]), played.done
    say(f"episode  {earned:g} for {count} turns in which nothing is said")


@contextmanager
def _directory_beside(run_dir: Path) -> Iterator[Path]:
    """Make an empty directory on the run's disk, for as long as the block runs."""
    there = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.is_dir())
    try:
        made = TemporaryDirectory(prefix=".check-", dir=there)
    except OSError as error:
        raise UserError(f"cannot write to the run directory {run_dir}: {error.strerror}") from error
    with made:
        yield Path(made.name)


def reward_pool(
    config: LeadConfig,
    files_dir: Path | None = None,
    stop_token_ids: Sequence[int] = (),
    processes: int = PROCESSES,
) -> RewardPool:
    """Return the reward processes of a run, not yet started. `files_dir`, in the run's directory, has the tokenizer,
    which scoring texts does not need; with it, rewards print into the run's logs."""
    record = read_record(files_dir.parent) if files_dir is not None else None
    begin = Begin(
        task=task_options(config),
        reward=config.reward,
        tokenizer=str((files_dir / "tokenizer.json").absolute()) if files_dir is not None else "",
        stop_token_ids=tuple(stop_token_ids),
        began=record.began if record is not None else None,
        arguments=config.chat_arguments,
        chat=config.chat,
        system_prompt=config.system_prompt,
    )
    return RewardPool(
        begin,
        timeout_s=config.reward_timeout_s,
        processes=processes,
        logs=files_dir.parent / LOGS if files_dir is not None else None,
    )


def check_period(config: LeadConfig) -> None:
    """Raise UserError if a new run asks for a period over S + 1. In a run that goes on, S may have been lowered: that
    shortens the period until S is raised again."""
    if config.publish_every_steps > config.max_staleness + 1:
        raise UserError(
            f"--publish-every-steps {config.publish_every_steps} is above --max-staleness + 1, which is "
            f"{config.max_staleness + 1}: the learner would wait for ever for rollouts fresh enough; lower the one "
            "or raise the other"
        )


def check_model(name: str) -> None:
    """Raise UserError if `name` is a path that cannot be a model."""
    path = Path(name)
    looks_like_path = name not in EMBEDDED and (path.is_dir() or name.startswith((".", "/")))
    if looks_like_path and not (path / "config.json").is_file():
        raise UserError(f"{name} has no config.json: give a directory in Hugging Face format, a model id, or tiny")
