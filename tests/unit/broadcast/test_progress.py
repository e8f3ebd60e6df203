"""Whether what is under way still comes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

from swarm.broadcast.receiver.progress import VersionProgress
from swarm.broadcast.transfers import Transfers
from tests.builders import v

MIN_S = 0.001


def progress_of(missing: Iterator[int]) -> VersionProgress:
    """Of one transfer, of which so many chunks are missing whenever somebody looks."""

    class Chunks:
        @property
        def missing(self) -> int:
            return next(missing)

    transfer: Any = SimpleNamespace(held=SimpleNamespace(chunks=Chunks()))
    return VersionProgress(cast(Transfers, SimpleNamespace(active={v(1): transfer}, links={})))


async def test_a_transfer_of_which_no_chunk_comes_is_waited_for_no_longer() -> None:
    """The learner that announced it was killed, and its next life deals it no more."""
    chunks = iter([5, 4, 4, 4, 4])
    assert not await progress_of(chunks).goes_on(asyncio.Event(), MIN_S)
    assert len(list(chunks)) == 1  # first looked at twice while one came, then twice more


async def test_news_ends_the_waiting() -> None:
    news = asyncio.Event()
    news.set()
    assert await progress_of(iter([5])).goes_on(news, MIN_S)
