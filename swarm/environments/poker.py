"""`kuhn-poker` and `leduc-poker`: the two smallest games in which it pays to bluff.

`opponent` is "self" (both players are the policy, each with its own messages), "random", or "fixed": for Kuhn an
equilibrium, for Leduc a cautious player by rule. A player sees its own card, the table's and all moves; never the
other's card, since at the end it has no turn left. A word that is no legal move counts as check or fold and costs FINE.
The hand goes on: ending it would pay the other player, who may be the same policy, for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import NamedTuple

from swarm.environments.base import Environment, Messages, Step
from swarm.errors import UserError

FINE = 0.1  # Of a reward. It tells nonsense from a check.
Strategy = Callable[["Hand"], Mapping[str, float]]  # How likely the player whose turn it is makes each move
_MOVE = re.compile(r"\b(check|bet|fold|call|raise)s?\b")


class Hand(NamedTuple):
    """A hand when `player`, 0 or 1, has to move. `cards` are player 0's, player 1's and for a second round the table's.
    A bet costs `prices` (antes) by round, in which `most` bets and raises are allowed. Player 0 begins every round."""

    cards: str
    prices: tuple[int, ...]
    most: int
    rounds: tuple[tuple[str, ...], ...] = ((),)

    @property
    def player(self) -> int:
        return len(self.rounds[-1]) % 2

    @property
    def moves(self) -> tuple[str, ...]:
        """The legal moves, from the most cautious to the boldest; none if the hand is over."""
        said = self.rounds[-1]
        if said[-1:] in (("call",), ("fold",)) or said == ("check", "check"):
            return ()
        bets = said.count("bet") + said.count("raise")
        return ("check", "bet") if not bets else ("fold", "call", "raise")[: 3 if bets < self.most else 2]

    def play(self, move: str) -> Hand:
        """The hand after a legal move. A round that is not the last is followed by the next at once."""
        after = self._replace(rounds=(*self.rounds[:-1], (*self.rounds[-1], move)))
        is_last = move == "fold" or len(self.rounds) == len(self.prices)
        return after if after.moves or is_last else after._replace(rounds=(*after.rounds, ()))

    def won(self) -> int:
        """What the first player wins of a hand that is over, in antes. The second loses as much."""
        by_round = zip(self.prices, self.rounds, strict=False)
        bets = [price for price, said in by_round for move in said if move in ("bet", "raise")]
        if self.rounds[-1][-1] == "fold":
            # The last bet was not paid, and the turn is the winner's.
            return (1 + sum(bets[:-1])) * (1 - 2 * self.player)
        mine, theirs = ((card in self.cards[2:], "JQK".index(card)) for card in self.cards[:2])
        return (1 + sum(bets)) * ((mine > theirs) - (mine < theirs))

    def told(self) -> str:
        """What the player whose turn it is may know of the hand."""
        lines = [f"You play {('first', 'second')[self.player]}. Your card: {self.cards[self.player]}."]
        for number, said in enumerate(self.rounds):
            lines += [f"Card on the table: {self.cards[2:]}."] * number
            moves = (f"{'you' if turn % 2 == self.player else 'they'} {move}" for turn, move in enumerate(said))
            lines += [f"Round {number + 1}: {', '.join(moves)}."] if said else []
        return "\n".join([*lines, f"Your move: {', '.join(self.moves[:-1])} or {self.moves[-1]}?"])


def kuhn_equilibrium(hand: Hand, alpha: float) -> Mapping[str, float]:
    """Kuhn's equilibria (1950). The first player bluffs with J with chance `alpha`."""
    bold = {
        "J": {(): alpha, ("check",): 1 / 3},
        "Q": {("bet",): 1 / 3, ("check", "bet"): alpha + 1 / 3},
        "K": {(): 3 * alpha, ("check",): 1.0, ("bet",): 1.0, ("check", "bet"): 1.0},
    }
    chance = bold[hand.cards[hand.player]].get(hand.rounds[0], 0.0)
    return dict(zip(hand.moves, (1 - chance, chance), strict=True))


def leduc_by_rule(hand: Hand) -> Mapping[str, float]:
    """Go as high as one may with a pair, or a K before the table's card; fold a J without a pair; else stay."""
    card, table = hand.cards[hand.player], hand.cards[2] if len(hand.rounds) > 1 else ""
    is_strong = card == table or (card == "K" and not table)
    return {hand.moves[-1 if is_strong else card != "J" and "call" in hand.moves]: 1.0}


class _Poker(Environment):
    max_new_tokens = 64
    deck: str
    rules: str

    def __init__(self, opponent: str, fixed: Strategy, prices: tuple[int, ...], most: int) -> None:
        if opponent not in ("self", "random", "fixed"):
            raise UserError(f"{self.name} has no opponent {opponent!r}: say self, random or fixed")
        self._other = {"random": lambda hand: dict.fromkeys(hand.moves, 1.0), "fixed": fixed}.get(opponent)
        self._empty = Hand("", prices, most)
        self.seats = 1 if self._other else 2
        self.max_turns = len(prices) * (2 + most)

    def reset(self, seed: int) -> Messages:
        self._random = Random(seed)
        # Places in the hand of those players that are the policy
        self._places = (self._random.randrange(2),) if self._other else (0, 1)
        self._greetings = dict.fromkeys(self._places, f"{self.rules}\n\n")
        cards = self._random.sample(self.deck, 1 + len(self._empty.prices))
        return self._go_on(self._empty._replace(cards="".join(cards)))

    def step(self, text: str) -> Step:
        legal, seat = self._hand.moves, self._places.index(self._hand.player)
        said = _MOVE.findall(text.rpartition("</think>")[2].lower())
        is_legal = said != [] and said[-1] in legal
        told = self._go_on(self._hand.play(said[-1] if is_legal else legal[0]))
        # Over the most that a hand can cost, so within -1..1, but for fines
        won = 0.0 if told else self._hand.won() / (1 + self._hand.most * sum(self._hand.prices))
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


class KuhnPoker(_Poker):
    """Rewards are antes won, halved. `alpha` is the fixed opponent's."""

    name = "kuhn-poker"
    description = "Kuhn poker: three cards, one round of betting"
    deck = "JQK"
    rules = "Kuhn poker: cards J < Q < K, one each. Ante 1, bet 1. The higher card wins if nobody folds. Say your move."

    def __init__(self, *, opponent: str = "self", alpha: float = 1 / 3) -> None:
        if not 0 <= alpha <= 1 / 3:
            raise UserError(f"{self.name} is in equilibrium with an alpha from 0 to 1/3, not {alpha:g}")
        super().__init__(opponent, partial(kuhn_equilibrium, alpha=alpha), (1,), 1)


class LeducPoker(_Poker):
    """Rewards are antes won, over the 13 that a hand can cost."""

    name = "leduc-poker"
    description = "Leduc poker: six cards, two rounds of betting"
    deck = "JJQQKK"
    rules = """Leduc poker: cards J J Q Q K K, one each and in round 2 one on the table. Ante 1; a bet or raise is 2, \
then 4. A pair with the table wins, else the higher card, if nobody folds. Say your move."""

    def __init__(self, *, opponent: str = "self") -> None:
        super().__init__(opponent, leduc_by_rule, (2, 4), 2)
