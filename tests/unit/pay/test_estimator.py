"""What the estimator makes of measurements, of stalls, of lies and of nothing at all."""

from __future__ import annotations

import math

import pytest

from swarm.pay.estimator import JUDGED_S, MAX_CLASSES, OTHER, PROVEN_ROLLOUTS, Estimator, SamplerSeen, StartValues
from swarm.pay.fleet import MAX_NODES, Demand, Lengths, Terms, Worker

HOUR_S = 3600.0


def joined(*nodes: str, device_class: str = "card", start: StartValues | None = None) -> Estimator:
    estimator = Estimator(start or StartValues())
    for node in nodes:
        estimator.joined(node, Terms(device_class, (0.2, 0.0, 0.0)), now=0.0)
        estimator.activated(node, now=0.0)
    return estimator


def demand_of(estimator: Estimator) -> Demand | None:
    return estimator.demand(
        groups_per_step=4, group_size=8, publish_every_steps=1, max_staleness=2, freshness="adaptive"
    )


def works(estimator: Estimator, node: str, *, rate: float, claim: float, until_s: float = 1000.0) -> None:
    """It claims a rate in each of ten beats, and so much of its work is accepted."""
    for beat in range(1, 11):
        now = until_s * beat / 10
        estimator.generated(node, [100] * round(rate * until_s / 10), now=now)
        estimator.rate(node, claim, 8, False)


def worker_of(estimator: Estimator, node: str, now: float = 1000.0) -> Worker:
    return next(worker for worker in estimator.workers(now) if worker.name == node)


def test_without_samples_every_figure_has_its_start_value_and_without_one_there_is_no_demand() -> None:
    estimator = joined("a", start=StartValues(train_step_s=50.0, lengths=Lengths(tokens=(7.0,)), start_s=34.0))
    found, (one,) = demand_of(estimator), estimator.workers(0.0)
    assert found is not None
    assert (found.train_step_s, found.lengths.mean) == (50.0, 7.0)
    assert (one.rollouts_per_s, one.start_s, estimator.idle_share()) == (0.0, 34.0, None)
    estimator = joined("a")
    estimator.trained(60.0)
    assert demand_of(estimator) is None
    estimator.generated("a", [10], now=1.0)
    assert demand_of(estimator) is not None


def test_one_stall_moves_nothing_and_what_changed_for_good_is_seen() -> None:
    estimator = joined("a")
    for _ in range(9):
        estimator.trained(60.0)
        estimator.idle(0.01)
    estimator.trained(4000.0)
    estimator.idle(1.0)
    assert (estimator.train_step_s(), estimator.idle_share()) == (60.0, 0.01)
    for train_step_s in [60.0] * 30 + [90.0] * 8:
        estimator.trained(train_step_s)
    assert estimator.train_step_s() == 90.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_figures_without_sense_change_nothing(value: float) -> None:
    estimator = joined("a")
    estimator.trained(value)
    estimator.trained(0.0)
    estimator.idle(value)
    estimator.rate("a", value, 8, False)
    estimator.rate("a", 1.0, 0, False)
    estimator.link("a", value, 1.0, True)
    estimator.generated("a", [-3], now=0.0)
    assert estimator.train_step_s() is None
    assert worker_of(estimator, "a") == worker_of(joined("a"), "a")
    assert estimator.idle_share() is None


def test_a_liar_is_held_to_twice_what_others_would_claim_for_the_same_work() -> None:
    """Honest claims are believed, though pacing lets samplers wait."""
    estimator = joined("a", "b", "liar")
    for node, claim in (("a", 0.4), ("b", 0.4), ("liar", 1e9)):
        works(estimator, node, rate=0.1, claim=claim)
    assert worker_of(estimator, "liar").rollouts_per_s == pytest.approx(0.8)
    assert worker_of(estimator, "a").rollouts_per_s == pytest.approx(0.4)
    assert worker_of(estimator, "a").samples_at_once == 8
    estimator.joined("a", Terms("card", (0.1, 0.01, 0.02)), now=1000.0)
    again = worker_of(estimator, "a")
    assert again.cost_per_hour == 0.1
    assert again.rollouts_per_s == pytest.approx(0.4), "prices change, nothing is lost"


