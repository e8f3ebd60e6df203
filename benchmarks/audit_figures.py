"""Tables of what audit.py has saved of each engine: how large errors and margins are, the limits that follow from that,
and how soon a lie is caught at the limits that hold for its class."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swarm.audit.auditing import measured_classes
from swarm.audit.auditor import ANY, HALF, Auditor, Finding, Limits
from swarm.types import NodeId

LEARNERS = ("float32", "bfloat16")
QUANTILES = (0.5, 0.9, 0.99, 0.999)
MISSES = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 4.0)
BOUNDS = (1.0, 4.0)  # At which a margin is cut off in a mean
FACTOR = 5.0  # Between what honest engines do and a limit
SHIFTS = (0.02, 0.05, 0.1, 0.27, 0.5, 1.0)  # Nats that every claim is too high by
REPLACED = (0.01, 0.02, 0.05, 0.1, 0.2)  # Shares of tokens that are drawn with other noise than that of their seed
RUNS = 20  # Orders of the rollouts
SAMPLER = NodeId("sampler")
WORKLOADS = ("all", "chats", "sums")

Floats = np.ndarray[Any, np.dtype[np.float64]]
Arrays = dict[str, np.ndarray[Any, Any]]


def summary(directory: Path) -> str:
    """Write summary.json into `directory`; return the tables."""
    rows = [
        row
        for path in sorted(directory.glob("*.npz"), key=_order)
        for arrays in [_read(path)]
        for workload in WORKLOADS
        for learner in LEARNERS
        for row in [figures(arrays, workload, learner)]
    ]
    (directory / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")
    tables = [table(title, chosen) for title, chosen in _tables(rows)]
    return "\n\n".join([*tables, *(limits_of(row) for row in rows if row["workload"] == "all"), *caught(directory)])


def _order(path: Path) -> tuple[int, str]:
    kinds = ("transformers", "mlx", "vllm")
    kind = path.name.partition("-")[0]
    return (kinds.index(kind) if kind in kinds else len(kinds)), path.name.replace("bfloat16", "half")


def _read(path: Path) -> Arrays:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def _tables(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for learner in LEARNERS:
        for workload in WORKLOADS:
            chosen = [row for row in rows if (row["learner"], row["workload"]) == (learner, workload)]
            yield f"Learner in {learner}; {'all tokens' if workload == 'all' else workload}", chosen


def figures(arrays: Arrays, workload: str, learner: str) -> dict[str, Any]:
    """Return all figures of an engine against a learner's precision. Nats throughout."""
    is_chat = arrays["is_chat"]
    taken = {"all": np.ones_like(is_chat), "chats": is_chat, "sums": ~is_chat}[workload]
    own = {name: values[taken] for name, values in arrays.items() if values.ndim}
    error, margin = own[f"error_{learner}"].astype(np.float64), own[f"margin_{learner}"].astype(np.float64)
    off = np.abs(error)
    return {
        "engine": str(arrays["engine"]),
        "class": str(arrays["engine_class"]),
        "learner": learner,
        "workload": workload,
        "tokens": len(error),
        "nll": -float(own["logprob_float32"].mean()),
        "error_mean": float(error.mean()),
        "error_mean_se": _error_of_mean(error, own["rollout"]),
        **{f"error_mean {name}": float(error[where].mean()) for name, where in cells(own)},
        "error_sd": float(error.std()),
        "mismatch_kl": float((np.expm1(-error) + error).mean()),
        "off_mean": float(off.mean()),
        **{f"off q{share:g}": float(np.quantile(off, share)) for share in QUANTILES},
        "off_max": float(off.max()),
        **{f"margin >{least:g}": float((margin > least).mean()) for least in MISSES},
        "margin_mean": float(margin.mean()),
        **{f"margin_mean min({most:g})": float(np.minimum(margin, most).mean()) for most in BOUNDS},
        "margin_max": float(margin.max()),
        "largest_sum": largest_sum(arrays, learner),
    }


def _error_of_mean(error: Floats, rollout: Floats) -> float:
    """The standard error of the mean, as if only whole rollouts were independent."""
    _, place = np.unique(rollout, return_inverse=True)
    sums = np.bincount(place, error - error.mean())
    return float(np.sqrt((sums**2).sum()) / len(error))


