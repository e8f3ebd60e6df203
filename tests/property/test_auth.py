"""No bit of a signed exchange can change on the way, and the window agrees with a plain set."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import ProtocolError
from swarm.net.sessions import WINDOW, CounterWindow, ServerSessions, Unauthorized, ask_session, open_grant
from tests.builders import KEY, OTHER_KEY

NONCE = b"n" * 16
WISH = ask_session(KEY, server=OTHER_KEY.node_id, fingerprint=b"", nonce=NONCE)
GRANT = ServerSessions(OTHER_KEY, b"").open(WISH, now=0.0, session_id=b"i" * 16)


def flipped(data: bytes, place: int) -> bytes:
    altered = bytearray(data)
    altered[place // 8] ^= 1 << place % 8
    return bytes(altered)


@given(st.integers(0, 8 * len(WISH) - 1))
def test_no_flipped_bit_of_an_opening_passes(place: int) -> None:
    server = ServerSessions(OTHER_KEY, b"")
    with pytest.raises(Unauthorized):
        server.open(flipped(WISH, place), now=0.0, session_id=b"j" * 16)
    assert len(server) == 0


@given(st.integers(0, 8 * len(GRANT) - 1))
def test_no_flipped_bit_of_a_grant_passes(place: int) -> None:
    with pytest.raises(ProtocolError):
        open_grant(flipped(GRANT, place), KEY, server=OTHER_KEY.node_id, fingerprint=b"", nonce=NONCE)


@given(body=st.binary(max_size=60), path=st.text(st.characters(min_codepoint=33, max_codepoint=126)), data=st.data())
def test_no_flipped_bit_of_a_request_passes(body: bytes, path: str, data: st.DataObject) -> None:
    server = ServerSessions(OTHER_KEY, b"")
    grant = server.open(WISH, now=0.0, session_id=b"i" * 16)
    client = open_grant(grant, KEY, server=OTHER_KEY.node_id, fingerprint=b"", nonce=NONCE)
    header = client.header("POST", path, body)
    frame = base64.b64decode(header + "==")
    place = data.draw(st.integers(0, 8 * (len(frame) + len(body)) - 1))
    altered = flipped(frame + body, place)
    other = base64.b64encode(altered[: len(frame)]).rstrip(b"=").decode()
    with pytest.raises(Unauthorized):
        server.check(other, "POST", path, altered[len(frame) :], now=0.0)
    assert server.check(header, "POST", path, body, now=0.0) == KEY.node_id


@given(st.lists(st.integers(0, 4 * WINDOW) | st.integers(0, 2**64 - 1), max_size=60))
def test_the_window_agrees_with_a_set_of_all_that_was_used(counters: list[int]) -> None:
    window, used, highest = CounterWindow(), {0}, 0
    for counter in counters:
        fresh = counter not in used and counter > highest - WINDOW
        assert (window.fault(counter) is None) == fresh
        if fresh:
            window.use(counter)
            used.add(counter)
            highest = max(highest, counter)
        assert window.used < 1 << WINDOW
