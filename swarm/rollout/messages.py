"""Bodies of the HTTP calls between a sampler and the learner (docs/protocol.md)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from swarm.types import (
    AS_LEASED,
    MAX_SEATS,
    MAX_TOKENS,
    Count,
    Id,
    Lease,
    Nickname,
    Rollout,
    Seconds,
    TurnLimits,
    Verdict,
    VersionId,
)
from swarm.wire import Message

MAX_SAMPLES_PER_ASK = 4096  # More samples in flight than any one engine holds today
LEASE_REPLY_BYTES = 8 * 1024 * 1024  # The sampler trusts the learner more than a peer, but not without limit
STEP_REPLY_BYTES = 8 * 1024 * 1024  # Half of it is filled, since the last turn may be long
MAX_SUBMITTED = 1024  # Rollouts in one submission: judging them takes the event loop 5 ms
Refusal = Literal["starting", "behind", "paced", "standby", "draining", "finished"]

WHY_LENGTH = 200  # Characters in a line that tells a person why a node waits
ENGINE_CLASS_LENGTH = 64  # Of "transformers/float32/cpu" and the like
DEVICE_CLASS_LENGTH = 64  # Characters in a device's product name
HELD_OBJECTS = 33_000  # 8,192 held samples in groups of one take four objects each
MAX_DID = 16  # Spans in a beat, so in a second or two: a picture of the run shows no more

Why = Annotated[str, msgspec.Meta(max_length=WHY_LENGTH)]
Price = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
LineRate = Annotated[float, msgspec.Meta(ge=0, le=1e13)]
Doing = Literal["draw", "install", "fetch", "wait"]
Did = tuple[Doing, Seconds, Seconds]
SampleName = tuple[str, int]  # Group id and index


class HeldSamples(Message, frozen=True):
    """Samples of one group that a sampler holds."""

    group_id: Id
    indices: Annotated[tuple[Count, ...], msgspec.Meta(max_length=65_536)]


class LeaseRequest(Message, frozen=True):
    """The sampler's engine has installed `held`, and it can take `capacity` more samples. `holding` names all samples
    that it holds. Other samples that the learner believes it holds are put back: a reply got lost, or the node was
    restarted. The engine can begin `at_once` of the new samples now, if it refills places one by one; 0 means all of
    them if the node holds nothing, else none. `engine` is its class: engine, number format and kind of device."""

    max_objects: ClassVar[int] = HELD_OBJECTS
    node: Id
    held: VersionId
    holding: Annotated[tuple[HeldSamples, ...], msgspec.Meta(max_length=65_536)]
    capacity: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES_PER_ASK)]
    wait_s: Seconds
    at_once: Count = 0
    engine: Annotated[str, msgspec.Meta(max_length=ENGINE_CLASS_LENGTH)] = ""


class LeaseReply(Message, frozen=True):
    """Leases, or why there are none and when to ask again. `detail` is a line for a person."""

    max_objects: ClassVar[int] = LEASE_REPLY_BYTES // 5  # Prompts take half of the bytes, at up to 5 bytes a token
    leases: tuple[Lease, ...] = ()
    refusal: Refusal | None = None
    retry_after_s: Seconds = 0.0
    detail: Why = ""


class Offer(Message, frozen=True):
    """A sampler's own description and prices. The training result does not depend on them.

    Its engine draws `samples_at_once` samples, which begin and end together in `lockstep`, and makes
    `full_rollouts_per_s` (measured) with all places filled. Prices are in the swarm's currency; a traffic price is for
    1e9 bytes. A rate of 0 means unknown. `sent_bytes` and `received_bytes` count weights since the process began."""

    device_class: Annotated[str, msgspec.Meta(max_length=DEVICE_CLASS_LENGTH)] = ""
    samples_at_once: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES_PER_ASK)] = 1
    lockstep: bool = False
    full_rollouts_per_s: Rate = 0.0
    cost_per_hour: Price = 0.0
    traffic_cost_per_gb: Price = 0.0
    uplink_bytes_per_s: LineRate = 0.0
    downlink_bytes_per_s: LineRate = 0.0
    sent_bytes: Count = 0
    received_bytes: Count = 0
    nickname: Nickname = ""


class Beat(Message, frozen=True):
    """A sign of life. `installed` is the engine's version, `samples` how many samples the node holds, `tokens_per_s`
    the measured rate of one sample in a running batch (0: unknown), which sets the time limits of the node's leases.
    `life` tells two processes of one node apart (0: unknown). `did` is what it has done since the last beat: what, how
    many seconds ago that began, and for how many seconds."""

    node: Id
    installed: VersionId | None
    samples: Count
    tokens_per_s: Rate = 0.0
    offer: Offer | None = None
    life: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    did: Annotated[tuple[Did, ...], msgspec.Meta(max_length=MAX_DID)] = ()


class DroppedRollouts(Message, frozen=True):
    """How many accepted rollouts of a node were dropped for `reason` before training."""

    reason: Annotated[str, msgspec.Meta(max_length=40)]
    rollouts: Count


class BeatReply(Message, frozen=True):
    """The newest version, whether the run is over, and why accepted rollouts of this node were dropped since the
    learner started. `standby` says why this node is on standby; "" if it is active. `elsewhere` means that another
    process was at work under this identity, and still is, when this one came. `wrong` is what the audit found; a node
    that then restarts its engine and gives back all that it holds has one more chance."""

    newest: VersionId | None
    finished: bool
    dropped: Annotated[tuple[DroppedRollouts, ...], msgspec.Meta(max_length=64)] = ()
    standby: Why = ""
    elsewhere: bool = False
    wrong: Why = ""


class Release(Message, frozen=True):
    """Samples given back unfinished. `forget` means that the node holds nothing, since it is leaving or just came."""

    max_objects: ClassVar[int] = HELD_OBJECTS
    node: Id
    samples: Annotated[tuple[HeldSamples, ...], msgspec.Meta(max_length=65_536)]
    forget: bool


class Answer(Message, frozen=True):
    """A completion of one leased sample, or turn number `turn` of its episode. `attempt` is the lease's. What follows
    tokens that others drew has the name of those as its `turn` (plane/begun.py)."""

    rollout: Rollout
    attempt: Count = 0
    turn: Count = 0

    @property
    def sample(self) -> SampleName:
        return self.rollout.group_id, self.rollout.index


class Submission(Message, frozen=True):
    """The body of a POST of rollouts."""

    node: Id
    answers: Annotated[tuple[Answer, ...], msgspec.Meta(min_length=1, max_length=MAX_SUBMITTED)]


class Stepped(Message, frozen=True):
    """The verdict on an answer. If it is a turn of an episode that goes on (not `ended`), `seat` draws the next one,
    after `token_ids` (int32), which the environment said, were appended to its stream, within `limits`."""

    group_id: Id
    index: Count
    turn: Count
    verdict: Verdict
    detail: str = ""
    ended: bool = False
    seat: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEATS - 1)] = 0
    token_ids: Annotated[bytes, msgspec.Meta(max_length=4 * MAX_TOKENS)] = b""
    limits: TurnLimits = AS_LEASED


class StepReply(Message, frozen=True):
    """The verdicts on a submission, but for turns whose environments have not answered: they are handed in again."""

    steps: tuple[Stepped, ...]
