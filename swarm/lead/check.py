"""What a run needs before it may begin."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from swarm.errors import UserError
from swarm.run.directory import LOGS
from swarm.run.prompts import read_record
from swarm.settings import EMBEDDED, MAX_SHOWN, LeadConfig
from swarm.tasks import task_options
from swarm.tasks.functions import is_function
from swarm.tasks.reward_pool import BeginRewards, Completion, RewardPool
from swarm.types import Prompt, Score

WRONG = "this is not the answer"  # Scored to show what a wrong answer earns
PROCESSES = max(1, min(8, (os.cpu_count() or 1) // 4))  # For rewards: the trainer and the network need the rest


def reward_pool(
    config: LeadConfig,
    files_dir: Path | None = None,
    stop_token_ids: Sequence[int] = (),
    processes: int | None = None,
) -> RewardPool:
    """Return the reward processes of a run, not yet started. `files_dir`, in the run's directory, has the tokenizer,
    which scoring texts does not need; with it, rewards print into the run's logs."""
    record = read_record(files_dir.parent) if files_dir is not None else None
    begin = BeginRewards(
        task=task_options(config),
        reward="random" if config.is_control else "task",
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
        processes=processes or config.reward_processes or PROCESSES,
        logs=files_dir.parent / LOGS if files_dir is not None else None,
    )


async def check_rewards(pool: RewardPool, config: LeadConfig, prompt: Prompt) -> str:
    """Have functions of the user's judge three answers before anything starts. Return a line about them, "" if there
    are none. UserError for the first that fails."""
    if not (own := [name for name in config.rewards if is_function(name)]):
        return ""
    words = []
    for answer in (prompt.answer, "", WRONG):
        (outcome,) = await pool.score([Completion(prompt=prompt, text=answer)])
        shown = repr(answer if len(answer) <= MAX_SHOWN else answer[: MAX_SHOWN - 3] + "...")
        if not isinstance(outcome, Score):
            raise UserError(f"the reward failed for the answer {shown} to {prompt.prompt_id}: {outcome.reason}")
        words.append(f"{outcome.reward:g} for {shown}")
    return f"{', '.join(own)}: {', '.join(words)}"


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
