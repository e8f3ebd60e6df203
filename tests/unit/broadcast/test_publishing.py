"""Publishing: what is on disk before a version is announced, and what a restarted learner finds of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.broadcast.store import disk
from swarm.broadcast.store.disk import DiskFull
from swarm.broadcast.store.weight_map import open_weights
from swarm.broadcast.version.codec import tensor_sum
from swarm.broadcast.version.manifest import Layout, open_head, open_layout, open_table, tensor_spans
from swarm.net.wire import digest, encode
from tests.builders import KEY, MIXED_LAYOUT, layout, v, weights_of
from tests.publishers import CHUNK_BYTES, Publisher, hand_over, receiver_store


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path / "learner")


def test_what_is_published_opens_with_the_learners_key_alone(publisher: Publisher) -> None:
    for version in publisher.publish_up_to(1):
        head = open_head(version.sealed_head, KEY.public_bytes)
        assert head == version.head
        found = open_layout(encode(MIXED_LAYOUT), head)
        assert open_table(version.table_bytes, head, found) == version.table
        assert version.table.chunk_bytes == CHUNK_BYTES
        for span, expected in zip(version.chunks.spans, version.table.chunk_digests, strict=True):
            assert digest(version.chunks.encoded(span)) == expected


ODD_LAYOUT = layout(
    ("layer.0", "BF16", (70_000,)), ("layer.1", "BF16", (3,)), ("mask", "U8", (3,)), ("bits", "U8", (200_001,))
)
"""Tensors within one region and over several, the last of them from an odd place on."""


@pytest.mark.parametrize("what", [MIXED_LAYOUT, ODD_LAYOUT], ids=["mixed", "odd"])
def test_tensor_sums_are_those_of_the_weights(tmp_path: Path, what: Layout) -> None:
    publisher = Publisher(tmp_path, what)
    for version in [*publisher.publish_up_to(2), publisher.publish(3, full=True), publisher.publish(4)]:
        weights = publisher.history[version.head.version]
        sums = [tensor_sum(weights[s.start : s.start + s.nbytes]) for s in tensor_spans(what)]
        assert list(version.table.tensor_sums) == sums


def test_staging_and_map_change_places(publisher: Publisher) -> None:
    publisher.publish(0)
    weights = publisher.published.weights
    assert weights.path.read_bytes() == publisher.history[v(0)]
    first = weights.path.stat().st_ino
    # The next staging finds a file of the right size with blocks behind it, and so does the one after.
    assert publisher.staging.stat().st_size == MIXED_LAYOUT.total_bytes
    publisher.publish(1)
    assert weights.path.read_bytes() == publisher.history[v(1)]
    assert publisher.staging.stat().st_ino == first
    assert publisher.staging.read_bytes() == publisher.history[v(0)]


def test_a_version_without_changes_is_next_to_nothing(publisher: Publisher) -> None:
    publisher.publish(0)
    same = publisher.published.republish(v(0, 1), CHUNK_BYTES, publisher.submit)
    assert same.head.base == v(0)
    assert same.table.encoded_bytes < 20 * len(same.table.regions)
    assert publisher.published.weights.version == v(0, 1)
    assert publisher.published.weights.path.read_bytes() == publisher.history[v(0)]


def test_a_restarted_learner_finds_its_newest_version_and_goes_on(publisher: Publisher, tmp_path: Path) -> None:
    done = publisher.publish_up_to(2)
    publisher.restart()
    newest = publisher.published.newest
    assert newest is not None
    assert newest.head == done[2].head
    assert newest.sealed_head == done[2].sealed_head
    assert newest.chunks.complete
    assert publisher.published.weights.version == v(2)
    after = publisher.publish(3)
    assert after.head.base == v(2)
    store = receiver_store(tmp_path / "receiver")
    copy = open_weights(store)
    for version in (*done, after):
        copy.apply(hand_over(store, version))
    assert copy.path.read_bytes() == publisher.history[v(3)]


@pytest.mark.parametrize("stage", ["before the renames", "between them", "before the record"])
def test_a_learner_that_died_while_its_files_changed_places_goes_on(publisher: Publisher, stage: str) -> None:
    publisher.publish(0)
    weights = publisher.published.weights
    files = weights.path.parent
    current, before = (files / "weights.current").read_bytes(), weights.path.read_bytes()
    publisher.publish(1)
    (files / "weights.current").replace(files / "weights.target")
    (files / "weights.current").write_bytes(current)
    if stage == "before the renames":
        weights.path.write_bytes(before)
    if stage == "between them":
        weights.path.replace(files / "weights.next")
    publisher.restart()
    assert publisher.published.weights.version == v(1)
    assert publisher.published.weights.path.read_bytes() == publisher.history[v(1)]
    assert publisher.publish(2).head.base == v(1)


def test_a_learner_that_lost_its_map_publishes_in_full(publisher: Publisher) -> None:
    done = publisher.publish_up_to(1)
    publisher.published.weights.path.unlink()
    publisher.restart()
    # Version 1 is a delta, and its base is gone.
    newest = publisher.published.newest
    assert newest is not None
    assert newest.head == done[1].head
    assert publisher.publish(2).head.base is None


def test_a_version_whose_encodings_are_lost_is_not_announced_again(publisher: Publisher) -> None:
    done = publisher.publish_up_to(1)
    done[1].chunks.path.write_bytes(b"")
    publisher.restart()
    newest = publisher.published.newest
    assert newest is not None
    assert newest.head == done[0].head


def test_a_full_disk_leaves_everything_as_it_was(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher.publish(0)
    publisher.staging.write_bytes(weights_of(MIXED_LAYOUT, 9))
    files = sorted(path.name for path in publisher.published.store.directory.iterdir())
    spare_bytes = disk.SPARE_BYTES
    monkeypatch.setattr(disk, "SPARE_BYTES", 1 << 60)
    with pytest.raises(DiskFull, match=r"no room for version 0.1: free \d+ MB there"):
        publisher.published.publish(publisher.staging, v(1), CHUNK_BYTES, publisher.submit, full=True)
    monkeypatch.setattr(disk, "SPARE_BYTES", spare_bytes)
    assert sorted(path.name for path in publisher.published.store.directory.iterdir()) == files
    assert publisher.published.weights.version == v(0)
    assert publisher.publish(1).head.base == v(0)
