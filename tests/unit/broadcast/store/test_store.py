"""Versions on disk: kept, pruned, found again after a restart, and swept away when they are damaged or foreign. Their
chunks: nothing but what was signed is held, and nothing is fetched twice."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from swarm.broadcast.store import disk
from swarm.broadcast.store import store as store_module
from swarm.broadcast.store.disk import DiskFull
from swarm.broadcast.store.store import (
    IN_USE_S,
    KEEP_VERSIONS,
    MAX_VERSIONS,
    ChunkFile,
    HeldVersion,
    SignedVersion,
    VersionStore,
)
from swarm.broadcast.version.manifest import ByteSpan, ChunkTable, sign_head
from swarm.errors import ProtocolError
from swarm.wire import Digest, digest, encode
from tests.builders import KEY, MIXED_LAYOUT, OTHER_KEY, layout, publish, v, weights_of
from tests.publishers import Publisher, hand_over, receiver_store

SMALL = layout(("w", "BF16", (100,)), ("nothing", "F32", (0,)), ("odd", "U8", (3,)), ("flag", "BOOL", ()))


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path / "learner", SMALL, changed_words=3)


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    """A receiver's."""
    return receiver_store(tmp_path / "receiver", SMALL)


def reopened(store: VersionStore) -> VersionStore:
    return VersionStore(store.directory, KEY.public_bytes)


def numbers(store: VersionStore) -> list[int]:
    return [held.head.version.version for held in store.versions()]


def names(store: VersionStore) -> set[str]:
    return {path.name for path in store.directory.iterdir()}


def test_the_last_four_versions_are_kept_and_one_that_is_being_fetched_stays_for_a_while(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(store_module, "time", SimpleNamespace(monotonic=lambda: now))
    publisher.publish(0)
    store = publisher.published.store
    assert store.find(v(0)) is not None
    for number in range(1, KEEP_VERSIONS + 3):
        publisher.publish(number)
    assert numbers(store) == [0, 3, 4, 5, 6]
    now += IN_USE_S + 1
    store.prune()
    assert numbers(store) == [3, 4, 5, 6]
    assert {name for name in names(store) if name.startswith("0.")} == {
        f"0.{number}.{ending}" for number in (3, 4, 5, 6) for ending in ("head", "table", "chunks")
    }


def test_not_any_number_of_versions_is_in_use(publisher: Publisher) -> None:
    for number in range(MAX_VERSIONS + 5):
        publisher.publish(number)
        publisher.published.store.find(v(number))
    assert numbers(publisher.published.store) == list(range(5, MAX_VERSIONS + 5))


def test_a_pruned_version_can_be_read_to_its_end(publisher: Publisher) -> None:
    first = publisher.publish(0)
    sending = first.chunks.chunk(0)
    content = bytes(sending)
    for number in range(1, KEEP_VERSIONS + 1):
        publisher.publish(number)
    assert publisher.published.store.find(v(0)) is None
    assert sending == content
    assert first.chunks.chunk(0) == content


def test_objects_are_found_by_their_digests(publisher: Publisher) -> None:
    done = publisher.publish_up_to(KEEP_VERSIONS)
    store = publisher.published.store
    assert store.object(Digest(done[4].head.layout_digest)) == encode(SMALL)
    assert store.object(Digest(done[4].head.table_digest)) == done[4].table_bytes
    assert store.object(Digest(done[0].head.table_digest)) is None
    assert store.object(digest(b"unknown")) is None


def test_a_receiver_finds_everything_again(publisher: Publisher, store: VersionStore) -> None:
    done = publisher.publish_up_to(2)
    for version in done[:2]:
        hand_over(store, version)
    store.begin(done[2])
    again = reopened(store)
    assert (again.layout, again.layout_digest) == (SMALL, done[0].head.layout_digest)
    complete = [(held.head, held.chunks.complete) for held in again.versions()]
    assert complete == [(done[0].head, True), (done[1].head, True), (done[2].head, False)]
    newest = again.newest()
    assert newest is not None
    assert newest.sealed_head == done[2].sealed_head


def test_a_version_is_begun_once_and_another_of_its_name_is_refused(publisher: Publisher, store: VersionStore) -> None:
    version = publisher.publish(0)
    assert store.begin(version) is store.begin(version)
    table = msgspec.structs.replace(version.table, tensor_sums=(1, 2, 3, 4))
    table_bytes = encode(table)
    head = msgspec.structs.replace(version.head, table_digest=digest(table_bytes), table_bytes=len(table_bytes))
    with pytest.raises(ProtocolError, match="signed two different versions"):
        store.begin(SignedVersion(head=head, sealed_head=sign_head(head, KEY), table=table, table_bytes=table_bytes))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [Path.unlink, _truncate, _flip])
@pytest.mark.parametrize("ending", ["head", "table"])
def test_a_damaged_version_is_swept_away(
    publisher: Publisher, store: VersionStore, damage: Callable[[Path], None], ending: str
) -> None:
    for version in publisher.publish_up_to(1):
        hand_over(store, version)
    damage(store.directory / f"0.1.{ending}")
    again = reopened(store)
    assert numbers(again) == [0]
    assert names(again) == {"layout", "0.0.head", "0.0.table", "0.0.chunks"}


def test_versions_with_a_damaged_layout_or_of_another_swarm_go(publisher: Publisher, store: VersionStore) -> None:
    hand_over(store, publisher.publish(0))
    _flip(store.directory / "layout")
    assert reopened(store).versions() == []
    assert VersionStore(publisher.published.store.directory, OTHER_KEY.public_bytes).versions() == []


