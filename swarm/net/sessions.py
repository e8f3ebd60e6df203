"""Who sends a request: sessions that a server grants, and requests that are signed within them.

    client                                             server
    OpenSession, sealed: my key, whom I call,    ->    is it I, and my certificate? a place in the table
        the certificate I saw, a nonce
                                                 <-    SessionGranted, sealed: my key, the nonce, a session id
    every request: session, counter, signature   ->    known session, fresh counter, then the signature

The signature covers session, counter, the server's id and certificate, method, path with query, and the body's digest.
So a recorded request is worthless a second time, on another server, or with one bit changed. Sessions live only in the
server's memory and end with it, so nothing signed before a restart is valid after it, and no clocks are compared. Pure:
`now` (monotonic seconds) and randomness are arguments.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import msgspec

from swarm.errors import ProtocolError
from swarm.net.signing import PublicKeyField, Sealed, SigningKey, node_id_of, unseal, verify
from swarm.types import Id, NodeId
from swarm.wire import Message, decode, digest, encode

OPEN_CONTEXT = "open session"
GRANT_CONTEXT = "session granted"
REQUEST_CONTEXT = "request"
AUTH_HEADER = "Echo-Auth"  # Session, counter and signature of a request: 118 characters of base64 without padding
SESSION_MESSAGE_BYTES = 512  # Largest sealed OpenSession or SessionGranted; they take about 190
SESSION_ID_BYTES = 16
NONCE_BYTES = 16  # 128 random bits: nobody guesses one, and none comes twice
WINDOW = 1024  # Counters below the highest that may still arrive: far more than the 8 requests a client has under way
MAX_SESSIONS = 8192  # Sessions of one server, about 0.5 kB each: two for every node of the largest swarm
MAX_SESSIONS_PER_NODE = 4  # A node needs one; a second while it restarts. More would let one key fill the table.
IDLE_S = 600.0  # An unused session is forgotten after this time; its client is answered 401 and opens another one
_FRAME = struct.Struct(f">{SESSION_ID_BYTES}sQ64s")
_WINDOW_MASK = (1 << WINDOW) - 1

SessionId = Annotated[bytes, msgspec.Meta(min_length=SESSION_ID_BYTES, max_length=SESSION_ID_BYTES)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Fingerprint = Annotated[bytes, msgspec.Meta(max_length=32)]
Self = TypeVar("Self", "OpenSession", "SessionGranted")


class Unauthorized(ProtocolError):
    """A request's sender is not proven. If there is a remedy, it is to open a new session."""


class OpenSession(Message, frozen=True):
    """A client's request for a session, sealed with `key`. `fingerprint` is empty over plain HTTP."""

    key: PublicKeyField
    server: Id
    fingerprint: Fingerprint
    nonce: Nonce


class SessionGranted(Message, frozen=True):
    """The server's answer, sealed with its `key`, so that the client knows who answered, over plain HTTP too."""

    key: PublicKeyField
    node: Id
    nonce: Nonce
    session: SessionId


class Request(Message, frozen=True):
    """What a request's signature covers. It is never sent: both sides build it from what they see."""

    session: SessionId
    counter: int
    server: Id
    fingerprint: Fingerprint
    method: str
    path: str
    body_digest: bytes


# -- the client's side ---------------------------------------------------------------------------------------


class ClientSession:
    """One session with one server. Each header is for one request; a request that is sent again needs a new one."""

    def __init__(self, key: SigningKey, *, session: bytes, server: NodeId, fingerprint: bytes) -> None:
        self._key = key
        self._session = session
        self._server = server
        self._fingerprint = fingerprint
        self._counter = 0

    def header(self, method: str, path: str, body: bytes) -> str:
        """Return the value of AUTH_HEADER for this request. `path` includes its query, exactly as it is sent."""
        self._counter += 1
        request = Request(
            session=self._session,
            counter=self._counter,
            server=self._server,
            fingerprint=self._fingerprint,
            method=method,
            path=path,
            body_digest=digest(body),
        )
        signature = self._key.sign(REQUEST_CONTEXT, encode(request))
        framed = _FRAME.pack(self._session, self._counter, signature)
        return base64.b64encode(framed).rstrip(b"=").decode()


