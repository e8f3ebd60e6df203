"""`hf:DATASET[:CONFIG][@SPLIT]`: a data set of the Hugging Face hub, or a directory or a file in a format it knows.

A process of its own reads it and writes the questions as JSON Lines: the libraries for it are 130 MB that the node
would carry through the run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from swarm.errors import UserError
from swarm.tasks.base import Task, TaskOptions
from swarm.tasks.questions import MAX_QUESTIONS, Questions, QuestionTask, read_questions
from swarm.tasks.rewards import EXTRA

FETCH_S = 4 * 3600.0  # Longest wait for a data set: a large one over a slow line. Nothing else runs meanwhile.
FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
"""Files that are a data set by themselves, and what reads them."""

TRAIN, HELD_OUT = "train.jsonl", "held_out.jsonl"
"""The files that the process writes; the second one only if the data set has a test or validation split."""

MAX_SHOWN = 300  # Characters of a library's message that a fault repeats
_NAME = re.compile(r"(?P<path>.+?)(?::(?P<config>[\w.+-]+))?(?:@(?P<split>[\w.]+))?\Z")


class Fetch(msgspec.Struct, frozen=True):
    """What the process is asked for. `split` None: a train split."""

    path: str
    config: str | None
    split: str | None
    prompt_column: str
    answer_column: str
    directory: str


def hub_task(options: TaskOptions, name: str) -> Task:
    """The task of the data set `name`, which is fetched when its first question is asked for."""
    if find_spec("datasets") is None:
        raise UserError(f"the task {options.name} needs a package that is not installed: {EXTRA}")
    if (match := _NAME.match(name)) is None:
        raise UserError(f"{options.name} names no data set: write hf:DATASET, hf:DATASET:CONFIG or hf:DATASET@SPLIT")

    def read(options: TaskOptions) -> Questions:
        with tempfile.TemporaryDirectory(prefix="echo-node-") as directory:
            columns = options.prompt_column, options.answer_column
            _run(Fetch(match["path"], match["config"], match["split"], *columns, directory), options.name)
            train, digest = read_questions(Path(directory, TRAIN), options, at=lambda row: f"{options.name}, row {row}")
            if not Path(directory, HELD_OUT).exists():
                return Questions(train=train, held_out=None, digest=digest)
            held_out, other = read_questions(
                Path(directory, HELD_OUT), options, at=lambda row: f"{options.name}, held-out row {row}"
            )
            return Questions(train=train, held_out=held_out, digest=digest + other)

    return QuestionTask(options, f"questions of the data set {name}", read)


def _run(wanted: Fetch, name: str) -> None:
    """Have a process `fetch` what is wanted."""
    # Not -m: this module is loaded by its package, and would be there twice.
    program = "from swarm.tasks.hub import main; main()"
    command = [sys.executable, "-c", program, msgspec.json.encode(wanted).decode()]
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=FETCH_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{name} was not fetched within {FETCH_S / 3600:g} h") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"the process that reads it ended with {done.returncode}"]
        raise UserError(f"{name} cannot be read: {lines[-1]}")


def main() -> None:
    """The process."""
    try:
        fetch(msgspec.json.decode(sys.argv[1], type=Fetch))
    except UserError as error:
        sys.exit(str(error))


def fetch(wanted: Fetch) -> None:
    """Write the rows to train on, and those to hold out if there is a split for them. UserError in one line."""
    splits = _load(wanted)
    name = wanted.split or ("train" if "train" in splits else next(iter(splits)))
    if name not in splits or (wanted.split is None and name != "train" and len(splits) > 1):
        raise UserError(f"it has the splits {', '.join(splits)}: name one of them with @SPLIT")
    _write(splits[name], wanted, TRAIN)
    held_out = next((other for other in ("test", "validation") if other in splits and other != name), None)
    if held_out is not None:
        _write(splits[held_out], wanted, HELD_OUT)


def _load(wanted: Fetch) -> dict[str, Any]:
    import datasets

    datasets.disable_progress_bars()
    path = Path(wanted.path)
    if path.is_file() and path.suffix not in FORMATS:
        raise UserError(f"a file of the format {path.suffix or path.name!r}: known are {', '.join(FORMATS)}")
    try:
        if path.is_file():
            found = datasets.load_dataset(FORMATS[path.suffix], data_files=wanted.path)
        elif any((path / mark).exists() for mark in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(wanted.path)
        else:
            found = datasets.load_dataset(wanted.path, wanted.config)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise UserError(f"{type(error).__name__}: {lines[0][:MAX_SHOWN]}") from error
    return dict(found) if isinstance(found, dict) else {"train": found}


def _write(rows: Any, wanted: Fetch, name: str) -> None:
    columns = rows.column_names
    for column, setting in ((wanted.prompt_column, "prompt_column"), (wanted.answer_column, "answer_column")):
        if column not in columns:
            raise UserError(f"it has no column {column!r}, only {', '.join(columns)}: name one with {setting}")
    if len(rows) > MAX_QUESTIONS:
        raise UserError(f"it has {len(rows):,} rows; {MAX_QUESTIONS:,} is the most that a task may have")
    # The ids of a data set need not be unique, and say less than the question's own digest.
    kept = [column for column in (wanted.prompt_column, wanted.answer_column) if column != "id"]
    with Path(wanted.directory, name).open("w", encoding="utf-8") as file:
        for row in rows.select_columns(kept):
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
