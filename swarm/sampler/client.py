"""A sampler's calls to the learner: ask for leases, beat, submit rollouts, release samples."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from swarm.errors import ProtocolError
from swarm.net.client import Peer, SlowLine
from swarm.rollout.messages import (
    LEASE_REPLY_BYTES,
    MAX_SUBMITTED,
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
    RolloutVerdict,
    SampleName,
    Stepped,
    StepReply,
    Submission,
    SubmissionReply,
)
from swarm.types import Lease, NodeId, VersionId
from swarm.wire import CONTROL_BODY_BYTES, RATIO_FREE_BYTES, compress, decode, encode

LIFE = secrets.randbits(63)  # Of this process
SUBMIT_PATH, STEP_PATH = "/v1/rollouts", "/v1/steps"
CALL_S = 30.0  # Time limit of a call, besides the wait that it asks for: 8 MiB of rollouts at 2.2 Mbit/s

PORTION_BYTES = RATIO_FREE_BYTES * 7 // 8  # An unpacked submission: too small to count as a zip bomb
ROLLOUT_OVERHEAD_BYTES = 400  # What a rollout takes besides its tokens: ids, a few spans, a reason

SLOW_PAUSE_S = 3.0
"""Pause after a submission that was too slow. The cause (weights under way, lost packets) may pass. The learner waits
2 s or more for a body, so a dead line costs it a dozen tries a minute."""

VERDICTS_BYTES = 1024 * 1024  # Room for 4,096 verdicts with a line each


class Refused(NamedTuple):
    """The learner grants no leases: the reason, the seconds after which to ask again, and a line for a person."""

    reason: Refusal
    retry_after_s: float
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedLease:
    """A lease, and its end by our monotonic clock."""

    lease: Lease
    deadline: float

    def samples(self) -> list[SampleName]:
        return [(self.lease.group_id, spec.index) for spec in self.lease.samples]


class RolloutClient:
    """Calls of `node` to one learner. They raise what PeerClient raises. `say` tells a person that the line is slow;
    after a slow submission the client waits `pause_s`."""

    def __init__(
        self,
        peer: Peer,
        node: NodeId,
        *,
        say: Callable[[str], None] = lambda line: None,
        pause_s: float = SLOW_PAUSE_S,
        engine_class: Callable[[], str] = lambda: "",
    ) -> None:
        self._peer = peer
        self._node = node
        self._say = say
        self._pause_s = pause_s
        self._engine_class = engine_class
        self._portion_bytes = PORTION_BYTES

    async def ask(
        self, held: VersionId, capacity: int, wait_s: float, *, holding: Iterable[SampleName], at_once: int = 0
    ) -> list[TimedLease] | Refused:
        """Return leases for up to `capacity` samples, or why there are none. LeaseRequest explains `at_once`."""
        request = LeaseRequest(
            node=self._node,
            held=held,
            holding=by_group(holding),
            capacity=capacity,
            wait_s=wait_s,
            at_once=at_once,
            engine=self._engine_class(),
        )
        data = await self._peer.post(
            "/v1/leases", encode(request), cap_bytes=LEASE_REPLY_BYTES, timeout_s=wait_s + CALL_S
        )
        reply = decode(data, LeaseReply, cap_bytes=LEASE_REPLY_BYTES)
        if reply.refusal is not None:
            return Refused(reply.refusal, reply.retry_after_s, reply.detail)
        if sum(len(lease.samples) for lease in reply.leases) > capacity:
            raise ProtocolError("the learner gave out more samples than were asked for")
        now = time.monotonic()
        return [TimedLease(lease=lease, deadline=now + lease.time_limit_s) for lease in reply.leases]

    async def beat(
        self,
        installed: VersionId | None,
        samples: int,
        rollouts_per_s: float,
        tokens_per_s: float = 0.0,
        offer: Offer | None = None,
        did: tuple[Did, ...] = (),
    ) -> BeatReply:
        """Send a sign of life."""
        beat = Beat(
            node=self._node,
            installed=installed,
            samples=samples,
            rollouts_per_s=rollouts_per_s,
            tokens_per_s=tokens_per_s,
            offer=offer,
            life=LIFE,
            did=did,
        )
        data = await self._peer.post("/v1/beat", encode(beat), cap_bytes=CONTROL_BODY_BYTES, timeout_s=CALL_S)
        return decode(data, BeatReply, cap_bytes=CONTROL_BODY_BYTES)

    async def submit(
        self, answers: Sequence[Answer], *, on_refused: Callable[[int, ProtocolError], None] | None = None
    ) -> list[RolloutVerdict]:
        """Submit rollouts. This is idempotent: the learner answers "duplicate" for rollouts that it has accepted.

        A portion that is too large for a slow line is sent again in smaller ones. If the learner refuses a portion,
        `on_refused` gets its number of rollouts and the reason, and the rest is submitted. Without `on_refused`, a
        refusal is raised.
        """
        verdicts: list[RolloutVerdict] = []
        waiting = deque(portions(answers, self._portion_bytes))
        slow = False
        while waiting:
            try:
                verdicts += (await self._submit_portion(waiting[0])).verdicts
            except SlowLine as error:
                slow = True
                await self._send_less(waiting[0], error)
                waiting = deque(portions([answer for part in waiting for answer in part], self._portion_bytes))
                continue
            except ProtocolError as fault:
                if on_refused is None:
                    raise
                on_refused(len(waiting[0]), fault)
            waiting.popleft()
        if not slow:
            # Grow by a quarter, so that a line that stays slow is overloaded every fourth batch, not every time.
            self._portion_bytes = min(PORTION_BYTES, self._portion_bytes * 5 // 4)
        return verdicts

    async def _send_less(self, portion: Sequence[Answer], why: SlowLine) -> None:
        """Halve the size of `portion` for the portions from now on, and pause."""
        if self._portion_bytes == PORTION_BYTES:
            self._say(f"{why}; rollouts are sent again, fewer at once")
        self._portion_bytes = sum(map(_size_bytes, portion)) // 2
        await asyncio.sleep(self._pause_s)

    async def _submit_portion(self, answers: Sequence[Answer]) -> SubmissionReply:
        body = compress(encode(Submission(node=self._node, answers=tuple(answers))))
        data = await self._peer.post(SUBMIT_PATH, body, cap_bytes=VERDICTS_BYTES, timeout_s=CALL_S)
        return decode(data, SubmissionReply, cap_bytes=VERDICTS_BYTES)

    async def step(self, turns: Sequence[Answer]) -> list[Stepped]:
        """Submit turns of episodes. Return what the environments of some of them said."""
        body = compress(encode(Submission(node=self._node, answers=tuple(turns))))
        data = await self._peer.post(STEP_PATH, body, cap_bytes=STEP_REPLY_BYTES, timeout_s=CALL_S)
        return list(decode(data, StepReply, cap_bytes=STEP_REPLY_BYTES).steps)

    async def release(self, samples: Iterable[SampleName], *, forget: bool) -> None:
        """Give samples back unfinished."""
        release = Release(node=self._node, samples=by_group(samples), forget=forget)
        await self._peer.post("/v1/release", encode(release), cap_bytes=CONTROL_BODY_BYTES, timeout_s=CALL_S)


def by_group(samples: Iterable[SampleName]) -> tuple[HeldSamples, ...]:
    """Return the samples by group, so that each group's id is sent only once."""
    return tuple(
        HeldSamples(group_id=group_id, indices=tuple(index for _, index in names))
        for group_id, names in groupby(sorted(samples), key=lambda name: name[0])
    )


def portions(answers: Sequence[Answer], cap_bytes: int) -> list[list[Answer]]:
    """Split `answers` in order. A part has at most MAX_SUBMITTED answers, and at most `cap_bytes` unless it is a single
    one."""
    parts: list[list[Answer]] = []
    size = 0
    for answer in answers:
        nbytes = _size_bytes(answer)
        if not parts or size + nbytes > cap_bytes or len(parts[-1]) == MAX_SUBMITTED:
            parts.append([])
            size = 0
        parts[-1].append(answer)
        size += nbytes
    return parts


def _size_bytes(answer: Answer) -> int:
    return 9 * answer.rollout.length + ROLLOUT_OVERHEAD_BYTES
