"""A plan in a terminal. Pure: a plan in, something that rich prints out."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swarm.pay.model import Binds
from swarm.plan.plan import Alternative, ClassLine, Plan, saving
from swarm.report.words import in_bytes, told

WAYS = {"colocated": "co-located", "async_dc": "data centre"}  # What readers call them

BINDS: dict[Binds, str] = {
    "learner": "the learner itself: it hardly ever waits",
    "rate": "the samplers' rate: the learner waits while all are at work",
    "generation": "the time that rollouts take: the learner waits for the last of what may be begun",
    "broadcast": "the broadcast: the learner waits while samplers still lack the newest version",
}

UNKNOWN_POINT = "of held-out accuracy: unknown, unless the file says its steps_per_point (scenarios.md)"
ONLY_A_RUN_SHOWS = "the status of a run has the rest: no variance, lost, audit"


def plan_view(plan: Plan) -> RenderableType:
    return Group(_head(plan), _classes(plan), _summary(plan))


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
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    period = f"a version every {plan.publish_every_steps} steps" if plan.publish_every_steps > 1 else "one every step"
    pairs = [
        ("settings", f"--max-staleness {plan.max_staleness} --publish-every-steps {plan.publish_every_steps}"),
        ("rate", f"{plan.rollouts_per_s:.3g} rollouts/s from {len(plan.active)} samplers"),
        ("versions", f"{in_bytes(plan.version_bytes)}, {period}, installed by all after {plan.broadcast_s:.0f} s"),
        ("learner", f"idle {plan.idle_share:.1%}, a step in {plan.step_s:.0f} s (simulated)"),
        ("rollouts", f"mean staleness {plan.mean_staleness:.1f}, discarded {plan.discarded_share:.1%} (simulated)"),
        ("binds", BINDS[plan.binds]),
        (
            "per hour",
            f"{plan.cost_per_hour:.2f}: learner {plan.learner_per_hour:.2f}, samplers {plan.rent_per_hour:.2f}, "
            f"traffic {plan.traffic_per_hour:.2f}",
        ),
        ("per step", f"{plan.cost_per_step:.3f}; {1e6 * plan.cost_per_token:.3g} for a million trained tokens"),
        ("per point", told(plan.cost_per_point, "{:.3g} of held-out accuracy") or UNKNOWN_POINT),
        ("in vain", f"{plan.stale_per_step:.3g} per step for stale rollouts (simulated); {ONLY_A_RUN_SHOWS}"),
        *((f"vs {WAYS[one.name]}", _against(plan, one)) for one in plan.references),
    ]
    for name, value in pairs:
        table.add_row(name, value)
    return table


def _against(plan: Plan, reference: Alternative) -> str:
    share = saving(plan.cost_per_step, reference)
    return f"{abs(share):.0%} {'cheaper' if share >= 0 else 'dearer'} per step ({reference.cost_per_step:.3f})"
