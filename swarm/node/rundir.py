"""A run directory: made for a new run, which may begin with another run's model, or opened again to resume one.

environment.json says what the run ran on, one entry for each life of the learner. Blocking.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from swarm.errors import UserError
from swarm.learner.checkpoint.export import export_model
from swarm.node.control import is_led
from swarm.settings import LeadConfig, load_config, read_toml

ENVIRONMENT = "environment.json"
LIVES_KEPT = 100  # Of a run that is resumed again and again the first and the newest; an entry takes some 10 kB

Life = dict[str, Any]


def note_life(run_dir: Path, *, step: int, device: str) -> str:
    """Append this process: libraries, machine and command. `step` is where it goes on, `device` what it trains on.

    "" or why it could not be written, as on a full disk: a run goes on without.
    """
    lives = [*read_lives(run_dir), this_life(step=step, device=device)]
    if len(lives) > LIVES_KEPT:
        lives = [lives[0], *lives[1 - LIVES_KEPT :]]
    partial = run_dir / (ENVIRONMENT + ".partial")
    try:
        partial.write_text(json.dumps(lives, indent=2) + "\n")
        partial.replace(run_dir / ENVIRONMENT)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def read_lives(run_dir: Path) -> list[Life]:
    """What is noted, oldest first; nothing of a run that noted none, or whose file was damaged."""
    try:
        found = json.loads((run_dir / ENVIRONMENT).read_text())
    except (OSError, ValueError):
        return []
    return [life for life in found if isinstance(life, dict)] if isinstance(found, list) else []


def this_life(*, step: int, device: str) -> Life:
    """This process and its machine. Loads no library: versions are those that are installed."""
    return {
        "time": round(time.time(), 3),
        "step": step,
        "device": device,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "gpus": _gpus(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "libraries": libraries(),
    }


def libraries() -> dict[str, str]:
    """Name and version of every installed distribution; a local build shows in its version, as in 2.13.0+cpu."""
    found: dict[str, str] = {}
    for one in metadata.distributions():
        # The first on the path is the one that is imported. One that was removed by hand has no name any more.
        if name := one.metadata["Name"]:
            found.setdefault(name, one.version)
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _cpu() -> str:
    return _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Names of NVIDIA's GPUs by the driver's own files: nvidia-smi may take seconds to answer."""
    found = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return [_field(path, "Model") or "unknown" for path in found]


def _field(path: Path, name: str) -> str:
    """The first value of `name` in a file of lines like `name : value`; "" if there is none."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() == name), "")


CHANGEABLE = frozenset(
    {
        "host",
        "port",
        "advertise",
        "tls",
        "lan",
        "bootstrap",
        "max_upload",
        "max_download",
        "state_dir",
        "device",
        "max_staleness",
        "publish_every_steps",
        "hold_s",
        "steps",
        "target",
        "checkpoint_every_steps",
        "eval_every_steps",
        "eval_samples",
        "alarm_mismatch_kl",
        "alarm_entropy",
        "alarm_gradient_spike",
        "reward_failure",
        "reward_timeout_s",
        "reward_memory_mb",
        "reward_processes",
        "keep_checkpoints",
        "keep_rollouts",
        "tensorboard",
        "trainer_hang_s",
        "trainer_ranks",
        "trainer_machines",
        "trainer_meeting",
        "tokens_per_micro_batch",
        "rehearse_step_s",
        "rehearse_noise",
        "activate",
        "idle_target",
        "budget_per_hour",
        "max_cost",
        "cost_per_hour",
        "egress_cost_per_gb",
        "run_dir",
    }
)
"""Settings that may differ when a run is resumed. All others are part of what was recorded: another task, seed or size
of groups would make the replay another run."""

CONFIG = "config.json"
ORIGIN = "from"  # The key of config.json under which a fork says whose model it began with
SUMMARY = "summary.json"  # Written last of all: where it is, the run is over and its samplers know

OTHER_CONFIG = (
    "Put back a copy; or begin the same run in another directory (environment.json has its command), stop it, and copy "
    "the config.json from there"
)
"""What helps where the settings of a run are lost: they cannot be read out of anything else."""

BASE = "base"  # The directory of a fork that holds the model which it began with

OF_ITS_OWN = frozenset({"model", "run_dir", "state_dir"})
"""Settings that a fork does not take over: its model is a copy, and it is a swarm of its own."""

LONGEST_NAME = 100  # Characters of a run directory's name without the time; file systems allow 255 bytes
LOGS = "logs"  # What a run's processes print. That of a demo is there before the run is, and stays if there is none.
LOCK = ".lock"  # Held by the learner that leads the run; the system takes it back when the process dies


def default_run_dir(task: str) -> Path:
    """Where a run of `task` that begins now lies, unless the user says otherwise."""
    return Path("runs") / (named_after(task) + time.strftime("-%Y%m%d-%H%M%S"))


def directory_of(config: LeadConfig) -> Path:
    """Where a run of `config` that begins now is kept."""
    return config.run_dir or default_run_dir(config.task)


def named_after(task: str) -> str:
    """A directory's name that says which task: of jsonl:data/x.jsonl, jsonl-data-x.jsonl."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", task).strip("-.")[-LONGEST_NAME:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The run that another one begins with: with its newest checkpoint, that of `step`, or the `best` model. `model` is
    what the first run of all began with."""

    run: Path
    step: int | None
    best: bool
    model: str


def create_run_directory(
    path: Path, config: LeadConfig, origin: Origin | None = None, say: Callable[[str], None] = print
) -> None:
    """Make `path` for a new run and write its configuration, with a copy of the model of its `origin` if it has one.
    UserError if it holds anything already, or there is no such model. Blocking."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        refuse_used(path)
        if origin is None:
            write_config(path, config)
            return
        try:
            step = export_model(origin.run, path / BASE, None, step=origin.step, best=origin.best)
            # Last: without it this is no run yet.
            write_config(path, config, {**asdict(origin), "run": str(origin.run), "step": step})
        except UserError:
            remove_run_directory(path, keep_logs=True)
            raise
        which = "best model" if origin.best else "model"
        say(f"a new run with the {which} of {origin.run} after {step} steps, and a fresh optimiser")
    except OSError as error:
        raise UserError(f"cannot write to the run directory {path}: {error.strerror}") from error


