"""The same transfer by libtorrent: one session a host, all connected before the clock starts."""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.libtorrent_peer import FILE_NAME
from benchmarks.links import LEARNER, Fault, Profile, bound_s, survivors
from benchmarks.shaped import Observer, Speaker, poll, shaped, use_congestion_control
from benchmarks.transfers import Transfer
from tests.netns.hosts import Hosts

MODULE = "benchmarks.libtorrent_peer"

CONGESTION_CONTROL = "cubic"
"""As our own nodes choose for themselves."""

CONNECT_S = 30.0
LIMIT_S, LIMIT_BOUNDS = 60.0, 30.0
"""It has failed after so long, and so many times the bound."""


def run(profile: Profile, faults: list[Fault], nbytes: int, directory: Path) -> Transfer:
    """One transfer of a random file. `began_s` is when the first peer is told to ask for it; all have the torrent."""
    with shaped(profile) as network:
        use_congestion_control(network, CONGESTION_CONTROL)
        seeder = _seeder(network, nbytes, directory)
        peers = {number: _peer(network, number, directory) for number in profile.peers}
        sessions = {LEARNER: seeder, **peers}
        for peer in peers.values():
            peer.expect("listening")
        _connect(network, profile, sessions)
        observer = Observer(network, profile, {number: one.process.pid for number, one in sessions.items()})
        observer.settle()
        began_s = time.monotonic()
        for peer in peers.values():
            peer.tell("start")
        completed_s = _follow(observer, peers, faults, nbytes, profile)
    return Transfer(
        nbytes=nbytes,
        began_s=began_s,
        completed_s=completed_s,
        samples=observer.samples,
        encrypted=False,
        faults_s=observer.faults_s,
        victims_sent_bytes=observer.victims_sent_bytes,
    )


def _seeder(network: Hosts, nbytes: int, directory: Path) -> Speaker:
    own = directory / f"host-{LEARNER}"
    own.mkdir()
    (own / FILE_NAME).write_bytes(os.urandom(nbytes))
    seeder = Speaker(network.host(LEARNER), MODULE, *_arguments(directory, LEARNER), "--seed", log=own / "seeder.log")
    seeder.expect("listening")
    return seeder


def _peer(network: Hosts, number: int, directory: Path) -> Speaker:
    own = directory / f"host-{number}"
    own.mkdir()
    return Speaker(network.host(number), MODULE, *_arguments(directory, number), log=own / f"peer-{number}.log")


def _arguments(directory: Path, number: int) -> list[str]:
    return ["--directory", str(directory / f"host-{number}"), "--torrent", str(directory / "payload.torrent")]


def _connect(network: Hosts, profile: Profile, sessions: dict[int, Speaker]) -> None:
    """Each pair by one call, of whom the other can hear; then wait until all have shaken hands."""
    expected = dict.fromkeys(sessions, 0)
    for caller in sessions:
        called = [
            other
            for other, link in profile.hosts.items()
            if other != caller and link.reachable and (other < caller or not profile.hosts[caller].reachable)
        ]
        sessions[caller].tell("connect", *(network.host(other).address for other in called))
        for other in called:
            expected[caller] += 1
            expected[other] += 1
    held = dict.fromkeys(sessions, 0)

    def connected() -> bool:
        for number, session in sessions.items():
            for event in session.events():
                held[number] = event.get("connections", held[number])
        return held == expected

    poll(connected, every_s=0.1, limit_s=CONNECT_S, what="libtorrent's peers connect")


def _follow(
    observer: Observer, peers: dict[int, Speaker], faults: list[Fault], nbytes: int, profile: Profile
) -> dict[int, float]:
    """When each peer had the whole file."""
    completed_s: dict[int, float] = {}
    waited_for = survivors(profile, faults).peers

    def ended(_: dict[int, float]) -> bool:
        for number, peer in peers.items():
            for event in peer.events():
                if event["event"] == "finished":
                    completed_s[number] = event["monotonic_s"]
        return set(waited_for) <= set(completed_s)

    limit_s = LIMIT_S + LIMIT_BOUNDS * bound_s(nbytes, profile)
    observer.follow(nbytes, faults, ended, limit_s=limit_s)
    return completed_s
