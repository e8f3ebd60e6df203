"""What strangers can make a node spend and whom they can make it call: work is counted, and two parties compete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from swarm.gossip.membership import SIGNATURE_US, WORK, Membership
from swarm.gossip.records import (
    MAX_LEAVES,
    MAX_PER_HOST,
    MAX_PER_SUBNET,
    Exchange,
    ExchangeReply,
    SignedRecord,
)
from swarm.gossip.table import MAX_OTHERS
from swarm.types import Address, NodeId
from tests.swarmers import (
    DEAD_S,
    ELSEWHERE,
    RULES,
    address,
    admit,
    ages,
    call_to,
    calls_in,
    core,
    head,
    introduce,
    key,
    reasons,
    run_until,
    signed,
)
from tests.unit.gossip.test_membership import STRANGER
from tests.unit.gossip.test_table import fakes

PER_MESSAGE = 299
"""Records of one address that fit a body of 64 KiB."""
HONEST, FLOODER = "20.1.1.1", "20.2.2.2"
BURST = int(WORK.burst // SIGNATURE_US)


def at(number: int, host: str, port: int = 7, *, sequence: int = 0) -> SignedRecord:
    """A record of a node that says it is there."""
    return signed(number, sequence, addresses=[Address(host=host, port=port)])


class Counted:
    """A core that counts the signatures of records that it checks."""

    def __init__(self, **options: Any) -> None:
        self.core = core(1, **options)
        self.checked = 0
        genuine = self.core._open_record

        def counting(sealed: bytes) -> SignedRecord:
            self.checked += 1
            return genuine(sealed)

        self.core._open_record = counting

    def take(self, *records: SignedRecord, claimed: bool = True, host: str = FLOODER, now: float = 1.0) -> list[str]:
        """Why it refuses records of a stranger, who claims that all of their owners are alive."""
        digest = ages(*((record, 0.0) for record in records)) if claimed else b""
        message = Exchange(records=tuple(record.sealed for record in records), digest=digest, asks=0)
        return reasons(self.core.receive(STRANGER, message, host=host, now=now))


def invented(record: SignedRecord, count: int = PER_MESSAGE) -> list[SignedRecord]:
    """Copies of a record with signatures that nobody made."""
    return [replace(record, sealed=record.sealed[:-8] + number.to_bytes(8, "big")) for number in range(count)]


def banned(one: Counted) -> None:
    introduce(one.core, signed(2), signed(2, leaves=1))


def full_table(one: Counted) -> None:
    for fake in fakes(MAX_OTHERS):
        admit(one.core.view.table, fake, 1.0, now=1.0)


def full_subnet(one: Counted) -> None:
    for number in range(10, 10 + MAX_PER_SUBNET):
        admit(one.core.view.table, at(number, f"20.0.2.{number}"), 1.0, now=1.0)


REFUSABLE: list[tuple[str, SignedRecord, Callable[[Counted], object]]] = [
    ("banned_key", signed(2, 9), banned),
    ("old_record", signed(2), lambda one: introduce(one.core, signed(2, 5))),
    ("zombie", signed(3), lambda one: None),
    ("address_refused", at(2, "10.0.0.1"), lambda one: None),
    ("table_full", signed(2, 1), full_table),
    ("subnet_full", signed(2, 1), full_subnet),
]


@pytest.mark.parametrize(("reason", "record", "before"), REFUSABLE, ids=[reason for reason, *_ in REFUSABLE])
def test_records_that_are_refused_cost_no_signature(
    reason: str, record: SignedRecord, before: Callable[[Counted], object]
) -> None:
    one = Counted(dialable=lambda named: named.host.startswith("20."))
    before(one)
    one.checked = 0
    assert one.take(*invented(record), claimed=reason != "zombie") == [reason] * PER_MESSAGE
    assert one.checked == 0


def test_what_is_known_or_of_no_use_costs_no_signature() -> None:
    one = Counted()
    introduce(one.core, signed(2))
    one.checked = 0
    for record in (signed(2), one.core.view.own, signed(3, reachability="leaf", addresses=())):
        assert one.take(*invented(record)) == []
    assert one.checked == 0
    assert one.take(*invented(signed(2, leaves=1), 1), claimed=False) == ["bad_record"]
    assert one.checked == 1, "another body of the same order would ban the key, so its owner must have signed it"


def test_an_invented_refusal_does_not_keep_the_genuine_record_out() -> None:
    one = Counted(dialable=lambda named: named.host.startswith("20."))
    lie = at(2, "10.0.0.1", sequence=9)
    assert one.take(*invented(lie, 1)) == ["address_refused"]
    wanted = one.core.answer(STRANGER, Exchange(digest=ages((signed(2, 5), 0.0))), now=1.0).wanted
    assert wanted == (signed(2).prefix,)


def test_a_flood_of_genuine_renewals_is_bounded_and_an_honest_caller_is_served() -> None:
    one = Counted()
    for second in range(10):
        one.take(*(signed(number, second) for number in range(2, 2 + PER_MESSAGE)), now=float(second))
    assert BURST <= one.checked <= BURST + 9 * WORK.requests_per_s / SIGNATURE_US + 1
    known = len(one.core.view.table)
    assert one.take(*(signed(number) for number in range(5000, 5050)), host=HONEST, now=9.0) == []
    assert len(one.core.view.table) == known + 50


def test_what_was_left_alone_is_asked_for_again() -> None:
    one = Counted()
    flood = [signed(number) for number in range(2, BURST + 10)]
    for part in range(0, len(flood), 200):
        said = one.take(*flood[part : part + 200])
    assert said.count("over_budget") == len(flood) - BURST
    last = flood[-1]
    assert one.core.answer(STRANGER, Exchange(digest=ages((last, 0.0))), now=1.0).wanted == (last.prefix,)
    assert one.take(last, now=3.0) == []


def test_a_node_that_is_called_can_spend_no_more_with_its_answers() -> None:
    one = Counted()
    introduce(one.core, signed(2))
    one.checked = 0
    for number in range(10):
        call = call_to(2, now=1.0)
        some = [signed(100 + 150 * number + place) for place in range(150)]
        answer = ExchangeReply(records=tuple(r.sealed for r in some), digest=ages(*((r, 0.0) for r in some)))
        one.core.answered(call, answer, now=1.0)
    assert one.checked == BURST


def test_digests_and_questions_cost_their_network_and_nobody_else() -> None:
    one = core(1)
    for fake in fakes(1000):
        admit(one.view.table, fake, 0.0, now=0.0)
    round_message = one.view.round_message(0.0)
    questions = [round_message, Exchange(records=(b"junk",) * 512), Exchange(), Exchange(head=head(3))]
    for number, message in enumerate(questions):
        host = f"20.3.{number}.1"
        asked = sum(one.affords(host, message, now=1.0) for _ in range(1000))
        assert 1 <= asked < 300
        assert one.affords(f"20.3.{number + 100}.1", message, now=1.0)
        assert one.affords(host, message, now=3.0), "a second later its time has come again"
    assert one.affords(ELSEWHERE, round_message, now=1.0)


VICTIM = "20.66.66.66"
HOUR_S = 3600.0


def calls_of(one: Membership, until: float, told: Callable[[float], object]) -> list[tuple[float, str]]:
    """When this node called whom: an honest public answers, the victim never does. `told` says more each second."""
    called: list[tuple[float, str]] = []
    now = 0.0
    while now < until:
        told(now)
        waiting = calls_in(one.tick(now=now))
        while waiting:
            call = waiting.pop()
            called.append((now, call.address.host))
            if call.address.host == VICTIM:
                one.failed(call, now=now)
            else:
                waiting += calls_in(one.answered(call, ExchangeReply(), now=now))
        now += 1.0
    return called


@pytest.mark.parametrize("public", [True, False], ids=["public", "leaf"])
def test_records_of_a_third_party_bring_it_few_calls_while_an_honest_public_gets_its_own(public: bool) -> None:
    """The attacker holds all keys, calls with each of them, and renews each record as often as an honest node."""
    one = core(1, public=public)
    claims = [[at(number, VICTIM, number, sequence=minute) for minute in range(70)] for number in range(100, 164)]

    def told(now: float) -> None:
        for attacker in claims:
            record = attacker[int(now) // 60]
            if int(now) % 30 == 0 and one.affords(FLOODER, Exchange(records=(record.sealed,), asks=0), now=now):
                one.receive(record.node, Exchange(records=(record.sealed,), asks=0), host=FLOODER, now=now)
        honest = signed(2, int(now) // 60)
        one.receive(honest.node, Exchange(records=(honest.sealed,), asks=0), host=address(2).host, now=now)

    called = calls_of(one, HOUR_S, told)
    at_victim = [at for at, host in called if host == VICTIM]
    assert 1 <= len(at_victim) <= 12
    assert len([at for at in at_victim if at > HOUR_S / 2]) <= 1, "it is given up"
    assert len(called) - len(at_victim) > HOUR_S / RULES.hold_s / 4


def test_a_claimed_address_is_proven_by_a_call_from_it_or_an_answer_at_it_and_after_a_move_again() -> None:
    one = core(1)
    for number in (2, 3, 4):
        introduce(one, signed(number), proven=False)
    one.receive(key(2).node_id, Exchange(asks=0), host=FLOODER, now=1.0)
    one.receive(key(3).node_id, Exchange(asks=0), host=address(3).host, now=1.0)
    one.answered(call_to(4, now=1.0), ExchangeReply(), now=1.0)
    assert [peer.proven for peer in one.view.table] == [False, True, True]
    introduce(one, signed(3, 1), at(4, VICTIM, sequence=1), proven=False)
    assert [peer.proven for peer in one.view.table] == [False, True, False]


def test_of_several_addresses_only_the_one_that_was_proven_is_called_again() -> None:
    one = core(1)
    mixed = [Address(host=VICTIM, port=9), address(2), Address(host=VICTIM, port=10)]
    introduce(one, signed(2, addresses=mixed), proven=False)
    one.receive(key(2).node_id, Exchange(asks=0), host=address(2).host, now=0.0)
    assert {host for _, host in calls_of(one, 100.0, lambda now: one.view.table.find(key(2).node_id))} == {
        address(2).host
    }


def test_a_node_that_was_never_reached_is_not_called_after_its_death() -> None:
    one = core(1)
    introduce(one, at(2, VICTIM), proven=False)
    introduce(one, signed(3))
    run_until(one, DEAD_S + 5.0, now=0.0)
    assert len(one.view.table.dead) == 2
    called = {host for at, host in calls_of(one, 1000.0, lambda now: None)}
    assert called == {address(3).host}


def test_only_proven_publics_are_asked_to_call_back() -> None:
    """A witness that does not answer is not noticed there."""
    one = core(1, public=False)
    introduce(one, signed(2), proven=False)
    introduce(one, signed(3))
    assert [peer.signed.node for peer in one.view.reached(0.0)] == [key(3).node_id]


def polls(one: Membership, numbers: Sequence[int], host: str, now: float) -> list[bool]:
    """Have leaves poll from one host. Return which of them found a place."""
    placed: list[bool] = []
    for number in numbers:
        node, poll = NodeId(f"{number:032x}"), Exchange(hold_s=RULES.hold_s, asks=0)
        one.receive(node, poll, host=host.format(number % 250), now=now)
        placed.append(not one.answer(node, poll, now=now).full)
    return placed


@pytest.mark.parametrize("honest", [HONEST, "10.0.0.{}", "127.0.0.1"], ids=["elsewhere", "laboratory", "this machine"])
def test_the_keys_of_one_network_leave_places_for_leaves_of_others(honest: str) -> None:
    one = core(1)
    assert all(polls(one, range(MAX_LEAVES), FLOODER, 1.0))
    assert not any(polls(one, range(5000, 6000), "20.2.2.99", 2.0)), "it is the largest network itself"
    polls(one, range(10), FLOODER, 3.0)
    assert all(polls(one, range(10_000, 10_200), honest, 4.0))
    assert all(polls(one, range(10_000, 10_200), honest, 5.0)), "they keep them"
    assert all(polls(one, range(10), FLOODER, 5.0)), "the silent give way first"
    assert not any(polls(one, range(10, 210), FLOODER, 5.0))
    assert len(one.view.leases) == MAX_LEAVES


def test_two_large_networks_do_not_drive_one_another_out() -> None:
    one = core(1)
    polls(one, range(MAX_LEAVES // 2), HONEST, 1.0)
    polls(one, range(5000, 5000 + MAX_LEAVES // 2), FLOODER, 1.0)
    assert not any(polls(one, range(6000, 6100), FLOODER, 2.0))
    assert not any(polls(one, range(7000, 7100), HONEST, 2.0))


@pytest.mark.parametrize("fill", ["its host", "the table"])
def test_claims_give_way_to_a_node_that_speaks_from_where_it_says_it_is(fill: str) -> None:
    one = core(1)
    table = one.view.table
    claims_of_host = [at(number, HONEST, number) for number in range(10, 10 + MAX_PER_HOST)]
    claimed = fakes(MAX_OTHERS) if fill == "the table" else claims_of_host
    for claim in claimed:
        assert admit(table, claim, 1.0, now=1.0)[0] == "new"
    honest = at(2, HONEST, 7700, sequence=1)
    assert table.has_room(honest.record.addresses[0])
    from_elsewhere = Exchange(records=(honest.sealed,), digest=ages((honest, 0.0)), asks=0)
    one.receive(STRANGER, from_elsewhere, host=FLOODER, now=1.0)
    assert table.find(honest.node) is None, "who passes a record on proves nothing"
    one.receive(honest.node, Exchange(records=(honest.sealed,), asks=0), host=HONEST, now=2.0)
    found = table.find(honest.node)
    assert found is not None
    assert found.proven
    assert len(table) == len(claimed), "one claim has gone"


def test_nodes_that_proved_to_be_there_keep_their_places() -> None:
    one = core(1)

    def calls_from_there(record: SignedRecord) -> list[str]:
        message = Exchange(records=(record.sealed,), asks=0)
        return reasons(one.receive(record.node, message, host=HONEST, now=1.0))

    for number in range(10, 10 + MAX_PER_HOST):
        assert calls_from_there(at(number, HONEST, number)) == []
    late = at(2, HONEST, 7700)
    assert not one.view.table.has_room(late.record.addresses[0])
    assert calls_from_there(late) == ["subnet_full"]
