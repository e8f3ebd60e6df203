"""The weight map: bit for bit over many versions, refused where the base is missing, whole again after any cut."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from swarm.broadcast.store.store import HeldVersion, VersionStore
from swarm.broadcast.store.weight_map import WeightMap, open_weights
from swarm.broadcast.version.manifest import ChunkTable, encoded_spans, needs_base, regions_of, sign_head
from swarm.errors import ProtocolError
from swarm.wire import digest, encode
from tests.builders import KEY, MIXED_LAYOUT, OTHER_KEY, layout, v
from tests.publishers import Holder, Publisher, hand_over, receiver_store

REGIONS = regions_of(MIXED_LAYOUT)


@pytest.fixture(scope="module")
def publisher(tmp_path_factory: pytest.TempPathFactory) -> Publisher:
    """Version 0 in full, 1 and 2 as deltas, 3 in full, 4 as a delta; all are kept."""
    publisher = Publisher(tmp_path_factory.mktemp("learner"))
    for number in range(5):
        publisher.published.store.find(v(0))
        publisher.publish(number, full=number == 3)
    return publisher


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


class Here(Holder):
    """A receiver with a map on its disk, and the learner's versions."""

    def __init__(self, directory: Path, publisher: Publisher) -> None:
        super().__init__(directory, publisher)
        self.versions = publisher.published.store.versions()

    @property
    def first(self) -> HeldVersion:
        return self.handed(0)

    def handed(self, number: int) -> HeldVersion:
        """All of a version, not applied."""
        return hand_over(self.store, self.versions[number])


@pytest.fixture
def here(tmp_path: Path, publisher: Publisher) -> Here:
    return Here(tmp_path / "receiver", publisher)


@pytest.fixture
def started(here: Here) -> Here:
    """Its map is of version 0."""
    here.map.apply(here.first)
    return here


def content(copy: WeightMap) -> bytes:
    return copy.path.read_bytes()


def reopened(copy: WeightMap) -> WeightMap:
    copy.close()
    return WeightMap(copy.path.parent, MIXED_LAYOUT, KEY.public_bytes)


def spoil(copy: WeightMap, index: int) -> None:
    with copy.path.open("r+b") as file:
        os.pwrite(file.fileno(), b"spoilt", copy.regions[index].start + 10)


def test_versions_arrive_bit_for_bit_by_deltas_and_in_full(here: Here, pool: ThreadPoolExecutor) -> None:
    assert [needs_base(version.table) for version in here.versions] == [False, True, True, False, True]
    assert [version.head.base for version in here.versions] == [None, v(0), v(1), None, v(3)]
    assert here.versions[1].table.encoded_bytes < 0.02 * MIXED_LAYOUT.total_bytes
    for version in here.versions:
        here.map.apply(hand_over(here.store, version), pool)
        assert here.content() == here.publisher.history[version.head.version]
        assert here.map.version == here.map.last_whole == version.head.version
        assert here.map.lacking(version.table) == []


def test_a_map_on_the_disk_takes_no_memory_for_changes(started: Here, pool: ThreadPoolExecutor) -> None:
    held = started.handed(1)
    assert started.map.decode_ahead(held, range(len(REGIONS)), pool)
    assert started.map._ahead.nbytes == 0
    started.map.apply(held)
    assert started.map.changes_since(v(0)) is None
    assert set(started.map._changed.values()) == {None}
    assert started.map.log_from is None


def test_a_delta_against_another_version_is_refused_before_anything_is_touched(started: Here) -> None:
    held = started.handed(2)
    assert not started.map.can_become(held)
    with pytest.raises(ProtocolError, match=r"0.2 is a delta against 0.1, and \d+ regions of the map, which holds 0.0"):
        started.map.apply(held)
    assert started.map.version == v(0)
    assert started.content() == started.publisher.history[v(0)]


