"""A scheme's processes in shaped network namespaces: started, heard, observed, and hit by faults."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.links import LEARNER, STALLED_MBIT, Fault, Profile, Sample, TransferFailed, in_order
from tests.netns.hosts import Host, Hosts, hosts

TICK_S = 0.5
"""How often bytes and CPU are read: 1 % of a core at 17 hosts."""

SETTLE_S = 120.0
IDLE_CORES = 0.2
"""Of all processes together: what 17 nodes take for their gossip."""

EVENT_S = 120.0
"""Longest wait for a process to say what it must: 17 interpreters start on two busy cores."""


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

    def events(self) -> Iterator[dict[str, Any]]:
        """What it has said since the last call."""
        while not self._events.empty():
            if (event := self._events.get()) is not None:
                yield event

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
            if self.samples[-1].cpu_s - self.samples[-2].cpu_s < IDLE_CORES:
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
    """Ask now and then; TransferFailed if it does not come true in time."""
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
