"""The table of publics: what raises a record, what ends a node, and every cap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from swarm.gossip.records import (
    ENTRY_BYTES,
    MAX_BANNED,
    MAX_PER_HOST,
    MAX_PER_SUBNET,
    MAX_PUBLICS,
    RECORD_CONTEXT,
    Appeared,
    Died,
    SignedRecord,
    open_record,
    pack_digest,
)
from swarm.gossip.table import MAX_OTHERS, Table
from swarm.net.hosts import is_dialable
from swarm.types import Address, NodeId
from swarm.wire import encode
from tests.swarmers import DEAD_S, LIFE_S, RULES, THE_SWARM, address, admit, anywhere, key, reasons, signed, table

LATE = DEAD_S + 1.0


def admitted(one: Table, record: SignedRecord, *, now: float = 0.0, age_s: float = 0.0) -> str:
    """What came of it, or why it was refused."""
    return admit(one, record, now - age_s, now=now)[0]


def at(host: str, port: int = 7700) -> tuple[Address, ...]:
    return (Address(host=host, port=port),)


def known(*records: SignedRecord, dialable: Callable[[Address], bool] = anywhere) -> Table:
    """A table of these at 0 s."""
    one = table(dialable=dialable)
    for record in records:
        admit(one, record, 0.0, now=0.0)
    return one


def with_dead() -> Table:
    """A table in which node 1 died at LATE."""
    one = known(signed(1, 5))
    assert [type(effect) for effect in one.expire(now=LATE, patience=1.0)] == [Died]
    return one


def test_only_a_higher_order_replaces_a_record() -> None:
    one = table()
    assert admit(one, signed(1, 5), 0.0, now=0.0) == ("new", [Appeared(signed=signed(1, 5))])
    assert admit(one, signed(1, 5), 0.0, now=0.0) == ("known", [])
    assert admitted(one, signed(1, 4)) == "old_record"
    assert admitted(one, signed(1, 9, generation=0)) == "old_record"
    assert admitted(one, signed(1, 6)) == "reissued"
    assert admitted(one, signed(1, 0, generation=2)) == "reissued"
    assert admitted(one, signed(1, 1, generation=2, addresses=[address(9)])) == "changed"
    (peer,) = one
    assert peer.signed.record.sequence == 1
    assert peer.addresses == (address(9),)


def test_a_moved_public_may_be_called_at_once() -> None:
    one = known(signed(1))
    (peer,) = one
    peer.failures, peer.retry_at = 3, 1e9
    admit(one, signed(1, 1), 0.0, now=0.0)
    assert peer.failures == 3
    admit(one, signed(1, 2, addresses=[address(9)]), 0.0, now=0.0)
    assert peer.failures == 0
    assert peer.retry_at < 0


def test_silence_ends_a_public_and_patience_stretches_it() -> None:
    one = known(signed(1))
    assert one.expire(now=DEAD_S - 1, patience=1.0) == []
    assert one.expire(now=LATE, patience=2.0) == []
    assert one.expire(now=LATE, patience=1.0) == [Died(node=key(1).node_id, reason="silent")]
    assert one.expire(now=LATE, patience=1.0) == []


def test_a_record_that_is_not_issued_anew_ends_whatever_is_said_of_its_beats() -> None:
    one = known(signed(1))
    admit(one, signed(1), LIFE_S - 2, now=LIFE_S - 2)
    (peer,) = one
    peer.heard_at = LIFE_S + 1
    assert one.expire(now=LIFE_S - 1, patience=1.0) == []
    assert one.expire(now=LIFE_S + 1, patience=9.0) == [Died(node=key(1).node_id, reason="record expired")]


def test_a_dead_node_comes_back_by_a_higher_order_alone() -> None:
    one = with_dead()
    assert admitted(one, signed(1, 4), now=LATE) == "old_record"
    assert admitted(one, signed(1, 5), now=LATE) == "known"
    assert len(one) == 0
    assert admitted(one, signed(1, 6), now=LATE) == "new"
    assert one.dead == {}
    one = with_dead()
    assert admitted(one, signed(1, 5, leaves=1), now=LATE) == "equivocation"
    assert one.dead == {}


def test_a_tombstone_outlives_every_record_that_is_under_way() -> None:
    assert RULES.tombstone_rounds > 2 * RULES.life_rounds
    one = with_dead()
    stone_s = RULES.tombstone_rounds * RULES.round_s
    one.expire(now=LATE + stone_s - 1, patience=1.0)
    assert admitted(one, signed(1, 5), now=LATE + stone_s - 1) == "known"
    one.expire(now=LATE + stone_s + 1, patience=1.0)
    assert one.dead == {}


@pytest.mark.parametrize("reachability", ["leaf", "gone"])
def test_a_public_may_withdraw_itself_and_no_older_record_undoes_it(reachability: str) -> None:
    one = known(signed(1))
    said, effects = admit(one, signed(1, 1, reachability=reachability, addresses=()), 0.0, now=0.0)  # type: ignore[arg-type]
    assert (said, effects) == ("gone", [Died(node=key(1).node_id, reason=reachability)])
    assert admitted(one, signed(1)) == "old_record"
    assert not next(iter(one.dead.values())).is_lost
    assert admitted(one, signed(1, 2)) == "new"
    assert admitted(one, signed(2, reachability=reachability, addresses=())) == "known", "it takes no room"  # type: ignore[arg-type]
    assert (len(one), len(one.dead)) == (1, 0)


def test_two_contents_of_one_order_ban_the_key() -> None:
    one = known(signed(1))
    wrapped = encode([signed(1).body, key(1).sign(RECORD_CONTEXT, signed(1).body), "more"])
    assert wrapped != signed(1).sealed
    assert admitted(one, open_record(wrapped, THE_SWARM)) == "known", "the same body in other bytes"
    said, effects = admit(one, signed(1, leaves=1), 0.0, now=0.0)
    assert (said, reasons(effects)) == ("equivocation", ["equivocation"])
    assert effects[-1] == Died(node=key(1).node_id, reason="equivocated")
    assert key(1).node_id in one.banned
    assert (len(one), len(one.dead)) == (0, 0)
    assert admitted(one, signed(1, 9, generation=9)) == "banned_key"


def test_a_banned_key_is_forgotten_when_there_are_too_many() -> None:
    one = known(*(signed(number, leaves=n) for number in range(1, MAX_BANNED + 2) for n in (0, 1)))
    banned = [number for number in range(1, MAX_BANNED + 2) if key(number).node_id in one.banned]
    assert banned == list(range(2, MAX_BANNED + 2))


def test_nobody_takes_the_place_of_another_with_the_same_prefix() -> None:
    assert admitted(known(signed(1)), replace(signed(2, 9), prefix=signed(1).prefix)) == "prefix_taken"


@pytest.mark.parametrize(
    ("cap", "place", "late", "elsewhere"),
    [
        (MAX_PER_SUBNET, "20.1.1.{}", "20.1.1.200", "20.1.2.200"),
        (MAX_PER_SUBNET, "2a00:1:2:{}::1", "2a00:1:2:a::1", "2a00:1:3:a::1"),
        (MAX_PER_HOST, "20.1.1.1", "20.1.1.1", "20.1.1.2"),
    ],
    ids=["a /24", "a /48", "a host, whatever keys and ports it names"],
)
def test_a_subnet_has_a_cap(cap: int, place: str, late: str, elsewhere: str) -> None:
    one = table()
    for number in range(1, cap + 1):
        assert admitted(one, signed(number, addresses=at(place.format(number), 7700 + number))) == "new"
    assert admitted(one, signed(1000, addresses=at(late))) == "subnet_full"
    assert admitted(one, signed(1000, addresses=at(elsewhere))) == "new"
    assert admitted(one, signed(0, addresses=at(late))) == "new", "the learner always finds room"


def test_a_laboratory_of_private_addresses_has_no_limit() -> None:
    one = table(dialable=lambda named: is_dialable(named.host, lan=True))
    for number in range(1, 3 * MAX_PER_SUBNET):
        hosts = at("192.168.1.1", number) if number % 2 else at(f"10.0.0.{number}")
        assert admitted(one, signed(number, addresses=hosts)) == "new"


def test_a_move_does_not_go_around_the_cap_of_a_subnet_and_makes_room_where_it_left() -> None:
    numbers = range(1, MAX_PER_SUBNET + 2)
    one = known(*map(signed, numbers))
    moved = [admitted(one, signed(number, 1, addresses=at(f"20.200.1.{number}"))) for number in numbers]
    assert moved == ["changed"] * MAX_PER_SUBNET + ["subnet_full"]
    assert admitted(one, signed(1, 2, addresses=at("20.200.1.250"))) == "changed", "within its own subnet"
    admit(one, signed(1, 3, addresses=at("20.9.9.9")), 0.0, now=0.0)
    assert admitted(one, signed(1000, addresses=at("20.200.1.200"))) == "new"
    admit(one, signed(2, 2, reachability="gone", addresses=()), 0.0, now=0.0)
    assert admitted(one, signed(1001, addresses=at("20.200.1.201"))) == "new"


def fakes(count: int) -> list[SignedRecord]:
    """Records of as many nodes, without the time that so many signatures take."""
    pattern = signed(1)
    return [
        replace(
            pattern,
            record=msgspec.structs.replace(pattern.record, addresses=(address(number),)),
            node=NodeId(pattern.node[:-8] + f"{number:08x}"),
            prefix=number.to_bytes(8, "big"),
        )
        for number in range(1, count + 1)
    ]


def test_a_full_table_refuses_everybody_but_the_learner_and_its_digest_fits_a_body() -> None:
    one = table()
    for fake in fakes(MAX_OTHERS):
        assert admitted(one, fake) == "new"
    assert admitted(one, signed(77_777)) == "table_full"
    assert admitted(one, signed(0)) == "new"
    with_itself = len(one) + 1
    assert with_itself == MAX_PUBLICS
    assert len(pack_digest((p.signed.prefix, p.signed.order, 0.0) for p in one)) == ENTRY_BYTES * (MAX_PUBLICS - 1)


def test_the_dead_make_room_for_the_living_the_longest_dead_first() -> None:
    everybody = fakes(MAX_OTHERS + 10)
    one = known(*everybody[:MAX_OTHERS])
    one.expire(now=LATE, patience=1.0)
    assert (len(one), len(one.dead)) == (0, MAX_OTHERS)
    for fake in everybody[MAX_OTHERS:]:
        assert admitted(one, fake, now=LATE) == "new"
    assert len(one) + len(one.dead) <= MAX_PUBLICS
    assert everybody[0].prefix not in one.dead
    assert everybody[MAX_OTHERS - 1].prefix in one.dead


@pytest.mark.parametrize("first", ["new", "changed"])
def test_an_address_that_may_not_be_called_is_refused_at_first_sight_and_after_a_move(first: str) -> None:
    before = (signed(1),) if first == "changed" else ()
    one = known(*before, dialable=lambda named: named.host.startswith("20."))
    assert admitted(one, signed(1, 1, addresses=at("10.0.0.1"))) == "address_refused"
    assert all(peer.addresses == (address(1),) for peer in one)


def test_a_leaf_forgets_the_old_but_never_the_learner() -> None:
    one = known(signed(0), signed(1))
    admit(one, signed(2), LIFE_S, now=LIFE_S)
    one.forget_old(now=LIFE_S + 1)
    assert {peer.signed.node for peer in one} == {key(0).node_id, key(2).node_id}
    assert one.dead == {}
    one.expire(now=LIFE_S + LATE, patience=1.0)
    assert len(one) == 0
    assert one.learner is not None
    assert one.learner.signed == signed(0), "it is remembered after its death"


def test_what_was_refused_for_good_is_not_asked_for_again_for_a_while() -> None:
    """Otherwise a few such records would cost 40 kB in every round."""
    one = known(signed(1, 5))
    assert admitted(one, signed(1, 5, addresses=[address(7)])) == "equivocation"
    assert admitted(one, signed(1, 6)) == "banned_key"
    assert one.unwanted == {signed(1).prefix: signed(1, 6).order}
    one.pardon(now=1.0)
    one.pardon(now=LIFE_S / 2)
    assert one.unwanted == {}, "the first pardon is at the start"
    admitted(one, signed(1, 7))
    one.pardon(now=LIFE_S / 2)
    assert one.unwanted
    one.pardon(now=1.0 + LIFE_S)
    assert not one.unwanted


def test_a_zombie_is_refused_and_asked_for_again() -> None:
    one = table()
    assert admitted(one, signed(1), now=100.0, age_s=DEAD_S + 1) == "zombie"
    assert not one.unwanted
    assert admitted(one, signed(1), now=100.0, age_s=DEAD_S - 1) == "new"


def test_a_name_is_taken_from_the_learner_alone_and_only_with_its_certificate() -> None:
    """Who trusts the swarm trusts its learner; whatever else its name leads to is not spoken to. Although a user may
    have named a bootstrap by that name: strangers could have all of its ports tried."""
    one = table(dialable=lambda place: is_dialable(place.host, lan=False) or place.host == "learner.example")
    pinned = Address(host="learner.example", port=7700, fingerprint=bytes(32))
    plain = Address(host="learner.example", port=7700)
    hidden = Address(host="169.254.169.254", port=80, fingerprint=bytes(32))
    assert one.callable_at(signed(0, addresses=[pinned, plain, hidden])) == (pinned,)
    assert one.callable_at(signed(1, addresses=[pinned, plain])) == ()
