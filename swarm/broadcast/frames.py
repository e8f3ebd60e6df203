"""The frames that nodes send one another over a link, and how large each may be."""

from __future__ import annotations

from enum import IntEnum

from swarm.broadcast.announcing import PART_BYTES
from swarm.broadcast.notes import MAX_BITMAP_BYTES
from swarm.broadcast.uplinks import FILLER_BYTES
from swarm.broadcast.version.manifest import HEAD_BYTES, MAX_CHUNK_BYTES, SEGMENT_TABLE_BYTES


class FrameType(IntEnum):
    """Types 1 and 2 are in net/links.py."""

    NOTE = 3
    CHUNK = 4
    HEAD = 5
    TABLE = 6
    ROSTER = 7
    ROUTES = 8
    SEGMENT = 9
    PROBE = 10
    FILLER = 11


CAPS: dict[int, int] = {
    FrameType.NOTE: MAX_BITMAP_BYTES + 1024,
    FrameType.CHUNK: MAX_CHUNK_BYTES,
    FrameType.HEAD: HEAD_BYTES,
    FrameType.TABLE: PART_BYTES,
    FrameType.ROSTER: 512 * 1024,  # 256 members of 2 KiB: four addresses with names of the full length
    FrameType.ROUTES: 512 * 1024,  # 255 children in each of 16 stripes, at 66 bytes, are 270 KB
    FrameType.SEGMENT: SEGMENT_TABLE_BYTES,
    FrameType.PROBE: 0,
    FrameType.FILLER: FILLER_BYTES,
}
"""Largest payload of each type in bytes. It is checked before a buffer is made."""
