"""Caps before decoding, one shape per message, and compressed bodies that cannot grow without end."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zstandard

from swarm.errors import ProtocolError, TooLarge
from swarm.net.wire import (
    RATIO_FREE_BYTES,
    ZSTD_WINDOW_BYTES,
    compress,
    decode,
    decompress,
    digest,
    encode,
    stated_size,
)
from swarm.rollout.messages import HeldSamples, LeaseRequest, Release
from swarm.types import NodeId, VersionId
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


def test_a_message_is_an_array_without_keys() -> None:
    assert encode(v(3, incarnation=1)) == b"\x92\x01\x03"


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
        b"\x92\x01",
        b"\x91\x01",
        b"\x92\x01\xff",
        b"\x92\x01\xa1x",
        encode(v(1)) + b"\0",
        encode(v(1)) * 2,
        msgspec.msgpack.encode({"incarnation": 0, "version": 1}),
        msgspec.msgpack.encode([0, 2**53 + 1]),
        msgspec.msgpack.encode([0, 1.5]),
        msgspec.msgpack.encode(None),
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


@pytest.mark.parametrize(
    "bomb",
    [
        b"\x80" * 65_536,
        b"\xdc\xff\xff" + b"\x80" * 65_533,
        b"\x91" * 65_536,
        b"\x81\xa1a" * 21_845,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xde\x7f\xff" + b"\xa1a\x01" * 21_844,
    ],
    ids=["maps", "array of maps", "nested arrays", "nested maps", "huge array", "huge map", "duplicate keys"],
)
@pytest.mark.parametrize("kind", [type(lease()), LeaseRequest, VersionId])
def test_64_kib_of_hostile_msgpack_are_refused_with_flat_memory(bomb: bytes, kind: type[object]) -> None:
    assert peak_bytes(lambda: decode(bomb, kind, cap_bytes=65_536)) < 64 * 1024


def test_what_was_compressed_comes_back() -> None:
    for content in (b"x", b"abc" * 10_000, bytes(range(256)) * 40):
        assert unpack(compress(content)) == content


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


def test_a_size_is_read_from_the_header_alone() -> None:
    assert stated_size(compress(bytes(300))[:20]) == 300
    for junk in (b"", b"junk", zstandard.ZstdCompressor(write_content_size=False).compress(b"abc")):
        with pytest.raises(ProtocolError):
            stated_size(junk)


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


def test_an_unknown_size_is_refused() -> None:
    body = zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 100)
    with pytest.raises(ProtocolError, match="state its content size"):
        unpack(body)


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
from swarm.net.wire import Message
class Outer(Message):
    inner: Inner
class Inner(Message):
    value: dict[str, list[tuple[int, ...]]]
"""

FIRST_USES = """
import sys, types
from threading import Barrier
from concurrent.futures import ThreadPoolExecutor
from swarm.net.wire import decode, encode

sys.setswitchinterval(1e-6)
with ThreadPoolExecutor(4) as threads:
    for number in range(50):
        module = sys.modules[f"nested{number}"] = types.ModuleType(f"nested{number}")
        exec(sys.argv[1], module.__dict__)
        sent, together = module.Outer(inner=module.Inner(value={"a": [(1,)]})), Barrier(4)
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
