"""A run directory: create one for a new run, which may begin with another run's model, or open one to resume its run.
Everything here blocks.
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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from swarm.errors import UserError
from swarm.files import write_atomically
from swarm.learner.checkpoint.export import Merge, export_model
from swarm.node.control import is_served
from swarm.settings import CHANGEABLE, LeadConfig
from swarm.settings_file import load_config, read_settings

LIBRARIES = ("echo-node", "torch", "transformers", "tokenizers", "safetensors", "numpy")  # Those the weights depend on


def write_json(path: Path, value: Any, *, mode: int = 0o666) -> None:
    """Write `value` for people to read."""
    write_atomically(path, f"{json.dumps(value, indent=2, default=str)}\n".encode(), mode=mode)


def ran_on() -> dict[str, Any]:
    """Return the versions that this process runs with, and its command as it was given."""
    versions: dict[str, str] = {}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "libraries": versions,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


CONFIG = "config.json"
ORIGIN = "from"  # The key of config.json under which a fork says which model it began with
ADDRESS = "node.json"  # Where the learner listens
SUMMARY = "summary.json"  # Written last of all: if it exists, the run is over and its samplers know
TIMELINE = "timeline.json"  # Written each minute: what learner and samplers did, in buckets of time
BASE = "base"  # Directory in a fork with the model that it began with
LOGS = "logs"  # Output of a run's processes. A demo creates it before the run begins; it stays if no run begins
LOCK = ".lock"  # Held by the learner that leads the run; the system releases it when the process dies

OTHER_CONFIG = (
    "Put back a copy; or begin the same run in another directory (events.jsonl has its command), stop it, and copy the "
    "config.json from there"
)
"""The remedy if a run's settings are lost, since no other file has them."""


def default_run_dir(task: str) -> Path:
    """Return the default directory for a run of `task` that begins now."""
    return Path("runs") / (named_after(task) + time.strftime("-%Y%m%d-%H%M%S"))


