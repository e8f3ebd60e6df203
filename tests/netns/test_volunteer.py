"""The newcomer's path of docs/volunteer.md with the real command line: a learner with the defaults of `lead`, and
volunteers on other machines that name its host alone. What travels between them is looked at on the wire."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from swarm.net.stream import PREAMBLE
from swarm.node.bootstrap import read_join_line
from swarm.wire import PROTOCOL
from tests.integration.processes import Node, accepted_by, eventually, fetch_status
from tests.netns.hosts import Host, Hosts, hosts

DOCUMENT = Path(__file__).parents[2] / "docs" / "volunteer.md"
LEAD = ("lead", "--model", "tiny", "--task", "copy", "--steps", "1000000", "--samplers", "0")
WORD_S = 5.0
"""`join` has to say within this time what is wrong."""

PLAIN = (b"HTTP/1.", b"Echo-Protocol", b"Echo-Auth", b"/v1/")
"""What nodes say to one another where nothing is encrypted."""


class Learner(Node):
    """A `lead` process in a host, as it is started by somebody who read one line about it."""

    def __init__(self, directory: Path, host: Host, *arguments: str) -> None:
        self._host, self._run_dir = host, directory / "run"
        super().__init__(directory, "run", *LEAD, "--run-dir", str(self._run_dir), *arguments, place=host.command([]))
        eventually(lambda: self.says("a sampler joins with:"), self, "the learner listens")

    def bootstrap(self) -> str:
        """The printed join line."""
        return next(line for line in self.output().splitlines() if "joins with:" in line).split()[-1]

    def accepted(self) -> dict[str, int]:
        """As its own machine sees it."""
        with self._host.inside():
            return accepted_by(fetch_status("https://127.0.0.1:7700"))


class Volunteers:
    """Processes of `join`, each with a state directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.nodes: list[Node] = []

    def join(self, host: Host, bootstrap: str, *arguments: str, module: str = "swarm") -> Node:
        name = f"node-{len(self.nodes)}"
        given = ("join", "--bootstrap", bootstrap, "--state-dir", str(self._directory / name), *arguments)
        self.nodes.append(Node(self._directory, name, *given, place=host.command([]), module=module))
        return self.nodes[-1]


@pytest.fixture
def network() -> Iterator[Hosts]:
    with hosts(2) as made:
        yield made


@pytest.fixture
def volunteers(tmp_path: Path) -> Iterator[Volunteers]:
    made = Volunteers(tmp_path)
    yield made
    for node in made.nodes:
        node.end()


@contextmanager
def wiretap(host: Host) -> Iterator[list[bytes]]:
    """All packets that enter or leave a host."""
    seen: list[bytes] = []
    with host.inside():
        tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    tap.bind(("eth0", 3))
    tap.settimeout(0.1)
    is_over = threading.Event()

    def listen() -> None:
        while not is_over.is_set():
            try:
                seen.append(tap.recv(1 << 16))
            except TimeoutError:
                pass

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        yield seen
    finally:
        is_over.set()
        listener.join()
        tap.close()


def documented(host: str) -> list[str]:
    """The one line of docs/volunteer.md, without its first word."""
    (line,) = re.findall(r"^ {4}echo-node (join --role sampler .*)$", DOCUMENT.read_text(), re.MULTILINE)
    return str(line).replace("HOST", host).split()


def at_home(directory: Path) -> list[str]:
    """Put before a command: a newcomer has no state yet."""
    return ["env", "-u", "XDG_STATE_HOME", f"HOME={directory / 'home'}"]


def plain_in(packets: Sequence[bytes]) -> list[bytes]:
    return [packet for packet in packets if any(words in packet for words in PLAIN)]


def answer_to(host: Host, where: str, words: bytes) -> bytes:
    """What a port says to bytes that are not encrypted."""
    with host.inside(), socket.create_connection((where, 7700), timeout=20) as line:
        line.sendall(words)
        try:
            return line.recv(1 << 16)
        except ConnectionResetError:
            return b""


def node_of(node: Node) -> str:
    """The id that it says at its start."""
    eventually(lambda: node.says("; status:"), node, "it listens")
    return next(line for line in node.output().splitlines() if "; status:" in line).split()[1].rstrip(";")


