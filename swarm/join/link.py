"""A sampler's calls to the learner, repeated until they get through, even if the learner has moved."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from random import Random, SystemRandom
from typing import TypeVar

from swarm.errors import EchoError, PeerUnreachable, ProtocolError, UserError
from swarm.net.client import Busy, OtherProtocol, PeerClient, SlowLine
from swarm.net.sessions import Unauthorized
from swarm.node.hello import Hello, say_hello
from swarm.node.network import NodeNetwork
from swarm.sampler.client import SUBMIT_PATH

MAX_BACK_OFF_S = 30.0  # Longest pause between two tries: a restarted learner is found soon, a dead one costs little

MISLED_TRIES = 10
"""How often in a row, over some minutes, the bootstraps may lead to another swarm while the learner is away. More than
when joining: a learner that moves may come back elsewhere, and then gossip knows where."""

R = TypeVar("R")


def back_off_s(failures: int, random: Random) -> float:
    """Return the pause after `failures` in a row: random, with an upper bound that doubles up to MAX_BACK_OFF_S."""
    return max(0.2, random.uniform(0.0, min(MAX_BACK_OFF_S, 2.0 ** min(failures - 1, 9))))


class SwarmChanged(EchoError):
    """The bootstrap now leads to another swarm."""


class LearnerLink:
    """The learner for a RolloutClient; calls are repeated. Only SlowLine on a submission is passed on, which is then
    made smaller. `say` gets a line about each outage; `on_busy` the path of each call that a busy learner put off."""

    def __init__(
        self, network: NodeNetwork, say: Callable[[str], None], *, on_busy: Callable[[str], None] = lambda path: None
    ) -> None:
        self._network = network
        self._say = say
        self._on_busy = on_busy
        self._lost_at: float | None = None
        self._tries = 0
        self._random = SystemRandom()

    async def find(self) -> Hello:
        """Return the learner's own hello, however long it takes."""
        return await self._patiently(self._learners_hello)

    async def post(self, path: str, body: bytes, *, cap_bytes: int, timeout_s: float) -> bytes:
        """Post until the learner answers. Raise SwarmChanged if another swarm took its place."""

        async def once() -> bytes:
            try:
                return await self._peer().post(path, body, cap_bytes=cap_bytes, timeout_s=timeout_s)
            except Unauthorized as error:
                # A new session was refused too, so another learner has probably taken this one's place.
                raise PeerUnreachable(str(error)) from error
            except Busy:
                self._on_busy(path)
                raise

        return await self._patiently(once, but=SlowLine if path == SUBMIT_PATH else ())

    async def _learners_hello(self) -> Hello:
        node, _ = self._network.learner()
        try:
            heard = await say_hello(self._peer())
        except OtherProtocol:
            raise
        except ProtocolError as error:
            raise PeerUnreachable(f"the learner's address gives no learner's answer: {error}") from error
        if heard.signed.node != node:
            raise PeerUnreachable("another node answers at the learner's address")
        return heard.hello

    def _peer(self) -> PeerClient:
        """Return the learner at its best known address; each failed try moves on to the next address."""
        node, addresses = self._network.learner()
        if not addresses:
            raise PeerUnreachable("the learner's address is not known yet")
        return self._network.peers.at(node, addresses[self._tries % len(addresses)])

    async def _patiently(self, once: Callable[[], Awaitable[R]], but: type[SlowLine] | tuple[()] = ()) -> R:
        """Repeat `once` after each PeerUnreachable except `but`. UserError if the learner is of another release."""
        failures = 0
        while True:
            try:
                result = await once()
            except OtherProtocol as error:
                raise UserError(str(error)) from error
            except PeerUnreachable as error:
                if isinstance(error, but):
                    raise
                failures += 1
                pause_s = back_off_s(failures, self._random)
                if isinstance(error, Busy):
                    pause_s = error.retry_after_s
                else:
                    await self._note_outage(error, failures)
                # News cuts the pause short: gossip may be the first to know that the learner has moved.
                await self._network.gossip.news(pause_s)
                continue
            if self._lost_at is not None:
                self._say(f"the learner answers again after {time.monotonic() - self._lost_at:.0f} s")
                self._lost_at = None
            return result

    async def _note_outage(self, error: PeerUnreachable, failures: int) -> None:
        """Tell the user once, try another address next time, and ask a bootstrap where the learner is."""
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            self._say(f"{error}; trying again until it answers (Ctrl-C to give up)")
        self._tries += 1
        if failures > 1:
            await self._network.look_again()
        if (other := self._network.other_swarm) is not None:
            raise SwarmChanged(f"the bootstrap now leads to another swarm, {other}")
        if self._network.misled >= MISLED_TRIES:
            raise UserError(self._network.misled_why)
