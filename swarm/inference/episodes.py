"""Episodes that a program on the learner's machine plays: what it asks the endpoint for becomes the turns of leased
samples.

The plane's StepWanted begins a run of the program, hands it what was drawn, and is answered by its next call or its
end. Calls that come side by side are drawn one after another. Each conversation of the program (conversation.py) is a
player's stream: the group's prompt only names what is played. At the end every stream has the episode's reward.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from swarm.errors import ChildFailed, EchoError, ProtocolError
from swarm.inference.conversation import Conversations, Messages
from swarm.rollout.plane.effects import StepWanted
from swarm.tasks.base import SEAT, EpisodeResult
from swarm.tasks.turns import TurnText
from swarm.types import MAX_PARTS, Observed, Prompt, Rollout, TurnLimits, Unscored

STEP_S = 600.0  # Longest that a program may think: it may build and test something
MAX_CALLS = 256  # Of one episode that wait to be drawn: each may have a whole context


@dataclass(frozen=True, slots=True)
class Said:
    """An answer as its asker reads it: the message, what was drawn for it, after how many tokens, and a `name`, which
    of a turn ends with its number in the episode."""

    message: dict[str, Any]
    drawn: Rollout
    read: int
    name: str


@dataclass(slots=True)
class _Call:
    chat: Messages | str
    tools: Messages
    limits: TurnLimits
    seat: int = SEAT
    answer: asyncio.Future[Said] = field(default_factory=asyncio.Future)


@dataclass(slots=True)
class _Episode:
    run: asyncio.Task[EpisodeResult]
    conversations: Conversations
    calls: deque[_Call] = field(default_factory=deque)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    drawing: _Call | None = None
    seats: list[int] = field(default_factory=list)  # Whose turns the drawn ones were
    owed: dict[int, float] = field(default_factory=dict)  # Rewards of seats that the plane does not know yet
    given: dict[int, float] = field(default_factory=dict)  # And those that it knows
    seeds_ignored: int = 0


class ExternalEpisodes:
    """`run(episode, prompt)` has the program play, with calls for `episode`; `text` is how the run tokenises chats.
    The run's own strings `stop` end a turn. With a `control`, its reward counts instead of the program's."""

    def __init__(
        self,
        run: Callable[[str, Prompt], Awaitable[EpisodeResult]],
        text: TurnText,
        *,
        step_s: float = STEP_S,
        stop: tuple[str, ...] = (),
        control: Callable[[StepWanted], float] | None = None,
    ) -> None:
        self._run, self._text, self._step_s, self._stop, self._control = run, text, step_s, stop, control
        self._open: dict[str, _Episode] = {}  # The plane bounds them, and ends each

    async def step(self, wanted: StepWanted) -> Observed | Unscored:
        """Begin, or answer the newest turn: its own token ids, their log-probs and its finish."""
        turn = wanted.newest
        if turn is None:
            run = asyncio.ensure_future(self._played(wanted.episode, wanted.prompt))
            # A fault after the episode was given up does not count.
            run.add_done_callback(lambda run: run.cancelled() or run.exception())
            self._open[wanted.episode] = _Episode(run, Conversations(self._text))
        if (episode := self._open.get(wanted.episode)) is None:
            return Unscored(reason="the program that plays it is not there any more")
        if turn is not None:
            _take(episode, turn, self._stop)
        try:
            async with asyncio.timeout(self._step_s):
                while not episode.run.done():
                    if (read := _next(episode, pays=self._control is None)) is not None:
                        return read
                    episode.asked.clear()
                    asked = asyncio.ensure_future(episode.asked.wait())
                    await asyncio.wait({episode.run, asked}, return_when=asyncio.FIRST_COMPLETED)
                    asked.cancel()
        except TimeoutError:
            self.end(wanted.episode)
            return Unscored(reason=f"it took longer than {self._step_s:g} s")
        self.end(wanted.episode)
        return _last(episode, self._control(wanted) if self._control is not None else None)

    async def _played(self, name: str, prompt: Prompt) -> EpisodeResult:
        """Play it, once more if the process ended, perhaps by another episode's fault, before it asked anything."""
        try:
            return await self._run(name, prompt)
        except ChildFailed:
            episode = self._open.get(name)
            if episode is None or episode.seats or episode.calls:
                raise
        return await self._run(name, prompt)

    async def ask(
        self, name: str, chat: Messages | str, tools: Messages, limits: TurnLimits, count: int, *, seeded: bool
    ) -> Sequence[Said]:
        """Have `count` answers drawn for a chat of a leased episode, as turns of it. A seed (`seeded`) is the learner's
        to choose. Raise ProtocolError for an unknown episode, and EchoError for a chat that cannot be tokenised."""
        episode = self._named(name)
        episode.seeds_ignored += seeded
        if len(episode.calls) + count > MAX_CALLS:
            raise ProtocolError(f"{len(episode.calls)} calls of this episode wait already: await some of them first")
        calls = [_Call(chat, tools, limits) for _ in range(count)]
        episode.calls += calls
        episode.asked.set()
        try:
            return await asyncio.gather(*(call.answer for call in calls))
        finally:
            episode.calls = deque(call for call in episode.calls if call not in calls)

    def reward(self, name: str, reward: float, turn: int | None) -> None:
        """Credit a turn of an episode, the newest one if `turn` is None. Raise ProtocolError for another one."""
        episode = self._named(name)
        if not episode.seats or not isfinite(reward) or (turn is not None and turn not in range(len(episode.seats))):
            raise ProtocolError("there is no such turn in this episode, or its reward is no finite number")
        seat = episode.seats[-1 if turn is None else turn]
        episode.owed[seat] = episode.owed.get(seat, 0.0) + reward

    def _named(self, name: str) -> _Episode:
        if (episode := self._open.get(name)) is None:
            raise ProtocolError(f"no episode {name[:64]!r} is played: its run is over, or it was given up")
        return episode

    def keep(self, names: Collection[str]) -> None:
        """End all episodes but these."""
        for name in self._open.keys() - names:
            self.end(name)

    def end(self, name: str) -> None:
        """Forget an episode. Its program is refused what it asks for, and comes to its end."""
        if (episode := self._open.pop(name, None)) is not None:
            for call in (*episode.calls, *([episode.drawing] if episode.drawing else [])):
                if not call.answer.done():
                    call.answer.set_exception(ProtocolError("this episode was given up"))
                    call.answer.exception()  # Its asker may have gone


