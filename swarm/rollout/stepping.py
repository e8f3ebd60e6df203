"""Holds requests of turns open until the environment of one of them has answered, and puts the replies together.

A request is answered a moment after the first of its turns, with all that are answered then, so a quick turn does not
wait for a slow one. The sampler hands the others in again. It learns in the same way that an episode was given up.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import accumulate

from swarm.rollout.messages import STEP_REPLY_BYTES, Answer, SampleName, Stepped
from swarm.rollout.plane.effects import Judged
from swarm.types import NodeId, Observed

HOLD_S = 2.0  # Longest: a sampler has few requests, and new turns wait while each has only slow ones
GATHER_S = 0.02  # After the first answer: what was handed in together mostly comes back together
MAX_OPEN = 4  # Requests of a node that are held open


class Stepping:
    """The requests that wait."""

    def __init__(self) -> None:
        self._waiting: dict[SampleName, set[asyncio.Event]] = {}
        self._open: Counter[NodeId] = Counter()

    def tell(self, sample: SampleName) -> None:
        """Wake the requests that wait for this episode."""
        for event in self._waiting.get(sample, ()):
            event.set()

    async def wait(self, node: NodeId, turns: Collection[Answer], is_ready: Callable[[Answer], bool]) -> None:
        """Wait until one of these turns of `node` is ready, and then a moment for the others."""
        if all(map(is_ready, turns)) or self._open[node] >= MAX_OPEN:
            return
        self._open[node] += 1
        event = asyncio.Event()
        for turn in turns:
            self._waiting.setdefault(turn.sample, set()).add(event)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(HOLD_S):
                    if not any(map(is_ready, turns)):
                        await event.wait()
            if not all(map(is_ready, turns)):
                await asyncio.sleep(GATHER_S)
        finally:
            self._forget(node, turns, event)

    def _forget(self, node: NodeId, turns: Collection[Answer], event: asyncio.Event) -> None:
        self._open[node] -= 1
        if not self._open[node]:
            del self._open[node]
        for sample in {turn.sample for turn in turns}:
            if (events := self._waiting.get(sample)) is not None:
                events.discard(event)
                if not events:
                    del self._waiting[sample]


def stepped(answer: Answer, said: Observed, judged: Judged | None) -> Stepped:
    """Return what the environment said to a turn; `judged` is None if the turn was taken before."""
    return Stepped(
        group_id=answer.rollout.group_id,
        index=answer.rollout.index,
        turn=answer.turn,
        verdict=judged.verdict if judged is not None else "accepted",
        detail=judged.detail if judged is not None else "",
        ended=said.done,
        seat=said.seat,
        token_ids=said.token_ids,
        limits=said.limits,
    )


def within(steps: Sequence[Stepped]) -> tuple[Stepped, ...]:
    """Return as many as a reply has room for, at least one if there is any. The others are asked for again."""
    sizes = accumulate(len(one.token_ids) for one in steps)
    return tuple(one for one, end in zip(steps, sizes, strict=True) if end <= STEP_REPLY_BYTES // 2)