def cells(own: Arrays) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield which tokens are in which half of their answer, and in which half of their prompt's answers. The better
    half is the likelier one, by the float32 learner's sum of log-probs: a stand-in for a reward."""
    rollouts, place, counts = np.unique(own["rollout"], return_inverse=True, return_counts=True)
    is_early = own["position"] < counts[place] / 2
    sums = np.bincount(place, own["logprob_float32"])
    prompts = own["prompt"][np.searchsorted(own["rollout"], rollouts)]
    better = np.zeros(len(rollouts), dtype=bool)
    for prompt in np.unique(prompts):
        group = np.flatnonzero(prompts == prompt)
        better[group[np.argsort(-sums[group])[: len(group) // 2]]] = True
    is_better = better[place]
    yield "1st half", is_early
    yield "2nd half", ~is_early
    for side, in_side in (("better", is_better), ("worse", ~is_better)):
        yield side, in_side
        yield f"{side} 1st half", in_side & is_early
        yield f"{side} 2nd half", in_side & ~is_early


def limits_of(row: dict[str, Any]) -> str:
    """Limits as classes.toml has them; `sum` is left to whoever looks at `largest_sum`."""
    bias = FACTOR * max(abs(row["error_mean"]), *(abs(row[f"error_mean {half} half"]) for half in ("1st", "2nd")))
    size, margin = FACTOR * row["off_mean"], FACTOR * row["margin_mean min(1)"]
    head = f'["{row["class"]}"]  # learner in {row["learner"]}'
    return f"{head}\nbias = {bias:.2g}\nsize = {size:.2g}\nmargin = {margin:.2g}"


def limits_for(engine_class: str, learner: str) -> Limits:
    found = measured_classes().get(engine_class, ANY)
    return found if learner == "float32" else found.widened(HALF)


def findings(arrays: Arrays, learner: str) -> list[Finding]:
    """Return the audit's findings, a rollout each, in order; the better half of a prompt's answers has side 1."""
    (_, better) = next(one for one in cells(arrays) if one[0] == "better")
    starts = np.flatnonzero(np.diff(arrays["rollout"], prepend=-1))
    errors, margins = (np.split(arrays[f"{name}_{learner}"], starts[1:]) for name in ("error", "margin"))
    sides = np.where(better[starts], 1, -1)
    return [Finding(errors=e, margins=m, side=int(s)) for e, m, s in zip(errors, margins, sides, strict=True)]


def largest_sum(arrays: Arrays, learner: str) -> float:
    """The largest evidence that comes up against this honest engine, as a share of what convicts."""
    limits = limits_for(str(arrays["engine_class"]), learner)
    auditor, largest = Auditor({}, secret=b"", share=1.0), 0.0
    for finding in findings(arrays, learner):
        auditor.add(SAMPLER, limits, finding)
        largest = max(largest, *(one.score for one in auditor._known[SAMPLER].sums.values()))
    return largest / limits.sum


def caught(directory: Path) -> Iterator[str]:
    """Yield a table for each learner: audited tokens until a lie is caught, the median and the most of RUNS."""
    for learner in LEARNERS:
        head = ["engine", *(f"+{shift:g}" for shift in SHIFTS), *(f"{share:.0%} replaced" for share in REPLACED)]
        lines = [f"Tokens until caught, learner in {learner}", "  ".join(head)]
        for path in sorted(directory.glob("*.npz"), key=_order):
            arrays = _read(path)
            limits, found = limits_for(str(arrays["engine_class"]), learner), findings(arrays, learner)
            nll = np.split(-arrays[f"logprob_{learner}"], np.cumsum([len(one.errors) for one in found])[:-1])
            cells_of = [until_caught(found, nll, limits, shift=shift) for shift in SHIFTS]
            cells_of += [until_caught(found, nll, limits, replaced=share) for share in REPLACED]
            lines.append("  ".join([str(arrays["engine"]), *cells_of]))
        yield "\n".join(lines)


def until_caught(
    found: Sequence[Finding], nll: Sequence[Any], limits: Limits, *, shift: float = 0.0, replaced: float = 0.0
) -> str:
    taken = []
    for seed in range(RUNS):
        draw, auditor, tokens = np.random.default_rng(seed), Auditor({}, secret=b"", share=1.0), 0
        for at in draw.permutation(len(found)):
            finding = found[at]
            tokens += len(finding.errors)
            margins = np.where(draw.random(len(nll[at])) < replaced, other_margins(nll[at], draw), finding.margins)
            lie = dataclasses.replace(finding, errors=finding.errors + np.float32(shift), margins=margins)
            if auditor.add(SAMPLER, limits, lie) is not None:
                taken.append(tokens)
                break
    least = "never" if len(taken) < RUNS else f"{max(taken):,}"
    return f"{int(np.median(taken)):,} ({least})" if taken else "never"


def other_margins(nll: Any, draw: np.random.Generator) -> Any:
    """Margins of tokens as likely as these that were drawn with other noise: the Gumbel noise of the best other token
    against theirs is logistic around the log-odds against them."""
    odds = np.log(np.maximum(np.expm1(nll), 1e-9))
    return np.maximum(0.0, draw.logistic(odds, 1.0)).astype(np.float32)


def table(title: str, rows: Sequence[dict[str, Any]]) -> str:
    """A column an engine, a line a figure."""
    if not rows:
        return f"{title}: nothing"
    names = [name for name in rows[0] if name not in ("engine", "class", "learner", "workload")]
    lines = [[title, *(row["engine"].replace("transformers", "hf") for row in rows)]]
    lines += [[name, *(_shown(row[name]) for row in rows)] for name in names]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) if at else cell.ljust(width) for at, (cell, width) in enumerate(pairs))
        for line in lines
        for pairs in [list(zip(line, widths, strict=True))]
    )


def _shown(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return "0" if value == 0 else f"{value:.5f}" if abs(value) >= 0.001 else f"{value:.2e}"