def ask_session(key: SigningKey, *, server: NodeId, fingerprint: bytes, nonce: bytes) -> bytes:
    """Return a sealed OpenSession for the server with this id and certificate."""
    wish = OpenSession(key=key.public_bytes, server=server, fingerprint=fingerprint, nonce=nonce)
    return key.seal(OPEN_CONTEXT, encode(wish))


def open_grant(data: bytes, key: SigningKey, *, server: NodeId, fingerprint: bytes, nonce: bytes) -> ClientSession:
    """Return the session that `server` granted for this nonce. Raise ProtocolError for any other answer."""
    grant = _open_self_signed(GRANT_CONTEXT, data, SessionGranted)
    if node_id_of(grant.key) != server:
        raise ProtocolError(f"node {node_id_of(grant.key)} answered at the address of {server}")
    if grant.nonce != nonce or grant.node != key.node_id:
        raise ProtocolError("the session that was granted answers another request")
    return ClientSession(key, session=grant.session, server=server, fingerprint=fingerprint)


# -- the server's side ---------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class CounterWindow:
    """Used counters: the highest, and one bit for each of the WINDOW up to it (bit 0 is the highest)."""

    highest: int = 0
    used: int = 1

    def fault(self, counter: int) -> str | None:
        """Return why `counter` may not be used, or None if it may."""
        behind = self.highest - counter
        if behind >= WINDOW:
            return "too_old"
        return "replayed" if behind >= 0 and self.used >> behind & 1 else None

    def use(self, counter: int) -> None:
        """Mark `counter`, which has no fault. A leap past the window never shifts by more than its size."""
        ahead = counter - self.highest
        if ahead > 0:
            self.used = (self.used << ahead if ahead < WINDOW else 0) & _WINDOW_MASK | 1
            self.highest = counter
        else:
            self.used |= 1 << -ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClaim:
    """Whose request this is, going by its header. `proven` means that the session has carried a valid request before,
    so its opener has the node's key."""

    session: bytes
    node: NodeId
    proven: bool


@dataclass(slots=True, kw_only=True)
class _Granted:
    key: bytes
    node: NodeId
    touched: float
    window: CounterWindow = field(default_factory=CounterWindow)


