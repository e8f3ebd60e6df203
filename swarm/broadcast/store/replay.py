"""Making the regions of a weight map in memory again: after a power cut, or where a killed process left them torn.

A region is made from what the map or its copy on the disk has of it (weight_map.py), whatever version that is of, and
from the encodings since. It is known by its digest. One that was being written is of no version, and is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from swarm.broadcast.store.store import HeldVersion
from swarm.broadcast.version.codec import Buffer, decode_region
from swarm.broadcast.version.manifest import WHOLE, ByteSpan, Dtype, encoded_spans
from swarm.types import VersionId
from swarm.wire import digest

MAX_LOG = 256  # Versions whose encodings are kept at most: each has a table in memory, and is decoded after a power cut


class Log:
    """Versions that follow from one another, oldest first, as a map in memory is made of them again. All are complete
    but perhaps the first, which says by its digests what the copy holds."""

    def __init__(self, versions: Sequence[HeldVersion], newest: VersionId) -> None:
        """Take of `versions` those that lead to `newest`."""
        by_version = {held.head.version: held for held in versions}
        chain: list[HeldVersion] = []
        at: VersionId | None = newest
        while at is not None and (held := by_version.get(at)) is not None:
            chain.insert(0, held)
            at = held.head.base if held.chunks.complete else None
        self.versions = chain

    @cached_property
    def _spans(self) -> list[list[ByteSpan]]:
        # Not when it is made: whether a copy is due is asked on the event loop, at every piece that comes.
        return [encoded_spans(held.table) for held in self.versions]

    def replay(self, index: int, nbytes: int, dtype: Dtype, holds: bytes, content: Buffer) -> Buffer | None:
        """Return region `index` of the newest version, made from what holds it, `content` with the digest `holds`, or
        from a full encoding. Return None if neither leads there."""
        made: Buffer | None = None
        later = 0
        for held in reversed(self.versions):
            entry = held.table.regions[index]
            if entry.decoded_digest == holds:
                made = content
                break
            if not held.chunks.complete:
                return None
            later += 1
            if entry.codec in WHOLE:
                break
        else:
            return None
        first = len(self.versions) - later
        for held, spans in zip(self.versions[first:], self._spans[first:], strict=True):
            encoded = held.chunks.encoded(spans[index])
            made = decode_region(held.table.regions[index].codec, encoded, nbytes, dtype, made)
        wanted = self.versions[-1].table.regions[index].decoded_digest
        return made if made is not None and digest(made) == wanted else None
