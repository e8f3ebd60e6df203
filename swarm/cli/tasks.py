"""Commands about tasks: list them, and try one without a swarm and without a GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.cli.options import Rewards
from swarm.errors import UserError
from swarm.types import Score, printable

if TYPE_CHECKING:
    from swarm.environments.base import Environment
    from swarm.run.prompts import Prompts
    from swarm.settings import LeadConfig
    from swarm.tasks.base import Task
    from swarm.types import Prompt

MAX_SHOWN = 2000  # Characters of a prompt that are shown

tasks_app = typer.Typer(help="List the tasks, or try one.", invoke_without_command=True)


@tasks_app.callback()
def list_tasks(context: typer.Context) -> None:
    """List the tasks, a line each."""
    if context.invoked_subcommand is not None:
        return
    from swarm.tasks import ENVIRONMENTS, KINDS, TASKS, load_task
    from swarm.tasks.base import TaskOptions
    from swarm.tasks.rewards import REWARDS

    rows = [(name, load_task(TaskOptions(name=name)).description) for name in TASKS]
    rows += [(name, resolve_name(f"swarm.environments.{path}").description) for name, path in ENVIRONMENTS.items()]
    rows += [(f"{name}:{kind.rest}", kind.description) for name, kind in KINDS.items()]
    width = max(len(name) for name, _ in rows)
    for name, description in rows:
        typer.echo(f"{name:{width}}  {description}")
    typer.echo(f"rewards of jsonl: and hf:, as --reward NAME=WEIGHT: {', '.join(REWARDS)}, FILE.py:FUNCTION")


@tasks_app.command("try")
def try_task(
    task: Annotated[str, typer.Argument(help="A task as lead --task takes it.")],
    count: Annotated[int, typer.Option("-n", min=1, max=10_000, help="Prompts.")] = 3,
    held_out: Annotated[bool, typer.Option("--held-out", help="Show those that are never trained on.")] = False,
    answer: Annotated[str | None, typer.Option(help="Score this answer to each of them.")] = None,
    answers: Annotated[Path | None, typer.Option(help="File with an answer a line, one for each prompt.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Directory or cached Hugging Face id: show what this model would read.")
    ] = None,
    rewards: Rewards = None,
    system_prompt: Annotated[str | None, typer.Option(help="What a chat begins with.")] = None,
    seed: Annotated[int | None, typer.Option(help="Default: 0.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="TOML file of the run.")] = None,
) -> None:
    """Show prompts and what answers earn (the right one, none and a wrong one), or play an environment: type turns."""
    from swarm.lead.check import WRONG
    from swarm.run.prompts import ProgressLine, open_task
    from swarm.settings import LeadConfig
    from swarm.settings_file import load_config

    if answer is not None and answers is not None:
        raise UserError("--answer and --answers both say what to score: give one of them")
    flags = {"task": task, "model": model, "rewards": rewards or None, "system_prompt": system_prompt, "seed": seed}
    settings = load_config(LeadConfig, config, flags)
    given = _read_answers(answers) if answers is not None else None
    found = open_task(settings, ProgressLine(lambda line: typer.echo(line, err=True)))
    prompts = (
        list(found.held_out(count)) if held_out else [found.prompt(i) for i in range(min(count, found.size or count))]
    )
    size = "without end" if found.size is None else f"{found.size:,} to train on"
    typer.echo(f"{found.name}: {found.description}; prompts {size}")
    if found.player is not None:
        environment = found.environment()
        for prompt in prompts:
            typer.echo(f"\n{prompt.prompt_id}")
            _play(environment, prompt, given or ([answer] * environment.max_turns if answer is not None else None))
        return
    if given is not None and len(given) < len(prompts):
        raise UserError(
            f"{answers} has {len(given)} answers for {len(prompts)} prompts: a line for each, or a lower -n"
        )
    reader = _reader(settings, found) if model is not None else None
    chosen = [[one] for one in given or []] or [[p.answer, "", WRONG] if answer is None else [answer] for p in prompts]
    asked = list(zip(prompts, chosen, strict=False))
    if failed := asyncio.run(_show_scored(settings, asked, reader)):
        raise UserError(f"the reward failed {failed} times: a run gives such completions 0, and ends if all fail")


def _show(prompt: Prompt, reader: Prompts | None) -> None:
    typer.echo(f"\n{prompt.prompt_id}")
    if reader is not None:
        text = reader.text(prompt)
        typer.echo(f"  {len(reader.encode(prompt).token_ids)} tokens")
    elif prompt.messages:
        text = "\n".join(f"{role}: {content}" for role, content in prompt.messages)
    else:
        text = prompt.text
    cut = f"\n... {len(text) - MAX_SHOWN:,} characters more" if len(text) > MAX_SHOWN else ""
    typer.echo("\n".join(f"  | {printable(line)}" for line in (text[:MAX_SHOWN] + cut).splitlines()))
    typer.echo(f"  answer: {_shown(prompt.answer)}")


def _play(environment: Environment, prompt: Prompt, turns: Sequence[str] | None) -> None:
    messages, total = environment.reset(int(prompt.prompt_id.rpartition("-")[2])), 0.0
    for number in range(min(environment.max_turns, environment.max_turns if turns is None else len(turns))):
        typer.echo("\n".join(f"  | {printable(line)}" for _, words in messages for line in words.splitlines()))
        try:
            text = (
                typer.prompt(f"turn {number + 1}", default="", show_default=False) if turns is None else turns[number]
            )
        except typer.Abort:
            return  # Ctrl-D
        try:
            step = environment.step(text)
        except Exception as error:  # its author's program, who is the one that asks
            raise UserError(f"step() raised {type(error).__name__}: {error}") from error
        messages, total = step.messages, total + sum(step.rewards[:1])
        typer.echo(f"  {_in_words(Score(reward=total, exact=step.solved, parts=dict(step.parts)))}  for {_shown(text)}")
        if step.done:
            break


async def _show_scored(
    config: LeadConfig, asked: Sequence[tuple[Prompt, Sequence[str]]], reader: Prompts | None
) -> int:
    """Show prompts with what each of their answers earns in a reward process, as in a run. Return how many failed."""
    from swarm.lead.check import reward_pool
    from swarm.tasks.reward_pool import Completion

    pool = reward_pool(config.model_copy(update={"rewards": config.own_rewards}), processes=1)
    failed = 0
    try:
        await pool.start()
        for prompt, texts in asked:
            _show(prompt, reader)
            for text in texts:
                (outcome,) = await pool.score([Completion(prompt=prompt, text=text)])
                failed += not isinstance(outcome, Score)
                words = _in_words(outcome) if isinstance(outcome, Score) else f"FAILED: {outcome.reason}"
                typer.echo(f"  {words}  for {_shown(text)}")
    finally:
        await pool.close()
    return failed


def _in_words(score: Score) -> str:
    parts = f" ({', '.join(f'{name} {value:g}' for name, value in score.parts.items())})" if score.parts else ""
    return f"{score.reward:6.3f} {'solved' if score.exact else '      '}{parts}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _read_answers(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"cannot read the answers in {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: save the file in that encoding") from error


def _reader(config: LeadConfig, task: Task) -> Prompts:
    from swarm.run.prompts import TaskRecord, open_prompts
    from swarm.types import MAX_TOKENS

    record = TaskRecord(data_digest="", most_tokens=MAX_TOKENS, began=datetime.now())
    return open_prompts(config, task, _files_of(config.model), record, say=typer.echo)


def _files_of(model: str) -> Path:
    """Return the directory of a model's small files, from the cache if `model` is an id."""
    if (path := Path(model)).is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True, allow_patterns=["*.json", "*.jinja"]))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise UserError(f"{model!r} is no directory and no model in the Hugging Face cache") from error
