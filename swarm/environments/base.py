"""What an environment is: it begins from a seed, reads what the model says, and answers until the episode is over.

Plain data goes in and comes out, and an episode is a pure function of its seed and of what was said: one that was lost
is played again from the texts of its turns, and one that a sampler played is checked in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

Messages = Sequence[tuple[str, str]]
"""(role, content) pairs, as in a chat."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """An environment's answer to a turn. `messages` are for the player in `seat`, whose turn is next. `rewards` are by
    player, the first one's first. At the end it is `done`, and `solved` if the first player did what was asked. `parts`
    are counts of what happened in this step, such as {"tool_errors": 1}."""

    messages: Messages = ()
    rewards: Sequence[float] = (0.0,)
    done: bool = False
    solved: bool = False
    seat: int = 0
    parts: Mapping[str, float] = {}


class Environment(Protocol):
    """One episode at a time. A class that names Environment as its base has the defaults.

    An episode ends after `max_turns` turns of all players together, each of up to `max_new_tokens`; `max_tokens` bounds
    each player's stream, the environment's words included (None: the learner chooses). `seats` players are the same
    policy. `is_chat`: messages are put into the model's chat template if it has one.
    """

    name: str
    description: str
    max_turns: int
    max_new_tokens: int | None = None
    max_tokens: int | None = None
    seats: int = 1
    is_chat: bool = True

    def reset(self, seed: int) -> Messages:
        """Begin the episode of this seed, and return what the first player reads."""
        ...

    def step(self, text: str) -> Step:
        """Answer what the player whose turn it is has said. A new player's first messages are all that it reads."""
        ...

    def board(self) -> str:
        """Draw how things stand, for people; "" if the messages show it."""
        return ""
