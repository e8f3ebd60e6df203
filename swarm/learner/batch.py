"""Rows of prompt and completion, and the micro-batches that one forward pass takes.

Padded: each row is a line of the micro-batch, filled on the right to the longest; attention is causal, so no token sees
the filling and no mask is needed. Packed: all rows are in one line, with positions that begin at 0 in each; attention
must keep the rows apart (Policy.settle checks that the model does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch.nn.utils.rnn import pad_sequence

from swarm.learner.messages import ComputeRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rollout, or what one player of an episode reads and says; on the CPU. token_ids: [prompt + completion].

    `drawn` are the places in it of the tokens that count, in order: none of an environment's. None are all after the
    prompt. behaviour, mask, proximal, reference, and an advantage that is not the same for all: [drawn]. `proximal` and
    `reference` are log-probs of the policy at the start of the step, and of the model that the run began with; None
    where the objective asks for none. `samplers` are the nodes that claim `behaviour`, and `drawn_by` says which one
    does so of each token; None is the first.
    """

    token_ids: torch.Tensor
    prompt_tokens: int
    behaviour: torch.Tensor
    mask: torch.Tensor
    advantage: float | torch.Tensor
    staleness: int
    samplers: tuple[str, ...] = ("",)
    drawn: torch.Tensor | None = None
    drawn_by: torch.Tensor | None = None
    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None

    @property
    def places(self) -> torch.Tensor:
        return torch.arange(self.prompt_tokens, len(self.token_ids)) if self.drawn is None else self.drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward pass takes, and what the objective needs of every drawn token, in order.

    token_ids, positions: [lines, width]; positions are None where each line holds one row. `places` are flat indices
    into [lines * width] of the positions that predict the drawn tokens; places, targets and all after them: [tokens].
    `counts` are the drawn tokens of each row, and `numbers` say which rows they are. `voices` number the samplers of
    one row after those of another, `voices_of` says how many each row has.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor | None
    places: torch.Tensor
    targets: torch.Tensor
    behaviour: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    staleness: torch.Tensor
    voices: torch.Tensor
    proximal: torch.Tensor | None
    reference: torch.Tensor | None
    counts: tuple[int, ...]
    voices_of: tuple[int, ...]
    numbers: tuple[int, ...]

    def by_row(self, values: torch.Tensor) -> dict[int, torch.Tensor]:
        """`values`, [tokens], by the number of the row."""
        return dict(zip(self.numbers, values.split(self.counts), strict=True))


def without_weight(row: Row) -> Row:
    """A row as long as `row` that changes no gradient and no figure, whatever it holds."""
    zeros = torch.zeros_like(row.behaviour)
    proximal, reference = (None if former is None else zeros for former in (row.proximal, row.reference))
    mask = torch.zeros_like(row.mask)
    return replace(row, behaviour=zeros, mask=mask, advantage=0.0, proximal=proximal, reference=reference)


Numbered = tuple[int, Row]


def micro_batches(rows: Sequence[Row], rules: ComputeRules, device: torch.device) -> list[MicroBatch]:
    """Cut `rows` so that a forward pass takes at most `rules.tokens_per_micro_batch` tokens, filling included; None is
    no limit. A longer row is a micro-batch of its own."""
    if not rows:
        return []
    packed, budget = bool(rules.packing), rules.tokens_per_micro_batch
    numbered = list(enumerate(rows))
    parts = [numbered] if budget is None else _cut(numbered, budget, packed=packed)
    return [_micro_batch(part, device, packed=packed) for part in parts]


def _cut(numbered: Sequence[Numbered], budget: int, *, packed: bool) -> list[list[Numbered]]:
    """Take the longest rows first: the largest micro-batch, and with it the peak of memory, comes first."""
    parts: list[list[Numbered]] = []
    left = 0
    for item in sorted(numbered, key=lambda item: -len(item[1].token_ids)):
        tokens = len(item[1].token_ids)
        needed = tokens if packed or not parts else len(parts[-1][0][1].token_ids)
        if not parts or needed > left:
            parts.append([])
            needed, left = tokens, budget
        parts[-1].append(item)
        left -= needed
    return parts


def _micro_batch(numbered: Sequence[Numbered], device: torch.device, *, packed: bool) -> MicroBatch:
    numbers, rows = zip(*numbered, strict=True)
    lengths = [len(row.token_ids) for row in rows]
    drawn = [row.places for row in rows]
    counts = tuple(map(len, drawn))
    voices_of = tuple(len(row.samplers) for row in rows)
    if packed:
        token_ids = torch.cat([row.token_ids for row in rows])[None]
        positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
        starts = list(accumulate(lengths, initial=0))[:-1]
    else:
        token_ids = pad_sequence([row.token_ids for row in rows], batch_first=True)
        positions = None
        starts = [line * max(lengths) for line in range(len(rows))]
    places = [start + own - 1 for own, start in zip(drawn, starts, strict=True)]
    advantages = [_each(row.advantage, count) for row, count in zip(rows, counts, strict=True)]
    before = accumulate(voices_of, initial=0)
    voices = [at + _each(row.drawn_by, count) for row, count, at in zip(rows, counts, before, strict=False)]
    repeats = torch.tensor(counts)
    return MicroBatch(
        token_ids=token_ids.to(device),
        positions=positions,
        places=torch.cat(places).to(device),
        targets=torch.cat([row.token_ids[own] for row, own in zip(rows, drawn, strict=True)]).to(device),
        behaviour=torch.cat([row.behaviour for row in rows]).to(device),
        mask=torch.cat([row.mask for row in rows]).to(device),
        advantages=torch.cat(advantages).to(device),
        staleness=torch.tensor([row.staleness for row in rows]).repeat_interleave(repeats).to(device),
        voices=torch.cat(voices).to(device),
        proximal=_flat([row.proximal for row in rows], device),
        reference=_flat([row.reference for row in rows], device),
        counts=counts,
        voices_of=voices_of,
        numbers=numbers,
    )


def _each(value: float | torch.Tensor | None, count: int) -> torch.Tensor:
    """The value of each token; None is the number 0."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.zeros(count, dtype=torch.long) if value is None else torch.full((count,), value)


def _flat(parts: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there).to(device) if len(there) == len(parts) else None
