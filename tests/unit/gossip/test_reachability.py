"""Who may be called back, how often, and what makes a node public."""

from __future__ import annotations

from random import Random

import pytest

from swarm.gossip.reachability import (
    ASK_ROUNDS,
    CHECK_ROUNDS,
    CROWDED,
    DIAL_BACKS_PER_MINUTE,
    LAN_DIAL_BACKS_PER_MINUTE,
    LOST_AFTER,
    MAX_CLAIMED,
    PATIENT_FAILURES,
    WITNESSES,
    DialBackLimit,
    DialBackReply,
    Reachability,
)
from swarm.types import Address, NodeId

ROUND_S = 2.0
PUBLICS = [NodeId(name) for name in "abcdef"]


def test_an_address_is_called_back_once_a_minute() -> None:
    limit = DialBackLimit(lan=False)
    assert DIAL_BACKS_PER_MINUTE == 1
    assert limit.refusal("8.8.8.8", now=0.0) == ""
    assert "minute" in limit.refusal("8.8.8.8", now=59.9)
    assert limit.refusal("8.8.4.4", now=59.9) == ""
    assert limit.refusal("8.8.8.8", now=60.1) == ""


def test_a_refusal_does_not_prolong_the_wait() -> None:
    limit = DialBackLimit(lan=False)
    for now in range(60):
        limit.refusal("8.8.8.8", now=float(now))
    assert limit.refusal("8.8.8.8", now=60.5) == ""


def test_an_address_written_otherwise_is_the_same_address() -> None:
    limit = DialBackLimit(lan=False)
    assert limit.refusal("2606:4700::1", now=0.0) == ""
    assert limit.refusal("2606:4700:0:0::1", now=1.0) != ""
    assert limit.refusal("8.8.8.8", now=0.0) == ""
    assert limit.refusal("::ffff:8.8.8.8", now=1.0) != ""


def test_many_nodes_of_a_laboratory_share_an_address() -> None:
    limit = DialBackLimit(lan=True)
    said = [limit.refusal("127.0.0.1", now=1.0) for _ in range(LAN_DIAL_BACKS_PER_MINUTE + 1)]
    assert said[:-1] == [""] * LAN_DIAL_BACKS_PER_MINUTE
    assert said[-1] != ""


def test_a_private_address_is_not_called_back() -> None:
    assert "--lan" in DialBackLimit(lan=False).refusal("10.0.0.1", now=0.0)
    assert DialBackLimit(lan=True).refusal("10.0.0.1", now=0.0) == ""


def case(now: float = 0.0) -> Reachability:
    return Reachability(port=7700, fingerprint=bytes(32), round_s=ROUND_S, lan=False, random=Random(1), now=now)


def seen(host: str = "8.8.8.8", *, reached: bool = True, refused: str = "") -> DialBackReply:
    return DialBackReply(host=host, reached=reached, refused=refused)


def proven() -> Reachability:
    one = case()
    for witness in PUBLICS[:WITNESSES]:
        one.answered(witness, seen(), len(PUBLICS), now=0.0)
    assert one.address is not None
    return one


def test_two_witnesses_of_one_address_make_a_node_public() -> None:
    one = case()
    assert not one.answered(PUBLICS[0], seen(), len(PUBLICS), now=0.0)
    assert not one.answered(PUBLICS[0], seen(), len(PUBLICS), now=0.0), "the same one again"
    assert not one.answered(PUBLICS[1], seen("9.9.9.9"), len(PUBLICS), now=0.0), "of another address"
    assert one.address is None
    assert one.answered(PUBLICS[2], seen("::ffff:8.8.8.8"), len(PUBLICS), now=0.0)
    assert one.address == Address(host="8.8.8.8", port=7700, fingerprint=bytes(32))


def test_where_one_public_is_known_one_witness_is_enough() -> None:
    assert case().answered(PUBLICS[0], seen(), 1, now=0.0)


@pytest.mark.parametrize("host", ["example.com", "a b", "", "fe80::1%eth0", "8.8.8.8\n"])
def test_what_no_socket_sees_is_not_believed(host: str) -> None:
    one = case()
    assert not one.answered(PUBLICS[0], seen(host), 1, now=0.0)
    assert one.address is None


