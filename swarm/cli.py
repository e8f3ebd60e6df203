"""The command line. Imports no torch, no numpy: `echo-node --help` answers at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeVar

import typer

from swarm.cli_capacity import plan
from swarm.cli_runs import export_app, report, set_value, verify
from swarm.cli_simulate import simulate
from swarm.cli_status import status
from swarm.cli_tasks import tasks_app
from swarm.errors import EchoError, UserError, first_fault

if TYPE_CHECKING:
    from swarm.config import JoinConfig
    from swarm.dashboard.live import LiveView
    from swarm.node.relay import RelayNode
    from swarm.node.sampler import SamplerNode

DONE, NOT_REACHED, BAD_INPUT, STOPPED = 0, 1, 2, 128 + signal.SIGINT
"""Exit statuses."""

LEAVE_S = 3.0
"""After a second signal a node that cannot end is ended: its last words to others take at most a second."""

HIDDEN = ("stop_with_stdin", "from_run", "step", "best")
"""Options that are no settings of a node."""

R = TypeVar("R")
T = TypeVar("T", covariant=True)

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement-learning post-training of language models: one learner, many cheap samplers.",
)

app.command("set")(set_value)
app.command()(verify)
app.command()(report)
app.command()(status)
app.command()(plan)
app.command()(simulate)
app.add_typer(export_app, name="export")
app.add_typer(tasks_app, name="tasks")

ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file with settings; flags override it.")]
WithStdin = Annotated[bool, typer.Option("--stop-with-stdin", hidden=True)]
Tls = Annotated[bool | None, typer.Option("--tls/--no-tls", help="Encrypt. Default: unless on loopback.")]
MaxUpload = Annotated[float | None, typer.Option(help="Most that weights may take of the line, in Mbit/s.")]
MaxDownload = Annotated[float | None, typer.Option(help="The same for what comes in.")]
Lan = Annotated[
    bool | None, typer.Option("--lan/--no-lan", help="Allow private addresses. Default: only on one machine.")
]
Target = Annotated[float | None, typer.Option(help="Stop once the last version has this held-out exact match.")]
SwarmKey = Annotated[
    Path | None, typer.Option(help="Key of the swarm, to lead it again in another run. Default: in the run dir.")
]
Rewards = Annotated[
    list[str] | None,
    typer.Option(help="NAME=WEIGHT, for questions with answers: exact, numeric, math, boxed. May be repeated."),
]
Chat = Annotated[
    bool | None, typer.Option("--chat/--no-chat", help="Prompts as a chat. Default: if the model has a template.")
]
Activate = Annotated[
    str | None, typer.Option(help="all samplers, or the cheapest that suffice. Default: cheapest if there are prices.")
]
PerHour = Annotated[float | None, typer.Option(help="Price of this machine by the hour. Default: 0.")]
PerGb = Annotated[float | None, typer.Option(help="Price of metered traffic, by 1e9 bytes. Default: 0.")]
Budget = Annotated[float | None, typer.Option(help="Most that the active samplers may cost by the hour.")]
MaxCost = Annotated[float | None, typer.Option(help="End the run, with a checkpoint, once it has cost so much.")]
KeepRollouts = Annotated[
    int | None, typer.Option(help="Steps whose rollouts stay on disk with their tokens. Default: all.")
]
ForkFrom = Annotated[
    Path | None,
    typer.Option("--from", help="Begin a new run with the model and the settings of that run; each may be changed."),
]
ForkStep = Annotated[int | None, typer.Option("--step", min=0, help="With --from: of that checkpoint, not the newest.")]
ForkBest = Annotated[bool, typer.Option("--best", help="With --from: the model that was best on held-out prompts.")]
Resume = Annotated[
    Path | None, typer.Option(help="Run directory of a run to go on with, however it ended; its settings hold.")
]
Tensorboard = Annotated[
    bool | None, typer.Option("--tensorboard/--no-tensorboard", help="Log for TensorBoard too. Default: no.")
]
Json = Annotated[bool, typer.Option("--json", help="The last line of stdout is one JSON object.")]


@app.command()
def lead(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Directory, Hugging Face id, tiny or tiny-warm.")] = None,
    task: Annotated[str | None, typer.Option(help="What to learn. Default: copy.")] = None,
    port: Annotated[int | None, typer.Option(help="Default: 7700; 0 takes any free one.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    max_staleness: Annotated[
        int | None, typer.Option(help="S: 0 is on-policy, 1 and more overlap. Default: 2.")
    ] = None,
    publish_every_steps: Annotated[int | None, typer.Option(help="K, at most S + 1. Default: 1.")] = None,
    hold_s: Annotated[
        float | None, typer.Option(help="Longest wait for samples that would become stale otherwise; inf drops none.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Learner steps. Default: 200.")] = None,
    target: Target = None,
    run_dir: Annotated[Path | None, typer.Option(help="Default: runs/TASK-DATE-TIME.")] = None,
    state_dir: SwarmKey = None,
    bootstrap: Annotated[list[str] | None, typer.Option(help="A member, if the swarm is there already.")] = None,
    advertise: Annotated[str | None, typer.Option(help="host[:port] that others dial, if not --host.")] = None,
    tls: Tls = None,
    lan: Lan = None,
    max_upload: MaxUpload = None,
    max_download: MaxDownload = None,
    reward: Annotated[str | None, typer.Option(help="task, or random as a control.")] = None,
    seed: Annotated[int | None, typer.Option(help="Default: 0.")] = None,
    checkpoint_every_steps: Annotated[int | None, typer.Option(help="Default: 50.")] = None,
    keep_checkpoints: Annotated[int | None, typer.Option(help="Newest ones that stay on disk. Default: 3.")] = None,
    keep_rollouts: KeepRollouts = None,
    resume: Resume = None,
    from_run: ForkFrom = None,
    step: ForkStep = None,
    best: ForkBest = False,
    objective: Annotated[str | None, typer.Option(help="grpo, decoupled_ppo, ... (docs/learner.md).")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Default: 1e-6; tiny 1e-3, tiny-warm 3e-4.")] = None,
    groups_per_step: Annotated[int | None, typer.Option(help="Prompts of a learner step. Default: 32.")] = None,
    group_size: Annotated[int | None, typer.Option(help="Rollouts of a prompt. Default: 16.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest completion. Default: the task's.")] = None,
    rewards: Rewards = None,
    chat: Chat = None,
    system_prompt: Annotated[str | None, typer.Option(help="What a chat begins with.")] = None,
    tokens_per_micro_batch: Annotated[int | None, typer.Option(help="Of one forward pass. Default: chosen.")] = None,
    trainer_ranks: Annotated[int | None, typer.Option(help="GPUs that share the training. Default: 1.")] = None,
    tensorboard: Tensorboard = None,
    activate: Activate = None,
    budget_per_hour: Budget = None,
    max_cost: MaxCost = None,
    cost_per_hour: PerHour = None,
    egress_cost_per_gb: PerGb = None,
    config: ConfigFile = None,
    stop_with_stdin: WithStdin = False,
) -> None:
    """Lead a swarm: train MODEL on TASK with the rollouts of whoever joins."""
    flags = {name: value for name, value in context.params.items() if name not in ("config", "resume", *HIDDEN)}
    flags["bootstrap"], flags["rewards"] = bootstrap or None, rewards or None
    if resume is not None and run_dir is not None:
        raise UserError("--resume says which run directory: leave --run-dir out")
    if resume is not None and from_run is not None:
        raise UserError("--resume goes on with a run and --from begins another one: give one of them")
    if from_run is None and (best or step is not None):
        raise UserError("--step and --best say which model of a run to begin with: name the run with --from")
    _lead(flags, config, resume, from_run, step=step, best=best, stop_with_stdin=stop_with_stdin)


def _lead(
    flags: dict[str, Any],
    config: Path | None,
    resume: Path | None,
    from_run: Path | None,
    *,
    step: int | None,
    best: bool,
    stop_with_stdin: bool,
) -> None:
    """Lead a new run, go on with the run `resume`, or begin with the model of `from_run`."""
    from rich.console import Console

    from swarm.config import LeadConfig, load_config, read_toml
    from swarm.dashboard.live import LiveView, follow
    from swarm.node.learner import LearnerNode
    from swarm.node.rundir import forked_config, resumed_config

    origin = None
    if from_run is not None:
        settings, origin = forked_config(from_run, flags, config, step=step, best=best)
    else:
        settings = resumed_config(resume, flags, config) if resume else load_config(LeadConfig, config, flags)
    dialled = flags["max_staleness"] is not None or (config is not None and "max_staleness" in read_toml(config))
    view = LiveView(Console(), title="echo-node lead")
    node = LearnerNode(settings, view.say, resume=resume is not None, keep_bound=not dialled, origin=origin)

    async def work() -> bool:
        showing = asyncio.create_task(follow(view, lambda: node.status() if node.is_up else None))
        try:
            return await _until_asked_to_stop(node, stop_with_stdin=stop_with_stdin, view=view)
        finally:
            showing.cancel()

    reached = _run(work())
    raise typer.Exit(STOPPED if node.is_stopped else DONE if reached else NOT_REACHED)


@app.command()
def join(
    bootstrap: Annotated[
        list[str] | None, typer.Option(help="Any member: host, host:port or a join line (echo1:...). May be repeated.")
    ] = None,
    role: Annotated[str | None, typer.Option(help="sampler or relay. Default: sampler.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Key and weights. Default: under ~/.local/state.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: all, if a bootstrap is far.")] = None,
    port: Annotated[int | None, typer.Option(help="Default: any free one; for a relay 7700.")] = None,
    tls: Tls = None,
    lan: Lan = None,
    max_upload: MaxUpload = None,
    max_download: MaxDownload = None,
    base: Annotated[
        str | None,
        typer.Option(help="Directory or cached Hugging Face id of the base model: what matches is not fetched."),
    ] = None,
    batch_samples: Annotated[int | None, typer.Option(help="Samples drawn at a time. Default: 128.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, ... Default: auto.")] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="auto, vllm or transformers. Default: auto, which is vllm with a GPU and the package."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16. Default: auto.")] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(help="GPUs that share the model. Default: 1.")] = None,
    gpu_memory_share: Annotated[float | None, typer.Option(help="Of each GPU for vLLM. Default: 0.85.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of prompt and answer at most, for vLLM. Default: what the model takes.")
    ] = None,
    cost_per_hour: PerHour = None,
    down_cost_per_gb: PerGb = None,
    up_cost_per_gb: PerGb = None,
    device_class: Annotated[str | None, typer.Option(help="Kind of device. Default: what it says of itself.")] = None,
    config: ConfigFile = None,
    stop_with_stdin: WithStdin = False,
) -> None:
    """Join a swarm: generate rollouts for its learner, or keep it together as a relay."""
    from swarm.config import JoinConfig, load_config

    flags = {
        "bootstrap": bootstrap or None,
        "role": role,
        "state_dir": state_dir,
        "host": host,
        "port": port,
        "tls": tls,
        "lan": lan,
        "max_upload": max_upload,
        "max_download": max_download,
        "base": base,
        "batch_samples": batch_samples,
        "device": device,
        "engine": engine,
        "dtype": dtype,
        "tensor_parallel_size": tensor_parallel_size,
        "gpu_memory_share": gpu_memory_share,
        "max_model_len": max_model_len,
        "cost_per_hour": cost_per_hour,
        "down_cost_per_gb": down_cost_per_gb,
        "up_cost_per_gb": up_cost_per_gb,
        "device_class": device_class,
    }
    settings = load_config(JoinConfig, config, flags)

    async def work() -> None:
        await _until_asked_to_stop(_joining(settings), stop_with_stdin=stop_with_stdin)

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
    """A learning swarm on this machine: one learner and a few samplers, with a live view."""
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


def run() -> None:
    """Run a command; every foreseen fault is one line on stderr and an exit status."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # A command that runs an event loop has its own words for it.
        signal.signal(signal.SIGINT, _stop_at_once)
    try:
        arguments = sys.argv[1:] or ["--help"]
        sys.exit(app(arguments, standalone_mode=False) or DONE)
    except typer.TyperException as error:
        _fail(error.format_message(), BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    except (EchoError, OSError, ExceptionGroup) as error:
        match first_fault(error):
            case UserError() as fault:
                _fail(str(fault), BAD_INPUT)
            case EchoError() | OSError() as fault:
                _fail(str(fault), NOT_REACHED)
            case _:
                raise


def _stop_at_once(number: int, _: object) -> None:
    """Ctrl-C in a command that has nothing to finish: a line, and the end."""
    # Whoever signals again waits for no cleaning up.
    signal.signal(number, signal.SIG_DFL)
    typer.echo("echo-node: stopped", err=True)
    raise KeyboardInterrupt


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


class Node(Protocol[T]):
    """A node that can be asked to stop. `request_stop` says what it waits for; False if that is nothing."""

    def run(self) -> Coroutine[Any, Any, T]: ...
    def request_stop(self) -> bool: ...
    def last_words(self) -> str: ...


async def _until_asked_to_stop(node: Node[T], *, stop_with_stdin: bool, view: LiveView | None = None) -> T:
    """Run `node`, asked politely to end by the first signal and cancelled by the second. Its last words come below the
    view, if there is one."""
    task = asyncio.ensure_future(node.run())
    asked = said = False

    def say_last(otherwise: str = "") -> None:
        nonlocal said
        if view is not None:
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
        # A resolver that hangs keeps the process for as long as it likes; whoever signals twice has waited enough.
        end = threading.Timer(LEAVE_S, os._exit, (STOPPED,))
        end.daemon = True
        end.start()

    _on_stop(on_signal, stop_with_stdin=stop_with_stdin)
    try:
        with view or nullcontext():
            return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        say_last()


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
