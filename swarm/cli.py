"""The command line. Imports no torch, no numpy: `echo-node --help` answers at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from swarm import __version__
from swarm.cli_capacity import plan
from swarm.cli_options import Sections, with_settings
from swarm.cli_runs import export_app, report, set_value, verify
from swarm.cli_simulate import simulate
from swarm.cli_tasks import tasks_app
from swarm.config import MOST, JoinConfig, LeadConfig
from swarm.errors import EchoError, UserError, first_fault

if TYPE_CHECKING:
    from swarm.node.relay import RelayNode
    from swarm.node.sampler import SamplerNode

DONE, NOT_REACHED, BAD_INPUT = 0, 1, 2
"""Exit statuses."""

LEAVE_S = 3.0
"""After a second signal a node that cannot end is ended: its last words to others take at most a second."""

R = TypeVar("R")

app = typer.Typer(
    pretty_exceptions_enable=False,
    # Plain text: no name is cut, however narrow the terminal, and rich's help would take as long to import as the rest.
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
  echo-node lead --config examples/questions.toml
  echo-node lead --resume runs/copy-20260101-120000
"""
JOIN_EXAMPLES = """\b
Examples, with the line that `lead` prints:
  echo-node join --bootstrap echo1:...
  echo-node join --bootstrap echo1:... --role relay
"""

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="TOML file with settings; options override it.", rich_help_panel=MOST)
]
Resume = Annotated[
    Path | None,
    typer.Option(
        help="Run directory of a run to go on with, however it ended; its settings hold.", rich_help_panel=MOST
    ),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check", help="Look at all that the run needs, say what was found, and start nothing.", rich_help_panel=MOST
    ),
]
WithStdin = Annotated[bool, typer.Option("--stop-with-stdin", hidden=True)]
Json = Annotated[bool, typer.Option("--json", help="The last line of stdout is one JSON object.")]


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
    *,
    config: ConfigFile = None,
    resume: Resume = None,
    check: Check = False,
    stop_with_stdin: WithStdin = False,
) -> None:
    """Lead a swarm: train a model on a task. The rollouts come from whoever joins."""
    from swarm.configfile import load_config, read_toml
    from swarm.node.checking import check_run
    from swarm.node.learner import LearnerNode
    from swarm.node.rundir import resumed_config

    if resume is not None and "run_dir" in flags:
        raise UserError("--resume says which run directory: leave --run-dir out")
    settings = resumed_config(resume, flags, config) if resume else load_config(LeadConfig, config, flags)
    if check:
        _run(_until_signalled(check_run(settings, _say, resume=resume is not None), stop_with_stdin=stop_with_stdin))
        return
    dialled = "max_staleness" in flags or (config is not None and "max_staleness" in read_toml(config))
    node = LearnerNode(settings, _say, resume=resume is not None, keep_bound=not dialled)

    async def work() -> bool:
        return await _until_signalled(node.run(), stop_with_stdin=stop_with_stdin)

    raise typer.Exit(DONE if _run(work()) else NOT_REACHED)


@app.command(cls=Sections, epilog=JOIN_EXAMPLES)
@with_settings(JoinConfig)
def join(flags: dict[str, Any], *, config: ConfigFile = None, stop_with_stdin: WithStdin = False) -> None:
    """Join a swarm as a sampler or a relay. A sampler generates rollouts for the learner."""
    from swarm.configfile import load_config

    settings = load_config(JoinConfig, config, flags)

    async def work() -> None:
        node = _joining(settings)
        await _until_asked_to_stop(node.run(), node.request_stop, words=node.stop_line, stop_with_stdin=stop_with_stdin)

    _run(work())


def _joining(settings: JoinConfig) -> RelayNode | SamplerNode:
    from swarm.node.relay import RelayNode
    from swarm.node.sampler import SamplerNode

    return RelayNode(settings, _say) if settings.role == "relay" else SamplerNode(settings, _say)


@app.command()
def demo(
    samplers: Annotated[int, typer.Option(min=1, max=16, help="Sampler processes.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Learner steps at most.")] = 200,
    kill_one: Annotated[bool, typer.Option("--kill-one", help="SIGKILL a sampler half-way.")] = False,
    kill_learner: Annotated[
        int, typer.Option(min=0, max=100, help="SIGKILL the learner so often at random moments, and resume it.")
    ] = 0,
    kill_seed: Annotated[int | None, typer.Option(help="Draw the moments of a former demo again.")] = None,
    reward: Annotated[str, typer.Option(help="task, or random as a control that must not learn.")] = "task",
    max_staleness: Annotated[int, typer.Option(min=0, help="The bound S.")] = 2,
    engine: Annotated[
        Literal["transformers", "vllm"], typer.Option(help="vllm has all samplers but the last draw with vLLM.")
    ] = "transformers",
    run_dir: Annotated[Path | None, typer.Option(help="Default: runs/demo-DATE-TIME.")] = None,
    as_json: Json = False,
) -> None:
    """Run a learning swarm on this machine. One learner and a few samplers, with a live view."""
    from random import SystemRandom

    from swarm.demo import Demo, DemoOptions

    options = DemoOptions(
        samplers=samplers,
        steps=steps,
        kill_one=kill_one,
        kill_learner=kill_learner,
        kill_seed=SystemRandom().randrange(1 << 32) if kill_seed is None else kill_seed,
        reward=reward,
        max_staleness=max_staleness,
        run_dir=run_dir,
        engine=engine,
    )
    summary = _run(_until_signalled(Demo(options, to_stderr=as_json).run(), stop_with_stdin=False))
    if as_json:
        typer.echo(json.dumps(summary))
    raise typer.Exit(DONE if summary["learned"] and summary["verified"] else NOT_REACHED)