def remove_run_directory(path: Path, *, keep_logs: bool) -> None:
    """Of a run that never began: all that was made of it. `keep_logs`: they were there before it, as a demo's are."""
    for entry in path.iterdir():
        if keep_logs and entry.name == LOGS:
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    if not any(path.iterdir()):
        path.rmdir()


def refuse_used(path: Path) -> None:
    """UserError if `path` holds anything, which a new run would be mixed with."""
    if path.exists() and any(entry.name != LOGS for entry in path.iterdir()):
        raise UserError(
            f"{path} already holds a run or other files: choose another --run-dir, or go on with --resume {path}"
        )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be the one learner of the run in `path`. UserError if another is."""
    try:
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"cannot write to the run directory {path}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another learner leads the run in {path}: stop it first") from error
        yield
    finally:
        os.close(descriptor)


def begin_again(path: Path, config: LeadConfig) -> None:
    """Make the run in `path` one that is not finished, with the configuration that it goes on with."""
    # In this order: cut off in between, it is a run that ends again, and none that cannot be gone on with.
    (path / SUMMARY).unlink(missing_ok=True)
    write_config(path, config, read_values(path).get(ORIGIN))


def kept_line(path: Path, step: int | None, saved_step: int | None, *, steps: int) -> str:
    """What a run that ended after `step` learner steps has come to, what is kept of it, and how it goes on. `step` is
    None if it was still starting."""
    if (path / SUMMARY).is_file():
        return f"finished at step {step}; run directory {path}"
    saved = saved_step or 0
    checkpoint = f"the checkpoint of step {saved}" if saved_step is not None else ""
    again = f"the batches since step {saved}, to be trained on again" if step and step > saved else ""
    kept = ", ".join(part for part in (checkpoint, again) if part) or "what it held"
    at = "while it was starting" if step is None else f"at step {step} of {steps}"
    command = os.environ.get("ECHO_NODE_COMMAND", "echo-node")
    return f"stopped {at}; {path} keeps {kept}; go on with:  {command} lead --resume {shlex.quote(str(path))}"


def write_summary(path: Path, status: dict[str, Any]) -> None:
    """The last status of a run that is over."""
    partial = path / (SUMMARY + ".partial")
    partial.write_text(json.dumps(status, indent=2) + "\n")
    partial.replace(path / SUMMARY)


def write_config(path: Path, config: LeadConfig, origin: dict[str, Any] | None = None) -> None:
    """The resolved configuration, replaced whole: a run that is resumed reads it. `origin` is where its model is
    from."""
    values: dict[str, Any] = {ORIGIN: origin} if origin else {}
    values |= {**config.model_dump(mode="json"), "run_dir": str(path), "learning_rate": config.resolved_learning_rate}
    partial = path / (CONFIG + ".partial")
    partial.write_text(json.dumps(values, indent=2, default=str) + "\n")
    partial.replace(path / CONFIG)


def resumed_config(
    path: Path, flags: dict[str, Any], file: Path | None = None, *, finished: bool = False
) -> LeadConfig:
    """The configuration of the run in `path`, with what the TOML `file` and before it `flags` change.

    UserError if there is no run, if one of them asks for what a run cannot change, or if the run came to its end,
    unless it may be `finished`. One that an alarm stopped did not.
    """
    values, before = _recorded_config(path)
    given = _given(flags, file)
    known = {name: value for name, value in values.items() if name not in given}
    if not known.get("port"):
        known["port"] = _last_port(path) or 0
    config = load_config(LeadConfig, file, {**flags, "run_dir": path}, before=known)
    for name in sorted(given.keys() - CHANGEABLE):
        # As both were read: a flag says --rewards numeric=1, and the record {"numeric": 1.0}.
        if getattr(config, name) != getattr(before, name):
            raise UserError(f"--{name.replace('_', '-')} cannot change when a run is resumed: begin a new one")
    rises = config.steps > before.steps or (config.target or 0.0) > (before.target or 0.0)
    more = rises or (config.max_cost or math.inf) > (before.max_cost or math.inf)
    if not (finished or more or _was_stopped(path)) and (path / SUMMARY).is_file():
        cost = f" or --max-cost with more than {before.max_cost:g}" if before.max_cost else ""
        raise UserError(f"the run in {path} is finished: pass --steps with more than {before.steps}{cost} to go on")
    return config


def _recorded_config(path: Path) -> tuple[dict[str, Any], LeadConfig]:
    """The settings of a run, as they are written and as they are read. UserError if they are not what was written."""
    values = _settings(path)
    try:
        return values, load_config(LeadConfig, None, values)
    except UserError as error:
        raise _damaged(path, error) from error


def forked_config(
    path: Path, flags: dict[str, Any], file: Path | None = None, *, step: int | None = None, best: bool = False
) -> tuple[LeadConfig, Origin]:
    """The configuration of a new run that begins with the model of the run in `path`: its settings, with whatever the
    TOML `file` and before it `flags` change. UserError if there is no run, or another model is asked for."""
    (values, _), given = _recorded_config(path), _given(flags, file)
    if "model" in given:
        raise UserError(f"--from says which model a run begins with, that of {path}: leave --model out")
    if best and step is not None:
        raise UserError("--best and --step name two models: give one of them")
    known = {name: value for name, value in values.items() if name not in OF_ITS_OWN}
    if is_led(path):
        # It has its port, and both are to run.
        known["port"] = 0
    task = given.get("task", known.get("task", ""))
    run_dir = Path(given.get("run_dir") or default_run_dir(task))
    config = load_config(LeadConfig, file, {**flags, "run_dir": run_dir, "model": str(run_dir / BASE)}, before=known)
    model = read_values(path).get(ORIGIN, {}).get("model", values["model"])
    return config, Origin(run=path, step=step, best=best, model=model)


def read_values(path: Path) -> dict[str, Any]:
    """What config.json of a run says, settings and all. UserError if there is none."""
    file = path / CONFIG
    if not path.is_dir():
        raise UserError(f"{path} is not a run directory: there is no such directory")
    if not file.exists():
        raise UserError(f"{path} is not a run directory: it has no {CONFIG}. {OTHER_CONFIG}")
    try:
        values = json.loads(file.read_text())
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise _damaged(path, error) from error
    if not isinstance(values, dict):
        raise _damaged(path, "it holds no settings")
    return values


def _damaged(path: Path, why: object) -> UserError:
    said = " ".join(str(why).split())
    return UserError(f"{path / CONFIG} is damaged or of another release ({said}). {OTHER_CONFIG}")


def _settings(path: Path) -> dict[str, Any]:
    """The settings of a run. A fork that was moved finds its model where it is now."""
    values = read_values(path)
    return {**values, "model": str(path / BASE)} if values.pop(ORIGIN, None) else values


def _given(flags: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """What the user says: the flags, before the file."""
    return (read_toml(file) if file else {}) | {name: value for name, value in flags.items() if value is not None}


def _was_stopped(path: Path) -> bool:
    """Whether an alarm ended the run before its time."""
    try:
        return bool(json.loads((path / SUMMARY).read_text()).get("stopped_by"))
    except (OSError, ValueError, AttributeError):
        return False


def _last_port(path: Path) -> int | None:
    """The port that samplers know, in place of any free one."""
    try:
        return urlsplit(str(json.loads((path / "node.json").read_text())["url"])).port
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or damaged
