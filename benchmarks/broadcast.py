"""How near to the physical limit a version reaches every peer: real node processes in shaped network namespaces. Root.

bin/python -m benchmarks.broadcast --peers 8 --up-mbit 50 --down-mbit 100 --schemes relay,star --json
bin/python -m benchmarks.broadcast --profile benchmarks/profiles/heterogeneous.toml --repeat 3 --json
bin/python -m benchmarks.broadcast --profile benchmarks/profiles/heterogeneous.toml --kill fastest@0.5 --size-mib 32
bin/python -m benchmarks.broadcast --peers 8 --stall 5@0.5:up --size-mib 32
bin/python -m benchmarks.broadcast --peers 8 --delta 1e-6 --size-mib 512 --schemes relay
bin/python -m benchmarks.broadcast --peers 40 --up-mbit 10 --down-mbit 20 --size-mib 32 --kill 5@0.5 --second

A profile is a TOML file with a table [[host]] for each host: up_mbit, down_mbit (of 1,000,000 bits) and reachable
(true if not given; a host that is not can dial but not be dialled). The first is the learner, and is host 1 of --kill
and --stall; peers are hosts 2 and up, `fastest` the public peer with the greatest uplink. A fault comes when the
median peer has received that fraction. A peer that is killed or stalled both ways is not waited for.

Schemes: relay is what a swarm does by itself; mesh, chain, tree (each feeds two), forest and star are the same nodes
told what to do. Each scheme of each repeat has fresh namespaces and processes. A peer is `echo-node join --role relay`, over TLS unless --no-tls;
what it holds at the end is compared with what was published. All links are up before the clock starts, but those of a
forest, which gets its plan with its first version: --second measures the one after.

Figures, medians of --repeat; the times are of one clock, from when the version, encoded, is announced:
last_peer_s, first_peer_s  until the last and the first peer hold every chunk, verified
bound_s, ratio             the largest of the four terms of benchmarks/links.py, with F the bytes of the encoded version; and
                           last_peer_s over it. With faults, each stretch between two
                           of them counts with the bound of the links and peers that are left, and
                           bound_without_faults_s is that of the whole profile
victims_sent_copies        what each victim of a fault had sent by then, in units of F: of a killed node in a tree,
                           above zero if it had children
topology                   the plan by which the learner sent, as it says itself
cpu_s_per_gb               user and system CPU of all processes of the scheme, over 1e9 bytes delivered to peers
learner_sent_bytes         what left the learner's interface, with all headers; learner_copies in units of F
tbf counts Ethernet's, IP's and TCP's headers, so that no ratio can be under 1.046. With --json the last line is one
JSON object; its `schemes` has these by scheme. One that fails has `error` instead, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import broadcast_swarm
from benchmarks.broadcast_swarm import Payload
from benchmarks.links import BadProfile, Fault, Profile, check_faults, equal_profile, read_fault, read_profile
from benchmarks.transfers import Figures, TransferFailed, figures_of, medians, table
from tests.netns.hosts import NetnsError, unusable

SCHEMES = ("relay", "mesh", "chain", "tree", "forest", "star")

FAILED, BAD_INPUT = 1, 2
"""Exit statuses."""

MIB = 1 << 20


class Benchmark:
    """What is measured, on what. `directory` gets one of its own for each run; it is the caller's to remove."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.profile = _profile(options)
        self.faults = _faults(options, self.profile)
        self.schemes = _schemes(options.schemes)
        self.payload = Payload(
            nbytes=round(options.size_mib * MIB) // 2 * 2,
            delta_lr=options.delta,
            is_second=options.second or options.delta is not None,
        )
        self._repeat: int = options.repeat
        self._tls: bool | None = options.tls
        if self.payload.nbytes < MIB or self._repeat < 1:
            raise BadProfile("--size-mib and --repeat are 1 at least")

    def run(self, directory: Path) -> dict[str, Figures]:
        """The figures of every scheme. All schemes of one repeat come before the next, so that noise hits all alike."""
        runs: dict[str, list[Figures]] = {scheme: [] for scheme in self.schemes}
        errors: dict[str, str] = {}
        for number in range(1, self._repeat + 1):
            for scheme in [scheme for scheme in self.schemes if scheme not in errors]:
                try:
                    runs[scheme].append(self._run_once(scheme, number, directory))
                except (TransferFailed, NetnsError) as error:
                    errors[scheme] = str(error)
                    _say(f"{scheme}, run {number} failed: {error}")
        return {s: {"error": errors[s]} if s in errors else medians(runs[s]) for s in self.schemes}

    def _run_once(self, scheme: str, number: int, directory: Path) -> Figures:
        began = time.monotonic()
        own = directory / f"{scheme}-{number}"
        own.mkdir()
        found = figures_of(
            broadcast_swarm.run(scheme, self.profile, self.faults, self.payload, own, tls=self._tls),
            self.profile,
            self.faults,
        )
        wall_s = time.monotonic() - began
        _say(
            f"{scheme}, run {number}: {found['last_peer_s']:.2f} s, ratio {found['ratio']:.3f} ({wall_s:.0f} s in all)"
        )
        return found

    def described(self) -> dict[str, Any]:
        """What the figures are of."""
        links = self.profile.hosts.values()
        return {
            "profile": self.profile.name,
            "hosts": [{"up_mbit": h.up_mbit, "down_mbit": h.down_mbit, "reachable": h.reachable} for h in links],
            "faults": [{"kind": f.kind, "host": f.host, "fraction": f.fraction} for f in self.faults],
            "size_bytes": self.payload.nbytes,
            "delta_lr": self.payload.delta_lr,
            "second": self.payload.is_second,
            "repeat": self._repeat,
        }


