"""A sampler's calls to the learner: ask for leases, beat, submit rollouts, release samples."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

from swarm.errors import ProtocolError
from swarm.rollout.messages import (
    LEASE_REPLY_BYTES,
    STEP_REPLY_BYTES,
    Answer,
    Beat,
    BeatReply,
    Did,
    HeldSamples,
    LeaseReply,
    LeaseRequest,
    Offer,
    Refusal,
    Release,
    SampleName,
    Stepped,
    StepReply,
    Submission,
)
from swarm.types import Lease, NodeId, VersionId
from swarm.wire import CONTROL_BODY_BYTES, compress, decode, encode

LIFE = secrets.randbits(63)  # Of this process
SUBMIT_PATH = "/v1/steps"
CALL_S = 30.0  # Time limit of a call, besides the wait that it asks for: 8 MiB of rollouts at 2.2 Mbit/s


class LeasesRefused(NamedTuple):
    """The learner grants no leases: the reason, the seconds after which to ask again, and a line for a person."""

    reason: Refusal
    retry_after_s: float
    detail: str


class LearnerLine(Protocol):
    """Calls to the learner: once (PeerClient), or until it answers (join/link.py)."""

    async def post(self, path: str, body: bytes, *, cap_bytes: int, timeout_s: float) -> bytes: ...


class RolloutClient:
    """Calls of `node` to one learner, with an engine of the class that it names. They raise what PeerClient raises."""

    def __init__(self, line: LearnerLine, node: NodeId, engine_class: str = "") -> None:
        self._line = line
        self._node = node
        self.engine_class = engine_class

    async def ask(
        self, held: VersionId, capacity: int, wait_s: float, *, holding: Iterable[SampleName], at_once: int = 0
    ) -> list[Lease] | LeasesRefused:
        """Return leases for up to `capacity` samples, or why there are none. LeaseRequest explains `at_once`."""
        request = LeaseRequest(
            node=self._node,
            held=held,
            holding=by_group(holding),
            capacity=capacity,
            wait_s=wait_s,
            at_once=at_once,
            engine=self.engine_class,
        )
        data = await self._line.post(
            "/v1/leases", encode(request), cap_bytes=LEASE_REPLY_BYTES, timeout_s=wait_s + CALL_S
        )
        reply = decode(data, LeaseReply, cap_bytes=LEASE_REPLY_BYTES)
        if reply.refusal is not None:
            return LeasesRefused(reply.refusal, reply.retry_after_s, reply.detail)
        if sum(len(lease.samples) for lease in reply.leases) > capacity:
            raise ProtocolError("the learner gave out more samples than were asked for")
        return list(reply.leases)

    async def beat(
        self,
        installed: VersionId | None,
        samples: int,
        tokens_per_s: float = 0.0,
        offer: Offer | None = None,
        did: tuple[Did, ...] = (),
    ) -> BeatReply:
        """Send a sign of life."""
        beat = Beat(
            node=self._node,
            installed=installed,
            samples=samples,
            tokens_per_s=tokens_per_s,
            offer=offer,
            life=LIFE,
            did=did,
        )
        data = await self._line.post("/v1/beat", encode(beat), cap_bytes=CONTROL_BODY_BYTES, timeout_s=CALL_S)
        return decode(data, BeatReply, cap_bytes=CONTROL_BODY_BYTES)

    async def submit(self, answers: Sequence[Answer]) -> list[Stepped]:
        """Hand in completions and turns of episodes. Return the verdicts, without those on turns whose environments
        have not answered yet. This is idempotent: the learner answers "duplicate" for rollouts that it has accepted."""
        body = compress(encode(Submission(node=self._node, answers=tuple(answers))))
        data = await self._line.post(SUBMIT_PATH, body, cap_bytes=STEP_REPLY_BYTES, timeout_s=CALL_S)
        return list(decode(data, StepReply, cap_bytes=STEP_REPLY_BYTES).steps)

    async def release(self, samples: Iterable[SampleName], *, forget: bool) -> None:
        """Give samples back unfinished."""
        release = Release(node=self._node, samples=by_group(samples), forget=forget)
        await self._line.post("/v1/release", encode(release), cap_bytes=CONTROL_BODY_BYTES, timeout_s=CALL_S)


def samples_of(leases: Iterable[Lease]) -> list[SampleName]:
    return [(lease.group_id, spec.index) for lease in leases for spec in lease.samples]


def by_group(samples: Iterable[SampleName]) -> tuple[HeldSamples, ...]:
    """Return the samples by group, so that each group's id is sent only once."""
    return tuple(
        HeldSamples(group_id=group_id, indices=tuple(index for _, index in names))
        for group_id, names in groupby(sorted(samples), key=lambda name: name[0])
    )
