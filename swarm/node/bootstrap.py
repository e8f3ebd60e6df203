"""How a node finds its swarm: by the join line or bootstraps that its user named, or by peers that it remembers.

The hello is the first message between two nodes. It says which swarm this is, who its learner is, and who answers. A
join line (`echo1:...`) holds all that a newcomer has to trust, in one word that can be pasted: the swarm's id, the
learner's public key (the id follows from it, so a typing error shows), and addresses, each with the SHA-256 of the
certificate to expect there. A bare host is trusted on first use instead. Names are resolved at every try, to one of
their addresses at random, so that a name may stand for several nodes.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from swarm.errors import EchoError, PeerUnreachable, ProtocolError, UserError
from swarm.gossip.records import RECORD_BYTES
from swarm.net.client import (
    Busy,
    OtherCertificate,
    OtherEncryption,
    OtherProtocol,
    PeerClient,
    certificate_of,
)
from swarm.net.hosts import is_loopback, is_name
from swarm.net.signing import PublicKeyField, swarm_id_of
from swarm.node.hello import Heard, say_hello
from swarm.node.identity import write_privately
from swarm.settings import DEFAULT_PORT
from swarm.types import Address, Id, SwarmId
from swarm.wire import Message, decode, digest, encode

PREFIX = "echo1:"
AROUND = " \t\r\n\"'`<>()\u00a0\u200b\u2018\u2019\u201c\u201d"  # What stands around a line that was pasted
MAX_LINE_BYTES = 2048  # Room for eight addresses with names
CHECK_BYTES = 4


class JoinLine(Message, frozen=True):
    """Whom to trust, and which addresses to try."""

    swarm: Id
    learner_key: PublicKeyField
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(min_length=1, max_length=8)]


def write_join_line(line: JoinLine) -> str:
    body = encode(line)
    return PREFIX + base64.urlsafe_b64encode(body + digest(body)[:CHECK_BYTES]).decode().rstrip("=")


def read_join_line(text: str) -> JoinLine:
    """Return the join line in `text`. Raise UserError if it was cut or altered."""
    damaged = UserError("this join line is damaged: copy the whole line that `lead` printed")
    code = text.strip().removeprefix(PREFIX)
    try:
        data = base64.b64decode(code + "=" * (-len(code) % 4), altchars=b"-_", validate=True)
        body, check = data[:-CHECK_BYTES], data[-CHECK_BYTES:]
        line = decode(body, JoinLine, cap_bytes=MAX_LINE_BYTES)
    except (binascii.Error, ValueError, ProtocolError) as error:
        raise damaged from error
    if check != digest(body)[:CHECK_BYTES] or line.swarm != swarm_id_of(line.learner_key):
        raise damaged
    return line


CERTIFICATE_S = 4.0  # As long as for a connection alone (net/client.py)
RESOLVE_S = 10.0  # The system asks a second name server after 5 s
SAY_S = 4.5  # The user is told of a try that takes longer than this before it ends
HEAD_START_S = 0.25  # Of a bootstrap over the next one: enough for an answer from the other side of the earth
CLOCK_S = 120.0  # Clocks that differ by more than this are reported; an answer takes HELLO_S at most
MIN_FIND_S, MAX_FIND_S = 1.0, 300.0
"""First and longest pause between two tries while no bootstrap has answered yet. The pause doubles each time, so that
trying a dead bootstrap costs little."""

FIND_S = 86_400.0
"""Sum of such pauses after which a node that never heard an answer gives up: a learner may be down over night. A node
that has been in the swarm waits for ever (join/link.py)."""

CACHED_TRIES = 3  # Remembered peers tried in one sweep, after everything that the user named
ASK_AGAIN = "ask the person who leads the swarm for a new one"
MAX_CACHED = 64  # Peers remembered over a restart: 20 kB. If 10 % of them leave a day, one is still there after a month
CACHE_BYTES = MAX_CACHED * (RECORD_BYTES + 8) + 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    """An address to say hello to. An empty `scheme` means https, but on this machine http is tried first."""

    host: str
    port: int
    scheme: str = ""
    fingerprint: bytes = b""
    is_remembered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting(Heard):
    """A hello and the address that it came from."""

    address: Address


class GoodPeers(Message, frozen=True):
    """The file `peers` in the state directory."""

    bootstraps: tuple[str, ...]
    swarm: Id
    addresses: tuple[Address, ...]


class OtherSwarm(EchoError):
    """A bootstrap answers for a swarm other than the wanted one."""


WRONG = (OtherSwarm, OtherCertificate, OtherEncryption, ProtocolError)
"""Errors that waiting hardly fixes: another swarm, certificate or release, or another program answers. The node goes on
trying, because the program may only hold the port while the learner is restarted."""


class Bootstraps:
    """All addresses to say hello to. `swarm` is the one that a join line names, if any; no other is accepted then."""

    def __init__(self, texts: Sequence[str], cache: Path, *, random: Random) -> None:
        self._texts = tuple(texts)
        self._cache = cache
        self._random = random
        self._named, self.swarm = read_bootstraps(texts)
        self.hosts = {bootstrap.host for bootstrap in self._named}
        """Hosts that the user named. A node may dial them whatever network they are in."""
        self.remembered: SwarmId | None = None
        """The swarm that was found at the same bootstraps last."""
        self._cached = self._read_cache()
        self._doing = ""

    async def greet(self) -> Greeting:
        """Say hello to the named bootstraps in random order, then to a few remembered peers, until one answers. Each is
        tried HEAD_START_S after the one before it, or when one fails. If none answers, raise the first error that
        waiting may fix, or else the first error, as they were named: PeerUnreachable, ProtocolError or OtherSwarm."""
        waiting = self._sweep()
        running: dict[asyncio.Task[Greeting], Bootstrap] = {}
        failed: dict[Bootstrap, EchoError] = {}
        try:
            while waiting or running:
                if waiting:
                    bootstrap = waiting.pop(0)
                    running[asyncio.create_task(self._greet_one(bootstrap))] = bootstrap
                patience_s = HEAD_START_S if waiting else None
                done, _ = await asyncio.wait(running, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    bootstrap = running.pop(task)
                    try:
                        return task.result()
                    except (PeerUnreachable, ProtocolError, OtherSwarm) as error:
                        failed[bootstrap] = error
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        errors = [failed[bootstrap] for bootstrap in self._named]
        hopeful = [error for error in errors if not isinstance(error, WRONG)]
        raise (hopeful or errors or [PeerUnreachable("no bootstrap was named, and no remembered peer answers")])[0]

    async def find(self, say: Callable[[str], None]) -> Greeting:
        """Return the first greeting. Raise UserError if none comes within FIND_S, or if one side has to be updated. Say
        within 5 s what is wrong, and again when it is something else."""
        wait_s, waited_s, said = MIN_FIND_S, 0.0, ""

        def tell(what: str) -> None:
            nonlocal said
            if what != said:
                said = what
                say(f"{said}; trying again until a bootstrap answers (Ctrl-C to give up)")

        def tell_of_first_try() -> None:
            # Of later ones only the end is told, so that two lines about the same do not take turns.
            if not said:
                tell(self._doing)

        while True:
            note = asyncio.get_running_loop().call_later(SAY_S, tell_of_first_try)
            try:
                greeting = await self.greet()
            except (PeerUnreachable, ProtocolError, OtherSwarm) as error:
                if isinstance(error, OtherProtocol):
                    raise UserError(str(error)) from error
                if waited_s >= FIND_S:
                    raise UserError(f"{error}; no node answered for {FIND_S / 3600:g} hours: {ASK_AGAIN}") from error
                tell(str(error))
                pause_s = wait_s * self._random.uniform(0.8, 1.2)
                await asyncio.sleep(pause_s)
                waited_s += pause_s
                wait_s = min(MAX_FIND_S, 2 * wait_s)
            else:
                if said:
                    say(f"{greeting.address.url} answers")
                if fault := clock_fault(greeting, time.time()):
                    say(fault)
                return greeting
            finally:
                note.cancel()

    def _sweep(self) -> list[Bootstrap]:
        named = self._random.sample(self._named, len(self._named))
        return named + self._random.sample(self._cached, min(CACHED_TRIES, len(self._cached)))

    async def _greet_one(self, bootstrap: Bootstrap) -> Greeting:
        silent = f"{bootstrap.host}:{bootstrap.port} says nothing: it is busy, or no echo-node; is the port right?"
        nameless = f"{bootstrap.host} has not been found yet: is the name right, and is this machine on the network?"
        self._doing = nameless if is_name(bootstrap.host) else silent
        address = await address_of(bootstrap, self._random)
        self._doing = silent
        async with PeerClient(address) as peer:
            try:
                heard = await say_hello(peer)
            except OtherProtocol:
                raise
            except ProtocolError as error:
                raise ProtocolError(
                    f"{address.url} answers, but it is not an echo-node: is the port right? A learner's is "
                    f"{DEFAULT_PORT}, unless its owner chose another"
                ) from error
        named = {known.fingerprint for known in heard.signed.record.addresses}
        if named and address.fingerprint not in named:
            raise ProtocolError(f"{address.url} shows another certificate than its record names: someone is between")
        # The user never named a remembered peer, so it may only lead into the swarm in which it was remembered.
        expected = self.swarm or (self.remembered if bootstrap.is_remembered else None)
        if expected is not None and heard.hello.swarm != expected:
            old = f": this join line is old, {ASK_AGAIN}" if not bootstrap.is_remembered else ""
            raise OtherSwarm(f"{address.url} belongs to swarm {heard.hello.swarm}, not to {expected}{old}")
        return Greeting(hello=heard.hello, signed=heard.signed, learner=heard.learner, address=address)

    def remember(self, swarm: SwarmId, addresses: Sequence[Address]) -> None:
        """Write where a few peers were reached to disk for the next start. Blocking."""
        peers = GoodPeers(bootstraps=self._texts, swarm=swarm, addresses=tuple(addresses[:MAX_CACHED]))
        write_privately(self._cache, encode(peers))
        self._cached = self._read_cache()

    def _read_cache(self) -> list[Bootstrap]:
        """Return the peers that were remembered for the same bootstraps; none if the file is damaged."""
        try:
            peers = decode(self._cache.read_bytes(), GoodPeers, cap_bytes=CACHE_BYTES)
            swarm = SwarmId(peers.swarm)
        except (OSError, ProtocolError):
            return []
        if peers.bootstraps != self._texts or self.swarm not in (None, swarm):
            return []
        self.remembered = swarm
        return [_bootstrap_of(address, is_remembered=True) for address in peers.addresses]


def clock_fault(found: Greeting, now: float) -> str:
    """Return what is to be done about two clocks that differ, or "". `now` is this node's own, in Unix time."""
    off_s = now - found.hello.now
    if not found.hello.now or abs(off_s) < CLOCK_S:
        return ""
    which = "ahead of" if off_s > 0 else "behind"
    return (
        f"this machine's clock is {timedelta(seconds=round(abs(off_s)))} {which} that of {found.address.url}: set the "
        "one that is wrong (on Linux: timedatectl set-ntp true). Joining does not need it; logs, hours of the day and "
        "downloads do"
    )


