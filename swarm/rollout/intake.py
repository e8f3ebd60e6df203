"""Which submissions are let in, from their headers alone, before a body is read; and rollouts from a body that was.

Theory of operation. A submission is *in hand* from its admission until it is answered; its body counts with the size
that its headers state. Over a bound it is refused unread, with the seconds after which to come back:

    journal     too much waits to be written: nobody's rollouts can be acknowledged for a while
    bodies      too many, or too many bytes, are in hand: in all, or of senders that hold no lease
    own_bodies  this session has two in hand: samplers hand in one after another, and a retry may overtake one
    useless     this node has handed in too much that nobody asked it for

A flood is paid for by its sender. A rollout is useful if it was accepted, or if its sample was leased to its sender
when it came (stale, failed and malformed ones included: the lease is then over). Every other one, a duplicate or an
invention, is paid from the node's own purse: `spare_rollouts`, filled again by `spare_per_s`. The sizes of bodies are
not known in advance, so one submission may overdraw a purse; until it is filled again, nothing more is taken from its
node. What a node can do beyond its leases costs the learner a known share of a core.

No node can throttle another. A purse is charged only for bytes that a node's signature was checked over. Bodies in hand
are counted by session, whose id the server told to its node alone; over plain HTTP anybody on the line sees it too, and
could as well cut the line. A session opened with a recorded OpenSession cannot prove itself: like nodes that hold no
lease (keys cost nothing, leases do), all such sessions share a quarter of the places. So nodes that work always find
the rest.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from swarm.errors import TooLarge
from swarm.net.sessions import Claim
from swarm.net.signing import unseal
from swarm.net.wire import (
    ROLLOUT_BODY_BYTES,
    ROLLOUT_MAX_RATIO,
    ROLLOUT_UNPACKED_BYTES,
    decode,
    decompress,
    stated_size,
)
from swarm.rollout.messages import LEASE_CONTEXT, LEASE_TOKEN_BYTES, MAX_SUBMITTED, Submission
from swarm.rollout.plane.leases import MAX_NODES
from swarm.rollout.plane.verdict import malformation
from swarm.types import Lease, NodeId, Rollout

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


Reason = Literal["journal", "bodies", "own_bodies", "useless"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeLimits:
    """The bounds, each with its reason."""

    bodies: int = 256
    """In hand at once. At 200 submissions a second that is more than a second of work: whoever comes then had better
    come back than wait."""

    body_bytes: int = 8 * ROLLOUT_BODY_BYTES
    """In hand at once: eight of the largest, or all 256 of groups of 50 rollouts."""

    guest_share: float = 0.25  # Of both, for those who hold no lease: samplers back from an outage, and whoever else

    bodies_of_session: int = 2
    """A sampler hands in one after another. The second is for a retry that comes before we know that its connection
    is lost."""

    spare_rollouts: int = 2048
    """Rollouts that a node may hand in for nothing: what was under way when its line broke, and once more; each may be
    1,024."""

    spare_per_s: float = 32.0
    """And each second after that: such a rollout costs 0.1 ms, so a node that floods gets 0.3 % of a core."""

    journal_bytes: int = 64 * 1024 * 1024
    """Payloads that wait for the journal: a second of a slow disk, and no more memory than that."""

    retry_after_s: float = 1.0  # When the learner is full it works off what it has in about that time
    most_retry_after_s: float = 60.0  # A purse may be far overdrawn, but whoever comes too early is refused again

    hold_s: float = 1.0
    """How long the answer to one who is refused for what it does itself is held back: it was to wait as long anyway.
    With its eight connections a node that does not heed Retry-After comes eight times a second, at 0.5 ms each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A submission in hand: whose session, how large, and whether by one that holds no lease."""

    session: bytes
    nbytes: int
    guest: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Overloaded:
    """Say so after `hold_s`: come back after `retry_after_s`."""

    reason: Reason
    retry_after_s: float
    hold_s: float


TEXTS: Mapping[Reason, str] = {
    "journal": "the learner has more to write than its disk takes",
    "bodies": "the learner has as many submissions in hand as it takes",
    "own_bodies": "you have two submissions under way: hand them in one after another",
    "useless": "you hand in far more than you were leased",
}
"""For the person at the sampler."""


class Intake:
    """Admits submissions. `refused` counts by reason. `now` is monotonic seconds."""

    def __init__(self, limits: IntakeLimits | None = None) -> None:
        self._limits = limits or IntakeLimits()
        self._of_session: Counter[bytes] = Counter()
        self._bodies = {True: 0, False: 0}
        self._bytes = {True: 0, False: 0}
        self._purses: OrderedDict[NodeId, tuple[float, float]] = OrderedDict()
        self.refused: Counter[str] = Counter()

    def counts(self) -> dict[str, Any]:
        """For `status`: what is in hand, and what was refused by reason, in submissions."""
        return {
            "submissions_in_hand": sum(self._bodies.values()),
            "submission_bytes_in_hand": sum(self._bytes.values()),
            "submissions_refused": dict(self.refused),
        }

    def admit(
        self, claim: Claim, nbytes: int | None, *, holds: bool, journal_bytes: int, now: float
    ) -> Body | Overloaded:
        """Take a submission in hand, or refuse it. `nbytes`: what its headers state, None if they do not; `holds`: the
        node that is claimed has samples leased; `journal_bytes` wait to be written."""
        limits = self._limits
        body = Body(
            session=claim.session,
            # One that states more than the cap is refused by whoever reads it, with a better reason.
            nbytes=ROLLOUT_BODY_BYTES if nbytes is None else min(nbytes, ROLLOUT_BODY_BYTES),
            guest=not (holds and claim.proven),
        )
        if self._of_session[body.session] >= limits.bodies_of_session:
            return self._refuse("own_bodies", hold_s=limits.hold_s)
        if (wait_s := self._in_debt_s(claim.node, now)) > 0.0:
            return self._refuse("useless", hold_s=limits.hold_s, wait_s=wait_s)
        if journal_bytes > limits.journal_bytes:
            return self._refuse("journal")
        if not self._fits(body):
            return self._refuse("bodies")
        self._count(body, 1)
        return body

    def done(self, body: Body) -> None:
        """A submission was answered, or its sender has gone."""
        self._count(body, -1)

    def charge(self, node: NodeId, useless: int, *, now: float) -> None:
        """`node`, proven, has handed in so many rollouts that nobody asked it for."""
        if not useless:
            return
        self._purses[node] = (self._purse(node, now) - useless, now)
        self._purses.move_to_end(node)
        if len(self._purses) > MAX_NODES:
            self._purses.popitem(last=False)

    def _fits(self, body: Body) -> bool:
        """Guests are bounded by their share besides, so that what they leave free is there for the others."""
        limits = self._limits
        if body.guest and (
            self._bodies[True] >= limits.guest_share * limits.bodies
            or self._bytes[True] + body.nbytes > limits.guest_share * limits.body_bytes
        ):
            return False
        nbytes = sum(self._bytes.values()) + body.nbytes
        return sum(self._bodies.values()) < limits.bodies and nbytes <= limits.body_bytes

    def _purse(self, node: NodeId, now: float) -> float:
        tokens, then = self._purses.get(node, (float(self._limits.spare_rollouts), now))
        return min(self._limits.spare_rollouts, tokens + (now - then) * self._limits.spare_per_s)

    def _in_debt_s(self, node: NodeId, now: float) -> float:
        """Seconds until the node's purse holds a rollout; 0 if it does."""
        return max(0.0, (1.0 - self._purse(node, now)) / self._limits.spare_per_s)

    def _count(self, body: Body, by: int) -> None:
        self._bodies[body.guest] += by
        self._bytes[body.guest] += by * body.nbytes
        self._of_session[body.session] += by
        if not self._of_session[body.session]:
            del self._of_session[body.session]

    def _refuse(self, reason: Reason, *, hold_s: float = 0.0, wait_s: float = 0.0) -> Overloaded:
        self.refused[reason] += 1
        limits = self._limits
        retry_after_s = min(limits.most_retry_after_s, max(limits.retry_after_s, wait_s))
        return Overloaded(reason=reason, retry_after_s=retry_after_s, hold_s=hold_s)
