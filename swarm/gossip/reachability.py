"""Which nodes can be dialled: dial-back as a proof, and its limits.

Theory of operation. A node starts as a leaf. It asks several publics, one after another, to call it back, at the
address from which they see it come and the port that it declares. Each that gets through is a witness of that address.
With two witnesses, or with all if fewer publics are known, the node is public at that address. A public asks again now
and then; after two failures in a row it is a leaf again. A node calls others back rarely, and never where it could do
harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Annotated

import msgspec

from swarm.gossip.records import MAX_PER_SUBNET
from swarm.net.hosts import address_of, caller_of, is_dialable, network_of
from swarm.net.limits import Meter, RateLimits
from swarm.net.signing import PublicKeyField
from swarm.types import Address, Id, NodeId
from swarm.wire import Message

WITNESSES = 2  # One witness may sit in our own network, or lie; a young swarm has only the learner
ASK_ROUNDS = 5  # A leaf asks every 10 s until it has its witnesses, or after eight failures
CHECK_ROUNDS = 150  # After that, and as a public, every 5 min
PATIENT_FAILURES = 8
LOST_AFTER = 2  # Failed checks in a row that make a public a leaf
DIAL_BACKS_PER_MINUTE = 1
LAN_DIAL_BACKS_PER_MINUTE = 60  # Per address: a home has one router, but in a laboratory many nodes share an address
MAX_CLAIMED = 8  # Addresses remembered that witnesses named: a liar has a new answer every time
DIAL_BACK_CONTEXT = "dial-back"
CROWDED = (
    "your network has as many public nodes as this swarm takes"  # No other refusal tells what an address is good for
)


class DialBack(Message, frozen=True):
    """Call me back at the address you see, at this port. `fingerprint` is my certificate's."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    fingerprint: Annotated[bytes, msgspec.Meta(max_length=32)]


class DialBackReply(Message, frozen=True):
    """The address that was seen, and whether a call to it got through. `refused` says why none was made."""

    host: Annotated[str, msgspec.Meta(max_length=253)]
    reached: bool
    refused: Annotated[str, msgspec.Meta(max_length=200)] = ""


class Knock(Message, frozen=True):
    """What a node that was called back signs: that it owns `key` and has heard `nonce`."""

    key: PublicKeyField
    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    caller: Id


class DialBackLimit:
    """How often this node calls back, by address."""

    def __init__(self, *, lan: bool) -> None:
        per_minute = LAN_DIAL_BACKS_PER_MINUTE if lan else DIAL_BACKS_PER_MINUTE
        self._lan = lan
        self._meter = Meter(limits := RateLimits(requests_per_s=per_minute / 60, burst=per_minute))
        self._networks = Meter(limits, MAX_PER_SUBNET)

    def refusal(self, host: str, *, now: float) -> str:
        """Return why `host` is not called now. If it may be called, count that as a call and return ""."""
        if not is_dialable(host, lan=self._lan):
            return "private addresses are not called back (--lan allows them)"
        too_soon = self._meter.take(caller_of(host), now=now) or self._networks.take(network_of(host), now=now)
        return "this address was called back less than a minute ago" if too_soon else ""


class Reachability:
    """Whether others can dial this node. `address` is where they can, None for a leaf. `round_s` sets the pace."""

    def __init__(self, *, port: int, fingerprint: bytes, round_s: float, lan: bool, random: Random, now: float) -> None:
        self._lan = lan
        self._port = port
        self._fingerprint = fingerprint
        self._round_s = round_s
        self._random = random
        self._witnesses: dict[str, set[NodeId]] = {}
        self._failures = 0
        self._ask_at = now
        self.address: Address | None = None

    def deadline(self) -> float:
        return self._ask_at

    def ask(self, publics: Sequence[NodeId], *, now: float) -> NodeId | None:
        """Return which public to ask now, if any: one that is not a witness yet, as long as there is one."""
        if now < self._ask_at:
            return None
        if not publics:
            self._ask_at = now + self._round_s
            return None
        patient = self.address is not None or self._failures >= PATIENT_FAILURES
        rounds = CHECK_ROUNDS if patient else ASK_ROUNDS
        self._ask_at = now + self._round_s * rounds * self._random.uniform(0.8, 1.2)
        known = set().union(*self._witnesses.values()) if self.address is None else set()
        fresh = [node for node in publics if node not in known]
        return self._random.choice(fresh or list(publics))

    def message(self) -> DialBack:
        return DialBack(port=self._port, fingerprint=self._fingerprint)

    def answered(self, witness: NodeId, reply: DialBackReply, publics: int, *, now: float) -> bool:
        """Take in what a witness found. Return True if `address` has changed."""
        if reply.refused:
            # Nodes drop records that they have no room for, and a public that no node knows has to act as a leaf.
            return self._failed() if reply.refused == CROWDED else False
        # An honest witness names only the address that its socket saw and that it called.
        if not reply.reached or "%" in reply.host or not is_dialable(reply.host, lan=self._lan):
            return self._failed()
        host = str(address_of(reply.host))
        self._failures = 0
        self._witnesses.setdefault(host, set()).add(witness)
        while len(self._witnesses) > MAX_CLAIMED:
            del self._witnesses[next(iter(self._witnesses))]
        if len(self._witnesses[host]) < min(WITNESSES, publics):
            # There are other publics to ask.
            self._ask_at = min(self._ask_at, now + self._round_s / 2)
            return False
        # Forget witnesses of former addresses: a home line changes its address now and then.
        self._witnesses = {host: self._witnesses[host]}
        before, self.address = self.address, Address(host=host, port=self._port, fingerprint=self._fingerprint)
        return self.address != before

    def _failed(self) -> bool:
        self._failures += 1
        if self.address is None or self._failures < LOST_AFTER:
            return False
        self.address = None
        self._witnesses.clear()
        return True
