"""When samplers are activated and stood by, and what they are told."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from swarm.pay.activation import (
    DWELL_DECISIONS,
    LITTLE_DECISIONS,
    PROBE_S,
    PROBES,
    QUICKEST_DECISIONS,
    SETTLING_DECISIONS,
    Activation,
    dwell_decisions,
    gather_s,
)
from swarm.pay.fleet import Demand, Worker
from swarm.pay.selection import Rules
from tests.capacity import Change, by_downlink, decided, demand, worker

PERIOD_S = 120.0


class Run:
    """One activation, asked once a period."""

    def __init__(self, workers: list[Worker], rules: Rules | None = None) -> None:
        self.workers = workers
        self.demand: Demand | None = demand()
        self.activation = Activation(rules or Rules())
        self.now = 0.0

    def step(self, *, idle_share: float | None = None) -> list[Change]:
        self.now += PERIOD_S
        return decided(self.activation, self.demand, self.workers, by_downlink, now=self.now, idle_share=idle_share)

    def steps(self, count: int, *, idle_share: float | None = None) -> list[list[Change]]:
        return [self.step(idle_share=idle_share) for _ in range(count)]

    @property
    def active(self) -> frozenset[str]:
        return self.activation.active


def cards(count: int, rate: float, cost: float, name: str = "card") -> list[Worker]:
    return [worker(f"{name}{number}", rate, cost, device_class=name) for number in range(count)]


def activated(changes: list[Change]) -> set[str]:
    return {node for node, is_active in changes if is_active}


def stood_by(changes: list[Change]) -> set[str]:
    return {node for node, is_active in changes if not is_active}


def settled(workers: list[Worker], rules: Rules | None = None) -> Run:
    run = Run(workers, rules)
    run.step()
    return run


@pytest.fixture
def run() -> Run:
    return settled(cards(20, 0.3, 0.2))


def dear_and_cheap(dear: float, cheap: float = 0.2) -> Run:
    """Twenty dear ones are active when twenty cheap ones come."""
    run = settled(cards(20, 0.3, dear, "dear"))
    run.workers = [*run.workers, *cards(20, 0.3, cheap, "cheap")]
    return run


def is_left_alone(run: Run, decisions: int, *, idle_share: float | None = None) -> bool:
    return not any(run.steps(decisions, idle_share=idle_share))


def test_while_nothing_is_known_everybody_is_active_within_the_budget() -> None:
    for budget, count in ((1.0, 5), (None, 20)):
        run = Run(cards(20, 0.3, 0.2), Rules(budget_per_hour=budget))
        run.demand = None
        assert len(activated(run.step())) == count
    assert run.activation.selection is None
    run.demand, run.workers = demand(), cards(20, 0.0, 0.2)
    assert run.step() == []


@pytest.mark.parametrize(("budget", "new"), [(None, 4), (2.6, 2)])
def test_lost_samplers_are_replaced_in_the_same_decision_within_the_budget(budget: float | None, new: int) -> None:
    run = settled([*cards(10, 0.3, 0.2), *cards(20, 0.3, 0.3, "dear")], Rules(budget_per_hour=budget))
    lost = sorted(run.active)[:4]
    stay = run.active - set(lost)
    run.workers = [one for one in run.workers if one.name not in lost]
    changes = run.step()
    assert len(activated(changes)) == len(changes) == new
    assert stay < run.active
    assert run.activation.selection is not None
    assert run.activation.selection.feasible == (budget is None)
    assert budget is None or 2.2 < run.activation.selection.cost_per_hour <= budget
    assert all("lost" in run.activation.reason(node) for node in activated(changes))
    assert is_left_alone(run, 6)
    run.workers = []
    assert run.step() == []
    assert run.active == frozenset()


@pytest.mark.parametrize(("dear", "cheap", "decisions"), [(0.5, 0.2, QUICKEST_DECISIONS), (0.2, 0.18, DWELL_DECISIONS)])
def test_cheaper_samplers_replace_dear_ones_after_a_dwell(dear: float, cheap: float, decisions: int) -> None:
    run = dear_and_cheap(dear, cheap)
    assert is_left_alone(run, decisions - 1)
    assert "when that has lasted" in run.activation.reason("cheap0")
    assert {name[:4] for name in stood_by(run.step())} == {"dear"}
    assert {name[:4] for name in run.active} == {"chea"}
    assert "cost more" in run.activation.reason("dear0")
    assert "costs less" in run.activation.reason(sorted(run.active)[0])


def test_a_saving_must_be_more_than_small_and_must_last() -> None:
    assert is_left_alone(dear_and_cheap(0.206), 3 * DWELL_DECISIONS)
    run = dear_and_cheap(0.5)
    both, dear = run.workers, run.workers[:20]
    for _ in range(2):
        run.workers = both
        assert is_left_alone(run, QUICKEST_DECISIONS - 1)
        run.workers = dear
        assert run.step() == []


@pytest.mark.parametrize(("saving", "decisions"), [(0.05, 20.0), (0.3, 5.0), (1.0, 4.0)])
def test_what_saves_much_has_to_last_less(saving: float, decisions: float) -> None:
    assert dwell_decisions(saving) == pytest.approx(decisions)


def test_who_was_just_activated_stays_for_a_dwell() -> None:
    run = settled(cards(15, 0.3, 0.2))
    run.workers = [*run.workers[:10], *cards(20, 0.3, 0.5, "dear")]
    assert activated(run.step())
    run.workers = [*run.workers, *cards(20, 0.3, 0.1, "cheap")]
    assert is_left_alone(run, QUICKEST_DECISIONS - 1)


def test_a_shorter_step_is_answered_when_it_was_seen_again_and_again() -> None:
    run = settled(cards(40, 0.3, 0.2))
    run.steps(SETTLING_DECISIONS, idle_share=0.0)
    run.demand = demand(train_step_s=90.0)
    assert is_left_alone(run, LITTLE_DECISIONS - 1, idle_share=0.2)
    changes = run.step(idle_share=0.2)
    assert len(activated(changes)) > 1, "as many as the closed form says, not one by one"
    assert stood_by(changes) == set()


def test_what_it_shrinks_to_would_have_been_enough_at_every_decision() -> None:
    run = Run(cards(60, 0.3, 0.2))
    run.demand = None
    run.step()
    for number in range(QUICKEST_DECISIONS):
        run.demand = demand(train_step_s=100.0 if number == 2 else 120.0)
        run.step()
    assert len(run.active) == math.ceil(512 / 100 * 0.98 * 1.05 / 0.3)


def test_samplers_of_unknown_rate_are_tried_a_few_at_a_time(run: Run) -> None:
    before = run.active
    new = cards(6, 0.0, 0.1, "new")
    run.workers = [*run.workers, *new]
    changes = run.step()
    assert activated(changes) == {"new0", "new1"}
    assert "being measured" in run.activation.reason("new0")
    assert "not known yet" in run.activation.reason("new5")
    run.workers = [*run.workers[:20], *cards(2, 0.3, 0.1, "new"), *new[2:]]
    assert activated(run.step()) == {"new2", "new3"}
    assert before < run.active


def test_the_first_that_gives_a_rate_sends_nobody_away_who_is_still_being_measured() -> None:
    run = Run(cards(10, 0.0, 0.2))
    run.step()
    run.workers = [*cards(1, 0.3, 0.2), *run.workers[1:]]
    assert run.step() == []
    run.now += PROBE_S
    assert len(stood_by(run.step())) == 9 - PROBES


def test_one_that_never_gives_a_rate_makes_room_for_the_next(run: Run) -> None:
    run.workers = [*run.workers, *cards(3, 0.0, 0.1, "new")]
    run.step()
    run.now += PROBE_S
    changes = run.step()
    assert "new2" in activated(changes)
    assert len({"new0", "new1"} & run.active) == 1


def test_nobody_is_tried_beyond_the_budget() -> None:
    run = settled(cards(20, 0.3, 0.2), Rules(budget_per_hour=3.2))
    assert run.activation.selection is not None
    assert run.activation.selection.cost_per_hour == pytest.approx(3.0)
    run.workers = [*run.workers, *cards(3, 0.0, 0.5, "new"), *cards(1, 0.0, 0.1, "fresh")]
    assert activated(run.step()) == {"fresh0"}


def test_after_a_restart_those_stay_who_were_active_as_far_as_the_budget_goes() -> None:
    run = settled(cards(40, 0.3, 0.2))
    before = run.active
    run.workers = run.workers[::-1]
    for budget, stay in ((None, len(before)), (1.0, 5)):
        run.activation = Activation(Rules(budget_per_hour=budget))
        run.activation.resume(before)
        assert not activated(run.step())
        assert len(run.active) == stay


def test_all_are_active_if_that_is_wanted() -> None:
    run = Run([*cards(20, 0.3, 0.2), *cards(5, 0.0, 0.2, "new")], Rules(activate="all"))
    run.step()
    assert len(run.active) == 25


def test_where_the_model_is_too_kind_the_margin_grows_until_the_learner_is_busy() -> None:
    run = settled(cards(40, 0.3, 0.2))
    before = len(run.active)
    run.steps(2 * (LITTLE_DECISIONS + SETTLING_DECISIONS), idle_share=0.1)
    assert len(run.active) > before
    run.steps(90, idle_share=0.5)
    most = len(run.active)
    assert 1.4 * before < most < 40
    run.steps(60, idle_share=0.0)
    assert len(run.active) < most


def test_where_the_set_has_much_to_spare_and_the_learner_waits_the_next_cheapest_steps_in_at_once() -> None:
    run = settled(cards(6, 3.0, 2.0))
    assert len(run.active) == 2, "6 rollouts/s where 4.4 are needed"
    run.steps(SETTLING_DECISIONS, idle_share=0.0)
    assert is_left_alone(run, LITTLE_DECISIONS - 1, idle_share=0.2)
    assert len(activated(run.step(idle_share=0.2))) == 1


def test_a_margin_does_not_grow_where_nobody_is_left_to_step_in() -> None:
    run = settled(cards(15, 0.3, 0.2))
    assert len(run.active) == 15
    run.steps(20, idle_share=0.3)
    run.workers = cards(40, 0.3, 0.2)
    run.steps(LITTLE_DECISIONS, idle_share=0.3)
    assert len(run.active) <= 17


def test_a_learner_that_waits_just_after_a_change_waits_for_starts() -> None:
    run = settled(cards(40, 0.3, 0.2))
    assert is_left_alone(run, 5, idle_share=0.3)
    assert is_left_alone(run, 30, idle_share=0.0)


def test_figures_without_sense_are_stood_by_and_told(run: Run) -> None:
    bad = sorted(run.active)[0]
    run.workers = [replace(one, cost_per_hour=float("nan")) if one.name == bad else one for one in run.workers]
    changes = run.steps(2)
    assert bad not in run.active
    assert "prices must be numbers" in run.activation.reason(bad)
    assert activated(changes[0] + changes[1])


def claiming(count: int, cost: float, name: str) -> list[Worker]:
    """Of a class that nobody has proven."""
    return [replace(one, claimed_rollouts_per_s=3.0) for one in cards(count, 0.1, cost, name)]


def test_of_a_class_that_is_only_claimed_one_is_tried_and_then_another(run: Run) -> None:
    before = run.active
    run.workers = [*run.workers, *claiming(3, 1.0, "new")]
    ((first, _),) = run.step()
    assert "no node of your class has been measured" in run.activation.reason(first)
    assert run.activation.selection is not None
    assert set(run.activation.selection.active) == before
    assert run.step() == []
    run.now += PROBE_S
    changes = run.step()
    assert stood_by(changes) == {first}
    assert len(activated(changes)) == 1
    assert before < run.active
    # It stands by as soon as it proves dear.
    run.workers = [*run.workers[:20], *cards(3, 0.4, 1.0, "new")]
    assert {name[:3] for name in stood_by(run.step())} == {"new"}
    assert run.active == before


def test_classes_that_are_tried_share_the_room_of_the_unknown_and_those_dearer_by_their_claims_are_not_tried() -> None:
    run = settled(cards(20, 0.3, 0.2))
    run.workers = [*run.workers, *claiming(3, 2.1, "new")]
    assert is_left_alone(run, 5)
    run.workers += [one for number in range(9) for one in claiming(2, 1.0, f"new{number}-")]
    assert len(activated(run.step())) == PROBES


def test_two_percent_of_the_active_gone_call_for_a_decision() -> None:
    run = settled(cards(300, 0.06, 0.2))
    active = sorted(run.active)
    assert 50 < len(active) <= 100
    waiting = next(one.name for one in run.workers if one.name not in run.active)
    assert not run.activation.calls_for_decision(gone=active[:1], came=0)
    assert not run.activation.calls_for_decision(gone=[active[0], waiting], came=9)
    assert run.activation.calls_for_decision(gone=active[:2], came=0)


def test_newcomers_call_for_a_decision_where_somebody_is_missing() -> None:
    run = Run(cards(5, 0.3, 0.2))
    assert not run.activation.calls_for_decision(gone=(), came=0)
    assert run.activation.calls_for_decision(gone=(), came=1)
    run.step()
    assert run.activation.calls_for_decision(gone=(), came=1)
    run.workers = cards(20, 0.3, 0.2)
    run.steps(2 * (LITTLE_DECISIONS + SETTLING_DECISIONS), idle_share=0.5)
    assert not run.activation.calls_for_decision(gone=(), came=1)


@pytest.mark.parametrize(("period_s", "wait_s"), [(0.0, 0.0), (100.0, 5.0), (900.0, 10.0)])
def test_news_are_gathered_for_a_part_of_a_period_and_not_for_long(period_s: float, wait_s: float) -> None:
    assert gather_s(period_s) == pytest.approx(wait_s)


def test_while_those_that_stepped_in_are_starting_no_margin_is_added_for_what_they_do_not_give_yet() -> None:
    slow_start = [replace(one, start_s=20 * PERIOD_S) for one in cards(40, 0.3, 0.2)]
    run = settled(slow_start)
    lost = sorted(run.active)[:5]
    run.workers = [one for one in run.workers if one.name not in lost]
    assert activated(run.step())
    assert is_left_alone(run, 20, idle_share=0.3)
    assert not is_left_alone(run, 12, idle_share=0.3)
