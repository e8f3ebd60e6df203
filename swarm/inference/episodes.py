"""Episodes that another program on the learner's machine drives: what it asks the endpoint for becomes the turns of
leased samples.

The plane's StepWanted begins a run of the program, hands it what was drawn, and is answered by its next request or its
end. The conversation is one player's own stream (SEAT): the group's prompt only names what is played. Each request has
to begin with all that was read and drawn before, token by token, else the turns could not be trained on as they were.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from swarm.errors import EchoError, ProtocolError
from swarm.rollout.plane.effects import StepWanted
from swarm.tasks.base import SEAT, EpisodeResult
from swarm.types import Observed, Rollout, Unscored

STEP_S = 600.0  # Longest that a program may think: it may build and test something


@dataclass(slots=True, kw_only=True)
class _Episode:
    run: asyncio.Task[EpisodeResult]
    stream: list[int] = field(default_factory=list)
    asked: asyncio.Future[Sequence[int]] = field(default_factory=asyncio.Future)
    answer: asyncio.Future[Rollout] = field(default_factory=asyncio.Future)


class ExternalEpisodes:
    """`run(episode, prompt_id)` has the program play, with requests for `episode`."""

    def __init__(self, run: Callable[[str, str], Awaitable[EpisodeResult]], *, step_s: float = STEP_S) -> None:
        self._run, self._step_s = run, step_s
        self._open: dict[str, _Episode] = {}  # The plane bounds them, and ends each

    async def step(self, wanted: StepWanted) -> Observed | Unscored:
        """Begin, or answer the newest turn: its own token ids, their log-probs and its finish."""
        turn = wanted.newest
        if turn is None:
            run = asyncio.ensure_future(self._run(wanted.episode, wanted.prompt.prompt_id))
            # A fault after the episode was given up does not count.
            run.add_done_callback(lambda run: run.cancelled() or run.exception())
            self._open[wanted.episode] = _Episode(run=run)
        if (episode := self._open.get(wanted.episode)) is None:
            return Unscored(reason="the program that plays it is not there any more")
        if turn is not None:
            episode.stream += turn.tokens()
            if not episode.answer.done():  # Else its asker has gone
                episode.answer.set_result(turn)
            episode.asked, episode.answer = asyncio.Future(), asyncio.Future()
        waits: set[asyncio.Future[Any]] = {episode.run, episode.asked}
        await asyncio.wait(waits, timeout=self._step_s, return_when=asyncio.FIRST_COMPLETED)
        if episode.asked.done():
            episode.stream += (read := episode.asked.result())
            return Observed(token_ids=array("i", read).tobytes(), seat=SEAT)
        self.end(wanted.episode)
        return _last(episode.run) if episode.run.done() else Unscored(reason=f"it took longer than {self._step_s:g} s")

    async def continue_episode(self, name: str, token_ids: Sequence[int]) -> Rollout:
        """Return the next turn of a leased episode. Raise ProtocolError for an unknown one, or a conversation that does
        not begin with what was read and drawn before."""
        if (episode := self._open.get(name)) is None:
            raise ProtocolError(f"no episode {name[:64]!r} is played: its run is over, or it was given up")
        if episode.asked.done():
            raise ProtocolError("a turn of this episode is drawn already: it has one conversation, turn by turn")
        if (known := len(episode.stream)) >= len(token_ids) or list(token_ids[:known]) != episode.stream:
            raise ProtocolError(f"these tokens do not go on from the {known} of this episode: its conversation drifted")
        episode.asked.set_result(token_ids[known:])
        return await episode.answer

    def keep(self, names: Collection[str]) -> None:
        """End all episodes but these."""
        for name in self._open.keys() - names:
            self.end(name)

    def end(self, name: str) -> None:
        """Forget an episode. Its program is refused what it asks for, and comes to its end."""
        episode = self._open.pop(name, None)
        if episode is not None and episode.asked.done() and not episode.answer.done():
            episode.answer.set_exception(ProtocolError("this episode was given up"))


def _last(run: asyncio.Task[EpisodeResult]) -> Observed | Unscored:
    try:
        ended = run.result()
    except EchoError as error:
        return Unscored(reason=str(error)[:400])
    if ended.fault or not all(map(isfinite, (ended.reward, *ended.parts.values()))):
        return Unscored(reason=ended.fault or "its reward or a part of it is not a finite number")
    rewards = (*(0.0,) * SEAT, ended.reward)
    return Observed(seat=SEAT, rewards=rewards, done=True, exact=ended.reward >= 1.0, parts=ended.parts)
