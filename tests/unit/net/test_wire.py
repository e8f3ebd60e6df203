"""Caps before decoding, one shape per message, and compressed bodies that cannot grow without end."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgpack
import msgspec
import pytest
import zstandard
from msgspec import structs

from swarm.broadcast.version.manifest import ChunkTable
from swarm.errors import ProtocolError, TooLarge
from swarm.gossip.records import GOSSIP_BODY_BYTES, Exchange
from swarm.rollout.messages import (
    LEASE_REPLY_BYTES,
    Beat,
    HeldSamples,
    LeaseReply,
    LeaseRequest,
    Release,
    Submission,
)
from swarm.types import MAX_TOKENS, GroupId, NodeId, VersionId
from swarm.wire import (
    BYTES_PER_OBJECT,
    CONTROL_BODY_BYTES,
    RATIO_FREE_BYTES,
    WIDE_BYTES,
    ZSTD_WINDOW_BYTES,
    Message,
    compress,
    decode,
    decompress,
    digest,
    encode,
    stated_size,
)
from tests.builders import lease, v

CAP = 1 << 20


def peak_bytes(call: Callable[[], object]) -> int:
    """Most memory that Python and its extensions held for `call`, which must raise ProtocolError."""
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def unpack(data: bytes, *, cap_bytes: int = CAP, max_ratio: float = 1e9) -> bytes:
    return decompress(data, cap_bytes=cap_bytes, max_ratio=max_ratio)


def test_a_body_over_its_cap_is_refused_before_it_is_decoded() -> None:
    junk = b"\xc1" * 11
    with pytest.raises(TooLarge, match="11 bytes is over the cap of 10"):
        decode(junk, VersionId, cap_bytes=10)
    with pytest.raises(ProtocolError, match="not a VersionId"):
        decode(junk, VersionId, cap_bytes=11)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x91\x01",
        b"\x92\x01\xa1x",
        encode(v(1)) * 2,
        msgspec.msgpack.encode({"incarnation": 0, "version": 1}),
        msgspec.msgpack.encode([0, 2**53 + 1]),
        msgspec.msgpack.encode([0, 1.5]),
    ],
    ids=lambda body: body.hex() or "empty",
)
def test_anything_but_exactly_one_message_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(body, VersionId, cap_bytes=100)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0])
def test_no_number_outside_its_range_passes(number: float) -> None:
    body = msgspec.msgpack.encode(["node", [0, 0], 1, number])
    with pytest.raises(ProtocolError):
        decode(body, LeaseRequest, cap_bytes=1000)


BOMBS = {
    "maps": b"\x80" * 65_536,
    "array of maps": b"\xdc\xff\xff" + b"\x80" * 65_533,
    "nested arrays": b"\x91" * 65_536,
    "nested maps": b"\x81\xa1a" * 21_845,
    "huge array": b"\xdd\xff\xff\xff\xff",
    "huge map": b"\xdf\xff\xff\xff\xff",
    "duplicate keys": b"\xde\x7f\xff" + b"\xa1a\x01" * 21_844,
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
@pytest.mark.parametrize("kind", [type(lease()), LeaseRequest, VersionId])
def test_64_kib_of_hostile_msgpack_are_refused_with_flat_memory(bomb: bytes, kind: type[Message]) -> None:
    assert peak_bytes(lambda: decode(bomb, kind, cap_bytes=65_536)) < 64 * 1024


UNITS = {
    "nils": (b"\xc0", 1),
    "empty arrays": (b"\x90", 1),
    "arrays of one": (b"\x91\xc0", 2),
    "empty strings": (b"\xa0", 1),
    "short strings": (b"\xa2ab", 1),
    "short wide strings": (msgpack.packb("x" * 27 + "\U0001f600"), 1),
    "wide strings": (msgpack.packb("x" * 8000 + "\U0001f600"), 1 + 8000 // WIDE_BYTES),
    "bytes": (b"\xc4\x01x", 1),
    "huge integers": (b"\xcf" + b"\xff" * 8, 1),
    "floats": (b"\xcb" + bytes(8), 1),
    "samples": (msgpack.packb(["t1", [0]]), 4),
    "extensions": (b"\xd4\x01x", 1),
    "timestamps": (b"\xd6\xff" + bytes(4), 1),
    "maps": (b"\x81\xc0\xc0", 1),
}
"""What a body may be full of, and how many objects each counts as."""


def bombs(unit: bytes, counts: int, kind: type[Message], cap_bytes: int) -> Iterator[bytes]:
    """Bodies of just under the cap: all units, as many as may be and bytes, and a header that promises all of them."""
    most = max(kind.max_objects, cap_bytes // BYTES_PER_OBJECT) // counts - 3
    for count in ((cap_bytes - 10) // len(unit), min(most, (cap_bytes - 15) // len(unit))):
        body = b"\xdd" + struct.pack(">I", count + 1) + unit * count
        padding = max(0, cap_bytes - len(body) - 5)
        yield body + b"\xc6" + struct.pack(">I", padding) + bytes(padding)
    yield b"\xdd" + struct.pack(">I", cap_bytes - 8) + unit


CAPS: dict[type[Message], int] = {
    ChunkTable: 1 << 20,
    Exchange: GOSSIP_BODY_BYTES,
    LeaseRequest: CONTROL_BODY_BYTES,
    LeaseReply: 1 << 20,
}


@pytest.mark.parametrize(("unit", "counts"), UNITS.values(), ids=UNITS)
@pytest.mark.parametrize("kind", CAPS)
def test_no_body_within_its_cap_takes_over_four_times_the_memory(kind: type[Message], unit: bytes, counts: int) -> None:
    """Leases, and questions that name what is held, are of many small objects: 80 bytes for each that they may have."""
    cap_bytes = CAPS[kind]
    most = max(4 * cap_bytes, cap_bytes + 80 * kind.max_objects)
    for bomb in bombs(unit, counts, kind, cap_bytes):
        assert len(bomb) <= cap_bytes
        assert peak_bytes(partial(decode, bomb, kind, cap_bytes=cap_bytes)) < most + 64 * 1024


def test_the_largest_bomb_of_rollouts_takes_less_than_four_times_its_size() -> None:
    """A span takes 6 bytes, and 200 when it is decoded."""
    spans = b"\xdc\x04\x00" + msgpack.packb([[0, 0], 0, 1]) * 1024
    rollout = b"\x96\xa1t\x00\xc4\x00\xc4\x00" + spans + msgpack.packb("stop")
    for count in (16, 128):
        body = b"\x92\xa1n\xdc" + struct.pack(">H", count) + (b"\x91" + rollout) * count
        if count == 16:
            assert len(decode(body, Submission, cap_bytes=8 << 20).answers[15].rollout.spans) == 1024
        else:
            assert peak_bytes(partial(decode, body, Submission, cap_bytes=8 << 20)) < 4 * len(body)


def test_the_largest_of_honest_messages_pass_their_caps() -> None:
    """A question that names 8192 held samples in groups of one, and a lease with the longest prompt."""
    held = tuple(HeldSamples(group_id=GroupId(f"t{i}"), indices=(i % 8,)) for i in range(8192))
    asked = LeaseRequest(node=NodeId("a1b2"), held=v(1), holding=held, capacity=1, wait_s=1.0)
    assert decode(encode(asked), LeaseRequest, cap_bytes=CONTROL_BODY_BYTES) == asked
    long = structs.replace(lease(), prompt_token_ids=tuple(range(70_000, 70_000 + MAX_TOKENS)))
    reply = LeaseReply(leases=(long,))
    assert decode(encode(reply), LeaseReply, cap_bytes=LEASE_REPLY_BYTES) == reply


@pytest.mark.parametrize("depth", [17, 5000])
def test_arrays_in_arrays_are_refused_at_a_depth_that_no_message_has(depth: int) -> None:
    for body in (b"\x91" * depth + b"\xc0", b"\x92\xc0" * depth + b"\xc0"):
        with pytest.raises(ProtocolError, match="17 deep"):
            decode(body, Beat, cap_bytes=CONTROL_BODY_BYTES)


def test_a_header_that_claims_too_much_is_refused_before_a_byte_is_allocated() -> None:
    bomb = compress(bytes(512 << 20))
    assert len(bomb) < 64 * 1024
    assert peak_bytes(lambda: unpack(bomb)) < 64 * 1024
    with pytest.raises(TooLarge):
        unpack(bomb)


def test_a_ratio_no_honest_body_has_is_refused() -> None:
    assert len(unpack(compress(bytes(1 << 19)))) == 1 << 19
    body = compress(bytes(2 * RATIO_FREE_BYTES))
    with pytest.raises(TooLarge, match="claim to unpack"):
        decompress(body, cap_bytes=4 * RATIO_FREE_BYTES, max_ratio=50)


def test_a_size_is_read_from_the_header_alone_and_has_to_be_there() -> None:
    assert stated_size(compress(bytes(300))[:20]) == 300
    unstated = zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 100)
    for junk in (b"", b"junk", unstated):
        with pytest.raises(ProtocolError):
            stated_size(junk)
    with pytest.raises(ProtocolError, match="state its content size"):
        unpack(unstated)


def lying_frame(stated: int, blocks: int) -> bytes:
    """A frame that states `stated` bytes and holds `blocks` run-length blocks of 128 KiB, four bytes each."""
    header = struct.pack("<I", zstandard.MAGIC_NUMBER) + bytes([0b1000_0000, 7 << 3]) + struct.pack("<I", stated)
    body = [struct.pack("<I", (i == blocks - 1) | 1 << 1 | (128 * 1024) << 3)[:3] + b"\0" for i in range(blocks)]
    return header + b"".join(body)


def test_a_frame_of_more_than_it_states_is_cut_off_before_it_fills_the_memory() -> None:
    honest = lying_frame(1 << 19, 4)
    assert unpack(honest) == bytes(1 << 19)
    # 4 KB that would become 128 MiB: over the network 8 MiB would become 256 GiB.
    assert peak_bytes(lambda: unpack(lying_frame(1 << 19, 1024))) < 4 << 20


def test_a_large_window_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=200 << 20)
    body = stream.compress(b"x" * 100)
    body += stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    assert zstandard.get_frame_parameters(body).window_size > ZSTD_WINDOW_BYTES
    with pytest.raises(TooLarge, match="window"):
        unpack(body, cap_bytes=1 << 30)


def test_exactly_one_whole_frame_with_something_in_it_is_taken() -> None:
    one = compress(b"x" * 1000)
    assert unpack(one) == b"x" * 1000
    for body in (one + one, one + b"junk", one[:-1], one[:5], b"", b"junk" * 20, compress(b"")):
        with pytest.raises(ProtocolError):
            unpack(body)


NESTED = """
from __future__ import annotations
from swarm.wire import Message
class Outer(Message):
    inner: Inner
