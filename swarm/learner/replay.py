"""Draws rollouts again, with the weights that their samplers say they used.

A token of an honest sampler is the best one under its noise, but for the difference of its arithmetic from ours: 1e-5
nats in float32, some hundredths in bfloat16. A token from other weights, from another temperature, or chosen for its
reward misses it by as much as the distributions differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from swarm.learner.batch import Row
from swarm.learner.messages import Audited, AuditRollout, TrainerConfig
from swarm.learner.policy import Draws, Policy
from swarm.learner.ranks import Ranks
from swarm.models.draws import GREEDY


def audit(
    policy: Policy,
    rollouts: Sequence[AuditRollout],
    config: TrainerConfig,
    device: torch.device,
    weights: dict[str, torch.Tensor] | None,
    *,
    ranks: Ranks,
    half: bool = False,
) -> Audited:
    """Return errors and margins of each rollout under `weights`, by the module's names, or under the policy's own; in
    bfloat16 passes if `half`. Every rank calls it and computes its share."""
    rows = [_row_of(rollout) for rollout in rollouts]
    # In float32, packed rows would need a mask of all pairs of tokens.
    places, parts, idle = ranks.divide(rows, config.model_copy(update={"packing": False}), device)
    half = half or policy.module.weights_in_half
    found: dict[int, torch.Tensor] = {}
    for part in parts:
        draws = _draws([rollouts[places[number]] for number in part.numbers], device)
        both = torch.stack(policy.replay(part, draws, weights, half), dim=1).cpu()
        found |= {places[number]: values for number, values in part.by_row(both).items()}
    for part in idle:  # Nothing is made of what they would draw
        policy.replay(part, Draws(seeds=part.targets, positions=part.targets), weights, half)
    found = ranks.merge(found)
    return Audited(
        errors=tuple((row.behaviour - found[at][:, 0]).numpy().tobytes() for at, row in enumerate(rows)),
        margins=tuple(found[at][:, 1].numpy().tobytes() for at in range(len(rows))),
        exact=not half,
    )


def _row_of(rollout: AuditRollout) -> Row:
    return Row(
        token_ids=torch.tensor([*rollout.prompt_token_ids, *array("i", rollout.token_ids)], dtype=torch.long),
        prompt_tokens=len(rollout.prompt_token_ids),
        behaviour=torch.tensor(array("f", rollout.logprobs)),
    )


def _draws(rollouts: Sequence[AuditRollout], device: torch.device) -> Draws:
    """The draws of the tokens of these rollouts, one rollout after another."""
    counts = torch.tensor([len(one.token_ids) // 4 for one in rollouts])
    seeds = torch.tensor([GREEDY if one.seed is None else one.seed for one in rollouts]).repeat_interleave(counts)
    starts = [len(one.prompt_token_ids) - 1 for one in rollouts]
    positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, counts.tolist(), strict=True)])
    return Draws(seeds=seeds.to(device), positions=positions.to(device))
