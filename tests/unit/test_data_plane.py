"""What a receiver keeps of what others send it, whom it is linked with, and what the learner tells it."""

from __future__ import annotations

from swarm.broadcast.manifest import TABLE_BYTES
from swarm.broadcast.tables import EARLY_BYTES, PART_BYTES, EarlyParts, parts_of
from swarm.broadcast.transfers import CAPS, TABLE
from swarm.types import NodeId
from tests.builders import ALICE, BOB, v


def test_a_part_of_the_largest_table_fits_into_its_frame() -> None:
    assert max(span.nbytes for span in parts_of(TABLE_BYTES)) == PART_BYTES == CAPS[TABLE]


def test_a_part_that_overtook_its_head_is_handed_out_once() -> None:
    early = EarlyParts()
    early.put(v(2), 1, b"b", BOB)
    early.put(v(1), 0, b"old", ALICE)
    early.put(v(3), 0, b"new", ALICE)
    assert early.take(v(2)) == [(1, b"b", BOB)]
    assert early.take(v(2)) == early.take(v(1)) == []
    assert early.take(v(3)) == [(0, b"new", ALICE)]


def test_a_flood_of_invented_parts_drives_out_itself_alone() -> None:
    early = EarlyParts()
    mine, yours = bytes(PART_BYTES), bytes(1)
    for index in range(4):
        early.put(v(7), index, yours, BOB)
    for number in range(3 * EARLY_BYTES // PART_BYTES):
        early.put(v(2**40 + number), 0, mine, ALICE)
        assert sum(early._nbytes.values()) <= EARLY_BYTES
    assert [index for index, _, _ in early.take(v(7))] == [0, 1, 2, 3]


def test_empty_parts_are_bounded_too() -> None:
    early = EarlyParts()
    for number in range(20_000):
        early.put(v(number), 0, b"", NodeId(f"node{number % 3}"))
    assert sum(map(len, early._sent.values())) <= EARLY_BYTES // 1024
