"""What the page shows of a run, from its node's status and its files: header, tiles, nodes, links, versions.

Pure, and total: whatever a status has in it, the result is bounded and is JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from swarm.report.words import (
    ID_LENGTH,
    JOIN_LENGTH,
    MAX_CHARACTERS,
    STAGES,
    bottleneck,
    discarded,
    ending,
    finite,
    learner_figures,
    newest_stages,
    nodes,
    number,
    part,
    parts,
    told,
    waiting_for,
    words,
)
from swarm.types import printable

MAX_NODES, MAX_LINKS, MAX_VERSIONS = 4096, 2000, 8  # A learner serves no more nodes, and names no more of the others
MAX_ITEMS = 1025  # Of any other list: an age for each bound that can be set
TEXTS = ("node", "name", "role", "state", "engine", "precision", "version", "why", "class")
COLUMNS = (
    *TEXTS[:7],
    *("lag", "tokens_per_s", "rollouts_per_s", "accepted", "stale", "invalid", "up_bytes_per_s", "down_bytes_per_s"),
    *("cost_per_hour", "cost", "last_seen_s", "why", "class"),
)
COSTS = "cost", "cost of a step", "of a million tokens", "of a held-out point", "paid in vain", "cost of standby"
TILES: tuple[tuple[str, str, str, str | None, tuple[str, ...]], ...] = (
    ("reward", "Reward", "reward", "reward", ("exact match",)),
    ("held_out", "Held-out", "held-out", "exact_match", ("best held-out",)),
    ("rollouts_per_s", "Rollouts", "of all nodes", "rollouts_per_s", ("accepted",)),
    ("tokens_per_s", "Tokens", "tokens", "tokens_per_s", ("tokens accepted",)),
    ("busy", "Learner busy", "learner busy", None, ("step takes", "train step", "predicted idle")),
    ("staleness", "Staleness", "staleness", "staleness/mean", ("staleness aim",)),
    ("discarded", "Discarded", "discarded", None, ("refused", "dropped", "withheld")),
    ("broadcast", "Broadcast", "time to install", "broadcast_s", STAGES),
    ("samplers", "Samplers", "samplers", "active", ("active",)),
    ("cost", "Cost", "cost of an hour", "cost_total", COSTS),
)
"""Id, label, the figure that it shows, the column of its curve, and figures beside it."""

WAITS_FOR = {
    "reward": "after the first step",
    "held_out": "after the first evaluation",
    "rollouts_per_s": "none yet",
    "tokens_per_s": "none yet",
    "busy": "after the second step",
    "staleness": "after the first step",
    "discarded": "none yet",
    "broadcast": "after the first install",
    "samplers": "none yet",
    "cost": "no price set",
}
"""What a tile of a run that is led says as long as its figure is not known."""

RATES = ("tokens_per_s", "rollouts_per_s", "up_bytes_per_s", "down_bytes_per_s", "cost_per_hour", "last_seen_s")
ALARM_STEPS = 50  # For as long as this an alarm is news
STATES = {"alive": "active", "suspect": "silent"}  # Gossip's words
SILENT_BEATS = 1.5  # Missed before a sampler is shown as silent; after three it is gone
LITTLE = 0.1  # Share of the time or of the rollouts that may be lost before a tile says so by its tone
SIZES = ("raw_bytes", "encoded_bytes", "sent_bytes", "stage_s", "prepared_s", "last_complete_s", "repairs", "complete")


def digest(
    status: Mapping[str, Any], config: Mapping[str, Any], *, began: float | None, now: float, live: bool = True
) -> dict[str, Any]:
    """`began` and `now` are unix seconds. A run that is not `live` has only its files."""
    ages, alarm = status.get("ages"), part(status, "alarm")
    alarmed_at, is_late = number(alarm, "step"), number(status, "step") - number(alarm, "step") > ALARM_STEPS
    return {
        "at": now,
        **{name: words(status, name) for name in ("state", "fault", "waits_for", "node", "swarm", "version")},
        "join": words(status, "join", JOIN_LENGTH),
        **{name: words(config, name) for name in ("model", "task")},
        **{name: int(number(status, name)) for name in ("step", "steps")},
        "alarm": f"step {alarmed_at:.0f}: {words(alarm, 'text')}" if alarm and not is_late else "",
        "target": finite(config.get("target")),
        "time_left_s": _time_left_s(status),
        "began": finite(began),
        "bottleneck": bottleneck(status) if live else ending(status, config),
        "tiles": _tiles(status, WAITS_FOR if live else {}),
        "nodes": {"columns": list(COLUMNS), "rows": list(islice(_rows(status, config, live=live), MAX_NODES))},
        "links": _links(status.get("links")) if live else [],
        "versions": _versions(status),
        "staleness": {
            "bound": number(status, "max_staleness"),
            "counts": [finite(count) or 0 for count in ages[:MAX_ITEMS]] if isinstance(ages, list) else [],
        },
        **{name: _plain(status.get(name)) or [] for name in ("settings", "barred")},
    }


def _time_left_s(status: Mapping[str, Any]) -> float | None:
    """Steps left, at the median pace of the last ones; None while that is not known, or the learner stands still."""
    left, step_s = number(status, "steps") - number(status, "step"), finite(status.get("step_s"))
    is_going_on = left >= 0 and status.get("state") == "running" and not waiting_for(status)
    return left * step_s if step_s is not None and is_going_on else None


def _tiles(status: Mapping[str, Any], waits_for: Mapping[str, str]) -> list[dict[str, Any]]:
    """What the terminal says, ordered. A tile whose figure is not known has no value."""
    known, metrics, capacity = learner_figures(status), part(status, "metrics"), part(status, "capacity")
    held_out: Mapping[str, Any] = next(reversed(parts(status, "held_out")), {})
    idle, bound, lost = finite(capacity.get("idle_share")), number(status, "max_staleness"), discarded(status)
    accepted = number(part(status, "cost"), "rollouts_accepted")
    known |= {stage: f"{seconds:.3g} s" for stage, seconds in newest_stages(status).items()}
    known["active"] = told(capacity.get("active"), "{:.0f}")
    known["learner busy"] = "" if idle is None else f"{1 - idle:.1%}"
    values = {
        "reward": metrics.get("reward"),
        "held_out": held_out.get("exact_match"),
        "rollouts_per_s": status.get("rollouts_per_s"),
        "tokens_per_s": status.get("tokens_per_s"),
        "busy": None if idle is None else 1 - idle,
        "staleness": metrics.get("staleness/mean"),
        "discarded": lost,
        "broadcast": status.get("broadcast_s"),
        "samplers": capacity.get("active"),
        "cost": part(status, "cost").get("cost_per_hour"),
    }
    tones = {
        "busy": "warn" if (idle or 0.0) > LITTLE else "",
        "staleness": "bad" if number(metrics, "staleness/max") > bound else "",
        "discarded": "warn" if lost > LITTLE * (lost + accepted) else "",
    }
    tiles = []
    for name, label, figure, series, beside in TILES:
        text, _, rest = (known[figure] or waits_for.get(name, "")).partition(", ")
        said = [["and", rest], *([one, known.get(one, "")] for one in beside)]
        tile = {"id": name, "label": label, "text": text, "value": finite(values[name]) if known[figure] else None}
        more = [one for one in said if one[1]]
        tiles.append({**tile, "series": series, "tone": tones.get(name, ""), "details": more})
    return tiles


def _rows(status: Mapping[str, Any], config: Mapping[str, Any], *, live: bool) -> Iterable[list[Any]]:
    no_rates: dict[str, Any] = {} if live else dict.fromkeys(RATES)
    gone = {} if live else {"state": "gone", **no_rates}
    silent_s = SILENT_BEATS * number(config, "beat_s")
    own = {name: status.get(name) for name in ("node", "state", "version", "up_bytes_per_s")}
    name = words(status, "node", ID_LENGTH)
    yield _row(
        {**own, "name": name, "role": "learner", "lag": 0, "last_seen_s": 0, "why": status.get("waits_for"), **no_rates}
    )
    for node in nodes(status):
        is_silent = node["role"] == "sampler" and 0 < silent_s < node["last_seen_s"]
        yield _row({**node, "state": "silent" if is_silent else STATES.get(node["state"], node["state"]), **gone})


def _row(node: Mapping[str, Any]) -> list[Any]:
    texts = [_text(node.get(name)) or None for name in TEXTS]
    return [*texts[:7], *(finite(node.get(name)) for name in COLUMNS[7:-2]), *texts[7:]]


def _links(found: object) -> list[list[Any]]:
    links = found[:MAX_LINKS] if isinstance(found, list | tuple) else ()
    whole = [one for one in links if isinstance(one, list | tuple) and len(one) == 4]
    return [[_text(sender), _text(to), finite(rate), _text(version) or None] for sender, to, rate, version in whole]


def _versions(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    broadcasts = part(status, "broadcasts")
    found = []
    for version in list(broadcasts)[-MAX_VERSIONS:]:
        one = part(broadcasts, version)
        shares = {name: _plain(part(one, name)) for name in ("codecs", "installed_s", "progress")}
        of = max(number(status, "streams"), number(one, "complete"))
        found.append({"version": _text(version), **{name: finite(one.get(name)) for name in SIZES}, **shares, "of": of})
    return found


def _text(value: object) -> str:
    return printable(value[:MAX_CHARACTERS]) if isinstance(value, str) else ""


def _plain(value: object, depth: int = 3) -> Any:
    """`value` as bounded JSON: finite numbers, printable words, and not too many of either."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value if finite(value) is not None else None
    if isinstance(value, dict) and depth:
        return {_text(name): _plain(one, depth - 1) for name, one in islice(value.items(), MAX_NODES)}
    if isinstance(value, list | tuple) and depth:
        return [_plain(one, depth - 1) for one in value[:MAX_ITEMS]]
    return _text(value)
