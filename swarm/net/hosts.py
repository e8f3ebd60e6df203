"""What a host is, judged by its address alone: names are never resolved here."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

METADATA = (ip_address("169.254.169.254"), ip_address("fd00:ec2::254"), ip_address("100.100.100.200"))
"""Where clouds keep their machines' credentials. No setting opens these."""

INTERNET6 = ip_network("2000::/3")
TUNNELS6 = (ip_network("2002::/16"), ip_network("2001::/32"))
"""All that IPv6 routes globally, and the parts of it that carry IPv4 addresses, private ones too: 6to4 and Teredo."""

HOME6_BITS = 64  # A home gets at least this IPv6 prefix, so every address in it is the same caller


def address_of(host: str) -> IPv4Address | IPv6Address | None:
    """The literal address in `host` without its scope, or None for a name. IPv4 inside IPv6 is IPv4."""
    try:
        # Only IPv6 has scopes: "8.8.8.8%x.example" is a name, and may lead anywhere.
        address = ip_address(host.partition("%")[0] if ":" in host else host)
    except ValueError:
        return None
    return (address.version == 6 and address.ipv4_mapped) or address


def caller_of(host: str) -> str:
    """The name under which a peer's address is counted: IPv4 as it is, IPv6 by its home's prefix."""
    address = address_of(host)
    if address is None or address.version == 4:
        return str(address or host)
    return str(ip_network((address, HOME6_BITS), strict=False))


def is_loopback(host: str) -> bool:
    address = address_of(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def is_dialable(host: str, *, lan: bool) -> bool:
    """Whether a node may call this host because another node named it: only literal addresses of the open internet,
    and with `lan` private and loopback ones too."""
    address = address_of(host)
    if address is None or address in METADATA:
        return False
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        return False
    if isinstance(address, IPv6Address) and any(address in tunnel for tunnel in TUNNELS6):
        return False
    if address.is_global:
        # Outside of INTERNET6 an address may carry an IPv4 one too: those of translators, and old notations.
        return isinstance(address, IPv4Address) or address in INTERNET6
    return lan and (address.is_private or address.is_loopback)


def is_private(host: str) -> bool:
    """Whether this is a literal address of a private network, other than this machine's own."""
    return not is_loopback(host) and not is_dialable(host, lan=False) and is_dialable(host, lan=True)


def is_name(host: str) -> bool:
    """Neither an address nor this machine."""
    return address_of(host) is None and host != "localhost" and ":" not in host