@app.command()
def status(
    url: Annotated[str, typer.Argument(help="host:port or URL of a running node.")],
    as_json: Json = False,
) -> None:
    """Show what a running node says of itself."""
    from swarm.dashboard.terminal import status_table

    found = _run(_fetch_status(url))
    if as_json:
        typer.echo(json.dumps(found))
        return
    from rich.console import Console

    Console().print(status_table(found))


app.command("set")(set_value)
app.command()(verify)
app.command()(report)
app.command()(plan)
app.command()(simulate)
app.add_typer(tasks_app, name="tasks")
app.add_typer(export_app, name="export")


def run() -> None:
    """Run a command; every foreseen fault is one line on stderr and an exit status."""
    try:
        arguments = sys.argv[1:] or ["--help"]
        sys.exit(app(arguments, prog_name="echo-node", standalone_mode=False) or DONE)
    except typer.TyperException as error:
        _fail(_explained(error), BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (EchoError, OSError, ExceptionGroup) as error:
        match first_fault(error):
            case UserError() as fault:
                _fail(str(fault), BAD_INPUT)
            case EchoError() | OSError() as fault:
                _fail(str(fault), NOT_REACHED)
            case _:
                raise


def _explained(error: typer.TyperException) -> str:
    """A wrong command line, and what was probably meant."""
    near = getattr(error, "possibilities", None) or [""]
    wrong = getattr(error, "option_name", "")
    name = wrong.lstrip("-").replace("-", "_")
    if name in LeadConfig.model_fields.keys() | JoinConfig.model_fields.keys() and near[0] != wrong.replace("_", "-"):
        return f"{error}: write {name} = ... in a TOML file and name that with --config"
    return f"{error}: did you mean {near[0]}?" if near[0] else error.format_message()


def _fail(message: str, code: int) -> None:
    typer.echo(f"echo-node: {message}", err=True)
    sys.exit(code)


def _say(line: str) -> None:
    print(line, flush=True)


def _run(work: Coroutine[Any, Any, R]) -> R:
    """Run on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


async def _until_signalled(work: Coroutine[Any, Any, R], *, stop_with_stdin: bool) -> R:
    """`work`, cancelled by SIGINT, SIGTERM or SIGHUP, so that whatever it started is stopped."""
    task = asyncio.ensure_future(work)
    _on_stop(task.cancel, stop_with_stdin=stop_with_stdin)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _until_asked_to_stop(
    work: Coroutine[Any, Any, None], request_stop: Callable[[], None], *, words: str, stop_with_stdin: bool
) -> None:
    """`work`, asked politely to end by the first signal and cancelled by the second."""
    task = asyncio.ensure_future(work)
    asked = False

    def on_signal() -> None:
        nonlocal asked
        if asked:
            task.cancel()
            # A resolver that hangs keeps the process for as long as it likes; whoever signals twice has waited enough.
            end = threading.Timer(LEAVE_S, os._exit, (128 + signal.SIGINT,))
            end.daemon = True
            end.start()
        else:
            asked = True
            _say(words)
            request_stop()

    _on_stop(on_signal, stop_with_stdin=stop_with_stdin)
    try:
        await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _on_stop(action: Callable[[], Any], *, stop_with_stdin: bool) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # What was ignored when we started stays ignored: nohup.
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, action)
    if stop_with_stdin:
        # The parent holds the other end; when it is gone, however it went, this node goes too.
        descriptor = sys.stdin.fileno()

        def on_readable() -> None:
            if not os.read(descriptor, 4096):
                loop.remove_reader(descriptor)
                action()

        loop.add_reader(descriptor, on_readable)


async def _fetch_status(text: str) -> dict[str, Any]:
    from random import SystemRandom

    from swarm.errors import PeerUnreachable, ProtocolError
    from swarm.http import PeerClient
    from swarm.node.bootstrap import address_of, read_bootstrap

    try:
        # Encrypted or not is found out; nothing secret is asked, so whoever answers is believed.
        async with PeerClient(await address_of(read_bootstrap(text), SystemRandom())) as peer:
            found: dict[str, Any] = json.loads(await peer.get("/v1/status", cap_bytes=4 << 20, timeout_s=10.0))
    except PeerUnreachable as error:
        raise UserError(f"no node answers: {error}") from error
    except (ProtocolError, ValueError) as error:
        raise UserError(f"{text} answers, but it is no echo-node") from error
    return found
