"""Nodes that lie, for scenarios of membership. They hold what their core holds and say something else."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from swarm.gossip.records import AGE_UNIT_S, Exchange, ExchangeReply, SignedRecord, pack_digest, unpack_digest
from tests.simulator.gossip.swarm import Liar

MAX_TOLD = 40
"""Records that a liar adds to each message: with the honest ones they stay under the cap."""


class DeathLiar(Liar):
    """Says that nobody has been heard for hours, hands out old records, and tells everybody that it is dead itself."""

    def __init__(self, old: Iterable[SignedRecord]) -> None:
        self._old = list(old)[:MAX_TOLD]
        self._next = 0

    def call(self, message: Exchange) -> Exchange:
        return replace(message, digest=_aged(message.digest), records=self._with_old(message.records))

    def answer(self, answer: ExchangeReply) -> ExchangeReply:
        self._next += 1
        refute = self._old[self._next % len(self._old)].sealed if self._old else b""
        return replace(
            answer, digest=_aged(answer.digest), records=self._with_old(answer.records), refute=refute, full=True
        )

    def _with_old(self, records: tuple[bytes, ...]) -> tuple[bytes, ...]:
        return (*records[:MAX_TOLD], *(signed.sealed for signed in self._old))


class LifeLiar(Liar):
    """Says that certain nodes were heard just now, and hands out their records."""

    def __init__(self, ghosts: Callable[[], Iterable[SignedRecord]]) -> None:
        self._ghosts = ghosts

    def call(self, message: Exchange) -> Exchange:
        return replace(message, digest=self._with_ghosts(message.digest), records=self._with_records(message.records))

    def answer(self, answer: ExchangeReply) -> ExchangeReply:
        return replace(answer, digest=self._with_ghosts(answer.digest), records=self._with_records(answer.records))

    def _with_ghosts(self, digest: bytes) -> bytes:
        return digest + pack_digest((ghost.prefix, ghost.order, 0.0) for ghost in self._ghosts())

    def _with_records(self, records: tuple[bytes, ...]) -> tuple[bytes, ...]:
        return (*records[:MAX_TOLD], *(ghost.sealed for ghost in list(self._ghosts())[:MAX_TOLD]))


class HostileBootstrap(Liar):
    """Introduces itself with another's record, and hands out no record that is of use."""

    def __init__(self, introductions: Iterable[bytes], records: Iterable[bytes]) -> None:
        self._introductions = list(introductions)
        self._records = tuple(records)
        self._next = 0

    def introduction(self, own: bytes) -> bytes:
        self._next += 1
        return self._introductions[self._next % len(self._introductions)]

    def call(self, message: Exchange) -> Exchange:
        return replace(message, digest=b"", records=self._records)

    def answer(self, answer: ExchangeReply) -> ExchangeReply:
        return ExchangeReply(records=self._records, full=True)


def _aged(digest: bytes) -> bytes:
    return pack_digest((prefix, order, 65_535 * AGE_UNIT_S) for prefix, order, _ in unpack_digest(digest))
