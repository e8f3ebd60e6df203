"""A plan in a terminal. Pure: a plan in, something that rich prints out."""

from __future__ import annotations

from collections import Counter

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swarm.capacity.model import Binds
from swarm.capacity.plan.arms import Arm
from swarm.capacity.plan.plan import ClassLine, Plan, Reference, saving

WAYS = {"colocated": "co-located", "async_dc": "data centre"}  # What readers call them
WIDE = 84  # Columns of a terminal that has room for all columns of the table

BINDS: dict[Binds, str] = {
    "learner": "the learner itself: it hardly ever waits",
    "rate": "the samplers' rate: the learner waits while all are at work",
    "generation": "the time that rollouts take: the learner waits for the last of what may be begun",
    "broadcast": "the broadcast: the learner waits while samplers still lack the newest version",
}


def plan_view(plan: Plan, width: int) -> RenderableType:
    return Group(_head(plan), _classes(plan), _summary(plan), Text(), _ways(plan, width), _foot(plan))


def _head(plan: Plan) -> Text:
    as_of = f" as of {plan.prices_as_of}" if plan.prices_as_of else ""
    return Text.assemble(
        (plan.scenario, "bold"),
        f": the learner needs {plan.needed_rollouts_per_s:.3g} rollouts/s; prices in {plan.currency}{as_of}",
    )


def _classes(plan: Plan) -> Table:
    table = Table(title="samplers to rent or admit", title_justify="left", box=box.SIMPLE)
    for name in ("class", "take", "there", "each/h", "each/1,000 rollouts"):
        table.add_column(name, justify="left" if name == "class" else "right")
    for one in plan.classes:
        table.add_row(one.name, str(one.active), str(one.online), f"{one.price_per_h:.2f}", _per_thousand(one))
    return table


def _per_thousand(one: ClassLine) -> str:
    return f"{1000 * one.price_per_h / (one.rollouts_per_s * 3600):.3f}"


def _summary(plan: Plan) -> Table:
    arm = plan.chosen
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    period = f"a version every {arm.publish_every_steps} steps" if arm.publish_every_steps > 1 else "one every step"
    pairs = [
        ("settings", f"--max-staleness {arm.max_staleness} --publish-every-steps {arm.publish_every_steps}"),
        ("rate", f"{arm.rollouts_per_s:.3g} rollouts/s from {len(arm.active)} samplers"),
        ("versions", f"{_bytes(arm.version_bytes)}, {period}, installed by all after {arm.broadcast_s:.0f} s"),
        ("learner", f"idle {arm.idle_share:.1%}, a step in {arm.step_s:.0f} s"),
        ("rollouts", f"mean staleness {arm.mean_staleness:.1f}, discarded {arm.discarded_share:.1%}"),
        *([("fresher", _fresher(arm, plan.fresher))] if plan.fresher else []),
        ("binds", BINDS[arm.binds]),
        (
            "per hour",
            f"{arm.cost_per_hour:.2f}: learner {arm.learner_per_hour:.2f}, samplers {arm.rent_per_hour:.2f}, "
            f"traffic {arm.traffic_per_hour:.2f}",
        ),
        ("per step", f"{arm.cost_per_step:.3f}"),
        *((f"vs {WAYS[one.name]}", _against(arm, one)) for one in plan.references),
    ]
    for name, value in pairs:
        table.add_row(name, value)
    return table


def _fresher(arm: Arm, by: Arm) -> str:
    ((name, count),) = (Counter(by.by_class) - Counter(arm.by_class)).items()
    return f"{count} more of class {name}: mean staleness {arm.mean_staleness:.1f} -> {by.mean_staleness:.1f}"


def _against(arm: Arm, reference: Reference) -> str:
    share = saving(arm.cost_per_step, reference)
    return f"{abs(share):.0%} {'cheaper' if share >= 0 else 'dearer'} per step"


def _ways(plan: Plan, width: int) -> Table:
    table = Table(title="the same in other ways", title_justify="left", box=box.SIMPLE)
    columns = ["versions", "active", "S", "every", "T_b s", "idle", "discarded", "per step"]
    if width < WIDE:
        columns = [name for name in columns if name not in ("T_b s", "discarded")]
    for name in columns:
        table.add_column(name, justify="left" if name == "versions" else "right", no_wrap=True)
    for arm in plan.arms:
        cells = {
            "versions": arm.name + (", all" if arm.activate == "all" else ""),
            "active": str(len(arm.active)),
            "S": str(arm.max_staleness),
            "every": str(arm.publish_every_steps),
            "T_b s": f"{arm.broadcast_s:.0f}",
            "idle": f"{arm.idle_share:.1%}",
            "discarded": f"{arm.discarded_share:.1%}",
            "per step": f"{arm.cost_per_step:.3f}",
        }
        table.add_row(*(cells[name] for name in columns), style="bold" if arm == plan.chosen else None)
    for one in plan.references:
        cells = {"versions": WAYS[one.name], "active": f"{one.gpus} GPUs", "per step": f"{one.cost_per_step:.3f}"}
        table.add_row(*(cells.get(name, "") for name in columns))
    return table


def _foot(plan: Plan) -> Text:
    arm = plan.chosen
    if arm.feasible and not plan.advice:
        share = arm.learner_per_hour / arm.cost_per_hour
        return Text(
            f"What would help most next: nothing about the fleet. The learner is busy, and is {share:.0%} of the cost: "
            "a cheaper one would help."
        )
    if not plan.advice:
        return Text("What would help most next: neither more samplers nor a larger S nor a faster broadcast alone.")
    lines = [
        f"{one.change} would cut the learner's idle from {arm.idle_share:.0%} to {one.idle_share:.0%}"
        if not arm.feasible
        else f"{one.change} would cut the cost per step from {arm.cost_per_step:.3f} to {one.cost_per_step:.3f}"
        for one in plan.advice
    ]
    return Text("\n".join(["What would help most next:", *(f"  {line}" for line in lines)]))


def _bytes(count: float) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
