"""Membership under any input: damaged bytes raise ProtocolError alone, and no order of events breaks a table."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import ProtocolError
from swarm.gossip.membership import Membership
from swarm.gossip.records import (
    GOSSIP_BODY_BYTES,
    PREFIX_BYTES,
    Exchange,
    ExchangeReply,
    Reachability,
    pack_digest,
    unpack_digest,
)
from swarm.gossip.table import Table, blocks_of
from swarm.types import Address
from swarm.wire import decode, encode
from tests.property.strategies import messages
from tests.property.test_wire import bits, with_flips
from tests.swarmers import ELSEWHERE, RULES, admit, ages, calls_in, core, head, introduce, key, signed, table

RECORD = signed(2, 5)
EXCHANGE = Exchange(
    digest=ages((signed(1, 3), 1.0), (RECORD, 2.0), (signed(3), 700.0)),
    records=(RECORD.sealed, signed(1, 2).sealed, signed(4, reachability="leaf", addresses=()).sealed),
    head=head(3),
    hold_s=2.0,
)
REPLY = ExchangeReply(
    digest=EXCHANGE.digest,
    records=EXCHANGE.records,
    head=head(4),
    wanted=(RECORD.prefix, signed(1).prefix, bytes(PREFIX_BYTES)),
    refute=signed(1, 2).sealed,
    full=True,
)
few_flips = st.lists(bits, min_size=1, max_size=4)


def take_in(one: Membership, message: Exchange, answer: ExchangeReply) -> None:
    """Everything that a peer can do to a core with these; it goes on afterwards."""
    caller = key(9).node_id
    one.receive(caller, message, host=ELSEWHERE, now=5.0)
    one.holds(message)
    assert len(encode(one.answer(caller, message, now=5.0))) <= GOSSIP_BODY_BYTES
    introduce(one, signed(7), now=5.0)
    now = 5.0
    for _ in range(4):
        now = max(now, one.deadline())
        for call in calls_in(one.tick(now=now)):
            one.answered(call, answer, now=now)
    one.take_head(message.head, now=now)


@given(st.lists(st.tuples(st.binary(min_size=8, max_size=8), st.integers(0, 2**32 - 1), st.floats(0, 6553.5))))
def test_an_age_is_never_younger_after_its_way(entries: list[tuple[bytes, int, float]]) -> None:
    back = list(unpack_digest(pack_digest(entries)))
    assert [(prefix, order) for prefix, order, _ in back] == [(prefix, order) for prefix, order, _ in entries]
    for (_, _, age_s), (_, _, age) in zip(entries, back, strict=True):
        assert age_s - 1e-6 <= age * 0.1 <= age_s + 0.1 + 1e-6


@given(flips=few_flips, answer_flips=few_flips, public=st.booleans())
def test_damaged_messages_are_refused_or_do_no_harm(flips: list[int], answer_flips: list[int], public: bool) -> None:
    try:
        message = decode(with_flips(encode(EXCHANGE), flips), Exchange, cap_bytes=GOSSIP_BODY_BYTES)
        answer = decode(with_flips(encode(REPLY), answer_flips), ExchangeReply, cap_bytes=GOSSIP_BODY_BYTES)
    except ProtocolError:
        return
    take_in(core(1, public=public), message, answer)


@given(places=st.lists(st.integers(0, 1000), min_size=1, max_size=6), public=st.booleans())
def test_digests_and_records_damaged_within_a_sound_message_do_no_harm(places: list[int], public: bool) -> None:
    digest = with_flips(EXCHANGE.digest, places)[: len(EXCHANGE.digest) - places[0] % 3]
    records = tuple(with_flips(sealed, places[1:]) if places[1:] else sealed for sealed in EXCHANGE.records)
    message = Exchange(digest=digest, records=records, head=with_flips(EXCHANGE.head, places), hold_s=1.0)
    answer = ExchangeReply(digest=digest, records=records, refute=with_flips(REPLY.refute, places), wanted=REPLY.wanted)
    one = core(1, public=public)
    before = one.view.own.record.generation
    take_in(one, message, answer)
    # What survives of the records is genuine: a former life's, past which the node goes once.
    assert one.view.own.record.generation <= before + 1


@given(message=messages(Exchange), answer=messages(ExchangeReply), public=st.booleans())
def test_any_message_of_the_right_shape_does_no_harm(message: Exchange, answer: ExchangeReply, public: bool) -> None:
    take_in(core(1, public=public), message, answer)


NODES = 6
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("admit"),
            st.integers(0, NODES),
            st.integers(0, 4),
            st.integers(1, 2),
            st.sampled_from(["public", "public", "public", "leaf", "gone"]),
            st.integers(0, 2),
            st.floats(0, 60),
        ),
        st.tuples(st.just("wait"), st.floats(0, 100)),
        st.tuples(st.just("expire"), st.sampled_from([1.0, 2.0])),
        st.tuples(st.just("forget"), st.integers(0, NODES)),
    ),
    max_size=60,
)


def check(one: Table, highest: dict[bytes, int]) -> None:
    assert not one.by_prefix.keys() & one.dead.keys()
    held = {prefix: peer.signed.order for prefix, peer in one.by_prefix.items()}
    held |= {prefix: stone.signed.order for prefix, stone in one.dead.items()}
    for prefix, order in held.items():
        assert order >= highest.get(prefix, 0), "I4"
    highest.update(held)
    recount = Counter(block for peer in one for block in blocks_of(peer.signed.record.addresses))
    assert {block: len(nodes) for block, nodes in one._blocks.items()} == recount
    assert all(count <= block[1] for block, count in recount.items())
    for peer in one:
        assert peer.signed.node not in one.banned
        assert peer.signed.record.reachability == "public"
        assert peer.addresses


@given(steps)
def test_whatever_happens_to_a_table_it_stays_sound(happened: list[tuple[object, ...]]) -> None:
    one, highest, now = table(), dict[bytes, int](), 0.0
    for what, *arguments in happened:
        if what == "admit":
            apply(one, arguments, now)
        elif what == "wait":
            now += float(str(arguments[0]))
        elif what == "expire":
            one.expire(now=now, patience=float(str(arguments[0])))
            for prefix in highest.keys() - one.dead.keys() - one.by_prefix.keys():
                del highest[prefix]
        elif (peer := one.find(key(int(str(arguments[0]))).node_id)) is not None:
            one.forget(peer)
            highest.pop(peer.signed.prefix, None)
        check(one, highest)
    assert now < RULES.tombstone_rounds * RULES.round_s * 2


def apply(one: Table, arguments: list[object], now: float) -> None:
    number, sequence, generation, reachability, place, age_s = arguments
    how: Reachability = reachability  # type: ignore[assignment]
    hosts = [Address(host=f"20.1.{place}.{number}", port=7700)] if how == "public" else []
    record = signed(
        int(str(number)),
        int(str(sequence)),
        generation=int(str(generation)),
        reachability=how,
        addresses=hosts,
        leaves=int(str(place)),
    )
    admit(one, record, now - float(str(age_s)), now=now)
