"""A sampler's line to the learner: found with patience, lost with a word, never given up, followed when it moves."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_random_exponential

from swarm.errors import EchoError, PeerUnreachable, ProtocolError, UserError
from swarm.net.client import Busy, OtherProtocol, Peer, SlowLine
from swarm.net.sessions import Unauthorized
from swarm.node.bootstrap import Hello, say_hello
from swarm.node.network import NodeNetwork
from swarm.rollout.client import SUBMIT_PATH

BACK_OFF_LEAST_S = 1.0
BACK_OFF_MOST_S = 30.0
"""Between two tries: a restarted learner is found within half a minute, a dead one costs two calls a minute."""

MISLED_TRIES = 10
"""Looks in a row, some minutes together, at bootstraps of another swarm than the join line's while the learner is not
to be found: more than when joining, since a learner that moves may come back elsewhere, and gossip then knows."""

R = TypeVar("R")


class SwarmChanged(EchoError):
    """The bootstrap leads to another learner than before, or the learner trains another model."""


class LearnerLink:
    """A Peer whose calls are repeated until they get through, wherever the learner is by then.

    A submission that the line is too slow for is not: SlowLine goes to RolloutClient, which sends less at once.
    `say` hears of each outage once, `on_busy` of the path of each call that a busy learner put off.
    """

    def __init__(
        self, network: NodeNetwork, say: Callable[[str], None], *, on_busy: Callable[[str], None] = lambda path: None
    ) -> None:
        self._network = network
        self._say = say
        self._on_busy = on_busy
        self._lost_at: float | None = None
        self._tries = 0

    async def find(self) -> Hello:
        """The learner's own hello, however long it takes."""
        return await self._patiently(self._learners_hello, _is_outage)

    async def get(self, path: str, *, cap_bytes: int, timeout_s: float) -> bytes:
        return await self._call(path, lambda peer: peer.get(path, cap_bytes=cap_bytes, timeout_s=timeout_s))

    async def post(self, path: str, body: bytes, *, cap_bytes: int, timeout_s: float) -> bytes:
        return await self._call(path, lambda peer: peer.post(path, body, cap_bytes=cap_bytes, timeout_s=timeout_s))

    async def _call(self, path: str, attempt: Callable[[Peer], Awaitable[R]]) -> R:
        """`attempt`, repeated while the learner cannot be reached. SwarmChanged if another one took its place."""

        async def once() -> R:
            try:
                return await attempt(self._peer())
            except Unauthorized as error:
                # A new session was refused too: most likely another learner has taken this one's place.
                raise PeerUnreachable(str(error)) from error
            except OtherProtocol as error:
                raise UserError(str(error)) from error
            except Busy:
                self._on_busy(path)
                raise

        return await self._patiently(once, _is_outage_of_submission if path == SUBMIT_PATH else _is_outage)

    async def _learners_hello(self) -> Hello:
        node, _ = self._network.learner()
        try:
            heard = await say_hello(self._peer())
        except OtherProtocol as error:
            raise UserError(str(error)) from error
        except ProtocolError as error:
            raise PeerUnreachable(f"the learner's address gives no learner's answer: {error}") from error
        if heard.signed.node != node:
            raise PeerUnreachable("another node answers at the learner's address")
        return heard.hello

    def _peer(self) -> Peer:
        """The learner where it was last heard of; its other addresses in turn while that fails."""
        node, addresses = self._network.learner()
        if not addresses:
            raise PeerUnreachable("nobody has said yet where the learner is")
        return self._network.peers.at(node, addresses[self._tries % len(addresses)])

    async def _patiently(self, once: Callable[[], Awaitable[R]], is_outage: Callable[[BaseException], bool]) -> R:
        retrying = AsyncRetrying(
            retry=retry_if_exception(is_outage),
            wait=_wait_s,
            before_sleep=self._before_sleep,
            # Gossip may know sooner than we ask that the learner is somewhere else.
            sleep=self._network.gossip.news,
        )

        async def attempt() -> R:
            return await once()

        result: R = await retrying(attempt)
        if self._lost_at is not None:
            self._say(f"the learner answers again after {time.monotonic() - self._lost_at:.0f} s")
            self._lost_at = None
        return result

    async def _before_sleep(self, state: RetryCallState) -> None:
        """Say so once, try another address the next time, and ask a bootstrap what has become of the learner."""
        error = state.outcome.exception() if state.outcome else None
        if not isinstance(error, PeerUnreachable) or isinstance(error, Busy):
            return
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            self._say(f"{error}; trying again until it answers (Ctrl-C to give up)")
        self._tries += 1
        if state.attempt_number > 1:
            await self._network.look_again()
        if (other := self._network.other_swarm) is not None:
            raise SwarmChanged(f"the bootstrap now leads to another swarm, {other}")
        if self._network.misled >= MISLED_TRIES:
            raise UserError(self._network.misled_why)


def _is_outage(error: BaseException) -> bool:
    return isinstance(error, PeerUnreachable)


def _is_outage_of_submission(error: BaseException) -> bool:
    return _is_outage(error) and not isinstance(error, SlowLine)


_back_off = wait_random_exponential(multiplier=BACK_OFF_LEAST_S, max=BACK_OFF_MOST_S)


def _wait_s(state: RetryCallState) -> float:
    """Random exponential back-off, or what a busy learner asked for."""
    error = state.outcome.exception() if state.outcome else None
    return error.retry_after_s if isinstance(error, Busy) else max(0.2, float(_back_off(state)))
