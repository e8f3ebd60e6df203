"""`hf:DATASET[:CONFIG][@SPLIT]`: a data set of the Hugging Face hub, or a local directory or file in a known format.

A child process reads it and writes the questions as JSON Lines: the libraries for it take 130 MB, which the node would
otherwise keep in memory through the run.
"""

from __future__ import annotations

import csv
import glob
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.tasks.base import Task, TaskOptions
from swarm.tasks.functions import is_function
from swarm.tasks.questions import (
    MAX_QUESTIONS,
    WHOLE_ROW,
    Questions,
    QuestionTask,
    as_written,
    read_lines,
    read_questions,
)
from swarm.tasks.rewards import EXTRA

FETCH_S = 4 * 3600.0  # Longest wait for a data set: a large one over a slow line. Nothing else happens meanwhile.
FORMATS = (".csv", ".json", ".jsonl", ".parquet", ".arrow")
"""Files that are a whole data set. This module reads the text formats itself: the library reads 007 as 7, and None as
no value."""

TRAIN, HELD_OUT = "train.jsonl", "held_out.jsonl"  # HELD_OUT only if there is a test or validation split
MAX_SHOWN = 300  # Characters of a library's error message that are shown
_NAME = re.compile(r"(?P<path>.+?)(?::(?P<config>[\w.+-]+))?(?:@(?P<split>[\w.]+))?\Z")


def hub_task(options: TaskOptions, name: str) -> Task:
    """The task of the data set `name`, which is not fetched before its first question is asked for."""
    if not _is_text(Path(name)) and find_spec("datasets") is None:
        raise UserError(f"the task {options.name} needs a package that is not installed: {EXTRA}")
    if (match := _NAME.match(name)) is None:
        raise UserError(f"{options.name} names no data set: write hf:DATASET, hf:DATASET:CONFIG or hf:DATASET@SPLIT")
    # The name of a file may contain ":" or "@".
    where = (name, None, None) if Path(name).exists() else match.group("path", "config", "split")

    def read(options: TaskOptions) -> Questions:
        with tempfile.TemporaryDirectory(prefix="echo-node-") as directory:
            whole = options.columns == WHOLE_ROW
            others = whole or any(map(is_function, options.rewards))  # They may ask for other columns
            _run((*where, () if whole else options.columns, directory, others), options.name)
            train = read_questions(Path(directory, TRAIN), options, lambda row: f"{options.name}, row {row}")
            if not (path := Path(directory, HELD_OUT)).exists():
                return train
            other = read_questions(path, options, lambda row: f"{options.name}, held-out row {row}")
            return Questions(train=train.train, held_out=other.train, digest=train.digest + other.digest)

    return QuestionTask(options, f"questions of the data set {name}", read)


