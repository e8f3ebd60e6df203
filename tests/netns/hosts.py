"""Hosts that are Linux network namespaces on a switch of their own, with rates, partitions and shields. Root only.

Every host has one interface, a veth pair whose other end is a port of a bridge in the switch's namespace. The
machine's own network is not touched, so swarms coexist. All state is in the kernel and is found again by name:
`netns-swarm.NAME.switch` and `netns-swarm.NAME.1`, `.2`, and so on.
"""

from __future__ import annotations

import ctypes
import ipaddress
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

MAX_HOSTS = 250
"""Host n has an address in the n-th /24 of the network, and n is the last byte of its MAC."""

NAME = re.compile(r"[a-z0-9-]{1,40}\Z")
NAMESPACE = re.compile(r"netns-swarm\.(?P<swarm>[a-z0-9-]+)\.(?P<part>switch|[0-9]+)\Z")
OWNED = re.compile(r"pid-(?P<pid>[0-9]+)-(?P<ticks>[0-9]+)-[0-9]+\Z")

WHOLE = "whole"
"""The bridge on which every host is while nothing is cut."""

KILL_TRIES = 200
KILL_PAUSE_S = 0.05

MAC_HEADER = 14
DROP_NEW_TCP = (
    (0x28, 0, 0, 12),  # IPv4?
    (0x15, 0, 8, 0x0800),
    (0x30, 0, 0, MAC_HEADER + 9),  # TCP?
    (0x15, 0, 6, 6),
    (0x28, 0, 0, MAC_HEADER + 6),  # a later fragment, with no TCP header in it?
    (0x45, 4, 0, 0x1FFF),
    (0xB1, 0, 0, MAC_HEADER),  # of the flags SYN (0x02) and ACK (0x10), SYN alone?
    (0x50, 0, 0, MAC_HEADER + 13),
    (0x54, 0, 0, 0x12),
    (0x15, 1, 0, 0x02),
    (0x06, 0, 0, 0),  # pass
    (0x06, 0, 0, 2),  # drop
)
"""Classic BPF as (code, jump if true, jump if false, value): drop IPv4 TCP segments that open a connection."""

_swarms_made = itertools.count(1)


class NetnsError(Exception):
    """A command failed or a request makes no sense; the message is one line."""


def _tool(name: str) -> str:
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if found is None:
        raise NetnsError(f"needs `{name}`; install iproute2")
    return found


