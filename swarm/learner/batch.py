"""Rows of prompt and completion, and the micro-batches that one forward pass takes.

Under a budget of tokens rows are taken from the longest to the shortest, so that those of one micro-batch are about as
long as one another. Padded: each row is a line of the micro-batch, filled on the right to the longest; attention is
causal, so no token sees the filling and no mask is needed. Packed: all rows in one line, with positions that begin at 0
with each; attention must keep the rows apart (Policy.settle checks that the model does). The same rows are always cut
in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from swarm.learner.messages import ComputeRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rollout, on the CPU. token_ids: [prompt + completion]; behaviour, mask, proximal, reference: [completion].

    `proximal` and `reference` are log-probs of the policy as it was at the start of the step, and of the model that
    the run began with; None where the objective asks for none. `sampler` is the node whose claims `behaviour` are.
    """

    token_ids: torch.Tensor
    prompt_tokens: int
    behaviour: torch.Tensor
    mask: torch.Tensor
    advantage: float
    staleness: int
    sampler: str = ""
    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward pass takes, and flat, for every completion token in order, what the objective needs.

    token_ids, positions: [lines, width]; positions are None where each line holds one row, counted from 0. `places` are
    flat indices into [lines * width] of the positions that predict the completion tokens; places, targets and all after
    them: [tokens]. `counts` are the completion tokens of each row and `numbers` the places of the rows in what was cut.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor | None
    places: torch.Tensor
    targets: torch.Tensor
    behaviour: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    staleness: torch.Tensor
    proximal: torch.Tensor | None
    reference: torch.Tensor | None
    counts: tuple[int, ...]
    numbers: tuple[int, ...]

    def by_row(self, values: torch.Tensor) -> dict[int, torch.Tensor]:
        """`values`, [tokens], by the number of the row."""
        return dict(zip(self.numbers, values.split(self.counts), strict=True))


def without_weight(row: Row) -> Row:
    """A row as long as `row` that changes no gradient and no figure, whatever it holds."""
    nothing = torch.zeros_like(row.behaviour)
    return replace(
        row,
        behaviour=nothing,
        mask=torch.zeros_like(row.mask),
        advantage=0.0,
        proximal=None if row.proximal is None else nothing,
        reference=None if row.reference is None else nothing,
    )


Numbered = tuple[int, Row]


def micro_batches(rows: Sequence[Row], rules: ComputeRules, device: torch.device) -> list[MicroBatch]:
    """`rows` cut so that one forward pass takes at most `rules.tokens_per_micro_batch` tokens, filling included; all at
    once without it. A row longer than that is a micro-batch of its own."""
    if not rows:
        return []
    numbered = list(enumerate(rows))
    laid = _packed if rules.packing else _padded
    if rules.tokens_per_micro_batch is None:
        return [laid(numbered, device)]
    parts = _cut(numbered, rules.tokens_per_micro_batch, packed=bool(rules.packing))
    return [laid(part, device) for part in parts]


def _cut(numbered: Sequence[Numbered], budget: int, *, packed: bool) -> list[list[Numbered]]:
    """From the longest to the shortest, equal ones in their order; the largest micro-batch, and with it the peak of
    memory, comes first."""
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


def _padded(numbered: Sequence[Numbered], device: torch.device) -> MicroBatch:
    """A line for each row, filled on the right to the longest of them."""
    rows = [row for _, row in numbered]
    width = max(len(row.token_ids) for row in rows)
    token_ids = torch.zeros((len(rows), width), dtype=torch.long)
    for at, row in enumerate(rows):
        token_ids[at, : len(row.token_ids)] = row.token_ids
    return _micro_batch(numbered, token_ids, None, [at * width for at in range(len(rows))], device)


def _packed(numbered: Sequence[Numbered], device: torch.device) -> MicroBatch:
    """All rows in one line, one after another."""
    rows = [row for _, row in numbered]
    starts, at = list[int](), 0
    for row in rows:
        starts.append(at)
        at += len(row.token_ids)
    token_ids = torch.cat([row.token_ids for row in rows])[None]
    positions = torch.cat([torch.arange(len(row.token_ids)) for row in rows])[None]
    return _micro_batch(numbered, token_ids, positions, starts, device)


def _micro_batch(
    numbered: Sequence[Numbered],
    token_ids: torch.Tensor,
    positions: torch.Tensor | None,
    starts: Sequence[int],
    device: torch.device,
) -> MicroBatch:
    """Rows that begin at the flat places `starts` of `token_ids`."""
    rows = [row for _, row in numbered]
    places = [
        torch.arange(row.prompt_tokens - 1, len(row.token_ids) - 1) + start
        for row, start in zip(rows, starts, strict=True)
    ]
    counts = tuple(row.completion_tokens for row in rows)
    repeats = torch.tensor(counts)
    return MicroBatch(
        token_ids=token_ids.to(device),
        positions=positions.to(device) if positions is not None else None,
        places=torch.cat(places).to(device),
        targets=torch.cat([row.token_ids[row.prompt_tokens :] for row in rows]).to(device),
        behaviour=torch.cat([row.behaviour for row in rows]).to(device),
        mask=torch.cat([row.mask for row in rows]).to(device),
        advantages=torch.tensor([row.advantage for row in rows]).repeat_interleave(repeats).to(device),
        staleness=torch.tensor([row.staleness for row in rows]).repeat_interleave(repeats).to(device),
        proximal=_flat([row.proximal for row in rows], device),
        reference=_flat([row.reference for row in rows], device),
        counts=counts,
        numbers=tuple(number for number, _ in numbered),
    )


def _flat(parts: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there).to(device) if len(there) == len(parts) else None
