"""What a status says, in words: one source for the terminal, the page and the report.

Everything here is pure, and takes any status: what strangers sent, or an older file says, is left out where it is not
what it should be.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from typing import Any

from swarm.types import printable

MOST_CHARACTERS = 400  # Of anybody's words in one place
MOST_COUNTED = 16  # Reasons told beside one another


def finite(value: object) -> float | None:
    """`value` if it is a finite number, else None; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def number(known: Mapping[str, Any], name: str) -> float:
    """A figure of `known`; 0 if it is missing or is none."""
    return finite(known.get(name)) or 0.0


def part(known: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A mapping within `known`; {} if it is missing or is none."""
    found = known.get(name)
    return found if isinstance(found, dict) else {}


def parts(known: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The mappings in a list within `known`."""
    found = known.get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def words(known: Mapping[str, Any], name: str, most: int = MOST_CHARACTERS) -> str:
    """Anybody's words within `known`: one line without escapes, of `most` characters; "" if there are none."""
    found = known.get(name)
    return printable(found[:most]) if isinstance(found, str) else ""


def told(value: object, form: str) -> str:
    """A figure in its form; "" if there is none."""
    return "" if (found := finite(value)) is None else form.format(found)


def shown(value: float | None) -> str:
    """A value in few characters."""
    if value is None:
        return "-"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}" if abs(value) < 1e12 else f"{value:.3g}"


def counted(count: float, what: str) -> str:
    return f"{count:.0f} {what}{'' if count == 1 else 's'}"


def counts(known: Mapping[str, Any], *, without: str = "") -> str:
    """How many of each."""
    found = [(name, finite(count)) for name, count in known.items() if name != without]
    return ", ".join(f"{count:,.0f} {printable(str(name)[:40])}" for name, count in found[:MOST_COUNTED] if count)


def in_bytes(count: float) -> str:
    units = ["TB", "GB", "MB", "kB", "B"]
    while count >= 1000 and len(units) > 1:
        count, _ = count / 1000, units.pop()
    return f"{count:.3g} {units[-1]}"


# -- what a learner waits for, and why -----------------------------------------------------------------------


def waiting_for(status: Mapping[str, Any] | None) -> str:
    """What the learner waits for; "" while it works. `status` is None while it does not answer."""
    if status is None:
        return "the learner's process to start"
    if status.get("state") == "paused" or status.get("waits_for"):
        return words(status, "fault" if status.get("state") == "paused" else "waits_for")
    samplers = parts(status, "samplers")
    if not samplers:
        return "samplers: none is here" if status.get("metrics") else "the first sampler to make contact"
    if not any(sampler.get("installed") for sampler in samplers):
        return f"{counted(len(samplers), 'sampler')} to fetch and load the weights"
    if not status.get("metrics"):
        wanted = number(status, "batch_rollouts")
        accepted = number(part(status, "cost"), "rollouts_accepted")
        return f"the first batch: {min(wanted, accepted):.0f} of {wanted:.0f} rollouts"
    return ""


def bottleneck(status: Mapping[str, Any] | None) -> str:
    """What keeps the learner from going faster, in one sentence, by what was measured and the capacity model."""
    if status is not None and status.get("state") in ("finished", "stopped"):
        return ""
    if waits := waiting_for(status):
        is_paused = status is not None and status.get("state") == "paused"
        return f"paused: {waits}" if is_paused else f"waiting for {waits}"
    assert status is not None
    capacity = part(status, "capacity")
    standby, idle = number(capacity, "standby"), finite(capacity.get("idle_share"))
    if standby and not number(capacity, "active"):
        reasons = (words(sampler, "standby") for sampler in parts(status, "samplers"))
        return f"all {counted(standby, 'sampler')} wait on standby: {next(filter(None, reasons), 'none is chosen')}"
    if idle is None:
        return "what binds is known after the second step"
    if idle <= max(0.02, number(capacity, "idle_target")):
        return f"nothing binds: the learner is busy {1 - idle:.0%} of the time".replace("%", " %")
    return f"learner idle {idle:.0%}".replace("%", " %") + f": {_binds(status, capacity)}"


def _binds(status: Mapping[str, Any], capacity: Mapping[str, Any]) -> str:
    step_s, unscored = number(status, "step_s"), number(status, "rollouts_unscored")
    reward_s = number(status, "reward_s")
    if reward_s > step_s / 2 and unscored > number(status, "samples_leased"):
        return (
            f"rewards are the bottleneck; {counted(unscored, 'rollout')} wait for one, which takes {reward_s:.3g} s"
            f" where a step takes {step_s:.3g} s"
        )
    match capacity.get("binds"):
        case "rate":
            return _too_few(status, capacity)
        case "broadcast":
            return _slow_version(status, step_s * max(1.0, number(status, "publish_every_steps")))
        case "generation":
            return f"broadcast and the longest completions bind; {words(capacity, 'why')}"
        case "learner":
            predicted = told(capacity.get("predicted_idle_share"), "{:.0%}").replace("%", " %")
            return f"more than the {predicted} that such samplers should cost; some are slower than they were"
    return "what binds is known once an install was timed"


