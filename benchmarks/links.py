"""The links of a broadcast benchmark: profiles of hosts, faults, the least time that any scheme needs, and the figures
of what was observed. Pure.

Rates are in Mbit/s of 1,000,000 bits, times in seconds, sizes in bytes. Host 1 is the learner, the others are peers.
"""

from __future__ import annotations

import re
import statistics
import tomllib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

BYTES_PER_MBIT = 125_000

MAX_HOSTS = 250
"""What tests.netns.hosts can make."""

STALLED_MBIT = 1.0

LEARNER = 1
"""Number of the learner's host."""


Figures = dict[str, Any]
BYTES_PER_GB = 1e9
Rate = Annotated[float, msgspec.Meta(gt=0)]


class BadProfile(Exception):
    """A profile or a fault that makes no sense; the message is one line."""


class TransferFailed(Exception):
    """A scheme did not come to its end; the message is one line."""


class HostLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one host may send and receive. No other host can dial one that is not `reachable`."""

    up_mbit: Rate
    down_mbit: Rate
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
    link = HostLink(up_mbit=up_mbit, down_mbit=down_mbit)
    return profile_of(f"{peers} x {up_mbit:g}/{down_mbit:g}", [link] * (peers + 1))


def read_profile(path: Path) -> Profile:
    """The profile in a TOML file: tables [[host]], the first of them the learner."""
    try:
        hosts = msgspec.convert(tomllib.loads(path.read_text())["host"], list[HostLink])
    except (OSError, ValueError, KeyError) as error:
        raise BadProfile(f"{path} is no list of [[host]]: {error}") from error
    return profile_of(path.stem, hosts)


def profile_of(name: str, hosts: Sequence[HostLink]) -> Profile:
    """The first host is the learner."""
    if not 2 <= len(hosts) <= MAX_HOSTS:
        raise BadProfile(f"{name}: a learner and 1 to {MAX_HOSTS - 1} peers, not {len(hosts)} hosts")
    if not hosts[0].reachable:
        raise BadProfile(f"{name}: the first host is the learner, which everyone must reach")
    return Profile(name=name, learner=hosts[0], peers=dict(enumerate(hosts[1:], start=LEARNER + 1)))


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
        peers[fault.host] = msgspec.structs.replace(link, up_mbit=STALLED_MBIT)
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


# -- what was observed, and its figures ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Running totals at one moment: CPU seconds of all processes of the scheme, and bytes that left the learner."""

    at_s: float
    cpu_s: float
    sent_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One run of one scheme. Times are those of one monotonic clock."""

    nbytes: int
    began_s: float
    completed_s: dict[int, float]
    samples: list[Sample]
    encrypted: bool
    faults_s: list[float] = field(default_factory=list)
    """When the faults happened."""
    victims_sent_bytes: list[int] = field(default_factory=list)
    """What each of their hosts had sent of this transfer by then."""
    topology: str | None = None
    """What the learner says of its plan; None if it has none."""


def figures_of(transfer: Transfer, profile: Profile, faults: list[Fault]) -> Figures:
    """The figures of one run; peers that a fault took out are not waited for. TransferFailed if one came too late."""
    waited_for = survivors(profile, faults).peers
    ends_s = [transfer.completed_s[host] for host in waited_for]
    last_s, min_s = max(ends_s), bound_with_faults_s(transfer.nbytes, profile, faults)
    if any(fault_s >= last_s for fault_s in transfer.faults_s):
        raise TransferFailed("all peers were done before the fault came: give it a smaller fraction or more bytes")
    began_cpu_s, ended_cpu_s = (cpu_s_at(transfer.samples, moment_s) for moment_s in (transfer.began_s, last_s))
    sent_bytes = sent_between(transfer.samples, transfer.began_s, last_s)
    delivered_gb = transfer.nbytes * len(waited_for) / BYTES_PER_GB
    found: Figures = {
        "last_peer_s": round(last_s - transfer.began_s, 3),
        "bound_s": round(min_s, 3),
        "ratio": round((last_s - transfer.began_s) / min_s, 3),
        "first_peer_s": round(min(ends_s) - transfer.began_s, 3),
        "cpu_s_per_gb": round((ended_cpu_s - began_cpu_s) / delivered_gb, 2),
        "learner_sent_bytes": round(sent_bytes),
        "learner_copies": round(sent_bytes / transfer.nbytes, 3),
        "version_bytes": transfer.nbytes,
        "encrypted": transfer.encrypted,
    }
    if transfer.topology is not None:
        found["topology"] = transfer.topology
    if faults:
        found["bound_without_faults_s"] = round(bound_s(transfer.nbytes, profile), 3)
        found["faults_s"] = [round(fault_s - transfer.began_s, 3) for fault_s in transfer.faults_s]
        found["victims_sent_copies"] = [round(sent / transfer.nbytes, 3) for sent in transfer.victims_sent_bytes]
    return found


def cpu_s_at(samples: Sequence[Sample], moment_s: float) -> float:
    """The total at a moment, on a straight line between two samples; outside of them the nearest."""
    after = bisect_left([sample.at_s for sample in samples], moment_s)
    if after == 0:
        return samples[0].cpu_s
    if after == len(samples):
        return samples[-1].cpu_s
    low, high = samples[after - 1], samples[after]
    share = (moment_s - low.at_s) / (high.at_s - low.at_s)
    return low.cpu_s + share * (high.cpu_s - low.cpu_s)


def sent_between(samples: Sequence[Sample], began_s: float, ended_s: float) -> float:
    """From the last sample before to the first one after. Not on a line: what was sent in the first half second of a
    transfer would in part belong to the idle time before it, and a learner to have sent less than one copy."""
    before = [sample for sample in samples if sample.at_s <= began_s] or samples[:1]
    after = [sample for sample in samples if sample.at_s >= ended_s] or samples[-1:]
    return after[0].sent_bytes - before[-1].sent_bytes


def medians(runs: Sequence[Figures]) -> Figures:
    """Each figure's median over repeats, and all ratios. What is no number is that of the first run."""
    found = {key: _median([run[key] for run in runs]) for key in runs[0]}
    if len(runs) > 1:
        found["ratios"] = [run["ratio"] for run in runs]
    return found


def _median(values: list[Any]) -> Any:
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if not numbers:
        return values[0]
    median = statistics.median(numbers)
    return round(median) if all(isinstance(number, int) for number in numbers) else round(median, 3)
