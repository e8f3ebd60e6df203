"""A sampler's line to the learner: found with patience, lost with a word, never given up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from swarm.auth import Unauthorized
from swarm.errors import EchoError, PeerUnreachable
from swarm.http import Busy, PeerClient
from swarm.node.hello import Hello, say_hello

BACK_OFF_LEAST_S = 1.0
BACK_OFF_MOST_S = 30.0
"""Between two tries: a restarted learner is found within half a minute, a dead one costs two calls a minute."""

R = TypeVar("R")


class SwarmChanged(EchoError):
    """The address answers, but with another learner than before."""


class LearnerLink:
    """A Peer whose calls are repeated until they get through. `say` hears of each outage once."""

    def __init__(self, peer: PeerClient, say: Callable[[str], None]) -> None:
        self._peer = peer
        self._say = say
        self._hello: Hello | None = None
        self._lost_at: float | None = None

    async def find(self) -> Hello:
        """The learner's hello, however long it takes."""
        self._hello = await self._patiently(lambda: say_hello(self._peer))
        return self._hello

    async def get(self, path: str, *, cap_bytes: int, timeout_s: float) -> bytes:
        return await self._call(lambda: self._peer.get(path, cap_bytes=cap_bytes, timeout_s=timeout_s))

    async def post(self, path: str, body: bytes, *, cap_bytes: int, timeout_s: float) -> bytes:
        return await self._call(lambda: self._peer.post(path, body, cap_bytes=cap_bytes, timeout_s=timeout_s))

    async def _call(self, attempt: Callable[[], Awaitable[R]]) -> R:
        """`attempt`, repeated while the learner cannot be reached. SwarmChanged if another one came back."""
        try:
            return await attempt()
        except Busy as error:
            await asyncio.sleep(error.retry_after_s)
        except PeerUnreachable as error:
            self._note_loss(error)
            await self._check_identity()
        except Unauthorized:
            # A new session was refused too: most likely another learner has taken this one's place.
            await self._check_identity()
        return await self._patiently(attempt)

    async def _check_identity(self) -> None:
        hello = await self._patiently(lambda: say_hello(self._peer))
        if self._hello is not None and hello.swarm != self._hello.swarm:
            raise SwarmChanged(f"{self._peer.base_url} now leads another swarm, {hello.swarm}")

    async def _patiently(self, attempt: Callable[[], Awaitable[R]]) -> R:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(PeerUnreachable), wait=_wait_s, before_sleep=self._before_sleep
        )

        async def once() -> R:
            return await attempt()

        result: R = await retrying(once)
        if self._lost_at is not None:
            self._say(f"{self._peer.base_url} answers again after {time.monotonic() - self._lost_at:.0f} s")
            self._lost_at = None
        return result

    def _before_sleep(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, PeerUnreachable):
            self._note_loss(error)

    def _note_loss(self, error: PeerUnreachable) -> None:
        if self._lost_at is None and not isinstance(error, Busy):
            self._lost_at = time.monotonic()
            self._say(f"{error}; trying again until it answers (Ctrl-C to give up)")


_back_off = wait_random_exponential(multiplier=BACK_OFF_LEAST_S, max=BACK_OFF_MOST_S)


def _wait_s(state: RetryCallState) -> float:
    """Random exponential back-off, or what a busy learner asked for."""
    error = state.outcome.exception() if state.outcome else None
    return error.retry_after_s if isinstance(error, Busy) else max(0.2, float(_back_off(state)))