def named_after(task: str) -> str:
    """Return a directory name for a task, such as jsonl-data-x.jsonl for jsonl:data/x.jsonl."""
    # File systems allow 255 bytes for a name, and the time is appended.
    return re.sub(r"[^A-Za-z0-9._-]+", "-", task).strip("-.")[-100:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The run whose model another run begins with: its newest checkpoint, the one of `step`, or its `best` model.
    `model` is the model that the first run of this line began with."""

    run: Path
    step: int | None
    best: bool
    model: str


def create_run_directory(
    path: Path, config: LeadConfig, origin: Origin | None = None, say: Callable[[str], None] = print
) -> None:
    """Create `path` for a new run. Write its configuration, and a copy of the model of its `origin` if it has one.
    Raise UserError if the directory already holds something, or if there is no such model."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_used(path)
        if origin is None:
            write_config(path, config)
            return
        try:
            merge = merging(origin.run, recorded_config(origin.run)[1])
            step = export_model(origin.run, path / BASE, None, step=origin.step, best=origin.best, merge=merge)
            # Written last, because a directory without it is not a run.
            write_config(path, config, {**asdict(origin), "run": str(origin.run), "step": step})
        except UserError:
            remove_run_directory(path, keep_logs=True)
            raise
        which = "best model" if origin.best else "model"
        say(f"a new run with the {which} of {origin.run} after {step} steps, and a fresh optimiser")
    except OSError as error:
        raise UserError(f"cannot write to the run directory {path}: {error.strerror}") from error


def merging(run_dir: Path, config: LeadConfig) -> Merge:
    """Return what makes a whole model of an adapter of the run in `run_dir`."""

    def merge(directory: Path) -> None:
        # Seconds of imports, and only for adapters.
        from swarm.learner.checkpoint.merge import merge_into

        made_in, precision = run_dir / "model", config.base_precision
        merge_into(directory, model=config.model, seed=config.seed, made_in=made_in, precision=precision)

    return merge


def remove_run_directory(path: Path, *, keep_logs: bool) -> None:
    """Remove a run that never began. With `keep_logs`, keep its logs, which a demo creates beforehand."""
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
    """Raise UserError if `path` holds anything but logs."""
    if path.exists() and any(entry.name != LOGS for entry in path.iterdir()):
        raise UserError(
            f"{path} already holds a run or other files: choose another --run-dir, or go on with --resume {path}"
        )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of the run in `path`, to lead the run, which closes it to other users. Raise UserError if another
    learner holds it."""
    try:
        with suppress(PermissionError):  # Another user's, who lets this one write there
            path.chmod(0o700)
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
    """Mark the run in `path` as not finished, and write the configuration that it continues with."""
    # In this order: if the process dies in between, the run can still be resumed.
    (path / SUMMARY).unlink(missing_ok=True)
    write_config(path, config, read_values(path).get(ORIGIN))


def kept_line(path: Path, step: int | None, saved_step: int | None, *, steps: int) -> str:
    """Return a line about a run that ended after `step` learner steps: what is kept of it, and how to resume it. `step`
    is None if the run was still starting."""
    if (path / SUMMARY).is_file():
        return f"finished at step {step}; run directory {path}"
    saved = saved_step or 0
    checkpoint = f"the checkpoint of step {saved}" if saved_step is not None else ""
    again = f"the batches since step {saved}, to be trained on again" if step and step > saved else ""
    kept = ", ".join(part for part in (checkpoint, again) if part) or "what it held"
    at = "while it was starting" if step is None else f"at step {step} of {steps}"
    command = os.environ.get("ECHO_NODE_COMMAND", "echo-node")
    return f"stopped {at}; {path} keeps {kept}; go on with:  {command} lead --resume {shlex.quote(str(path))}"


def write_config(path: Path, config: LeadConfig, origin: dict[str, Any] | None = None) -> None:
    """Write the configuration as it was asked for, which a resumed run and a fork read. `origin` says where its model
    comes from."""
    values: dict[str, Any] = {ORIGIN: origin} if origin else {}
    values |= {**config.model_dump(mode="json"), "run_dir": str(path)}
    write_json(path / CONFIG, values)


def resumed_config(
    path: Path, flags: dict[str, Any], file: Path | None = None, *, finished: bool = False
) -> LeadConfig:
    """Return the configuration of the run in `path`, changed by the TOML `file` and then by `flags`. Raise UserError if
    there is no run, if they change a fixed setting, or if the run is finished, unless `finished` allows that. A run
    that an alarm stopped is not finished."""
    values, before = recorded_config(path)
    given = _given(flags, file)
    known = {name: value for name, value in values.items() if name not in given}
    if not known.get("port"):
        known["port"] = _last_port(path) or 0
    config = load_config(LeadConfig, file, {**flags, "run_dir": path}, before=known)
    # Model and data may have been moved: both have a digest, which is compared before anything is drawn (prompts.py).
    is_data = all(one.task.startswith(("jsonl:", "hf:")) for one in (config, before))
    for name in sorted(given.keys() - CHANGEABLE - {"model", *(["task"] if is_data else ())}):
        # Compare parsed values: a flag says --rewards numeric=1, and the record {"numeric": 1.0}.
        if getattr(config, name) != getattr(before, name):
            raise UserError(f"--{name.replace('_', '-')} cannot change when a run is resumed: begin a new one")
    rises = config.steps > before.steps or (config.target or 0.0) > (before.target or 0.0)
    more = rises or (config.max_cost or math.inf) > (before.max_cost or math.inf)
    if not (finished or more or _was_stopped(path)) and (path / SUMMARY).is_file():
        cost = f" or --max-cost with more than {before.max_cost:g}" if before.max_cost else ""
        raise UserError(f"the run in {path} is finished: pass --steps with more than {before.steps}{cost} to go on")
    return config


def recorded_config(path: Path) -> tuple[dict[str, Any], LeadConfig]:
    """Return the settings of a run, raw and parsed. Raise UserError if they are damaged."""
    values = read_values(path)
    if values.pop(ORIGIN, None):
        # A fork may have been moved, so its model is looked for inside its own directory.
        values["model"] = str(path / BASE)
    try:
        return values, load_config(LeadConfig, None, values)
    except UserError as error:
        raise _damaged(path, error) from error


def forked_config(
    path: Path, flags: dict[str, Any], file: Path | None = None, *, step: int | None = None, best: bool = False
) -> tuple[LeadConfig, Origin]:
    """Return the configuration of a new run that begins with the model of the run in `path`: that run's settings,
    changed by the TOML `file` and then by `flags`. Raise UserError if there is no run, if a model is named, or if both
    `best` and `step` are given."""
    (values, before), given = recorded_config(path), _given(flags, file)
    if "model" in given:
        raise UserError(f"--from says which model a run begins with, that of {path}: leave --model out")
    if best and step is not None:
        raise UserError("--best and --step name two models: give one of them")
    # The fork has a copy of the model and its own swarm.
    known = {name: value for name, value in values.items() if name not in ("model", "run_dir", "state_dir")}
    # Its model has another name now, and an adapter another rate by default.
    before = before.model_copy(update={"adapter": given.get("adapter", before.adapter)})
    known["learning_rate"] = before.resolved_learning_rate
    if is_served(path):
        known["port"] = 0  # The other run is still being led, so the fork needs another port
    task = given.get("task", known.get("task", ""))
    run_dir = Path(given.get("run_dir") or default_run_dir(task))
    config = load_config(LeadConfig, file, {**flags, "run_dir": run_dir, "model": str(run_dir / BASE)}, before=known)
    model = read_values(path).get(ORIGIN, {}).get("model", values["model"])
    return config, Origin(run=path, step=step, best=best, model=model)


def read_values(path: Path) -> dict[str, Any]:
    """Return the content of a run's config.json. Raise UserError if it is missing or damaged."""
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


def _given(flags: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """Return the settings that the user asks for. Flags win over the file."""
    return read_settings(LeadConfig, file) | {name: value for name, value in flags.items() if value is not None}


def _was_stopped(path: Path) -> bool:
    """Return whether an alarm ended the run early."""
    try:
        return bool(json.loads((path / SUMMARY).read_text()).get("stopped_by"))
    except (OSError, ValueError, AttributeError):
        return False


def _last_port(path: Path) -> int | None:
    """Return the port on which the run listened last, which its samplers know. None if it is unknown."""
    try:
        return urlsplit(str(json.loads((path / ADDRESS).read_text())["url"])).port
    except (OSError, ValueError, KeyError, TypeError):
        return None  # Missing or damaged