def test_a_volunteer_behind_a_router_joins_by_host_alone_draws_and_leaves(
    network: Hosts, volunteers: Volunteers, tmp_path: Path
) -> None:
    """Nobody can open a connection to it, and nothing between the two machines can be read."""
    one, two = network
    network.shield(two)
    learner = Learner(tmp_path, one)
    volunteers.nodes.append(learner)
    assert learner.says(
        "open to other machines: listens at all of its addresses, port 7700, encrypted (--host 127.0.0.1 keeps it"
    )
    assert learner.says(f"{one.address} is an address of a private network")
    assert [address.authority for address in read_join_line(learner.bootstrap()).addresses] == [f"{one.address}:7700"]

    with wiretap(two) as packets:
        volunteer = Node(tmp_path, "volunteer", *documented(one.address), place=[*two.command([]), *at_home(tmp_path)])
        volunteers.nodes.append(volunteer)
        eventually(lambda: any(learner.accepted().values()), volunteer, "its rollouts are accepted")
        assert set(learner.accepted()) == {node_of(volunteer)}
        assert volunteer.says(f"trusting it because https://{one.address}:7700 said so, with certificate ")
        volunteer.signal(signal.SIGINT)
        assert volunteer.wait() == 0
        _in_order(
            volunteer,
            'this swarm trains "tiny" on the task "copy"',
            "to download: about 0.2 MB at first",
            "to stop: Ctrl-C",
            "engine: transformers on cpu",
            "left the swarm",
        )
        given = re.search(
            r"left the swarm; ([\d,]+) of its rollouts were accepted, ([\d,]+) tokens", volunteer.output()
        )
        assert given is not None
        rollouts, tokens = (int(count.replace(",", "")) for count in given.groups())
        assert 0 < rollouts < tokens, "a completion has several"
        assert (tmp_path / "home/.local/state/echo-node/sampler-0/node.key").exists()
        eventually(lambda: learner.accepted() == {}, learner, "the learner knows that it has left")
    assert sum(map(len, packets)) > 100_000, "the weights passed here"
    assert plain_in(packets) == []

    asked = f"GET /v1/hello HTTP/1.1\r\nHost: x\r\nEcho-Protocol: {PROTOCOL}\r\n\r\n".encode()
    for words in (asked, PREAMBLE + asked):
        assert b"HTTP" not in answer_to(two, one.address, words), "plain text is not accepted either"


def test_nothing_is_said_in_plain_text_to_a_machine_that_does_not_encrypt(
    network: Hosts, volunteers: Volunteers, tmp_path: Path
) -> None:
    one, two = network
    learner = Learner(tmp_path, one, "--no-tls")
    volunteers.nodes.append(learner)
    assert learner.says("NOT encrypted")
    with wiretap(two) as packets:
        volunteer = volunteers.join(two, one.address, "--role", "relay")
        eventually(lambda: volunteer.says("does not answer with TLS"), volunteer, "it refuses")
    sent = [packet for packet in packets if packet[26:30] == socket.inet_aton(two.address)]
    assert any(b"\x16\x03\x01" in packet for packet in sent), "the hello of TLS"
    assert plain_in(sent) == []
    assert not volunteer.says("found swarm")


@pytest.mark.long
def test_join_says_within_five_seconds_what_is_wrong_and_goes_on_trying(
    network: Hosts, volunteers: Volunteers, tmp_path: Path
) -> None:
    """Of a machine behind a firewall; other causes are in tests/unit/node/test_connections.py."""
    one, two = network
    volunteers.nodes.append(Learner(tmp_path, one))
    network.shield(one)
    held_up = volunteers.join(two, one.address, "--role", "relay")
    eventually(lambda: held_up.says("; status: echo-node status"), held_up, "it has started")
    began = time.monotonic()
    eventually(lambda: held_up.says("; trying again until a bootstrap answers"), held_up, "it says why")
    assert time.monotonic() - began < WORD_S, held_up.output()
    assert held_up.says("within 4 s; is the address right"), held_up.output()
    network.unshield(one)
    eventually(lambda: held_up.says("found swarm"), held_up, "it went on trying")
    assert [line for line in held_up.output().splitlines() if "trying again" in line][1:] == []


def _in_order(node: Node, *words: str) -> None:
    at = [node.output().find(one) for one in words]
    assert -1 not in at, node.output()
    assert at == sorted(at), node.output()


@pytest.mark.long
def test_a_relay_tells_newcomers_what_the_run_is_about_and_that_a_router_does_no_harm(
    network: Hosts, volunteers: Volunteers, tmp_path: Path
) -> None:
    one, two = network
    learner = Learner(tmp_path, one, "--lan")
    volunteers.nodes.append(learner)
    relay = volunteers.join(one, learner.bootstrap(), "--role", "relay", "--lan", "--port", "7701")
    eventually(lambda: relay.says("found swarm"), relay, "it can be asked")
    network.shield(two)
    asks = ("--role", "relay", "--lan", "--nickname", "Bob")
    newcomer = volunteers.join(two, f"{one.address}:7701", *asks)
    eventually(lambda: newcomer.says("which is usual behind a router"), newcomer, "nobody could call it back")
    assert newcomer.says('this swarm trains "tiny" on the task "copy"')
    assert newcomer.output().count("usual behind a router") == 1


@pytest.mark.long
def test_a_machine_without_a_network_has_a_swarm_of_its_own(
    network: Hosts, volunteers: Volunteers, tmp_path: Path
) -> None:
    """By what the learner prints: its join line, and this machine's own address."""
    one, _ = network
    assert one.run(["ip", "link", "set", "eth0", "down"]).returncode == 0
    learner = Learner(tmp_path, one)
    volunteers.nodes.append(learner)
    joined = [volunteers.join(one, text, module="tests.scripted swarm") for text in (learner.bootstrap(), "127.0.0.1")]
    for node in joined:
        eventually(lambda: learner.accepted().get(node_of(node)), node, "its rollouts are accepted")  # noqa: B023