def _profile(options: argparse.Namespace) -> Profile:
    if options.profile is not None:
        return read_profile(options.profile)
    return equal_profile(options.peers, options.up_mbit, options.down_mbit)


def _faults(options: argparse.Namespace, profile: Profile) -> list[Fault]:
    faults = [read_fault("kill", text, profile) for text in options.kill]
    faults += [read_fault("stall", text, profile) for text in options.stall]
    check_faults(profile, faults)
    return faults


def _schemes(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in SCHEMES]:
        raise BadProfile(f"no scheme is named {unknown[0]!r}: {', '.join(SCHEMES)}")
    return list(dict.fromkeys(names))


@contextmanager
def _directory(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        try:
            kept.mkdir(parents=True)
        except OSError as error:
            raise BadProfile(f"cannot make {kept}: {error.strerror}") from error
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="broadcast-") as directory:
        yield Path(directory)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=8, help="besides the learner, all alike")
    parser.add_argument("--up-mbit", type=float, default=50.0, help="of every host, the learner too")
    parser.add_argument("--down-mbit", type=float, default=100.0)
    parser.add_argument("--profile", type=Path, help="TOML file with the links, instead of the three above")
    parser.add_argument("--size-mib", type=float, default=64.0, help="raw weights")
    parser.add_argument("--schemes", default="relay", help=f"of {','.join(SCHEMES)}")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--delta", type=float, metavar="LR", help="send an Adam step at this learning rate, not noise")
    parser.add_argument("--second", action="store_true", help="measure the second version, as --delta does")
    parser.add_argument("--kill", action="append", default=[], metavar="HOST@FRACTION")
    parser.add_argument("--stall", action="append", default=[], metavar="HOST@FRACTION[:up]", help="to 1 Mbit/s")
    parser.add_argument("--tls", action=argparse.BooleanOptionalAction, default=None, help="default: as shipped, on")
    parser.add_argument("--work-dir", type=Path, help="new; keeps logs and files. Default: one that is removed")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _say(line: str) -> None:
    print(line, flush=True)


def _fail(message: str) -> NoReturn:
    print(f"benchmarks.broadcast: {message}", file=sys.stderr)
    sys.exit(BAD_INPUT)


def main() -> None:
    options = _options()
    # Asked to end, it first ends what it started.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        benchmark = Benchmark(options)
        if why := unusable():
            _fail(why)
        with _directory(options.work_dir) as directory:
            found = benchmark.run(directory)
    except BadProfile as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    _say("\n".join([f"\n{benchmark.profile.name}, {benchmark.payload.nbytes / MIB:g} MiB", *table(found)]))
    if options.json:
        _say(json.dumps({**benchmark.described(), "schemes": found}))
    sys.exit(FAILED if any("error" in figures for figures in found.values()) else 0)


if __name__ == "__main__":
    main()
