"""Which figures of a run are drawn together, under which title and unit. A figure that nobody named is drawn too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from swarm.report.charts import MOST_CURVES, Chart, Curve
from swarm.report.figures import Figures

MOST_OTHERS = 32
"""Charts of figures that nobody named, one each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A chart of the figures whose names match `names`, in that order; without any of them it is left out."""

    title: str
    names: tuple[str, ...]
    unit: str = ""
    floor: float | None = None
    ceiling: float | None = None


LEARNING = (
    Wanted(title="Reward of a rollout", names=("reward", "reward_std", "reward_shaped")),
    Wanted(title="Each reward", names=("rewards/*/mean",)),
    Wanted(title="Each reward: standard deviation", names=("rewards/*/std",), floor=0),
    Wanted(title="Exact answers while training", unit="share", names=("exact_match",), floor=0, ceiling=1),
    Wanted(title="Groups without variance", unit="share", names=("frac_reward_zero_std",), floor=0, ceiling=1),
    Wanted(title="Rewards that failed", unit="share", names=("reward_failed_share",), floor=0, ceiling=1),
    Wanted(title="Loss", names=("loss",)),
    Wanted(title="Entropy", unit="nats a token", names=("entropy",), floor=0),
    Wanted(title="Gradient norm before clipping", names=("grad_norm",), floor=0),
    Wanted(title="mismatch_kl: engine against learner, same version", unit="nats", names=("mismatch_kl",), floor=0),
    Wanted(title="KL to the reference", unit="nats", names=("kl",), floor=0),
    Wanted(title="Tokens that are clipped", unit="share", names=("clip_ratio/*",), floor=0),
    Wanted(title="Importance ratio", names=("sampling/importance_sampling_ratio/*",)),
    Wanted(title="Log-prob difference", unit="nats", names=("sampling/sampling_logp_difference/*",), floor=0),
    Wanted(title="Length of completions", unit="tokens", names=("completions/*_length",), floor=0),
    Wanted(
        title="Completions cut at the limit", unit="share", names=("completions/clipped_ratio",), floor=0, ceiling=1
    ),
    Wanted(title="Learning rate", names=("learning_rate",), floor=0),
    Wanted(title="Optimiser steps of a learner step", names=("optimizer_steps", "optimizer_steps_skipped"), floor=0),
)

SWARM = (
    Wanted(title="Time", unit="s", names=("train_step_s", "broadcast_s"), floor=0),
    Wanted(title="Learner idle", unit="share", names=("idle_share", "predicted_idle_share"), floor=0, ceiling=1),
    Wanted(title="Rollouts", unit="1/s", names=("rollouts_per_s",), floor=0),
    Wanted(title="Samplers", names=("samplers", "active", "standby"), floor=0),
    Wanted(title="Rollouts accepted", names=("rollouts_accepted",), floor=0),
    Wanted(title="Tokens accepted", names=("tokens_accepted",), floor=0),
)

COSTS = (
    Wanted(title="Cost in all", names=("cost_total",), floor=0),
    Wanted(title="Cost of a learner step", names=("cost_per_step",), floor=0),
    Wanted(title="Cost of a rollout", names=("cost_per_rollout",), floor=0),
    Wanted(title="Cost of a token", names=("cost_per_token",), floor=0),
)

STALENESS = ("staleness/mean", "staleness/max")


def sections(found: Figures) -> list[tuple[str, list[Chart]]]:
    """Titles and their charts; a section without figures has none."""
    free = dict.fromkeys(name for name, column in found.columns.items() if column.values)
    staleness = [chart for chart in [_staleness(found, free)] if chart is not None]
    learning = [*_held_out(found), *_charts(LEARNING, found, free)]
    swarm = [*staleness, *_charts(SWARM, found, free)]
    costs = list(_charts(COSTS, found, free)) if found.last("cost_total") else []
    others = [
        Chart(title=name, unit="", curves=[Curve(name=name, column=found.columns[name])], until=found.steps)
        for name in list(free)[:MOST_OTHERS]
        if not name.startswith("cost_")
    ]
    return [("Learning", learning), ("Swarm", swarm), ("Cost", costs), ("Other figures", others)]


def _held_out(found: Figures) -> Iterator[Chart]:
    """Shares in one chart; `pass_at_1` is `exact_match` by another name. Each other figure in one of its own."""
    names = [name for name in found.evaluated if name != "pass_at_1" or "exact_match" not in found.evaluated]
    shares = sorted(name for name in names if name == "exact_match" or name.startswith("pass"))
    for chosen in ([shares] if shares else []) + [[name] for name in names if name not in shares]:
        is_share = chosen is shares
        yield Chart(
            title="Held-out prompts" if is_share else f"Held-out {chosen[0]}",
            unit="share" if is_share else "",
            curves=[Curve(name=name, column=found.evaluated[name], dots=True) for name in chosen],
            floor=0 if is_share else None,
            ceiling=1 if is_share else None,
            across="policy version",
            until=found.steps,
        )


def _staleness(found: Figures, free: dict[str, None]) -> Chart | None:
    names = [name for name in STALENESS if name in free]
    for name in names:
        del free[name]
    if not names:
        return None
    return Chart(
        title="Staleness of the rollouts trained on",
        unit="learner steps",
        curves=[Curve(name=name, column=found.columns[name]) for name in names],
        floor=0,
        steps=found.bounds,
        limit="max_staleness, the bound S",
        until=found.steps,
    )


def _charts(wanted: tuple[Wanted, ...], found: Figures, free: dict[str, None]) -> Iterator[Chart]:
    """Each takes its figures out of those that are `free`; what is too much for one goes on in another."""
    for one in wanted:
        names = [name for pattern in one.names for name in free if fnmatchcase(name, pattern)]
        names = list(dict.fromkeys(names))
        for name in names:
            del free[name]
        for at in range(0, len(names), MOST_CURVES):
            curves = [Curve(name=name, column=found.columns[name]) for name in names[at : at + MOST_CURVES]]
            yield Chart(
                title=one.title,
                unit=one.unit,
                curves=curves,
                floor=one.floor,
                ceiling=one.ceiling,
                marks=found.marks if wanted is LEARNING else (),
                until=found.steps,
            )