def read_bootstraps(texts: Sequence[str]) -> tuple[list[Bootstrap], SwarmId | None]:
    """Return the addresses that bootstraps and join lines name, and the swarm of the join lines. Raise UserError if the
    join lines are of different swarms, or if a text is invalid."""
    named: list[Bootstrap] = []
    swarm: SwarmId | None = None
    for text in map(_as_printed, texts):
        if not text.startswith(PREFIX):
            named.append(read_bootstrap(text))
            continue
        line = read_join_line(text)
        if swarm not in (None, line.swarm):
            raise UserError("these join lines are of different swarms")
        swarm = SwarmId(line.swarm)
        named += [_bootstrap_of(address) for address in line.addresses]
    return named, swarm


def _as_printed(pasted: str) -> str:
    """Undo what a mail or a chat does to a line: blanks and marks around it, and breaks within a join line."""
    if (at := pasted.find(PREFIX)) >= 0:
        pasted = "".join(pasted[at:].partition(" --")[0].split())
    return pasted.strip(AROUND).rstrip(".,;").strip(AROUND)


def read_bootstrap(text: str, default_port: int = DEFAULT_PORT) -> Bootstrap:
    """Read a `host`, `host:port` or URL. Raise UserError for any other text."""
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        if (port := default_port if parts.port is None else parts.port) == 0:
            raise ValueError("port 0 is not an address to call")
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise UserError(f"{text!r} is not an address like host or host:7700 ({error})") from error
    known = parts.scheme in ("", "http", "https") and parts.path in ("", "/")
    if not known or not parts.hostname or not re.fullmatch(r"[A-Za-z0-9._:-]+", parts.hostname):
        raise UserError(f"{text!r} is not an address like host or host:7700")
    return Bootstrap(host=parts.hostname, port=port, scheme=parts.scheme)


