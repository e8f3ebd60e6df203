"""The links of a broadcast benchmark: profiles of hosts, faults, and the least time that any scheme needs. Pure.

Rates are in Mbit/s of 1,000,000 bits, times in seconds, sizes in bytes. Host 1 is the learner, the others are peers.
"""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

BYTES_PER_MBIT = 125_000

MAX_HOSTS = 250
"""What tests.netns.hosts can make."""

STALLED_MBIT = 1.0

LEARNER = 1
"""Number of the learner's host."""


class BadProfile(Exception):
    """A profile or a fault that makes no sense; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """What one host may send and receive. Nobody can dial a host that is not `reachable`."""

    up_mbit: float
    down_mbit: float
    reachable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The learner and its peers, by the numbers of their hosts."""

    name: str
    learner: HostLink
    peers: dict[int, HostLink]

    @property
    def hosts(self) -> dict[int, HostLink]:
        return {LEARNER: self.learner, **self.peers}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to a peer when the median peer has received `fraction` of the bytes."""

    kind: Literal["kill", "stall", "stall-up"]
    host: int
    fraction: float


def equal_profile(peers: int, up_mbit: float, down_mbit: float) -> Profile:
    """A learner and peers whose links are all alike, the learner's too."""
    link = {"up_mbit": up_mbit, "down_mbit": down_mbit}
    return profile_of(f"{peers} x {up_mbit:g}/{down_mbit:g}", [link] * (peers + 1))


def read_profile(path: Path) -> Profile:
    """The profile in a TOML file: tables [[host]], the first of them the learner."""
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadProfile(f"cannot read {path}: {error}") from error
    if set(content) != {"host"} or not isinstance(content["host"], list):
        raise BadProfile(f"{path}: a profile is a list of [[host]] and nothing else")
    return profile_of(path.stem, content["host"])


def profile_of(name: str, tables: list[Any]) -> Profile:
    """A profile from tables with up_mbit, down_mbit and, unless it is true, reachable."""
    if not 2 <= len(tables) <= MAX_HOSTS:
        raise BadProfile(f"{name}: a learner and 1 to {MAX_HOSTS - 1} peers, not {len(tables)} hosts")
    hosts = [_link(name, number, table) for number, table in enumerate(tables, start=LEARNER)]
    if not hosts[0].reachable:
        raise BadProfile(f"{name}: the first host is the learner, and everybody must reach it")
    return Profile(name=name, learner=hosts[0], peers=dict(enumerate(hosts[1:], start=LEARNER + 1)))


def _link(name: str, number: int, table: Any) -> HostLink:
    where = f"{name}: host {number}"
    if not isinstance(table, dict):
        raise BadProfile(f"{where} is no table")
    if unknown := sorted(set(table) - {"up_mbit", "down_mbit", "reachable"}):
        raise BadProfile(f"{where} has an unknown key {unknown[0]!r}")
    rates = {key: table.get(key) for key in ("up_mbit", "down_mbit")}
    for key, rate in rates.items():
        if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < math.inf:
            raise BadProfile(f"{where} needs a number above zero as {key}, not {rate!r}")
    reachable = table.get("reachable", True)
    if not isinstance(reachable, bool):
        raise BadProfile(f"{where}: reachable is true or false, not {reachable!r}")
    return HostLink(up_mbit=table["up_mbit"], down_mbit=table["down_mbit"], reachable=reachable)


def bound_s(nbytes: int, profile: Profile) -> float:
    """The least time in which `nbytes` can reach every peer: the largest of four terms.

    Three are Kumar and Ross's (2006): the learner's uplink, the slowest downlink, all uplinks together. The fourth is
    the third for the unreachable alone, who cannot dial one another: only the learner and the publics can serve them.
    """
    peers = list(profile.peers.values())
    leaves = [peer for peer in peers if not peer.reachable]
    learner_up = profile.learner.up_mbit
    all_up = learner_up + sum(peer.up_mbit for peer in peers)
    publics_up = learner_up + sum(peer.up_mbit for peer in peers if peer.reachable)
    terms = (
        1 / learner_up,
        1 / min(peer.down_mbit for peer in peers),
        len(peers) / all_up,
        len(leaves) / publics_up,
    )
    return nbytes / BYTES_PER_MBIT * max(terms)


def bound_with_faults_s(nbytes: int, profile: Profile, faults: list[Fault]) -> float:
    """As `bound_s`, where links change: each stretch between two faults takes its share of its own profile's bound."""
    total_s, since = 0.0, 0.0
    for fault in in_order(faults):
        total_s += (fault.fraction - since) * bound_s(nbytes, profile)
        profile, since = after(profile, fault), fault.fraction
    return total_s + (1 - since) * bound_s(nbytes, profile)


def in_order(faults: list[Fault]) -> list[Fault]:
    return sorted(faults, key=lambda fault: (fault.fraction, fault.host))


def after(profile: Profile, fault: Fault) -> Profile:
    """Who still counts, and with what link. A peer that is killed or can receive no more is not waited for."""
    peers = dict(profile.peers)
    link = peers.pop(fault.host)
    if fault.kind == "stall-up":
        peers[fault.host] = replace(link, up_mbit=STALLED_MBIT)
    return replace(profile, peers=peers)


def survivors(profile: Profile, faults: list[Fault]) -> Profile:
    """The profile when all faults have happened."""
    for fault in in_order(faults):
        profile = after(profile, fault)
    return profile


_FAULT = re.compile(r"(?P<host>[0-9]{1,3}|fastest)@(?P<fraction>0(\.[0-9]+)?|\.[0-9]+)(?P<up>:up)?")


def read_fault(kind: Literal["kill", "stall"], text: str, profile: Profile) -> Fault:
    """A fault from HOST@FRACTION, for a stall of the uplink alone HOST@FRACTION:up. HOST may be `fastest`."""
    match = _FAULT.fullmatch(text)
    if match is None or (kind == "kill" and match["up"]):
        raise BadProfile(f"--{kind} takes HOST@FRACTION like 5@0.5, not {text!r}")
    host = fastest(profile) if match["host"] == "fastest" else int(match["host"])
    if host not in profile.peers:
        raise BadProfile(f"--{kind} {text}: peers are hosts {LEARNER + 1} to {LEARNER + len(profile.peers)}")
    return Fault(kind="stall-up" if match["up"] else kind, host=host, fraction=float(match["fraction"]))


def check_faults(profile: Profile, faults: list[Fault]) -> None:
    """BadProfile unless every fault hits another peer and one is left to wait for."""
    if len({fault.host for fault in faults}) != len(faults):
        raise BadProfile("a host has one fault at most")
    if sum(fault.kind != "stall-up" for fault in faults) >= len(profile.peers):
        raise BadProfile("at least one peer must be left to wait for")


def fastest(profile: Profile) -> int:
    """The peer with the greatest uplink that others can dial, or of all if they can dial none; the first of several."""
    publics = {host: link for host, link in profile.peers.items() if link.reachable} or profile.peers
    return max(publics, key=lambda host: publics[host].up_mbit)
