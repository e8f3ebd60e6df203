"""Versions whose first segments are sent while later ones are still being encoded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarm.broadcast import encoding, publishing
from swarm.broadcast.coding import in_order
from swarm.broadcast.encoding import Encode, Encoded
from swarm.broadcast.frames import FrameType
from swarm.broadcast.store.store import BegunVersion, ChunkFile, HeldVersion
from swarm.broadcast.version import manifest
from swarm.broadcast.version.manifest import (
    ChunkTable,
    RegionEntry,
    Segment,
    check_segment,
    open_segment,
    segment_cuts,
    sign_segment,
)
from swarm.errors import ProtocolError
from swarm.wire import digest
from tests.builders import KEY, MIXED_LAYOUT, OTHER_KEY, SWARM_OF_KEY, v
from tests.publishers import Publisher
from tests.unit.broadcast.test_receiver import SIZE, LearnerHost, ReceiverHost, World, all_hold, expected, world
from tests.unit.wires import until

__all__ = ["world"]
SEGMENTS = 4
JOBS = 16
OTHER_LR = 2e-5


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "SEGMENT_BYTES", SIZE // SEGMENTS)
    monkeypatch.setattr(encoding, "JOB_BYTES", SIZE // JOBS)


class Killed(Exception):
    """What ends an encoding as a kill does: nothing comes after it."""


class Gate:
    """Holds up encodings once all but the last segment are there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kills = False
        self._open = threading.Event()
        self.open = self._open.set
        self.close = self._open.clear
        self.open()
        monkeypatch.setattr(publishing, "in_order", self._in_order)

    def _in_order(self, submit: Callable[[Encode], Future[Encoded]], jobs: Iterable[Encode]) -> Iterator[Encoded]:
        for number, encoded in enumerate(in_order(submit, jobs)):
            if number == JOBS * (SEGMENTS - 1) // SEGMENTS:
                self._open.wait()
                if self.kills:
                    raise Killed
            yield encoded


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate(monkeypatch)
    yield found
    found.open()


def begun_at(host: ReceiverHost) -> ChunkFile | None:
    begun = host.receiver.opening._begun
    return begun.chunks if begun is not None else None


def has_all_so_far(host: ReceiverHost) -> bool:
    chunks = begun_at(host)
    return chunks is not None and len(chunks.segments) == SEGMENTS - 1 and chunks.missing == 0


@asynccontextmanager
async def encoding_of(learner: LearnerHost, gate: Gate, number: int, **rest: Any) -> AsyncIterator[None]:
    """Within, all but the last segment of a version is encoded."""
    gate.close()
    publishing_it = asyncio.create_task(learner.publish(number, **rest))
    yield
    gate.open()
    await publishing_it


async def swarm_with(world: World, gate: Gate, *, leaves: int = 0) -> tuple[LearnerHost, list[ReceiverHost]]:
    learner = await world.learner()
    hosts = [await world.receiver(1), await world.receiver(2)]
    hosts += [await world.receiver(3 + number, leaf=True) for number in range(leaves)]
    await until(learner.linked(len(hosts)))
    await learner.publish(0)
    await until(all_hold(hosts, 0))
    return learner, hosts


async def test_chunks_leave_while_the_rest_is_being_encoded(world: World, gate: Gate, tmp_path: Path) -> None:
    learner, hosts = await swarm_with(world, gate, leaves=2)
    async with encoding_of(learner, gate, 1):
        await until(lambda: all(map(has_all_so_far, hosts)))
        assert learner.service.newest is not None
        assert learner.service.newest.version == v(0)
        assert all(host.holds(0) for host in hosts)
    await until(all_hold(hosts, 1))
    assert {host.weights() for host in hosts} == {expected(tmp_path, 1)}
    await until(lambda: learner.service.status()["broadcasts"]["0.1"]["complete"] == len(hosts))
    assert sum(sum(host.receiver._transfers.rejected.values()) for host in hosts) == 0
    # What was sent early was not sent again.
    assert learner.service.status()["broadcasts"]["0.1"]["repairs"] == 0


async def test_who_comes_or_starts_again_while_a_version_is_encoded_gets_all_of_it(
    world: World, gate: Gate, tmp_path: Path
) -> None:
    learner, hosts = await swarm_with(world, gate)
    async with encoding_of(learner, gate, 1):
        await until(lambda: all(map(has_all_so_far, hosts)))
        late = await world.receiver(9)
        await until(lambda: late.holds(0))
        assert begun_at(late) is None
        await hosts[0].stop()
        assert not list(hosts[0].directory.glob("**/0.1.head"))
        again = await world.receiver(1)
        await until(lambda: again.receiver.status()["streams"] == 3)
    await until(all_hold([late, again, hosts[1]], 1))
    assert late.weights() == again.weights() == expected(tmp_path, 1)


