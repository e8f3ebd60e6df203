"""Commands about a run directory: set, verify, export, report. They need no swarm and no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.errors import UserError

if TYPE_CHECKING:
    from swarm.config import LeadConfig
    from swarm.learner.checkpoints import Checkpoint
    from swarm.rollout.verify import Report
    from swarm.types import Prompt

RunDirectory = Annotated[Path, typer.Argument(help="The run's directory.")]
Json = Annotated[bool, typer.Option("--json", help="The last line of stdout is one JSON object.")]

BREACHED = 1
"""Exit status of `verify` when an invariant does not hold."""

export_app = typer.Typer(help="Write parts of a run for other programs.")


def set_value(
    name: Annotated[str, typer.Argument(help="max-staleness, or max_staleness as in a file: all that can be set.")],
    value: Annotated[int, typer.Argument(min=0, help="The new S.")],
    run_dir: Annotated[Path | None, typer.Option(help="Default: of the one learner that runs under runs/.")] = None,
) -> None:
    """Change a setting of a running learner. It runs on this machine; the change holds from the next step on."""
    from swarm.node.control import ask_for

    if name.replace("_", "-") != "max-staleness":
        raise UserError(f"{name} cannot be set on a running learner: max-staleness can")
    typer.echo(asyncio.run(ask_for(run_dir or _the_running_one(), {"max_staleness": value})))


def verify(run_dir: RunDirectory, as_json: Json = False) -> None:
    """Prove that a run kept its promises. From journal and checkpoints: no rollout was too old, used twice, or lost."""
    from dataclasses import asdict

    report, found = verify_directory(run_dir)
    for breach in report.breaches:
        typer.echo(f"breach: {breach}")
    typer.echo(
        f"{report.batches} batches, {report.accepted} rollouts accepted: {report.trained} trained on once, "
        f"{report.dropped} dropped for a reason that is true, {report.waiting} waiting; {len(found)} checkpoints; "
        + (f"{len(report.breaches)} breaches" if report.breaches else "no breach of I1 or I3")
    )
    if as_json:
        typer.echo(json.dumps({**asdict(report), "checkpoints": [one.step for one in found]}))
    if report.breaches:
        raise typer.Exit(BREACHED)


def verify_directory(run_dir: Path) -> tuple[Report, list[Checkpoint]]:
    """What the journal of a run proves, and the whole checkpoints that it was compared with. Blocking."""
    from swarm.learner.checkpoints import is_whole, whole_checkpoints
    from swarm.rollout.verify import verify_run

    config = _config(run_dir)
    found = [checkpoint for checkpoint in whole_checkpoints(run_dir / "checkpoints") if is_whole(checkpoint.path)]
    report = verify_run(
        run_dir,
        groups_per_step=config.groups_per_step,
        group_size=config.group_size,
        checkpoints=[(checkpoint.step, checkpoint.lineage) for checkpoint in found],
    )
    return report, found


@export_app.command("rollouts")
def export_rollouts(
    run_dir: RunDirectory,
    to: Annotated[Path, typer.Option(help="File to write: .jsonl or .parquet.")],
) -> None:
    """Write the rollouts of a run as a data set, with prompts, texts, rewards and what became of them."""
    from swarm.rollout.export import export_rollouts as write

    prompt, decode_text = _readers(run_dir, _config(run_dir))
    done = write(run_dir, to, prompt=prompt, decode_text=decode_text)
    left_out = f"; {done.left_out} whose tokens are not kept any more were left out" if done.left_out else ""
    typer.echo(f"{done.rollouts} rollouts in {to}{left_out}")


@export_app.command("model")
def export_model(
    run_dir: RunDirectory,
    to: Annotated[Path, typer.Option(help="Directory to make, in Hugging Face format.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Of that checkpoint. Default: of the newest whole one.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The model that was best on held-out prompts.")] = False,
) -> None:
    """Write a run's model as anybody loads it, with tokenizer, generation config and a model card."""
    from swarm.learner.export import export_model as write
    from swarm.report.card import model_card
    from swarm.report.figures import read_figures

    if best and step is not None:
        raise UserError("--best and --step name two models: give one of them")
    _config(run_dir)
    figures = read_figures(run_dir)
    done = write(run_dir, to, lambda at: model_card(figures, at), step=step, best=best)
    typer.echo(f"the model of step {done} in {to}")


def report(
    run_dir: RunDirectory,
    to: Annotated[Path | None, typer.Option(help="HTML file to write. Default: RUN_DIR/report.html.")] = None,
) -> None:
    """Write one HTML file about a run. Over or not: curves, staleness, costs, events, samples, configuration."""
    from swarm.report.writing import write_report

    config = _config(run_dir)
    typer.echo(f"report in {write_report(run_dir, to, lambda: _readers(run_dir, config))}")


def _config(run_dir: Path) -> LeadConfig:
    from swarm.node.rundir import resumed_config

    return resumed_config(run_dir, {}, finished=True)


def _readers(run_dir: Path, config: LeadConfig) -> tuple[Callable[[int], Prompt], Callable[[Sequence[int]], str]]:
    """The run's prompts by number, with token ids, and the text of token ids."""
    from swarm.node.prompts import check_data, open_prompts, open_task, open_tokenizer, read_record

    files = run_dir / "model"
    if (record := read_record(run_dir)) is None:
        raise UserError(f"{run_dir} has no prompts yet: the run never came to its first step")
    task = open_task(config)
    check_data(run_dir, task)
    tokenizer = open_tokenizer(config.model, files)
    prompts = open_prompts(config, task, files, record, say=lambda line: None)
    return prompts, lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


def _the_running_one() -> Path:
    """The run under runs/ that has a control socket. UserError unless there is exactly one."""
    from swarm.node.control import SOCKET, is_led

    found = [path.parent for path in Path("runs").glob(f"*/{SOCKET}") if is_led(path.parent)]
    if len(found) != 1:
        raise UserError(f"{len(found) or 'no'} learners run under runs/ here: name one with --run-dir")
    return found[0]
