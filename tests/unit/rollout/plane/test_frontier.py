"""Prompts at the frontier: which are drawn more often, that none is given up, and that a restart chooses as before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import NoReturn

import pytest

from swarm.rollout.journal.entries import GroupOpened, Record, Tried
from swarm.rollout.plane.effects import Effect, Granted
from swarm.rollout.plane.frontier import CANDIDATES, HALF_LIFE, Frontier
from swarm.rollout.plane.plane import RolloutPlane
from swarm.types import Lease, Prompt, Score
from tests.builders import ALICE, answering, answers, new_plane, v
from tests.simulator.rollouts.ledger import Ledger

POOL = 24
TRIES = 8


def prompt(number: int) -> Prompt:
    """A pool in epochs, each in another order but the first."""
    epoch, place = divmod(number, POOL)
    place = Random(epoch).sample(range(POOL), POOL)[place] if epoch else place
    return Prompt(prompt_id=f"p{place}", text=f"{place}=", answer="1", token_ids=(1, place))


def sum_of(digits: int, number: int) -> Prompt:
    """One of prompts without end, with as many digits."""
    return Prompt(prompt_id=f"{digits}/{number}", text="7" * digits, answer="1", token_ids=(1,) * digits)


def tell(frontier: Frontier, one: Prompt, right: int, *, step: int, number: int = 0) -> None:
    """So many of TRIES were right, in batch `step`."""
    frontier.note(Tried(number, number, step, TRIES, float(right), float(right == TRIES), float(right > 0)), one)


def told(*right: int) -> Frontier:
    """What is known once prompt i of the pool was right so many times, in batch 0."""
    frontier = Frontier(seed=1)
    for place, times in enumerate(right):
        tell(frontier, prompt(place), times, step=0, number=place)
    frontier.fold(before=1)
    return frontier


def chosen(frontier: Frontier, candidates: Sequence[Prompt], *, step: int = 1, groups: int = 2000) -> Counter[int]:
    return Counter(frontier.choose(number, step, candidates, ()) for number in range(groups))


def test_what_is_right_now_and_then_is_drawn_most_and_nothing_is_given_up() -> None:
    often = chosen(told(0, 4, 8), [prompt(place) for place in range(3)])
    assert often[1] > 2 * max(often[0], often[2])
    assert min(often[0], often[2]) > 0.02 * sum(often.values())


def test_a_prompt_that_was_never_right_in_hundreds_of_tries_is_still_drawn() -> None:
    frontier = told(0, 4)
    for step in range(1, 60):
        tell(frontier, prompt(0), 0, step=step)
        frontier.fold(before=step + 1)
    assert chosen(frontier, [prompt(0), prompt(1)], step=60)[0] > 0.04 * 2000


def test_a_prompt_whose_answers_are_all_half_right_teaches_nothing_either() -> None:
    """Rewards of 0 and 1, and one of 0.5 for each answer to the middle prompt."""
    frontier = Frontier(seed=1)
    for place, (mean, lowest, highest) in enumerate(((0.0, 0.0, 0.0), (0.5, 0.5, 0.5), (0.5, 0.0, 1.0))):
        frontier.note(Tried(place, place, 0, TRIES, TRIES * mean, lowest, highest), prompt(place))
    frontier.fold(before=1)
    low, between, mixed = (frontier.expected_variance(prompt(place), 1) for place in range(3))
    assert mixed > 4 * max(low, between)


def test_little_is_expected_of_new_prompts_where_each_was_always_right_or_never() -> None:
    frontier = told(*[0, TRIES] * 8, TRIES // 2)
    assert frontier.expected_variance(prompt(16), 1) > 4 * frontier.expected_variance(prompt(17), 1)


def test_before_any_group_had_unlike_rewards_all_prompts_are_alike() -> None:
    often = chosen(told(0, 0, 8), [prompt(place) for place in range(4)])
    assert min(often[place] for place in range(4)) > 0.1 * 2000


def test_what_was_tried_long_ago_is_tried_again() -> None:
    frontier = told(0, 4, 4, 4)
    at_once, later = (frontier.expected_variance(prompt(0), step) for step in (1, 1 + round(10 * HALF_LIFE)))
    assert later > 2 * at_once


def test_what_counts_is_what_was_tried_last() -> None:
    """A prompt that has become easy."""
    frontier = told(4, 4)
    for step in range(1, 60):
        tell(frontier, prompt(0), TRIES, step=step)
        frontier.fold(before=step + 1)
    assert frontier.expected_variance(prompt(0), 60) < 0.2 * frontier.expected_variance(prompt(1), 60)


def test_difficulty_is_foreseen_where_no_prompt_comes_twice() -> None:
    """Short ones are right, long ones are not: those between are drawn."""
    frontier = Frontier(seed=1)
    for number in range(100):
        digits = 1 + number % 9
        tell(frontier, sum_of(digits, number), TRIES if digits < 5 else TRIES // 2 if digits == 5 else 0, step=0)
    frontier.fold(before=1)
    often = chosen(frontier, [sum_of(digits, 1000 + digits) for digits in (1, 5, 9)])
    assert often[1] > 2 * max(often[0], often[2])


def test_a_prompt_that_is_being_drawn_is_chosen_if_no_other_is_there() -> None:
    frontier, candidates = told(4, 4, 4), [prompt(0), prompt(1)]
    assert {frontier.choose(number, 1, candidates, {"p0"}) for number in range(50)} == {1}
    assert {frontier.choose(number, 1, candidates, {"p0", "p1"}) for number in range(50)} == {0, 1}


def test_rewards_count_only_once_their_batch_is_taken() -> None:
    frontier = told(4, 4)
    tell(frontier, prompt(0), 0, step=1)
    before = frontier.expected_variance(prompt(0), 1)
    frontier.fold(before=1)
    assert frontier.expected_variance(prompt(0), 1) == before
    frontier.fold(before=2)
    assert frontier.expected_variance(prompt(0), 1) < before


# -- in the plane ----------------------------------------------------------------------------------------------------


def _breach(rule: str, what: str) -> NoReturn:
    raise AssertionError(f"{rule}: {what}")


class Life:
    """A plane that selects, what it has on record, and a sampler that is right half the time to half of the prompts."""

    def __init__(self, *, dynamic: bool) -> None:
        rules = replace(new_plane(size=4).rules, selection="frontier", dynamic_sampling=dynamic)
        self.plane, self.ledger, self.draw = RolloutPlane(rules, prompts=prompt), Ledger(4, _breach), Random(3)
        self.plane.published(v(0))
        self.asked: Counter[str] = Counter()

    def note(self, effects: Sequence[Effect]) -> None:
        self.ledger.read([effect for effect in effects if isinstance(effect, Record)])

    def answer(self, leases: Sequence[Lease], version: int) -> None:
        for lease, given in answers(leases, version):
            self.note(self.plane.submit(ALICE, answering(lease, given), now=0.0))
            group = self.plane.leased.group(lease.group_id)
            assert group is not None
            rate = 0.5 * (int(group.prompt.prompt_id[1:]) >= POOL / 2)
            score = Score(reward=float(self.draw.random() < rate), exact=False)
            self.note(self.plane.scored(given.group_id, given.index, score))

    def step(self, version: int) -> None:
        while not self.plane.can_take(now=0.0):
            *effects, granted = self.plane.ask(ALICE, v(version), 8, now=0.0)
            self.note(effects)
            assert isinstance(granted, Granted)
            self.asked.update(group.prompt.prompt_id for group in self.plane.leased.groups())
            self.answer(granted.leases, version)
        self.note(self.plane.take()[1])
        self.plane.published(v(version + 1))

    def restored(self) -> RolloutPlane:
        plane = RolloutPlane(replace(self.plane.rules, life=1), prompts=prompt)
        plane.restore(self.ledger.run(), now=0.0)
        plane.published(v(self.plane.next_batch))
        return plane


def next_opened(plane: RolloutPlane) -> list[GroupOpened]:
    effects = plane.ask(ALICE, v(plane.next_batch), 40, now=0.0)
    return [effect for effect in effects if isinstance(effect, GroupOpened)]


def known(plane: RolloutPlane) -> list[float]:
    assert plane._frontier is not None
    return [plane._frontier.expected_variance(prompt(place), plane.next_batch) for place in range(POOL)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_restart_chooses_as_the_plane_would_have_that_went_on(dynamic: bool) -> None:
    life = Life(dynamic=dynamic)
    for version in range(60):
        life.step(version)
        if version % 20 == 9:
            life.asked.clear()
            found = next_opened(life.restored())
            assert all(one.prompt_number // CANDIDATES == one.number for one in found)
            assert found != next_opened(RolloutPlane(life.plane.rules, prompts=prompt)), "it knows nothing"
    assert known(life.restored()) == known(life.plane)
    assert next_opened(life.restored()) == next_opened(life.plane)
    never = sum(life.asked[f"p{place}"] for place in range(POOL // 2))
    assert 0 < never < 0.35 * life.asked.total(), "half of the pool is never answered right"


def test_what_is_open_keeps_its_prompt_after_a_restart() -> None:
    life = Life(dynamic=False)
    life.note(life.plane.ask(ALICE, v(0), 8, now=0.0)[:-1])
    before = {group.group_id: group.prompt for group in life.plane.leased.groups()}
    assert {group.group_id: group.prompt for group in life.restored().leased.groups()} == before
    assert any(prompt(int(name[1:])) != asked for name, asked in before.items()), "the group's number is no prompt's"
