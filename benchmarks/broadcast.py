"""How near to the physical limit a version reaches every peer: real node processes in shaped network namespaces. Root.

bin/python -m benchmarks.broadcast --peers 8 --up-mbit 50 --down-mbit 100 --schemes relay,star --json
bin/python -m benchmarks.broadcast --profile benchmarks/profiles/heterogeneous.toml --kill fastest@0.5 --size-mib 32
bin/python -m benchmarks.broadcast --peers 8 --stall 5@0.5:up --size-mib 32
bin/python -m benchmarks.broadcast --peers 8 --delta 1e-6 --size-mib 512 --schemes relay

A profile is a TOML file with a table [[host]] for each host: up_mbit, down_mbit (of 1,000,000 bits) and reachable
(true if not given; a host that is not can dial but not be dialled). The first is the learner, and is host 1 of --kill
and --stall; peers are hosts 2 and up, `fastest` the public peer with the greatest uplink. A fault comes when the
median peer has received that fraction. A peer that is killed or stalled both ways is not waited for.

Schemes: relay is what a swarm does by itself; mesh, chain, tree (each feeds two), forest and star are the same nodes
told what to do. Each scheme of each repeat has fresh namespaces and processes. A peer is `echo-node join --role relay`,
over TLS; what it holds at the end is compared with what was published. All links are up before the clock starts, but
those of a forest, which gets its plan with its first version: --second measures the one after.

Figures, medians of --repeat; the times are of one clock, from when the version, encoded, is announced:
last_peer_s, first_peer_s  until the last and the first peer hold every chunk, verified
bound_s, ratio             the largest of the four terms of benchmarks/links.py; and last_peer_s over it. With faults,
                           each stretch between two of them counts with the bound of the links and peers that are left,
                           and bound_without_faults_s is that of the whole profile
victims_sent_copies        what each victim of a fault had sent by then, in encoded versions
cpu_s_per_gb               user and system CPU of all processes of the scheme, over 1e9 bytes delivered to peers
learner_sent_bytes         what left the learner's interface, with all headers; learner_copies in encoded versions
tbf counts Ethernet's, IP's and TCP's headers, so that no ratio can be under 1.046. With --json the last line is one
JSON object; its `schemes` has these by scheme. One that fails has `error` instead, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import Figures, ended, links, listed, parser_of, said
from benchmarks.links import LEARNER, Fault, Profile, Transfer, TransferFailed
from tests.integration.processes import Node, fetch_status
from tests.netns.hosts import Hosts, NetnsError

SCHEMES = ("relay", "mesh", "chain", "tree", "forest", "star")
MIB = 1 << 20
READY_S = 120.0  # Until all peers are proven public, or not, and have their streams: seconds after the last has started
READY_POLL_S = 1.0
STEADY_S = 4.0  # Streams are complete when their numbers have not changed for so long: two rounds of gossip
POLL_S = 0.5  # How often a peer is asked that may be done: an answer costs it some milliseconds of its loop
POLL_ANYWAY_S = 10.0
ENCODE_BYTES_PER_S = 20e6  # Nothing encodes slower than this
LIMIT_S, LIMIT_BOUNDS = 60.0, 30.0  # A transfer that takes longer, and so many times the bound, has failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """What is sent: incompressible, or with `delta_lr` one Adam step after the version before. `is_second`: the second
    version is measured, as a delta always is, and not the first."""

    nbytes: int
    delta_lr: float | None = None
    is_second: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    version: str
    at_s: float
    encoded_bytes: int


def transfer(scheme: str, profile: Profile, faults: list[Fault], payload: Payload, directory: Path) -> Transfer:
    """One transfer of the version that is measured. `began_s` is when it was announced, encoded before."""
    with links.shaped(profile) as network:
        nodes = Nodes(network, directory, scheme, payload)
        nodes.wait_until_linked(profile)
        if payload.is_second:
            base = nodes.publish(payload)
            Watch(nodes, base, list(profile.peers)).follow(nodes.observer(profile), profile, [])
        return measured(nodes, profile, faults, payload)


def measured(nodes: Nodes, profile: Profile, faults: list[Fault], payload: Payload) -> Transfer:
    """The transfer of the next version between nodes that are linked."""
    observer = nodes.observer(profile)
    observer.settle()
    published = nodes.publish(payload)
    watch = Watch(nodes, published, list(links.survivors(profile, faults).peers))
    watch.follow(observer, profile, faults)
    nodes.compare(published.version, watch.completed_s)
    topology = (nodes.status(LEARNER) or {}).get("topology")
    return Transfer(
        nbytes=published.encoded_bytes,
        began_s=min([published.at_s, *watch.announced_s.values()]),
        completed_s=watch.completed_s,
        samples=observer.samples,
        encrypted=nodes.encrypted,
        topology=topology,
        faults_s=observer.faults_s,
        victims_sent_bytes=observer.victims_sent_bytes,
    )


class Nodes:
    def __init__(self, network: Hosts, directory: Path, scheme: str, payload: Payload) -> None:
        self._network = network
        self._directory = directory
        self.learner = self._lead(scheme, payload)
        listening = self.learner.expect("listening")
        numbers = [host.number for host in network if host.number != LEARNER]
        self.peers = {number: self._relay(number, listening["join"]) for number in numbers}
        self._urls = {LEARNER: listening["url"], **{number: peer.url() for number, peer in self.peers.items()}}

    def _lead(self, scheme: str, payload: Payload) -> links.Speaker:
        host = self._network.host(LEARNER)
        arguments = ["--directory", str(self._directory / "learner"), "--host", host.address, "--scheme", scheme]
        arguments += ["--size-bytes", str(payload.nbytes)]
        if payload.delta_lr is not None:
            arguments += ["--delta", repr(payload.delta_lr)]
        return links.Speaker(host, "benchmarks.broadcast_learner", *arguments, log=self._directory / "learner.log")

    def _relay(self, number: int, join: str) -> Node:
        state = str(self._directory / f"peer-{number}")
        arguments = ["join", "--role", "relay", "--bootstrap", join, "--state-dir", state, "--host", "0.0.0.0"]
        place = self._network.host(number).command([])
        return Node(self._directory, f"peer-{number}-log", *arguments, "--lan", place=place)

    def status(self, number: int) -> dict[str, Any] | None:
        try:
            with self._network.host(number).inside():
                return fetch_status(self._urls[number])
        except (OSError, HTTPException, json.JSONDecodeError):
            return None

    def observer(self, profile: Profile) -> links.Observer:
        pids = {LEARNER: self.learner.process.pid, **{number: node.process.pid for number, node in self.peers.items()}}
        return links.Observer(self._network, profile, pids)

    def publish(self, payload: Payload) -> Published:
        self.learner.tell("publish")
        event = self.learner.expect("published", timeout_s=links.EVENT_S + payload.nbytes / ENCODE_BYTES_PER_S)
        return Published(version=event["version"], at_s=event["monotonic_s"], encoded_bytes=event["encoded_bytes"])

    def compare(self, version: str, peers: Iterable[int]) -> None:
        """TransferFailed unless each of these peers has the learner's bytes of a version on its disk."""
        name = f"{version}.chunks"
        published = self._directory / "learner" / "versions" / name
        for number in peers:
            (held,) = (self._directory / f"peer-{number}").glob(f"swarms/*/{name}")
            if not filecmp.cmp(published, held, shallow=False):
                raise TransferFailed(f"host {number} holds other bytes than the learner published")

    def wait_until_linked(self, profile: Profile) -> None:
        """Until every peer is public or not, as the profile has it, and every node has its streams."""
        readiness = Readiness(profile)

        def linked() -> bool:
            found = {number: self.status(number) for number in profile.hosts}
            return readiness.is_reached({n: s for n, s in found.items() if s is not None}, now=time.monotonic())

        links.poll(linked, every_s=READY_POLL_S, limit_s=READY_S, what="the peers become public and open their streams")
        learner = self.status(LEARNER)
        self.encrypted = learner is not None and bool(learner["encrypted"])