def _command(tool: str, *arguments: str, script: str | None = None) -> str:
    done = subprocess.run([_tool(tool), *arguments], input=script, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        words = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[0]
        raise NetnsError(f"{tool} {' '.join(arguments)}: {words}")
    return done.stdout


def _ip(namespace: str, *lines: str) -> None:
    """Run lines of `ip` in a namespace, in one process."""
    _command("ip", "-n", namespace, "-batch", "-", script="\n".join(lines) + "\n")


def _links(namespace: str, *selection: str) -> list[dict[str, Any]]:
    # Older releases of `ip` print an empty object where a link does not match.
    found = json.loads(_command("ip", "-n", namespace, "-j", "link", "show", *selection) or "[]")
    return [link for link in found if link]


def _burst_bytes(mbit: float) -> int:
    """10 ms of the rate, and never less than what TCP needs to run at all."""
    if not mbit > 0:
        raise NetnsError(f"a rate must be above zero, not {mbit:g} Mbit/s")
    return int(max(32_768, mbit * 1e6 / 8 * 0.01))


def _tbf(mbit: float, burst: int) -> list[str]:
    """A token bucket with a queue of 100 ms."""
    limit = int(burst + max(65_536, mbit * 1e6 / 8 * 0.1))
    return ["tbf", "rate", f"{int(mbit * 1e6)}bit", "burst", str(burst), "limit", str(limit)]


class Host:
    """One namespace; its number counts from 1."""

    def __init__(self, swarm: str, number: int, address: str) -> None:
        self.number = number
        self.address = address
        self.namespace = f"netns-swarm.{swarm}.{number}"
        self.port = f"port{number}"
        self._started: list[subprocess.Popen[Any]] = []

    def command(self, arguments: Sequence[str]) -> list[str]:
        """What to execute so that `arguments` run in this host."""
        return [_tool("ip"), "netns", "exec", self.namespace, *arguments]

    def popen(self, arguments: Sequence[str], **settings: Any) -> subprocess.Popen[Any]:
        """As subprocess.Popen, in this host and in a process group of its own. The pid is the program's own."""
        process = subprocess.Popen(self.command(arguments), **{"start_new_session": True, **settings})
        self._started.append(process)
        return process

    def run(self, arguments: Sequence[str], *, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run to the end, and return what it printed."""
        return subprocess.run(self.command(arguments), capture_output=True, text=True, timeout=timeout_s, check=False)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets that this thread opens in the block are the host's, and stay the host's. Never `await` in it."""
        with open("/proc/thread-self/ns/net") as here, open(f"/run/netns/{self.namespace}") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(here.fileno())

    def end_started(self) -> None:
        """Kill what `popen` started, each with its process group."""
        for process in self._started:
            if process.poll() is None:
                _kill(process.pid, group=os.getpgid(process.pid) == process.pid)
            process.wait()
        self._started.clear()


class Hosts:
    """The hosts of one swarm and the switch between them."""

    def __init__(self, name: str, hosts: Sequence[Host]) -> None:
        self.name = name
        self.switch = f"netns-swarm.{name}.switch"
        self._hosts = {host.number: host for host in hosts}
        self._bursts: dict[tuple[str, str], int] = {}

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def __len__(self) -> int:
        return len(self._hosts)

    def host(self, number: int) -> Host:
        if number not in self._hosts:
            raise NetnsError(f"no host {number} in swarm {self.name}; it has 1 to {len(self)}")
        return self._hosts[number]

    def shape(self, host: Host, *, up_mbit: float | None = None, down_mbit: float | None = None) -> None:
        """Set what the host may send and receive, each in Mbit/s; None for no limit."""
        self._limit(host.namespace, "eth0", up_mbit)
        self._limit(self.switch, host.port, down_mbit)

    def _limit(self, namespace: str, link: str, mbit: float | None) -> None:
        """Limit what leaves through `link`."""
        qdisc = ["noqueue"]
        if mbit is not None:
            # A bucket never shrinks: a packet that waits, merged by the kernel up to the old size, would never leave.
            burst = self._bursts[namespace, link] = max(self._bursts.get((namespace, link), 0), _burst_bytes(mbit))
            qdisc = _tbf(mbit, burst)
        _command("tc", "-n", namespace, "qdisc", "replace", "dev", link, "root", *qdisc)

    def partition(self, groups: Sequence[Sequence[Host]]) -> None:
        """Cut between groups, until the next call or `heal`. Hosts in no group stay together.

        Every group gets a bridge of its own, and packets to another one vanish: no refusal, no unreachable.
        """
        bridges: dict[int, str] = {}
        for bridge, group in enumerate(groups, start=1):
            for host in group:
                if host.number in bridges:
                    raise NetnsError(f"host {host.number} is named twice")
                bridges[host.number] = f"cut{bridge}"
        there = {link["ifname"] for link in _links(self.switch, "type", "bridge")}
        lines = [f"link add {bridge} up type bridge" for bridge in sorted(set(bridges.values()) - there)]
        lines += [f"link set {host.port} master {bridges.get(host.number, WHOLE)}" for host in self]
        _ip(self.switch, *lines)

    def heal(self) -> None:
        """Undo `partition`."""
        self.partition([])

    def groups(self) -> dict[int, str]:
        """The bridge that each host is on."""
        masters = {link["ifname"]: link.get("master", "") for link in _links(self.switch)}
        return {host.number: masters[host.port] for host in self}

    def shield(self, host: Host) -> None:
        """Silently drop TCP connections opened towards the host; its own and those open already go on."""
        if not self.shielded(host):
            program = ",".join([str(len(DROP_NEW_TCP)), *(" ".join(map(str, line)) for line in DROP_NEW_TCP)])
            _command("tc", "-n", host.namespace, "qdisc", "add", "dev", "eth0", "ingress")
            filter_ = ["filter", "add", "dev", "eth0", "ingress", "bpf", "da", "bytecode", program]
            _command("tc", "-n", host.namespace, *filter_)

    def unshield(self, host: Host) -> None:
        if self.shielded(host):
            _command("tc", "-n", host.namespace, "qdisc", "del", "dev", "eth0", "ingress")

    def shielded(self, host: Host) -> bool:
        return "qdisc ingress" in _command("tc", "-n", host.namespace, "qdisc", "show", "dev", "eth0")

    def remove(self) -> None:
        """End what runs in the hosts, then remove them and the switch."""
        for host in self:
            host.end_started()
        remove(self.name)


@contextmanager
def hosts(count: int, *, up_mbit: float | None = None, down_mbit: float | None = None) -> Iterator[Hosts]:
    """`count` hosts that live as long as the block. What a killed process left of its own goes first."""
    sweep()
    made = create(owned_name(), count, up_mbit=up_mbit, down_mbit=down_mbit)
    try:
        yield made
    finally:
        made.remove()


def create(name: str, count: int, *, up_mbit: float | None = None, down_mbit: float | None = None) -> Hosts:
    """A swarm that stays until it is removed."""
    if not NAME.match(name):
        raise NetnsError(f"a name is up to 40 of a-z, 0-9 and -, not {name!r}")
    if not 1 <= count <= MAX_HOSTS:
        raise NetnsError(f"a swarm has 1 to {MAX_HOSTS} hosts, not {count}")
    if name in swarms():
        raise NetnsError(f"swarm {name} is up already")
    network = _free_network()
    made = Hosts(name, [Host(name, n, str(network[256 * n + 1])) for n in range(1, count + 1)])
    # Outside the try: where two make the same swarm at once, the second fails here and removes nothing.
    _command("ip", "netns", "add", made.switch)
    try:
        _ip(made.switch, f"link add {WHOLE} up type bridge")
        for host in made:
            _connect(made, host, network.prefixlen)
            made.shape(host, up_mbit=up_mbit, down_mbit=down_mbit)
    except BaseException:
        remove(name)
        raise
    return made


def _mac(host: Host) -> str:
    return f"02:00:00:00:00:{host.number:02x}"


def _connect(swarm: Hosts, host: Host, prefix: int) -> None:
    """Make the host and plug it in. It knows every MAC: a question that no partition answers would end in
    "no route to host" after three seconds, and a real partition is silent."""
    _command("ip", "netns", "add", host.namespace)
    pair = f"link add {host.port} type veth peer name eth0 address {_mac(host)} netns {host.namespace}"
    _ip(swarm.switch, pair, f"link set {host.port} master {WHOLE} up")
    others = (other for other in swarm if other is not host)
    _ip(
        host.namespace,
        "link set lo up",
        "link set eth0 addrgenmode none",  # no IPv6, of which the shield knows nothing
        f"address add {host.address}/{prefix} dev eth0",
        "link set eth0 up",
        *(f"neighbour add {other.address} lladdr {_mac(other)} dev eth0 nud permanent" for other in others),
    )


def _free_network() -> ipaddress.IPv4Network:
    """A network that the machine has no route to, so that an address means one host only."""
    routes = json.loads(_command("ip", "-j", "-4", "route", "show", "table", "all") or "[]")
    words = [route["dst"] for route in routes if route.get("dst", "default") != "default"]
    taken = [ipaddress.IPv4Network(word, strict=False) for word in words]
    for second in range(77, 250):
        network = ipaddress.IPv4Network(f"10.{second}.0.0/16")
        if not any(network.overlaps(other) for other in taken):
            return network
    raise NetnsError("the machine has routes to all of 10.77.0.0/16 to 10.249.0.0/16")


def attach(name: str) -> Hosts:
    """A swarm that was made earlier, maybe by another process."""
    numbers = sorted(int(part) for part in swarms().get(name, []) if part != "switch")
    if not numbers:
        raise NetnsError(f"no swarm named {name} is up")
    return Hosts(name, [Host(name, number, _address(f"netns-swarm.{name}.{number}")) for number in numbers])


def _address(namespace: str) -> str:
    links = json.loads(_command("ip", "-n", namespace, "-j", "-4", "address", "show", "dev", "eth0") or "[]")
    return next((str(a["local"]) for link in links if link for a in link["addr_info"]), "")


def swarms() -> dict[str, list[str]]:
    """The parts of every swarm there is, by its name."""
    found: dict[str, list[str]] = {}
    for line in _command("ip", "netns", "list").splitlines():
        if match := NAMESPACE.match(line.split()[0]):
            found.setdefault(match["swarm"], []).append(match["part"])
    return found


def remove(name: str) -> None:
    """Remove a swarm, or what there is of it, and end what runs in it. No such swarm is well too."""
    for part in sorted(swarms().get(name, [])):  # "switch" is last: it says that the swarm is up
        namespace = f"netns-swarm.{name}.{part}"
        try:
            _end_processes_in(namespace)
            _command("ip", "netns", "delete", namespace)
        except NetnsError:
            if part in swarms().get(name, []):  # else somebody else was quicker
                raise


def owned_name() -> str:
    """A name that says which process it belongs to; the start time, because pids return."""
    pid = os.getpid()
    return f"pid-{pid}-{_start_ticks(pid)}-{next(_swarms_made)}"


def sweep() -> None:
    """Remove the swarms whose process is gone without having removed them."""
    for name in swarms():
        owner = OWNED.match(name)
        if owner and _start_ticks(int(owner["pid"])) != owner["ticks"]:
            remove(name)


def _start_ticks(pid: int) -> str:
    """When the process started; empty when there is none. The name before it may hold spaces and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _end_processes_in(namespace: str) -> None:
    """Nothing is in a namespace of ours unless it was started there, or by what was."""
    for _ in range(KILL_TRIES):
        pids = [int(pid) for pid in _command("ip", "netns", "pids", namespace).split()]
        found = [pid for pid in pids if pid != os.getpid()]
        if not found:
            return
        for pid in found:
            _kill(pid)
        time.sleep(KILL_PAUSE_S)
    raise NetnsError(f"processes in {namespace} do not end: {found}")


def _kill(pid: int, *, group: bool = False) -> None:
    try:
        (os.killpg if group else os.kill)(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _enter(descriptor: int) -> None:
    """setns(2) for this thread; os.setns came with Python 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, 0x40000000) != 0:  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "setns")


@cache
def unusable() -> str:
    """Why this machine cannot do all of this, found by doing it; empty when it can."""
    if os.geteuid() != 0:
        return "needs root"
    try:
        with hosts(2, up_mbit=10, down_mbit=10) as swarm:
            first, second = swarm
            swarm.partition([[first], [second]])
            swarm.heal()
            swarm.shield(first)
            swarm.unshield(first)
            with first.inside():
                pass
    except (NetnsError, OSError) as error:
        return f"needs network namespaces with bridges, tbf and bpf filters: {error}"
    return ""
