"""Bytes on the wire: typed msgpack with size caps, bounded zstd, content digests.

Every message is a frozen struct that is encoded as a msgpack array in field order, so no key can occur twice. The type
drives the decoding: a body of another shape is refused before objects are built for it (docs/decisions/0001). A field
may be added at the end with a default; any other change raises PROTOCOL.
"""

from __future__ import annotations

from threading import Lock
from typing import Annotated, Any, NewType, TypeVar

import msgspec
import zstandard
from blake3 import blake3

from swarm.errors import ProtocolError, TooLarge

PROTOCOL = 8  # Integer that both sides of a connection must agree on
PROTOCOL_HEADER = "Echo-Protocol"

CONTROL_BODY_BYTES = 256 * 1024
"""Largest control message. The longest is a question that names 8,192 held samples: 98 kB in groups of one."""

ROLLOUT_BODY_BYTES = 8 * 1024 * 1024  # Largest compressed body of rollouts

ROLLOUT_UNPACKED_BYTES = 32 * 1024 * 1024
"""Largest body of rollouts after decompression: 400 rollouts of 8,192 tokens at 9 bytes a token."""

ROLLOUT_MAX_RATIO = 50  # Varied rollouts compress about twofold; a large body that claims more than this is a bomb

RATIO_FREE_BYTES = 4 * 1024 * 1024
"""Up to this size any ratio is allowed: a policy that repeats one token honestly compresses a hundredfold."""

ZSTD_WINDOW_BYTES = 8 * 1024 * 1024  # Largest window that a decoder allocates for a peer
Digest = NewType("Digest", bytes)  # BLAKE3, 32 bytes
DigestField = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  # A digest inside a message
M = TypeVar("M")
_decoders: dict[object, msgspec.msgpack.Decoder[Any]] = {}
_making = Lock()


class Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The base of every message between nodes."""


def digest(data: bytes | bytearray | memoryview) -> Digest:
    """Return the BLAKE3 of `data`."""
    return Digest(blake3(data).digest())


def encode(message: object) -> bytes:
    """Return `message` as msgpack bytes. Equal messages give equal bytes."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes | memoryview, kind: type[M], *, cap_bytes: int) -> M:
    """Return `data` as a `kind`. Raise TooLarge over `cap_bytes`, and ProtocolError for anything but exactly one."""
    if len(data) > cap_bytes:
        raise TooLarge(f"{kind.__name__} of {len(data)} bytes is over the cap of {cap_bytes}")
    try:
        return _decoder(kind).decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a {kind.__name__}: {error}") from error


def _decoder(kind: type[M]) -> msgspec.msgpack.Decoder[M]:
    """msgspec 0.22 reads the fields of a type at its first use, and shows them half read to other threads, which crash.
    So only one thread has it read types."""
    if kind not in _decoders:
        with _making:
            _decoders[kind] = msgspec.msgpack.Decoder(kind)
    return _decoders[kind]


def compress(data: bytes, *, level: int = 1) -> bytes:
    """Return one zstd frame that states its content size."""
    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(data)


def stated_size(data: bytes | memoryview) -> int:
    """Return the content size in a zstd frame's header. Raise ProtocolError if there is no frame or it does not say."""
    try:
        size = zstandard.frame_content_size(bytes(data[:64]))
    except zstandard.ZstdError as error:
        raise ProtocolError(f"not a zstd frame: {error}") from error
    if size < 0:
        raise ProtocolError("a zstd frame must state its content size")
    return size


def decompress(data: bytes | memoryview, *, cap_bytes: int, max_ratio: float) -> bytes:
    """Return the content of exactly one zstd frame, at most `cap_bytes`. Raise TooLarge or ProtocolError otherwise.

    The stated content size is checked before a byte is allocated, because zstandard ignores max_output_size when the
    header states a size. The one-shot call then allocates exactly that size, so a frame that holds more ends there (a
    streaming decoder would unpack all of it first), and it refuses anything that follows the frame.
    """
    try:
        frame = zstandard.get_frame_parameters(bytes(data[:64]))
        if frame.content_size == zstandard.CONTENTSIZE_UNKNOWN:
            raise ProtocolError("a zstd frame must state its content size")
        if frame.content_size == 0:
            # zstandard looks at nothing behind an empty frame, and no message is empty.
            raise ProtocolError("an empty zstd frame is no message")
        if frame.content_size > cap_bytes or frame.content_size > max(RATIO_FREE_BYTES, max_ratio * len(data)):
            raise TooLarge(f"{len(data)} bytes claim to unpack to {frame.content_size}")
        if frame.window_size > max(ZSTD_WINDOW_BYTES, 1024):
            raise TooLarge(f"zstd window of {frame.window_size} bytes")
        decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES)
        content = decompressor.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"not a zstd frame: {error}") from error
    if len(content) != frame.content_size:
        raise ProtocolError("a zstd frame holds another size than it states")
    return content
