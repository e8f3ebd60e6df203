"""What a status says, in words: one source for the terminal, the page and the report.

Everything here is pure, and takes any status: what strangers sent, or an older file says, is left out where it is not
what it should be.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from statistics import median
from typing import Any

from swarm.types import printable

MAX_CHARACTERS = 400  # Of anybody's words in one place
MAX_COUNTED = 16  # Reasons told beside one another
ID_LENGTH = 12  # Characters of a node's or a swarm's id that are shown; --json has all 32
JOIN_LENGTH = 4096  # A join line names eight addresses at most
BUSY = 0.05  # Up to this idle share a learner counts as busy


def finite(value: object) -> float | None:
    """`value` if it is a finite number, else None; true and false are none."""
    if type(value) is float:  # Nearly all are
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def quoted(text: str) -> str:
    """Anybody's words: in quotation marks if they could read as a sentence of ours."""
    return json.dumps(text, ensure_ascii=False) if len(text.split()) > 1 else text


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


def members(known: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The mappings in a mapping within `known`, in its order."""
    return [one for one in part(known, name).values() if isinstance(one, dict)]


def words(known: Mapping[str, Any], name: str, most: int = MAX_CHARACTERS) -> str:
    """Anybody's words within `known`: one line without escapes, of `most` characters; "" if there are none."""
    found = known.get(name)
    return printable(found[:most]) if isinstance(found, str) else ""


def told(value: object, form: str) -> str:
    """A figure in its form; "" if there is none."""
    return "" if (found := finite(value)) is None else form.format(found)


def version_in_words(text: object) -> str:
    """A version as people read it: the learner step that it follows. One of a run that was set back, such as "1.178",
    keeps the number of its life."""
    return text.removeprefix("0.") if isinstance(text, str) else ""


def shown(value: float | None) -> str:
    """A value in few characters."""
    if value is None:
        return "-"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}" if abs(value) < 1e12 else f"{value:.3g}"


def counted(count: float, what: str) -> str:
    return f"{count:.0f} {what}{'' if count == 1 else 's'}"


KEPT = "accepted", "handed"  # Verdicts on what was drawn of a rollout that counts


def counts(known: Mapping[str, Any], *, without: Container[str] = ()) -> str:
    """How many of each."""
    found = [(name, finite(count)) for name, count in known.items() if name not in without]
    return ", ".join(f"{count:,.0f} {printable(str(name)[:40])}" for name, count in found[:MAX_COUNTED] if count)


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
        wanted, accepted = number(status, "batch_rollouts"), number(part(status, "cost"), "rollouts_accepted")
        return f"the first batch: {min(wanted, accepted):.0f} of {wanted:.0f} rollouts"
    return ""


def bottleneck(status: Mapping[str, Any] | None) -> str:
    """What keeps the learner from going faster, in one sentence: what was measured, and what binds by the capacity
    model's prediction. "" once the run is over, and where only its files speak."""
    waits = waiting_for(status)
    if status is None:
        return f"waiting for {waits}"
    if not status.get("waits_for") and (status.get("state") == "finished" or "samplers" not in status):
        return ""
    if waits:
        state = words(status, "state")
        return f"{state}: {waits}" if state.startswith("paused") else f"waiting for {waits}"
    capacity = part(status, "capacity")
    standby, idle = number(capacity, "standby"), finite(capacity.get("idle_share"))
    if standby and not number(capacity, "active"):
        reasons = (words(sampler, "standby") for sampler in parts(status, "samplers"))
        return f"all {counted(standby, 'sampler')} wait on standby: {next(filter(None, reasons), 'none is chosen')}"
    if idle is None:
        return "what binds is known after the second step"
    if idle <= BUSY:
        return f"the samplers keep up: the learner is busy {_share(1 - idle)} of the time"
    return f"learner idle {_share(idle)}: {_rewards(status) or _binds(status, capacity)}"


