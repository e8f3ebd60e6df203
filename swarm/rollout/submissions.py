"""From the body of a submission to rollouts under leases whose seals are checked. Blocking, and nothing is shared."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.errors import TooLarge
from swarm.rollout.admission import malformation
from swarm.rollout.client import LEASE_CONTEXT
from swarm.rollout.messages import LEASE_TOKEN_BYTES, MAX_SUBMITTED, Submission
from swarm.signing import unseal
from swarm.types import Lease, Rollout
from swarm.wire import ROLLOUT_MAX_RATIO, ROLLOUT_UNPACKED_BYTES, decode, decompress, stated_size

INLINE_BYTES = 256 * 1024
"""Unpacked, up to this a submission is opened on the event loop: 50 rollouts of 512 tokens, 3 ms. Handing it to a
thread and back takes 0.3 ms of a busy core; larger ones would hold the loop up for longer than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A rollout, the lease that it came under, and its malformation (empty if there is none)."""

    lease: Lease
    rollout: Rollout
    fault: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What a submission holds, and which node it names as its sender."""

    node: str
    claimed: tuple[Claimed, ...]


def is_small(body: bytes) -> bool:
    """Whether opening it takes no time worth a thread. ProtocolError if it is no body at all."""
    return stated_size(body) <= INLINE_BYTES


def open_submission(body: bytes, learner_key: bytes, vocab_size: int) -> Opened:
    """Unpack, decode and check all that needs no knowledge of the run. ProtocolError if it is no submission."""
    content = decompress(body, cap_bytes=ROLLOUT_UNPACKED_BYTES, max_ratio=ROLLOUT_MAX_RATIO)
    submission = decode(content, Submission, cap_bytes=ROLLOUT_UNPACKED_BYTES)
    if sum(len(item.rollouts) for item in submission.items) > MAX_SUBMITTED:
        raise TooLarge(f"a submission of more than {MAX_SUBMITTED} rollouts")
    # A lease that is named again is not checked again: that takes ten times as long as judging a rollout.
    leases = {token: open_lease(token, learner_key) for token in {item.lease for item in submission.items}}
    claimed = tuple(
        Claimed(
            lease=leases[item.lease],
            rollout=rollout,
            fault=malformation(rollout, leases[item.lease], vocab_size=vocab_size),
        )
        for item in submission.items
        for rollout in item.rollouts
    )
    return Opened(node=submission.node, claimed=claimed)


def open_lease(token: bytes, learner_key: bytes) -> Lease:
    """The lease that the owner of `learner_key` sealed; ProtocolError for anything else."""
    body = unseal(LEASE_CONTEXT, token, learner_key, cap_bytes=LEASE_TOKEN_BYTES)
    return decode(body, Lease, cap_bytes=LEASE_TOKEN_BYTES)
