"""Tables of what audit_engines.py has saved of each engine: how large errors and margins are, and where they lie."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

LEARNERS = ("float32", "bfloat16")
QUANTILES = (0.5, 0.9, 0.99, 0.999)
MISSES = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 4.0)
BOUNDS = (1.0, 4.0)  # At which a margin is cut off in a mean
CLIPS = (0.1, 0.5, 1.0, 2.0)  # At which a token's part in a CUSUM is cut off
ALLOWANCE = 5.0  # Of a CUSUM, in means of what it adds up
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
    return "\n\n".join(table(title, chosen) for title, chosen in _tables(rows))


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
        **dict(_cusums(error, off, margin)),
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


def _cusums(error: Floats, off: Floats, margin: Floats) -> Iterator[tuple[str, float]]:
    for clip in CLIPS:
        for name, values in (("+error", error), ("-error", -error), ("off", off), ("margin", margin)):
            clipped = np.clip(values, -clip, clip)
            allowance = ALLOWANCE * abs(float(clipped.mean()))
            yield f"k {name} c={clip:g}", allowance
            yield f"cusum {name} c={clip:g}", largest_cusum(clipped, allowance)


def largest_cusum(values: Floats, allowance: float) -> float:
    """The largest value of S = max(0, S + x - allowance), from S = 0, over all x in order."""
    walked = np.concatenate([[0.0], np.cumsum(values - allowance)])
    return float((walked - np.minimum.accumulate(walked)).max())


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
