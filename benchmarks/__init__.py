"""Benchmarks, one a figure; and what they share: how they are asked, and how they say what they found."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any, TypeVar

Figures = dict[str, Any]
T = TypeVar("T")


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser that shows a module's own words, with the flag --json."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="all figures as one JSON object in the last line")
    return parser


def listed(of: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Reads the value of a flag that takes several, with commas."""
    return lambda text: [of(one) for one in text.split(",")]


def ended(options: argparse.Namespace, figures: Figures, *, met: bool = True) -> int:
    """Print all figures if they are asked for; the exit status."""
    if options.json:
        said(figures)
    return 0 if met else 1


def said(figures: T) -> T:
    """Print a line of JSON at once."""
    print(json.dumps(figures), flush=True)
    return figures
