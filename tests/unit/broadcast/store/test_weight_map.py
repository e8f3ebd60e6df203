"""The weight map: bit for bit over many versions, refused where the base is missing, whole again after any cut."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from swarm.broadcast.store import disk
from swarm.broadcast.store import weight_map as weights_module
from swarm.broadcast.store.disk import DiskFull
from swarm.broadcast.store.store import HeldVersion, VersionStore
from swarm.broadcast.store.weight_map import REGIONS_IN_HAND, WeightMap, open_weights
from swarm.broadcast.version.manifest import ChunkTable, needs_base, regions_of, sign_head
from swarm.errors import ProtocolError
from swarm.wire import digest, encode
from tests.builders import KEY, MIXED_LAYOUT, OTHER_KEY, layout, v
from tests.publishers import Publisher, hand_over, receiver_store

REGIONS = regions_of(MIXED_LAYOUT)


@pytest.fixture(scope="module")
def publisher(tmp_path_factory: pytest.TempPathFactory) -> Publisher:
    """Version 0 in full, 1 and 2 as deltas, 3 in full, 4 as a delta; all are kept."""
    publisher = Publisher(tmp_path_factory.mktemp("learner"))
    for number in range(5):
        publisher.published.store.find(v(0))
        publisher.publish(number, full=number == 3)
    return publisher


@pytest.fixture(scope="module")
def versions(publisher: Publisher) -> list[HeldVersion]:
    return publisher.published.store.versions()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return receiver_store(tmp_path / "receiver")


@pytest.fixture
def copy(store: VersionStore) -> WeightMap:
    return open_weights(store)


@pytest.fixture
def first(versions: list[HeldVersion], store: VersionStore, copy: WeightMap) -> HeldVersion:
    """Version 0, which the map has become."""
    held = hand_over(store, versions[0])
    copy.apply(held)
    return held


def content(copy: WeightMap) -> bytes:
    return copy.path.read_bytes()


def reopened(copy: WeightMap) -> WeightMap:
    copy.close()
    return WeightMap(copy.path.parent, MIXED_LAYOUT, KEY.public_bytes)


def spoil(copy: WeightMap, index: int) -> None:
    with copy.path.open("r+b") as file:
        os.pwrite(file.fileno(), b"spoilt", copy.regions[index].start + 10)


def within(weights: bytes, index: int) -> bytes:
    """A region of them."""
    return weights[REGIONS[index].start :][: REGIONS[index].nbytes]


def test_versions_arrive_bit_for_bit_by_deltas_and_in_full(
    publisher: Publisher, versions: list[HeldVersion], store: VersionStore, copy: WeightMap, pool: ThreadPoolExecutor
) -> None:
    assert [needs_base(version.table) for version in versions] == [False, True, True, False, True]
    assert [version.head.base for version in versions] == [None, v(0), v(1), None, v(3)]
    assert versions[1].table.encoded_bytes < 0.02 * MIXED_LAYOUT.total_bytes
    for version in versions:
        copy.apply(hand_over(store, version), pool)
        assert content(copy) == publisher.history[version.head.version]
        assert copy.version == copy.last_whole == version.head.version
        assert copy.lacking(version.table) == []


def test_a_delta_against_another_version_is_refused_before_anything_is_touched(
    publisher: Publisher, versions: list[HeldVersion], store: VersionStore, copy: WeightMap, first: HeldVersion
) -> None:
    held = hand_over(store, versions[2])
    assert not copy.can_become(held)
    with pytest.raises(ProtocolError, match=r"0.2 is a delta against 0.1, and \d+ regions of the map, which holds 0.0"):
        copy.apply(held)
    assert copy.version == v(0)
    assert content(copy) == publisher.history[v(0)]


def test_an_older_version_is_refused(
    publisher: Publisher, versions: list[HeldVersion], store: VersionStore, copy: WeightMap
) -> None:
    copy.apply(hand_over(store, versions[3]))
    assert content(copy) == publisher.history[v(3)], "a full version needs no base"
    with pytest.raises(ProtocolError, match=r"older than 0\.3"):
        copy.apply(hand_over(store, versions[0]))
    assert copy.version == v(3)


def test_the_same_version_again_changes_nothing(copy: WeightMap, first: HeldVersion) -> None:
    state = copy.path.stat().st_mtime_ns
    copy.apply(first)
    assert copy.path.stat().st_mtime_ns == state


def test_what_was_held_is_held_after_a_restart(
    publisher: Publisher, versions: list[HeldVersion], store: VersionStore, copy: WeightMap, first: HeldVersion
) -> None:
    again = reopened(copy)
    assert (again.version, again.unfinished) == (v(0), None)
    again.apply(hand_over(store, versions[1]))
    assert content(again) == publisher.history[v(1)]


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


def test_a_region_that_does_not_decode_to_what_was_signed_is_never_written(
    publisher: Publisher,
    versions: list[HeldVersion],
    store: VersionStore,
    copy: WeightMap,
    first: HeldVersion,
    pool: ThreadPoolExecutor,
) -> None:
    with pytest.raises(ProtocolError, match="does not decode"):
        copy.apply(_wrong_region(versions[1], 5), pool)
    assert within(content(copy), 5) == within(publisher.history[v(0)], 5)
    assert copy.version is None
    copy.apply(hand_over(store, versions[1]), pool)
    assert content(copy) == publisher.history[v(1)]


# -- cut off -------------------------------------------------------------------------------------------------


class Cut(Exception):
    """In place of a SIGKILL, where nothing that runs after it may matter."""


def cut_apply(
    copy: WeightMap, held: HeldVersion, monkeypatch: pytest.MonkeyPatch, *, after: int, part: int = 0
) -> None:
    """Apply until `after` writes are done and `part` bytes of the next one."""
    writes = 0
    write = disk.write_at

    def cutting(descriptor: int, data: bytes, start: int, path: Path) -> None:
        nonlocal writes
        if writes == after:
            os.pwrite(descriptor, memoryview(data)[:part], start)
            raise Cut
        writes += 1
        write(descriptor, data, start, path)

    monkeypatch.setattr(weights_module, "write_at", cutting)
    with pytest.raises(Cut):
        copy.apply(held)
    monkeypatch.setattr(weights_module, "write_at", write)


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 8, 40])
@pytest.mark.parametrize("part", [0, 3, 5000])
def test_a_cut_apply_is_finished_at_the_next_start(
    publisher: Publisher,
    versions: list[HeldVersion],
    store: VersionStore,
    copy: WeightMap,
    first: HeldVersion,
    monkeypatch: pytest.MonkeyPatch,
    after: int,
    part: int,
) -> None:
    cut_apply(copy, hand_over(store, versions[1]), monkeypatch, after=after, part=part)
    assert copy.unfinished == v(1)
    copy.close()
    again = open_weights(VersionStore(store.directory, KEY.public_bytes))
    assert (again.version, again.unfinished) == (v(1), None)
    assert content(again) == publisher.history[v(1)]


def test_no_region_is_applied_twice(
    versions: list[HeldVersion],
    store: VersionStore,
    copy: WeightMap,
    first: HeldVersion,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = hand_over(store, versions[1])
    changed = len(copy.lacking(held.table))
    cut_apply(copy, held, monkeypatch, after=3 * 4 + 2, part=7)
    again = reopened(copy)
    # Four were done, the fifth was in the redo file.
    assert len(again.lacking(held.table)) == changed - 5
    assert again.version is None


def test_a_torn_region_without_its_redo_counts_as_damaged(
    publisher: Publisher,
    versions: list[HeldVersion],
    store: VersionStore,
    copy: WeightMap,
    first: HeldVersion,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = hand_over(store, versions[1])
    cut_apply(copy, held, monkeypatch, after=2, part=1000)
    (copy.path.parent / "weights.redo").unlink()
    again = reopened(copy)
    (damaged,) = again.missing_base(held)
    with pytest.raises(ProtocolError, match="1 regions of the map"):
        again.apply(held)
    again.begin_fill(held)
    assert again.put_region(damaged, "raw", within(publisher.history[v(1)], damaged))
    again.apply(held)
    assert content(again) == publisher.history[v(1)]


def test_a_region_that_rots_is_seen_at_the_next_start(
    publisher: Publisher, store: VersionStore, copy: WeightMap, first: HeldVersion
) -> None:
    spoil(copy, 3)
    again = reopened(copy)
    assert (again.version, again.last_whole) == (None, v(0))
    assert again.lacking(first.table) == [3]
    assert open_weights(store).version == v(0)
    assert content(again) == publisher.history[v(0)]


def test_a_region_that_rots_is_found_by_a_recheck_and_made_anew(
    publisher: Publisher, copy: WeightMap, first: HeldVersion
) -> None:
    assert copy.recheck() == 0
    spoil(copy, 3)
    assert copy.recheck() == 1
    assert copy.version is None
    assert copy.can_become(first)
    copy.apply(first)
    assert content(copy) == publisher.history[v(0)]


def test_a_map_of_another_size_begins_anew(copy: WeightMap, first: HeldVersion) -> None:
    os.truncate(copy.path, 1000)
    again = reopened(copy)
    assert again.version is None
    assert len(again.lacking(first.table)) == len(REGIONS)


def test_what_another_swarm_left_is_known_by_its_digests_alone(copy: WeightMap, first: HeldVersion) -> None:
    copy.close()
    other = WeightMap(copy.path.parent, MIXED_LAYOUT, OTHER_KEY.public_bytes)
    assert (other.version, other.last_whole) == (None, None)
    assert other.lacking(first.table) == []


@pytest.mark.parametrize("content_", [b"", b"junk", b"\xc0" * 300])
def test_a_damaged_record_is_forgotten(copy: WeightMap, first: HeldVersion, content_: bytes) -> None:
    (copy.path.parent / "weights.current").write_bytes(content_)
    again = reopened(copy)
    assert again.version is None
    assert again.lacking(first.table) == []
    again.apply(first)
    assert again.version == v(0)


def test_a_full_disk_is_said_before_anything_is_touched(
    publisher: Publisher,
    versions: list[HeldVersion],
    store: VersionStore,
    copy: WeightMap,
    first: HeldVersion,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = hand_over(store, versions[1])
    (copy.path.parent / "weights.redo").unlink()
    with monkeypatch.context() as full:
        full.setattr(disk, "SPARE_BYTES", 1 << 60)
        with pytest.raises(DiskFull, match=r"weights.redo: free \d+ MB"):
            copy.apply(held)
    assert content(copy) == publisher.history[v(0)]
    copy.apply(held)
    assert content(copy) == publisher.history[v(1)]


# -- full regions --------------------------------------------------------------------------------------------


def test_a_map_is_filled_with_regions_that_another_encodes(
    publisher: Publisher, versions: list[HeldVersion], copy: WeightMap
) -> None:
    target, source = versions[4], publisher.published.weights
    copy.begin_fill(target)
    for index in copy.lacking(target.table):
        region = source.encode_full(index, target.table.regions[index].decoded_digest)
        assert region is not None
        assert copy.version is None
        assert copy.put_region(index, region.codec, region.encoded)
    copy.finish()
    assert copy.version == v(4)
    assert content(copy) == publisher.history[v(4)]


def test_a_cut_fill_keeps_what_it_has(publisher: Publisher, versions: list[HeldVersion], copy: WeightMap) -> None:
    target = versions[4]
    copy.begin_fill(target)
    for index in (0, 7, 9):
        assert copy.put_region(index, "raw", within(publisher.history[v(4)], index))
    again = reopened(copy)
    assert again.unfinished == v(4)
    assert set(range(len(REGIONS))) - set(again.lacking(target.table)) == {0, 7, 9}


def test_no_region_but_the_signed_one_is_put(
    publisher: Publisher, versions: list[HeldVersion], copy: WeightMap
) -> None:
    target, source = versions[4], publisher.published.weights
    copy.begin_fill(target)
    good = source.encode_full(0, target.table.regions[0].decoded_digest)
    other = source.encode_full(1, target.table.regions[1].decoded_digest)
    assert good is not None
    assert other is not None
    before = content(copy)
    for codec, encoded in (
        (good.codec, other.encoded),
        (good.codec, good.encoded[:-1]),
        (good.codec, bytes([good.encoded[9] ^ 1]) + good.encoded[1:]),
        ("raw", good.encoded),
        ("raw", b""),
        ("sparse", good.encoded),
    ):
        assert not copy.put_region(0, codec, encoded)  # type: ignore[arg-type]
    assert content(copy) == before
    assert copy.put_region(0, good.codec, good.encoded)
    assert copy.put_region(0, good.codec, b"again, and not even read")


def test_a_region_that_has_changed_meanwhile_is_not_given(copy: WeightMap, first: HeldVersion) -> None:
    signed = first.table.regions[2].decoded_digest
    assert copy.encode_full(2, signed) is not None
    assert copy.encode_full(2, digest(b"another")) is None
    spoil(copy, 2)
    assert copy.encode_full(2, signed) is None


# -- shapes --------------------------------------------------------------------------------------------------


def test_more_regions_than_are_in_hand_and_odd_ones(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    shapes = layout(("w", "BF16", (700, 512)), ("nothing", "F32", (0,)), ("odd", "U8", (3,)), ("flag", "BOOL", ()))
    assert len(regions_of(shapes)) > REGIONS_IN_HAND
    publisher = Publisher(tmp_path / "learner", shapes)
    store = receiver_store(tmp_path / "receiver", shapes)
    copy = open_weights(store)
    for version in publisher.publish_up_to(2):
        copy.apply(hand_over(store, version), pool)
        assert content(copy) == publisher.history[version.head.version]


def test_a_pool_that_is_shut_down_in_the_middle_ends_an_apply(
    versions: list[HeldVersion], store: VersionStore, copy: WeightMap
) -> None:
    """A node that stops while a version is applied; the map is finished at its next start."""
    pool = ThreadPoolExecutor(1)
    held = hand_over(store, versions[0])

    def shut_down() -> None:
        time.sleep(0.05)
        pool.shutdown(wait=False, cancel_futures=True)

    pool.submit(shut_down)
    with pytest.raises(CancelledError):
        copy.apply(held, pool)
    again = open_weights(store)
    again.apply(held)
    assert again.version == versions[0].head.version
