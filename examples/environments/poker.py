"""Kuhn poker: the smallest game in which it pays to bluff.

`opponent` is "self" (both players are the policy, each with its own messages), "random", or "fixed": an equilibrium. A
player sees its own card and all moves; never the other's card, since at the end it has no turn left. A word that is no
legal move counts as check or fold and costs FINE. The hand goes on: ending it would pay the other player, who may be
the same policy, for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple

from swarm.environments.base import Environment, Messages, Step
from swarm.errors import UserError

FINE = 0.1  # Of a reward. It tells nonsense from a check.
ALPHA = 1 / 3  # How often the fixed opponent bluffs as the first player: as often as an equilibrium can
RULES = "Kuhn poker: cards J < Q < K, one each. Ante 1, bet 1. The higher card wins if nobody folds. Say your move."
_MOVE = re.compile(r"\b(check|bet|fold|call)s?\b")


class Hand(NamedTuple):
    """A hand when `player`, 0 or 1, has to move. `cards` are player 0's and player 1's."""

    cards: str
    said: tuple[str, ...] = ()

    @property
    def player(self) -> int:
        return len(self.said) % 2

    @property
    def moves(self) -> tuple[str, ...]:
        """The legal moves, the cautious one first; none if the hand is over."""
        if self.said[-1:] in (("call",), ("fold",)) or self.said == ("check", "check"):
            return ()
        return ("fold", "call") if "bet" in self.said else ("check", "bet")

    def play(self, move: str) -> Hand:
        return self._replace(said=(*self.said, move))

    def won(self) -> int:
        """What the first player wins of a hand that is over, in antes. The second loses as much."""
        if self.said[-1] == "fold":
            return 1 - 2 * self.player  # The turn is the winner's.
        mine, theirs = map("JQK".index, self.cards)
        return (1 + ("bet" in self.said)) * (1 if mine > theirs else -1)

    def told(self) -> str:
        """What the player whose turn it is may know of the hand."""
        who = ("you", "they")
        moves = ", ".join(f"{who[(turn - self.player) % 2]} {move}" for turn, move in enumerate(self.said))
        lines = [f"You play {('first', 'second')[self.player]}. Your card: {self.cards[self.player]}."]
        return "\n".join([*lines, *([f"So far: {moves}."] if moves else []), f"Your move: {' or '.join(self.moves)}?"])


Strategy = Callable[[Hand], Mapping[str, float]]  # How likely the player whose turn it is makes each move


def kuhn_equilibrium(hand: Hand, alpha: float = ALPHA) -> Mapping[str, float]:
    """Return how likely each move is in one of Kuhn's equilibria (1950): the first player bluffs with J with chance
    `alpha`, 0 to 1/3."""
    bold = {
        "J": {(): alpha, ("check",): 1 / 3},
        "Q": {("bet",): 1 / 3, ("check", "bet"): alpha + 1 / 3},
        "K": {(): 3 * alpha, ("check",): 1.0, ("bet",): 1.0, ("check", "bet"): 1.0},
    }
    chance = bold[hand.cards[hand.player]].get(hand.said, 0.0)
    return dict(zip(hand.moves, (1 - chance, chance), strict=True))


class KuhnPoker(Environment):
    """Rewards are antes won, halved."""

    name = "kuhn-poker"
    description = "Kuhn poker: three cards, one round of betting"
    max_turns = 3
    max_new_tokens = 64

    def __init__(self, *, opponent: str = "self") -> None:
        if opponent not in ("self", "random", "fixed"):
            raise UserError(f"{self.name} has no opponent {opponent!r}: say self, random or fixed")
        others: dict[str, Strategy] = {"random": lambda hand: dict.fromkeys(hand.moves, 1.0), "fixed": kuhn_equilibrium}
        self._other = others.get(opponent)
        self.seats = 1 if self._other else 2

    def reset(self, seed: int) -> Messages:
        self._random = Random(seed)
        # Places in the hand of those players that are the policy
        self._places = (self._random.randrange(2),) if self._other else (0, 1)
        self._greetings = dict.fromkeys(self._places, f"{RULES}\n\n")
        return self._go_on(Hand("".join(self._random.sample("JQK", 2))))

    def step(self, text: str) -> Step:
        legal, seat = self._hand.moves, self._places.index(self._hand.player)
        said = _MOVE.findall(text.rpartition("</think>")[2].lower())
        is_legal = said != [] and said[-1] in legal
        told = self._go_on(self._hand.play(said[-1] if is_legal else legal[0]))
        # Over the most that a hand can cost, so within -1..1, but for fines
        won = 0.0 if told else self._hand.won() / 2
        rewards = [won * (1 - 2 * place) for place in self._places]
        rewards[seat] -= 0.0 if is_legal else FINE
        after = self._places.index(self._hand.player) if told else seat
        parts = {} if is_legal else {"illegal_moves": 1.0}
        return Step(messages=told, rewards=rewards, done=not told, solved=rewards[0] > 0, seat=after, parts=parts)

    def _go_on(self, hand: Hand) -> Messages:
        """Play an opponent's moves that is not the policy. Return what is said to the next player, () at the end."""
        while self._other and hand.moves and hand.player not in self._places:
            chances = self._other(hand)
            hand = hand.play(self._random.choices(list(chances), list(chances.values()))[0])
        self._hand = hand
        return (("user", self._greetings.pop(hand.player, "") + hand.told()),) if hand.moves else ()