def test_an_older_version_is_refused(here: Here) -> None:
    here.map.apply(here.handed(3))
    assert here.content() == here.publisher.history[v(3)], "a full version needs no base"
    with pytest.raises(ProtocolError, match=r"older than 0\.3"):
        here.map.apply(here.handed(0))
    assert here.map.version == v(3)


def test_what_was_held_is_held_after_a_restart_and_the_same_again_changes_nothing(started: Here) -> None:
    again = reopened(started.map)
    assert (again.version, again.unfinished) == (v(0), None)
    state = again.path.stat().st_mtime_ns
    again.apply(started.first)
    assert again.path.stat().st_mtime_ns == state
    again.apply(started.handed(1))
    assert content(again) == started.publisher.history[v(1)]


def _wrong_region(version: HeldVersion, place: int) -> HeldVersion:
    """`version`, but the region at `place` is signed as something else."""
    wrong = msgspec.structs.replace(version.table.regions[place], decoded_digest=digest(b"something else"))
    regions = (*version.table.regions[:place], wrong, *version.table.regions[place + 1 :])
    table: ChunkTable = msgspec.structs.replace(version.table, regions=regions)
    data = encode(table)
    head = msgspec.structs.replace(version.head, table_digest=digest(data), table_bytes=len(data))
    return HeldVersion(
        head=head, sealed_head=sign_head(head, KEY), table=table, table_bytes=data, chunks=version.chunks
    )


@pytest.mark.parametrize("number", [1, 3], ids=["sparse", "whole"])
def test_a_region_that_does_not_decode_to_what_was_signed_is_never_written(
    started: Here, pool: ThreadPoolExecutor, number: int
) -> None:
    assert (started.versions[number].table.regions[5].codec == "sparse") == (number == 1)
    with pytest.raises(ProtocolError, match="does not decode"):
        started.map.apply(_wrong_region(started.versions[number], 5), pool)
    assert started.map.content(5) == started.region(v(0), 5)
    assert started.map.version is None
    started.map.apply(started.handed(number), pool)
    assert started.content() == started.publisher.history[v(number)]


def cut_apply(here: Here, held: HeldVersion, regions: int) -> int:
    """Apply so many regions, tear the next one, and end without a word. Return which one that is."""
    here.map.begin_fill(held)
    spans, lacking = encoded_spans(held.table), here.map.lacking(held.table)
    for index in lacking[:regions]:
        here.map._apply_beside(held, index, spans[index])
    spoil(here.map, torn := lacking[regions])
    here.map.close()
    return torn


@pytest.mark.parametrize("regions", [0, 1, 5])
def test_a_cut_apply_is_finished_at_the_next_start(started: Here, regions: int) -> None:
    cut_apply(started, started.handed(1), regions)
    again = open_weights(VersionStore(started.store.directory, KEY.public_bytes))
    assert (again.version, again.unfinished) == (v(1), None)
    assert content(again) == started.publisher.history[v(1)]


def test_a_torn_region_of_which_no_full_encoding_is_here_is_fetched_and_no_region_applied_twice(started: Here) -> None:
    held = started.handed(1)
    changed = len(started.map.lacking(held.table))
    damaged = cut_apply(started, held, regions=3)
    started.store.drop(v(0))
    again = open_weights(started.store)
    assert len(again.lacking(held.table)) == changed - 3
    assert again.version is None
    assert again.missing_base(held) == [damaged]
    with pytest.raises(ProtocolError, match="1 regions of the map"):
        again.apply(held)
    again.begin_fill(held)
    assert again.put_region(damaged, "raw", started.region(v(1), damaged))
    again.apply(held)
    assert content(again) == started.publisher.history[v(1)]


def test_a_region_that_rots_is_found_by_a_recheck_or_at_the_next_start_and_made_anew(started: Here) -> None:
    first = started.first
    assert started.map.recheck() == 0
    spoil(started.map, 3)
    assert started.map.recheck() == 1
    assert started.map.version is None
    assert started.map.can_become(first)
    started.map.apply(first)
    assert started.content() == started.publisher.history[v(0)]
    spoil(started.map, 3)
    again = reopened(started.map)
    assert (again.version, again.last_whole) == (None, v(0))
    assert again.lacking(first.table) == [3]
    assert open_weights(started.store).version == v(0)
    assert content(again) == started.publisher.history[v(0)]


