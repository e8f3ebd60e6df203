"""Lines: several sequences of tokens that a model reads as one, in which what they begin with alike is there once.

A line is a tree, written down branch by branch: sequences are sorted, and of each one only what differs from the one
before it is added. A mask lets a token see its own sequence alone, and positions count within that. So a model whose
every layer attends to all tokens before computes what it would for each sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

MAX_SHARED_TOKENS = 2048
"""Of a line of several sequences. Its mask has the square of that in bytes, and kernels add it in float32: 16,384
tokens of such lines take 170 MB."""

MASKED_ATTENTION = 3
"""Attention to this many hidden widths of tokens costs what the matrices of a layer do: about 6 by its operations, of
which kernels with a mask do half as many in a second."""


@dataclass(frozen=True, slots=True)
class Line:
    """Sequences by their numbers that are computed as one line of `width` tokens."""

    numbers: tuple[int, ...]
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """A line. token_ids, positions: [width]. `indices` say of each sequence where in the line its tokens are, and
    `shared` how many of them were there before it."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    indices: list[torch.Tensor]
    shared: list[int]


def lines_of(inputs: Sequence[torch.Tensor], beyond: int, budget: int | None) -> list[Line]:
    """Put sequences, sorted, on lines of at most `budget` tokens. A token of a line of W costs `beyond` + W, so a
    sequence joins the line before it where that costs less than a line of its own."""
    most = min(MAX_SHARED_TOKENS, budget or MAX_SHARED_TOKENS)
    lines = list[Line]()
    for number in sorted(range(len(inputs)), key=lambda number: inputs[number].tolist()):
        length = len(inputs[number])
        if lines:
            last = lines[-1]
            width = last.width + length - _alike(inputs[last.numbers[-1]], inputs[number])
            apart = last.width * (beyond + last.width) + length * (beyond + length)
            if width <= most and width * (beyond + width) < apart:
                lines[-1] = Line((*last.numbers, number), width)
                continue
        lines.append(Line((number,), length))
    return lines


def lay(inputs: Sequence[torch.Tensor], *, packed: bool = False) -> Laid:
    """Write down a line; `packed`: whole sequences one after another, none of which shares anything."""
    shared = [0, *(0 if packed else _alike(one, other) for one, other in pairwise(inputs))]
    width, indices = 0, [torch.arange(0)]
    for one, common in zip(inputs, shared, strict=True):
        own = len(one) - common
        indices.append(torch.cat([indices[-1][:common], torch.arange(width, width + own)]))
        width += own
    return Laid(
        token_ids=torch.cat([one[common:] for one, common in zip(inputs, shared, strict=True)]),
        positions=torch.cat([torch.arange(common, len(one)) for one, common in zip(inputs, shared, strict=True)]),
        indices=indices[1:],
        shared=shared,
    )


def attention(lines: Sequence[Laid], width: int) -> torch.Tensor:
    """Which tokens (third) see which (last), boolean [lines, 1, width, width]: what their own sequences have before
    them, and themselves. Filling sees itself alone."""
    sees = torch.eye(width, dtype=torch.bool).repeat(len(lines), 1, 1)
    for line, own in zip(lines, sees, strict=True):
        for indices, shared in zip(line.indices, line.shared, strict=True):
            before = torch.ones(len(indices), len(indices), dtype=torch.bool).tril()
            own[indices[shared:, None], indices] = before[shared:]
    return sees[:, None]


def _alike(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many tokens both begin with."""
    both = min(len(one), len(other))
    differ = (one[:both] != other[:both]).nonzero()
    return int(differ[0]) if len(differ) else both
