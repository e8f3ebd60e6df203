"""The lines of a benchmark: profiles of hosts, faults, the least time that any broadcast needs, and its figures; shaped
network namespaces, with what runs in them observed; and a proxy that delays and loses.

Rates are in Mbit/s of 1,000,000 bits, times in seconds, sizes in bytes. Host 1 is the learner, the others are peers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import queue
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import psutil

from benchmarks import Figures
from tests.netns.hosts import Host, Hosts, hosts, unusable

BYTES_PER_MBIT, BYTES_PER_GB = 125_000, 1e9
MAX_HOSTS = 250  # What tests.netns.hosts can make
STALLED_MBIT = 1.0
LEARNER = 1  # Number of the learner's host
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
    """The profile in a TOML file: an array `host` of tables, the first of them the learner."""
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
    slowest = min(peer.down_mbit for peer in peers)
    return nbytes / BYTES_PER_MBIT * max(1 / learner_up, 1 / slowest, len(peers) / all_up, len(leaves) / publics_up)


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


def add_flags(parser: argparse.ArgumentParser, *, help: str) -> None:
    """--profile, and the flags of `read_faults`."""
    parser.add_argument("--profile", type=Path, help=f"TOML file with the links, {help}")
    parser.add_argument("--kill", action="append", default=[], metavar="HOST@FRACTION")
    parser.add_argument("--stall", action="append", default=[], metavar="HOST@FRACTION[:up]", help="to 1 Mbit/s")


def read_faults(options: argparse.Namespace, profile: Profile) -> list[Fault]:
    """BadProfile unless every fault hits another peer and one is left to wait for."""
    faults = [read_fault("kill", text, profile) for text in options.kill]
    faults += [read_fault("stall", text, profile) for text in options.stall]
    if len({fault.host for fault in faults}) != len(faults):
        raise BadProfile("a host has one fault at most")
    if sum(fault.kind != "stall-up" for fault in faults) >= len(profile.peers):
        raise BadProfile("at least one peer must be left to wait for")
    return faults


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
    faults_s: list[float] = field(default_factory=list)  # When the faults happened
    victims_sent_bytes: list[int] = field(default_factory=list)  # What their hosts had sent of this transfer by then
    topology: str | None = None  # What the learner says of its plan; None if it has none


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
    return float(np.interp(moment_s, [one.at_s for one in samples], [one.cpu_s for one in samples]))


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


# -- processes in namespaces -----------------------------------------------------------------------------------------

TICK_S = 0.5  # How often bytes and CPU are read: 1 % of a core at 17 hosts
SETTLE_S = 120.0
IDLE_CORES = 0.015  # Of each process: what a node takes for its gossip
EVENT_S = 120.0  # Longest wait for a process to say what it must: 17 interpreters start on two busy cores


def check_namespaces(name: str) -> None:
    """End the benchmark of this name, with one line, where there are no namespaces. Asked to end later, it first ends
    what it started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if why := unusable():
        sys.exit(f"benchmarks.{name}: {why}")


@contextmanager
def shaped(profile: Profile) -> Iterator[Hosts]:
    """Namespaces with the links of a profile. They and all that runs in them end with the block."""
    with hosts(1 + len(profile.peers)) as network:
        for number, link in profile.hosts.items():
            network.shape(network.host(number), up_mbit=link.up_mbit, down_mbit=link.down_mbit)
            if not link.reachable:
                network.shield(network.host(number))
        yield network


