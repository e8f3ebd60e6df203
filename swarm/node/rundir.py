"""A run directory: made for a new run, or opened again to resume one."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from swarm.config import LeadConfig
from swarm.configfile import load_config, read_toml
from swarm.errors import UserError

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
SUMMARY = "summary.json"
"""Written last of all: where it is, the run is over and its samplers know."""

LONGEST_NAME = 100
"""Characters of a run directory's name without the time; file systems allow 255 bytes."""

LOCK = ".lock"
"""Held by the learner that leads the run; the system takes it back when the process dies."""


def named_after(task: str) -> str:
    """A directory's name that says which task: of jsonl:data/x.jsonl, jsonl-data-x.jsonl."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", task).strip("-.")[-LONGEST_NAME:]


def directory_of(config: LeadConfig) -> Path:
    """Where a run of `config` that begins now is kept."""
    return config.run_dir or Path("runs") / (named_after(config.task) + time.strftime("-%Y%m%d-%H%M%S"))


def create_run_directory(path: Path, config: LeadConfig) -> None:
    """Make `path` for a new run and write its configuration. UserError if it holds anything already."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        refuse_used(path)
        write_config(path, config)
    except OSError as error:
        raise UserError(f"cannot write to the run directory {path}: {error.strerror}") from error


def refuse_used(path: Path) -> None:
    """UserError if `path` holds anything, which a new run would be mixed with."""
    if path.exists() and any(path.iterdir()):
        raise UserError(
            f"{path} already holds a run or other files: choose another --run-dir, or go on with --resume {path}"
        )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be the one learner of the run in `path`. UserError if another is."""
    try:
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
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
    write_config(path, config)


def write_config(path: Path, config: LeadConfig) -> None:
    """The resolved configuration, replaced whole: a run that is resumed reads it."""
    values = {**config.model_dump(mode="json"), "run_dir": str(path), "learning_rate": config.resolved_learning_rate}
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
    try:
        values: dict[str, Any] = json.loads((path / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a run directory: its {CONFIG} cannot be read") from error
    given = read_toml(file) if file else {}
    given.update({name: value for name, value in flags.items() if value is not None})
    known = {name: value for name, value in values.items() if name not in given}
    if not known.get("port"):
        known["port"] = _last_port(path) or 0
    config = load_config(LeadConfig, file, {**flags, "run_dir": path}, before=known)
    before = load_config(LeadConfig, None, values)
    for name in sorted(given.keys() - CHANGEABLE):
        # As both were read: a flag says --rewards numeric=1, and the record {"numeric": 1.0}.
        if getattr(config, name) != getattr(before, name):
            raise UserError(f"--{name.replace('_', '-')} cannot change when a run is resumed: begin a new one")
    rises = config.steps > values["steps"] or (config.target or 0.0) > (values["target"] or 0.0)
    more = rises or (config.max_cost or math.inf) > (values.get("max_cost") or math.inf)
    if not (finished or more or _was_stopped(path)) and (path / SUMMARY).is_file():
        most = values.get("max_cost")
        cost = f" or --max-cost with more than {most:g}" if most else ""
        raise UserError(f"the run in {path} is finished: pass --steps with more than {values['steps']}{cost} to go on")
    return config


def _was_stopped(path: Path) -> bool:
    """Whether an alarm ended the run before its time."""
    try:
        return bool(json.loads((path / SUMMARY).read_text()).get("stopped_by"))
    except (OSError, ValueError):
        return False


def _last_port(path: Path) -> int | None:
    """The port that samplers know, in place of any free one."""
    try:
        return urlsplit(str(json.loads((path / "node.json").read_text())["url"])).port
    except (OSError, ValueError, KeyError):
        return None
