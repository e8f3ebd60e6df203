"""Who said something, and what exactly."""

from __future__ import annotations

import pytest

from swarm.errors import ProtocolError, TooLarge
from swarm.net.signing import SigningKey, node_id_of, swarm_id_of, unseal
from swarm.node.hello import CARD_CONTEXT
from tests.builders import KEY, OTHER_KEY

SEALED = KEY.seal("head", b"the body")


def opened(sealed: bytes, *, key: SigningKey = KEY, cap_bytes: int = 1024) -> bytes:
    return unseal("head", sealed, key.public_bytes, cap_bytes=cap_bytes)


@pytest.mark.parametrize(
    ("sealed", "key"),
    [
        (SEALED, OTHER_KEY),
        (KEY.seal(CARD_CONTEXT, b"the body"), KEY),
        (KEY.seal("hea", b"d\0the body"), KEY),
    ],
    ids=["another key", "another context", "context and body cannot trade bytes"],
)
def test_what_somebody_else_or_something_else_signed_opens_nothing(sealed: bytes, key: SigningKey) -> None:
    with pytest.raises(ProtocolError, match="signature of this head"):
        opened(sealed, key=key)


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


def test_ids_are_stable_short_and_not_the_same_for_node_and_swarm() -> None:
    assert node_id_of(KEY.public_bytes) == "224ce00fbeabc3287b4daa86a8e22222"
    assert swarm_id_of(KEY.public_bytes) == "1de06af93e421dc4b5e0b54dafa366c7"
    assert KEY.node_id == node_id_of(KEY.public_bytes) != node_id_of(OTHER_KEY.public_bytes)
