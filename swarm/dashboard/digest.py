"""What the page shows of a run, from its node's status and its files: header, tiles, nodes, links, versions.

Pure, and total: whatever a status has in it, the result is bounded and is JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from statistics import fmean
from typing import Any, Protocol

from swarm.report.words import (
    MOST_CHARACTERS,
    bottleneck,
    counts,
    finite,
    learner_figures,
    number,
    part,
    parts,
    shown,
    stages,
    told,
    words,
)
from swarm.types import printable

MOST_NODES, MOST_LINKS, MOST_VERSIONS = 4096, 2000, 8  # As many nodes as a learner serves
MOST_ITEMS = 64  # Settings, ages, codecs and other short lists
COLUMNS = (
    *("node", "name", "role", "state", "engine", "precision", "version", "lag", "tokens_per_s", "rollouts_per_s"),
    *("accepted", "stale", "invalid", "up_bytes_per_s", "down_bytes_per_s", "cost_per_hour", "cost", "last_seen_s"),
    *("why", "class"),
)
INVALID = ("malformed", "future", "duplicate", "barred")  # Verdicts that no honest sampler gets as a rule
SILENT_BEATS = 1.5  # Missed before a node is shown as silent; after three it is gone


class Known(Protocol):
    """What is used of report.figures.Figures."""

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def began(self) -> float | None: ...


def digest(status: Mapping[str, Any], figures: Known, *, now: float) -> dict[str, Any]:
    """`now` is the wall clock, in seconds."""
    config, alarm = figures.config, status.get("alarm")
    return {
        "at": now,
        **{name: words(status, name) for name in ("state", "fault", "waits_for", "node", "swarm", "version", "join")},
        **{name: words(config, name) for name in ("model", "task")},
        **{name: int(number(status, name)) for name in ("step", "steps")},
        "alarm": words(part(status, "alarm"), "text") or (words(status, "alarm") if alarm else ""),
        "target": finite(config.get("target")),
        "time_left_s": time_left_s(status),
        "began": finite(figures.began),
        "bottleneck": bottleneck(status),
        "tiles": tiles(status, config),
        "nodes": {"columns": list(COLUMNS), "rows": list(islice(_nodes(status, config), MOST_NODES))},
        "links": _links(status),
        "versions": _versions(status),
        "staleness": {
            "bound": number(status, "max_staleness"),
            "counts": [finite(n) or 0 for n in _items(status.get("ages"))],
        },
        "settings": [_plain(one) for one in parts(status, "settings")[:MOST_ITEMS]],
        "barred": [_plain(one) for one in _items(status.get("barred"))],
    }


def time_left_s(status: Mapping[str, Any]) -> float | None:
    """Steps left, at the median pace of the last ones; None where nothing is known, or the learner stands still."""
    left, step_s = number(status, "steps") - number(status, "step"), finite(status.get("step_s"))
    return left * step_s if step_s is not None and left >= 0 and status.get("state") == "running" else None


# -- tiles ---------------------------------------------------------------------------------------------------


def tiles(status: Mapping[str, Any], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    known, metrics = learner_figures(status), part(status, "metrics")
    capacity, cost, verdicts = (part(status, name) for name in ("capacity", "cost", "verdicts"))
    held_out: Mapping[str, Any] = next(reversed(parts(status, "held_out")), {})
    idle = finite(capacity.get("idle_share"))
    rate, length = number(status, "rollouts_per_s"), _mean_length(status)
    dropped, withheld = part(status, "rollouts_dropped"), part(status, "rollouts_withheld")
    wasted = {name: n for name, n in verdicts.items() if name != "accepted"}
    lost = sum(number(found, name) for found in (wasted, dropped, withheld) for name in found)
    newest = next(reversed([one for one in map(stages, parts_of(status, "broadcasts")) if "installing" in one]), {})
    step_s, per_hour = number(status, "step_s"), finite(cost.get("cost_per_hour"))
    per_token, bound = finite(cost.get("cost_per_token")), number(status, "max_staleness")
    stale = max(number(status, "max_staleness_seen"), number(metrics, "staleness/max")) > bound
    return [
        _tile("reward", "Reward", known["reward"], metrics.get("reward"), "reward", [
            ("spread", told(metrics.get("reward_std"), "{:.3f}")), ("exact match", known["exact match"]),
        ]),
        _tile("held_out", "Held-out", told(held_out.get("exact_match"), "{:.3f}"), held_out.get("exact_match"),
              "exact_match", [
            ("version", told(held_out.get("version"), "{:.0f}")), ("best", known["best held-out"]),
            ("target", told(config.get("target"), "{:g}")),
        ]),
        _tile("rollouts_per_s", "Rollouts", known["of all nodes"], rate, "rollouts_per_s", [
            ("accepted", known["accepted"]), ("needed", told(capacity.get("rollouts_per_s_needed"), "{:.4g}/s")),
        ]),
        _tile("tokens_per_s", "Tokens", f"{shown(rate * length)} tokens/s" if length else "", rate * length or None,
              None, [
            ("accepted", told(cost.get("tokens_accepted"), "{:,.0f}")), ("mean length", told(length or None, "{:.4g}")),
        ]),
        _tile("busy", "Learner busy", "" if idle is None else f"{1 - idle:.1%}", None if idle is None else 1 - idle,
              "idle_share", [
            ("step", told(step_s or None, "{:.3g} s")), ("training", known["train step"]),
            ("idle", known["learner idle"]), ("idle, predicted", known["predicted idle"]),
        ], "warn" if (idle or 0.0) > max(0.1, number(capacity, "idle_target")) else ""),
        _tile("staleness", "Staleness", known["staleness"], metrics.get("staleness/mean"), "staleness/mean", [
            ("bound", f"{bound:.0f}"), ("aim", known["staleness aim"]),
        ], "bad" if stale else ""),
        _tile("discarded", "Discarded", f"{lost:,.0f} rollouts", lost, None, [
            ("refused", counts(wasted)), ("dropped", known["dropped"]), ("withheld", known["withheld"]),
        ], "warn" if lost > 0.1 * (number(cost, "rollouts_accepted") + lost) else ""),
        _tile("broadcast", "Broadcast", known["time to install"], status.get("broadcast_s"), "broadcast_s", [
            (name, f"{seconds:.3g} s") for name, seconds in newest.items()
        ]),
        _tile("samplers", "Samplers", f"{number(capacity, 'active'):.0f} active", capacity.get("active"), "active", [
            ("standby", told(capacity.get("standby"), "{:.0f}")), ("known", f"{len(parts(status, 'samplers'))}"),
        ]),
        _tile("cost", "Cost", "" if per_hour is None else f"{per_hour:.2f} an hour", per_hour, "cost_total", [
            ("in all", known["cost"]), ("of a step", known["cost of a step"]),
            ("of a million tokens", told(None if per_token is None else 1e6 * per_token, "{:.4g}")),
        ]),
    ]  # fmt: skip


def _tile(
    name: str,
    label: str,
    text: str,
    value: object,
    series: str | None,
    details: Iterable[tuple[str, str]],
    tone: str = "",
) -> dict[str, Any]:
    found = {"id": name, "label": label, "text": text, "value": finite(value), "series": series, "tone": tone}
    return {**found, "details": [[what, said] for what, said in details if said]}


def _mean_length(status: Mapping[str, Any]) -> float:
    """Tokens of an accepted completion; 0 before there was one."""
    lengths = part(part(status, "capacity"), "inputs").get("lengths")
    known = [n for n in map(finite, lengths[:MOST_ITEMS]) if n is not None] if isinstance(lengths, list) else []
    return fmean(known) if known else number(part(status, "metrics"), "completions/mean_length")


# -- the swarm -----------------------------------------------------------------------------------------------


def _nodes(status: Mapping[str, Any], config: Mapping[str, Any]) -> Iterable[list[Any]]:
    newest, length = words(status, "version", 40), _mean_length(status)
    costs, beat_s = part(part(status, "cost"), "by_node"), finite(config.get("beat_s"))
    own = {"node": status.get("node"), "name": words(config, "nickname", 40), "role": "learner", "version": newest}
    uplink = finite(status.get("uplink_bytes_per_s"))
    yield _row({**own, "state": status.get("state"), "up_bytes_per_s": uplink, "lag": 0, "last_seen_s": 0.0})
    known = {status.get("node")}
    for sampler in parts(status, "samplers"):
        known.add(words(sampler, "node"))
        yield _row(_sampler(sampler, newest, length, costs, beat_s))
    for leaf, members in ((False, parts(status, "publics")), (True, parts(status, "leaves"))):
        for member in members:
            if words(member, "node") not in known:
                state = "leaf" if leaf else "silent" if member.get("state") == "suspect" else "active"
                found = {"version": member.get("held"), "state": state, "last_seen_s": finite(member.get("beat_s"))}
                yield _row({"lag": finite(member.get("lag")), **member, **found})


def _row(known: Mapping[str, Any]) -> list[Any]:
    name = words(known, "name", 64) or words(known, "node", 12)
    return [name if column == "name" else _plain(known.get(column)) for column in COLUMNS]


def _sampler(
    sampler: Mapping[str, Any], newest: str, length: float, costs: Mapping[str, Any], beat_s: float | None
) -> dict[str, Any]:
    verdicts, engine = part(sampler, "verdicts"), words(sampler, "engine", 80).split("/")
    node, rate, silent_s = words(sampler, "node"), finite(sampler.get("rollouts_per_s")), number(sampler, "silent_s")
    is_silent = beat_s is not None and silent_s > SILENT_BEATS * beat_s
    working = "standby" if sampler.get("standby") else "active" if sampler.get("installed") else "fetching"
    return {
        "node": node,
        "name": words(sampler, "nickname", 64),
        "role": "sampler",
        "state": "silent" if is_silent else working,
        "engine": engine[0] or None,
        "precision": engine[1] if len(engine) > 1 else None,
        "version": words(sampler, "installed", 40) or None,
        "lag": _lag(newest, words(sampler, "installed", 40)),
        "tokens_per_s": rate * length if rate is not None and length else None,
        "rollouts_per_s": rate,
        "accepted": number(verdicts, "accepted"),
        "stale": number(verdicts, "stale") + number(part(sampler, "dropped"), "stale"),
        "invalid": sum(number(verdicts, name) for name in INVALID),
        **{name: finite(sampler.get(name)) for name in ("up_bytes_per_s", "down_bytes_per_s", "cost_per_hour")},
        "cost": finite(costs.get(node)),
        "last_seen_s": silent_s,
        "why": words(sampler, "standby"),
        "class": words(sampler, "device_class", 40),
    }


def _lag(newest: str, held: str) -> int | None:
    """Versions between two of one incarnation."""
    (life, _, last), (same, _, at) = newest.partition("."), held.partition(".")
    return int(last) - int(at) if life == same and f"{last}{at}".isdecimal() and last and at else None


def _links(status: Mapping[str, Any]) -> list[list[Any]]:
    found = status.get("links")
    links = [one for one in found[:MOST_LINKS] if isinstance(one, list)] if isinstance(found, list) else []
    return [[*map(_text, one[:2]), finite(one[2]), _text(one[3]) or None] for one in links if len(one) == 4]


def _versions(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    receivers, broadcasts = number(status, "streams"), part(status, "broadcasts")
    for version in list(broadcasts)[-MOST_VERSIONS:]:
        one = part(broadcasts, version)
        names = ("raw_bytes", "encoded_bytes", "sent_bytes", "stage_s", "prepared_s", "last_complete_s", "repairs")
        progress = islice(part(one, "progress").items(), MOST_NODES)
        found.append(
            {
                "version": _text(version),
                **{name: finite(one.get(name)) for name in names},
                "codecs": _plain(part(one, "codecs")),
                "installed_s": _plain(part(one, "installed_s")),
                "complete": number(one, "complete"),
                "of": max(receivers, number(one, "complete")),
                "progress": {_text(node): share for node, at in progress if (share := finite(at)) is not None},
            }
        )
    return found


# -- anything ------------------------------------------------------------------------------------------------


def parts_of(known: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The mappings in a mapping within `known`, in its order."""
    return [one for one in part(known, name).values() if isinstance(one, dict)]


def _items(value: object) -> Sequence[Any]:
    return value[:MOST_ITEMS] if isinstance(value, list | tuple) else ()


def _text(value: object) -> str:
    return printable(str(value)[:MOST_CHARACTERS]) if isinstance(value, str | int) else ""


def _plain(value: object, depth: int = 3) -> Any:
    """`value` as bounded JSON: finite numbers, printable words, and few of each."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value if finite(value) is not None else None
    if isinstance(value, str):
        return printable(value[:MOST_CHARACTERS])
    if isinstance(value, Mapping) and depth:
        return {_text(name): _plain(one, depth - 1) for name, one in islice(value.items(), MOST_ITEMS)}
    return [_plain(one, depth - 1) for one in _items(value)] if depth else None