@pytest.mark.parametrize(
    ("number", "step_lr"),
    [(1, 1e-5), (1, OTHER_LR), (2, 1e-5)],
    ids=["the same weights", "other weights", "another version"],
)
async def test_what_was_begun_by_a_learner_that_was_killed_is_encoded_again_or_given_up(
    world: World, gate: Gate, tmp_path: Path, number: int, step_lr: float
) -> None:
    """It has signed segments of a version that it never published. Only its head says what the version is."""
    learner, hosts = await swarm_with(world, gate)
    gate.close()
    killed = asyncio.create_task(learner.publish(1))
    await until(lambda: all(map(has_all_so_far, hosts)))
    await learner.stop()
    gate.kills = True
    gate.open()
    with pytest.raises(Killed):
        await killed
    gate.kills = False
    again = await world.learner(again=True)
    await until(again.linked(len(hosts)))
    async with encoding_of(again, gate, number, step_lr=step_lr):
        await until(lambda: all(map(has_all_so_far, hosts)))
        assert all(host.holds(0) for host in hosts)
    await until(all_hold(hosts, number))
    assert {host.weights() for host in hosts} == {expected(tmp_path, number, step_lr=step_lr)}
    for host in hosts:
        assert host.receiver.status()["chunks_held"].keys() == {"0.0", f"0.{number}"}
        assert number == 1 or not list(host.directory.glob("**/0.1.*"))


Published = tuple[HeldVersion, list[tuple[BegunVersion, bytes]]]


@pytest.fixture
def published(tmp_path: Path) -> Published:
    publisher = Publisher(tmp_path / "learner")
    publisher.publish(0)
    begun: list[tuple[BegunVersion, bytes]] = []
    publisher.step()
    publisher.staging.write_bytes(publisher.weights)
    held = publisher.published.publish(
        publisher.staging, v(1), 64 * 1024, publisher.submit, begun=lambda *one: begun.append(one)
    )
    return held, begun


def test_segments_are_the_beginning_of_the_version(published: Published) -> None:
    held, begun = published
    assert len(begun) == len(held.table.cuts) - 1 > 0
    for number, (so_far, sealed) in enumerate(begun):
        segment = open_segment(sealed, KEY.public_bytes)
        check_segment(segment, MIXED_LAYOUT)
        assert (segment.number, segment.version, segment.base) == (number, v(1), v(0))
        assert held.table.begins_with(so_far.table)
        assert so_far.table.cuts == held.table.cuts[: number + 1]
        assert so_far.chunks.missing == 0
        assert not so_far.chunks.complete
    assert held.chunks.complete
    # No chunk lies in two segments: a segment's own chunks suffice for its regions.
    ends = [chunks.stop for chunks in held.chunks.segments]
    assert [len(so_far.table.chunk_digests) for so_far, _ in begun] == ends[:-1]


def test_a_table_is_not_the_beginning_of_another_one(published: Published) -> None:
    held, begun = published
    table = begun[0][0].table
    other = msgspec.structs.replace(table, chunk_digests=(bytes(32), *table.chunk_digests[1:]))
    assert not held.table.begins_with(other)
    # Segments are counted by their cuts, even where the chunks are the same.
    assert not msgspec.structs.replace(held.table, cuts=(len(held.table.regions),)).begins_with(table)


def test_a_segment_of_another_learner_is_refused(published: Published) -> None:
    with pytest.raises(ProtocolError):
        open_segment(published[1][0][1], OTHER_KEY.public_bytes)


def changed(segment: Segment, name: str, value: Any) -> Segment:
    """With another value in the segment, or in its table."""
    if not hasattr(segment.table, name):
        return msgspec.structs.replace(segment, **{name: value})
    table: ChunkTable = msgspec.structs.replace(segment.table, **{name: value})
    return msgspec.structs.replace(segment, table=table)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("first", 10_000),
        ("base", None),
        ("base", v(1)),
        ("cuts", (1,)),
        ("cuts", (1, 1)),
        ("tensor_sums", (1,)),
        ("chunk_digests", ()),
        ("regions", ()),
    ],
)
def test_a_signed_segment_that_makes_no_sense_is_refused(published: Published, name: str, value: Any) -> None:
    segment = changed(open_segment(published[1][0][1], KEY.public_bytes), name, value)
    with pytest.raises(ProtocolError):
        check_segment(open_segment(sign_segment(segment, KEY), KEY.public_bytes), MIXED_LAYOUT)


async def test_a_segment_that_makes_no_sense_does_not_end_a_receiver(world: World, gate: Gate) -> None:
    learner, hosts = await swarm_with(world, gate)
    layout = hosts[0].receiver.upkeep.store.layout_digest  # type: ignore[union-attr]
    entry = RegionEntry(codec="raw", encoded_bytes=1, decoded_digest=digest(b""))
    table = ChunkTable(regions=(entry,), cuts=(2,), chunk_bytes=1 << 16, chunk_digests=(digest(b""),), tensor_sums=())
    wrong = Segment(swarm=SWARM_OF_KEY, version=v(1), base=v(0), layout_digest=layout, number=0, first=0, table=table)
    sealed = sign_segment(wrong, KEY)
    for link in learner.service._transfers.links.values():
        link.send(FrameType.SEGMENT, v(1), sealed)
    await until(lambda: all(host.said for host in hosts))
    assert ["0.1 was announced and cannot be taken" in host.said[0] for host in hosts] == [True, True]
    await learner.publish(1)
    await until(all_hold(hosts, 1))


@pytest.mark.parametrize("regions", [1, 3, 16, 1024])
@pytest.mark.parametrize("total", [1, SIZE, 100 * SIZE, 10**12])
def test_segments_share_the_regions_out_evenly(total: int, regions: int) -> None:
    cuts = segment_cuts(total, regions)
    assert sum(cuts) == regions
    assert min(cuts) >= 1
    assert max(cuts) - min(cuts) <= 1
    assert len(cuts) <= manifest.MAX_SEGMENTS