class Speaker:
    """A process that prints one JSON object a line, each an event, and takes commands as lines."""

    def __init__(self, host: Host, module: str, *arguments: str, log: Path) -> None:
        self._log = log
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        with log.open("wb") as errors:
            self.process = host.popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, *words: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(" ".join(words) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise TransferFailed(self._last_words()) from error

    def expect(self, kind: str, *, timeout_s: float = EVENT_S) -> dict[str, Any]:
        """The next event of that kind; others before it are dropped. TransferFailed if it ends or is silent."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                event = self._events.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty as error:
                raise TransferFailed(f"{self._log.stem} never said {kind!r}. {self._last_words()}") from error
            if event is None:
                raise TransferFailed(self._last_words())
            if event["event"] == kind:
                return event

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)

    def _last_words(self) -> str:
        words = self._log.read_text(errors="replace").strip().splitlines()
        return f"{self._log.stem}: {words[-1] if words else 'ended without a word'}"


class Observer:
    """Reads what a transfer costs and how far it is, and brings its faults about."""

    def __init__(self, network: Hosts, profile: Profile, pids: dict[int, int]) -> None:
        self._network = network
        self._profile = profile
        self._processes = {host: psutil.Process(pid) for host, pid in pids.items()}
        self._cpu_s: dict[int, float] = {}
        self._killed: set[int] = set()
        self.samples: list[Sample] = []
        self.faults_s: list[float] = []
        self.victims_sent_bytes: list[int] = []
        self._received_before = self._received()
        self._sent_before: dict[int, int] = {}

    def follow(
        self, nbytes: int, faults: list[Fault], ended: Callable[[dict[int, float]], bool], *, limit_s: float
    ) -> None:
        """Sample until `ended`, which is given the share of `nbytes` that each peer's interface has received."""
        until = time.monotonic() + limit_s
        left = in_order(faults)
        self._sent_before = {fault.host: sent_bytes(self._network.host(fault.host)) for fault in faults}
        while True:
            self.sample()
            shares = {host: (b - self._received_before[host]) / nbytes for host, b in self._received().items()}
            if left and sorted(shares.values())[len(shares) // 2] >= left[0].fraction:
                self.bring_about(left.pop(0))
                continue
            if ended(shares):
                self.sample()
                return
            if time.monotonic() > until:
                slowest = min(shares, key=lambda host: shares[host])
                raise TransferFailed(f"not done after {limit_s:.0f} s; host {slowest} has {shares[slowest]:.0%}")
            time.sleep(TICK_S)

    def settle(self) -> None:
        """Wait until the processes have nothing to do: they may still be starting, or applying an earlier version."""
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            self.sample()
            time.sleep(1.0)
            self.sample()
            if self.samples[-1].cpu_s - self.samples[-2].cpu_s < IDLE_CORES * len(self._processes):
                return

    def sample(self) -> None:
        """Note the totals of this moment. A process that was killed keeps its last."""
        at_s = time.monotonic()
        for host, process in self._processes.items():
            if host not in self._killed:
                self._cpu_s[host] = _cpu_s(host, process)
        sent = sent_bytes(self._network.host(LEARNER))
        self.samples.append(Sample(at_s=at_s, cpu_s=sum(self._cpu_s.values()), sent_bytes=sent))

    def bring_about(self, fault: Fault) -> None:
        host, link = self._network.host(fault.host), self._profile.peers[fault.host]
        self.victims_sent_bytes.append(sent_bytes(host) - self._sent_before[fault.host])
        match fault.kind:
            case "kill":
                self._killed.add(fault.host)
                self._processes[fault.host].kill()
            case "stall":
                self._network.shape(host, up_mbit=STALLED_MBIT, down_mbit=STALLED_MBIT)
            case "stall-up":
                self._network.shape(host, up_mbit=STALLED_MBIT, down_mbit=link.down_mbit)
        self.faults_s.append(time.monotonic())

    def _received(self) -> dict[int, int]:
        return {number: received_bytes(self._network.host(number)) for number in self._profile.peers}


def _cpu_s(host: int, process: psutil.Process) -> float:
    """User and system time so far; TransferFailed if the process has ended by itself."""
    try:
        if process.status() != psutil.STATUS_ZOMBIE:
            times = process.cpu_times()
            return float(times.user + times.system)
    except psutil.NoSuchProcess:
        pass
    raise TransferFailed(f"the process of host {host} has ended; --work-dir keeps its log")


def received_bytes(host: Host) -> int:
    """Bytes that its interface has received; of packets that the kernel merged, headers count once."""
    with host.inside():
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == "eth0":
                return int(counters.split()[0])
    raise TransferFailed(f"host {host.number} has no interface")


def sent_bytes(host: Host) -> int:
    """Bytes that its token bucket has let through, every header counted as on a wire."""
    buckets = json.loads(_output("tc", "-n", host.namespace, "-s", "-j", "qdisc", "show", "dev", "eth0", "root"))
    return sum(int(bucket["bytes"]) for bucket in buckets if bucket["kind"] == "tbf")


def poll(answered: Callable[[], bool], *, every_s: float, limit_s: float, what: str) -> None:
    until = time.monotonic() + limit_s
    while not answered():
        if time.monotonic() > until:
            raise TransferFailed(f"{what}: not within {limit_s:.0f} s")
        time.sleep(every_s)


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TransferFailed(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


# -- a line with a delay and losses ----------------------------------------------------------------------------------

CHUNK_BYTES = 64 * 1024
MAX_CHUNKS = 64  # Under way in one direction: with 50 ms of delay 80 MB/s, more than such a swarm sends
PACKET_BYTES = 1448
FIRST_WINDOW, MIN_WINDOW, WINDOW_KEPT = 10.0, 2.0, 0.7  # In packets


class SendingWindow:
    """How fast one direction of a connection sends, and what its losses delay. Pure, but for the random numbers."""

    def __init__(self, round_trip_s: float, loss: float, random: Random) -> None:
        self._round_trip_s, self._loss, self._random = round_trip_s, loss, random
        self._packets, self._grows_fast = FIRST_WINDOW, True

    def send(self, nbytes: int) -> tuple[float, float]:
        """Seconds until so many bytes have been sent, and seconds that losses among them add on their way."""
        if not self._loss:
            return 0.0, 0.0
        sending_s, lost_s = 0.0, 0.0
        for _ in range(math.ceil(nbytes / PACKET_BYTES)):
            sending_s += self._round_trip_s / self._packets
            self._packets += 1.0 if self._grows_fast else 1 / self._packets
            if self._random.random() < self._loss:
                self._packets, self._grows_fast = max(MIN_WINDOW, self._packets * WINDOW_KEPT), False
                lost_s = self._round_trip_s
        return sending_s, lost_s


class DelayingProxy:
    """Passes connections on to a port: what one side sends arrives in order, and `delay_s` later. Its own handshake
    costs nothing, so the first bytes of a connection wait for one more round trip, as behind a real one. `loss` is a
    share of the packets.

    Without losses a link has no rate of its own. With them each direction of a connection is as fast as TCP's window
    lets it be: it doubles every round trip until the first loss, then grows by a packet in each, and a loss leaves
    WINDOW_KEPT of it (CUBIC, RFC 9438, 4.6). What was lost comes a round trip later, and all behind it with it."""

    def __init__(self, target: tuple[str, int], delay_s: float, loss: float = 0.0) -> None:
        self._target, self._delay_s, self._loss = target, delay_s, loss
        self._random = Random(0)

    async def run(self, listen: tuple[str, int]) -> None:
        async with await asyncio.start_server(self._connected, *listen) as server:
            await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        with suppress(OSError):
            try:
                onward_reader, onward = await asyncio.open_connection(*self._target)
                writers.append(onward)
                begins = asyncio.get_running_loop().time() + 2 * self._delay_s
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pass_on(reader, onward, begins))
                    group.create_task(self._pass_on(onward_reader, writer, begins))
            except* OSError:
                pass  # One side has hung up, and so the other does.
            finally:
                for one in writers:
                    one.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, begins: float) -> None:
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(reader, chunks, begins))
            group.create_task(_write(chunks, writer))

    async def _read(
        self, reader: asyncio.StreamReader, chunks: asyncio.Queue[tuple[float, bytes]], begins: float
    ) -> None:
        loop = asyncio.get_running_loop()
        window, arrives = SendingWindow(2 * self._delay_s, self._loss, self._random), 0.0
        chunk = b"."
        while chunk:
            chunk = await reader.read(CHUNK_BYTES)
            sending_s, lost_s = window.send(len(chunk))
            sent = max(begins, loop.time()) + sending_s
            arrives = max(arrives, sent + self._delay_s + lost_s)
            await chunks.put((arrives, chunk))
            if sending_s:
                await asyncio.sleep(sent - loop.time())


async def _write(chunks: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    """Write each chunk when it is due; an empty one is the end."""
    loop = asyncio.get_running_loop()
    while True:
        due, chunk = await chunks.get()
        if (left_s := due - loop.time()) > 0:
            await asyncio.sleep(left_s)
        if not chunk:
            writer.write_eof()
            return
        writer.write(chunk)
        await writer.drain()


def main() -> None:
    def address(text: str) -> tuple[str, int]:
        host, _, port = text.rpartition(":")
        return host, int(port)

    parser = argparse.ArgumentParser(description="a proxy that delays and loses")
    parser.add_argument("--listen", type=address, required=True, metavar="HOST:PORT")
    parser.add_argument("--to", type=address, required=True, metavar="HOST:PORT")
    parser.add_argument("--delay-ms", type=float, required=True, help="of each direction")
    parser.add_argument("--loss", type=float, default=0.0, help="share of the packets")
    options = parser.parse_args()
    asyncio.run(DelayingProxy(options.to, options.delay_ms / 1000, options.loss).run(options.listen))


if __name__ == "__main__":
    main()