def test_a_map_of_another_size_begins_anew(started: Here) -> None:
    os.truncate(started.map.path, 1000)
    again = reopened(started.map)
    assert again.version is None
    assert len(again.lacking(started.first.table)) == len(REGIONS)


def test_what_another_swarm_left_is_known_by_its_digests_alone(started: Here) -> None:
    started.map.close()
    other = WeightMap(started.map.path.parent, MIXED_LAYOUT, OTHER_KEY.public_bytes)
    assert (other.version, other.last_whole) == (None, None)
    assert other.lacking(started.first.table) == []


@pytest.mark.parametrize("content_", [b"", b"junk", b"\xc0" * 300])
def test_a_damaged_record_is_forgotten(started: Here, content_: bytes) -> None:
    (started.map.path.parent / "weights.current").write_bytes(content_)
    again = reopened(started.map)
    assert again.version is None
    assert again.lacking(started.first.table) == []
    again.apply(started.first)
    assert again.version == v(0)


def test_a_cut_fill_keeps_what_it_has(here: Here) -> None:
    target = here.versions[4]
    here.map.begin_fill(target)
    for index in (0, 7, 9):
        assert here.map.put_region(index, "raw", here.region(v(4), index))
    again = reopened(here.map)
    assert again.unfinished == v(4)
    assert set(range(len(REGIONS))) - set(again.lacking(target.table)) == {0, 7, 9}


def test_no_region_but_the_signed_one_is_put(here: Here) -> None:
    target, source = here.versions[4], here.publisher.published.weights
    here.map.begin_fill(target)
    good = source.encode_full(0, target.table.regions[0].decoded_digest)
    other = source.encode_full(1, target.table.regions[1].decoded_digest)
    assert good is not None
    assert other is not None
    before = here.content()
    for codec, encoded in (
        (good.codec, other.encoded),
        (good.codec, good.encoded[:-1]),
        (good.codec, bytes([good.encoded[9] ^ 1]) + good.encoded[1:]),
        ("raw", good.encoded),
        ("raw", b""),
        ("sparse", good.encoded),
    ):
        assert not here.map.put_region(0, codec, encoded)  # type: ignore[arg-type]
    assert here.content() == before
    assert here.map.put_region(0, good.codec, good.encoded)
    assert here.map.put_region(0, good.codec, b"again, and not even read")


def test_a_region_that_has_changed_meanwhile_is_not_given(started: Here) -> None:
    signed = started.first.table.regions[2].decoded_digest
    assert started.map.encode_full(2, signed) is not None
    assert started.map.encode_full(2, digest(b"another")) is None
    spoil(started.map, 2)
    assert started.map.encode_full(2, signed) is None


def test_regions_of_odd_tensors(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    shapes = layout(("w", "BF16", (700, 512)), ("nothing", "F32", (0,)), ("odd", "U8", (3,)), ("flag", "BOOL", ()))
    publisher = Publisher(tmp_path / "learner", shapes)
    store = receiver_store(tmp_path / "receiver", shapes)
    copy = open_weights(store)
    for version in publisher.publish_up_to(2):
        copy.apply(hand_over(store, version), pool)
        assert content(copy) == publisher.history[version.head.version]


def test_a_pool_that_is_shut_down_in_the_middle_ends_an_apply(here: Here) -> None:
    """A node that stops while a version is applied; the map is finished at its next start."""
    pool = ThreadPoolExecutor(1)
    held = here.handed(0)

    def shut_down() -> None:
        time.sleep(0.05)
        pool.shutdown(wait=False, cancel_futures=True)

    pool.submit(shut_down)
    with pytest.raises(CancelledError):
        here.map.apply(held, pool)
    again = open_weights(here.store)
    again.apply(held)
    assert again.version == here.versions[0].head.version
