"""What a host is, judged by its address alone (names are never resolved here), and how often a silent one is tried."""

from __future__ import annotations

import math
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from swarm.bounded import Bounded
from swarm.types import Address

METADATA = (ip_address("169.254.169.254"), ip_address("fd00:ec2::254"), ip_address("100.100.100.200"))
"""Where clouds keep their machines' credentials. No setting allows these."""

INTERNET6 = ip_network("2000::/3")
TUNNELS6 = (ip_network("2002::/16"), ip_network("2001::/32"))
"""All that IPv6 routes globally, and the parts of it (6to4, Teredo) that carry IPv4 addresses, even private ones."""

HOME6_BITS = 64  # A home gets at least this IPv6 prefix, so all addresses in it count as one caller
MAX_TRIED = 4096  # Hosts whose silence is remembered: as many as a node may know


@lru_cache(maxsize=8192)
def address_of(host: str) -> IPv4Address | IPv6Address | None:
    """Return the literal address in `host` without its scope, or None for a name. IPv4 inside IPv6 counts as IPv4."""
    try:
        # Only IPv6 has scopes: "8.8.8.8%x.example" is a name, and may lead anywhere.
        address = ip_address(host.partition("%")[0] if ":" in host else host)
    except ValueError:
        return None
    return (address.version == 6 and address.ipv4_mapped) or address


def caller_of(host: str) -> str:
    """Return the name under which a peer's address is counted: IPv4 as it is, IPv6 by its home's prefix."""
    address = address_of(host)
    if address is None or address.version == 4:
        return str(address or host)
    return str(ip_network((address, HOME6_BITS), strict=False))


@lru_cache(maxsize=8192)
def network_of(host: str) -> str:
    """Return the name of the /24 (IPv4) or /48 (IPv6) of an address of the open internet, the smallest blocks that are
    rented on their own. In a private network each host stands for itself."""
    address = address_of(open_host(host))
    return address.packed[: 3 if address.version == 4 else 6].hex() if address is not None else host


def is_loopback(host: str) -> bool:
    address = address_of(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def is_dialable(host: str, *, lan: bool) -> bool:
    """Return True if a node may call this host because another node named it. Only literal addresses of the open
    internet are allowed, and with `lan` private and loopback ones too."""
    address = address_of(host)
    if address is None or address in METADATA:
        return False
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        return False
    if isinstance(address, IPv6Address) and any(address in tunnel for tunnel in TUNNELS6):
        return False
    if address.is_global:
        # Outside INTERNET6 an address may carry an IPv4 one too: translators' addresses and old notations.
        return isinstance(address, IPv4Address) or address in INTERNET6
    return lan and (address.is_private or address.is_loopback)


@lru_cache(maxsize=8192)
def open_host(host: str) -> str:
    """Return an address of the open internet in its one notation, whatever it was written as; "" for other hosts."""
    return str(address_of(host)) if is_dialable(host, lan=False) else ""


class Tries:
    """How often a host is tried that does not answer: `first_s` after the first time, then twice as late each time, up
    to `max_s`, whatever names it is called by. With `lan` each port of a private host counts as a host. Without it only
    private hosts that the user named are called, and others must not have all ports there tried."""

    def __init__(self, first_s: float, max_s: float, *, lan: bool) -> None:
        self._lan = lan
        self._first_s = first_s
        self._max_s = max_s
        self._tried: Bounded[str, tuple[float, float]] = Bounded(MAX_TRIED)

    def is_due(self, address: Address, *, now: float) -> bool:
        return self._tried.get(self._place(address), (0.0, -math.inf))[1] <= now

    def has_waiting(self, *, now: float) -> bool:
        """Return True if there is any host that is not due."""
        return any(at > now for _, at in self._tried.values())

    def tried(self, address: Address, *, now: float) -> None:
        """Count a call before its outcome is known."""
        wait_s = min(self._max_s, self._tried.get(self._place(address), (self._first_s, 0.0))[0])
        self._tried[self._place(address)] = 2 * wait_s, now + wait_s

    def answered(self, address: Address) -> None:
        self._tried.pop(self._place(address), None)

    def _place(self, address: Address) -> str:
        return open_host(address.host) or (address.authority if self._lan else address.host)


def is_private(host: str) -> bool:
    """Return True for a literal address of a private network, other than this machine's own."""
    return not is_loopback(host) and not is_dialable(host, lan=False) and is_dialable(host, lan=True)


def is_name(host: str) -> bool:
    """Return True for a host that is neither an address nor this machine."""
    return address_of(host) is None and host != "localhost" and ":" not in host
