"""Bytes on the wire: typed msgpack with size caps, bounded zstd, content digests.

Every message is a frozen struct that is encoded as a msgpack array in field order, so no key can occur twice. msgpack
packs and unpacks, and msgspec checks that what was unpacked has the shape of the type (docs/decisions/0001). Before
unpacking, a pass over the body refuses one that would become far more objects than its type needs. A field may be added
at the end with a default; any other change raises PROTOCOL.
"""

from __future__ import annotations

from threading import Lock
from typing import Annotated, ClassVar, NewType, TypeVar

import msgpack
import msgspec
import zstandard
from blake3 import blake3

from swarm.errors import ProtocolError, TooLarge

PROTOCOL = 12  # Integer that both sides of a connection must agree on
PROTOCOL_HEADER = "Echo-Protocol"

CONTROL_BODY_BYTES = 256 * 1024
"""Largest control message. The longest is a question that names 8,192 held samples: 98 kB in groups of one."""

ROLLOUT_BODY_BYTES = 8 * 1024 * 1024  # Largest compressed body of rollouts

ROLLOUT_UNPACKED_BYTES = 32 * 1024 * 1024
"""Largest body of rollouts after decompression: 400 rollouts of 8,192 tokens at 9 bytes a token."""

ROLLOUT_MAX_RATIO = 50  # Real rollouts compress about twofold; a large body that claims more than this is a bomb

RATIO_FREE_BYTES = 4 * 1024 * 1024
"""Up to this size any ratio is allowed: rollouts of a policy that repeats one token compress a hundredfold."""

ZSTD_WINDOW_BYTES = 8 * 1024 * 1024  # Largest window that a decoder allocates for a peer
Digest = NewType("Digest", bytes)  # BLAKE3, 32 bytes
DigestField = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  # A digest inside a message

MAX_DEPTH = 16  # Of nested arrays; a submission has eight
MIN_OBJECTS = 256  # Allowed with any cap: the largest hello has 60

BYTES_PER_OBJECT = 64
"""One object is allowed for each of these many bytes of a cap. An object takes 72 bytes, or 200 as a string of 28 wide
characters, so an unpacked message takes less than four times the cap."""

WIDE_BYTES = 32  # A string with non-ASCII characters counts as one more object for each of these many bytes

SIZES = (
    *([1] * 128 + [0] * 16 + [1] * 16),  # Small numbers; maps; arrays
    *range(1, 33),  # Strings of up to 31 bytes
    *([1, 0, 1, 1] + [0] * 6 + [5, 9] + [2, 3, 5, 9] * 2 + [0] * 5),  # None, bools; bytes; floats, integers; extensions
    *([0] * 3 + [3, 5] + [0, 0] + [1] * 32),  # Strings; arrays; maps; small negative numbers
)
"""Size of an object by its first byte, of an array that of its header. 0: the first byte does not tell, or no message
has such an object."""

ARRAYS = {**dict.fromkeys(range(0x90, 0xA0), 0), 0xDC: 2, 0xDD: 4}  # Bytes that state how many objects follow
STRINGS = frozenset({0xD9, 0xDA, 0xDB})  # Those of 32 bytes and more
LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # Bytes that state a length, of bytes and strings
M = TypeVar("M", bound="Message")
_read: set[object] = set()
_reading = Lock()


class Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The base of every message between nodes. A type with many small objects allows more of them by `max_objects`."""

    max_objects: ClassVar[int] = MIN_OBJECTS


def digest(data: bytes | bytearray | memoryview) -> Digest:
    """Return the BLAKE3 of `data`."""
    return Digest(blake3(data).digest())


def encode(message: object) -> bytes:
    """Return `message` as msgpack bytes. Equal messages give equal bytes."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes, bytearray, memoryview)))
    return packed


def decode(data: bytes | memoryview, kind: type[M], *, cap_bytes: int) -> M:
    """Return `data` as a `kind`. Raise TooLarge over `cap_bytes`, and ProtocolError for anything but exactly one."""
    if len(data) > cap_bytes:
        raise TooLarge(f"{kind.__name__} of {len(data)} bytes is over the cap of {cap_bytes}")
    try:
        _refuse_bomb(data, min(len(data), max(kind.max_objects, cap_bytes // BYTES_PER_OBJECT)))
        unpacked = msgpack.unpackb(data, use_list=False)
        _read_type(kind)
        return msgspec.convert(unpacked, kind, builtin_types=(bytes,))
    except (ValueError, IndexError) as error:
        raise ProtocolError(f"not a {kind.__name__}: {error}") from error


def _refuse_bomb(data: bytes | memoryview, max_objects: int) -> None:
    """Raise ValueError for more than `max_objects`, for arrays deeper than MAX_DEPTH, and for types that no message
    has. msgpack allocates as many objects as an array's header promises, so those are counted."""
    at, left, promised = 0, 1, 1
    above: list[int] = []
    while left or above:
        if not left:
            left = above.pop()
            continue
        left -= 1
        first = data[at]
        size = SIZES[first] or _size(data, at)
        at += size
        if first in ARRAYS:
            above.append(left)
            wide = ARRAYS[first]
            left = int.from_bytes(data[at - wide : at], "big") if wide else first & 0x0F
            promised += left
        elif first in STRINGS and not bytes(data[at - size + 1 + LENGTHS[first] : at]).isascii():
            promised += size // WIDE_BYTES
        if promised > max_objects or len(above) > MAX_DEPTH:
            raise ValueError(f"{promised:,} objects, {len(above)} deep, where {max_objects:,} are allowed")


def _size(data: bytes | memoryview, at: int) -> int:
    """Return the size of the bytes or the string at `at`."""
    if (wide := LENGTHS.get(data[at])) is None:
        raise ValueError(f"no message has an object of type 0x{data[at]:02x}")
    return 1 + wide + int.from_bytes(data[at + 1 : at + 1 + wide], "big")


def _read_type(kind: type[Message]) -> None:
    """Have msgspec 0.22 read the fields of a type before its first use. It does so lazily, and another thread that uses
    the type meanwhile sees half of them and crashes, so this takes a lock."""
    if kind not in _read:
        with _reading:
            msgspec.msgpack.Decoder(kind)
            _read.add(kind)


def compress(data: bytes) -> bytes:
    """Return one zstd frame that states its content size."""
    return zstandard.ZstdCompressor(level=1, write_content_size=True).compress(data)


def stated_size(data: bytes | memoryview) -> int:
    """Return the content size in a zstd frame's header. Raise ProtocolError if there is no frame, or no size in it."""
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
            # zstandard ignores what follows an empty frame, and no message is empty.
            raise ProtocolError("an empty zstd frame is not a message")
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
