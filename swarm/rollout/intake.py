"""Decides from the headers alone which submissions to read, and opens their bodies.

Theory of operation. A submission is *in hand* from its admission until its body is opened. It counts with the size that
its headers state. Above a bound it is refused unread, with the seconds after which to come back:

    journal     too much waits to be written, so no rollouts can be acknowledged for a while
    bodies      too many submissions or bytes are in hand, in total or from senders that hold no lease
    own_bodies  this session has four in hand, or a quarter of the bytes: samplers have three under way at a time, and a
                retry may overtake one
    useless     this node has submitted too much that it was not asked for

The sender of a flood pays for it. A rollout is useful if it is accepted, or if its sample was leased to its sender when
it came, even if it is stale, failed or malformed (the lease then ends). The node pays for every other rollout from its
purse of `spare_rollouts`, which refills by `spare_per_s`. One submission may overdraw it, since bodies are opened late.
Then nothing is taken from that node until the purse has refilled. So a node that exceeds its leases costs a known share
of a core.

No node can throttle another. A purse is charged only for bytes under the node's checked signature. Bodies in hand are
counted by session, and only its node was told a session's id. Over plain HTTP others on the line can see it, but they
could also cut the line. A session opened with a replayed OpenSession cannot prove itself. Such sessions and nodes
without a lease (keys cost nothing, leases do) share a quarter of the places, so nodes at work always find the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from swarm.bounded import Bounded
from swarm.net.sessions import SessionClaim
from swarm.rollout.messages import Answer, Submission
from swarm.rollout.plane.nodes import MAX_NODES
from swarm.rollout.plane.verdict import token_fault
from swarm.types import NodeId
from swarm.wire import (
    ROLLOUT_BODY_BYTES,
    ROLLOUT_MAX_RATIO,
    ROLLOUT_UNPACKED_BYTES,
    decode,
    decompress,
    stated_size,
)

INLINE_BYTES = 256 * 1024
"""Largest unpacked size of a submission that is opened on the event loop: 50 rollouts of 512 tokens, which take 3 ms.
Using a thread costs 0.3 ms of a busy core."""


class Claimed(NamedTuple):
    """An answer, and what is malformed about its tokens ("" if nothing)."""

    answer: Answer
    fault: str


def is_small(body: bytes) -> bool:
    """Return whether to open `body` without a thread. Raise ProtocolError if it states no size."""
    return stated_size(body) <= INLINE_BYTES


def open_submission(body: bytes, vocab_size: int) -> tuple[str, list[Claimed]]:
    """Unpack and decode a submission, and check what can be checked without the run's state. Return the node that it
    names as its sender, and its answers. Raise ProtocolError if it is not a submission."""
    content = decompress(body, cap_bytes=ROLLOUT_UNPACKED_BYTES, max_ratio=ROLLOUT_MAX_RATIO)
    submission = decode(content, Submission, cap_bytes=ROLLOUT_UNPACKED_BYTES)
    return submission.node, [Claimed(one, token_fault(one.rollout, vocab_size)) for one in submission.answers]


Reason = Literal["journal", "bodies", "own_bodies", "useless"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeLimits:
    """The bounds, each with its reason."""

    bodies: int = 256  # In hand at once: more than a second of work, so a later one had better come back
    body_bytes: int = 8 * ROLLOUT_BODY_BYTES  # In hand at once: eight of the largest, or 256 of groups of 50 rollouts
    guest_share: float = 0.25  # Share of both for nodes that hold no lease, such as samplers back from an outage
    bodies_of_session: int = 4  # A sampler's three, and a retry before we know that the line of one broke
    session_share: float = 0.25  # Share of the bytes for one session
    spare_rollouts: int = 2048  # Unasked rollouts of a node: twice what may be under way when its line breaks
    spare_per_s: float = 32.0  # Such a rollout costs 0.1 ms, so a node that floods gets 0.3 % of a core
    journal_bytes: int = 64 * 1024 * 1024  # Payloads that wait for the journal: a second of a slow disk
    retry_after_s: float = 1.0  # A full learner needs about this long for the submissions in hand
    max_retry_after_s: float = 60.0  # A purse may be far overdrawn, but a node that comes too early is refused again

    hold_s: float = 1.0
    """How long the learner holds back a refusal that is the node's own fault; the node has to wait that long anyway. A
    node that ignores Retry-After on its eight connections then comes eight times a second, at 0.5 ms each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A submission in hand. It is a `guest` if its sender holds no lease or its session is not proven."""

    session: bytes
    nbytes: int
    guest: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Overloaded:
    """A refusal. The caller sends it after `hold_s`."""

    reason: Reason
    retry_after_s: float
    hold_s: float


TEXTS: Mapping[Reason, str] = {
    "journal": "the learner has more to write than its disk takes",
    "bodies": "the learner has as many submissions in hand as it takes",
    "own_bodies": "you have as much under way as one sampler may: hand it in one after another",
    "useless": "you hand in far more than you were leased",
}
"""What the person at the sampler reads."""


class Intake:
    """Admits submissions. Times are monotonic seconds."""

    def __init__(self, limits: IntakeLimits | None = None) -> None:
        self._limits = limits or IntakeLimits()
        self._in_hand: list[Body] = []
        self._purses: Bounded[NodeId, tuple[float, float]] = Bounded(MAX_NODES)
        self.refused: Counter[str] = Counter()

    def counts(self) -> dict[str, Any]:
        """Return the figures for `status`."""
        return {
            "submissions_in_hand": len(self._in_hand),
            "submission_bytes_in_hand": _bytes_of(self._in_hand),
            "submissions_refused": dict(self.refused),
        }

    def admit(
        self, claim: SessionClaim, nbytes: int | None, *, holds: bool, journal_bytes: int, now: float
    ) -> Body | Overloaded:
        """Take a submission in hand, or refuse it. `nbytes` is the size in its headers, None if they state none.
        `holds` says whether the claimed node has leased samples. `journal_bytes` wait to be written."""
        limits = self._limits
        body = Body(
            session=claim.session,
            # A body over the cap is refused when it is read, with a better reason.
            nbytes=ROLLOUT_BODY_BYTES if nbytes is None else min(nbytes, ROLLOUT_BODY_BYTES),
            guest=not (holds and claim.proven),
        )
        debt_s = max(0.0, (1.0 - self._purse(claim.node, now)) / limits.spare_per_s)
        reason: Reason
        own = [one for one in self._in_hand if one.session == body.session]
        if not _fits(body, own, limits.bodies_of_session, limits.session_share * limits.body_bytes):
            reason = "own_bodies"
        elif debt_s > 0.0:
            reason = "useless"
        elif journal_bytes > limits.journal_bytes:
            reason = "journal"
        elif not self._has_room(body):
            reason = "bodies"
        else:
            self._in_hand.append(body)
            return body
        self.refused[reason] += 1
        return Overloaded(
            reason=reason,
            retry_after_s=min(limits.max_retry_after_s, max(limits.retry_after_s, debt_s)),
            hold_s=limits.hold_s if reason in ("own_bodies", "useless") else 0.0,
        )

    def done(self, body: Body) -> None:
        """Note that a submission was opened, or that its sender has gone."""
        self._in_hand.remove(body)

    def charge(self, node: NodeId, useless: int, *, now: float) -> None:
        """Charge `node`, whose signature was checked, for rollouts that it was not asked for."""
        if not useless:
            return
        self._purses[node] = (self._purse(node, now) - useless, now)

    def _has_room(self, body: Body) -> bool:
        """Return whether there is room. Guests must also fit into their share, so that the rest stays free."""
        limits, share = self._limits, self._limits.guest_share
        guests = [one for one in self._in_hand if one.guest]
        if body.guest and not _fits(body, guests, share * limits.bodies, share * limits.body_bytes):
            return False
        return _fits(body, self._in_hand, limits.bodies, limits.body_bytes)

    def _purse(self, node: NodeId, now: float) -> float:
        tokens, then = self._purses.get(node, (float(self._limits.spare_rollouts), now))
        return min(self._limits.spare_rollouts, tokens + (now - then) * self._limits.spare_per_s)


def _bytes_of(bodies: Sequence[Body]) -> int:
    return sum(body.nbytes for body in bodies)


def _fits(body: Body, others: Sequence[Body], most: float, most_bytes: float) -> bool:
    return len(others) < most and _bytes_of(others) + body.nbytes <= most_bytes
