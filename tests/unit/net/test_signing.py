"""Who said something, and what exactly."""

from __future__ import annotations

import pytest

from swarm.broadcast.version.manifest import HEAD_CONTEXT
from swarm.errors import ProtocolError, TooLarge
from swarm.net.signing import SigningKey, node_id_of, swarm_id_of, unseal
from swarm.node.hello import CARD_CONTEXT
from tests.builders import KEY, OTHER_KEY

SEALED = KEY.seal("head", b"the body")


def opened(sealed: bytes, *, context: str = "head", key: SigningKey = KEY, cap_bytes: int = 1024) -> bytes:
    return unseal(context, sealed, key.public_bytes, cap_bytes=cap_bytes)


def test_what_was_sealed_is_read() -> None:
    assert opened(SEALED) == b"the body"
    assert opened(KEY.seal("head", b"")) == b""


def test_another_key_opens_nothing() -> None:
    with pytest.raises(ProtocolError, match="signature of this head"):
        opened(SEALED, key=OTHER_KEY)


def test_a_lease_never_passes_for_a_head() -> None:
    assert HEAD_CONTEXT != CARD_CONTEXT
    with pytest.raises(ProtocolError):
        opened(KEY.seal(CARD_CONTEXT, b"the body"), context=HEAD_CONTEXT)


def test_context_and_body_cannot_trade_bytes() -> None:
    with pytest.raises(ProtocolError):
        opened(KEY.seal("hea", b"d\0the body"), context="head")


def test_no_flipped_bit_passes() -> None:
    for place in range(8 * len(SEALED)):
        flipped = bytearray(SEALED)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(ProtocolError):
            opened(bytes(flipped))


def test_a_cap_is_checked_before_the_signature() -> None:
    with pytest.raises(TooLarge):
        opened(SEALED, cap_bytes=len(SEALED) - 1)
    assert opened(SEALED, cap_bytes=len(SEALED)) == b"the body"


@pytest.mark.parametrize("key", [b"", b"\0" * 31, b"\xff" * 32, b"\0" * 32], ids=["none", "short", "high", "zero"])
def test_a_key_that_is_no_key_opens_nothing(key: bytes) -> None:
    with pytest.raises(ProtocolError):
        unseal("head", SEALED, key, cap_bytes=1024)


def test_a_key_survives_its_bytes() -> None:
    again = SigningKey.from_bytes(KEY.secret_bytes())
    assert (again.public_bytes, again.node_id) == (KEY.public_bytes, KEY.node_id)
    assert SigningKey.generate().node_id != SigningKey.generate().node_id


def test_ids_are_stable_short_and_not_the_same_for_node_and_swarm() -> None:
    assert node_id_of(KEY.public_bytes) == "224ce00fbeabc3287b4daa86a8e22222"
    assert swarm_id_of(KEY.public_bytes) == "1de06af93e421dc4b5e0b54dafa366c7"
    assert KEY.node_id == node_id_of(KEY.public_bytes) != node_id_of(OTHER_KEY.public_bytes)
