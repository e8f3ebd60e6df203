"""Publishing, fetching chunk by chunk, and applying: bit for bit, and nothing that was not signed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from swarm.broadcast.codec import tensor_sum
from swarm.broadcast.manifest import ChunkTable, chunk_spans, open_head, open_layout, open_table, regions_of
from swarm.broadcast.store import KEEP_VERSIONS, MOST_VERSIONS, Published, PublishedVersions, WeightMap, read_chunk
from swarm.errors import ProtocolError
from swarm.types import VersionId
from swarm.wire import Digest, digest, encode
from tests.builders import KEY, MIXED_LAYOUT, layout, publish, v, weights_of

WEIGHTS = weights_of(MIXED_LAYOUT, 0)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return publish(tmp_path_factory.mktemp("learner"), MIXED_LAYOUT, WEIGHTS)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def copy(tmp_path: Path) -> WeightMap:
    return WeightMap(tmp_path / "sampler", MIXED_LAYOUT)


def chunks_of(version: Published) -> list[bytes]:
    found = [read_chunk(version, index) for index in range(len(chunk_spans(version.table)))]
    return [chunk for chunk in found if chunk is not None]


def fetch(copy: WeightMap, table: ChunkTable, chunks: list[bytes]) -> None:
    copy.start(table)
    for index in reversed(range(len(chunks))):
        copy.store(table, index, chunks[index])


def test_a_version_arrives_bit_for_bit(published: Published, copy: WeightMap, pool: ThreadPoolExecutor) -> None:
    chunks = chunks_of(published)
    assert len(WEIGHTS) > 1 << 20
    assert len(chunks) > 2
    fetch(copy, published.table, chunks)
    copy.apply(published.head, published.table, pool)
    assert copy.path.read_bytes() == WEIGHTS
    assert copy.version == v(0)


def test_what_is_served_opens_with_the_learners_key_alone(published: Published) -> None:
    head = open_head(published.sealed_head, KEY.public_bytes)
    assert head == published.head
    found = open_layout(encode(MIXED_LAYOUT), head)
    assert open_table(published.table_bytes, head, found) == published.table


def test_a_newer_version_overwrites_the_older_one(
    published: Published, copy: WeightMap, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    newer = publish(tmp_path / "newer", MIXED_LAYOUT, weights_of(MIXED_LAYOUT, 1), version=1)
    for version in (published, newer):
        fetch(copy, version.table, chunks_of(version))
        copy.apply(version.head, version.table, pool)
    assert copy.path.read_bytes() == weights_of(MIXED_LAYOUT, 1)
    assert copy.version == v(1)


def test_tensor_sums_are_those_of_the_weights(published: Published) -> None:
    at = 0
    for tensor, expected in zip(MIXED_LAYOUT.tensors, published.table.tensor_sums, strict=True):
        assert tensor_sum(WEIGHTS[at : at + tensor.nbytes]) == expected, tensor.name
        at += tensor.nbytes


def test_no_chunk_but_the_signed_one_is_kept(published: Published, copy: WeightMap, tmp_path: Path) -> None:
    table, chunks = published.table, chunks_of(published)
    copy.start(table)
    incoming = tmp_path / "sampler" / "incoming.chunks"
    untouched = incoming.read_bytes()
    flipped = bytes([chunks[0][0] ^ 1]) + chunks[0][1:]
    for other in (flipped, chunks[0][:-1], chunks[0] + b"\0", chunks[1], b""):
        with pytest.raises(ProtocolError, match="chunk 0 is not the one"):
            copy.store(table, 0, other)
    assert incoming.read_bytes() == untouched
    assert copy.path.read_bytes() == bytes(len(WEIGHTS))


def _with_wrong_region(table: ChunkTable, place: int) -> ChunkTable:
    """`table`, but the region at `place` is signed as something else."""
    wrong = msgspec.structs.replace(table.regions[place], decoded_digest=digest(b"something else"))
    regions = (*table.regions[:place], wrong, *table.regions[place + 1 :])
    return msgspec.structs.replace(table, regions=regions)


def test_a_region_that_does_not_decode_to_what_was_signed_is_never_written(
    published: Published, copy: WeightMap, pool: ThreadPoolExecutor
) -> None:
    table = _with_wrong_region(published.table, 5)
    fetch(copy, table, chunks_of(published))
    with pytest.raises(ProtocolError, match="does not decode"):
        copy.apply(published.head, table, pool)
    span = regions_of(MIXED_LAYOUT)[5]
    assert copy.path.read_bytes()[span.start : span.start + span.nbytes] == bytes(span.nbytes)
    assert copy.version is None


def test_chunks_that_never_came_are_not_applied(
    published: Published, copy: WeightMap, pool: ThreadPoolExecutor
) -> None:
    copy.start(published.table)
    copy.store(published.table, 0, chunks_of(published)[0])
    with pytest.raises(ProtocolError):
        copy.apply(published.head, published.table, pool)
    assert copy.version is None


def test_a_failed_apply_is_mended_by_fetching_again(
    published: Published, copy: WeightMap, pool: ThreadPoolExecutor
) -> None:
    copy.start(published.table)
    with pytest.raises(ProtocolError):
        copy.apply(published.head, published.table, pool)
    fetch(copy, published.table, chunks_of(published))
    copy.apply(published.head, published.table, pool)
    assert copy.path.read_bytes() == WEIGHTS


def test_there_is_no_chunk_outside_a_version(published: Published) -> None:
    assert read_chunk(published, -1) is None
    assert read_chunk(published, len(chunk_spans(published.table))) is None


SMALL = layout(("w", "BF16", (100,)), ("nothing", "F32", (0,)), ("odd", "U8", (3,)), ("flag", "BOOL", ()))


def publish_many(
    directory: Path, count: int, *, fetched: range = range(0)
) -> tuple[PublishedVersions, list[Published]]:
    """Versions 0..count - 1; somebody begins to fetch those in `fetched` as soon as they are there."""
    staging = directory / "staging.bin"
    versions = PublishedVersions(directory / "versions", KEY, SMALL)
    done: list[Published] = []
    with ThreadPoolExecutor(2) as pool:
        for number in range(count):
            staging.write_bytes(weights_of(SMALL, number))
            done.append(versions.publish(staging, v(number), pool))
            if number in fetched:
                versions.find(v(number))
    return versions, done


def test_the_last_four_versions_are_kept(tmp_path: Path) -> None:
    versions, done = publish_many(tmp_path, KEEP_VERSIONS + 2)
    assert [versions.find(v(i)) is not None for i in range(6)] == [False, False, True, True, True, True]
    assert len(list((tmp_path / "versions").iterdir())) == KEEP_VERSIONS
    assert read_chunk(done[0], 0) is None
    assert read_chunk(done[5], 0) == done[5].path.read_bytes()


def test_a_version_that_is_being_fetched_stays_but_not_any_number_of_them(tmp_path: Path) -> None:
    versions, _ = publish_many(tmp_path, KEEP_VERSIONS + 3, fetched=range(1))
    assert [versions.find(v(i)) is not None for i in range(7)] == [True, False, False, True, True, True, True]
    (tmp_path / "more").mkdir()
    publish_many(tmp_path / "more", MOST_VERSIONS + 3, fetched=range(MOST_VERSIONS))
    assert len(list((tmp_path / "more" / "versions").iterdir())) == MOST_VERSIONS


def test_objects_are_found_by_their_digests(tmp_path: Path) -> None:
    versions, done = publish_many(tmp_path, KEEP_VERSIONS + 1)
    assert versions.object(Digest(done[4].head.layout_digest)) == encode(SMALL)
    assert versions.object(Digest(done[4].head.table_digest)) == done[4].table_bytes
    assert versions.object(Digest(done[0].head.table_digest)) is None
    assert versions.object(digest(b"unknown")) is None


def test_odd_and_empty_tensors_arrive_too(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    _, (version,) = publish_many(tmp_path, 1)
    copy = WeightMap(tmp_path / "sampler", SMALL)
    fetch(copy, version.table, chunks_of(version))
    copy.apply(version.head, version.table, pool)
    assert copy.path.read_bytes() == weights_of(SMALL, 0)


def test_a_version_is_signed_as_itself(tmp_path: Path) -> None:
    _, done = publish_many(tmp_path, 2)
    heads = [open_head(one.sealed_head, KEY.public_bytes).version for one in done]
    assert heads == [v(0), VersionId(incarnation=0, version=1)]