def test_who_has_not_proven_itself_is_held_to_its_class_or_to_twice_the_best_and_its_claim_passed_on() -> None:
    estimator = joined("a", "b")
    works(estimator, "a", rate=0.3, claim=0.4)
    works(estimator, "b", rate=0.3, claim=0.5)
    believed = {
        ("card", 1e9): (0.4, 0.0),
        ("card", None): (0.4, 0.0),
        ("other card", 0.7): (0.7, 0.7),
        ("other card", 1e9): (2 * 0.4, 1e9),
        ("other card", None): (0.0, 0.0),
    }
    for (device_class, claim), rates in believed.items():
        estimator.joined(name := f"{device_class} {claim}", Terms(device_class, (0.0, 0.0, 0.0)), now=0.0)
        if claim is not None:
            estimator.rate(name, claim, 8, False)
        found = worker_of(estimator, name)
        assert (found.rollouts_per_s, found.claimed_rollouts_per_s) == pytest.approx(rates)
    alone = joined("a")
    alone.rate("a", 7.0, 8, False)
    found = worker_of(alone, "a")
    assert (found.rollouts_per_s, found.claimed_rollouts_per_s) == (7.0, 0.0), "nobody has proven anything yet"


def test_what_a_class_has_proven_is_remembered_when_all_of_it_are_gone() -> None:
    estimator = joined("a", "b")
    estimator.joined("slow", Terms("slow card", (0.2, 0.0, 0.0)), now=0.0)
    estimator.activated("slow", now=0.0)
    works(estimator, "slow", rate=0.03, claim=0.04)
    for node in ("a", "b"):
        works(estimator, node, rate=0.3, claim=0.4)
        estimator.left(node, vanished=True, now=1000.0)
    estimator.joined("back", Terms("card", (0.2, 0.0, 0.0)), now=2000.0)
    estimator.rate("back", 0.4, 8, False)
    back = worker_of(estimator, "back", now=2000.0)
    assert back.rollouts_per_s == pytest.approx(0.4)
    assert back.claimed_rollouts_per_s == 0.0


def test_one_that_gives_nothing_for_as_long_as_others_prove_themselves_counts_for_nothing() -> None:
    estimator = joined("a", "b")
    for node in ("mute", "waits"):
        estimator.joined(node, Terms("slow starter", (0.2, 0.0, 0.0)), now=0.0)
        estimator.rate(node, 0.4, 8, False)
    estimator.activated("mute", now=0.0)
    for node in ("a", "b"):
        works(estimator, node, rate=0.3, claim=0.4, until_s=JUDGED_S)
    assert worker_of(estimator, "mute", now=0.9 * JUDGED_S).rollouts_per_s == pytest.approx(0.4)
    assert worker_of(estimator, "mute", now=JUDGED_S).rollouts_per_s == 0.0
    assert worker_of(estimator, "waits", now=JUDGED_S).rollouts_per_s == pytest.approx(0.4)


def test_nobody_is_judged_before_others_like_it_would_have_proven_themselves() -> None:
    """Where a learner wants little, an hour brings each of many samplers a rollout or none."""
    estimator = joined("a", "unlucky")
    estimator.rate("unlucky", 0.004, 8, False)
    works(estimator, "a", rate=0.1, claim=0.4, until_s=JUDGED_S)
    assert worker_of(estimator, "unlucky", now=JUDGED_S).rollouts_per_s == pytest.approx(0.004)


def test_who_grew_slower_is_seen_within_hours() -> None:
    estimator = joined("a", "b", "c")
    for hour in range(6):
        for node in ("a", "b", "c"):
            share = 0.1 if node == "c" and hour > 1 else 1.0
            for beat in range(1, 61):
                now = HOUR_S * hour + 60.0 * beat
                estimator.generated(node, [100] * round(30 * share), now=now)
                estimator.rate(node, 0.5, 8, False)
    assert worker_of(estimator, "c", now=6 * HOUR_S).rollouts_per_s < 0.2
    assert worker_of(estimator, "a", now=6 * HOUR_S).rollouts_per_s == pytest.approx(0.5)