class ServerSessions:
    """All sessions of one server. `refused` counts by reason.

    A session that has carried no valid request yet is dropped before any that has. An attacker who recorded an
    OpenSession can send it again, and must not push out its owner's session with it.
    """

    def __init__(self, key: SigningKey, fingerprint: bytes) -> None:
        self._key = key
        self._fingerprint = fingerprint
        self._new: OrderedDict[bytes, _Granted] = OrderedDict()
        self._proven: OrderedDict[bytes, _Granted] = OrderedDict()
        self._of_node: dict[NodeId, list[bytes]] = {}
        self.refused: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._new) + len(self._proven)

    def open(self, sealed: bytes, *, now: float, session_id: bytes) -> bytes:
        """Return the sealed answer to an OpenSession. Raise Unauthorized if that is for another server or not signed by
        the key in it."""
        wish = self._admit(sealed)
        node = node_id_of(wish.key)
        self._expire(now)
        held = self._of_node.get(node, [])
        if len(held) >= MAX_SESSIONS_PER_NODE:
            self._drop(min(held, key=lambda session: session in self._proven))
        elif len(self) >= MAX_SESSIONS:
            self._drop(next(iter(self._new or self._proven)))
        self._new[session_id] = _Granted(key=wish.key, node=node, touched=now)
        self._of_node.setdefault(node, []).append(session_id)
        grant = SessionGranted(key=self._key.public_bytes, node=node, nonce=wish.nonce, session=session_id)
        return self._key.seal(GRANT_CONTEXT, encode(grant))

    def check_header(self, header: str | None, *, now: float) -> SessionClaim:
        """Say whose header this is. Raise Unauthorized if no body could make it valid. This is cheap: call it before
        reading a body."""
        session, _, _, granted = self._find(header, now)
        return SessionClaim(session=session, node=granted.node, proven=session in self._proven)

    def check(self, header: str | None, method: str, path: str, body: bytes, *, now: float) -> NodeId:
        """Return the node that signed this request, and use the request up. Raise Unauthorized for any other request.

        The counter is marked only once the signature is verified: a forger cannot use up counters of others.
        """
        session, counter, signature, granted = self._find(header, now)
        request = Request(
            session=session,
            counter=counter,
            server=self._key.node_id,
            fingerprint=self._fingerprint,
            method=method,
            path=path,
            body_digest=digest(body),
        )
        try:
            verify(REQUEST_CONTEXT, encode(request), signature, granted.key)
        except ProtocolError as error:
            raise self._refuse("bad_signature", "this request is not what its sender signed") from error
        granted.window.use(counter)
        granted.touched = now
        self._new.pop(session, None)
        self._proven[session] = granted
        self._proven.move_to_end(session)
        return granted.node

    def _admit(self, sealed: bytes) -> OpenSession:
        try:
            wish = _open_self_signed(OPEN_CONTEXT, sealed, OpenSession)
        except ProtocolError as error:
            raise self._refuse("bad_open", f"no session: {error}") from error
        if wish.server != self._key.node_id:
            raise self._refuse(
                "other_server", f"this is node {self._key.node_id}, not {wish.server}: say hello to learn its id"
            )
        if wish.fingerprint != self._fingerprint:
            raise self._refuse("other_certificate", "you saw another certificate than this node's: someone is between")
        return wish

    def _find(self, header: str | None, now: float) -> tuple[bytes, int, bytes, _Granted]:
        if header is None:
            raise self._refuse("unsigned", f"sign this request: open a session and send {AUTH_HEADER}")
        session, counter, signature = self._parse(header)
        self._expire(now)
        granted = self._proven.get(session) or self._new.get(session)
        if granted is None:
            raise self._refuse("unknown_session", "this session is not known (any more): open a new one")
        if (fault := granted.window.fault(counter)) is not None:
            raise self._refuse(
                fault, f"counter {counter} of this session was used or is too old: sign the request again"
            )
        return session, counter, signature, granted

    def _parse(self, header: str) -> tuple[bytes, int, bytes]:
        try:
            framed = base64.b64decode(header + "=" * (-len(header) % 4), validate=True)
            session, counter, signature = _FRAME.unpack(framed)
        except (ValueError, binascii.Error, struct.error) as error:
            raise self._refuse("bad_header", f"{AUTH_HEADER} is not a session, counter and signature") from error
        return session, counter, signature

    def _refuse(self, reason: str, text: str) -> Unauthorized:
        self.refused[reason] += 1
        return Unauthorized(text)

    def _expire(self, now: float) -> None:
        """Forget sessions that were idle for too long. Both tables are in the order of `touched`."""
        for table in (self._new, self._proven):
            while table and now - table[first := next(iter(table))].touched >= IDLE_S:
                self._drop(first)

    def _drop(self, session: bytes) -> None:
        granted = self._new.pop(session, None) or self._proven.pop(session)
        held = self._of_node[granted.node]
        held.remove(session)
        if not held:
            del self._of_node[granted.node]


def _open_self_signed(context: str, data: bytes, kind: type[Self]) -> Self:
    sealed = decode(data, Sealed, cap_bytes=SESSION_MESSAGE_BYTES)
    message = decode(sealed.body, kind, cap_bytes=SESSION_MESSAGE_BYTES)
    unseal(context, data, message.key, cap_bytes=SESSION_MESSAGE_BYTES)
    return message
