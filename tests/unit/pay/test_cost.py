"""The book of what a run costs."""

from __future__ import annotations

import math

import pytest

from swarm.pay.cost import CostBook
from swarm.pay.estimator import MAX_CLASSES, OTHER
from swarm.pay.fleet import MAX_NODES, Terms

HOUR_S = 3600.0


@pytest.fixture
def costs() -> CostBook:
    return CostBook(learner_cost_per_hour=7.0, learner_up_cost_per_gb=0.09, now=100.0)


def rent_of(costs: CostBook, now: float) -> float:
    return sum(tally.rent for tally in costs.figures(now).by_class.values())


def test_a_run_by_hand(costs: CostBook) -> None:
    costs.joined("a", Terms("4090", (0.4, 0.004, 0.006)), now=100.0)
    costs.joined("b", Terms("3090", (0.2, 0.0, 0.0)), now=100.0)  # And stands by for an hour, which costs nothing
    costs.activated("a", now=100.0)
    costs.activated("b", now=100.0 + HOUR_S)
    costs.accepted("a", rollouts=300, tokens=60_000)
    costs.accepted("b", rollouts=100, tokens=20_000)
    costs.traffic("a", down_bytes=10e9, up_bytes=5e9)
    costs.traffic("b", down_bytes=10e9, up_bytes=5e9)
    costs.learner_sent(20e9)
    for _ in range(4):
        costs.stepped()
    costs.stood_by("a", now=100.0 + 1.5 * HOUR_S)
    figures = costs.figures(100.0 + 2 * HOUR_S)
    rent, traffic = 0.6 + 0.2, 0.04 + 0.03 + 1.8
    assert figures.total == pytest.approx(14.0 + rent + traffic)
    assert (figures.steps, figures.rollouts, figures.tokens) == (4, 400, 80_000)
    assert sum(tally.rent for tally in figures.by_class.values()) == pytest.approx(rent)
    assert figures.rate_per_hour == pytest.approx(7.2)
    nodes = costs.by_node(100.0 + 2 * HOUR_S)
    assert nodes["a"].cost == pytest.approx(0.67)
    assert nodes["a"].active_s == pytest.approx(1.5 * HOUR_S)
    assert figures.by_class["3090"] == nodes["b"]


def test_a_new_price_counts_from_then_on(costs: CostBook) -> None:
    costs.joined("a", Terms("4090", (0.4, 0.0, 0.0)), now=100.0)
    costs.activated("a", now=100.0)
    costs.joined("a", Terms("4090", (0.8, 0.0, 0.0)), now=100.0 + HOUR_S)
    assert rent_of(costs, 100.0 + 2 * HOUR_S) == pytest.approx(1.2)


def test_what_waiting_would_cost_stands_apart(costs: CostBook) -> None:
    costs.joined("a", Terms("4090", (0.4, 0.0, 0.0)), now=100.0)
    costs.joined("b", Terms("3090", (0.2, 0.0, 0.0)), now=100.0)
    costs.activated("b", now=100.0)
    costs.joined("a", Terms("4090", (0.8, 0.0, 0.0)), now=100.0 + HOUR_S)  # Dearer for its second hour
    costs.activated("a", now=100.0 + 2 * HOUR_S)
    costs.stood_by("b", now=100.0 + 2 * HOUR_S)
    costs.left("b", now=100.0 + 3 * HOUR_S)
    costs.left("a", now=100.0 + 3 * HOUR_S)
    figures = costs.figures(100.0 + 9 * HOUR_S)
    assert figures.standby == pytest.approx(0.4 + 0.8 + 0.2)
    assert figures.total == pytest.approx(7.0 * 9 + 2 * 0.2 + 0.8)
    costs.joined("a", Terms("4090", (0.4, 0.0, 0.0)), now=100.0 + 9 * HOUR_S)
    assert costs.figures(100.0 + 10 * HOUR_S).standby == pytest.approx(1.8)


def test_the_work_of_a_stranger_counts_and_costs_nothing(costs: CostBook) -> None:
    costs.accepted("x", rollouts=5, tokens=50)
    costs.traffic("x", down_bytes=1e9, up_bytes=1e9)
    costs.activated("x", now=100.0)
    figures = costs.figures(200.0)
    assert (figures.rollouts, figures.tokens) == (5, 50)
    assert figures.total == pytest.approx(7.0 * 100 / HOUR_S)


def test_the_book_is_bounded_and_no_cost_is_lost(costs: CostBook) -> None:
    for number in range(MAX_NODES + 500):
        node = f"n{number}"
        costs.joined(node, Terms(f"class {number}", (3600.0, 0.0, 0.0)), now=100.0 + number)
        costs.activated(node, now=100.0 + number)
        costs.left(node, now=101.0 + number)
    figures = costs.figures(101.0 + number)
    nodes = costs.by_node(101.0 + number)
    assert len(nodes) == MAX_NODES
    assert len(figures.by_class) == MAX_CLASSES
    assert figures.by_class[OTHER].rent > 0
    assert rent_of(costs, 101.0 + number) == pytest.approx(MAX_NODES + 500)
    assert "n0" not in nodes


@pytest.mark.parametrize("price", [math.nan, math.inf, -1.0])
def test_what_is_no_price_is_refused(costs: CostBook, price: float) -> None:
    with pytest.raises(ValueError, match="price must be"):
        CostBook(learner_cost_per_hour=price, now=0.0)
    with pytest.raises(ValueError, match="price must be"):
        costs.joined("a", Terms("4090", (price, 0.0, 0.0)), now=100.0)


def test_an_event_of_one_sampler_reads_no_other(costs: CostBook) -> None:
    """A class of thousands that leaves at once would stop the event loop for seconds otherwise."""
    for number in range(100):
        costs.joined(f"n{number}", Terms("4090", (1.0, 0.0, 0.0)), now=100.0)
        costs.activated(f"n{number}", now=100.0)
    others = [account.sums for name, account in costs._accounts.items() if name != "n0"]
    costs.left("n0", now=100.0 + HOUR_S)
    assert rent_of(costs, 100.0 + HOUR_S) == pytest.approx(100.0)
    assert all(sums.charged_at == 100.0 for sums in others)
    assert sum(tally.rent for tally in costs.by_node(100.0 + 2 * HOUR_S).values()) == pytest.approx(199.0)


def test_nothing_is_charged_once_all_are_gone(costs: CostBook) -> None:
    for number in range(10):
        costs.joined(f"n{number}", Terms("4090", (0.1 * number, 0.0, 0.0)), now=100.0)
        costs.activated(f"n{number}", now=100.0)
    for number in range(10):
        costs.left(f"n{number}", now=100.0)
    assert rent_of(costs, 100.0 + HOUR_S) == 0.0
    assert costs.figures(100.0 + HOUR_S).rate_per_hour == 7.0
