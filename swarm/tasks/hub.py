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

from swarm.errors import UserError
from swarm.tasks.base import Task, TaskOptions
from swarm.tasks.questions import MAX_QUESTIONS, Questions, QuestionTask, read_questions
from swarm.tasks.rewards import EXTRA

FETCH_S = 4 * 3600.0  # Longest wait for a data set: a large one over a slow line. Nothing else runs meanwhile.
FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
"""Files that are a data set by themselves, and what reads them."""

TRAIN, HELD_OUT = "train.jsonl", "held_out.jsonl"  # HELD_OUT only if there is a test or validation split
MAX_SHOWN = 300  # Characters of a library's message that a fault repeats
_NAME = re.compile(r"(?P<path>.+?)(?::(?P<config>[\w.+-]+))?(?:@(?P<split>[\w.]+))?\Z")


def hub_task(options: TaskOptions, name: str) -> Task:
    """The task of the data set `name`, which is fetched when its first question is asked for."""
    if find_spec("datasets") is None:
        raise UserError(f"the task {options.name} needs a package that is not installed: {EXTRA}")
    if (match := _NAME.match(name)) is None:
        raise UserError(f"{options.name} names no data set: write hf:DATASET, hf:DATASET:CONFIG or hf:DATASET@SPLIT")

    def read(options: TaskOptions) -> Questions:
        with tempfile.TemporaryDirectory(prefix="echo-node-") as directory:
            where = match["path"], match["config"], match["split"]
            _run((*where, options.prompt_column, options.answer_column, directory), options.name)
            train = read_questions(Path(directory, TRAIN), options, lambda row: f"{options.name}, row {row}")
            if not (path := Path(directory, HELD_OUT)).exists():
                return train
            other = read_questions(path, options, lambda row: f"{options.name}, held-out row {row}")
            return Questions(train=train.train, held_out=other.train, digest=train.digest + other.digest)

    return QuestionTask(options, f"questions of the data set {name}", read)


def _run(wanted: tuple[str | None, ...], name: str) -> None:
    # Not -m: this module is loaded by its package, and would be there twice.
    program = "from swarm.tasks.hub import main; main()"
    command = [sys.executable, "-c", program, json.dumps(wanted)]
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=FETCH_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{name} was not fetched within {FETCH_S / 3600:g} h") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"the process that reads it ended with {done.returncode}"]
        raise UserError(f"{name} cannot be read: {lines[-1]}")


def main() -> None:
    try:
        fetch(*json.loads(sys.argv[1]))
    except UserError as error:
        sys.exit(str(error))


def fetch(
    path: str, config: str | None, split: str | None, prompt_column: str, answer_column: str, directory: str
) -> None:
    """Write the rows to train on, of `split` or of a train split, and those to hold out if there is a split for them.
    UserError in one line."""
    splits = _load(path, config)
    name = split or ("train" if "train" in splits else next(iter(splits)))
    if name not in splits or (split is None and name != "train" and len(splits) > 1):
        raise UserError(f"it has the splits {', '.join(splits)}: name one of them with @SPLIT")
    columns = {"prompt_column": prompt_column, "answer_column": answer_column}
    _write(splits[name], columns, Path(directory, TRAIN))
    held_out = next((other for other in ("test", "validation") if other in splits and other != name), None)
    if held_out is not None:
        _write(splits[held_out], columns, Path(directory, HELD_OUT))


def _load(name: str, config: str | None) -> dict[str, Any]:
    import datasets

    datasets.disable_progress_bars()
    path = Path(name)
    if path.is_file() and path.suffix not in FORMATS:
        raise UserError(f"a file of the format {path.suffix or path.name!r}: known are {', '.join(FORMATS)}")
    try:
        if path.is_file():
            found = datasets.load_dataset(FORMATS[path.suffix], data_files=name)
        elif any((path / mark).exists() for mark in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(name)
        else:
            found = datasets.load_dataset(name, config)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise UserError(f"{type(error).__name__}: {lines[0][:MAX_SHOWN]}") from error
    return dict(found) if isinstance(found, dict) else {"train": found}


def _write(rows: Any, columns: dict[str, str], file: Path) -> None:
    for setting, column in columns.items():
        if column not in rows.column_names:
            has = ", ".join(rows.column_names)
            raise UserError(f"it has no column {column!r}, only {has}: name one with {setting}")
    if len(rows) > MAX_QUESTIONS:
        raise UserError(f"it has {len(rows):,} rows; {MAX_QUESTIONS:,} is the most that a task may have")
    # The ids of a data set need not be unique, and say less than the question's own digest.
    kept = [column for column in columns.values() if column != "id"]
    with file.open("w", encoding="utf-8") as lines:
        for row in rows.select_columns(kept):
            lines.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