def ending(status: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Why a run of which only the files speak has ended, as far as they say: one that was killed says nothing."""
    step, steps = number(status, "step"), number(config, "steps")
    measured: Mapping[str, Any] = next(reversed(parts(status, "held_out")), {})
    target = finite(config.get("target"))
    at = f"at step {step:.0f} of {steps:.0f}"
    if stopped_by := words(status, "stopped_by"):
        return f"ended by an alarm {at}: {stopped_by}"
    if target is not None and number(measured, "exact_match") >= target:
        return f"ended {at}: the target of {target:g} was reached"
    most, spent = finite(config.get("max_cost")), number(part(status, "cost"), "cost_total")
    if most and spent >= most:
        return f"ended {at}: the budget of {most:g} is spent"
    if step and step >= steps:
        return "ended after its last step"
    if status.get("state") in ("finished", "stopped"):
        return f"ended {at}"
    return f"its files end {at}: it goes on elsewhere, or was killed"


def _rewards(status: Mapping[str, Any]) -> str:
    """Rewards bind if more rollouts wait for theirs than are being drawn, and for most of a step."""
    unscored, took_s, step_s = (number(status, name) for name in ("rollouts_unscored", "reward_s", "step_s"))
    if unscored <= number(status, "samples_leased") or took_s <= step_s / 2:
        return ""
    return f"rewards bind: {unscored:,.0f} rollouts wait for theirs, {took_s:.2g} s where a step takes {step_s:.2g} s"


def _binds(status: Mapping[str, Any], capacity: Mapping[str, Any]) -> str:
    why = words(capacity, "why").rpartition("% of the time: ")[2]
    match capacity.get("binds"):
        case _ if why.startswith("the budget"):
            return why
        case "rate":
            return _too_few(status, capacity) or _no_room(status, capacity) or why
        case "broadcast":
            return _slow_version(status) or why
        case "generation":
            return _no_room(status, capacity) or why
        case "learner":
            audit = number(part(status, "metrics"), "audit/time_share")
            of_audit = f", and {_share(audit)} of its time is the audit" if audit >= BUSY else ""
            return f"{_share(number(capacity, 'predicted_idle_share'))} is predicted with these samplers{of_audit}"
    return "what binds is known once an install was timed"


def _too_few(status: Mapping[str, Any], capacity: Mapping[str, Any]) -> str:
    """How many more samplers would do: what is missing of the rate that the model needs, over the rate that one more of
    a class gives in time. That is the median of its measured rates, times the share of the active samplers' rates that
    is in time. The class is the cheapest per rollout, by the median of those here; among equals the most common."""
    needed, useful = finite(capacity.get("rollouts_per_s_needed")), number(capacity, "rollouts_per_s_useful")
    classes, active = defaultdict[str, list[tuple[float, float]]](list), 0.0  # Price of a rollout, and rate
    for sampler in parts(status, "samplers"):
        rate = number(part(part(part(capacity, "inputs"), "by_node"), words(sampler, "node")), "rollouts_per_s")
        if rate > 0:
            classes[words(sampler, "device_class", 40)].append((number(sampler, "cost_per_hour") / rate, rate))
            active += 0.0 if sampler.get("standby") else rate
    # A status that comes from afar may have a part of the samplers alone.
    if needed is None or not useful or not active or part(status, "cut").get("samplers"):
        return ""
    if needed <= useful:
        return f"samplers are the bottleneck, though {needed:.3g} rollouts/s are enough and {useful:.3g} should come"
    ranked = ((median(price for price, _ in found), -len(found), name) for name, found in classes.items())
    *_, chosen = min(ranked)
    more = math.ceil((needed - useful) / (median(rate for _, rate in classes[chosen]) * min(1.0, useful / active)))
    of_class = f" of class {quoted(chosen)}" if chosen else ""
    return f"samplers are the bottleneck; {more:,} more{of_class} would do"


STAGES = ("staging", "preparing", "sending", "installing")  # Preparing: its turn, encoding, and the journal


def stages(version: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of each stage of a version, from the learner's step to the last engine; none that is not over."""
    sent_s, installed_s = number(version, "last_complete_s"), number(part(version, "installed_s"), "100")
    seconds = (number(version, "stage_s"), number(version, "prepared_s"), sent_s, installed_s - sent_s)
    return {name: s for name, s in zip(STAGES, seconds, strict=True) if s > 0}


def newest_stages(status: Mapping[str, Any]) -> dict[str, float]:
    """Those of the newest version that all samplers have; {} before there is one."""
    versions = reversed(members(status, "broadcasts"))
    return next((s for s in map(stages, versions) if "installing" in s), {})


def _slow_version(status: Mapping[str, Any]) -> str:
    found = newest_stages(status)
    period_s = number(status, "step_s") * max(1.0, number(status, "publish_every_steps"))
    longest = max(found, key=lambda name: found[name], default="")
    if not found:
        return ""
    share = f"{found[longest]:.2g} of {period_s:.2g} s are {longest}"
    beyond = f"{found[longest]:.2g} s of {longest}, where a version comes every {period_s:.2g} s"
    return f"broadcast binds: {share if found[longest] <= period_s else beyond}"


def _no_room(status: Mapping[str, Any], capacity: Mapping[str, Any]) -> str:
    """A place's time for a completion and a version's way, and what the bound leaves for both (pay/model.py,
    shortfall); "" where both fit."""
    inputs, bound = part(capacity, "inputs"), number(status, "max_staleness")
    workers = [worker for worker in members(inputs, "by_node") if number(worker, "rollouts_per_s")]
    if not (rate := sum(number(worker, "rollouts_per_s") for worker in workers)):
        return ""
    takes_s = sum(number(worker, "samples_at_once") for worker in workers) / rate
    version_s = number(status, "broadcast_s")
    left_s = (bound + 1 - number(status, "publish_every_steps")) * number(inputs, "train_step_s")
    if takes_s + version_s <= left_s:
        return ""
    what = "generation" if takes_s >= version_s else "broadcast"
    both = f"a completion takes {takes_s:.2g} s and a version {version_s:.2g} s"
    return f"{what} binds: {both}, where a bound of {bound:.0f} leaves {left_s:.2g} s for both"


def _share(share: float) -> str:
    return f"{100 * share:.0f} %"


# -- the nodes of a swarm ------------------------------------------------------------------------------------

LEAVES = ", {:.0f} leaves"
INVALID = ("malformed", "future", "duplicate", "barred")  # Verdicts that a sampler in order gets by accident at most


def nodes(status: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What any node's status says of each other node, by the names of the page's columns; samplers come first."""
    newest, costs = words(status, "version", 40), part(part(status, "cost"), "by_node")
    known = set()
    for sampler in parts(status, "samplers"):
        known.add(node := words(sampler, "node"))
        verdicts = part(sampler, "verdicts")
        engine, _, rest = words(sampler, "engine", 80).partition("/")
        yield {
            **sampler,
            "name": words(sampler, "nickname", 64) or node[:ID_LENGTH],
            "role": "sampler",
            "state": _state(sampler),
            "engine": engine,
            "precision": rest.partition("/")[0],
            "version": words(sampler, "installed", 40),
            "lag": _lag(newest, words(sampler, "installed", 40)),
            "accepted": number(verdicts, "accepted"),
            "stale": number(verdicts, "stale") + number(part(sampler, "dropped"), "stale"),
            "invalid": sum(number(verdicts, name) for name in INVALID),
            "cost": costs.get(node),
            "last_seen_s": number(sampler, "silent_s"),
            "why": words(sampler, "standby"),
            "class": words(sampler, "device_class", 40),
        }
    for member in (*parts(status, "publics"), *({**one, "state": "leaf"} for one in parts(status, "leaves"))):
        if (node := words(member, "node")) not in known:
            yield {
                **member,
                "name": node[:ID_LENGTH],
                "role": words(member, "role", 20),
                "state": words(member, "state", 20),
                "version": words(member, "held", 40),
                "last_seen_s": number(member, "beat_s"),
                "why": f"{words(member, 'address').rpartition('/')[2]}{told(member.get('leaves') or None, LEAVES)}",
            }


def _state(sampler: Mapping[str, Any]) -> str:
    ways = ("refused", "barred"), ("standby", "standby"), ("active", "installed")
    return next((state for state, key in ways if sampler.get(key)), "fetching")


def _lag(newest: str, held: str) -> int | None:
    """Versions between two of one incarnation."""
    (life, _, last), (same, _, at) = newest.partition("."), held.partition(".")
    return int(last) - int(at) if life == same and last.isdecimal() and at.isdecimal() else None


# -- a learner's figures -------------------------------------------------------------------------------------


AGED_BY = {
    "bound": "the most that the bound allows",
    "broadcast": "versions take that long to arrive",
    "generation": "answers take that long",
}
"""Why rollouts are as old as pacing aims at (rollout/plane/rules.py)."""


def learner_figures(status: Mapping[str, Any]) -> dict[str, str]:
    """Names and values of what a learner has done, with units; "" for those not known yet."""
    metrics, capacity, cost = (part(status, name) for name in ("metrics", "capacity", "cost"))
    accepted, total, standby = number(cost, "rollouts_accepted"), number(cost, "cost_total"), capacity.get("standby")
    samplers = told(part(status, "cut").get("samplers") or len(parts(status, "samplers")) or None, "{:.0f}")
    of_bound = f", max {number(status, 'max_staleness_seen'):.0f} of {number(status, 'max_staleness'):.0f}"
    by = words(metrics, "staleness/by", 40)
    per_token, lost = finite(cost.get("cost_per_token")), discarded(status)
    return {
        "step": f"{number(status, 'step'):.0f} of {number(status, 'steps'):.0f}",
        "version": version_in_words(words(status, "version", 40)),
        "reward": told(metrics.get("reward"), "{:.3f}"),
        "exact match": told(metrics.get("exact_match"), "{:.3f}"),
        "held-out": _measured(next(reversed(parts(status, "held_out")), {})),
        "best held-out": _measured(part(status, "best")),
        "samplers": samplers + (told(standby or None, ", {:.0f} on standby") if samplers else ""),
        "staleness": told(metrics.get("staleness/mean"), "{:.1f}" + of_bound),
        "staleness aim": told(metrics.get("staleness/aim"), "{:.1f}, ") + AGED_BY.get(by, ""),
        "accepted": f"{accepted:,.0f} rollouts" if accepted else "",
        "of all nodes": f"{number(status, 'rollouts_per_s'):.4g} rollouts/s" if accepted else "",
        "tokens": told(status.get("tokens_per_s") if accepted else None, "{:,.0f} tokens/s"),
        "tokens accepted": told(cost.get("tokens_accepted") or None, "{:,.0f}"),
        "discarded": f"{lost:,.0f} rollouts" if lost or accepted else "",
        "refused": counts(part(status, "verdicts"), without=KEPT),
        "dropped": counts(part(status, "rollouts_dropped")),
        "withheld": _withheld(part(status, "rollouts_withheld")),
        "train step": told(metrics.get("train_step_s"), "{:.2f} s"),
        "trainer held up": told(metrics.get("stage_s") or None, "{:.2f} s"),
        "until published": told(metrics.get("prepared_s") or None, "{:.2f} s"),
        "time to install": told(status.get("broadcast_s"), "{:.2f} s"),
        "step takes": told(status.get("step_s"), "{:.3g} s"),
        "learner idle": told(capacity.get("idle_share"), "{:.1%}"),
        "predicted idle": told(capacity.get("predicted_idle_share"), "{:.1%}"),
        "cost": f"{total:.2f}" if total else "",
        "cost of an hour": told(cost.get("cost_per_hour") or None, "{:.2f}"),
        "of a million tokens": told(1e6 * per_token if per_token else None, "{:.4g}"),
        "cost of a step": told(cost.get("cost_per_step") if total else None, "{:.4g}"),
        "of a held-out point": _of_a_point(status),
        "cost of standby": told(cost.get("standby") or None, "{:.4g} if it is paid"),
        "paid in vain": ", ".join(f"{paid:.3g} {printable(why[:40])}" for why, paid in paid_in_vain(status).items()),
    }


def _of_a_point(status: Mapping[str, Any]) -> str:
    """What each percentage point has cost by which held-out accuracy has risen since the first evaluation, in money
    and steps; "" if it has not."""
    measured = [number(one, "exact_match") for one in parts(status, "held_out")]
    points = 100 * (measured[-1] - measured[0]) if measured else 0.0
    total = number(part(status, "cost"), "cost_total")
    return f"{total / points:.4g}, {number(status, 'step') / points:.3g} steps" if total and points > 0 else ""


def paid_in_vain(status: Mapping[str, Any]) -> dict[str, float]:
    """Return, by cause, what samplers cost for rollouts that taught nothing, by their share of all since the learner
    started. Of groups without variance those count that were replaced. Standby is not charged."""
    cost = sum(number(one, "cost") for one in part(part(status, "cost"), "by_class").values())
    verdicts, dropped = part(status, "verdicts"), part(status, "rollouts_dropped")
    drawn = {name: number(verdicts, name) for name in verdicts if name not in ("handed", "overloaded")}
    lost = {name: drawn.get(name, 0.0) + number(dropped, name) for name in {*drawn, *dropped} - {*KEPT}}
    lost["audit"] = sum(number(part(status, "rollouts_withheld"), node) for node in part(status, "rollouts_withheld"))
    lost["lost"] = number(status, "rollouts_lost")
    each = cost / (sum(drawn.values()) + lost["lost"] or 1.0)
    most = sorted(lost, key=lambda why: (-lost[why], why))[:MAX_COUNTED]
    return {why: each * lost[why] for why in most if each * lost[why] > 0}


def discarded(status: Mapping[str, Any]) -> float:
    """Rollouts that were drawn in vain: refused, dropped after they were accepted, or withheld from training."""
    ways = [part(status, name) for name in ("verdicts", "rollouts_dropped", "rollouts_withheld")]
    return sum(number(way, name) for way in ways for name in way if name not in KEPT)


def _withheld(found: Mapping[str, Any]) -> str:
    """By far the most are one liar's, if there is one."""
    worst = max(found, key=lambda name: number(found, name), default="")
    total = sum(number(found, name) for name in found)
    return f"{total:,.0f} rollouts, {number(found, worst):,.0f} of {printable(worst[:40])}" if total else ""


def _measured(found: Mapping[str, Any]) -> str:
    unaudited = ", unaudited" if found.get("unaudited") else ""
    return told(found.get("exact_match"), f"{{:.3f}}, version {number(found, 'version'):.0f}{unaudited}")
