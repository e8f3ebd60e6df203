"""Draws rollouts again, with the weights that their samplers say they used.

A token of an honest sampler is the best one under its noise, but for the difference of its arithmetic from ours: 1e-5
nats in float32, some hundredths in bfloat16. A token from other weights, from another temperature, or chosen for its
reward misses it by as much as the distributions differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from swarm.learner.batch import MicroBatch, Row, micro_batches
from swarm.learner.messages import Audited, AuditRollout, TrainerConfig
from swarm.learner.policy import Draws, Policy, Replayed
from swarm.learner.ranks import Ranks
from swarm.models.draws import GREEDY


def audit(
    policy: Policy,
    rollouts: Sequence[AuditRollout],
    config: TrainerConfig,
    device: torch.device,
    weights: dict[str, torch.Tensor] | None,
    *,
    ranks: Ranks | None = None,
    half: bool = False,
) -> Audited:
    """Return errors and margins of each rollout under these weights, or under the policy's own; in bfloat16 passes if
    `half`."""
    rows = [row_of(rollout) for rollout in rollouts]
    # In float32, packed rows would need a mask of all pairs of tokens.
    padded = config.model_copy(update={"packing": False})
    half = half or policy.module.weights_in_half
    with torch.compiler.set_stance("force_eager"):  # Compiling layers for other weights would take minutes
        seeds = [rollout.seed for rollout in rollouts]
        found = replay(policy, rows, seeds, padded, device, weights, ranks=ranks or Ranks(), half=half)
    pairs = zip(rows, found, strict=True)
    return Audited(
        errors=tuple((row.behaviour - one.logprobs).numpy().tobytes() for row, one in pairs),
        margins=tuple(one.margins.numpy().tobytes() for one in found),
        exact=not half,
    )


def row_of(rollout: AuditRollout) -> Row:
    behaviour = torch.tensor(array("f", rollout.logprobs))
    return Row(
        token_ids=torch.tensor([*rollout.prompt_token_ids, *array("i", rollout.token_ids)], dtype=torch.long),
        prompt_tokens=len(rollout.prompt_token_ids),
        behaviour=behaviour,
        mask=torch.ones_like(behaviour),
        advantage=0.0,
        staleness=0,
    )


def replay(
    policy: Policy,
    rows: Sequence[Row],
    seeds: Sequence[int | None],
    config: TrainerConfig,
    device: torch.device,
    weights: dict[str, torch.Tensor] | None = None,
    *,
    ranks: Ranks,
    half: bool = False,
) -> list[Replayed]:
    """Return log-probs and margins of each row's completion, on the CPU, under `weights`, by the module's names, or
    under the policy's own. Every rank calls it and computes its share."""
    places = ranks.share([len(row.token_ids) for row in rows])
    own, of_own = [rows[place] for place in places], [seeds[place] for place in places]
    found: dict[int, torch.Tensor] = {}
    parts = micro_batches(own, config, device)
    for part in parts:
        read = policy.replay(part, _draws(part, own, of_own, device), weights, half=half)
        both = part.by_row(torch.stack([read.logprobs, read.margins], dim=1).cpu())
        found |= {places[number]: values for number, values in both.items()}
    # Ranks that share the weights must all make the same number of passes.
    shortest = [min(rows, key=lambda row: len(row.token_ids))]
    for part in micro_batches(shortest, config, device) * (ranks.most(len(parts)) - len(parts)):
        policy.replay(part, _draws(part, shortest, [None], device), weights, half=half)
    found = ranks.merge(found)
    return [Replayed(logprobs=found[row][:, 0], margins=found[row][:, 1]) for row in range(len(rows))]


def _draws(part: MicroBatch, rows: Sequence[Row], seeds: Sequence[int | None], device: torch.device) -> Draws:
    counts = torch.tensor(part.counts)
    starts = [rows[number].prompt_tokens - 1 for number in part.numbers]
    positions = [torch.arange(start, start + count) for start, count in zip(starts, part.counts, strict=True)]
    of_rows = [GREEDY if (seed := seeds[number]) is None else seed for number in part.numbers]
    drawn = torch.tensor(of_rows).repeat_interleave(counts)
    return Draws(seeds=drawn.to(device), positions=torch.cat(positions).to(device))
