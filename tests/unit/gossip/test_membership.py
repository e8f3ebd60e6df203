"""The core of membership: what it takes in, what it says, and what nobody can make it do."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest

from swarm.gossip.membership import FIRST_GREET_S, MAX_GREET_S, Membership
from swarm.gossip.records import (
    GOSSIP_BODY_BYTES,
    MAX_PUBLICS,
    MAX_SEQUENCE,
    Appeared,
    Doubled,
    Effect,
    Exchange,
    ExchangeReply,
    GenerationRaised,
    Greet,
    Post,
    SignedRecord,
    Wake,
)
from swarm.gossip.table import MAX_OTHERS, Peer
from swarm.gossip.view import MAX_WANTED, RECORDS_BYTES
from swarm.types import Address
from swarm.wire import decode, encode
from tests.builders import v
from tests.swarmers import (
    DEAD_S,
    ELSEWHERE,
    LIFE_S,
    RULES,
    address,
    admit,
    ages,
    ages_in,
    call_to,
    calls_in,
    core,
    deaths,
    deliver,
    head,
    introduce,
    key,
    reasons,
    reply,
    run_until,
    signed,
)
from tests.unit.gossip.test_table import fakes

STRANGER = key(4_000_000).node_id


def knows(one: Membership, number: int) -> Peer | None:
    return one.view.table.find(key(number).node_id)


def peer_of(one: Membership, number: int) -> Peer:
    peer = knows(one, number)
    assert peer is not None
    return peer


def told(one: Membership, *records: SignedRecord, digest: bytes = b"", by: int = 4_000_000, now: float) -> list[Effect]:
    """What `one` makes of a message of a stranger, or of node `by`."""
    message = Exchange(records=tuple(record.sealed for record in records), digest=digest, asks=0)
    return one.receive(key(by).node_id, message, host=ELSEWHERE, now=now)


def forged(data: bytes) -> bytes:
    """With another last byte. A zero in its place would change nothing once in sixteen times: it is the top byte of a
    number below 2^252."""
    return data[:-1] + bytes([data[-1] ^ 1])


def a_round(one: Membership, *, now: float) -> list[Post]:
    """The calls of the next round, whose other effects are of no interest."""
    effects: list[Effect] = []
    while not any(call.message.asks for call in calls_in(effects)):
        now = max(now, one.deadline())
        effects = one.tick(now=now)
    return [call for call in calls_in(effects) if call.message.asks]


# -- what is taken in ----------------------------------------------------------------------------------------


def test_a_record_and_its_age_make_a_public_known_and_one_without_brings_no_beat() -> None:
    one = core(1)
    assert reasons(told(one, signed(2), now=100.0)) == ["zombie"]
    assert Appeared(signed=signed(2)) in introduce(one, signed(2), now=100.0, age_s=30.0)
    assert peer_of(one, 2).heard_at == pytest.approx(100.0 - RULES.transit_s - 30.0)
    told(one, signed(2, 1), now=101.0)
    assert peer_of(one, 2).signed == signed(2, 1)
    assert peer_of(one, 2).heard_at < 70.0


def test_a_caller_is_heard_now_and_so_is_its_own_record() -> None:
    one = core(1)
    told(one, signed(2), by=2, now=50.0)
    assert peer_of(one, 2).heard_at == 50.0
    told(one, by=2, now=60.0)
    assert peer_of(one, 2).heard_at == 60.0


def test_an_answer_was_true_when_the_question_was_sent() -> None:
    one = core(1)
    introduce(one, signed(2), age_s=1.0)
    call, *_ = a_round(one, now=0.0)
    now = call.timeout_s - 0.5
    one.answered(call, reply(digest=ages((signed(3), 4.0)), records=(signed(3).sealed,)), now=now)
    heard_at = peer_of(one, 2).heard_at
    assert heard_at <= now - 1.0
    assert peer_of(one, 3).heard_at == pytest.approx(heard_at - 4.0)


def test_the_youngest_of_all_beats_is_kept() -> None:
    one = core(1)
    introduce(one, signed(2), now=10.0)
    first = peer_of(one, 2).heard_at
    told(one, digest=ages((signed(2), 6000.0)), now=11.0)
    assert peer_of(one, 2).heard_at == first, "nobody makes a beat older"
    told(one, digest=ages((signed(2), 2.0)), now=20.0)
    assert peer_of(one, 2).heard_at == pytest.approx(18.0 - RULES.transit_s)


def test_a_node_that_claims_anothers_record_gains_nothing_by_it() -> None:
    one = core(1)
    told(one, signed(2), by=3, now=5.0)
    assert knows(one, 2) is knows(one, 3) is None
    one.introduced(signed(2), address(66), now=5.0)
    assert knows(one, 3) is None


def test_bad_records_heads_and_digests_are_counted_and_change_nothing() -> None:
    one = core(1)
    introduce(one, signed(2))
    before = one.view.round_message(1.0).digest
    wrong = forged(signed(2, 9).sealed)
    foreign = signed(3, swarm=signed(1).node).sealed  # type: ignore[arg-type]
    for bad in (b"junk", wrong, foreign):
        message = Exchange(records=(bad, signed(5).sealed, bad), digest=bytes(13), head=b"junk", asks=0)
        effects = one.receive(STRANGER, message, host=ELSEWHERE, now=1.0)
        assert sorted(reasons(effects)) == ["bad_head", "bad_record", "malformed_digest"]
        assert len(effects) == 3, "what follows a record that does not open is not looked at"
    assert one.view.round_message(1.0).digest == before


def test_a_head_only_rises_and_must_be_the_learners() -> None:
    one = core(1)
    assert Wake() in one.take_head(head(3), now=0.0)
    assert one.take_head(head(3), now=0.0) == []
    assert one.take_head(head(2), now=0.0) == []
    assert reasons(one.take_head(forged(head(9)), now=0.0)) == ["bad_head"]
    assert one.view.newest == v(3)
    assert Wake() in one.take_head(head(1, 1), now=0.0)
    assert (one.view.newest, one.view.head) == (v(1, 1), head(1, 1))


def test_a_head_is_pushed_on_at_once_and_once() -> None:
    one = core(1)
    introduce(one, *(signed(number) for number in range(2, 12)))
    pushed = [call for call in calls_in(one.take_head(head(3), now=0.0)) if call.message.head == head(3)]
    assert len({call.node for call in pushed}) == RULES.push_fanout
    assert calls_in(one.take_head(head(3), now=0.0)) == []


def test_an_address_that_may_not_be_called_is_never_called() -> None:
    one = core(1, dialable=lambda named: named.host.startswith("20."))
    bad = Address(host="169.254.169.254", port=80)
    assert reasons(introduce(one, signed(2, addresses=[bad]))) == ["address_refused"]
    introduce(one, signed(3, addresses=[bad, address(3)]), signed(4))
    introduce(one, signed(4, 1, addresses=[address(4), bad]))
    effects = run_until(one, DEAD_S + 4 * RULES.dead_try_rounds * RULES.round_s, now=0.0)
    called = {call.address for call in calls_in([effect for _, effect in effects])}
    assert called == {address(3), address(4)}


# -- refutation ----------------------------------------------------------------------------------------------


def two_who_lost_one_another() -> tuple[Membership, Membership, float]:
    """1 and 2 knew one another; both hold the other dead."""
    one, two = core(1), core(2)
    introduce(one, two.view.own)
    introduce(two, one.view.own)
    for node in (one, two):
        node._reissue_at = 1e9
        run_until(node, DEAD_S + 5.0, now=0.0)
        assert len(node.view.table) == 0
    return one, two, DEAD_S + 5.0


def test_whoever_is_held_dead_hears_of_it_and_comes_back_with_a_higher_order() -> None:
    one, two, now = two_who_lost_one_another()
    for step in range(3):
        for source, target in ((one, two), (two, one)):
            for _, call in run_until_revive(source, now + step):
                deliver(call, source, target, now=now + step)
    assert peer_of(one, 2).signed == two.view.own
    assert peer_of(two, 1).signed == one.view.own


def run_until_revive(one: Membership, now: float) -> list[tuple[float, Post]]:
    one._revive_at = now
    return [(now, call) for call in calls_in(one.tick(now=now))]


def test_a_refutation_is_one_step() -> None:
    one, two, now = two_who_lost_one_another()
    before = one.view.own.order
    answer = two.answer(key(1).node_id, Exchange(), now=now)
    assert answer.refute == one.view.own.sealed
    call = next(call for _, call in run_until_revive(one, now))
    effects = one.answered(call, answer, now=now)
    assert one.view.own.order == before + 1
    assert not any(isinstance(effect, GenerationRaised) for effect in effects)


@pytest.mark.parametrize(
    "refute",
    [b"", b"junk", signed(2, 50).sealed, forged(signed(1, 50).sealed), signed(1, 900, generation=4).sealed],
    ids=["nothing", "junk", "another's", "forged", "an old one of its own"],
)
def test_a_liar_cannot_make_a_node_jump_its_numbers(refute: bytes) -> None:
    one = core(1, generation=5)
    introduce(one, signed(2))
    call = a_round(one, now=0.0)[0]
    before = one.view.own.order
    one.answered(call, ExchangeReply(refute=refute, records=(refute,)), now=0.5)
    claim = ages((signed(1, 60_000, generation=60_000), 0.0))
    told(one, digest=claim, now=0.6)
    assert one.answer(STRANGER, Exchange(digest=claim), now=0.6).wanted == ()
    assert one.view.own.order == before


def test_a_node_restored_from_a_copy_learns_its_own_newer_record_and_persists_the_generation() -> None:
    former = signed(1, 7, generation=9)
    other = core(2)
    introduce(other, former)
    one = core(1, generation=3)
    introduce(one, other.view.own)
    call = next(call for call in a_round(one, now=0.0) if call.node == key(2).node_id)
    _, effects = deliver(call, one, other, now=0.1)
    assert GenerationRaised(generation=10) in effects
    assert one.view.own.order > former.order
    (push,) = [call for call in calls_in(one.tick(now=1.0)) if one.view.own.sealed in call.message.records]
    deliver(push, one, other, now=1.1)
    assert peer_of(other, 1).signed.order == one.view.own.order
    assert key(1).node_id not in other.view.table.banned


def test_of_two_processes_with_one_key_the_one_that_came_last_gives_way() -> None:
    third = core(2)
    first, last = core(1, generation=3), core(1, generation=4, now=LIFE_S)
    at, doubled = LIFE_S, set[str]()
    for one in (first, last):
        introduce(one, third.view.own, now=at)

    def a_turn() -> None:
        nonlocal at
        at += RULES.round_s
        for name, one in (("first", first), ("last", last)):
            calls = calls_in(one.tick(now=at))
            while calls:
                _, effects = deliver(calls.pop(), one, third, now=at)
                calls += calls_in(effects)
                doubled.update(name for effect in effects if isinstance(effect, Doubled))

    while not doubled:
        a_turn()
        assert at < 2 * LIFE_S
    assert doubled == {"last"}
    assert last.view.own.record.generation < first.view.own.record.generation
    assert peer_of(third, 1).signed.order == first.view.own.order


def test_a_learner_restored_from_a_copy_knows_its_former_life_by_the_versions_that_it_published() -> None:
    one = core(0, generation=2)
    one.take_head(head(1, 1), now=0.0)

    def raised_by(version: int) -> list[Effect]:
        effects = one.receive(STRANGER, Exchange(head=head(version, 1)), host=ELSEWHERE, now=1.0)
        return [effect for effect in effects[:1] if isinstance(effect, GenerationRaised)]

    order = one.view.own.order
    assert raised_by(0) == []
    assert one.view.own.order == order
    assert raised_by(10) == [GenerationRaised(generation=3)], "versions of this life are older than what others hold"
    assert one.view.own.order > order
    assert raised_by(11) == []


def test_what_must_be_persisted_comes_before_what_is_sent() -> None:
    """At the end of a sequence the generation rises."""
    one = core(1)
    introduce(one, signed(2))
    one._owner._sequence = MAX_SEQUENCE
    effects = one.set_reachability("public", (address(9),), now=1.0)
    assert effects[0] == GenerationRaised(generation=2)
    assert (one.view.own.record.generation, one.view.own.record.sequence) == (2, 0)
    assert calls_in(effects)


# -- death ---------------------------------------------------------------------------------------------------


def test_who_was_late_itself_waits_twice_as_long() -> None:
    def dies(stalled: bool) -> float:
        one = core(1)
        introduce(one, signed(2), now=0.0)
        now = 0.0
        while True:
            due = one.deadline()
            # Its event loop hung for three rounds.
            now = due + 3 * RULES.round_s if stalled and DEAD_S / 4 < now < DEAD_S / 3 else max(now, due)
            effects = one.tick(now=now)
            for call in calls_in(effects):
                one.failed(call, now=now)
            if deaths(effects):
                return now

    assert DEAD_S - RULES.transit_s <= dies(stalled=False) <= 1.2 * DEAD_S
    assert DEAD_S * 1.2 < dies(stalled=True) <= 2 * DEAD_S + 4 * RULES.round_s


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "is demoted"])
def test_a_public_that_leaves_or_is_demoted_is_gone_for_others_at_once(leaves: bool) -> None:
    one, two = core(1), core(2)
    introduce(one, two.view.own)
    introduce(two, one.view.own)
    said = calls_in(one.leave(now=1.0) if leaves else one.set_reachability("leaf", (), now=1.0))
    effects, _ = deliver(said[0], one, two, now=1.0)
    assert deaths(effects) == [key(1).node_id]
    if not leaves:
        polls = [call for call in calls_in(one.tick(now=1.0)) if call.message.hold_s]
        deliver(polls[0], one, two, now=1.0)
        assert list(two.view.leases.leaves) == [key(1).node_id]


def test_only_what_is_new_is_pushed_on() -> None:
    one = core(1)
    introduce(one, *(signed(number) for number in range(2, 8)))
    one.tick(now=RULES.push_delay_s)

    def pushed(now: float) -> set[bytes]:
        pushes = [call.message for call in calls_in(one.tick(now=now)) if not call.message.asks]
        return {record for push in pushes for record in push.records}

    introduce(one, signed(2, 1), now=1.0)
    assert pushed(1.0 + RULES.push_delay_s) == set(), "a re-issue travels with the rounds"
    introduce(one, signed(3, 1, addresses=[address(99)]), signed(9), now=3.0, age_s=7.0)
    assert pushed(3.0 + RULES.push_delay_s) == {signed(3, 1, addresses=[address(99)]).sealed, signed(9).sealed}


def test_what_is_passed_on_is_as_old_as_it_was() -> None:
    one = core(1)
    introduce(one, signed(2))
    introduce(one, signed(9), now=3.0, age_s=7.0)
    pushes = [call.message for call in calls_in(one.tick(now=4.0)) if not call.message.asks]
    assert pushes
    for push in pushes:
        assert ages_in(push.digest)[signed(9).prefix] >= 7.0 + RULES.transit_s
    call = next(call for call in a_round(one, now=5.0) if call.node == key(2).node_id)
    second = calls_in(one.answered(call, reply(wanted=(signed(9).prefix,)), now=40.0))
    assert [ages_in(call.message.digest)[signed(9).prefix] >= 36.0 for call in second] == [True]


# -- bodies --------------------------------------------------------------------------------------------------


def crowded(count: int = MAX_OTHERS, *, now: float = 0.0) -> Membership:
    """A public that knows so many others."""
    one = core(1)
    for fake in fakes(count):
        admit(one.view.table, fake, now, now=now)
    return one


def assert_fits(message: Exchange | ExchangeReply) -> None:
    body = encode(message)
    assert len(body) <= GOSSIP_BODY_BYTES
    assert decode(body, type(message), cap_bytes=GOSSIP_BODY_BYTES) == message


@pytest.mark.parametrize("known", [0, 500, 1500, 3000, MAX_OTHERS])
def test_every_message_of_the_largest_table_fits_a_body(known: int) -> None:
    one = crowded()
    admit(one.view.table, signed(0), 0.0, now=0.0)
    assert len(ages_in(one.view.round_message(0.0).digest)) == MAX_PUBLICS
    assert_fits(one.view.round_message(0.0))
    one.take_head(head(3), now=0.0)
    others = fakes(MAX_OTHERS)
    asked = Exchange(digest=ages(*((other, 500.0) for other in others[:known])))
    answer = one.answer(STRANGER, asked, now=1.0)
    assert_fits(answer)
    assert answer.records
    told = ages_in(answer.digest)
    assert len(told) >= known
    entries_of_new = set(told) - {other.prefix for other in others[:known]}
    assert len(entries_of_new) <= len(answer.records), "an age without its record is of no use"


def test_a_digest_of_strangers_is_asked_for_in_parts_that_change() -> None:
    one = core(1)
    claim = Exchange(digest=ages(*((other, 1.0) for other in fakes(MAX_OTHERS))))
    first, second = (one.answer(STRANGER, claim, now=1.0) for _ in range(2))
    assert_fits(first)
    assert len(first.wanted) == MAX_WANTED
    assert first.wanted != second.wanted


def test_the_records_of_one_message_are_bounded() -> None:
    one = crowded()
    introduce(one, signed(2))
    call = next(call for call in a_round(one, now=1.0))
    wanted = tuple(fake.prefix for fake in fakes(MAX_OTHERS))
    (second,) = calls_in(one.answered(call, reply(wanted=wanted), now=1.5))
    assert 0 < sum(map(len, second.message.records)) <= RECORDS_BYTES
    assert_fits(second.message)


def test_what_does_not_fit_one_push_goes_with_the_next() -> None:
    one = core(1)
    new = [signed(number) for number in range(2, 240)]
    introduce(one, *new)
    said: set[bytes] = set()
    for step in range(1, 5):
        for call in calls_in(one.tick(now=step * RULES.push_delay_s)):
            assert_fits(call.message)
            said |= set(call.message.records)
    assert {one.sealed for one in new} <= said


# -- bootstraps and calls ------------------------------------------------------------------------------------


def test_while_nobody_is_known_a_bootstrap_is_greeted_with_a_growing_wait() -> None:
    one = core(1, public=False)
    greeted: list[float] = []
    now = 0.0
    while now < 3600.0:
        now = max(now, one.deadline())
        if Greet() in one.tick(now=now):
            greeted.append(now)
            one.greet_failed(now=now)
    waits = [b - a for a, b in pairwise(greeted)]
    assert greeted[0] == 0.0
    assert waits[0] < 3 * FIRST_GREET_S
    assert MAX_GREET_S * (1 - RULES.jitter) <= waits[-1] <= MAX_GREET_S * (1 + RULES.jitter)


def test_a_bootstrap_is_asked_for_the_others_at_the_address_where_it_answered() -> None:
    one = core(1, public=False)
    effects = one.introduced(signed(0), address(77), now=1.0)
    (call,) = calls_in(effects)
    assert (call.node, call.address) == (key(0).node_id, address(77))
    assert call.message.asks > 0
    assert Wake() in effects
    assert one.introduced(one.view.own, address(1), now=2.0) == [], "itself"


def test_whoever_does_not_answer_is_called_less_and_less_until_it_is_heard_of() -> None:
    one = core(1)
    introduce(one, signed(2))
    peer = peer_of(one, 2)

    waits: list[float] = []
    for _ in range(8):
        one.failed(call_to(2, now=10.0), now=10.0)
        waits.append(peer.retry_at - 10.0)
    assert waits[0] < 0, "one failure is a lost packet"
    assert waits[1:] == sorted(waits[1:])
    assert waits[-1] == waits[-2]
    heard: list[Callable[[], object]] = [
        lambda: one.answered(call_to(2, now=10.0), reply(), now=10.0),
        lambda: one.introduced(signed(2), address(2), now=10.0),
        lambda: told(one, by=2, now=10.0),
    ]
    for hear in heard:
        peer.failures, peer.retry_at = 4, 1e9
        hear()
        assert peer.failures == 0
        assert peer.retry_at < 0


def test_who_knows_one_other_alone_goes_on_calling_it() -> None:
    one = core(1)
    introduce(one, signed(2))
    effects = run_until(one, DEAD_S - 2 * RULES.round_s, now=0.0)
    rounds = [call for call in calls_in([effect for _, effect in effects]) if call.message.asks]
    assert len(rounds) >= RULES.dead_rounds / 2


def test_where_others_may_be_called_back_off_is_kept() -> None:
    one = core(1)
    introduce(one, *(signed(number) for number in range(2, 9)))
    silent = peer_of(one, 2)
    silent.retry_at = 1e9
    for now in range(50):
        assert silent not in one.view.some(RULES.fanout, Random(now), now=0.0)


def test_what_is_held_is_said_soon_and_only_when_it_changed() -> None:
    one = core(1)
    before = one.view.own.order
    one.set_held(v(3), now=0.0)
    run_until(one, RULES.reissue_rounds * RULES.round_s / 2, now=0.0)
    assert one.view.own.order == before + 1
    assert one.view.own.record.held == v(3)
    one.set_held(v(3), now=31.0)
    run_until(one, RULES.reissue_rounds * RULES.round_s * 0.79, now=31.0)
    assert one.view.own.order == before + 1


def test_a_record_is_issued_anew_before_it_is_void() -> None:
    assert RULES.reissue_rounds * (1 + RULES.jitter) < RULES.life_rounds / 2
    one = core(1)
    before = one.view.own.order
    run_until(one, LIFE_S, now=0.0)
    assert one.view.own.order >= before + 2


def test_a_refused_record_is_wanted_again_only_when_it_was_issued_anew() -> None:
    one = core(1)
    introduce(one, signed(2))
    for record in (signed(2, 3), signed(2, 3, addresses=[address(9)]), signed(2, 4)):
        told(one, record, now=1.0)
    assert one.answer(STRANGER, Exchange(digest=ages((signed(2, 4), 0.0))), now=1.0).wanted == ()
    assert one.answer(STRANGER, Exchange(digest=ages((signed(2, 5), 0.0))), now=1.0).wanted == (signed(2).prefix,)
