"""The process that reads a data set for a task: `python -m swarm.tasks.fetch JSON`. Writes questions as JSON Lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from swarm.errors import UserError
from swarm.tasks.hub import BAD_INPUT, HELD_OUT, TRAIN, Fetch

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
"""Files that are a data set by themselves, and what reads them."""

HELD_OUT_SPLITS = ("test", "validation")  # Splits that nothing is trained on, the first there is
MAX_SHOWN = 300  # Characters of a library's words that a fault repeats


def main() -> None:
    wanted = msgspec.json.decode(sys.argv[1], type=Fetch)
    try:
        fetch(wanted)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(BAD_INPUT)


def fetch(wanted: Fetch) -> None:
    """Write the rows to train on, and those to hold out if there is a split for them. UserError in one line."""
    splits = _load(wanted)
    name = wanted.split or ("train" if "train" in splits else next(iter(splits)))
    if name not in splits or (wanted.split is None and name != "train" and len(splits) > 1):
        raise UserError(f"it has the splits {', '.join(splits)}: name one of them with @SPLIT")
    _write(splits[name], wanted, Path(wanted.directory, TRAIN))
    for other in HELD_OUT_SPLITS:
        if other in splits and other != name:
            _write(splits[other], wanted, Path(wanted.directory, HELD_OUT))
            break


def _load(wanted: Fetch) -> dict[str, Any]:
    import datasets

    datasets.disable_progress_bars()
    path = Path(wanted.path)
    try:
        if path.is_file():
            if path.suffix not in FORMATS:
                raise UserError(f"a file of the format {path.suffix or path.name!r}: known are {', '.join(FORMATS)}")
            found = datasets.load_dataset(FORMATS[path.suffix], data_files=wanted.path)
        elif path.is_dir() and any((path / mark).exists() for mark in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(wanted.path)
        else:
            found = datasets.load_dataset(wanted.path, wanted.config)
    except UserError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise UserError(f"{type(error).__name__}: {lines[0][:MAX_SHOWN]}") from error
    return dict(found) if isinstance(found, dict) else {"train": found}


def _write(rows: Any, wanted: Fetch, path: Path) -> None:
    columns = rows.column_names
    for column, setting in ((wanted.prompt_column, "prompt_column"), (wanted.answer_column, "answer_column")):
        if column not in columns:
            raise UserError(f"it has no column {column!r}, only {', '.join(columns)}: name one with {setting}")
    if len(rows) > wanted.most_rows:
        raise UserError(f"it has {len(rows):,} rows; {wanted.most_rows:,} is the most that a task may have")
    names = [name for name in (wanted.prompt_column, wanted.answer_column) if name != "id"]
    with path.open("w", encoding="utf-8") as file:
        # An id of the data set's need not be unique, and says less than the question's own digest.
        for row in rows.select_columns(names):
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


if __name__ == "__main__":
    main()
