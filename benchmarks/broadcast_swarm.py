"""One transfer by our own nodes: a learner without a model and real relays, `swarm join --role relay`."""

from __future__ import annotations

import filecmp
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from benchmarks.links import LEARNER, Fault, Profile, bound_s, survivors
from benchmarks.shaped import EVENT_S, Observer, Speaker, poll, shaped
from benchmarks.transfers import Transfer, TransferFailed
from tests.integration.processes import Node, fetch_status
from tests.netns.hosts import Hosts

READY_S = 120.0
"""Until all peers are proven public, or not, and have their streams: seconds after the last has started."""

READY_POLL_S = 1.0
STEADY_S = 4.0
"""Streams are complete when their numbers have not changed for so long: two rounds of gossip."""

POLL_S = 0.5
"""How often a peer that may be done is asked, which it cannot be before its interface has received all bytes: an
answer costs it some milliseconds of its loop, and the moment itself is told by the peer."""

POLL_ANYWAY_S = 10.0

ENCODE_BYTES_PER_S = 20e6
"""Nothing encodes slower than this."""

LIMIT_S, LIMIT_BOUNDS = 60.0, 30.0
"""It has failed after so long, and so many times the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """What is sent: incompressible, or with `delta_lr` one Adam step after the version before. `is_second`: the second
    version is measured, as a delta always is, and not the first."""

    nbytes: int
    delta_lr: float | None = None
    is_second: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One version, as the learner told."""

    version: str
    at_s: float
    encoded_bytes: int


def run(
    scheme: str, profile: Profile, faults: list[Fault], payload: Payload, directory: Path, *, tls: bool | None
) -> Transfer:
    """One transfer of the version that is measured. `began_s` is when it was announced, encoded before."""
    with shaped(profile) as network:
        nodes = Nodes(network, directory, scheme, payload, tls)
        nodes.wait_until_linked(profile)
        if payload.is_second:
            base = nodes.publish(payload)
            Watch(nodes, base, list(profile.peers)).follow(nodes.observer(profile), profile, [])
        observer = nodes.observer(profile)
        observer.settle()
        published = nodes.publish(payload)
        watch = Watch(nodes, published, list(survivors(profile, faults).peers))
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
    """The learner and its peers in their hosts."""

    def __init__(self, network: Hosts, directory: Path, scheme: str, payload: Payload, tls: bool | None) -> None:
        self._network = network
        self._tls = [] if tls is None else ["--tls" if tls else "--no-tls"]
        self._directory = directory
        self.learner = self._lead(scheme, payload)
        listening = self.learner.expect("listening")
        numbers = [host.number for host in network if host.number != LEARNER]
        self.peers = {number: self._relay(number, listening["join"]) for number in numbers}
        self._urls = {LEARNER: listening["url"], **{number: peer.url() for number, peer in self.peers.items()}}

    def _lead(self, scheme: str, payload: Payload) -> Speaker:
        host = self._network.host(LEARNER)
        arguments = ["--directory", str(self._directory / "learner"), "--host", host.address, "--scheme", scheme]
        arguments += ["--size-bytes", str(payload.nbytes), *self._tls]
        if payload.delta_lr is not None:
            arguments += ["--delta", repr(payload.delta_lr)]
        return Speaker(host, "benchmarks.broadcast_learner", *arguments, log=self._directory / "learner.log")

    def _relay(self, number: int, join: str) -> Node:
        state = str(self._directory / f"peer-{number}")
        arguments = ["join", "--role", "relay", "--bootstrap", join, "--state-dir", state, "--host", "0.0.0.0"]
        place = self._network.host(number).command([])
        return Node(self._directory, f"peer-{number}-log", *arguments, "--lan", *self._tls, place=place)

    def status(self, number: int) -> dict[str, Any] | None:
        """What a node says of itself; None if it does not answer."""
        try:
            with self._network.host(number).inside():
                return fetch_status(self._urls[number])
        except (OSError, HTTPException, json.JSONDecodeError):
            return None

    def observer(self, profile: Profile) -> Observer:
        pids = {LEARNER: self.learner.process.pid, **{number: node.process.pid for number, node in self.peers.items()}}
        return Observer(self._network, profile, pids)

    def publish(self, payload: Payload) -> Published:
        """Have the learner stage and publish its next version."""
        self.learner.tell("publish")
        event = self.learner.expect("published", timeout_s=EVENT_S + payload.nbytes / ENCODE_BYTES_PER_S)
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

        poll(linked, every_s=READY_POLL_S, limit_s=READY_S, what="the peers become public and open their streams")
        learner = self.status(LEARNER)
        self.encrypted = learner is not None and bool(learner["encrypted"])


class Readiness:
    """Whether a swarm may be published to: whoever can be dialled is public, and no more streams will be opened."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._streams: dict[int, int] = {}
        self._since_s = 0.0

    def is_reached(self, statuses: dict[int, dict[str, Any]], *, now: float) -> bool:
        """With the latest status of every node that answered; TransferFailed if nodes know no streams."""
        if any("streams" not in status for status in statuses.values()):
            raise TransferFailed("the nodes' status has no `streams`: they are older than this benchmark")
        streams = {number: int(status["streams"]) for number, status in statuses.items()}
        if streams != self._streams:
            self._streams, self._since_s = streams, now
        if set(streams) != set(self._profile.hosts) or not self._publics_are_public(statuses):
            return False
        full = all(streams[number] >= self._max_streams(number) for number in streams)
        return full or (min(streams.values()) > 0 and now - self._since_s >= STEADY_S)

    def _publics_are_public(self, statuses: dict[int, dict[str, Any]]) -> bool:
        return all(
            (statuses[number]["reachability"] == "public") == link.reachable
            for number, link in self._profile.peers.items()
        )

    def _max_streams(self, number: int) -> int:
        """One to every other host, but none between two that nobody can dial."""
        link = self._profile.hosts[number]
        return sum(link.reachable or other.reachable for n, other in self._profile.hosts.items() if n != number)


class Watch:
    """Asks peers whether they hold a whole version, each only when it may."""

    def __init__(self, nodes: Nodes, published: Published, waited_for: list[int]) -> None:
        self._nodes = nodes
        self._published = published
        self._waited_for = waited_for
        self._asked_s = dict.fromkeys(waited_for, time.monotonic())
        self.announced_s: dict[int, float] = {}
        self.completed_s: dict[int, float] = {}

    def follow(self, observer: Observer, profile: Profile, faults: list[Fault]) -> None:
        limit_s = LIMIT_S + LIMIT_BOUNDS * bound_s(self._published.encoded_bytes, profile)
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
