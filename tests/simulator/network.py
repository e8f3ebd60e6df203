"""Seeded links between named nodes, carrying requests and answers.

Theory of operation. A message waits until its link (one direction of one pair) is free, takes nbytes / rate to be
sent, then latency and jitter to arrive. It is lost by chance, or when a partition stands between its ends when it is
sent or when it would arrive. A request whose own message or whose answer is lost fails at the caller by its time
limit and not before: the caller cannot know which of the two was lost, so the handler may have run, and runs again
when the caller asks again. A handler may keep its `reply` and call it later (a held question).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarm.plan.simulate.world import Callback, World

A = TypeVar("A")
Reply = Callable[[A, int], None]
"""The answer and its size in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShape:
    """What every link is like."""

    latency_s: float
    jitter_s: float
    loss_share: float
    bytes_per_s: float


class Network:
    """All links. `cut` separates nodes from everybody else until `heal`."""

    def __init__(self, world: World, shape: LinkShape) -> None:
        self._world = world
        self._shape = shape
        self._free_at: dict[tuple[str, str], float] = {}
        self._cuts: list[frozenset[str]] = []

    @property
    def partitioned(self) -> bool:
        return bool(self._cuts)

    def cut(self, nodes: Iterable[str]) -> Callback:
        """Separate `nodes` from all others; the returned call heals it."""
        island = frozenset(nodes)
        self._cuts.append(island)
        return lambda: self._cuts.remove(island)

    def request(
        self,
        source: str,
        target: str,
        nbytes: int,
        handler: Callable[[Reply[A]], None],
        on_answer: Callable[[A], None],
        on_failure: Callback,
        *,
        timeout_s: float,
    ) -> None:
        """Run `handler` at `target`; exactly one of `on_answer` and `on_failure` is called within `timeout_s`."""
        call = _Call(on_answer, on_failure)

        def reply(answer: A, answer_bytes: int) -> None:
            self._send(target, source, answer_bytes, lambda: call.answer(answer))

        self._world.schedule(timeout_s, f"time limit {source}", call.fail)
        self._send(source, target, nbytes, lambda: handler(reply))

    def _send(self, source: str, target: str, nbytes: int, deliver: Callback) -> None:
        world, shape = self._world, self._shape
        start = max(world.now, self._free_at.get((source, target), 0.0))
        self._free_at[source, target] = sent = start + nbytes / shape.bytes_per_s
        delay_s = sent - world.now + shape.latency_s + world.random.uniform(0.0, shape.jitter_s)
        if self._separated(source, target) or world.random.random() < shape.loss_share:
            world.note(f"lost {source} > {target}")
            return

        def arrive() -> None:
            if self._separated(source, target):
                world.note(f"cut off {source} > {target}")
            else:
                deliver()

        world.schedule(delay_s, f"{source} > {target}", arrive)

    def _separated(self, a: str, b: str) -> bool:
        return bool(self._cuts) and any((a in island) != (b in island) for island in self._cuts)


class _Call(Generic[A]):
    """One request at its caller: answered or failed, once."""

    __slots__ = ("_on_answer", "_on_failure", "_open")

    def __init__(self, on_answer: Callable[[A], None], on_failure: Callback) -> None:
        self._on_answer = on_answer
        self._on_failure = on_failure
        self._open = True

    def answer(self, answer: A) -> None:
        if self._open:
            self._open = False
            self._on_answer(answer)

    def fail(self) -> None:
        if self._open:
            self._open = False
            self._on_failure()