def _run(wanted: tuple[str | Sequence[str] | bool | None, ...], name: str) -> None:
    # Not -m: the package imports this module, so it would be loaded twice.
    program = "from swarm.tasks.hub import main; main()"
    command = [sys.executable, "-c", program, json.dumps(wanted)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{name} was not fetched within {FETCH_S / 3600:g} h") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"the process that reads it ended with {done.returncode}"]
        raise UserError(f"{name} cannot be read: {lines[-1]}")
    print(done.stdout, end="", file=sys.stderr)


def main() -> None:
    try:
        fetch(*json.loads(sys.argv[1]))
    except UserError as error:
        sys.exit(str(error))
    except UnicodeDecodeError as error:
        sys.exit(f"it is not UTF-8 ({error.reason} at byte {error.start:,}): save the file in that encoding")
    except (csv.Error, ValueError) as error:
        sys.exit(f"it cannot be read: {error}")


def fetch(
    path: str, config: str | None, split: str | None, columns: Sequence[str], directory: str, others: bool
) -> None:
    """Write the rows to train on, from `split` or else the train split, and the rows to hold out if there is a test or
    validation split. Write all columns if `others` are wanted. UserError in one line."""
    if _is_text(Path(path)):
        _write(TEXTS[Path(path).suffix](Path(path), columns), columns, Path(directory, TRAIN), others)
        return
    splits = _load(path, config)
    name = split or ("train" if "train" in splits else next(iter(splits)))
    if name not in splits or (split is None and name != "train" and len(splits) > 1):
        raise UserError(f"it has the splits {', '.join(splits)}: name one of them with @SPLIT")
    _write(_rows(splits[name], columns, others), columns, Path(directory, TRAIN), others)
    held_out = next((other for other in ("test", "validation") if other in splits and other != name), None)
    if held_out is not None:
        _write(_rows(splits[held_out], columns, others), columns, Path(directory, HELD_OUT), others)


def _load(name: str, config: str | None) -> dict[str, Any]:
    import datasets

    datasets.disable_progress_bars()
    path = Path(name)
    if path.is_file() and path.suffix not in FORMATS:
        raise UserError(f"a file of the format {path.suffix or path.name!r}: known are {', '.join(FORMATS)}")
    try:
        if path.is_file():
            found = datasets.load_dataset(path.suffix[1:], data_files=glob.escape(name))
        elif any((path / mark).exists() for mark in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(name)
        else:
            found = datasets.load_dataset(name, config)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise UserError(f"{type(error).__name__}: {lines[0][:MAX_SHOWN]}") from error
    return dict(found) if isinstance(found, dict) else {"train": found}


def _rows(rows: Any, columns: Sequence[str], others: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows, with these columns only unless `others` are wanted; a number of a class becomes the name of the
    class."""
    if len(rows) > MAX_QUESTIONS:
        raise UserError(f"it has {len(rows):,} rows; a task may have at most {MAX_QUESTIONS:,}")
    _check_columns(rows.column_names, columns)
    kept = rows if others else rows.select_columns([column for column in columns if column != "id"])
    kinds = {column: kept.features[column] for column in columns if column in kept.features}
    names = {column: kind.int2str for column, kind in kinds.items() if hasattr(kind, "int2str")}
    for column in names:
        print(f"{column!r} holds numbers of classes: the answer is the name of a class")
    for row in kept:
        yield row | {column: name(row[column]) for column, name in names.items() if row[column] is not None}


def _check_columns(has: Iterable[str], columns: Sequence[str]) -> None:
    for column in columns:
        if column not in has:
            raise UserError(f"it has no column {column!r}, only {', '.join(has)}: name them with columns")


def _csv_rows(path: Path, _: Sequence[str]) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(4 << 20)  # Characters of one value
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, strict=True)
        columns = next(lines, [])
        if len(set(named := list(filter(None, columns)))) < len(named):
            raise UserError(f"two of its columns have one name: {', '.join(columns)}")
        for values in filter(None, lines):
            if len(values) != len(columns):
                raise UserError(f"line {lines.line_num} has {len(values)} values for {len(columns)} columns")
            yield dict(zip(columns, values, strict=True))


def _json_rows(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows, with fractions as they are written in these columns alone."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        found, plain = as_written(text), json.loads(text)
    except json.JSONDecodeError:
        lines = [line.decode() for _, line in read_lines(path) if line.strip()]
        found, plain = [as_written(line) for line in lines], [json.loads(line) for line in lines]
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise UserError('it is not a list of rows, such as [{"prompt": "2+2=", "answer": "4"}]')
    for row, others in zip(found, plain, strict=True):
        yield others | {column: row[column] for column in columns if column in row}


def _is_text(path: Path) -> bool:
    return path.suffix in TEXTS and path.is_file()


TEXTS: Any = {".csv": _csv_rows, ".json": _json_rows, ".jsonl": _json_rows}


def _write(rows: Iterable[dict[str, Any]], columns: Sequence[str], file: Path, others: bool) -> None:
    """Write prompt and answer of each row, and `others`, without its id, which need not be unique in a data set."""
    with file.open("w", encoding="utf-8") as lines:
        for row in rows:
            _check_columns(row, columns)
            kept = {column: row[column] for column in columns}
            left_out = (*columns, "id", "held_out") if columns else ("held_out",)
            more = {name: row[name] for name in row if others and name not in left_out}
            written = json.dumps(kept, ensure_ascii=False, default=_is_no_text)[1:-1]
            written += ", " * bool(kept and more) + json.dumps(more, ensure_ascii=False, default=str)[1:-1]
            lines.write(f"{{{written}}}\n")


def _is_no_text(value: Any) -> None:
    raise UserError(f"a value is a {type(value).__name__}, neither text nor a number: make it text in the data set")
