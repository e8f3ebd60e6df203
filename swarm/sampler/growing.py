"""Grows the completions of a batch as a tree, so that shared prefixes are computed once.

Prompts are laid out in lines (models/lines.py), so a common beginning is read once, and each prompt once however many
completions it gets. Completions with the same tokens so far are one leaf of the tree and share its keys and values.
When they draw different tokens the leaf is split. A completion that has ended is computed no further. This works only
for models that keep the keys and values of all tokens in every layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from swarm.models.device import has_full_attention, stated
from swarm.models.lines import MASKED_ATTENTION, attention, lay, lines_of

Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Draws a token for each completion: from its logits, [rows, vocabulary], and its number, [rows]."""

Ended = Callable[[torch.Tensor], torch.Tensor]
"""Says which completions, [prompts, tokens so far], have ended: [prompts]."""


def can_grow(model: Any) -> bool:
    layers = DynamicCache(config=model.config).layers
    return has_full_attention(model) and all(type(layer) is DynamicLayer for layer in layers)


def grow(
    model: Any, prompts: Sequence[Sequence[int]], choose: Choose, ended: Ended, *, most_tokens: int, until: float
) -> torch.Tensor:
    """Draw a completion of each prompt, [prompts, tokens]; tokens after the end of a completion are arbitrary. At the
    monotonic time `until` all end after the current token."""
    distinct = sorted({tuple(prompt) for prompt in prompts})
    number_of = {prompt: number for number, prompt in enumerate(distinct)}
    cache, seen, logits = _read(model, distinct)
    device = logits.device
    leaves = torch.tensor([number_of[tuple(prompt)] for prompt in prompts], device=device)
    rows, completions = torch.arange(len(prompts), device=device), torch.zeros(len(prompts), 0, dtype=torch.long)
    completions = completions.to(device)
    while True:
        completions = pad(completions, (0, 1))
        completions[rows, -1] = chosen = choose(logits[leaves], rows)
        going = ~ended(completions)[rows]
        rows, leaves, chosen = rows[going], leaves[going], chosen[going]
        if not len(rows) or completions.shape[1] == most_tokens or time.monotonic() >= until:
            return completions
        branches, leaves = torch.unique(torch.stack([leaves, chosen], 1), dim=0, return_inverse=True)
        parents, tokens = branches.unbind(1)
        if not torch.equal(parents, torch.arange(len(seen), device=device)):
            cache.batch_select_indices(parents)
            seen = seen[parents]
        seen = pad(seen, (0, 1), value=1)
        given = {"input_ids": tokens[:, None], "attention_mask": seen, "position_ids": seen.sum(1, keepdim=True) - 1}
        logits = model(**given, past_key_values=cache, use_cache=True).logits[:, -1]


def _read(model: Any, prompts: Sequence[tuple[int, ...]]) -> tuple[DynamicCache, torch.Tensor, torch.Tensor]:
    """Read sorted prompts. Return their keys and values, padded on the left; a mask of what is not padding, [prompts,
    width]; and the logits after each prompt, [prompts, vocabulary]."""
    device, inputs = model.device, [torch.tensor(prompt) for prompt in prompts]
    width = max(map(len, inputs))
    shares_beyond = MASKED_ATTENTION * (stated(model.config.get_text_config(), "hidden_size") or 0)
    parts, logits = [], []
    for line in lines_of(inputs, shares_beyond, None):
        laid, cache = lay([inputs[number] for number in line.numbers]), DynamicCache(config=model.config)
        # Numbers to add, since some kernels add a mask of booleans too.
        mask = torch.full((1, 1, line.width, line.width), torch.finfo(model.dtype).min, dtype=model.dtype)
        found = model(
            input_ids=laid.token_ids[None].to(device),
            attention_mask=mask.masked_fill(attention([laid], line.width), 0.0).to(device),
            position_ids=laid.positions[None].to(device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.stack([at[-1] for at in laid.indices]).to(device),
        )
        logits.append(found.logits[0])
        places = torch.stack([pad(at, (width - len(at), 0)) for at in laid.indices]).to(device)
        layers: list[Any] = cache.layers
        parts.append([(layer.keys[0][:, places], layer.values[0][:, places]) for layer in layers])
    grown = DynamicCache(config=model.config)
    for layer, kept in enumerate(zip(*parts, strict=True)):
        keys, values = (torch.cat(part, 1).transpose(0, 1) for part in zip(*kept, strict=True))
        grown.update(keys, values, layer)
    seen = torch.stack([pad(torch.ones_like(one), (width - len(one), 0)) for one in inputs]).to(device)
    return grown, seen, torch.cat(logits)
