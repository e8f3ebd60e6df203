"""Sessions and signed requests: what passes, what does not, and that nothing grows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from swarm.errors import ProtocolError
from swarm.net.sessions import (
    IDLE_S,
    MAX_SESSIONS_PER_NODE,
    OPEN_CONTEXT,
    WINDOW,
    ClientSession,
    CounterWindow,
    OpenSession,
    ServerSessions,
    Unauthorized,
    ask_session,
    open_grant,
)
from swarm.net.signing import SigningKey
from swarm.node.hello import CARD_CONTEXT
from swarm.types import NodeId
from swarm.wire import encode
from tests.builders import KEY, OTHER_KEY

SERVER = OTHER_KEY
CERTIFICATE = b"c" * 32
NONCE = b"n" * 16
POST = ("POST", "/v1/beat?x=1", b"the body")

_ids = count(1)


def sessions(*, key: SigningKey = SERVER, fingerprint: bytes = CERTIFICATE) -> ServerSessions:
    return ServerSessions(key, fingerprint)


def wish(key: SigningKey = KEY, *, server: NodeId = SERVER.node_id, fingerprint: bytes = CERTIFICATE) -> bytes:
    return ask_session(key, server=server, fingerprint=fingerprint, nonce=NONCE)


def opened(server: ServerSessions, key: SigningKey = KEY, *, now: float = 0.0) -> ClientSession:
    grant = server.open(wish(key), now=now, session_id=next(_ids).to_bytes(16, "big"))
    return open_grant(grant, key, server=SERVER.node_id, fingerprint=CERTIFICATE, nonce=NONCE)


def refused(server: ServerSessions, reason: str, act: Callable[[], object]) -> None:
    """`act` is refused for `reason`, and counted."""
    before = server.refused[reason]
    with pytest.raises(Unauthorized) as caught:
        act()
    assert server.refused[reason] == before + 1, server.refused
    assert "\n" not in str(caught.value)


def sealed_by_key(context: str, key: SigningKey) -> bytes:
    """A wish in the name of `key`, sealed by KEY."""
    named = OpenSession(key=key.public_bytes, server=SERVER.node_id, fingerprint=CERTIFICATE, nonce=NONCE)
    return KEY.seal(context, encode(named))


WISHES = {
    "other-server": (wish(server=KEY.node_id), "other_server"),
    "plain": (wish(fingerprint=b""), "other_certificate"),
    "certificate": (wish(fingerprint=b"d" * 32), "other_certificate"),
    "context": (sealed_by_key(CARD_CONTEXT, KEY), "bad_open"),
    "another's-key": (sealed_by_key(OPEN_CONTEXT, SERVER), "bad_open"),
    "empty": (b"", "bad_open"),
    "large": (b"x" * 10_000, "bad_open"),
}


@pytest.mark.parametrize(("sealed", "reason"), WISHES.values(), ids=WISHES)
def test_no_session_for_whoever_is_not_proven_or_means_another_server(sealed: bytes, reason: str) -> None:
    server = sessions()
    refused(server, reason, lambda: server.open(sealed, now=0.0, session_id=b"i" * 16))
    assert len(server) == 0


def test_a_client_takes_a_grant_of_its_own_server_and_nonce_alone() -> None:
    grant = sessions().open(wish(), now=0.0, session_id=b"i" * 16)
    impostor = ServerSessions(KEY, CERTIFICATE).open(wish(server=KEY.node_id), now=0.0, session_id=b"i" * 16)
    third = SigningKey.generate()
    for data, key, nonce in ((impostor, KEY, NONCE), (grant, KEY, b"m" * 16), (grant, third, NONCE), (b"", KEY, NONCE)):
        with pytest.raises(ProtocolError):
            open_grant(data, key, server=SERVER.node_id, fingerprint=CERTIFICATE, nonce=nonce)


@pytest.mark.parametrize(
    "altered",
    [
        ("GET", "/v1/beat?x=1", b"the body"),
        ("POST", "/v1/release?x=1", b"the body"),
        ("POST", "/v1/beat?x=2", b"the body"),
        ("POST", "/v1/beat?x=1", b""),
    ],
    ids=["method", "path", "query", "body"],
)
def test_an_altered_request_is_refused_and_uses_nothing_up(altered: tuple[str, str, bytes]) -> None:
    server = sessions()
    header = opened(server).header(*POST)
    refused(server, "bad_signature", lambda: server.check(header, *altered, now=0.0))
    assert server.check(header, *POST, now=0.0) == KEY.node_id


@pytest.mark.parametrize(
    "elsewhere",
    [sessions(key=SigningKey.from_bytes(b"3" * 32)), sessions(fingerprint=b"d" * 32), sessions(fingerprint=b"")],
    ids=["server", "certificate", "plain"],
)
def test_a_request_is_worth_nothing_on_another_server(elsewhere: ServerSessions) -> None:
    """Even one that gave out the same session id to the same client."""
    here = sessions()
    grant = here.open(wish(), now=0.0, session_id=b"i" * 16)
    client = open_grant(grant, KEY, server=SERVER.node_id, fingerprint=CERTIFICATE, nonce=NONCE)
    there = wish(server=elsewhere._key.node_id, fingerprint=elsewhere._fingerprint)
    elsewhere.open(there, now=0.0, session_id=b"i" * 16)
    header = client.header(*POST)
    refused(elsewhere, "bad_signature", lambda: elsewhere.check(header, *POST, now=0.0))


def test_a_request_signed_by_another_key_in_a_foreign_session_is_refused() -> None:
    server = sessions()
    server.open(wish(), now=0.0, session_id=b"i" * 16)
    thief = ClientSession(OTHER_KEY, session=b"i" * 16, server=SERVER.node_id, fingerprint=CERTIFICATE)
    refused(server, "bad_signature", lambda: server.check(thief.header(*POST), *POST, now=0.0))


def test_a_replayed_request_is_refused() -> None:
    server = sessions()
    header = opened(server).header(*POST)
    server.check(header, *POST, now=0.0)
    refused(server, "replayed", lambda: server.check(header, *POST, now=0.0))
    refused(server, "replayed", lambda: server.check_header(header, now=0.0))


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (None, "unsigned"),
        ("!" * 118, "bad_header"),
        ("\u00fc" * 118, "bad_header"),
        ("A" * 117, "bad_header"),
        ("A" * 5000, "bad_header"),
        ("A" * 118, "unknown_session"),
    ],
    ids=["none", "signs", "umlauts", "short", "long", "zeros"],
)
def test_what_is_no_header_is_refused_before_any_signature_is_looked_at(header: str | None, reason: str) -> None:
    server = sessions()
    refused(server, reason, lambda: server.check(header, *POST, now=0.0))
    refused(server, reason, lambda: server.check_header(header, now=0.0))


def faults(window: CounterWindow, *counters: int) -> list[str | None]:
    return [window.fault(counter) for counter in counters]


def test_a_window_that_moves_remembers_what_is_still_in_it_and_a_leap_forgets_all() -> None:
    window = CounterWindow()
    for counter in (1, 3, WINDOW):
        window.use(counter)
    assert faults(window, 0, 1, 2, 3, WINDOW) == ["too_old", "replayed", None, "replayed", "replayed"]
    window.use(WINDOW + 2)
    assert faults(window, 2, 3, 4, WINDOW + 1) == ["too_old", "replayed", None, None]
    window.use(4)
    assert faults(window, 3, 4, 5) == ["replayed", "replayed", None]
    for counter in (9 + 2 * WINDOW, 2**63, 2**64 - 1):
        window.use(counter)
        assert window.used == 1, "it takes no memory"
        assert faults(window, counter, counter - 1, 7) == ["replayed", None, "too_old"]


def test_a_node_has_four_sessions_and_the_oldest_goes_first() -> None:
    server = sessions()
    clients = [opened(server, now=float(i)) for i in range(MAX_SESSIONS_PER_NODE + 1)]
    assert len(server) == MAX_SESSIONS_PER_NODE
    refused(server, "unknown_session", lambda: server.check(clients[0].header(*POST), *POST, now=9.0))
    for client in clients[1:]:
        server.check(client.header(*POST), *POST, now=9.0)


def test_a_recorded_opening_sent_again_does_not_push_out_the_session_in_use() -> None:
    server = sessions()
    client = opened(server)
    server.check(client.header(*POST), *POST, now=0.0)
    for _ in range(10 * MAX_SESSIONS_PER_NODE):
        opened(server)
    assert server.check(client.header(*POST), *POST, now=0.0) == KEY.node_id


def test_a_flood_of_new_sessions_is_bounded_and_spares_those_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.net.sessions.MAX_SESSIONS", 16)
    server = sessions()
    client = opened(server)
    server.check(client.header(*POST), *POST, now=0.0)
    for _ in range(100):
        opened(server, SigningKey.generate())
        assert len(server) <= 16
    assert len(server._of_node) == 16
    assert server.check(client.header(*POST), *POST, now=0.0) == KEY.node_id


def test_a_table_full_of_sessions_in_use_loses_the_one_longest_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.net.sessions.MAX_SESSIONS", 3)
    server = sessions()
    clients = [opened(server, SigningKey.generate()) for _ in range(3)]
    for client in (*clients, clients[0]):
        server.check(client.header(*POST), *POST, now=0.0)
    newcomer = opened(server)
    refused(server, "unknown_session", lambda: server.check(clients[1].header(*POST), *POST, now=0.0))
    for client in (clients[0], clients[2], newcomer):
        server.check(client.header(*POST), *POST, now=0.0)


def test_an_idle_session_is_forgotten_and_a_used_one_is_not() -> None:
    server = sessions()
    idle, busy = opened(server), opened(server, OTHER_KEY)
    server.check(busy.header(*POST), *POST, now=IDLE_S - 1)
    refused(server, "unknown_session", lambda: server.check(idle.header(*POST), *POST, now=IDLE_S))
    assert len(server) == 1
    server.check(busy.header(*POST), *POST, now=IDLE_S)
    refused(server, "unknown_session", lambda: server.check(busy.header(*POST), *POST, now=2 * IDLE_S))
    assert (len(server), server._of_node) == (0, {})
