"""Publishing: what is on disk before a version is announced, and what a restarted learner finds of it."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest
from msgspec.structs import replace

from swarm.broadcast.encoding import Encode, Encoded, Region
from swarm.broadcast.publishing import PublishedVersions
from swarm.broadcast.store import disk
from swarm.broadcast.store.base_model import BaseModel, begin_from_base
from swarm.broadcast.store.disk import DiskFull
from swarm.broadcast.store.store import HeldVersion
from swarm.broadcast.store.weight_map import open_weights
from swarm.broadcast.version.codec import tensor_sum
from swarm.broadcast.version.manifest import (
    Layout,
    frozen_regions,
    needs_base,
    regions_of,
    tensor_spans,
    trained_spans,
)
from swarm.types import VersionId
from tests.builders import ADAPTED_LAYOUT, KEY, MIXED_LAYOUT, layout, v, weights_of
from tests.publishers import CHUNK_BYTES, Holder, Publisher
from tests.unit.broadcast.store.test_base_model import save


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path / "learner")


def newest_of(publisher: Publisher) -> HeldVersion:
    newest = publisher.published.newest
    assert newest is not None
    return newest


def sums_of(what: Layout, weights: bytes) -> tuple[int, ...]:
    return tuple(tensor_sum(weights[span.at]) for span in tensor_spans(what))


ODD_LAYOUT = layout(
    ("layer.0", "BF16", (70_000,)), ("layer.1", "BF16", (3,)), ("mask", "U8", (3,)), ("bits", "U8", (200_001,))
)
"""Tensors within one region and over several, the last of them from an odd place on."""


@pytest.mark.parametrize("what", [MIXED_LAYOUT, ODD_LAYOUT], ids=["mixed", "odd"])
def test_tensor_sums_are_those_of_the_weights(tmp_path: Path, what: Layout) -> None:
    publisher = Publisher(tmp_path, what)
    for version in [*publisher.publish_up_to(2), publisher.publish(3, full=True), publisher.publish(4)]:
        assert version.table.tensor_sums == sums_of(what, publisher.history[version.head.version])
        assert version.table.chunk_bytes == CHUNK_BYTES


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


@pytest.mark.parametrize("base", [v(1), None], ids=["makes it again", "publishes in full"])
def test_a_learner_that_lost_its_map(publisher: Publisher, base: VersionId | None) -> None:
    done = publisher.publish_up_to(1)
    publisher.published.weights.path.unlink()
    if base is None:
        # Version 1 is a delta, and its own base is gone.
        publisher.published.store.drop(v(0))
    publisher.restart()
    assert newest_of(publisher).head == done[1].head
    assert publisher.publish(2).head.base == base


def test_a_version_whose_encodings_are_lost_is_not_announced_again(publisher: Publisher) -> None:
    done = publisher.publish_up_to(1)
    done[1].chunks.path.write_bytes(b"")
    publisher.restart()
    assert newest_of(publisher).head == done[0].head


def test_a_full_disk_leaves_everything_as_it_was(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher.publish(0)
    publisher.staging.write_bytes(weights_of(MIXED_LAYOUT, 9))
    files = sorted(path.name for path in publisher.published.store.directory.iterdir())
    with monkeypatch.context() as crowded:
        crowded.setattr(disk, "SPARE_BYTES", 1 << 60)
        with pytest.raises(DiskFull, match=r"no room for version 0.1: free \d+ MB there"):
            publisher.published.publish(publisher.staging, v(1), CHUNK_BYTES, publisher.submit, full=True)
    assert sorted(path.name for path in publisher.published.store.directory.iterdir()) == files
    assert publisher.published.weights.version == v(0)
    assert publisher.publish(1).head.base == v(0)


@pytest.fixture
def tuner(tmp_path: Path) -> Publisher:
    """Publishes versions in which the adapter alone changes."""
    return Publisher(tmp_path / "learner", ADAPTED_LAYOUT)


(ADAPTER,) = trained_spans(ADAPTED_LAYOUT.tensors)


def encoded_by(publisher: Publisher) -> list[Region]:
    """The regions that it will have encoded."""
    encoded, submit = list[Region](), publisher.submit

    def noted(job: Encode) -> Future[Encoded]:
        encoded.extend(job.regions)
        return submit(job)

    publisher.submit = noted
    return encoded


def test_a_version_of_an_adapter_is_the_adapter_alone(tuner: Publisher, tmp_path: Path) -> None:
    regions, frozen, encoded = regions_of(ADAPTED_LAYOUT), frozen_regions(ADAPTED_LAYOUT), encoded_by(tuner)
    receiver = Holder(tmp_path / "receiver", tuner)
    first = receiver.take(tuner.publish(0))
    assert first.table.encoded_bytes > 10 * ADAPTER.nbytes
    assert len(encoded) == len(regions)
    for number in (1, 2):
        encoded.clear()
        version = tuner.publish(number)
        # Of what is frozen nothing is read.
        assert [region.span for region in encoded] == [
            region for region, is_frozen in zip(regions, frozen, strict=True) if not is_frozen
        ]
        assert sum(region.span.nbytes for region in encoded) == ADAPTER.nbytes
        assert version.table.encoded_bytes <= ADAPTER.nbytes
        assert [entry.codec == "frozen" for entry in version.table.regions] == frozen
        assert version.head.base == v(number - 1)
        receiver.take(version)
        assert receiver.holds(number)
        assert version.table.tensor_sums == sums_of(ADAPTED_LAYOUT, receiver.content())


def test_an_adapter_in_full_is_as_small_and_follows_any_version(tuner: Publisher, tmp_path: Path) -> None:
    """Nor does it need a chain: a receiver that missed the versions since lacks the regions of the adapter alone."""
    receiver = Holder(tmp_path / "receiver", tuner)
    receiver.take(tuner.publish(0))
    tuner.publish(1)
    newest = tuner.publish(2, full=True)
    assert newest.table.encoded_bytes <= ADAPTER.nbytes
    assert not needs_base(newest.table)
    assert receiver.map.can_become(newest)
    receiver.take(newest)
    assert receiver.holds(2)
    assert newest.table.tensor_sums == sums_of(ADAPTED_LAYOUT, receiver.content())
    later = [tuner.publish(number) for number in (3, 4, 5)][-1]
    lacking = receiver.map.lacking(later.table)
    assert sum(receiver.map.regions[index].nbytes for index in lacking) == ADAPTER.nbytes
    receiver.fill(later)
    assert receiver.holds(5)
    empty = Holder(tmp_path / "newcomer", tuner).map
    assert not empty.can_become(newest)
    assert len(empty.missing_base(newest)) == sum(frozen_regions(ADAPTED_LAYOUT))


def test_after_a_power_cut_the_base_is_made_again_from_the_first_version(tuner: Publisher, tmp_path: Path) -> None:
    receiver = Holder(tmp_path / "receiver", tuner, memory=tmp_path / "memory")
    for number, full in ((0, False), (1, False), (2, True), (3, False)):
        receiver.take(tuner.publish(number, full=full))
    receiver.store.keep_from = receiver.map.log_from
    receiver.store.prune()
    receiver.map.close()
    receiver.map = open_weights(receiver.store, memory=tmp_path / "memory")
    assert receiver.holds(3)
    receiver.map.close()


def test_a_local_copy_of_the_base_leaves_the_adapter_alone_to_fetch(tuner: Publisher, tmp_path: Path) -> None:
    newest = tuner.publish_up_to(1)[1]
    base = BaseModel(save(tmp_path / "base", ADAPTED_LAYOUT, tuner.history[v(0)], frozen_only=True))
    assert begin_from_base(base, Holder(tmp_path / "receiver", tuner).map, newest) == ADAPTER.nbytes


def test_another_base_is_another_layout_and_begins_anew(tuner: Publisher) -> None:
    tuner.publish(0)
    assert ADAPTED_LAYOUT.adapter is not None
    other = replace(ADAPTED_LAYOUT, adapter=replace(ADAPTED_LAYOUT.adapter, base=bytes([1]) * 32))
    tuner.published = PublishedVersions(tuner.directory / "versions", KEY, other)
    tuner.weights[:] = weights_of(ADAPTED_LAYOUT, 7)
    encoded = encoded_by(tuner)
    assert tuner.publish(1).head.base is None
    assert len(encoded) == len(regions_of(ADAPTED_LAYOUT))