def _bootstrap_of(address: Address, *, is_remembered: bool = False) -> Bootstrap:
    return Bootstrap(
        host=address.host,
        port=address.port,
        scheme=urlsplit(address.url).scheme,
        fingerprint=address.fingerprint,
        is_remembered=is_remembered,
    )


async def address_of(bootstrap: Bootstrap, random: Random) -> Address:
    """Return the address and certificate under which `bootstrap` answers now. Raise PeerUnreachable if it does not."""
    host = await _resolve(bootstrap, random)
    if bootstrap.fingerprint or bootstrap.scheme == "http":
        return Address(host=host, port=bootstrap.port, fingerprint=bootstrap.fingerprint)
    plain = Address(host=host, port=bootstrap.port)
    may_be_plain = bootstrap.scheme == "" and is_loopback(host)
    fault = await _fault_of_plain(plain) if may_be_plain else None
    if may_be_plain and fault is None:
        return plain
    try:
        return msgspec.structs.replace(plain, fingerprint=await certificate_of(host, bootstrap.port, CERTIFICATE_S))
    except PeerUnreachable as error:
        if fault is None:
            raise
        raise fault from error


async def _resolve(bootstrap: Bootstrap, random: Random) -> str:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await loop.getaddrinfo(bootstrap.host, bootstrap.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        late = f"no answer within {RESOLVE_S:g} s" if isinstance(error, TimeoutError) else ""
        why = late or getattr(error, "strerror", None) or error
        raise PeerUnreachable(
            f"the name {bootstrap.host} does not resolve ({why}): is it spelled right, and is this machine on the "
            "network?"
        ) from error
    # IPv4 is preferred where there are both: a name for this machine usually means 127.0.0.1.
    four = [str(entry[4][0]) for entry in found if entry[0] == socket.AF_INET]
    return random.choice(four or [str(entry[4][0]) for entry in found])


async def _fault_of_plain(address: Address) -> PeerUnreachable | None:
    """Return None if something without TLS listens there, which is safe on this machine, or else the error."""
    async with PeerClient(address) as peer:
        try:
            await say_hello(peer)
        except (ProtocolError, Busy):
            return None
        except PeerUnreachable as error:
            return error
        return None
