"""Which words of a map in memory have changed since which version: what an engine needs to take them alone.

Few words change from one version to the next, and copying the whole map into an engine, and proving all of it, takes
longer than the wire does. So the map remembers the places that it changed, for as long as its engine has not taken
them, and hands them over as a file:

    for each region a count (32 bits, little-endian), WHOLE if all of it may have changed; then all places, region after
    region: numbers of 16-bit words within their region (32 bits each), ascending and each once
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarm.broadcast.version.codec import Positions
from swarm.broadcast.version.manifest import ITEM_BYTES, Layout, region_tensors, regions_of, tensor_spans
from swarm.types import VersionId

WHOLE = 0xFFFFFFFF
Places = npt.NDArray[np.uint32]
NOTHING: Places = np.empty(0, dtype=np.uint32)
Changed = Mapping[int, Places | None]  # By region; None if all of it may have changed
ITEMS_AT_ONCE = 1 << 16  # Each call to a device takes its time too
END = -1, np.empty(0, dtype=np.int64)


class Trail:
    """The places that changed from version to version, of the last few: at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._steps: list[tuple[VersionId, VersionId, Changed]] = []

    def add(self, before: VersionId, after: VersionId, changed: Changed) -> None:
        if self._steps and self._steps[-1][1] != before:
            self._steps.clear()
        self._steps.append((before, after, changed))
        while self._steps and sum(map(_nbytes, self._steps)) > self._max_bytes:
            del self._steps[0]

    def forget(self, until: VersionId) -> None:
        """Drop what an engine at `until` has taken."""
        self._steps = [step for step in self._steps if step[1] > until]

    def since(self, version: VersionId) -> Changed | None:
        """Return what has changed since `version`; None if that is not known."""
        first = next((i for i, step in enumerate(self._steps) if step[0] == version), None)
        if first is None:
            return None
        merged = dict(self._steps[first][2])
        for _, _, changed in self._steps[first + 1 :]:
            for index, places in changed.items():
                known = merged.get(index, NOTHING)
                merged[index] = None if known is None or places is None else np.union1d(known, places)
        return merged


def _nbytes(step: tuple[VersionId, VersionId, Changed]) -> int:
    return sum(places.nbytes for places in step[2].values() if places is not None)


def write_changes(path: Path, regions: int, changed: Changed) -> None:
    """Write the file of changes in a map of so many regions."""
    counts = np.zeros(regions, dtype="<u4")
    for index, places in changed.items():
        counts[index] = WHOLE if places is None else places.size
    with path.open("wb") as file:
        file.write(counts.tobytes())
        for _, places in sorted((i, places) for i, places in changed.items() if places is not None):
            file.write(places.astype("<u4").tobytes())


def changed_places(path: str, layout: Layout) -> Iterator[tuple[int, Positions]]:
    """Yield which items of which tensor may have changed, as a file of changes says: ascending, tensor after tensor, of
    large ones about ITEMS_AT_ONCE at a time."""
    merged: list[Positions] = []
    for (tensor, places), (tensor_after, places_after) in pairwise(chain(_by_region(path, layout), [END])):
        merged.append(places)
        goes_on = tensor_after == tensor and places_after[0] > places[-1]
        if not goes_on or sum(map(len, merged)) >= ITEMS_AT_ONCE:
            yield tensor, np.concatenate(merged)
            merged.clear()


def _by_region(path: str, layout: Layout) -> Iterator[tuple[int, Positions]]:
    regions, parts, spans = regions_of(layout), region_tensors(layout), tensor_spans(layout)
    for region, places in read_changes(path, len(regions)):
        for tensor, part in parts[region]:
            size = ITEM_BYTES[layout.tensors[tensor].dtype]
            first = (regions[region].start + part.start - spans[tensor].start) // size
            if size == 1:
                at = np.arange(spans[tensor].nbytes)  # Sums go by words of two items, counted from the tensor's start
            elif size > 2 or places is None:
                at = np.arange(first, first + part.nbytes // size)
            else:
                start, end = np.searchsorted(places, [part.start // 2, (part.start + part.nbytes) // 2])
                at = places[start:end].astype(np.int64) + (first - part.start // 2)
            if len(at):
                yield tensor, at


def read_changes(path: str, regions: int) -> Iterator[tuple[int, Places | None]]:
    """Yield the regions that changed, in order, with their places, or None for all of a region."""
    flat = np.fromfile(path, dtype="<u4")
    at = regions
    for index in np.flatnonzero(flat[:at]).tolist():
        count = int(flat[index])
        if count == WHOLE:
            yield index, None
        else:
            yield index, flat[at : at + count]
            at += count