def test_a_liar_with_a_new_address_every_time_fills_no_memory() -> None:
    one = case()
    for number in range(10 * MAX_CLAIMED):
        one.answered(PUBLICS[0], seen(f"20.1.{number}.1"), len(PUBLICS), now=0.0)
    assert one.address is None
    assert len(one._witnesses) <= MAX_CLAIMED


def test_an_address_that_changes_is_proven_anew() -> None:
    one = proven()
    assert not one.answered(PUBLICS[2], seen("9.9.9.9"), len(PUBLICS), now=1.0)
    assert one.address is not None
    assert one.address.host == "8.8.8.8"
    assert one.answered(PUBLICS[3], seen("9.9.9.9"), len(PUBLICS), now=2.0)
    assert one.address.host == "9.9.9.9"
    assert not one.answered(PUBLICS[0], seen("8.8.8.8"), len(PUBLICS), now=3.0), "former witnesses do not count"


def test_failures_in_a_row_make_a_public_a_leaf_again() -> None:
    one = proven()
    for _ in range(LOST_AFTER - 1):
        assert not one.answered(PUBLICS[0], seen(reached=False), len(PUBLICS), now=1.0)
    assert not one.answered(PUBLICS[1], seen(), len(PUBLICS), now=1.0), "a success between"
    for _ in range(LOST_AFTER - 1):
        assert not one.answered(PUBLICS[0], seen(reached=False), len(PUBLICS), now=1.0)
    assert one.answered(PUBLICS[2], seen(reached=False), len(PUBLICS), now=1.0)
    assert one.address is None
    assert not one.answered(PUBLICS[0], seen(), len(PUBLICS), now=2.0), "its witnesses are gone too"


def test_a_refusal_says_nothing_about_an_address() -> None:
    one = proven()
    for _ in range(5 * LOST_AFTER):
        assert not one.answered(PUBLICS[0], seen(reached=False, refused="too soon"), len(PUBLICS), now=1.0)
    assert one.address is not None


def test_where_the_network_is_crowded_a_node_stays_a_leaf_or_becomes_one() -> None:
    fresh, public = case(), proven()
    for _ in range(LOST_AFTER):
        for one in (fresh, public):
            one.answered(PUBLICS[0], seen(reached=False, refused=CROWDED), len(PUBLICS), now=1.0)
    assert (fresh.address, public.address) == (None, None)


def test_witnesses_are_asked_one_after_another_each_once_before_any_twice() -> None:
    one = case()
    first = one.ask(PUBLICS, now=0.0)
    assert first is not None
    one.answered(first, seen(), 99, now=0.0)
    for attempt in range(20):
        assert one.ask(PUBLICS, now=100.0 * (attempt + 1)) not in (None, first)


def test_the_second_witness_is_asked_soon() -> None:
    one = case()
    first = one.ask(PUBLICS, now=0.0)
    assert first is not None
    assert one.deadline() > ROUND_S
    one.answered(first, seen(), len(PUBLICS), now=0.0)
    assert one.deadline() <= ROUND_S


def test_a_shell_that_wakes_often_does_not_put_off_the_question() -> None:
    one = case()
    assert one.ask(PUBLICS, now=0.0) is not None
    asked = [step / 10 for step in range(1, 200) if one.ask(PUBLICS, now=step / 10) is not None]
    assert asked
    assert asked[0] <= 1.2 * ASK_ROUNDS * ROUND_S + 0.1


def test_nobody_is_asked_while_nobody_is_known_and_the_shell_is_not_kept_busy() -> None:
    one = case()
    assert one.ask([], now=0.0) is None
    assert one.deadline() == ROUND_S
    assert one.ask(PUBLICS, now=ROUND_S) is not None


def test_whoever_is_proven_or_without_hope_asks_seldom() -> None:
    hopeless = case()
    for _ in range(PATIENT_FAILURES):
        hopeless.answered(PUBLICS[0], seen(reached=False), len(PUBLICS), now=0.0)
    for one in (proven(), hopeless):
        assert one.ask(PUBLICS, now=1000.0) is not None
        assert one.deadline() - 1000.0 >= 0.8 * CHECK_ROUNDS * ROUND_S


def test_a_question_names_the_port_and_the_certificate() -> None:
    assert (case().message().port, case().message().fingerprint) == (7700, bytes(32))
