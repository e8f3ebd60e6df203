"""Who can be dialled: which addresses may be called at all, dial-back as a proof, and its limits.

Theory of operation. A node starts as a leaf. It asks several publics, one after another, to call it back at the address
they see it come from, at the port it declares; each that gets through is a witness of that address. With two witnesses,
or with all where fewer are known, the node is public at it. A public asks again now and then; when everybody it asks
fails twice in a row, it is a leaf again. The one who calls back does so rarely, and never where it could do harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from random import Random
from typing import Annotated

import msgspec

from swarm.net.signing import PublicKeyField
from swarm.net.wire import Message
from swarm.types import Address, Id, NodeId

WITNESSES = 2  # One witness may sit in our own network, or lie; the young swarm has only the learner
ASK_ROUNDS = 5
CHECK_ROUNDS = 150
"""A leaf asks every 10 s until it has its witnesses, or eight were of no use; then, and as a public, every 5 min."""

PATIENT_FAILURES = 8
LOST_AFTER = 2  # Failed checks in a row that make a public a leaf
DIAL_BACKS_PER_MINUTE = 1
LAN_DIAL_BACKS_PER_MINUTE = 60  # For one address: a home has one router. In a laboratory many nodes share an address.
MAX_DIALLED = 4096  # Addresses that are remembered for a minute; when they are more, everybody waits

METADATA = (ip_address("169.254.169.254"), ip_address("fd00:ec2::254"), ip_address("100.100.100.200"))
"""Where clouds keep their machines' credentials; no setting opens these."""

INTERNET6 = ip_network("2000::/3")
TUNNELS6 = (ip_network("2002::/16"), ip_network("2001::/32"))
"""All that IPv6 routes globally, and the parts of it that carry IPv4 addresses, private ones too: 6to4 and Teredo."""

MAX_CLAIMED = 8  # Addresses that witnesses may have named at a time: a lying one has a new answer every time
DIAL_BACK_CONTEXT = "dial-back"


class DialBack(Message, frozen=True):
    """Call me back at the address you see, at this port. `fingerprint` is that of my certificate."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    fingerprint: Annotated[bytes, msgspec.Meta(max_length=32)]


class DialBackReply(Message, frozen=True):
    """The address that was seen, and whether a call to it got through; `refused` says why none was made."""

    host: Annotated[str, msgspec.Meta(max_length=253)]
    reached: bool
    refused: Annotated[str, msgspec.Meta(max_length=200)] = ""


class Knock(Message, frozen=True):
    """What the one who was called back signs: that it is `key`'s owner and has heard `nonce`."""

    key: PublicKeyField
    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    caller: Id


def is_dialable(host: str, *, lan: bool) -> bool:
    """Whether a node may call this host because another one named it. Names are not resolved: only literal
    addresses of the open internet, or with `lan` private and loopback ones too."""
    try:
        address = ip_address(host)
    except ValueError:
        return False
    address = _unwrapped(address)
    if address in METADATA or address.is_link_local or address.is_multicast or address.is_unspecified:
        return False
    if isinstance(address, IPv6Address) and any(address in tunnel for tunnel in TUNNELS6):
        return False
    if address.is_global:
        # What lies outside carries an IPv4 address too: those of translators, and old notations.
        return isinstance(address, IPv4Address) or address in INTERNET6
    return lan and (address.is_private or address.is_loopback)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return _unwrapped(ip_address(host)).is_loopback
    except ValueError:
        return False


def is_name(host: str) -> bool:
    """Neither an address nor this machine."""
    return _canonical(host) is None and not is_loopback(host) and ":" not in host


def is_private(host: str) -> bool:
    """A literal address of a private network, other than this machine's own."""
    return not is_loopback(host) and not is_dialable(host, lan=False) and is_dialable(host, lan=True)


class DialBackLimit:
    """How often this node calls back, by address."""

    def __init__(self, *, lan: bool) -> None:
        self._per_minute = LAN_DIAL_BACKS_PER_MINUTE if lan else DIAL_BACKS_PER_MINUTE
        self._lan = lan
        self._times: dict[str, list[float]] = {}

    def refusal(self, host: str, *, now: float) -> str:
        """Why `host` is not called now; empty if it may be, which counts as a call."""
        if not is_dialable(host, lan=self._lan):
            return "private addresses are not called back (--lan allows them)"
        host = _home_of(host)
        for old in [known for known, times in self._times.items() if now - times[-1] >= 60.0]:
            del self._times[old]
        recent = [at for at in self._times.get(host, []) if now - at < 60.0]
        if len(recent) >= self._per_minute:
            return "this address was called back less than a minute ago"
        if len(self._times) >= MAX_DIALLED:
            return "too many addresses want to be called back"
        self._times[host] = [*recent, now]
        return ""


class Reachability:
    """A node's own case. `round_s` sets the pace; a node that `never` listens outside never asks."""

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
        """Whom to ask now: somebody who is not a witness yet, as long as there is one."""
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
        """What a witness found; True if `address` has changed."""
        if reply.refused:
            return False
        if not reply.reached:
            return self._failed()
        host = _canonical(reply.host)
        if host is None or not is_dialable(host, lan=self._lan):
            # An honest witness names what its socket saw, and calls nothing else.
            return self._failed()
        self._failures = 0
        self._witnesses.setdefault(host, set()).add(witness)
        while len(self._witnesses) > MAX_CLAIMED:
            del self._witnesses[next(iter(self._witnesses))]
        if len(self._witnesses[host]) < min(WITNESSES, publics):
            # Others are there to be asked.
            self._ask_at = min(self._ask_at, now + self._round_s / 2)
            return False
        found = Address(host=host, port=self._port, fingerprint=self._fingerprint)
        # Witnesses of former addresses are of no use any more; a home line changes its address now and then.
        self._witnesses = {host: self._witnesses[host]}
        changed = found != self.address
        self.address = found
        return changed

    def _failed(self) -> bool:
        self._failures += 1
        if self.address is None or self._failures < LOST_AFTER:
            return False
        self.address = None
        self._witnesses.clear()
        return True


def _canonical(host: str) -> str | None:
    """The one way to write this literal address; None for a name, or for an address within some network's scope."""
    try:
        return None if "%" in host else str(_unwrapped(ip_address(host)))
    except ValueError:
        return None


def _home_of(host: str) -> str:
    """IPv4 as it is, IPv6 by the /64 that a home has at least."""
    canonical = _canonical(host) or host
    return str(ip_network(f"{canonical}/64", strict=False)) if ":" in canonical else canonical


def _unwrapped(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """An IPv4 address inside an IPv6 one is the IPv4 address."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
