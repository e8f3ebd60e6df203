"""What lies on the disk of a weight map that is kept in memory: a copy of its regions, brought up to date now and then.

Each version that comes changes every region a little. Written to a file, that is the whole model for each version: at
one version a minute an SSD is worn out in weeks. So the map lives in memory, and on the disk lie the encodings as they
were received (store.py) and this copy. After a power cut each region is made again from its place in the copy, whatever
version that is of, and the encodings since (`replay`). Once the encodings are as many bytes as the map, the copy is
written again and older encodings go: averaged over that time, twice the received bytes are written.

Regions are known by their digests. One that was being written when the power failed is of no version, and is fetched.
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
