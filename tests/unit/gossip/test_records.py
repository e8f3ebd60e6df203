"""Records: their order, who may sign what, and how a node goes past what others hold of it."""

from __future__ import annotations

import msgspec
import pytest

from swarm.errors import ProtocolError, TooLarge
from swarm.gossip.records import (
    MAX_ADDRESSES,
    MAX_SEQUENCE,
    RECORD_BYTES,
    RECORD_CONTEXT,
    GenerationRaised,
    Owner,
    Record,
    SignedRecord,
    open_record,
)
from swarm.net.signing import Sealed, swarm_id_of
from swarm.types import Address, VersionId
from swarm.wire import decode, encode
from tests.swarmers import LEARNER, THE_SWARM, address, key, signed

BIG = 2**53


def owner(generation: int = 3) -> Owner:
    return Owner(key(1), THE_SWARM, "relay", generation=generation, addresses=())


def place(one: SignedRecord) -> tuple[int, int]:
    return one.record.generation, one.record.sequence


def test_the_longest_ordinary_record_fits_and_opens_as_what_was_signed() -> None:
    names = [Address(host=f"{'n' * 120}{i}.example", port=65_535, fingerprint=bytes(32)) for i in range(MAX_ADDRESSES)]
    held = VersionId(incarnation=BIG, version=BIG)
    one = signed(1, MAX_SEQUENCE, generation=MAX_SEQUENCE, addresses=names, held=held, leaves=65_535)
    assert open_record(one.sealed, THE_SWARM) == one


def test_a_record_over_the_cap_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(TooLarge):
        open_record(signed(1).sealed + bytes(RECORD_BYTES), THE_SWARM)


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (signed(1, swarm=swarm_id_of(key(9).public_bytes)), "another swarm"),
        (signed(1, role="learner"), "learner"),
        (signed(0, role="relay"), "learner"),
        (signed(1, addresses=()), "address"),
        (signed(1, addresses=[address(n) for n in range(MAX_ADDRESSES + 1)]), "Record"),
        (signed(1, addresses=[Address(host="a b", port=1)]), "Record"),
        (signed(1, addresses=[Address(host="1.2.3.4", port=0)]), "Record"),
    ],
    ids=["foreign swarm", "a false learner", "a learner in disguise", "nowhere", "too many", "no host", "no port"],
)
def test_a_record_that_its_owner_may_not_sign_is_refused(one: SignedRecord, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        open_record(one.sealed, THE_SWARM)


@pytest.mark.parametrize(
    "sealed",
    [key(2).seal(RECORD_CONTEXT, signed(1).body), key(1).seal("head", signed(1).body)],
    ids=["another key", "another context"],
)
def test_a_record_that_something_else_signed_is_refused(sealed: bytes) -> None:
    with pytest.raises(ProtocolError, match="signature"):
        open_record(sealed, THE_SWARM)


def test_a_re_issue_rises_and_says_what_is_true_now() -> None:
    one = owner()
    assert place(one.signed) == (3, 0)
    one.leaves = 5
    assert one.issue() == []
    assert place(one.signed) == (3, 1)
    assert one.signed.record.leaves == 5


def test_a_record_of_this_generation_that_it_never_issued_is_of_a_former_life_too() -> None:
    one = owner()
    assert one.refute(signed(1, 40, generation=3)) == [GenerationRaised(generation=4)]
    assert place(one.signed) == (4, 1)


def test_the_learner_needs_no_proof_and_everybody_else_begins_as_a_leaf() -> None:
    learner = Owner(LEARNER, THE_SWARM, "learner", generation=1, addresses=(address(0),))
    assert learner.signed.record.reachability == "public"
    assert owner().signed.record.reachability == "leaf"


def test_a_record_may_grow_by_a_field() -> None:
    """Other bytes around the same fields decode to the same record: a later protocol adds fields at the end."""
    body = encode([*msgspec.msgpack.decode(signed(1).body), "a field of the future"])
    assert decode(body, Record, cap_bytes=RECORD_BYTES) == signed(1).record
    sealed = encode(Sealed(body=body, signature=key(1).sign(RECORD_CONTEXT, body)))
    assert open_record(sealed, THE_SWARM).record == signed(1).record