def test_what_a_killed_process_left_half_written_is_swept_away(publisher: Publisher) -> None:
    publisher.publish(0)
    directory = publisher.published.store.directory
    for name in ("0.1.chunks.partial", "0.1.chunks", "0.1.table", "0.1.head.partial", "layout.partial"):
        (directory / name).write_bytes(b"half")
    again = reopened(publisher.published.store)
    assert numbers(again) == [0]
    assert {name for name in names(again) if "0.1" in name or "partial" in name} == set()


def test_another_layout_removes_versions_and_map(publisher: Publisher) -> None:
    publisher.publish(0)
    store = publisher.published.store
    assert "weights.bin" in names(store)
    store.set_layout(encode(SMALL), SMALL)
    assert numbers(store) == [0], "it is the same"
    store.set_layout(encode(MIXED_LAYOUT), MIXED_LAYOUT)
    assert names(store) == {"layout"}
    assert store.versions() == []
    assert reopened(store).layout == MIXED_LAYOUT


def test_a_version_that_does_not_fit_leaves_nothing_behind(
    publisher: Publisher, store: VersionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = publisher.publish(0)
    monkeypatch.setattr(disk, "SPARE_BYTES", 1 << 60)
    with pytest.raises(DiskFull, match=r"has no room for 0.0.chunks: free \d+ MB there"):
        store.begin(version)
    assert names(store) == {"layout"}
    assert store.find(v(0)) is None


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> HeldVersion:
    return publish(tmp_path_factory.mktemp("learner"), MIXED_LAYOUT, weights_of(MIXED_LAYOUT, 0))


def test_chunks_arrive_in_any_order_and_are_counted_once(version: HeldVersion, tmp_path: Path) -> None:
    chunks = ChunkFile(tmp_path / "v.chunks", version.table)
    count = len(chunks.spans)
    assert count > 2
    for done, index in enumerate(reversed(range(count)), start=1):
        assert not chunks.complete
        assert not chunks.has(index)
        for _ in range(2):
            assert chunks.put(index, version.chunks.chunk(index))
            assert chunks.missing == count - done
        assert chunks.has(index)
        assert chunks.have(chunks.segments[0])[index // 8] >> index % 8 & 1
    assert chunks.complete
    assert chunks.chunk(0).readonly
    whole = ByteSpan(start=0, nbytes=version.table.encoded_bytes)
    assert chunks.encoded(whole) == version.chunks.encoded(whole)
    assert (tmp_path / "v.chunks").read_bytes() == version.chunks.path.read_bytes()


def test_no_chunk_but_the_signed_one_is_accepted(version: HeldVersion, tmp_path: Path) -> None:
    chunks = ChunkFile(tmp_path / "v.chunks", version.table)
    good = bytes(version.chunks.chunk(0))
    flipped = bytes([good[0] ^ 1]) + good[1:]
    for other in (flipped, good[:-1], good + b"\0", bytes(version.chunks.chunk(1)), b""):
        assert not chunks.put(0, other)
    assert chunks.missing == len(chunks.spans)
    assert set(chunks.have(chunks.segments[0])) == {0}
    assert chunks.put(0, good)


def test_what_is_there_after_a_restart_is_not_fetched_again(version: HeldVersion, tmp_path: Path) -> None:
    path = tmp_path / "v.chunks"
    before = ChunkFile(path, version.table)
    for index in (0, 2):
        before.put(index, version.chunks.chunk(index))
    before.close()
    with path.open("r+b") as file:  # as a power cut in the midst of a write leaves it
        os.pwrite(file.fileno(), version.chunks.chunk(1)[:100], before.spans[1].start)
    after = ChunkFile(path, version.table)
    assert [i for i in range(len(after.spans)) if after.has(i)] == [0, 2]
    assert after.missing == len(after.spans) - 2


@pytest.mark.parametrize("length", [0, 1000, 10_000_000])
def test_a_file_of_another_size_is_mended(version: HeldVersion, tmp_path: Path, length: int) -> None:
    path = tmp_path / "v.chunks"
    path.write_bytes(version.chunks.path.read_bytes())
    os.truncate(path, length)
    chunks = ChunkFile(path, version.table)
    assert chunks.complete == (length > version.table.encoded_bytes)
    assert path.stat().st_size == version.table.encoded_bytes


def test_chunks_that_rot_are_forgotten(version: HeldVersion, tmp_path: Path) -> None:
    chunks = ChunkFile(tmp_path / "v.chunks", version.table)
    for index in range(len(chunks.spans)):
        chunks.put(index, version.chunks.chunk(index))
    assert chunks.recheck() == 0
    with (tmp_path / "v.chunks").open("r+b") as file:
        os.pwrite(file.fileno(), b"rot", chunks.spans[1].start + 5)
    assert chunks.recheck() == 1
    assert not chunks.has(1)
    assert chunks.missing == 1


def test_a_version_without_any_bytes_is_complete_at_once(version: HeldVersion, tmp_path: Path) -> None:
    regions = tuple(msgspec.structs.replace(entry, encoded_bytes=0) for entry in version.table.regions)
    table: ChunkTable = msgspec.structs.replace(version.table, regions=regions, chunk_digests=())
    assert ChunkFile(tmp_path / "v.chunks", table).complete
