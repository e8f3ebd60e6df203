"""The command line. It imports neither torch nor numpy, so that `echo-node --help` answers at once."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from swarm import __version__
from swarm.cli.chat import chat
from swarm.cli.eval import evaluate, serve
from swarm.cli.machine import doctor, service_app
from swarm.cli.options import Json, Sections, with_settings
from swarm.cli.own import finish, leave, limits, logs, me, pause, resume
from swarm.cli.plan import plan
from swarm.cli.runs import audit, dashboard, export_app, report, set_value, status, verify
from swarm.cli.simulate import simulate
from swarm.cli.tasks import tasks_app
from swarm.errors import EchoError, UserError, first_fault
from swarm.extras import installs, lacking, require
from swarm.lead.dials import DIALS
from swarm.settings import DemoConfig, JoinConfig, LeadConfig, as_task
from swarm.settings_file import load_config
from swarm.types import printable

if TYPE_CHECKING:
    from swarm.join.relay import RelayNode
    from swarm.join.sampler import SamplerNode
    from swarm.lead.learner import LearnerNode
    from swarm.report.live import LiveView

DONE, NOT_REACHED, BAD_INPUT, STOPPED = 0, 1, 2, 128 + signal.SIGINT  # Exit statuses

ALIKE = 0.85  # Likeness to what was typed, from 0 to 1, at which more than one option may have been meant
LINE_S = 60.0  # Between two lines about a joined node that has no terminal
LEAVE_S = 3.0  # A node gets this long after a second signal: its last words to others take at most a second
R = TypeVar("R")

app = typer.Typer(
    pretty_exceptions_enable=False,
    # Plain text: it cuts no name in a narrow terminal, and importing rich's help would double the start-up time.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

EXAMPLES = """\b
Examples:
  echo-node demo                   a swarm on this machine
  echo-node lead --task copy       lead one
  echo-node join --bootstrap LINE  join it from elsewhere
"""
LEAD_EXAMPLES = """\b
Examples:
  echo-node lead --model tiny --task copy --steps 200
  echo-node lead q.jsonl --model DIR --reward my.py:score
  echo-node lead --config examples/questions.toml
  echo-node lead --resume runs/copy-20260101-120000
"""
JOIN_EXAMPLES = f"""\b
Examples, with the line that `lead` prints:
  echo-node join --bootstrap echo1:...
  echo-node join --bootstrap echo1:... --role relay
Where it is not installed (NVIDIA: vllm, a Mac: mlx):
  {installs()["anything else"]}
"""
SET_KEYS = "\n\n".join(f"{key}: {dial.help}" for key, dial in DIALS.items())

ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file with settings; options override it.")]
RESUME = "Run directory of a run to go on with, however it ended; its settings hold."
Resume = Annotated[Path | None, typer.Option(help=RESUME)]
FROM = "Begin a new run with the model and the settings of that run; each may be changed."
ForkFrom = Annotated[Path | None, typer.Option("--from", help=FROM)]
ForkStep = Annotated[int | None, typer.Option("--step", min=0, help="With --from: of that checkpoint, not the newest.")]
ForkBest = Annotated[bool, typer.Option("--best", help="With --from: its checkpoint nearest to the best result.")]
CHECK = "Prepare all that the run needs, say what is wrong with it, and end where it would begin."
Check = Annotated[bool, typer.Option("--check", help=CHECK)]
WithStdin = Annotated[bool, typer.Option("--stop-with-stdin", hidden=True)]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"echo-node {__version__}")
        raise typer.Exit()


@app.callback(epilog=EXAMPLES)
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Reinforcement-learning post-training of language models: one learner, many cheap samplers."""


@app.command(cls=Sections, epilog=LEAD_EXAMPLES)
@with_settings(LeadConfig)
def lead(
    flags: dict[str, Any],
    named: Annotated[str | None, typer.Argument(metavar="TASK", help="As --task: FILE.jsonl, copy, ...")] = None,
    *,
    config: ConfigFile = None,
    resume: Resume = None,
    from_run: ForkFrom = None,
    step: ForkStep = None,
    best: ForkBest = False,
    check: Check = False,
    stop_with_stdin: WithStdin = False,
) -> None:
    """Lead a swarm: train a model on a task. The samplers that join generate its rollouts."""
    from swarm.run.directory import forked_config, resumed_config

    if named is not None and str(flags.get("task")).startswith("agent:") and "@" not in flags["task"]:
        flags["task"] += f"@{as_task(named)}"
    elif named is not None and flags.setdefault("task", named) != named:
        raise UserError(f"{named} and --task {flags['task']} both say what to learn: give one of them")
    _refuse_mixed(flags, resume=resume, from_run=from_run, picks=best or step is not None)
    origin = None
    if from_run is not None:
        settings, origin = forked_config(from_run, flags, config, step=step, best=best)
    else:
        settings = resumed_config(resume, flags, config) if resume else load_config(LeadConfig, config, flags)
    require("learner", "lead")
    # A second of imports, after everything that takes none to refuse.
    from rich.console import Console

    from swarm.dashboard import server as dashboard_server
    from swarm.dashboard.public import PublicState
    from swarm.dashboard.source import STARTING, ShownRun
    from swarm.lead.learner import LearnerNode
    from swarm.report.live import LiveView

    if check:
        checking = LearnerNode(settings, _say, resume=resume is not None, origin=origin, only_check=True)
        run_to_end(until_signalled(checking.run(), stop_with_stdin=stop_with_stdin))
        return

    @asynccontextmanager
    async def beside(run_dir: Path) -> AsyncIterator[None]:
        run = ShownRun(
            directory=run_dir,
            readers=node.readers,
            status=lambda: node.status() if node.is_up else None,
            change=partial(node.change, by="page"),
            timeline=lambda: node.timeline,
        )
        shown = PublicState(lambda: node.status() if node.is_up else STARTING, settings.model_dump(mode="json"))
        async with (
            dashboard_server.beside(run, settings.dashboard, view.say),
            dashboard_server.for_volunteers(shown, settings.public_page, view.say),
        ):
            yield

    view = LiveView(Console(), title="echo-node lead")
    node = LearnerNode(settings, view.say, resume=resume is not None, origin=origin, beside=beside)
    reached = run_to_end(_show_until_asked_to_stop(node, view, stop_with_stdin=stop_with_stdin))
    raise typer.Exit(STOPPED if node.is_stopped else DONE if reached else NOT_REACHED)


