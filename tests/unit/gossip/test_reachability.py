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


def test_an_address_is_called_back_once_a_minute_however_it_is_written() -> None:
    limit = DialBackLimit(lan=False)
    assert DIAL_BACKS_PER_MINUTE == 1
    for host, otherwise, other in (("8.8.8.8", "::ffff:8.8.8.8", "8.8.4.4"), ("2606:4700::1", "2606:4700:0:0::1", "")):
        assert limit.refusal(host, now=0.0) == ""
        for now in range(60):
            assert "minute" in limit.refusal(otherwise, now=float(now))
        assert not other or limit.refusal(other, now=59.9) == ""
        assert limit.refusal(host, now=60.1) == "", "a refusal does not prolong the wait"


def test_a_private_address_is_called_back_in_a_laboratory_alone_where_many_nodes_share_it() -> None:
    assert "--lan" in DialBackLimit(lan=False).refusal("10.0.0.1", now=0.0)
    limit = DialBackLimit(lan=True)
    assert {limit.refusal("10.0.0.1", now=1.0) for _ in range(LAN_DIAL_BACKS_PER_MINUTE)} == {""}
    assert limit.refusal("10.0.0.1", now=1.0) != ""


def case(now: float = 0.0) -> Reachability:
    return Reachability(port=7700, fingerprint=bytes(32), round_s=ROUND_S, lan=False, random=Random(1), now=now)


def answered(
    one: Reachability,
    witness: int,
    host: str = "8.8.8.8",
    *,
    known: int = len(PUBLICS),
    reached: bool = True,
    refused: str = "",
    now: float = 1.0,
) -> bool:
    """Whether what a witness says changes what the node is."""
    reply = DialBackReply(host=host, reached=reached, refused=refused)
    return one.answered(PUBLICS[witness], reply, known, now=now)


def proven() -> Reachability:
    one = case()
    for witness in range(WITNESSES):
        answered(one, witness, now=0.0)
    assert one.address is not None
    return one


def test_two_witnesses_of_one_address_make_a_node_public() -> None:
    assert answered(case(), 0, known=1), "where one public is known one is enough"
    one = case()
    assert (one.message().port, one.message().fingerprint) == (7700, bytes(32))
    assert not answered(one, 0)
    assert not answered(one, 0), "the same one again"
    assert not answered(one, 1, "9.9.9.9"), "of another address"
    assert answered(one, 2, "::ffff:8.8.8.8")
    assert one.address == Address(host="8.8.8.8", port=7700, fingerprint=bytes(32))


@pytest.mark.parametrize("host", ["example.com", "", "fe80::1%eth0", "8.8.8.8\n"])
def test_what_no_socket_sees_is_not_believed(host: str) -> None:
    one = case()
    assert not answered(one, 0, host, known=1)
    assert one.address is None


def test_a_liar_with_a_new_address_every_time_fills_no_memory() -> None:
    one = case()
    for number in range(10 * MAX_CLAIMED):
        answered(one, 0, f"20.1.{number}.1")
    assert one.address is None
    assert len(one._witnesses) <= MAX_CLAIMED


def test_an_address_that_changes_is_proven_anew() -> None:
    one = proven()
    assert not answered(one, 2, "9.9.9.9")
    assert one.address is not None
    assert one.address.host == "8.8.8.8"
    assert answered(one, 3, "9.9.9.9", now=2.0)
    assert one.address.host == "9.9.9.9"
    assert not answered(one, 0, "8.8.8.8", now=3.0), "former witnesses do not count"


def test_failures_in_a_row_make_a_public_a_leaf_again() -> None:
    one = proven()
    for _ in range(2):
        assert not answered(one, 1), "a success between"
        for _ in range(LOST_AFTER - 1):
            assert not answered(one, 0, reached=False)
    assert answered(one, 2, reached=False)
    assert one.address is None
    assert not answered(one, 0, now=2.0), "its witnesses are gone too"


@pytest.mark.parametrize(("refused", "says_nothing"), [("too soon", True), (CROWDED, False)])
def test_a_refusal_says_nothing_about_an_address_unless_nobody_has_room(refused: str, says_nothing: bool) -> None:
    fresh, public = case(), proven()
    for _ in range(5 * LOST_AFTER):
        for one in (fresh, public):
            answered(one, 0, reached=False, refused=refused)
    assert fresh.address is None
    assert (public.address is not None) == says_nothing


def test_witnesses_are_asked_one_after_another_each_once_before_any_twice() -> None:
    one = case()
    first = one.ask(PUBLICS, now=0.0)
    assert first is not None
    assert one.deadline() > ROUND_S
    answered(one, PUBLICS.index(first), known=99, now=0.0)
    assert one.deadline() <= ROUND_S, "the second is asked soon"
    for attempt in range(20):
        assert one.ask(PUBLICS, now=100.0 * (attempt + 1)) not in (None, first)


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
        answered(hopeless, 0, reached=False, now=0.0)
    for one in (proven(), hopeless):
        assert one.ask(PUBLICS, now=1000.0) is not None
        assert one.deadline() - 1000.0 >= 0.8 * CHECK_ROUNDS * ROUND_S
