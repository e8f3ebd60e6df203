"""The formulas of a plan, its settings and its advice, on fleets small enough to reckon by hand."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from swarm.capacity.delivery import sustained
from swarm.capacity.fleet import Disseminate, Dissemination, Worker
from swarm.capacity.plan.arms import Arm, ArmPlanner, Payload, Scheme, Setting, settings_of
from swarm.capacity.plan.plan import (
    NoFeasibleSet,
    Plan,
    Reference,
    advice_for,
    fresher_than,
    plan_for,
    references_of,
    saving,
)
from swarm.capacity.plan.scenario import Scenario, online_of
from swarm.cli.plan import broadcasts_of
from swarm.report.plans import plan_view
from swarm.settings_file import load_file

LAB = load_file(Scenario, Path(__file__).parents[3] / "examples" / "lab-4b.toml")


def scenario(**tables: Any) -> Scenario:
    """lab-4b with some keys of some tables changed."""
    values = LAB.model_dump()
    for name, changes in tables.items():
        values[name] = changes if isinstance(changes, list) else {**values[name], **changes}
    values["staleness"]["S"] = tuple(values["staleness"]["S"])
    values["fleet"] = tuple(values["fleet"])
    return Scenario(**values)


def fleet(count: int) -> list[dict[str, Any]]:
    return [{**one.model_dump(), "count": count} for one in LAB.fleet]


def test_the_baselines_of_lab_4b_cost_what_is_reckoned_by_hand() -> None:
    colocated, async_dc = references_of(LAB)
    assert colocated.cost_per_step == pytest.approx(7.16 * 298 / 3600)
    assert (async_dc.gpus, async_dc.step_s) == (5, 120)
    assert async_dc.cost_per_step == pytest.approx((7.16 + 5 * 1.79) * 120 / 3600)


@pytest.mark.parametrize(("cost", "share"), [(0.5, 0.5), (1.0, 0.0), (1.5, -0.5)])
def test_a_saving_is_a_share_of_the_reference(cost: float, share: float) -> None:
    reference = Reference(name="it", gpus=1, step_s=1.0, cost_per_hour=3600.0, cost_per_step=1.0)
    assert saving(cost, reference) == share


@pytest.mark.parametrize(
    ("install_s", "told_s", "share"),
    [(0.0, 0.0, 1.0), (10.0, 10.0, 1.0), (12.5, 22.5, 0.8), (20.0, 30.0, 0.5), (40.0, 70.0, 0.25)],
)
def test_a_line_that_is_never_idle_carries_a_version_in_each_install(
    install_s: float, told_s: float, share: float
) -> None:
    def once(workers: Sequence[Worker]) -> Dissemination:
        return Dissemination(install_s=(install_s,), down_bytes=(1.0,), up_bytes=(0.0,), learner_up_bytes=1.0)

    found = sustained(once, period_s=10.0)([])
    assert (found.install_s, found.down_bytes) == ((told_s,), (share,))


def test_versions_that_are_skipped_make_others_older_and_move_no_bytes() -> None:
    def once(workers: Sequence[Worker]) -> Dissemination:
        return Dissemination(install_s=(5.0, 25.0), down_bytes=(9.0, 9.0), up_bytes=(6.0, 3.0), learner_up_bytes=12.0)

    plan = sustained(once, period_s=10.0)([])
    assert plan.install_s == (5.0, 45.0)
    assert plan.down_bytes == pytest.approx((9.0, 3.6))
    assert plan.up_bytes == pytest.approx((6.0, 1.2))
    assert plan.learner_up_bytes == pytest.approx(12.0 * 12.6 / 18.0)


def test_settings_are_every_period_that_a_bound_allows() -> None:
    found = settings_of(scenario(staleness={"S": (0, 2)}))
    assert [(one.max_staleness, one.publish_every_steps) for one in found] == [(0, 1), (2, 1), (2, 2), (2, 3)]


def test_the_rule_of_the_paper_publishes_every_s_minus_1_steps() -> None:
    found = settings_of(scenario(staleness={"S": (1, 6), "kappa_rule": "paper"}))
    assert [(one.max_staleness, one.publish_every_steps) for one in found] == [(1, 1), (6, 5)]


def arms_of(one: Scenario) -> ArmPlanner:
    return ArmPlanner(one, online_of(one, random=None), broadcasts_of(one), idle_target=0.02)


def test_the_cost_of_a_step_is_the_sum_of_its_parts() -> None:
    one = scenario(learner={"egress_usd_per_gb": 0.09})
    arms = arms_of(one)
    setting = Setting(max_staleness=6, publish_every_steps=1)
    chosen = online_of(one, random=None)[:10]
    arm = arms.arm_of("relay", "delta", setting, "all", chosen)
    plan = arms.disseminate("relay", "delta", setting)(chosen)
    per_version = sum(
        (down * worker.down_cost_per_gb + up * worker.up_cost_per_gb) / 1e9
        for worker, down, up in zip(chosen, plan.down_bytes, plan.up_bytes, strict=True)
    )
    per_version += plan.learner_up_bytes * 0.09 / 1e9
    assert arm.traffic_per_hour == pytest.approx(per_version * 3600 / arm.step_s)
    rent = sum(worker.cost_per_hour * (1 + worker.start_s / 3600 / 150) for worker in chosen)
    assert arm.rent_per_hour == pytest.approx(rent)
    assert arm.cost_per_step == pytest.approx((rent + arm.traffic_per_hour + 7.16) * arm.step_s / 3600)


def test_of_two_bounds_that_cost_the_same_the_smaller_is_planned() -> None:
    arm = arms_of(scenario(staleness={"S": (6, 11)})).cheapest("relay", "delta")
    assert arm.feasible
    assert (arm.max_staleness, arm.publish_every_steps) == (6, 1)


@pytest.mark.long
def test_without_deltas_versions_are_rarer_and_the_step_dearer() -> None:
    arms = arms_of(scenario(staleness={"S": (11,)}))
    full, delta = arms.cheapest("relay", "full"), arms.cheapest("relay", "delta")
    assert full.publish_every_steps > delta.publish_every_steps
    assert full.cost_per_step > 1.1 * delta.cost_per_step


@pytest.mark.slow
def test_a_fleet_that_is_too_small_is_told_what_would_help() -> None:
    small = scenario(fleet=fleet(2), staleness={"S": (6,)})
    arms = arms_of(small)
    arm = arms.cheapest("relay", "delta")
    assert not arm.feasible
    assert arm.binds == "rate"
    best = advice_for(arms, arm)[0]
    assert "more of class" in best.change
    assert best.idle_share <= 0.02 < arm.idle_share


def test_more_samplers_are_told_with_what_they_buy_in_freshness() -> None:
    """Rollouts of half a step, and a version in a hundredth of one: what makes them older is a fleet that just does."""
    roomy = scenario(
        staleness={"S": (6,), "safety_margin": 1.0}, learner={"train_step_s": 480.0, "rollouts_per_step": 2048}
    )
    arms = arms_of(roomy)
    arm = arms.arm("relay", "delta", Setting(max_staleness=6, publish_every_steps=1), "cheapest")
    more = fresher_than(arms, arm)
    assert more is not None
    added = Counter(more.by_class) - Counter(arm.by_class)
    (name,) = added
    assert 1 <= added.total() <= len(arm.active) / 2
    assert more.mean_staleness < arm.mean_staleness - 0.3
    told = plan_text(arm, more)
    assert f"{added.total()} more of class {name}: mean staleness {arm.mean_staleness:.1f} -> " in told


def test_where_more_samplers_make_rollouts_no_younger_nothing_is_said() -> None:
    early = scenario(staleness={"S": (3,), "freshness": "off"}, learner={"train_step_s": 480.0})
    arms = arms_of(early)
    arm = arms.arm("relay", "delta", Setting(max_staleness=3, publish_every_steps=1), "cheapest")
    assert fresher_than(arms, arm) is None
    assert "fresher" not in plan_text(arm, None)


def plan_text(arm: Arm, fresher: Arm | None) -> str:
    plan = Plan(
        scenario="it",
        currency="USD",
        prices_as_of="",
        needed_rollouts_per_s=1.0,
        arms=(arm,),
        chosen=arm,
        classes=(),
        advice=(),
        fresher=fresher,
        references=(),
    )
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as shown:
        console.print(plan_view(plan, 100))
    return shown.get()


@pytest.mark.long
def test_a_bound_that_is_too_small_is_told_to_be_raised() -> None:
    arms = arms_of(scenario(staleness={"S": (1,)}))
    arm = arms.cheapest("relay", "delta")
    assert not arm.feasible
    assert arm.binds == "generation"
    assert advice_for(arms, arm)[0].change == "S = 3 instead of 1"


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"staleness": {"S": (0,)}}, "nearest is max_staleness 0 with publish_every_steps 1"),
        ({"learner": {"train_step_s": 4.0}}, "is not below 44, by 41"),
        ({"delta": {"apply_s": 5000.0}}, "broadcast_s + generation_s < "),
    ],
)
def test_a_scenario_in_which_nobody_is_in_time_is_refused_with_the_inequality(
    tables: dict[str, Any], line: str
) -> None:
    one = scenario(**tables)
    with pytest.raises(NoFeasibleSet) as caught:
        plan_for(one, broadcasts_of(one))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broadcast_that_no_bound_admits_is_refused() -> None:
    def ways(scheme: str, version_bytes: float) -> Disseminate:
        def disseminate(workers: Sequence[Worker]) -> Dissemination:
            many = len(workers)
            return Dissemination(
                install_s=(9999.0,) * many, down_bytes=(1.0,) * many, up_bytes=(0.0,) * many, learner_up_bytes=1.0
            )

        return disseminate

    with pytest.raises(NoFeasibleSet, match=r"train_step_s fails: .* is not below"):
        plan_for(LAB, ways)


@pytest.mark.slow
def test_planning_tells_what_it_is_at_and_how_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(self: ArmPlanner, scheme: Scheme, payload: Payload) -> Arm:
        return self.arm(scheme, payload, Setting(max_staleness=3, publish_every_steps=1), "all")

    monkeypatch.setattr(ArmPlanner, "cheapest", at_once)
    monkeypatch.setattr("swarm.capacity.plan.plan.advice_for", lambda *_: ())
    told: list[tuple[str, float]] = []
    one = scenario(staleness={"S": (3,)}, fleet=fleet(2))
    plan_for(one, broadcasts_of(one), progress=lambda what, share: told.append((what, share)))
    assert [what for what, _ in told][-2:] == ["planning relay delta", "what would help most next"]
    assert [share for _, share in told] == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])


def test_a_huge_bound_is_planned_with_few_periods() -> None:
    assert len(settings_of(scenario(staleness={"S": (1024,)}))) == 16
