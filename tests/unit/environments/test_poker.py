"""Kuhn poker: exact values, whose card is told to whom, and what nonsense costs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import permutations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.environments.poker import FINE, RULES, Hand, KuhnPoker, Strategy, kuhn_equilibrium
from swarm.environments.base import Messages, Step
from swarm.errors import UserError

KUHN = [Hand(a + b) for a, b in permutations("JQK", 2)]
SEEDS = st.integers(0, 2**40)
WORDS = ("check", "bet", "fold", "call", "raise")


def at_random(hand: Hand) -> Mapping[str, float]:
    return dict.fromkeys(hand.moves, 1 / len(hand.moves))


def expected(hand: Hand, first: Strategy, second: Strategy) -> float:
    """What the first player wins on average, in antes."""
    if not hand.moves:
        return hand.won()
    chances = (first, second)[hand.player](hand)
    assert sum(chances.values()) == pytest.approx(1)
    return sum(chance * expected(hand.play(move), first, second) for move, chance in chances.items() if chance)


def kuhn_value(first: Strategy, second: Strategy) -> float:
    return sum(expected(hand, first, second) for hand in KUHN) / len(KUHN)


def test_strategies_are_worth_what_the_document_says() -> None:
    """The first player of an equilibrium loses an 18th of an ante."""
    best = partial(kuhn_equilibrium, alpha=1 / 3)
    assert kuhn_value(best, best) == pytest.approx(-1 / 18)
    assert kuhn_value(at_random, at_random) == pytest.approx(1 / 8)
    assert kuhn_value(at_random, best) == pytest.approx(-1 / 6)
    assert kuhn_value(best, at_random) == pytest.approx(1 / 6)


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1 / 3])
def test_nobody_gains_by_leaving_the_equilibrium(alpha: float) -> None:
    best = partial(kuhn_equilibrium, alpha=alpha)
    for seed in range(200):
        chances: dict[object, float] = {}
        random = Random(seed)

        def other(hand: Hand, chances: dict[object, float] = chances, random: Random = random) -> Mapping[str, float]:
            known = (hand.cards[hand.player], hand.said)
            bold = chances.setdefault(known, random.choice((0.0, 1.0, random.random())))
            return {hand.moves[0]: 1 - bold, hand.moves[1]: bold}

        assert kuhn_value(other, best) <= -1 / 18 + 1e-9
        assert kuhn_value(best, other) >= -1 / 18 - 1e-9


@pytest.mark.parametrize(
    ("cards", "moves", "won"),
    [
        *(("KQ", "check check", 1), ("JQ", "bet call", -2), ("JQ", "bet fold", 1)),
        *(("KQ", "check bet fold", -1), ("KQ", "check bet call", 2)),
    ],
)
def test_kuhn_pays_as_its_rules_say(cards: str, moves: str, won: int) -> None:
    hand = Hand(cards)
    for move in moves.split():
        assert move in hand.moves
        hand = hand.play(move)
    assert (hand.moves, hand.won()) == ((), won)


def play(game: KuhnPoker, seed: int, said: Random) -> tuple[list[Step], list[str]]:
    """The steps of an episode of random words, and all that was told, with whom it was told to."""
    told = [f"0 {game.reset(seed)}"]
    steps: list[Step] = []
    while not (steps and steps[-1].done):
        steps.append(game.step(said.choice(WORDS)))
        told.append(f"{steps[-1].seat} {steps[-1].messages}")
    return steps, told


@given(SEEDS, SEEDS, st.sampled_from(["self", "random", "fixed"]))
def test_every_hand_ends_in_time_within_its_bounds_and_is_the_same_again(seed: int, said: int, opponent: str) -> None:
    game = KuhnPoker(opponent=opponent)
    steps, told = play(game, seed, Random(said))
    assert (steps, told) == play(game, seed, Random(said)) == play(KuhnPoker(opponent=opponent), seed, Random(said))
    assert len(steps) <= game.max_turns
    fines = FINE * sum(step.parts.get("illegal_moves", 0) for step in steps)
    returns = [sum(step.rewards[player] for step in steps) for player in range(game.seats)]
    assert all(-1 - fines <= one <= 1 for one in returns)
    assert all(step.messages and not any(abs(r) > FINE for r in step.rewards) for step in steps[:-1])
    assert steps[-1].messages == ()
    if opponent == "self":
        assert game.seats == 2
        assert sum(returns) == pytest.approx(-fines), "what one wins the other loses"


@given(SEEDS, SEEDS, st.sampled_from([0, 1]))
def test_nobody_is_told_the_other_card(seed: int, said: int, hidden: int) -> None:
    """Another hidden card changes no message of the player that may not see it."""
    game, other = KuhnPoker(), KuhnPoker()
    first = game.reset(seed)
    assert other.reset(seed) == first
    mine = game._hand.cards[1 - hidden]
    for card in "JQK":
        if card == mine:
            continue
        random = Random(said)
        first = game.reset(seed)
        other.reset(seed)
        cards = [*other._hand.cards]
        cards[hidden] = card
        other._hand = other._hand._replace(cards="".join(cards))
        seat, messages, done = 0, first, False
        their_messages: Messages = (("user", f"{RULES}\n\n{other._hand.told()}"),)
        while not done:
            if seat != hidden:
                assert their_messages == messages
            word = random.choice(WORDS)
            step, theirs = game.step(word), other.step(word)
            assert (theirs.seat, theirs.done, theirs.parts) == (step.seat, step.done, step.parts)
            seat, messages, their_messages, done = step.seat, step.messages, theirs.messages, step.done


def test_each_player_begins_with_all_that_it_has_to_know() -> None:
    game = KuhnPoker()
    assert game.reset(7)[0][1].startswith(f"{RULES}\n\nYou play first.")
    step = game.step("I would say: Checks.")
    assert (step.seat, step.parts) == (1, {})
    told = step.messages[0][1]
    assert told.startswith(f"{RULES}\n\nYou play second.")
    assert "they check" in told
    later = game.step("bet")
    assert later.seat == 0
    assert later.messages[0][1].startswith("You play first.")
    assert "you check, they bet" in later.messages[0][1]


def test_the_policy_sits_in_both_places_against_an_opponent() -> None:
    game = KuhnPoker(opponent="fixed")
    openings = [game.reset(seed)[0][1] for seed in range(50)]
    assert {("You play first" in one, "they" in one) for one in openings} == {(True, False), (False, True)}


@given(SEEDS, st.text(max_size=300))
def test_no_text_raises_and_nonsense_is_the_cautious_move_with_a_fine(seed: int, text: str) -> None:
    game, cautious = KuhnPoker(), KuhnPoker()
    game.reset(seed)
    cautious.reset(seed)
    text = text if not any(word in text.lower() for word in ("check", "bet")) else ""
    step, wanted = game.step(text), cautious.step("check")
    assert step.messages == wanted.messages
    assert step.rewards == [-FINE, 0.0]
    assert step.parts == {"illegal_moves": 1.0}


@pytest.mark.parametrize(
    ("text", "move"),
    [("<think>I check</think>bet", "bet"), ("Check or bet? BET!", "bet"), ("alphabet", None), ("call", None)],
)
def test_the_last_word_after_the_thoughts_is_the_move(text: str, move: str | None) -> None:
    game = KuhnPoker()
    game.reset(0)
    step = game.step(text)
    assert step.parts == ({} if move else {"illegal_moves": 1.0})
    assert f"they {move or 'check'}." in step.messages[0][1]


def test_nothing_is_won_without_playing_well() -> None:
    """Words that are not moves lose to every opponent; so does one word, whatever it is, to the fixed one."""
    for opponent in ("random", "fixed"):
        game = KuhnPoker(opponent=opponent)
        assert mean_return(game, "") < -0.2
    assert all(mean_return(KuhnPoker(opponent="fixed"), word) < 0 for word in WORDS)


def mean_return(game: KuhnPoker, word: str, hands: int = 2000) -> float:
    total = 0.0
    for seed in range(hands):
        game.reset(seed)
        done = False
        while not done:
            step = game.step(word)
            total, done = total + step.rewards[0], step.done
    return total / hands


def test_what_cannot_be_is_refused_in_a_line() -> None:
    with pytest.raises(UserError, match="say self, random or fixed"):
        KuhnPoker(opponent="me")
