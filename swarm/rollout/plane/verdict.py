"""The verdict on an answer, once its lease, its group and the bound are known."""

from __future__ import annotations

from swarm.rollout.journal.entries import GroupDropped
from swarm.rollout.plane.effects import ScoreWanted
from swarm.rollout.plane.leases import Group
from swarm.rollout.plane.rules import is_fresh, judge
from swarm.types import GroupId, Lease, NodeId, Rollout, Verdict, VersionId


def train_id(number: int) -> GroupId:
    """The name of the `number`-th group for training."""
    return GroupId(f"t{number}")


def verdict_on(
    rollout: Rollout,
    lease: Lease,
    node: NodeId,
    group: Group | None,
    *,
    opened: int,
    newest: VersionId,
    next_batch: int,
    max_staleness: int,
    vocab_size: int,
    fault: str | None = None,
) -> tuple[Verdict, str]:
    """What becomes of `rollout` by `node` under a lease whose seal was checked, and one line for its sampler.

    `group` is the one that the lease names, if it is open; `opened` is the number of the next group for training;
    `fault` is what admission.malformation said of it, if that was asked before.
    """
    verdict, detail = judge(
        rollout,
        lease,
        newest=newest,
        next_batch=next_batch,
        max_staleness=max_staleness,
        vocab_size=vocab_size,
        fault=fault,
    )
    if verdict == "malformed":
        return verdict, detail
    if group is None:
        known = lease.purpose == "eval" or int(lease.group_id.removeprefix("t")) < opened
        return ("duplicate", "this group is closed") if known else ("stale", "this learner forgot the group")
    if lease.min_version != group.min_version:
        return "stale", "this lease is of an earlier run of this learner"
    sample = group.samples[rollout.index]
    if sample.rollout is not None:
        return "duplicate", "this sample is answered"
    if rollout.finish == "failed" and (sample.node != node or not is_current(lease, rollout, group)):
        return "duplicate", "this failure is known, or this node does not hold the sample any more"
    return verdict, detail


def was_lowered(rollout: Rollout, group: Group | None, next_batch: int) -> bool:
    """Whether a stale rollout would be fresh by the bound under which its group was opened."""
    oldest = rollout.oldest
    return group is not None and oldest is not None and is_fresh(oldest, next_batch, group.bound)


def dropped(group: Group, reason: str, *, next_batch: int, max_staleness: int) -> GroupDropped:
    """The record of a group that is in no batch from `next_batch` on; stale by a lowered bound alone is so called."""
    if reason == "stale" and is_fresh(group.oldest_version, next_batch, group.bound):
        reason = "bound_lowered"
    return GroupDropped(
        number=group.order if group.purpose == "train" else None,
        group_id=group.group_id,
        reason=reason,
        rollouts=group.answered,
        nodes=group.authors,
        oldest=group.oldest_version,
        next_batch=next_batch,
        max_staleness=max_staleness,
    )


def is_current(lease: Lease, rollout: Rollout, group: Group) -> bool:
    """Whether the sample has not failed since this lease was given: an answer that comes twice must not touch the next
    one."""
    sample = group.samples[rollout.index]
    return any(spec.index == rollout.index and spec.attempt == sample.failures for spec in lease.samples)


def score_wanted(group: Group, rollout: Rollout, node: NodeId) -> ScoreWanted:
    """That the accepted `rollout` of `node` be scored."""
    return ScoreWanted(group_id=group.group_id, index=rollout.index, node=node, prompt=group.prompt, rollout=rollout)
