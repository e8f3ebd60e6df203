"""The interface of an environment: it begins from a seed, reads what the model says, and answers until the episode
ends.

Its input and output are plain data, and an episode is a pure function of its seed and the texts of its turns. So an
episode that was lost can be played again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

Messages = Sequence[tuple[str, str]]
"""(role, content) pairs, as in a chat."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """An environment's answer to a turn. `messages` are for the player in `seat`, whose turn is next. `rewards` are in
    the order of the players. At the end it is `done`, and `solved` if the first player did what was asked. `parts` are
    counts of what happened in this step, such as {"tool_errors": 1}."""

    messages: Messages = ()
    rewards: Sequence[float] = (0.0,)
    done: bool = False
    solved: bool = False
    seat: int = 0
    parts: Mapping[str, float] = {}


class Environment(Protocol):
    """Plays one episode at a time. A class inherits the defaults if Environment is its base.

    An episode ends after `max_turns` turns of all players together, each of up to `max_new_tokens`. `max_tokens` limits
    each player's stream, including what the environment says (None: the learner chooses). All `seats` players are the
    same policy. `is_chat`: messages are put into the model's chat template if it has one.
    """

    name: str
    description: str
    max_turns: int
    max_new_tokens: int | None = None
    max_tokens: int | None = None
    seats: int = 1
    is_chat: bool = True

    def reset(self, seed: int) -> Messages:
        """Begin the episode with this seed, and return what the first player reads."""
        ...

    def step(self, text: str) -> Step:
        """Answer what the player whose turn it is has said. A player reads nothing before the first messages for it."""
        ...

    def board(self) -> str:
        """Draw the present state, for people; "" if the messages show it."""
        return ""
