"""Commands about an existing run: status, set, audit, verify, export, report, dashboard. They need no model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarm.cli.options import Json
from swarm.cli.own import StateDir, ask_own
from swarm.errors import Damaged, UserError
from swarm.lead.dials import checked
from swarm.types import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from swarm.learner.checkpoint.files import Checkpoint
    from swarm.rollout.journal.verify import Report
    from swarm.settings import LeadConfig
    from swarm.tasks.base import Read

RunDirectory = Annotated[Path, typer.Argument(help="The run's directory.")]

BREACHED = 1  # Exit status of `verify` if an invariant does not hold; damage gives 2, like all bad input

export_app = typer.Typer(help="Write parts of a run for other programs.")


def set_value(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="First RUN, unless only one learner runs under runs/."),
    ] = None,
) -> None:
    """Change a running learner, on this machine: its pace, its budget, who takes part; or pause it, or end it. Without
    a KEY it says what holds now."""
    from swarm.node.control import ask_for

    words = words or []
    is_run = bool(words) and "=" not in words[0]
    pairs = [word.partition("=") for word in words[is_run:]]
    if not all(equals for _, equals, _ in pairs):
        raise UserError("write KEY=VALUE, such as max_staleness=4; `echo-node set --help` lists the keys")
    wanted = checked({key: value for key, _, value in pairs})
    typer.echo(asyncio.run(ask_for(Path(words[0]) if is_run else _the_running_one(), wanted)))


def audit(
    run_dir: Annotated[Path | None, typer.Argument(help="Default: of the one learner that runs under runs/.")] = None,
    node: Annotated[
        str | None, typer.Option(help="Show the evidence against this sampler, rollout by rollout.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show which samplers were caught in a run, by what, and the evidence: rollouts that their seeds do not draw."""
    from swarm.audit.auditing import evidence_in

    directory = run_dir or _the_running_one()
    if not directory.is_dir():
        raise UserError(f"there is no run directory {directory}")
    found = [one for one in evidence_in(directory) if node in {None, one["node"]}]
    if node is not None and not found:
        raise UserError(f"node {node} was not caught in {directory}: without --node this names those that were")
    if as_json:
        typer.echo(json.dumps({"caught": found}))
        return
    lines = list(_audit_lines(found, whole=node is not None))
    typer.echo("\n".join(map(printable, lines)) if lines else "no node was caught in this run")


def _audit_lines(found: Sequence[dict[str, Any]], *, whole: bool) -> Iterator[str]:
    for one in found:
        seen = f"{one['audited_rollouts']} audited rollouts, engine {one['engine'] or 'unknown'}"
        yield f"{one['node']}: {one['why']} (before step {one['step'] + 1}, {seen})"
        for rollout in one["evidence"] if whole else ():
            margin, error = rollout["margin_nats"], rollout["error_nats"]
            off = f"tokens miss by {margin:.3f} nats in the mean, log-probs are off by {error:+.3f}"
            yield f"  {rollout['rollout']}, version {rollout['version']}, seed {rollout['seed']}: {off}"


def verify(run_dir: RunDirectory, as_json: Json = False) -> None:
    """Prove that a run kept its promises. From journal and checkpoints: no rollout was too old, used twice, or lost."""
    from dataclasses import asdict

    report, found, damaged = verify_directory(run_dir)
    for breach in report.breaches:
        typer.echo(printable(f"breach: {breach}"))
    for name, fault in damaged.items():
        typer.echo(printable(f"damaged: {name}: {fault}"))
    typer.echo(
        f"{report.batches} batches, {report.accepted} rollouts accepted: {report.trained} trained on once, "
        f"{report.dropped} dropped for a reason that is true, {report.waiting} waiting; {len(found)} checkpoints"
        + (f", {len(damaged)} parts damaged; " if damaged else "; ")
        + (f"{len(report.breaches)} breaches" if report.breaches else "no rollout was too old, lost or used twice")
    )
    if report.turns:
        typer.echo(f"{report.turns:,} turns in {report.streams:,} streams of episodes; each token is in one of them")
    if as_json:
        typer.echo(json.dumps({**asdict(report), "checkpoints": [one.step for one in found], "damaged_parts": damaged}))
    if damaged:
        raise Damaged(run_dir, next(iter(damaged)), next(iter(damaged.values())))
    if report.breaches:
        remedy = f"`echo-node lead --from {run_dir}` goes on from its newest checkpoint in a new run"
        typer.echo(f"echo-node: {run_dir} has breaches, named above; if a disk or a copy did it, {remedy}", err=True)
        raise typer.Exit(BREACHED)


