"""From what was observed during a broadcast to the figures that are printed. Pure."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.links import Fault, Profile, bound_s, bound_with_faults_s, survivors

Figures = dict[str, Any]

BYTES_PER_GB = 1e9


class TransferFailed(Exception):
    """A scheme did not come to its end; the message is one line."""


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


def table(schemes: dict[str, Figures]) -> list[str]:
    """Lines for the person at the terminal."""
    lines = [
        f"{'scheme':12}{'last peer':>11}{'bound':>9}{'ratio':>8}{'first peer':>12}{'CPU-s/GB':>10}{'learner sent':>14}"
    ]
    for scheme, found in schemes.items():
        if "error" in found:
            lines.append(f"{scheme:12}{found['error']}")
            continue
        lines.append(
            f"{scheme:12}{found['last_peer_s']:>9.2f} s{found['bound_s']:>7.2f} s{found['ratio']:>8.3f}"
            f"{found['first_peer_s']:>10.2f} s{found['cpu_s_per_gb']:>10.2f}{found['learner_copies']:>7.3f} copies"
        )
        if ratios := found.get("ratios"):
            lines.append(f"{'':12}{'ratios: ' + ' '.join(f'{ratio:.3f}' for ratio in ratios):>28}")
    return lines