class Inner(Message):
    value: list[list[tuple[int, ...]]]
"""

FIRST_USES = """
import sys, types
from threading import Barrier
from concurrent.futures import ThreadPoolExecutor
from swarm.wire import decode, encode

sys.setswitchinterval(1e-6)
with ThreadPoolExecutor(4) as threads:
    for number in range(50):
        module = sys.modules[f"nested{number}"] = types.ModuleType(f"nested{number}")
        exec(sys.argv[1], module.__dict__)
        sent, together = module.Outer(inner=module.Inner(value=[[(1,)]])), Barrier(4)
        def taken(_):
            together.wait()
            return decode(encode(sent), module.Outer, cap_bytes=100)
        assert list(threads.map(taken, range(4))) == [sent] * 4
"""


def test_threads_that_are_the_first_to_use_a_type_do_not_crash() -> None:
    """In a process of its own, since what it is about ends in a segmentation fault."""
    run = subprocess.run([sys.executable, "-c", FIRST_USES, NESTED], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]


def test_a_digest_is_blake3() -> None:
    assert digest(b"").hex().startswith("af1349b9f5f9a1a6a0404dea36dcc949")


def test_the_example_in_the_protocol_is_what_is_sent() -> None:
    sent = Release(node=NodeId("a1b2"), samples=(HeldSamples(group_id="t7", indices=(0, 300)),), forget=False)
    written = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
    _, _, example = written.partition("in 16 bytes:\n\n")
    block, _, _ = example.partition("\n\n")
    spelled = "".join(re.match(r" +((?:[0-9a-f]{2} )+)", line + " ")[1] for line in block.splitlines())  # type: ignore[index]
    assert bytes.fromhex(spelled) == encode(sent)