def _refuse_mixed(flags: dict[str, Any], *, resume: Path | None, from_run: Path | None, picks: bool) -> None:
    """Raise UserError for options of `lead` that exclude one another."""
    if resume is not None and "run_dir" in flags:
        raise UserError("--resume says which run directory: leave --run-dir out")
    if resume is not None and from_run is not None:
        raise UserError("--resume goes on with a run and --from begins another one: give one of them")
    if from_run is None and picks:
        raise UserError("--step and --best say which model of a run to begin with: name the run with --from")


@app.command(cls=Sections, epilog=JOIN_EXAMPLES)
@with_settings(JoinConfig)
def join(flags: dict[str, Any], *, config: ConfigFile = None, stop_with_stdin: WithStdin = False) -> None:
    """Join a swarm as a sampler or a relay. A sampler generates rollouts for the learner."""
    settings = join_settings(flags, config)
    from rich.console import Console

    from swarm.join.relay import RelayNode
    from swarm.join.sampler import SamplerNode
    from swarm.report.live import LiveView

    async def work() -> None:
        view = LiveView(Console(), title="echo-node join", line_s=LINE_S)
        node = RelayNode(settings, view.say) if settings.role == "relay" else SamplerNode(settings, view.say)
        if view.is_live:
            view.update({"role": settings.role, "state": "starting", "verdicts": {}})
        await _show_until_asked_to_stop(node, view, stop_with_stdin=stop_with_stdin)

    run_to_end(work())


def join_settings(flags: dict[str, Any], config: Path | None) -> JoinConfig:
    """Return the settings of `join`. Raise UserError if this installation cannot do what they say."""
    settings = load_config(JoinConfig, config, flags)
    if settings.role == "sampler":
        require("sampler", "join --role sampler")
    return settings


@app.command()
@with_settings(DemoConfig)
def demo(flags: dict[str, Any], *, as_json: Json = False) -> None:
    """Run a learning swarm on this machine. One learner and a few samplers, with a live view."""
    # A real model's engine takes one core, and its trainer another.
    settings = load_config(DemoConfig, None, flags, before={"samplers": 1} if flags.get("real") else None)
    require("learner", "demo")
    from swarm.cli.demo import Demo, show_of

    demo = Demo(settings, show_of(settings), to_stderr=as_json)
    summary = run_to_end(until_signalled(demo.run(), stop_with_stdin=False))
    if as_json:
        typer.echo(json.dumps(summary))
    raise typer.Exit(DONE if summary["as_it_should"] and summary["verified"] else NOT_REACHED)


@app.command()
def sft(
    data: Annotated[Path, typer.Option(help="JSON lines: messages, or prompt and completion.")],
    to: Annotated[Path, typer.Option(help="Directory to make, in Hugging Face format.")],
    model: Annotated[str | None, typer.Option(help="As lead takes it.")] = None,
    adapter: Annotated[int | None, typer.Option(help="Rank: train an adapter (LoRA).")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Write an adapter as a whole model.")] = False,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps. Default: 200.")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples in a step. Default: 32.")] = None,
    learning_rate: Annotated[float, typer.Option(help="Its peak. An adapter takes ten times as much.")] = 2e-5,
    config: Annotated[Path | None, typer.Option(help="TOML file with more of lead's settings.")] = None,
) -> None:
    """Train a model on examples, for a run to begin with. If it was killed, the same command goes on."""
    from swarm.learner.checkpoint.export import check_target, export_model
    from swarm.run.directory import merging

    own = {"model": model, "adapter": adapter, "steps": steps, "groups_per_step": batch, "learning_rate": learning_rate}
    settings = load_config(LeadConfig, config, {**own, "task": "copy"})
    check_target(to)
    require("learner", "sft")
    from swarm.learner.sft import train

    work = to.with_name(f"{to.name}.sft")  # Holds its checkpoints while it trains
    train(settings, data, work)
    export_model(work, to, None, merge=merging(work, settings) if merge else None)
    shutil.rmtree(work)
    typer.echo(f"{to} has the {'adapter' if settings.adapter and not merge else 'model'}")


