"""The relay trees in earnest: up to 64 real receivers in links.shaped network namespaces. Root.

bin/python -m benchmarks.forest --json
bin/python -m benchmarks.forest --receivers 64 --profiles mixed

Two profiles: `alike`, where every uplink has --up-mbit, and `mixed`, where every other uplink is an eighth of the rest,
with the same mean. Lines are slow, so that two cores carry what 64 nodes send. Each receiver is `echo-node join --role
relay`, over TLS, and what it holds at the end is compared with what was published. One swarm, whose nodes have been
linked for four minutes, takes three versions of noise, one after the other: the first; the second; and a third, during
which a tenth of the receivers, drawn by a seed, are killed when the median peer has half of it. Each is a single run.

ratio_first, ratio, ratio_killed   the time until the last receiver holds every chunk, verified, from the announcement,
                                   over the bound of benchmarks/links.py: the physical limit of these lines
learner_mb, learner_cpu_s_per_gb   the learner's resident memory after the second version, and its CPU over 1e9 bytes
                                   delivered; cpu_s_per_gb is that of all processes
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from random import Random

import psutil

from benchmarks import Figures, ended, links, listed, parser_of, said
from benchmarks.broadcast import MIB, Nodes, Payload, measured
from benchmarks.links import BYTES_PER_GB, Fault, HostLink, Profile, TransferFailed, figures_of
from tests.netns.hosts import NetnsError

DOWN_TIMES = 4  # A downlink is so many times the mean uplink, as at home
KILLED_SHARE = 0.1
KILLED_AT = 0.5
SEED = 1
HEAD_START_S = 240.0  # After the last node has linked: two probes of each (broadcast/uplinks.py) take as long
MOST_APART = 8.0  # The fastest uplink of a mixed profile over the slowest


def profile_named(name: str, receivers: int, up_mbit: float) -> Profile:
    """The learner and so many receivers whose uplinks are `up_mbit` in the mean."""
    if name == "alike":
        return links.equal_profile(receivers, up_mbit, DOWN_TIMES * up_mbit)
    slow = 2 * up_mbit / (1 + MOST_APART)
    ups = [up_mbit, *(slow * (MOST_APART if number % 2 else 1.0) for number in range(receivers))]
    return links.profile_of(name, [HostLink(up_mbit=up, down_mbit=DOWN_TIMES * up_mbit) for up in ups])


def kills(profile: Profile) -> list[Fault]:
    victims = Random(SEED).sample(sorted(profile.peers), round(KILLED_SHARE * len(profile.peers)))
    return [Fault(kind="kill", host=host, fraction=KILLED_AT) for host in victims]


def told(which: str, figures: Figures) -> Figures:
    print(f"{which} version: {figures['ratio']} times the bound of {figures['bound_s']} s", file=sys.stderr, flush=True)
    return figures


def measure(profile: Profile, payload: Payload, directory: Path) -> Figures:
    with links.shaped(profile) as network:
        nodes = Nodes(network, directory, "relay", payload)
        nodes.wait_until_linked(profile)
        time.sleep(HEAD_START_S)
        first = told("first", figures_of(measured(nodes, profile, [], payload), profile, []))
        learner = psutil.Process(nodes.learner.process.pid)
        before = learner.cpu_times()
        second = told("second", figures_of(measured(nodes, profile, [], payload), profile, []))
        after, rss = learner.cpu_times(), learner.memory_info().rss
        faults = kills(profile)
        killed = figures_of(measured(nodes, profile, faults, payload), profile, faults)
    learner_s = after.user + after.system - before.user - before.system
    return {
        "receivers": len(profile.peers),
        **{name: second[name] for name in ("topology", "version_bytes", "bound_s", "cpu_s_per_gb", "learner_copies")},
        **{"ratio_first": first["ratio"], "ratio": second["ratio"], "ratio_killed": killed["ratio"]},
        "killed": len(faults),
        "learner_mb": round(rss / 1e6, 1),
        "learner_cpu_s_per_gb": round(learner_s / (second["version_bytes"] * len(profile.peers) / BYTES_PER_GB), 2),
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--receivers", type=listed(int), default=[8, 16, 32, 64], help="of `alike`; `mixed` has the most"
    )
    parser.add_argument("--up-mbit", type=float, default=4.0)
    parser.add_argument("--size-mib", type=float, default=16.0)
    parser.add_argument("--profiles", type=listed(str), default=["alike", "mixed"])
    parser.add_argument("--work-dir", type=Path, help="keeps logs and files. Default: one that is removed")
    options = parser.parse_args()
    links.check_namespaces("forest")
    payload = Payload(nbytes=round(options.size_mib * MIB) // 2 * 2)
    found: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="forest-") as scratch:
        for name in options.profiles:
            for count in options.receivers if name == "alike" else [max(options.receivers)]:
                own = (options.work_dir or Path(scratch)) / f"{name}-{count}"
                own.mkdir(parents=True)
                try:
                    figures = measure(profile_named(name, count, options.up_mbit), payload, own)
                except (TransferFailed, NetnsError) as error:
                    figures = {"receivers": count, "error": str(error)}
                found.append({"profile": name, **figures})
                said(found[-1])
    return ended(options, {"forest": found}, met=not any("error" in figures for figures in found))


if __name__ == "__main__":
    sys.exit(main())