def test_waiting_on_standby_counts_for_nothing() -> None:
    estimator = joined("a", "b", "c")
    for node in ("a", "b", "c"):
        works(estimator, node, rate=0.3, claim=0.4)
    estimator.stood_by("c", now=1000.0)
    estimator.activated("c", now=90_000.0)
    estimator.generated("c", [100] * PROVEN_ROLLOUTS, now=90_050.0)
    assert worker_of(estimator, "c", now=90_050.0).rollouts_per_s == pytest.approx(0.4)


def test_a_start_lasts_until_the_first_accepted_rollout() -> None:
    estimator = joined("a", "b")
    estimator.generated("a", [100], now=250.0)
    estimator.generated("a", [100], now=900.0)
    estimator.stood_by("b", now=300.0)
    assert worker_of(estimator, "b").start_s == 250.0


def test_a_class_that_nobody_left_is_not_immortal_and_one_that_many_left_is_known_for_it() -> None:
    estimator = Estimator(StartValues(departures_per_hour=0.02))
    for number in range(10):
        estimator.joined(f"steady{number}", Terms("steady", (0.2, 0.0, 0.0)), now=0.0)
        estimator.joined(f"shaky{number}", Terms("shaky", (0.2, 0.0, 0.0)), now=0.0)
    for number in range(9):
        estimator.left(f"shaky{number}", vanished=True, now=10 * HOUR_S)
    estimator.left("steady0", vanished=False, now=10 * HOUR_S)
    now = 10 * HOUR_S
    assert worker_of(estimator, "steady9", now=now).departures_per_hour == pytest.approx(0.48 / 124)
    assert worker_of(estimator, "shaky9", now=now).departures_per_hour == pytest.approx(9.48 / 124)


def test_those_that_leave_together_do_not_each_cost_a_pass_over_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even before the first estimates, and with the rates that each alone would leave behind."""
    nodes = [f"n{number}" for number in range(200)]
    estimator = joined(*nodes)
    for node in nodes:
        works(estimator, node, rate=0.3, claim=0.4)
    counted, touched = SamplerSeen.active_until, list[SamplerSeen]()

    def count(self: SamplerSeen, now: float) -> float:
        touched.append(self)
        return counted(self, now)

    monkeypatch.setattr(SamplerSeen, "active_until", count)
    for node in nodes:
        estimator.left(node, vanished=True, now=1000.0)
    assert len(touched) <= 3 * len(nodes)
    estimator.joined("back", Terms("card", (0.2, 0.0, 0.0)), now=1000.0)
    estimator.rate("back", 1e9, 8, False)
    assert worker_of(estimator, "back").rollouts_per_s == pytest.approx(0.4)


def test_the_tables_are_bounded() -> None:
    estimator = Estimator(StartValues())
    for number in range(MAX_NODES):
        estimator.joined(f"n{number}", Terms(f"class {number}", (0.2, 0.0, 0.0)), now=0.0)
    estimator.joined("late", Terms("card", (0.2, 0.0, 0.0)), now=0.0)
    workers = estimator.workers(0.0)
    assert len(workers) == MAX_NODES
    assert len({worker.device_class for worker in workers}) == MAX_CLASSES
    assert workers[-1].device_class == OTHER
    estimator.left("n0", vanished=True, now=1.0)
    estimator.joined("late", Terms("card", (0.2, 0.0, 0.0)), now=1.0)
    assert len(estimator.workers(1.0)) == MAX_NODES


def test_what_is_said_of_strangers_is_ignored() -> None:
    estimator = Estimator(StartValues())
    estimator.generated("x", [5], now=0.0)
    estimator.rate("x", 1.0, 1, False)
    estimator.link("x", 1.0, 1.0, True)
    estimator.activated("x", now=0.0)
    estimator.stood_by("x", now=0.0)
    estimator.left("x", vanished=True, now=0.0)
    assert estimator.workers(0.0) == []