def verify_directory(run_dir: Path) -> tuple[Report, list[Checkpoint], dict[str, str]]:
    """Return what the run's journal proves, the whole checkpoints it was compared with, and the fault of each damaged
    part by name. Blocking."""
    from swarm.learner.checkpoint.files import damaged_checkpoints, whole_checkpoints
    from swarm.rollout.journal.verify import verify_run
    from swarm.run.prompts import RECORD, read_record

    config = _config(run_dir)
    root = run_dir / "checkpoints"
    torn = damaged_checkpoints(root)
    found = [checkpoint for checkpoint in whole_checkpoints(root) if checkpoint.path.name not in torn]
    damaged = {f"checkpoints/{name}": fault for name, fault in torn.items()}
    try:
        read_record(run_dir)
    except Damaged as error:
        damaged[RECORD] = str(error.__cause__)
    report = verify_run(
        run_dir,
        groups_per_step=config.groups_per_step,
        group_size=config.group_size,
        checkpoints=[(checkpoint.step, checkpoint.lineage) for checkpoint in found],
    )
    return report, found, damaged


@export_app.command("rollouts")
def export_rollouts(
    run_dir: RunDirectory,
    to: Annotated[Path, typer.Option(help="File to write, .jsonl.")],
) -> None:
    """Write the rollouts of a run as a data set, with prompts, texts, rewards and what became of them."""
    from swarm.report.dataset import export_rollouts as write

    prompt, decode_text, _ = readers_of(run_dir, _config(run_dir))
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
    best: Annotated[bool, typer.Option("--best", help="The checkpoint nearest to the best held-out result.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Of an adapter: the whole model with it.")] = False,
) -> None:
    """Write a run's model as anybody loads it, with tokenizer, generation config and a model card. Of an adapter run:
    the adapter, as peft loads it."""
    from swarm.learner.checkpoint.export import export_model as write
    from swarm.learner.checkpoint.files import newer_than
    from swarm.report.card import model_card
    from swarm.report.figures import read_figures
    from swarm.run.directory import merging

    if best and step is not None:
        raise UserError("--best and --step name two models: give one of them")
    config = _config(run_dir)
    figures, alone = read_figures(run_dir), config.adapter is not None and not merge
    merged = merging(run_dir, config) if merge else None
    done = write(run_dir, to, lambda at: model_card(figures, at, alone=alone), step=step, best=best, merge=merged)
    newer = [] if best or step is not None else newer_than(run_dir / "checkpoints", done)
    if newer:
        typer.echo(f"damaged and passed over: {', '.join(newer)} (`echo-node verify {run_dir}` says how)", err=True)
    typer.echo(f"the {'adapter' if alone else 'model'} of step {done} in {to}")


def report(
    run_dir: RunDirectory,
    to: Annotated[Path | None, typer.Option(help="HTML file to write. Default: RUN_DIR/report.html.")] = None,
) -> None:
    """Write one HTML file about a run. Over or not: curves, staleness, costs, events, samples, configuration."""
    from swarm.dashboard.report import write_report

    config = _config(run_dir)
    path, fault = write_report(run_dir, to, lambda: readers_of(run_dir, config))
    if fault:
        typer.echo(f"echo-node: {fault}", err=True)
    typer.echo(f"report in {path}")