def _take(episode: _Episode, turn: Rollout, stop: tuple[str, ...]) -> None:
    """Hand a drawn turn to who asked for it."""
    call = episode.drawing
    assert call is not None
    read = episode.conversations.length(call.seat)
    message = episode.conversations.drawn(call.seat, turn.tokens(), (*stop, *call.limits.stop))
    if not call.answer.done():  # Else its asker has gone
        call.answer.set_result(Said(message, turn, read, f"turn-{len(episode.seats)}"))
    episode.seats.append(call.seat)
    episode.drawing = None


def _next(episode: _Episode, *, pays: bool) -> Observed | None:
    """Return what the next call reads, with rewards if it `pays` them; None if none waits. What cannot be read is its
    asker's fault."""
    while episode.calls:
        call = episode.drawing = episode.calls.popleft()
        try:
            call.seat, read = episode.conversations.go_on(call.chat, call.tools)
        except Exception as fault:  # noqa: BLE001 - template and chat are somebody else's: the learner goes on
            episode.drawing = None
            if not call.answer.done():
                known = isinstance(fault, EchoError)
                call.answer.set_exception(
                    fault if known else ProtocolError(f"it cannot be read: {type(fault).__name__}")
                )
            continue
        rewards = _credited(episode, episode.owed) if pays else ()
        return Observed(token_ids=array("i", read).tobytes(), seat=call.seat, rewards=rewards, limits=call.limits)
    return None


def _credited(episode: _Episode, owed: dict[int, float]) -> tuple[float, ...]:
    """Return rewards by seat, which the plane knows from now on."""
    for seat, reward in owed.items():
        episode.given[seat] = episode.given.get(seat, 0.0) + reward
    episode.owed = {}
    return tuple(owed.get(seat, 0.0) for seat in range(max(owed, default=-1) + 1))


def _last(episode: _Episode, control: float | None) -> Observed | Unscored:
    try:
        ended = episode.run.result()
    except EchoError as error:
        return Unscored(reason=str(error)[:400])
    total = ended.reward + sum(episode.given.values()) + sum(episode.owed.values())
    if ended.fault or not all(map(isfinite, (total, *ended.parts.values()))):
        return Unscored(reason=ended.fault or "its reward or a part of it is not a finite number")
    counted = {"forks": float(episode.conversations.forks), "seeds_ignored": float(episode.seeds_ignored)}
    paid = total if control is None else control
    rewards = _credited(episode, {seat: paid - episode.given.get(seat, 0.0) for seat in sorted(set(episode.seats))})
    parts = dict([*{name: one for name, one in counted.items() if one}.items(), *ended.parts.items()][:MAX_PARTS])
    return Observed(seat=SEAT, rewards=rewards, done=True, exact=total >= 1.0, parts=parts)
