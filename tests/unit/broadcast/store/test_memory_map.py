"""A weight map in memory: bit for bit, whole again after a kill or a power cut, and easy on the disk."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from swarm.broadcast.receiver.ahead import WholeRegions
from swarm.broadcast.store import place, weight_map
from swarm.broadcast.store.changes import WHOLE, read_changes
from swarm.broadcast.store.place import Wanted, claim, place_of_map
from swarm.broadcast.store.store import HeldVersion, VersionStore
from swarm.broadcast.store.weight_map import WeightMap, open_weights
from swarm.broadcast.version.manifest import encoded_spans, regions_of
from swarm.errors import ProtocolError, UserError
from tests.builders import KEY, MIXED_LAYOUT, v
from tests.publishers import Holder, Publisher, hand_over

REGIONS = regions_of(MIXED_LAYOUT)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


class Machine(Holder):
    """A receiver with a map in memory, and the learner that it follows."""

    def __init__(self, directory: Path) -> None:
        self.memory = directory / "memory"
        self.memory.mkdir()
        super().__init__(directory / "receiver", Publisher(directory / "learner"), memory=self.memory)

    def take(self, version: HeldVersion) -> HeldVersion:
        held = super().take(version)
        self._prune()
        return held

    def follow(self, *numbers: int) -> HeldVersion:
        """Take these versions, each when it is published. Return the last."""
        return [self.take(self.publisher.publish(number)) for number in numbers][-1]

    def copy_out(self) -> None:
        assert self.map.copy_out(threading.Event())
        self._prune()

    def killed(self) -> WeightMap:
        """As another process finds it: the files in memory are there still."""
        self.store = VersionStore(self.store.directory, KEY.public_bytes)
        self.map = open_weights(self.store, memory=self.memory)
        return self.map

    def power_cut(self) -> WeightMap:
        shutil.rmtree(self.memory)
        self.memory.mkdir()
        return self.killed()

    def _prune(self) -> None:
        self.store.keep_from = self.map.log_from
        self.store.prune()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_what_was_decoded_ahead_is_what_is_applied(machine: Machine, pool: ThreadPoolExecutor) -> None:
    machine.follow(0)
    version = machine.publisher.publish(1)
    held = machine.store.begin(version)
    regions = WholeRegions(held)
    assert regions.whole == []
    order = list(range(len(held.chunks.spans)))
    random.Random(1).shuffle(order)
    seen: list[int] = []
    for index in order:
        assert held.chunks.put(index, version.chunks.chunk(index))
        regions.arrived(index)
        regions.arrived(index)
        seen += regions.whole
        assert machine.map.decode_ahead(held, regions.whole, pool)
        regions.whole.clear()
    assert sorted(seen) == list(range(len(REGIONS)))
    assert machine.content() == machine.publisher.history[v(0)], "the map changes only when all of a version is here"
    # What was decoded is used: the encodings are not looked at again.
    machine.map._decode_sparse = None  # type: ignore[assignment, method-assign]
    machine.map.apply(held)
    assert machine.content() == machine.publisher.history[v(1)]


def test_nothing_is_decoded_ahead_without_the_base(machine: Machine, pool: ThreadPoolExecutor) -> None:
    first, second, third = machine.publisher.publish_up_to(2)
    machine.take(first)
    held = hand_over(machine.store, third)
    assert not machine.map.decode_ahead(held, range(len(REGIONS)), pool)
    machine.take(second)
    assert machine.map.decode_ahead(held, range(len(REGIONS)), pool)
    machine.map.apply(held)
    assert machine.holds(2)


def test_a_region_that_does_not_decode_as_signed_changes_nothing(machine: Machine, pool: ThreadPoolExecutor) -> None:
    machine.follow(0)
    held = hand_over(machine.store, machine.publisher.publish(1))
    at = next(i for i, entry in enumerate(held.table.regions) if entry.codec == "sparse")
    span = encoded_spans(held.table)[at]
    with held.chunks.path.open("r+b") as file:
        os.pwrite(file.fileno(), b"\xff" * 8, span.start + 20)
    before = machine.map.content(at).tobytes()
    assert machine.map.decode_ahead(held, range(len(REGIONS)), pool)
    with pytest.raises(ProtocolError):
        machine.map.apply(held)
    assert machine.map.content(at) == before


# -- what an engine is told ------------------------------------------------------------------------------------


def changed(machine: Machine, since: int) -> dict[int, np.ndarray | None]:
    path = machine.map.changes_since(v(since))
    assert path is not None
    return dict(read_changes(str(path), len(REGIONS)))


def tells(machine: Machine, since: int) -> bool:
    return machine.map.changes_since(v(since)) is not None


def patched(machine: Machine, since: int, until: int, places: dict[int, np.ndarray | None]) -> bytes:
    """The weights of version `since` with the named words of version `until`."""
    old, new = (np.frombuffer(machine.publisher.history[v(n)], dtype="<u2").copy() for n in (since, until))
    for index, at in places.items():
        words = slice(REGIONS[index].start // 2, (REGIONS[index].start + REGIONS[index].nbytes) // 2)
        if at is None:
            old[words] = new[words]
        else:
            assert np.all(np.diff(at.astype(np.int64)) > 0), "ascending, each once"
            old[words][at] = new[words][at]
    return old.tobytes()


def test_the_words_that_changed_are_told_from_any_version_that_is_remembered(machine: Machine) -> None:
    machine.follow(*range(4))
    for since in (1, 2):
        places = changed(machine, since)
        assert patched(machine, since, 3, places) == machine.publisher.history[v(3)]
        assert sum(WHOLE if at is None else len(at) for at in places.values()) < 20_000
    # An engine at version 2 has taken what was before.
    assert not tells(machine, 1)
    assert not tells(machine, 9)


def test_a_dense_delta_and_a_full_version_are_told_as_whole_regions(machine: Machine) -> None:
    machine.follow(0)
    machine.publisher.changed_words = 1_000_000
    machine.follow(1)
    places = changed(machine, 0)
    assert any(at is None for at in places.values())
    assert patched(machine, 0, 1, places) == machine.publisher.history[v(1)]
    machine.take(machine.publisher.publish(2, full=True))
    assert not tells(machine, 1)


def test_what_was_fetched_by_regions_is_not_told(machine: Machine) -> None:
    machine.follow(0)
    machine.fill(machine.publisher.publish(1))
    assert not tells(machine, 0)
    machine.follow(2)
    assert not tells(machine, 0)
    assert patched(machine, 1, 2, changed(machine, 1)) == machine.publisher.history[v(2)]


@pytest.mark.parametrize("fetched", [True, False], ids=["fetched", "applied before a fault"])
def test_regions_that_were_of_the_version_before_its_apply_are_told_as_whole(machine: Machine, fetched: bool) -> None:
    machine.follow(0)
    held = hand_over(machine.store, machine.publisher.publish(1))
    machine.map.begin_fill(held)
    spans = encoded_spans(held.table)
    early = machine.map.lacking(held.table)[:3]
    for index in early:
        if fetched:
            assert machine.map.put_region(index, "raw", machine.region(v(1), index))
        else:
            machine.map._apply_beside(held, index, spans[index])
    machine.map.apply(held)
    places = changed(machine, 0)
    assert [places[index] for index in early] == [None] * 3
    assert patched(machine, 0, 1, places) == machine.publisher.history[v(1)]


# -- the disk --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied_at", [None, 0, 2, 5])
def test_after_a_power_cut_the_map_is_made_again(machine: Machine, copied_at: int | None) -> None:
    for number in range(8):
        machine.publisher.changed_words = 400_000 if number == 3 else 2000
        machine.take(machine.publisher.publish(number))
        if number == copied_at:
            machine.copy_out()
    machine.power_cut()
    assert machine.holds(7)
    # And once more, from what the first life after the cut left.
    machine.follow(8)
    machine.power_cut()
    assert machine.holds(8)


def test_a_copy_that_was_cut_off_holds_regions_of_several_versions(machine: Machine) -> None:
    machine.follow(*range(3))
    machine.copy_out()
    machine.follow(*range(3, 6))
    for index in range(0, len(REGIONS), 2):
        assert machine.map._copy_region(index)
    machine.follow(6)
    machine.power_cut()
    assert machine.holds(6)


def test_a_region_of_the_copy_that_was_torn_is_left_to_others(machine: Machine) -> None:
    def tear() -> None:
        with (machine.store.directory / "weights.bin").open("r+b") as file:
            os.pwrite(file.fileno(), b"torn", REGIONS[4].start + 100)

    machine.follow(0)
    machine.copy_out()
    machine.follow(1, 2)
    tear()
    # Its first version came in full, and is here still.
    assert machine.power_cut().version == v(2)
    machine.follow(*range(3, 12))
    machine.copy_out()
    newest = machine.follow(12)
    tear()
    again = machine.power_cut()
    assert again.version is None
    assert again.lacking(newest.table) == [4]


def test_what_was_fetched_by_regions_survives_and_is_copied_before_older_encodings_go(machine: Machine) -> None:
    machine.follow(*range(3))
    machine.fill([machine.publisher.publish(number) for number in range(3, 9)][-1])
    assert machine.map.copy_is_due(machine.store.versions())
    machine.copy_out()
    assert not machine.map.copy_is_due(machine.store.versions())
    machine.follow(9)
    machine.power_cut()
    assert machine.holds(9)


def test_a_new_node_that_fetched_all_by_regions_needs_no_copy(machine: Machine) -> None:
    machine.publisher.publish(0)
    machine.fill(machine.publisher.publish(1))
    assert not machine.map.copy_is_due(machine.store.versions())
    machine.follow(2)
    machine.power_cut()
    assert machine.holds(2)


@pytest.mark.parametrize("full", [False, True], ids=["deltas", "full versions"])
def test_twice_the_received_bytes_are_written_at_most(machine: Machine, full: bool) -> None:
    """Over the life of a copy. On the disk every version would write the whole model."""
    received, copies = 0, 0
    for number in range(20 if full else 60):
        machine.publisher.changed_words = 60_000
        held = machine.take(machine.publisher.publish(number, full=full))
        received += held.table.encoded_bytes
        if machine.map.copy_is_due(machine.store.versions()):
            machine.copy_out()
            copies += 1
            assert received + copies * MIXED_LAYOUT.total_bytes <= 2 * received
    assert copies == 0 if full else copies >= 2
    newest = machine.map.version
    assert machine.power_cut().version == newest


def test_on_a_nearly_full_disk_the_encodings_go_sooner(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.follow(0)
    machine.copy_out()
    machine.publisher.changed_words = 150_000
    machine.follow(*range(1, 5))
    assert not machine.map.copy_is_due(machine.store.versions())
    monkeypatch.setattr(weight_map, "free_bytes", lambda directory: MIXED_LAYOUT.total_bytes - 1)
    assert machine.map.copy_is_due(machine.store.versions())


def test_a_node_that_leaves_gives_a_copy_up_and_the_memory_back(machine: Machine) -> None:
    machine.follow(0)
    stop = threading.Event()
    stop.set()
    assert not machine.map.copy_out(stop)
    assert machine.map.log_from == v(0)
    machine.map.close()
    assert not machine.memory.exists()
    machine.memory.mkdir()
    assert machine.killed().version == v(0)


def test_a_map_on_the_disk_goes_on_from_what_one_in_memory_left(machine: Machine) -> None:
    newest = machine.follow(*range(3))
    machine.copy_out()
    machine.map.close()
    again = open_weights(VersionStore(machine.store.directory, KEY.public_bytes))
    assert again.lacking(newest.table) == []
    assert again.version == v(2)


# -- where it lives --------------------------------------------------------------------------------------------


@pytest.fixture
def roomy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr(place, "MEMORY", memory)
    monkeypatch.setattr(place, "free_host_bytes", lambda: 16 * 10**9)
    monkeypatch.setattr(place, "free_bytes", lambda directory: 16 * 10**9)
    return memory


NO_ROOM = (
    "the weights are kept on the disk, since 16.0 GB of memory are free, of which they may take 50%: each version "
    "rewrites 12.0 GB, 17.3 TB a day if one comes each minute"
)


@pytest.mark.parametrize(
    ("gigabytes", "wanted", "line"),
    [
        (4, "auto", ""),
        (12, "memory", ""),
        (12, "auto", NO_ROOM),
        (0, "disk", "the weights are kept on the disk, as asked for: each version rewrites 0.0 GB"),
    ],
)
def test_weights_go_into_memory_where_there_is_room_unless_their_owner_decides(
    roomy: Path, tmp_path: Path, gigabytes: int, wanted: Wanted, line: str
) -> None:
    where, said = place_of_map(tmp_path, gigabytes * 10**9, wanted, 0.5)
    assert said == line
    assert list(roomy.iterdir()) == ([] if line else [where])
    assert where is None or where.stat().st_mode & 0o777 == 0o700
    with pytest.raises(UserError, match=r"--weights memory: they take 17\.0 GB, and since 16\.0 GB"):
        place_of_map(tmp_path, 17 * 10**9, "memory", 0.5)


def test_what_killed_nodes_left_in_memory_is_given_back_and_what_is_in_use_is_not(roomy: Path, tmp_path: Path) -> None:
    mine, alive, dead = (place_of_map(tmp_path / name, 10**6, "auto", 0.5)[0] for name in ("mine", "alive", "dead"))
    assert mine is not None
    assert alive is not None
    assert dead is not None
    for one in (mine, alive, dead):
        one.mkdir(exist_ok=True)
        (one / "weights.bin").write_bytes(b"left")
    lock = claim(alive)
    assert lock is not None
    place_of_map(tmp_path / "mine", 10**6, "auto", 0.5)
    assert dead.exists(), "its node may be about to claim it"
    for one in (mine, alive, dead):
        os.utime(one, (0, 0))
    assert claim(alive) is None
    assert place_of_map(tmp_path / "mine", 10**6, "auto", 0.5)[0] == mine
    assert (mine / "weights.bin").exists(), "a node goes on from what it left itself"
    assert (alive / "weights.bin").exists()
    assert not dead.exists()
    os.close(lock)


def test_a_place_that_somebody_else_made_and_one_that_is_not_there_are_not_used(
    roomy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = place_of_map(tmp_path, 10**6, "auto", 0.5)
    assert made is not None
    made.rmdir()
    made.symlink_to(tmp_path)
    where, line = place_of_map(tmp_path, 10**6, "auto", 0.5)
    assert (where, "is not this user's own" in line) == (None, True)
    monkeypatch.setattr(place, "MEMORY", tmp_path / "nowhere")
    where, line = place_of_map(tmp_path, 10**6, "auto", 0.5)
    assert (where, "this system gives no memory at" in line) == (None, True)
