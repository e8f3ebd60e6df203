"""The journal as the HTTP face sees it: what an answer rests on is committed before the answer is sent, or in time
found not to be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from swarm.errors import EchoError
from swarm.rollout.journal.entries import Entry

COMMIT_S = 8.0
"""How long an answer waits for the journal. With the time that a body may take to come (client.MAX_BODY_S) it is less
than the time limit of the sampler's call (client.CALL_S), so that the sampler hears why."""

FAULT_CHECK_S = 1.0  # Between two looks whether the journal can write again: as often as it tries


class Recorder(Protocol):
    """Where records go (journal.Journal). `fault` says why nothing can be written now, if so; `pending_bytes` of
    payloads wait to be written."""

    fault: str
    pending_bytes: int

    async def write(self, entries: Sequence[Entry]) -> None: ...

    def enqueue(self, entries: Sequence[Entry]) -> None: ...


class Recording:
    """Entries on their way to `recorder`. `broken`: why it takes no more, for good."""

    def __init__(self, recorder: Recorder, *, commit_s: float = COMMIT_S) -> None:
        self._recorder = recorder
        self._commit_s = commit_s
        self.broken: EchoError | None = None

    @property
    def fault(self) -> str:
        return self._recorder.fault

    @property
    def pending_bytes(self) -> int:
        return self._recorder.pending_bytes

    def enqueue(self, entries: Sequence[Entry]) -> None:
        """Have the entries written after all before them."""
        try:
            self._recorder.enqueue(entries)
        except EchoError as error:
            self.broken = error
            raise

    async def committed(self) -> None:
        """Return when everything so far is committed, however long that takes."""
        await self._recorder.write(())

    async def committed_soon(self) -> bool:
        """Whether everything so far was committed while one may wait for an answer."""
        try:
            async with asyncio.timeout(self._commit_s):
                await self._recorder.write(())
        except TimeoutError:
            return False
        except EchoError as error:
            self.broken = error
            return False
        return True
