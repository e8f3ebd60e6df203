"""Chunks in a mapped file: nothing but what was signed is held, and nothing is fetched twice."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from swarm.broadcast.store.store import ChunkFile, HeldVersion
from swarm.broadcast.version.manifest import ByteSpan, ChunkTable
from tests.builders import MIXED_LAYOUT, publish, weights_of


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
