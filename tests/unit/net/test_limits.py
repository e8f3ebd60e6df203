"""Who may connect and ask how often, on a clock of our own."""

from __future__ import annotations

import pytest

from swarm.net.limits import Gate, Guest, Meter, RateLimits
from swarm.types import NodeId

HOME, ELSEWHERE = "198.51.100.7", "203.0.113.9"
ALICE, BOB = NodeId("alice"), NodeId("bob")


def entered(gate: Gate, host: str = HOME) -> Guest:
    guest = gate.enter(host)
    assert guest is not None
    return guest


def proven(gate: Gate, node: NodeId, host: str = HOME) -> Guest:
    guest = entered(gate, host)
    assert gate.prove(guest, node)
    return guest


def test_an_address_has_eight_connections() -> None:
    gate = Gate(RateLimits())
    guests = [entered(gate) for _ in range(8)]
    assert gate.enter(HOME) is None
    assert gate.refused == {"connections": 1}
    entered(gate, ELSEWHERE)
    for _ in range(2):
        gate.leave(guests[0])
    entered(gate)
    assert gate.enter(HOME) is None


@pytest.mark.parametrize("signing", [8, 1], ids=["all sign", "all but one only fetch"])
def test_a_proven_node_brings_its_own_eight_so_that_its_neighbour_is_not_starved(signing: int) -> None:
    """Chunks and heads are asked for without a signature, on connections of their own."""
    gate = Gate(RateLimits())
    for node in (ALICE, BOB):
        for number in range(8):
            if number < signing:
                proven(gate, node)
            else:
                entered(gate)
    if signing == 8:
        assert [entered(gate) for _ in range(8)]
        assert gate.enter(HOME) is None
    else:
        assert gate.refused == {}


def test_a_node_has_eight_connections_wherever_it_calls_from() -> None:
    gate = Gate(RateLimits())
    for number in range(8):
        proven(gate, ALICE, f"203.0.113.{number}")
    ninth = entered(gate)
    assert not gate.prove(ninth, ALICE)
    assert gate.refused == {"connections_of_node": 1}
    assert gate.prove(ninth, BOB)


def test_keys_cost_nothing_so_they_do_not_buy_an_address_more_than_its_share() -> None:
    limits = RateLimits()
    gate = Gate(limits)
    count = 0
    while (guest := gate.enter(HOME)) is not None:
        gate.prove(guest, NodeId(f"node-{count}"))
        count += 1
    assert count == limits.connections * (1 + limits.nodes_per_address)


def test_a_connection_that_speaks_for_another_node_counts_to_that_one() -> None:
    gate = Gate(RateLimits())
    guests = [proven(gate, ALICE) for _ in range(8)]
    assert gate.prove(guests[0], BOB)
    assert gate.prove(guests[1], ALICE)
    assert gate.prove(entered(gate), ALICE)


def test_the_whole_server_has_a_bound_too() -> None:
    gate = Gate(RateLimits(all_connections=20))
    for number in range(20):
        entered(gate, f"203.0.113.{number}")
    assert gate.enter(HOME) is None
    assert gate.refused == {"all_connections": 1}


def test_nothing_is_left_of_whoever_has_gone() -> None:
    gate = Gate(RateLimits())
    guests = [proven(gate, node) for node in (ALICE, BOB, ALICE)] + [entered(gate, ELSEWHERE)]
    for guest in guests:
        gate.leave(guest)
    assert (gate._at, gate._of, gate._all) == ({}, {}, 0)
    assert gate.prove(guests[0], ALICE)  # a request that was under way when its connection went
    assert gate._of == {}


def test_this_machine_is_exempt_unless_it_is_said_otherwise() -> None:
    gate, strict = Gate(RateLimits()), Gate(RateLimits(exempt_loopback=False))
    guests = [entered(gate, "127.0.0.1") for _ in range(100)]
    assert all(gate.wait_s(guest, now=0.0) == 0.0 for guest in guests for _ in range(2))
    assert all(gate.prove(guest, ALICE) for guest in guests)
    assert [strict.enter("127.0.0.1") is None for _ in range(9)] == [False] * 8 + [True]


def test_a_burst_passes_and_then_the_rate_holds_for_all_connections_of_an_address() -> None:
    gate = Gate(RateLimits())
    guest, second, alice = entered(gate), entered(gate), proven(gate, ALICE)
    assert [gate.wait_s(guest, now=100.0) for _ in range(40)] == [0.0] * 40
    assert gate.wait_s(guest, now=100.0) == pytest.approx(1 / 20)
    assert gate.wait_s(second, now=100.0) > 0.0
    assert gate.wait_s(alice, now=100.0) == gate.wait_s(entered(gate, ELSEWHERE), now=100.0) == 0.0
    passed = sum(gate.wait_s(guest, now=100.0 + tick / 100) == 0.0 for tick in range(1, 1001))
    assert passed in (199, 200)
    assert gate.refused["requests"] == 1002 - passed


def test_an_address_in_a_flood_of_addresses_is_forgotten_not_kept() -> None:
    meter = Meter(RateLimits(buckets=10))
    for number in range(1000):
        meter.take(f"203.0.113.{number}", now=0.0)
        assert len(meter._buckets) <= 10


def test_new_keys_do_not_buy_an_address_new_bursts() -> None:
    """A node that proves another key with every request draws from what its address may ask in all."""
    limits = RateLimits()
    gate = Gate(limits)
    guest, let_in = entered(gate), 0
    for number in range(10_000):
        let_in += gate.wait_s(guest, now=0.0) == 0.0
        gate.prove(guest, NodeId(f"node-{number}"))
    assert let_in <= limits.burst * (1 + limits.nodes_per_address)
    assert gate.wait_s(entered(gate, ELSEWHERE), now=0.0) == 0.0


def test_large_bodies_count_as_several_requests_and_small_ones_of_others_pass() -> None:
    limits = RateLimits()
    gate = Gate(limits)
    asks, other = proven(gate, ALICE), proven(gate, BOB, ELSEWHERE)
    questions = sum(gate.wait_s(asks, now=0.0, body_bytes=98_000) == 0.0 for _ in range(100))
    assert questions == limits.burst * limits.proven_share // (1 + 98_000 / limits.body_bytes)
    assert gate.wait_s(other, now=0.0, body_bytes=400) == 0.0
    # Of a body that does not say its size no more is counted than can be paid.
    assert gate.wait_s(entered(gate, "192.0.2.77"), now=0.0, body_bytes=float("inf")) == 0.0


def test_pieces_of_weights_are_metered_by_address_and_leave_other_requests_theirs() -> None:
    limits = RateLimits()
    gate = Gate(limits)
    newcomer, other = entered(gate), entered(gate, ELSEWHERE)
    fetched = sum(gate.wait_s(newcomer, now=0.0, fetches=True) == 0.0 for _ in range(2000))
    assert fetched == limits.fetches_share * limits.burst
    assert gate.refused == {"requests": 2000 - fetched}
    assert gate.wait_s(newcomer, now=0.0) == 0.0
    assert gate.wait_s(other, now=0.0, fetches=True) == 0.0
    # A key buys nothing, since pieces are given to everybody.
    assert gate.wait_s(proven(gate, ALICE), now=0.0, fetches=True) > 0.0