for own in (status, doctor, pause, resume, finish, leave, me, limits, logs):
    app.command()(own)
app.command("set", epilog=SET_KEYS)(set_value)
app.command("eval")(evaluate)


@app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def redteam() -> None:
    """It has another name."""
    raise UserError("the attackers are in a checkout alone: bin/python -m tests.redteam (docs/redteam.md)")


for other in (audit, verify, report, dashboard, chat, serve, plan, simulate):
    app.command()(other)
app.add_typer(service_app, name="service")
app.add_typer(tasks_app, name="tasks")
app.add_typer(export_app, name="export")


def run() -> None:
    """Run a command. Every expected fault is one line on stderr and an exit status."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Commands with an event loop install their own handlers.
        signal.signal(signal.SIGINT, _stop_at_once)
    try:
        arguments = sys.argv[1:] or ["--help"]
        sys.exit(app(arguments, prog_name="echo-node", standalone_mode=False) or DONE)
    except typer.TyperException as error:
        _fail(_explained(error), BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    except ModuleNotFoundError as error:
        if (lack := lacking(error.name)) is None:
            raise
        _fail(str(lack), BAD_INPUT)
    except (EchoError, OSError, ExceptionGroup) as error:
        match first_fault(error):
            case UserError() as fault:
                _fail(str(fault), BAD_INPUT)
            case EchoError() | OSError() as fault:
                _fail(str(fault), NOT_REACHED)
            case _:
                raise


def _explained(error: typer.TyperException) -> str:
    near = getattr(error, "possibilities", None) or [""]
    wrong = getattr(error, "option_name", "")
    name = wrong.lstrip("-").replace("-", "_")
    if name in LeadConfig.model_fields.keys() | JoinConfig.model_fields.keys() and near[0] != wrong.replace("_", "-"):
        return f"{error}: write {name} = ... in a TOML file and name that with --config"
    alike = [one for one in near if SequenceMatcher(None, wrong, one).ratio() > ALIKE] or near[:1]
    return f"{error}: did you mean {' or '.join(alike)}?" if near[0] else error.format_message()


def _stop_at_once(number: int, _: object) -> None:
    """Handle Ctrl-C in a command that has nothing to finish: print a line and end."""
    # A second signal ends it without cleaning up.
    signal.signal(number, signal.SIG_DFL)
    typer.echo("echo-node: stopped", err=True)
    raise KeyboardInterrupt


def _fail(message: str, code: int) -> None:
    lines = "\n".join(map(printable, message.splitlines()))
    typer.echo(f"echo-node: {lines}", err=True)
    sys.exit(code)


def _say(line: str) -> None:
    print(printable(line), flush=True)


def run_to_end(work: Coroutine[Any, Any, R]) -> R:
    """Run `work`. What it and its children write is for this user alone."""
    os.umask(0o077)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


async def until_signalled(work: Coroutine[Any, Any, R], *, stop_with_stdin: bool) -> R:
    """Run `work`. SIGINT, SIGTERM and SIGHUP cancel it, so that everything it started is stopped."""
    task = asyncio.ensure_future(work)
    _on_stop(task.cancel, stop_with_stdin=stop_with_stdin)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _show_until_asked_to_stop(
    node: LearnerNode | RelayNode | SamplerNode, view: LiveView, *, stop_with_stdin: bool
) -> bool | None:
    """Run `node`, with its status in the view. The first signal asks it to end, the second cancels it. Its last words
    appear below the view."""
    from swarm.report.live import follow

    showing = asyncio.create_task(follow(view, lambda: node.status() if node.is_up else None))
    task = asyncio.ensure_future(node.run())
    asked = said = False

    def say_last(otherwise: str = "") -> None:
        nonlocal said
        view.close()
        if not said and (words := node.last_words() or otherwise):
            _say(words)
        said = True

    def on_signal() -> None:
        nonlocal asked
        if not asked and node.request_stop():
            asked = True
            return
        say_last("stopped")
        task.cancel()
        # A hanging name lookup would keep the process alive.
        end = threading.Timer(LEAVE_S, os._exit, (STOPPED,))
        end.daemon = True
        end.start()

    _on_stop(on_signal, stop_with_stdin=stop_with_stdin)
    try:
        with view:
            return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        showing.cancel()
        say_last()


def _on_stop(action: Callable[[], Any], *, stop_with_stdin: bool) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A signal that was ignored at our start stays ignored, as under nohup.
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, action)
    if stop_with_stdin:
        # The parent holds the other end: when the parent is gone, however it ended, this node stops too.
        descriptor = sys.stdin.fileno()

        def on_readable() -> None:
            if not os.read(descriptor, 4096):
                loop.remove_reader(descriptor)
                action()

        loop.add_reader(descriptor, on_readable)