class Readiness:
    """Whether a swarm may be published to: peers that can be dialled are public, and no more streams will be opened."""

    def __init__(self, profile: Profile) -> None:
        self._hosts, self._peers = profile.hosts, profile.peers
        self._streams: dict[int, int] = {}
        self._since_s = 0.0

    def is_reached(self, statuses: dict[int, dict[str, Any]], *, now: float) -> bool:
        streams = {number: int(status["streams"]) for number, status in statuses.items()}
        if streams != self._streams:
            self._streams, self._since_s = streams, now
        if set(streams) != set(self._hosts) or not all(
            (statuses[number]["reachability"] == "public") == link.reachable for number, link in self._peers.items()
        ):
            return False
        full = all(streams[number] >= self._max_streams(number) for number in streams)
        return full or (min(streams.values()) > 0 and now - self._since_s >= STEADY_S)

    def _max_streams(self, number: int) -> int:
        """One to every other host, but none between two hosts that cannot be dialled."""
        link = self._hosts[number]
        return sum(link.reachable or other.reachable for n, other in self._hosts.items() if n != number)


class Watch:
    """Asks peers whether they hold a whole version, each only when it may."""

    def __init__(self, nodes: Nodes, published: Published, waited_for: list[int]) -> None:
        self._nodes = nodes
        self._published = published
        self._waited_for = waited_for
        self._asked_s = dict.fromkeys(waited_for, time.monotonic())
        self.announced_s: dict[int, float] = {}
        self.completed_s: dict[int, float] = {}

    def follow(self, observer: links.Observer, profile: Profile, faults: list[Fault]) -> None:
        limit_s = LIMIT_S + LIMIT_BOUNDS * links.bound_s(self._published.encoded_bytes, profile)
        observer.follow(self._published.encoded_bytes, faults, self._ended, limit_s=limit_s)

    def _ended(self, shares: dict[int, float]) -> bool:
        for number in self._waited_for:
            if number not in self.completed_s and self._is_due(number, shares[number]):
                self._ask(number)
        return len(self.completed_s) == len(self._waited_for)

    def _is_due(self, number: int, share: float) -> bool:
        silent_s = time.monotonic() - self._asked_s[number]
        return silent_s >= (POLL_S if share >= 1 else POLL_ANYWAY_S)

    def _ask(self, number: int) -> None:
        self._asked_s[number] = time.monotonic()
        status = self._nodes.status(number)
        found = (status or {}).get("versions", {}).get(self._published.version)
        if found is not None and found["complete_s"] is not None:
            self.announced_s[number] = found["announced_s"]
            self.completed_s[number] = found["complete_s"]


