"""A learner's disk and a receiver's, for tests: versions that differ little, and what one hands to the other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy

from swarm.broadcast.encoding import by_threads
from swarm.broadcast.publishing import PublishedVersions
from swarm.broadcast.store.store import HeldVersion, SignedVersion, VersionStore
from swarm.broadcast.store.weight_map import open_weights
from swarm.broadcast.version.manifest import Layout, trained_spans
from swarm.types import VersionId
from swarm.wire import encode
from tests.builders import KEY, MIXED_LAYOUT, v, weights_of

CHUNK_BYTES = 64 * 1024


class Publisher:
    """Publishes by KEY under `directory`. Each version changes `changed_words` words of the one before, by up to
    `max_ulps` either way, of those that are not frozen."""

    def __init__(self, directory: Path, layout: Layout = MIXED_LAYOUT, *, changed_words: int = 2000) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.staging = directory / "staging.bin"
        self.changed_words = changed_words
        self.max_ulps = 1
        self.submit = by_threads(ThreadPoolExecutor(2))
        self.published = PublishedVersions(directory / "versions", KEY, layout)
        self.layout = layout
        self.history: dict[VersionId, bytes] = {}
        self._draw = numpy.random.default_rng(5)
        self.weights = bytearray(weights_of(layout, 0))

    def publish(self, version: int, *, full: bool = False) -> HeldVersion:
        if self.history:
            self.step()
        self.staging.write_bytes(self.weights)
        self.history[v(version)] = bytes(self.weights)
        return self.published.publish(self.staging, v(version), CHUNK_BYTES, self.submit, full=full)

    def publish_up_to(self, version: int) -> list[HeldVersion]:
        return [self.publish(number) for number in range(version + 1)]

    def restart(self) -> None:
        """As another process finds the directory."""
        self.published = PublishedVersions(self.directory / "versions", KEY, self.layout)

    def step(self) -> None:
        (trained,) = trained_spans(self.layout.tensors)
        words = numpy.frombuffer(self.weights, "<u2", count=trained.nbytes // 2, offset=trained.start)
        at = self._draw.integers(len(words), size=self.changed_words)
        ulps = self._draw.choice((-1, 1), self.changed_words) * self._draw.integers(
            1, self.max_ulps, self.changed_words, endpoint=True
        )
        numpy.add.at(words, at, ulps.astype("<u2"))


def receiver_store(directory: Path, layout: Layout = MIXED_LAYOUT) -> VersionStore:
    store = VersionStore(directory, KEY.public_bytes)
    store.set_layout(encode(layout), layout)
    return store


def hand_over(store: VersionStore, version: HeldVersion) -> HeldVersion:
    """Every chunk of a version, in reverse order."""
    held = store.begin(version)
    for index in reversed(range(len(held.chunks.spans))):
        if not held.chunks.has(index):
            assert held.chunks.put(index, version.chunks.chunk(index))
    return held


class Holder:
    """A receiver's store and its weight map, on the disk or in `memory`, of what a publisher makes."""

    def __init__(self, directory: Path, publisher: Publisher, *, memory: Path | None = None) -> None:
        self.publisher = publisher
        self.store = receiver_store(directory, publisher.layout)
        self.map = open_weights(self.store, memory=memory)

    def take(self, version: HeldVersion) -> HeldVersion:
        """Take a version by its chunks."""
        held = hand_over(self.store, version)
        self.map.apply(held)
        return held

    def fill(self, version: SignedVersion) -> None:
        """Take a version by regions, as one that was away for long."""
        self.store.begin(version)
        self.map.begin_fill(version)
        for index in self.map.lacking(version.table):
            assert self.map.put_region(index, "raw", self.region(version.version, index))
        self.map.finish()

    def region(self, version: VersionId, index: int) -> bytes:
        """What a region of a version should be."""
        return self.publisher.history[version][self.map.regions[index].at]

    def content(self) -> bytes:
        return self.map.path.read_bytes()

    def holds(self, number: int) -> bool:
        return self.map.version == v(number) and self.content() == self.publisher.history[v(number)]
