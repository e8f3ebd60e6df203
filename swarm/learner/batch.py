"""Rows of prompt and completion, and micro-batches, each of which one forward pass takes.

Padded: each row is a line of the micro-batch, padded on the right to the longest. Attention is causal, so no token sees
the padding and no mask is needed. Shared: several rows form one line, in which the tokens that they have in common at
the beginning (a prompt, part of one, or equal answers) are stored once, and a mask separates the rest. Packed: all rows
are in one line, and positions begin at 0 in each; the attention kernel must separate the rows by itself.
`Policy.settle` checks that it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import torch
from torch.nn.utils.rnn import pad_sequence

from swarm.learner.messages import TrainerConfig
from swarm.models.lines import Line, attention, lay, lines_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rollout, or what one player of an episode reads and draws; on the CPU. token_ids: [prompt + completion].

    `drawn` are the indices of the tokens that count, in order, without an environment's; None: all after the prompt.
    behaviour, proximal, reference, and the advantage if it is not the same for all tokens: [drawn]. `proximal` and
    `reference` are log-probs of the policy at the start of the step and of the model that the run began with, None if
    the objective needs none. `samplers` are the nodes that claim the log-probs `behaviour`, and `drawn_by` says which,
    by index, for each token; None: the first.
    """

    token_ids: torch.Tensor
    prompt_tokens: int
    behaviour: torch.Tensor
    advantage: float | torch.Tensor = 0.0
    staleness: int = 0
    samplers: tuple[str, ...] = ("",)
    drawn: torch.Tensor | None = None
    drawn_by: torch.Tensor | None = None
    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None

    @property
    def places(self) -> torch.Tensor:
        return torch.arange(self.prompt_tokens, len(self.token_ids)) if self.drawn is None else self.drawn

    @property
    def inputs(self) -> torch.Tensor:
        """The tokens that the model reads: all before the last one that counts."""
        return self.token_ids[: int(self.places[-1])] if len(self.places) else self.token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The input of one forward pass, and what the objective needs for every drawn token, in order.

    token_ids, positions: [lines, width]; positions are None if each line is one row. `attention`, boolean [lines, 1,
    width, width]: which tokens (third dimension) see which (last); None: each sees all up to itself. `places` are flat
    indices into [lines * width] of the positions that predict the drawn tokens; places, targets and all fields up to
    `voices`: [tokens]. A token counts as much as `mask` says. `counts` is the number of drawn tokens of each row, and
    `numbers` are the indices of these rows. A voice is one sampler in one row: `voices` has the voice of each token,
    `voices_of` the number of voices in each row.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor | None
    attention: torch.Tensor | None
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
        """Split `values`, [tokens], by row."""
        return dict(zip(self.numbers, values.split(self.counts), strict=True))

    def without_weight(self) -> MicroBatch:
        """The same pass, which changes no gradient and no figure."""
        zeros = torch.zeros_like(self.behaviour)
        proximal, reference = (None if old is None else zeros for old in (self.proximal, self.reference))
        return replace(self, behaviour=zeros, mask=zeros, advantages=zeros, proximal=proximal, reference=reference)


def by_prompt(rows: Sequence[Row]) -> list[list[int]]:
    """Group the indices of consecutive rows that have the same prompt."""
    keys = [row.token_ids[: row.prompt_tokens].numpy().tobytes() for row in rows]
    return [list(places) for _, places in groupby(range(len(rows)), keys.__getitem__)]


def micro_batches(rows: Sequence[Row], config: TrainerConfig, device: torch.device) -> list[MicroBatch]:
    """Divide `rows` so that a forward pass takes at most `config.tokens_per_micro_batch` tokens, including padding;
    None is no limit. A longer row is a micro-batch of its own."""
    if not rows:
        return []
    packed, budget = bool(config.packing), config.tokens_per_micro_batch
    if config.shares_beyond and not packed:
        lines = lines_of([row.inputs for row in rows], config.shares_beyond, budget)
    else:
        lines = [Line((number,), len(row.inputs)) for number, row in enumerate(rows)]
    parts = [lines] if budget is None else _cut(lines, budget, packed=packed)
    if packed:
        parts = [[Line(tuple(number for line in part for number in line.numbers), 0)] for part in parts]  # Width unused
    return [_micro_batch(rows, part, device, packed=packed) for part in parts]


def _cut(lines: Sequence[Line], budget: int, *, packed: bool) -> list[list[Line]]:
    """Take the longest lines first, so that the largest micro-batch, and with it the peak of memory, comes first."""
    parts: list[list[Line]] = []
    left = 0
    for line in sorted(lines, key=lambda line: -line.width):
        needed = line.width if packed or not parts else parts[-1][0].width
        if not parts or needed > left:
            parts.append([])
            needed, left = line.width, budget
        parts[-1].append(line)
        left -= needed
    return parts


def _micro_batch(rows: Sequence[Row], lines: Sequence[Line], device: torch.device, *, packed: bool) -> MicroBatch:
    numbers = tuple(number for line in lines for number in line.numbers)
    own = [rows[number] for number in numbers]
    drawn = [row.places for row in own]
    counts = tuple(map(len, drawn))
    voices_of = tuple(len(row.samplers) for row in own)
    laid = [lay([rows[number].inputs for number in line.numbers], packed=packed) for line in lines]
    is_padded = len(numbers) == len(lines) and not packed
    width = max(len(one.token_ids) for one in laid)
    indices = [number * width + index for number, one in enumerate(laid) for index in one.indices]
    advantages = [_each(row.advantage, count) for row, count in zip(own, counts, strict=True)]
    before = accumulate(voices_of, initial=0)
    voices = [at + _each(row.drawn_by, count) for row, count, at in zip(own, counts, before, strict=False)]
    repeats = torch.tensor(counts)
    return MicroBatch(
        token_ids=pad_sequence([one.token_ids for one in laid], batch_first=True).to(device),
        positions=None if is_padded else pad_sequence([one.positions for one in laid], batch_first=True).to(device),
        attention=None if is_padded or packed else attention(laid, width).to(device),
        places=torch.cat([index[at - 1] for index, at in zip(indices, drawn, strict=True)]).to(device),
        targets=torch.cat([row.token_ids[at] for row, at in zip(own, drawn, strict=True)]).to(device),
        behaviour=torch.cat([row.behaviour for row in own]).to(device),
        mask=torch.ones(sum(counts), device=device),
        advantages=torch.cat(advantages).to(device),
        staleness=torch.tensor([row.staleness for row in own]).repeat_interleave(repeats).to(device),
        voices=torch.cat(voices).to(device),
        proximal=_flat([row.proximal for row in own], device),
        reference=_flat([row.reference for row in own], device),
        counts=counts,
        voices_of=voices_of,
        numbers=numbers,
    )


def _each(value: float | torch.Tensor | None, count: int) -> torch.Tensor:
    """The value for each token; for None, the index 0."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.zeros(count, dtype=torch.long) if value is None else torch.full((count,), value)


def _flat(parts: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given).to(device) if len(given) == len(parts) else None
