"""Draws the last completions of a batch several tokens in a pass, from drafts, and changes none of them.

A pass of a model over a few tokens of a completion takes about as long as over one: it waits for the weights. So what
followed the same words before, in the prompt or in any completion of the batch, is tried as a draft. A drafted token is
right if and only if it is the arg max of logit and noise, as each draw is (models/draws.py): there is no second
distribution, as in speculative decoding with rejection, and an audit sees no difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache

DRAFTED_ROWS = 2  # Completions drawn so, when no more are left: with more, a pass has other tokens to fill its time
DRAFT_TOKENS = 4  # A pass over five takes a twentieth longer than over one; the fifth draft is seldom right
NGRAM = 3  # Tokens of context by which a draft is found, at most
TRIED, LEAST_GAIN = 16, 1.1  # Passes with drafts after which a line goes on without, unless each gave so many tokens

Choose = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Draws tokens: from logits, [n, vocabulary], the numbers of their completions and their places in these, [n]."""

IsOver = Callable[[int, list[int]], bool]
"""Says whether a completion, by its number, has ended with its last token."""


class Ngrams:
    """What followed each few tokens, most recently."""

    def __init__(self, texts: Sequence[list[int]]) -> None:
        self._next: dict[tuple[int, ...], tuple[list[int], int]] = {}
        for text in texts:
            for end in range(1, len(text)):
                self.note(text, end)

    def note(self, text: list[int], end: int) -> None:
        """Take it that `text[end]` follows what stands before it."""
        for length in range(1, min(NGRAM, end) + 1):
            self._next[tuple(text[end - length : end])] = text, end

    def draft(self, text: list[int]) -> list[int]:
        """Return what may follow a text."""
        known = (self._next.get(tuple(text[-length:])) for length in range(NGRAM, 0, -1))
        source, at = next(filter(None, known), (text, len(text)))
        return source[at : at + DRAFT_TOKENS]


@dataclass(slots=True)
class Line:
    """A completion under way: its number, the prompt and what was drawn, the draft of a pass and how many tokens that
    gave, and the sums over passes with drafts."""

    row: int
    text: list[int]
    prompt_tokens: int
    draft: list[int] = field(default_factory=list)
    taken: int = 0
    passes: int = 0
    gained: int = 0


def finish(
    model: Any,
    cache: DynamicCache,
    seen: torch.Tensor,
    lines: list[Line],
    ngrams: Ngrams,
    choose: Choose,
    is_over: IsOver,
    *,
    until: float,
) -> None:
    """Draw `lines` to their ends, or until a monotonic time. The cache has all but the last token of each; `seen` masks
    what is in it, [lines, width]."""
    while lines and time.monotonic() < until:
        for line in lines:
            is_worth_it = line.passes < TRIED or line.gained >= LEAST_GAIN * line.passes
            line.draft, line.taken = ngrams.draft(line.text) if is_worth_it else [], 0
        width = 1 + max(len(line.draft) for line in lines)
        given = torch.tensor([[line.text[-1], *line.draft, *[0] * width][:width] for line in lines])
        logits = model(
            input_ids=given.to(seen.device),
            attention_mask=pad(seen, (0, width), value=1),
            position_ids=seen.sum(1, keepdim=True) + torch.arange(width, device=seen.device),
            past_key_values=cache,
            use_cache=True,
        ).logits
        left = _take(lines, logits, ngrams, choose, is_over)
        taken = torch.tensor([line.taken for line in lines], device=seen.device)[:, None]
        cache.crop(seen.shape[1] + int(taken.max()))
        seen = torch.cat([seen, (torch.arange(int(taken.max()), device=seen.device) < taken).to(seen.dtype)], 1)
        if 0 < len(left) < len(lines):
            cache.batch_select_indices(torch.tensor(left, device=seen.device))
            seen = seen[left]
        lines = [lines[at] for at in left]


def _take(lines: list[Line], logits: torch.Tensor, ngrams: Ngrams, choose: Choose, is_over: IsOver) -> list[int]:
    """Draw what follows each line as far as its draft is right, and one token more. Return which are not over."""
    going, over = list(range(len(lines))), set[int]()
    for place in range(logits.shape[1]):
        ends = [(lines[at].row, len(lines[at].text) - lines[at].prompt_tokens) for at in going]
        rows, places = torch.tensor(ends, device=logits.device).unbind(1)
        right = []
        for at, token in zip(going, choose(logits[going, place], rows, places).tolist(), strict=True):
            line = lines[at]
            line.text.append(token)
            ngrams.note(line.text, len(line.text) - 1)
            line.taken += 1
            if is_over(line.row, line.text[line.prompt_tokens :]):
                over.add(at)
            elif line.draft[place : place + 1] == [token]:
                right.append(at)
        if not (going := right):
            break
    for line in lines:
        line.passes, line.gained = line.passes + bool(line.draft), line.gained + line.taken * bool(line.draft)
    return [at for at in range(len(lines)) if at not in over]
