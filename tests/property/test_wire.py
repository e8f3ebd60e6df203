"""Every message survives the wire, and no other bytes do worse than ProtocolError."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.broadcast.version.manifest import Head, open_head, open_layout, open_table, sign_head
from swarm.errors import ProtocolError
from swarm.wire import Message, compress, decode, decompress, digest, encode
from tests.builders import KEY, MIXED_LAYOUT, SWARM_OF_KEY, v
from tests.property.strategies import message_types, messages

CAP = 1 << 20
KINDS = message_types()
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def test_the_kinds_of_messages_are_all_here() -> None:
    names = {kind.__name__ for kind in KINDS}
    assert {"Lease", "Rollout", "Submission", "Head", "Layout", "ChunkTable", "Hello", "Sealed", "LeaseReply"} <= names
    assert len(KINDS) >= 25


@every_kind
@given(data=st.data())
def test_a_message_comes_back_as_it_was_and_msgspec_and_msgpack_read_and_write_it_alike(
    kind: type[Message], data: st.DataObject
) -> None:
    """So nodes of releases that wrote with msgspec understand, and so does a client in any language: arrays in field
    order, nothing else."""
    message = data.draw(messages(kind))
    body = encode(message)
    assert decode(body, kind, cap_bytes=CAP) == message
    assert encode(decode(body, kind, cap_bytes=CAP)) == body == msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(body, type=kind) == message
    assert isinstance(msgpack.unpackb(body), list)


@every_kind
@given(data=st.data())
def test_a_message_cut_short_or_followed_by_more_is_refused(kind: type[Message], data: st.DataObject) -> None:
    body = encode(data.draw(messages(kind)))
    cut = data.draw(st.integers(0, len(body) - 1))
    for other in (body[:cut], body + b"\0", body + body):
        with pytest.raises(ProtocolError):
            decode(other, kind, cap_bytes=CAP)


junk = st.binary(max_size=400)
bits = st.integers(min_value=0)


def with_flips(body: bytes, places: list[int]) -> bytes:
    flipped = bytearray(body)
    for place in places:
        at = place % (8 * len(body))
        flipped[at // 8] ^= 1 << at % 8
    return bytes(flipped)


@every_kind
@given(data=st.data(), flips=st.lists(bits, max_size=6), extra=junk)
def test_damaged_bytes_are_refused_or_are_another_message(
    kind: type[Message], data: st.DataObject, flips: list[int], extra: bytes
) -> None:
    body = encode(data.draw(messages(kind)))
    for damaged in (with_flips(body, flips), extra, extra + body, body + extra):
        try:
            assert isinstance(decode(damaged, kind, cap_bytes=CAP), kind)
        except ProtocolError:
            pass


HEAD = Head(
    swarm=SWARM_OF_KEY,
    learner_key=KEY.public_bytes,
    version=v(3),
    base=None,
    layout_digest=digest(b"layout"),
    layout_bytes=6,
    table_digest=digest(b"table"),
    table_bytes=5,
)
SEALED_HEAD = sign_head(HEAD, KEY)


@given(junk)
def test_no_junk_opens_as_anything(data: bytes) -> None:
    openers: list[Any] = [
        lambda: open_head(data, KEY.public_bytes),
        lambda: open_layout(data, HEAD),
        lambda: open_table(data, HEAD, MIXED_LAYOUT),
    ]
    for opener in openers:
        with pytest.raises(ProtocolError):
            opener()


@given(junk)
def test_junk_that_a_head_names_is_refused_or_makes_sense(data: bytes) -> None:
    """A learner's own objects are checked too: its key may be in bad hands."""
    nbytes = max(1, len(data))
    of_data = {"layout_digest": digest(data), "layout_bytes": nbytes, "table_digest": digest(data)}
    named = msgspec.structs.replace(HEAD, **of_data, table_bytes=nbytes)
    with pytest.raises(ProtocolError):
        open_table(data, named, MIXED_LAYOUT)
    with pytest.raises(ProtocolError):
        open_layout(data, named)


@given(st.lists(bits, min_size=1, max_size=4, unique_by=lambda bit: bit % (8 * len(SEALED_HEAD))))
def test_no_flipped_bits_of_a_head_pass(flips: list[int]) -> None:
    with pytest.raises(ProtocolError):
        open_head(with_flips(SEALED_HEAD, flips), KEY.public_bytes)


@given(junk, st.integers(1, 64))
def test_compressed_bytes_come_back_and_never_above_the_cap(data: bytes, repeat: int) -> None:
    content = b"!" + data * repeat
    body = compress(content)
    assert decompress(body, cap_bytes=len(content), max_ratio=1e9) == content
    with pytest.raises(ProtocolError):
        decompress(body, cap_bytes=len(content) - 1, max_ratio=1e9)


@given(junk, junk, st.lists(bits, max_size=4))
def test_damaged_frames_are_refused_or_stay_within_the_cap(content: bytes, extra: bytes, flips: list[int]) -> None:
    body = compress(content * 8)
    for damaged in (with_flips(body, flips), extra, body + extra, body[: len(body) // 2]):
        try:
            assert len(decompress(damaged, cap_bytes=4096, max_ratio=50)) <= 4096
        except ProtocolError:
            pass
