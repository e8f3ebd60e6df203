"""`eval` and `serve`: a model that is not trained, without a swarm."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from swarm.cli.options import Json, Rewards
from swarm.extras import require


def evaluate(
    task: Annotated[str | None, typer.Argument(help="As lead takes it. Default: the run's.")] = None,
    model: Annotated[str | None, typer.Option(help="Directory, Hugging Face id, tiny, or a run's directory.")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, max=10_000, help="Held-out prompts. Default: 100.")] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Answers to each: 1 is the likeliest, k gives pass@k.")
    ] = None,
    rewards: Rewards = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer. Default: the task's.")] = None,
    engine: Annotated[str, typer.Option(help="auto, transformers, vllm or mlx.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    config: Annotated[Path | None, typer.Option("--config", help="TOML file of lead's settings.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a model on held-out prompts: its accuracy with an interval, pass@k, and lengths of answers."""
    flags: dict[str, Any] = {"task": task, "rewards": rewards or None, "max_new_tokens": max_new_tokens}
    flags |= {"eval_prompts": prompts, "eval_samples": samples}
    with _frozen("eval", model, flags, config, engine, device) as (settings, *how):
        from swarm.lead.evaluate import evaluate as measure

        found = _to_end(measure(settings, *how))
    for line in table(found):
        typer.echo(line)
    if as_json:
        typer.echo(json.dumps({"model": model or settings.model, "task": settings.task, **found}))


def serve(
    model: Annotated[str, typer.Argument(help="Directory, Hugging Face id, tiny, or a run's directory.")],
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Of 127.0.0.1. Default: a free one.")] = 0,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer. Default: what the model reads.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Unless a call names one. Default: the run's.")] = None,
    engine: Annotated[str, typer.Option(help="auto, transformers, vllm or mlx.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    address: Annotated[Path | None, typer.Option(help="Directory where inference.json says where it is.")] = None,
) -> None:
    """Serve a model that is not trained at OpenAI's endpoint, on this machine: to try an agent, or to judge with."""
    flags = {"max_new_tokens": max_new_tokens, "temperature": temperature, "task": "copy"}
    with _frozen("serve", model, flags, None, engine, device) as (settings, *how):
        from swarm.lead.frozen import serve as serve_model

        _to_end(serve_model(settings, *how, port=port, address=address))


def _to_end(work: Coroutine[Any, Any, Any]) -> Any:
    from swarm.cli.run import run_to_end, until_signalled

    return run_to_end(until_signalled(work, stop_with_stdin=False))


@contextmanager
def _frozen(
    who: str, model: str | None, flags: dict[str, Any], config: Path | None, engine: str, device: str
) -> Iterator[tuple[Any, ...]]:
    """Yield the settings of a model, or of a run whose model is exported first; its engine's kind and options; what
    says a line; and what removes the export."""
    from swarm.run.directory import merging, recorded_config
    from swarm.settings import JoinConfig, LeadConfig
    from swarm.settings_file import load_config

    run_dir = Path(model) if model is not None and (Path(model) / "checkpoints").is_dir() else None
    before: dict[str, Any] = {}
    if run_dir is not None:
        before, of_run = recorded_config(run_dir)
    settings = load_config(LeadConfig, config, flags | ({} if run_dir else {"model": model}), before=before)
    asked = load_config(JoinConfig, None, {"bootstrap": "127.0.0.1", "engine": engine, "device": device})
    require("sampler", who)
    from swarm.learner.checkpoint.export import export_model
    from swarm.sampler.choice import choose_engine

    kind = choose_engine(asked.engine, asked.device).kind
    with tempfile.TemporaryDirectory(prefix="echo-node-") as made:
        whole = Path(made, "model")
        if run_dir is not None:
            step = export_model(run_dir, whole, None, merge=merging(run_dir, of_run))
            typer.echo(f"the model of step {step} of {run_dir}", err=True)
            settings = settings.model_copy(update={"model": str(whole), "adapter": None})
        loaded = partial(shutil.rmtree, whole, ignore_errors=True)
        yield settings, kind, asked.engine_options, partial(typer.echo, err=True), loaded


def table(found: dict[str, Any]) -> list[str]:
    """Return the figures as lines for people."""
    low, high = found["accuracy_low"], found["accuracy_high"]
    rows = {
        "accuracy": f"{found['accuracy']:.1%}, between {low:.1%} and {high:.1%} with 95 % confidence",
        f"pass@{found['samples']}": f"{found['pass_at_k']:.1%}",
        "reward": f"{found['reward']:.3f} in the mean",
        "length": f"{found['tokens_mean']:.0f} tokens in the mean, {found['tokens_max']} at most, "
        f"{found['cut_share']:.0%} cut off",
        "prompts": f"{found['prompts']} held out, {found['samples']} answer{'s' if found['samples'] > 1 else ''} each",
    }
    if found["samples"] == 1:
        del rows["pass@1"]
    if found["reward_failed"]:
        rows["failed"] = f"the reward failed for {found['reward_failed']} answers, which count as wrong"
    return [f"{name:9} {words}" for name, words in rows.items()]