def dashboard(
    run_dir: RunDirectory,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes any free one.")] = 0,
    opens: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve the live page of a run that is over, from its files, until Ctrl-C. Of a run that is led now it says where
    its page is."""
    import webbrowser

    from swarm.dashboard.server import serve_files, url_of
    from swarm.dashboard.source import ShownRun
    from swarm.node.control import is_served

    config = _config(run_dir)

    def say(line: str) -> None:
        typer.echo(printable(line))
        if opens:
            webbrowser.open(line.removeprefix("page "))

    if is_served(run_dir):
        if not (url := url_of(run_dir)):
            raise UserError(f"the run in {run_dir} is led now, without a page (--dashboard off)")
        say(f"page {url}")
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        asyncio.run(serve_files(ShownRun(directory=run_dir, readers=lambda: readers_of(run_dir, config)), port, say))
    except KeyboardInterrupt:
        return


def _config(run_dir: Path) -> LeadConfig:
    from swarm.run.directory import resumed_config

    return resumed_config(run_dir, {}, finished=True)


def readers_of(run_dir: Path, config: LeadConfig) -> Read:
    """Return functions for the run's prompts by number, with token ids, and for the text of token ids."""
    from swarm.run.prompts import check_data, open_prompts, open_task, read_record

    files = run_dir / "model"
    if (record := read_record(run_dir)) is None:
        raise UserError(f"{run_dir} has no prompts yet: the run never came to its first step")
    task = open_task(config)
    check_data(run_dir, task)
    prompts = open_prompts(config, task, files, record, say=lambda line: None)
    return prompts, prompts.decode, prompts.boards


def _the_running_one() -> Path:
    """Return the run under runs/ that has a control socket. Raise UserError unless there is exactly one."""
    from swarm.node.control import SOCKET, is_served

    found = [path.parent for path in Path("runs").glob(f"*/{SOCKET}") if is_served(path.parent)]
    if len(found) != 1:
        raise UserError(f"{len(found) or 'no'} learners run under runs/ here: name its run directory")
    return found[0]


def _where(text: str | None, state_dir: Path | None) -> str:
    """Return the address of a node that is named by its own or by a run's directory; by default of one's own node that
    runs here, or else of the one learner under runs/."""
    from swarm.node.control import is_served, running_nodes
    from swarm.run.directory import ADDRESS

    if text is None and (state_dir is not None or running_nodes() or not Path("runs").is_dir()):
        return ask_own("where", state_dir)
    run_dir = Path(text) if text is not None else _the_running_one()
    if text is not None and not run_dir.is_dir():
        return text
    if not is_served(run_dir):
        raise UserError(f"no learner runs in {run_dir} now: `echo-node report {run_dir}` writes a page of what it did")
    return str(json.loads((run_dir / ADDRESS).read_text())["url"])


WATCH_S = 2.0  # Between two updates of --watch: few figures change faster
RESIZE_S = 0.25  # How soon a watched screen follows a resize of its terminal


def status(
    url: Annotated[
        str | None, typer.Argument(help="host:port or URL of a node, or a run's directory. Default: your own here.")
    ] = None,
    state_dir: StateDir = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every two seconds, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All that it says, as one JSON object in a line.")] = False,
) -> None:
    """What a running node says of itself: a learner, a sampler or a relay."""
    from swarm.report.terminal import console as for_stdout

    url = _where(url, state_dir)
    console, found = for_stdout(), asyncio.run(_fetch(url))
    if watch:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # This is the normal way to end it, so nothing is printed.
            signal.signal(number, signal.default_int_handler)
        try:
            _watch(console, url, found, as_json=as_json)
        except KeyboardInterrupt:
            return
    elif as_json:
        typer.echo(json.dumps(found))
    else:
        console.print(_screen(console, found))


def _watch(console: Console, url: str, found: dict[str, Any], *, as_json: bool) -> None:
    """Show the status for ever: redraw a screen in place or, without a terminal, print a line each time."""
    from rich.live import Live
    from rich.text import Text

    from swarm.report.terminal import plain_line

    if as_json or not console.is_terminal:
        for one in _looks(url, found):
            words = one if isinstance(one, str) else json.dumps(one) if as_json else plain_line(one)
            print(words, flush=True)
            time.sleep(WATCH_S)
    # On an alternate screen no terminal wraps lines again when it is resized.
    last: RenderableType = ""
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for one in _looks(url, found):
                drawn, until = (0, 0), time.monotonic() + WATCH_S
                while time.monotonic() < until:
                    if console.size != drawn:
                        drawn = console.size
                        last = _screen(console, one) if isinstance(one, dict) else Text(one)
                        live.update(last, refresh=True)
                    time.sleep(RESIZE_S)
    finally:
        console.print(last)


def _looks(url: str, found: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
    """Yield the known status, then each new one, or a line if there is no answer."""
    yield found
    while True:
        try:
            yield asyncio.run(_fetch(url))
        except UserError as fault:
            yield printable(f"{fault}; asking again")


def _screen(console: Console, found: dict[str, Any]) -> RenderableType:
    from swarm.report.terminal import status_screen

    is_cut = console.is_terminal or "LINES" in os.environ
    return status_screen(found, console.width, console.height if is_cut else None)


async def _fetch(text: str) -> dict[str, Any]:
    from random import SystemRandom

    from swarm.errors import PeerUnreachable, ProtocolError
    from swarm.net.client import PeerClient
    from swarm.node.bootstrap import address_of, read_bootstrap

    try:
        # The request contains no secret, so any answer is believed, encrypted or not.
        async with PeerClient(await address_of(read_bootstrap(text), SystemRandom())) as peer:
            found: dict[str, Any] = json.loads(await peer.get("/v1/status", cap_bytes=4 << 20, timeout_s=10.0))
    except PeerUnreachable as error:
        raise UserError(f"no node answers: {error}") from error
    except (ProtocolError, ValueError) as error:
        raise UserError(f"{text} answers, but it is not an echo-node") from error
    return found
