"""Writes examples/sums.jsonl: sums and differences for a real model to continue, after two worked examples.

    bin/python -m benchmarks.sums --to examples/sums.jsonl

All sums and differences of two numbers of 1 to 30 with a result of 0 or more are asked. The split goes by unordered
pairs of numbers: if {3, 5} is held out, then so are 3+5, 5+3 and 5-3. The pairs of the two worked examples are on
neither side, because every prompt shows their answers.

What the sides still share, so that a right answer need not be calculated: every number; neighbours of every question,
such as 3+6; and the same fact under another pair, because 8-5=3 belongs to the pair {5, 8} and says what 3+5 is. Such a
fact can be trained on while the question itself is held out.
"""

from __future__ import annotations

import argparse
import json
from itertools import combinations_with_replacement
from pathlib import Path
from random import Random

LARGEST = 30
WORKED = "3+4=7\n19-8=11\n"
WORKED_PAIRS = ((3, 4), (8, 19))
HELD_OUT_SHARE = 0.24
"""Of the pairs: 328 questions, of which a run asks 300."""

Pair = tuple[int, int]
"""The smaller number first."""


def questions(low: int, high: int) -> list[tuple[str, int]]:
    """All that is asked of a pair, and the answers."""
    sums = [(f"{low}+{high}=", low + high), (f"{high}+{low}=", low + high)]
    return [*sums[: 1 + (low != high)], (f"{high}-{low}=", high - low)]


def sides() -> tuple[list[Pair], frozenset[Pair]]:
    """All pairs that are asked about, and those of them that are held out."""
    numbers = range(1, LARGEST + 1)
    pairs = [pair for pair in combinations_with_replacement(numbers, 2) if pair not in WORKED_PAIRS]
    return pairs, frozenset(Random("sums").sample(pairs, round(HELD_OUT_SHARE * len(pairs))))


def lines() -> list[str]:
    """As `jsonl:FILE` reads them."""
    pairs, held_out = sides()
    rows = (
        {"prompt": WORKED + asked, "answer": str(answer), "held_out": pair in held_out}
        for pair in pairs
        for asked, answer in questions(*pair)
    )
    return [json.dumps(row) + "\n" for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write sums and differences as questions for a real model.")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE")
    file = parser.parse_args().to
    written, (pairs, held_out) = lines(), sides()
    file.write_text("".join(written))
    count = sum('"held_out": true' in line for line in written)
    print(
        f"{file}: {len(written) - count:,} questions of {len(pairs) - len(held_out)} pairs to train on, "
        f"{count} of {len(held_out)} held out"
    )


if __name__ == "__main__":
    main()
