"""The formulas of a plan, its settings and its choice, on fleets small enough to reckon by hand."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from swarm.pay.delivery import sustained
from swarm.pay.fleet import Dissemination, Worker
from swarm.plan import plan
from swarm.plan.plan import NoFeasibleSet, demands_of, disseminate_in, plan_for, references_of
from swarm.plan.scenario import Scenario, lengths_of, online_of
from swarm.report.plans import plan_view
from swarm.settings_file import load_file

LAB = load_file(Scenario, Path(__file__).parents[3] / "examples" / "lab-4b.toml")


def scenario(**tables: Any) -> Scenario:
    values = LAB.model_dump()
    for name, changes in tables.items():
        values[name] = changes if isinstance(changes, list) else {**values[name], **changes}
    values["staleness"]["S"] = tuple(values["staleness"]["S"])
    values["fleet"] = tuple(values["fleet"])
    return Scenario(**values)


def eighth(monkeypatch: pytest.MonkeyPatch, *, count: int | None = None, **staleness: Any) -> Scenario:
    """lab-4b with an eighth of its rollouts and of each sampler's rate, which is simulated in a tenth of a second."""
    monkeypatch.setattr(plan, "ROLLOUTS", 640)
    fleet = [
        {**one.model_dump(), "tokens_per_s": one.tokens_per_s / 8, "count": count or one.count} for one in LAB.fleet
    ]
    return scenario(
        learner={"rollouts_per_step": 64, "egress_usd_per_gb": 0.09, "steps_per_point": 10.0},
        fleet=fleet,
        staleness=staleness,
    )


def test_the_baselines_of_lab_4b_cost_what_is_reckoned_by_hand() -> None:
    colocated, async_dc = references_of(LAB)
    assert colocated.cost_per_step == pytest.approx(7.16 * 298 / 3600)
    assert (async_dc.gpus, async_dc.step_s) == (5, 120)
    assert async_dc.cost_per_step == pytest.approx((7.16 + 5 * 1.79) * 120 / 3600)


@pytest.mark.parametrize(("install_s", "told_s", "share"), [(0.0, 0.0, 1.0), (10.0, 10.0, 1.0), (12.5, 22.5, 0.8)])
def test_a_line_that_is_never_idle_carries_one_version_at_a_time(install_s: float, told_s: float, share: float) -> None:
    def once(workers: Sequence[Worker]) -> Dissemination:
        return Dissemination(install_s=(install_s,), down_bytes=(1.0,), up_bytes=(0.0,), learner_up_bytes=1.0)

    found = sustained(once, period_s=10.0)([])
    assert (found.install_s, found.down_bytes) == ((told_s,), (share,))


def test_versions_that_are_skipped_make_others_older_and_move_no_bytes() -> None:
    def once(workers: Sequence[Worker]) -> Dissemination:
        return Dissemination(install_s=(5.0, 25.0), down_bytes=(9.0, 9.0), up_bytes=(6.0, 3.0), learner_up_bytes=12.0)

    found = sustained(once, period_s=10.0)([])
    assert found.install_s == (5.0, 45.0)
    assert found.down_bytes == pytest.approx((9.0, 3.6))
    assert found.up_bytes == pytest.approx((6.0, 1.2))
    assert found.learner_up_bytes == pytest.approx(12.0 * 12.6 / 18.0)


def test_settings_are_every_period_that_a_bound_allows_or_that_of_the_paper() -> None:
    def found(**staleness: Any) -> list[tuple[int, int]]:
        return [(one.max_staleness, one.publish_every_steps) for one in demands_of(scenario(staleness=staleness))]

    assert found(S=(0, 2)) == [(0, 1), (2, 1), (2, 2), (2, 3)]
    assert found(S=(1, 6), kappa_rule="paper") == [(1, 1), (6, 5)], "every S - 1 steps"
    assert len(found(S=(1024,))) == 16


def test_the_cost_of_a_step_is_the_sum_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    one = eighth(monkeypatch, S=(6,))
    found = plan_for(one)
    chosen = [worker for worker in online_of(one, random=None) if worker.name in found.active]
    delivery = disseminate_in(one, found.publish_every_steps)(chosen)
    per_version = sum(
        (down * worker.down_cost_per_gb + up * worker.up_cost_per_gb) / 1e9
        for worker, down, up in zip(chosen, delivery.down_bytes, delivery.up_bytes, strict=True)
    )
    per_version += delivery.learner_up_bytes * 0.09 / 1e9
    versions_per_hour = 3600 / (found.step_s * found.publish_every_steps)
    assert found.traffic_per_hour == pytest.approx(per_version * versions_per_hour)
    rent = sum(worker.cost_per_hour * (1 + worker.start_s / 3600 / 150) for worker in chosen)
    assert found.rent_per_hour == pytest.approx(rent)
    assert found.cost_per_step == pytest.approx((rent + found.traffic_per_hour + 7.16) * found.step_s / 3600)
    assert found.cost_per_point == pytest.approx(10 * found.cost_per_step)


def test_of_two_bounds_that_cost_the_same_the_smaller_is_planned() -> None:
    found = plan_for(scenario(staleness={"S": (6, 11)}))
    assert found.feasible
    assert (found.max_staleness, found.publish_every_steps) == (6, 1)


def test_lab_4b_is_planned_as_it_is_reckoned_by_hand() -> None:
    """docs/capacity.md: three, four and three of the cheap classes, 0.377 a step, 36 % less than in turn."""
    told: list[float] = []
    found = plan_for(LAB, progress=lambda what, share: told.append(share))
    assert [(one.name, one.active) for one in found.classes if one.active] == [
        ("vast-3090", 3),
        ("vast-4090", 4),
        ("vast-5090", 3),
    ]
    assert found.cost_per_step == pytest.approx(0.377, rel=0.01)
    tokens = LAB.learner.rollouts_per_step * lengths_of(LAB).mean
    assert found.cost_per_token * tokens == pytest.approx(found.cost_per_step)
    assert found.idle_share <= 0.02
    assert 0 < found.mean_staleness <= found.max_staleness
    assert told == sorted(told)
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as shown:
        console.print(plan_view(found))
    assert "of held-out accuracy: unknown, unless the file says its steps_per_point" in shown.get()
    assert "36% cheaper per step (0.593)" in shown.get()
    assert "--max-staleness 3 --publish-every-steps 1" in shown.get()


def test_too_small_a_fleet_and_too_small_a_bound_are_planned_and_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan_for(eighth(monkeypatch, count=2, S=(6,)))
    assert (found.feasible, found.binds, len(found.active)) == (False, "rate", 8)
    found = plan_for(eighth(monkeypatch, S=(1,)))
    assert (found.feasible, found.binds) == (False, "generation")


def test_rollouts_that_will_be_too_old_are_a_part_of_what_samplers_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan_for(eighth(monkeypatch, S=(2,), freshness="off"))
    spent = (found.rent_per_hour + found.traffic_per_hour) * found.step_s / 3600
    assert 0 < found.stale_per_step == pytest.approx(found.discarded_share * spent)


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"staleness": {"S": (0,)}}, "nearest is max_staleness 0 with publish_every_steps 1"),
        ({"learner": {"train_step_s": 4.0}}, "is not below 44, by 41"),
        ({"delta": {"apply_s": 5000.0}}, "broadcast_s + generation_s < "),
    ],
)
def test_a_scenario_in_which_nobody_is_in_time_names_its_inequality(tables: dict[str, Any], line: str) -> None:
    one = scenario(**tables)
    with pytest.raises(NoFeasibleSet) as caught:
        plan_for(one)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
