"""Bodies of the HTTP calls between a sampler and the learner (docs/protocol.md)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from swarm.net.signing import unseal
from swarm.net.wire import Message, decode
from swarm.types import Count, Id, Lease, Rollout, Seconds, Verdict, VersionId

MAX_SAMPLES_PER_ASK = 4096  # More samples in flight than any one engine holds today
LEASE_CONTEXT = "lease"  # What the signature of a lease is for

LEASE_TOKEN_BYTES = 768 * 1024  # A lease for a prompt of 131,072 tokens at 5 bytes an id; most take a few hundred bytes
LEASE_REPLY_BYTES = 8 * 1024 * 1024  # The sampler trusts the learner more than a peer, but not without limit
MAX_SUBMITTED = 1024  # Rollouts of one submission: judging them takes the event loop 5 ms
Refusal = Literal["starting", "behind", "paced", "standby", "draining", "finished"]

WHY_LENGTH = 200  # Characters of a line that tells a person why a node waits
DEVICE_CLASS_LENGTH = 64  # Characters of a maker's name of a device

Why = Annotated[str, msgspec.Meta(max_length=WHY_LENGTH)]
Price = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
LineRate = Annotated[float, msgspec.Meta(ge=0, le=1e13)]


class HeldSamples(Message, frozen=True):
    """Samples of one group that a sampler has in its hands."""

    group_id: Id
    indices: Annotated[tuple[Count, ...], msgspec.Meta(max_length=65_536)]


class LeaseRequest(Message, frozen=True):
    """The sampler's engine has installed `held`, and it takes on `capacity` samples now. `holding` names all that it
    holds. What else the learner thinks it holds was lost on the way, or belonged to a former life of the node, and is
    put back. `at_once` of the samples can begin now, in places of an engine that refills each by itself; 0 means all
    of them if the node holds nothing, else none."""

    node: Id
    held: VersionId
    holding: Annotated[tuple[HeldSamples, ...], msgspec.Meta(max_length=65_536)]
    capacity: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES_PER_ASK)]
    wait_s: Seconds
    at_once: Count = 0


class LeaseReply(Message, frozen=True):
    """Sealed leases, or why there are none and when to ask again; `detail` is one line for a person."""

    leases: tuple[bytes, ...] = ()
    refusal: Refusal | None = None
    retry_after_s: Seconds = 0.0
    detail: Why = ""


class Offer(Message, frozen=True):
    """What a sampler says that it is and costs; the result does not rest on it. Its engine draws `samples_at_once`,
    which begin and end together if it works in `lockstep`, and was measured to make `full_rollouts_per_s` with all
    places filled. Prices are in the swarm's currency, of traffic for 1e9 bytes. A rate of 0 is unknown. `sent_bytes`
    and `received_bytes` count weights since its process began."""

    device_class: Annotated[str, msgspec.Meta(max_length=DEVICE_CLASS_LENGTH)] = ""
    samples_at_once: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES_PER_ASK)] = 1
    lockstep: bool = False
    full_rollouts_per_s: Rate = 0.0
    cost_per_hour: Price = 0.0
    down_cost_per_gb: Price = 0.0
    up_cost_per_gb: Price = 0.0
    uplink_bytes_per_s: LineRate = 0.0
    downlink_bytes_per_s: LineRate = 0.0
    sent_bytes: Count = 0
    received_bytes: Count = 0


class Beat(Message, frozen=True):
    """A sign of life: `installed` is the engine's version, `samples` how many it holds, `tokens_per_s` the measured
    rate of one sample in a running batch (0: unknown). The time limits of this node's leases follow from it."""

    node: Id
    installed: VersionId | None
    samples: Count
    rollouts_per_s: Rate
    tokens_per_s: Rate = 0.0
    offer: Offer | None = None


class DroppedRollouts(Message, frozen=True):
    """How many accepted rollouts of a node were not trained on for `reason`."""

    reason: Annotated[str, msgspec.Meta(max_length=40)]
    rollouts: Count


class BeatReply(Message, frozen=True):
    """The newest version, whether the run is over, and why accepted rollouts of this node were dropped since the
    learner started. `standby` says why this node is kept in reserve; empty: it is active."""

    newest: VersionId | None
    finished: bool
    dropped: Annotated[tuple[DroppedRollouts, ...], msgspec.Meta(max_length=64)] = ()
    standby: Why = ""


class Release(Message, frozen=True):
    """Samples handed back unfinished. `forget`: the node holds nothing any more, since it goes or has just come."""

    node: Id
    samples: Annotated[tuple[HeldSamples, ...], msgspec.Meta(max_length=65_536)]
    forget: bool


def open_lease(token: bytes, learner_key: bytes) -> Lease:
    """The lease that the owner of `learner_key` sealed; ProtocolError for anything else."""
    body = unseal(LEASE_CONTEXT, token, learner_key, cap_bytes=LEASE_TOKEN_BYTES)
    return decode(body, Lease, cap_bytes=LEASE_TOKEN_BYTES)


class LeasedRollouts(Message, frozen=True):
    """One lease, as it was sealed, and rollouts that answer it."""

    lease: bytes
    rollouts: Annotated[tuple[Rollout, ...], msgspec.Meta(min_length=1, max_length=MAX_SUBMITTED)]


class Submission(Message, frozen=True):
    """What one POST of rollouts carries."""

    node: Id
    items: Annotated[tuple[LeasedRollouts, ...], msgspec.Meta(min_length=1, max_length=MAX_SUBMITTED)]


class RolloutVerdict(Message, frozen=True):
    """The learner's answer to one rollout."""

    rollout_id: Annotated[str, msgspec.Meta(max_length=80)]
    verdict: Verdict
    detail: str = ""


class SubmissionReply(Message, frozen=True):
    verdicts: tuple[RolloutVerdict, ...]