def _too_few(status: Mapping[str, Any], capacity: Mapping[str, Any]) -> str:
    """How many more samplers would do: what is missing of the rate that the model needs, over the rate at which one of
    a class gives rollouts in time. That is the median of its measured rates, times the share of the active samplers'
    rates that is in time. The class is the cheapest per rollout that is here; among equals the most common one."""
    needed, useful = finite(capacity.get("rollouts_per_s_needed")), number(capacity, "rollouts_per_s_useful")
    if needed is None:
        return f"no number of samplers like these would do; {words(capacity, 'why')}"
    if words(capacity, "why").startswith("the budget"):
        return words(capacity, "why")
    by_node, rates, active = part(part(capacity, "inputs"), "by_node"), defaultdict(list), 0.0
    prices: dict[str, list[float]] = defaultdict(list)
    for sampler in parts(status, "samplers"):
        rate = number(part(by_node, words(sampler, "node")), "rollouts_per_s")
        if rate > 0:
            rates[words(sampler, "device_class", 40)].append(rate)
            prices[words(sampler, "device_class", 40)].append(number(sampler, "cost_per_hour") / rate)
            active += 0.0 if sampler.get("standby") else rate
    if needed <= useful or not active:
        return f"samplers are the bottleneck; {useful:.3g} rollouts/s come in time, {needed:.3g} are needed"
    chosen = min(rates, key=lambda name: (median(prices[name]), -len(rates[name]), name))
    more = (needed - useful) / (median(rates[chosen]) * min(1.0, useful / active)) if useful else math.inf
    if more > 1e6:
        return "samplers are the bottleneck; what they draw comes too late to be trained on"
    of_class = f" of class {chosen}" if chosen else ""
    return f"samplers are the bottleneck; {max(1, math.ceil(more)):,} more{of_class} would do"


def stages(version: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of each stage of a version from the learner's step to the last engine; none that is not over."""
    sent_s, installed_s = number(version, "last_complete_s"), number(part(version, "installed_s"), "100")
    found = {"staging": number(version, "stage_s"), "encoding": number(version, "prepared_s"), "sending": sent_s}
    return {name: s for name, s in {**found, "installing": installed_s - sent_s}.items() if s > 0}


def _slow_version(status: Mapping[str, Any], period_s: float) -> str:
    known = [stages(one) for one in part(status, "broadcasts").values() if isinstance(one, dict)]
    whole = [one for one in known if "installing" in one] or [one for one in known if one]
    if not whole:
        return f"broadcast binds; {words(part(status, 'capacity'), 'why')}"
    most = max(whole[-1], key=lambda name: whole[-1][name])
    return f"broadcast binds; {whole[-1][most]:.2g} s are {most}, of {period_s:.2g} s from one version to the next"


# -- a learner's figures -------------------------------------------------------------------------------------


def learner_figures(status: Mapping[str, Any]) -> dict[str, str]:
    """Names and values of what a learner has done, with units; "" for those not known yet."""
    metrics, capacity, cost = (part(status, name) for name in ("metrics", "capacity", "cost"))
    accepted, total, standby = number(cost, "rollouts_accepted"), number(cost, "cost_total"), capacity.get("standby")
    samplers = told(len(parts(status, "samplers")) or None, "{:.0f}")
    of_bound = f", max {number(status, 'max_staleness_seen'):.0f} of {number(status, 'max_staleness'):.0f}"
    by = words(metrics, "staleness/by", 40)
    return {
        "step": f"{number(status, 'step'):.0f} of {number(status, 'steps'):.0f}",
        "version": words(status, "version", 40),
        "reward": told(metrics.get("reward"), "{:.3f}"),
        "exact match": told(metrics.get("exact_match"), "{:.3f}"),
        "held-out": _measured(next(reversed(parts(status, "held_out")), {})),
        "best held-out": _measured(part(status, "best")),
        "samplers": samplers + (told(standby or None, ", {:.0f} on standby") if samplers else ""),
        "staleness": told(metrics.get("staleness/mean"), "{:.1f}" + of_bound),
        "staleness aim": (told(metrics.get("staleness/aim"), "{:.1f}, ") + f"by {by}") if by else "",
        "accepted": f"{accepted:,.0f} rollouts" if accepted else "",
        "of all nodes": f"{number(status, 'rollouts_per_s'):.4g} rollouts/s" if accepted else "",
        "dropped": counts(part(status, "rollouts_dropped")),
        "withheld": _withheld(part(status, "rollouts_withheld")),
        "train step": told(metrics.get("train_step_s"), "{:.2f} s"),
        "trainer held up": told(metrics.get("stage_s") or None, "{:.2f} s"),
        "until published": told(metrics.get("prepared_s") or None, "{:.2f} s"),
        "time to install": told(status.get("broadcast_s"), "{:.2f} s"),
        "learner idle": told(capacity.get("idle_share"), "{:.1%}"),
        "predicted idle": told(capacity.get("predicted_idle_share"), "{:.1%}"),
        "cost": f"{total:.2f}" if total else "",
        "cost of a step": told(cost.get("cost_per_step") if total else None, "{:.4g}"),
    }


def _withheld(found: Mapping[str, Any]) -> str:
    """By far the most are one liar's, if there is one."""
    worst = max(found, key=lambda name: number(found, name), default="")
    total = sum(number(found, name) for name in found)
    return f"{total:,.0f} rollouts, {number(found, worst):,.0f} of {printable(worst[:40])}" if total else ""


def _measured(found: Mapping[str, Any]) -> str:
    return told(found.get("exact_match"), f"{{:.3f}}, version {number(found, 'version'):.0f}")
