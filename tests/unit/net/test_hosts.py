"""What an address says of a host: whether it may be called, whose it is, and that names are no addresses."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from swarm.net.hosts import MAX_TRIED, Tries, caller_of, is_dialable, is_loopback
from swarm.types import Address

ANYWHERE = ["8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8"]
LOOPBACK = ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"]
PRIVATE = ["10.1.2.3", "172.16.0.1", "192.168.1.1", "fd12:3456::1", "::ffff:10.0.0.1"]
METADATA = ["169.254.169.254", "::ffff:a9fe:a9fe", "fd00:ec2::254", "100.100.100.200", "::169.254.169.254"]
NO_ONES = ["169.254.1.1", "fe80::1", "224.0.0.1", "ff02::1", "0.0.0.0", "::", "100.64.0.1"]
TUNNELS = ["64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1", "2002:a00:1::1", "2001:0:a00:1::1"]
NAMES = ["metadata.google.internal", "2130706433", "127.1", "0x7f.0.0.1", "127.0.0.1%x.example.com", ""]


@pytest.mark.parametrize(
    ("hosts", "anywhere", "in_a_laboratory"),
    [
        (ANYWHERE, True, True),
        (LOOPBACK + PRIVATE, False, True),
        ([*METADATA, *NO_ONES, *TUNNELS, *NAMES, "localhost"], False, False),
    ],
    ids=["of the internet", "private", "what no setting opens"],
)
def test_which_addresses_may_be_called(hosts: list[str], anywhere: bool, in_a_laboratory: bool) -> None:
    found = {host: (is_dialable(host, lan=False), is_dialable(host, lan=True)) for host in hosts}
    assert found == dict.fromkeys(hosts, (anywhere, in_a_laboratory))


def test_loopback_is_this_machine_in_all_its_names() -> None:
    assert all(map(is_loopback, ("localhost", *LOOPBACK)))
    assert not any(map(is_loopback, (*PRIVATE, *NAMES)))


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("198.51.100.7", "198.51.100.7"),
        ("::ffff:198.51.100.7", "198.51.100.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_a_home_is_one_caller(host: str, name: str) -> None:
    assert caller_of(host) == name


VICTIM = Address(host="8.8.8.8", port=7700)


@pytest.fixture
def tries() -> Tries:
    return Tries(1.0, 16.0, lan=True)


def test_a_silent_host_is_tried_ever_more_rarely_whatever_ports_are_named(tries: Tries) -> None:
    tried = []
    for now in range(200):
        named = Address(host="8.8.8.8", port=1 + now)
        if tries.is_due(named, now=float(now)):
            tries.tried(named, now=float(now))
            tried.append(now)
    assert tried[:6] == [0, 1, 3, 7, 15, 31]
    assert {later - earlier for earlier, later in pairwise(tried[5:])} == {16}


@pytest.mark.parametrize("other", ["2606:4700:0::1", "2606:4700:0:0:0:0:0:1", "2606:4700::1%x", "2606:4700::0001"])
def test_another_notation_is_the_same_host(tries: Tries, other: str) -> None:
    tries.tried(Address(host="2606:4700::1", port=7700), now=0.0)
    assert not tries.is_due(Address(host=other, port=9), now=0.5)
    assert tries.is_due(Address(host="2606:4700::2", port=9), now=0.5)


def test_a_host_that_answered_is_due_at_once(tries: Tries) -> None:
    for _ in range(9):
        tries.tried(VICTIM, now=0.0)
    tries.answered(Address(host="8.8.8.8", port=9))
    assert tries.is_due(VICTIM, now=0.0)
    tries.tried(VICTIM, now=0.0)
    assert tries.is_due(VICTIM, now=1.0)


def test_in_a_private_network_each_port_is_a_host(tries: Tries) -> None:
    tries.tried(Address(host="127.0.0.1", port=1), now=0.0)
    assert not tries.is_due(Address(host="127.0.0.1", port=1), now=0.5)
    assert tries.is_due(Address(host="127.0.0.1", port=2), now=0.5)


def test_without_lan_all_ports_of_a_private_host_together_are_tried_ever_more_rarely() -> None:
    """Such a host may be called because the user named it. A roster or records may name every port there."""
    tries, tried = Tries(0.5, 30.0, lan=False), Counter[str]()
    for port in range(1, 3601):
        for host in ("127.0.0.1", "192.168.1.10"):
            if tries.is_due(Address(host=host, port=port), now=float(port)):
                tries.tried(Address(host=host, port=port), now=float(port))
                tried[host] += 1
    assert tried["127.0.0.1"] == tried["192.168.1.10"] <= 7 + 3600 / 30
    tries.answered(Address(host="127.0.0.1", port=7700))
    assert tries.is_due(Address(host="127.0.0.1", port=7701), now=3600.0)


def test_the_memory_of_tries_is_bounded(tries: Tries) -> None:
    for number in range(MAX_TRIED + 10):
        tries.tried(Address(host=f"20.{number >> 8}.{number & 255}.1", port=1), now=0.0)
    assert len(tries._tried) == MAX_TRIED
    assert not tries.is_due(Address(host="20.1.1.1", port=1), now=0.5)
