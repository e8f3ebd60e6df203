"""Rows of prompt and completion, and the micro-batches that one forward pass takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from swarm.learner.messages import ComputeRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rollout, on the CPU. token_ids: [prompt + completion]; behaviour, mask, proximal, reference: [completion].

    `proximal` and `reference` are log-probs of the policy as it was at the start of the step, and of the model that
    the run began with; None where the objective asks for none.
    """

    token_ids: torch.Tensor
    prompt_tokens: int
    behaviour: torch.Tensor
    mask: torch.Tensor
    advantage: float
    staleness: int
    truncated: bool = False
    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward pass takes, and flat, for every completion token in order, what the objective needs.

    token_ids, attention: [rows, width]. `places` are flat indices into [rows * width] of the positions that predict
    the completion tokens; places, targets and all after them: [tokens]. `counts` are the completion tokens of each row
    and `numbers` the places of the rows in what was cut.
    """

    token_ids: torch.Tensor
    attention: torch.Tensor
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


def micro_batches(rows: Sequence[Row], rules: ComputeRules, device: torch.device) -> list[MicroBatch]:
    """`rows` cut so that one forward pass takes about `rules.tokens_per_micro_batch` tokens; all at once without it."""
    numbered = list(enumerate(rows))
    if rules.tokens_per_micro_batch is None:
        return [_padded(numbered, device)] if numbered else []
    longest = max((len(row.token_ids) for row in rows), default=1)
    size = max(1, rules.tokens_per_micro_batch // longest)
    return [_padded(numbered[at : at + size], device) for at in range(0, len(numbered), size)]


def _padded(numbered: Sequence[tuple[int, Row]], device: torch.device) -> MicroBatch:
    """Rows padded on the right to the longest of them."""
    rows = [row for _, row in numbered]
    width = max(len(row.token_ids) for row in rows)
    token_ids = torch.zeros((len(rows), width), dtype=torch.long)
    attention = torch.zeros((len(rows), width), dtype=torch.long)
    for at, row in enumerate(rows):
        token_ids[at, : len(row.token_ids)] = row.token_ids
        attention[at, : len(row.token_ids)] = 1
    places = [torch.arange(row.prompt_tokens - 1, len(row.token_ids) - 1) + at * width for at, row in enumerate(rows)]
    counts = tuple(row.completion_tokens for row in rows)
    repeats = torch.tensor(counts)
    return MicroBatch(
        token_ids=token_ids.to(device),
        attention=attention.to(device),
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
