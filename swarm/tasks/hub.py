"""`hf:DATASET[:CONFIG][@SPLIT]`: a data set of the Hugging Face hub, or a directory or a file in a format it knows."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import msgspec

from swarm.errors import UserError
from swarm.tasks.base import Task, TaskOptions
from swarm.tasks.jsonl import read_questions
from swarm.tasks.questions import MAX_QUESTIONS, Questions, QuestionTask
from swarm.tasks.rewards import EXTRA

FETCH_S = 4 * 3600.0
"""Longest wait for a data set: a large one over a slow line. Nothing else has been started meanwhile."""

TRAIN, HELD_OUT = "train.jsonl", "held_out.jsonl"
"""What the fetching process writes, the latter if the data set has a split for it."""

BAD_INPUT = 2
_NAME = re.compile(r"(?P<path>.+?)(?::(?P<config>[\w.+-]+))?(?:@(?P<split>[\w.]+))?\Z")


class Fetch(msgspec.Struct, frozen=True):
    """What the fetching process is asked for: rows of `split`, or of a train split if it is None."""

    path: str
    config: str | None
    split: str | None
    prompt_column: str
    answer_column: str
    most_rows: int
    directory: str


def hub_task(options: TaskOptions, name: str) -> Task:
    """The task of the data set `name`, which is fetched when its first question is asked for."""
    if find_spec("datasets") is None:
        raise UserError(f"the task {options.name} needs a package that is not installed: {EXTRA}")
    if (match := _NAME.match(name)) is None:
        raise UserError(f"{options.name} names no data set: write hf:DATASET, hf:DATASET:CONFIG or hf:DATASET@SPLIT")

    def read(options: TaskOptions) -> Questions:
        return _fetched(options, match["path"], match["config"], match["split"])

    return QuestionTask(options, f"questions of the data set {name}", read)


def _fetched(options: TaskOptions, path: str, config: str | None, split: str | None) -> Questions:
    """In a process of its own: what reads data sets is 130 MB that a node would carry through the run."""
    with tempfile.TemporaryDirectory(prefix="echo-node-") as directory:
        wanted = Fetch(
            path=path,
            config=config,
            split=split,
            prompt_column=options.prompt_column,
            answer_column=options.answer_column,
            most_rows=MAX_QUESTIONS,
            directory=directory,
        )
        command = [sys.executable, "-m", "swarm.tasks.fetch", msgspec.json.encode(wanted).decode()]
        try:
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=FETCH_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise UserError(f"{options.name} was not fetched within {FETCH_S / 3600:g} h") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"the process that reads it ended with {done.returncode}"]
            raise UserError(f"{options.name} cannot be read: {lines[-1]}")
        train, digest = read_questions(Path(directory, TRAIN), options, at=lambda row: f"{options.name}, row {row}")
        if not Path(directory, HELD_OUT).exists():
            return Questions(train=train, held_out=None, digest=digest)
        held_out, other = read_questions(
            Path(directory, HELD_OUT), options, at=lambda row: f"{options.name}, held-out row {row}"
        )
        return Questions(train=train, held_out=held_out, digest=digest + other)
