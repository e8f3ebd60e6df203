"""Draws again what samplers say that they drew, with the weights that they say they drew it with.

A token of an honest sampler is the best one under its noise, or misses that by what its arithmetic differs from ours:
1e-5 nats in float32, some hundredths in bfloat16. A token from other weights, at another temperature, or chosen for its
reward misses it by as much as the distributions differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import torch

from swarm.audit.auditor import UNKNOWN
from swarm.learner.batch import MicroBatch, Row, micro_batches
from swarm.learner.messages import Audited, AuditRollout, ComputeRules
from swarm.learner.policy import Draws, Policy, Replayed


def audit(
    policy: Policy,
    rollouts: Sequence[AuditRollout],
    rules: ComputeRules,
    device: torch.device,
    weights: dict[str, torch.Tensor],
) -> Audited:
    """Return what is to be known of each rollout as one of these weights."""
    rows = [row_of(rollout) for rollout in rollouts]
    with torch.compiler.set_stance("force_eager"):  # To compile layers for other weights would take minutes
        # Packed rows in float32 would need a mask of all their pairs.
        padded = msgspec.structs.replace(rules, packing=False)
        found = replay(policy, rows, [rollout.seed for rollout in rollouts], padded, device, weights)
    exact = not policy.module.weights_in_half
    least = 0.0 if exact else UNKNOWN.margin  # What a class was measured to miss is against float32
    missed = [int((one.margins > max(least, asked.margin)).sum()) for one, asked in zip(found, rollouts, strict=True)]
    distances = [float((one.logprobs - row.behaviour).abs().mean()) for one, row in zip(found, rows, strict=True)]
    return Audited(missed=tuple(missed), distances=tuple(distances), exact=exact)


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
    seeds: Sequence[int],
    rules: ComputeRules,
    device: torch.device,
    weights: dict[str, torch.Tensor] | None = None,
) -> list[Replayed]:
    """Return what each row's completion is under `weights`, by the module's names, or the policy's own; on the CPU."""
    found: dict[int, Replayed] = {}
    for part in micro_batches(rows, rules, device):
        read = policy.replay(part, _draws(part, rows, seeds, device), weights)
        both = part.by_row(torch.stack([read.logprobs, read.margins], dim=1).cpu())
        found |= {row: Replayed(logprobs=values[:, 0], margins=values[:, 1]) for row, values in both.items()}
    return [found[row] for row in range(len(rows))]


def _draws(part: MicroBatch, rows: Sequence[Row], seeds: Sequence[int], device: torch.device) -> Draws:
    counts = torch.tensor(part.counts)
    starts = [rows[number].prompt_tokens - 1 for number in part.numbers]
    positions = [torch.arange(start, start + count) for start, count in zip(starts, part.counts, strict=True)]
    drawn = torch.tensor([seeds[number] for number in part.numbers]).repeat_interleave(counts)
    return Draws(seeds=drawn.to(device), positions=torch.cat(positions).to(device))