# -- the command line --------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, profile: Profile, faults: list[Fault], directory: Path) -> dict[str, Figures]:
    """The figures of every scheme. All schemes of one repeat come before the next, so that noise hits all alike."""
    schemes = options.schemes
    payload = Payload(
        nbytes=round(options.size_mib * MIB) // 2 * 2,
        delta_lr=options.delta,
        is_second=options.second or options.delta is not None,
    )
    runs: dict[str, list[Figures]] = {scheme: [] for scheme in schemes}
    errors: dict[str, str] = {}
    for number in range(1, options.repeat + 1):
        for scheme in [scheme for scheme in schemes if scheme not in errors]:
            own = directory / f"{scheme}-{number}"
            own.mkdir(parents=True)
            try:
                done = transfer(scheme, profile, faults, payload, own)
                runs[scheme].append(links.figures_of(done, profile, faults))
            except (TransferFailed, NetnsError) as error:
                errors[scheme] = str(error)
            said({"scheme": scheme, **(runs[scheme] or [{"error": errors.get(scheme)}])[-1]})
    return {s: {"error": errors[s]} if s in errors else links.medians(runs[s]) for s in schemes}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--peers", type=int, default=8, help="besides the learner, all alike")
    parser.add_argument("--up-mbit", type=float, default=50.0, help="of every host, the learner too")
    parser.add_argument("--down-mbit", type=float, default=100.0)
    links.add_flags(parser, help="instead of the three above")
    parser.add_argument("--size-mib", type=float, default=64.0, help="raw weights")
    parser.add_argument("--schemes", type=listed(str), default=["relay"], help=f"of {','.join(SCHEMES)}")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--delta", type=float, metavar="LR", help="send an Adam step at this learning rate, not noise")
    parser.add_argument("--second", action="store_true", help="measure the second version, as --delta does")
    parser.add_argument("--work-dir", type=Path, help="keeps logs and files. Default: one that is removed")
    options = parser.parse_args()
    try:
        equal = links.equal_profile(options.peers, options.up_mbit, options.down_mbit)
        profile = equal if options.profile is None else links.read_profile(options.profile)
        faults = links.read_faults(options, profile)
    except links.BadProfile as error:
        sys.exit(f"benchmarks.broadcast: {error}")
    links.check_namespaces("broadcast")
    try:
        with tempfile.TemporaryDirectory(prefix="broadcast-") as scratch:
            found = measure(options, profile, faults, options.work_dir or Path(scratch))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    hosts = [msgspec.to_builtins(link) for link in profile.hosts.values()]
    figures = {"profile": profile.name, "hosts": hosts, "schemes": found}
    return ended(options, figures, met=not any("error" in figures for figures in found.values()))


if __name__ == "__main__":
    sys.exit(main())
