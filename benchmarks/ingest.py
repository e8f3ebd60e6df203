"""How many rollouts one learner node takes in: `bin/python -m benchmarks.ingest --json`.

One process on one core is the learner's network side (ingest_learner.py), with TLS as on any line but the loopback;
samplers are processes on the other core (ingest_clients.py). Completions have 512 tokens and come one group a
submission. Two measurements:

- Speed, repeated, with medians of the repeats: steady samplers submit as fast as they get verdicts. `rollouts_per_s`
  are accepted and journaled ones by the wall clock, `rollouts_per_cpu_s` by the CPU seconds that the learner spent,
  which says what a core of its own could do where the machine has other work; latencies are from send to verdict.
- Overload: the honest half submits at a moderate fixed rate, and the other half rests and floods in turns of a few
  seconds, sending ten times as much as it may. The first window begins when the flood has spent what a node may hand in
  for nothing, and each of the others a moment after the flood began or ended. The flood is niced, or it would starve
  the honest half of the core that they share and measure nothing but that.

The p99 of a few seconds is the third or fourth largest of its submissions, and one stall of the machine decides it. So
latencies of all turns are put together, a thousand submissions and more for ten beyond the p99. The ratio is given with
the range in which 95 % of the ratios lie when turns are drawn again with replacement (`honest_p99_ratio_low` to
`_high`): other work hits both kinds of turn alike, and widens it. Other figures, of each kind of turn, say what the
ratio is made of: `loop_late_p99_ms` is how late the learner's loop comes to what is due, `journal_p99_ms` how long a
submission waits for its commit, and `flood_core_share` what the flood takes of the learner's core, which depends on
other work the least.

The learner has one core, so it meets its target with at least 1,500 `rollouts_per_s`; and the honest half's p99 under
overload may be twice the unloaded one at most. `met` says whether what was measured meets both; exit status 1 if not.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from benchmarks.ingest_clients import ClientPlan, Kind, Observed, run_clients
from benchmarks.ingest_learner import Address, LearnerPlan, Mark, run_learner

Figures = dict[str, Any]

FLOOD_NICE = 10
"""A tenth of the weight of the honest samplers on the core that they share."""

REPLY_S = 60.0
"""Longest wait for a process; it starts in two seconds."""

Word = Literal["rest", "work"]

KINDS: tuple[tuple[str, Word], ...] = (("unloaded", "rest"), ("under_overload", "work"))
"""The two kinds of window, by what the flood is told."""

POLL_S = 0.05
"""Between two looks at whether the first rollout was accepted: a hundredth of a warm-up."""

MIN_ROLLOUTS_PER_S = 1500.0
"""Accepted and journaled, on one core: what the project promises of a learner."""

MAX_P99_RATIO = 2.0
"""What a flood may do to those who keep to the rules, promised likewise."""

DRAWS = 400
"""Of the turns, for the range of the ratio: the ends of 95 % of them are then the tenth ones from either side."""

SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured. Each half has `half_nodes` samplers, which submit `half_rollouts_per_s` together. There are
    `turns` windows of `turn_s` with the flood and as many without, `settle_s` after it began or ended."""

    nodes: int = 16
    half_nodes: int = 4
    half_rollouts_per_s: float = 600.0
    group_size: int = 8
    groups_per_step: int = 64
    max_staleness: int = 8
    warm_s: float = 5.0
    measure_s: float = 10.0
    repeats: int = 3
    turns: int = 20
    turn_s: float = 5.0
    settle_s: float = 1.0


class Learner:
    """The learner's process."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.group_size = plan.group_size
        ours, theirs = SPAWN.Pipe()
        learner_core, clients_core = cores()
        self._pipe = ours
        self._process = SPAWN.Process(
            target=run_learner,
            args=(
                LearnerPlan(
                    directory=directory,
                    core=learner_core,
                    reward_core=clients_core,
                    group_size=plan.group_size,
                    groups_per_step=plan.groups_per_step,
                    max_staleness=plan.max_staleness,
                ),
                theirs,
            ),
        )
        self._process.start()
        self.address: Address = receive(ours)

    def mark(self) -> Mark:
        self._pipe.send("mark")
        found: Mark = receive(self._pipe)
        return found

    def has_begun(self) -> None:
        """Wait until it has accepted a rollout; TimeoutError if it never does."""
        until = time.monotonic() + REPLY_S
        while not self.mark().verdicts.get("accepted"):
            if time.monotonic() > until:
                raise TimeoutError(f"no rollout was accepted for {REPLY_S:g} s")
            time.sleep(POLL_S)

    def stop(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
        self._process.join(REPLY_S)


class Clients:
    """One process of samplers."""

    def __init__(self, learner: Learner, kind: Kind, nodes: int, *, rollouts_per_s: float = 0.0) -> None:
        ours, theirs = SPAWN.Pipe()
        self._pipe = ours
        plan = ClientPlan(
            kind=kind,
            learner=learner.address,
            nodes=nodes,
            group_size=learner.group_size,
            groups_per_s=rollouts_per_s / nodes / learner.group_size,
            core=cores()[1],
            nice=FLOOD_NICE if kind == "flooding" else 0,
        )
        self._process = SPAWN.Process(target=run_clients, args=(plan, theirs), daemon=True)
        self._process.start()

    def tell(self, word: Word) -> None:
        self._pipe.send(word)

    def stop(self) -> Observed:
        """End the samplers; what they saw."""
        self._pipe.send("stop")
        observed: Observed = receive(self._pipe)
        self._process.join(REPLY_S)
        return observed


def cores() -> tuple[int, int]:
    """The learner's core and the clients'; the same one where there is no other."""
    found = sorted(os.sched_getaffinity(0))
    return found[0], found[1 % len(found)]


def receive(pipe: Connection) -> Any:
    if not pipe.poll(REPLY_S):
        raise TimeoutError(f"a process of the benchmark said nothing for {REPLY_S:g} s")
    return pipe.recv()


@contextmanager
def learner(plan: Plan) -> Iterator[Learner]:
    """A learner with a journal of its own in a temporary directory."""
    directory = Path(tempfile.mkdtemp(prefix="ingest-"))
    started = Learner(plan, directory)
    try:
        yield started
    finally:
        started.stop()
        shutil.rmtree(directory, ignore_errors=True)


def measure_speed(plan: Plan) -> Figures:
    """As fast as steady samplers go."""
    with learner(plan) as served:
        clients = Clients(served, "steady", plan.nodes)
        before, after = window(served, plan)
        observed = clients.stop()
    accepted = after.verdicts.get("accepted", 0) - before.verdicts.get("accepted", 0)
    seconds, cpu_s = after.at_s - before.at_s, after.cpu_s - before.cpu_s
    latencies_ms = latencies_between(observed, before, after)
    return {
        "rollouts_per_s": accepted / seconds,
        "rollouts_per_cpu_s": accepted / cpu_s,
        "core_share": cpu_s / seconds,
        "p50_ms": percentile(latencies_ms, 0.50),
        "p99_ms": percentile(latencies_ms, 0.99),
        "rss_mb": after.rss_mb,
        "steps_per_s": (after.steps - before.steps) / seconds,
        "journal_bytes_per_s": (after.journal_bytes - before.journal_bytes) / seconds,
        "outcomes": dict(observed.outcomes),
    }


Window = tuple[Mark, Mark]
"""The marks at both ends of a stretch of one turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Milliseconds of the honest submissions in two neighbouring windows, with the flood at rest and under it."""

    unloaded_ms: Sequence[float]
    flooded_ms: Sequence[float]

    @property
    def p99_ratio(self) -> float:
        return percentile(self.flooded_ms, 0.99) / percentile(self.unloaded_ms, 0.99)


def measure_overload(plan: Plan) -> Figures:
    """Latencies of the honest half, while a flood rests and floods in turns."""
    with learner(plan) as served:
        honest = Clients(served, "paced", plan.half_nodes, rollouts_per_s=plan.half_rollouts_per_s)
        flood = Clients(served, "flooding", plan.half_nodes, rollouts_per_s=plan.half_rollouts_per_s)
        served.has_begun()
        flood.tell("work")
        time.sleep(plan.warm_s)
        windows: dict[Word, list[Window]] = {"rest": [], "work": []}
        for turn in range(plan.turns):
            # The order changes, so that what grows in the course of the run falls to both alike.
            for _, word in KINDS if turn % 2 else reversed(KINDS):
                flood.tell(word)
                time.sleep(plan.settle_s)
                before = served.mark()
                time.sleep(plan.turn_s)
                windows[word].append((before, served.mark()))
        attacked, observed = flood.stop(), honest.stop()
    unloaded, flooded = ([latencies_between(observed, *marks) for marks in windows[word]] for _, word in KINDS)
    turns = [Turn(unloaded_ms=one, flooded_ms=other) for one, other in zip(unloaded, flooded, strict=True)]
    at_rest, under_it = (window_figures(name, windows[word]) for name, word in KINDS)
    return {
        **ratio_figures(turns),
        **at_rest,
        **under_it,
        "flood_core_share": under_it["core_share_under_overload"] - at_rest["core_share_unloaded"],
        "overload_rss_mb": windows["work"][-1][1].peak_rss_mb,
        "honest_outcomes": dict(observed.outcomes),
        "flood_outcomes": dict(attacked.outcomes),
    }


def ratio_figures(turns: Sequence[Turn]) -> Figures:
    """Latencies of all turns together, the ratio of their p99, its range, and that of single turns."""
    found: Figures = {}
    for name, times in (
        ("unloaded", sorted(chain(*(turn.unloaded_ms for turn in turns)))),
        ("under_overload", sorted(chain(*(turn.flooded_ms for turn in turns)))),
    ):
        found[f"honest_submissions_{name}"] = len(times)
        for words, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999), ("longest", 1.0)):
            found[f"honest_{words}_ms_{name}"] = percentile(times, share)
    low, high = ratio_range(turns)
    alone = sorted(turn.p99_ratio for turn in turns)
    return found | {
        "honest_p99_ratio": pooled_ratio(turns),
        "honest_p99_ratio_low": low,
        "honest_p99_ratio_high": high,
        "honest_p99_ratio_of_a_turn_least": alone[0],
        "honest_p99_ratio_of_a_turn_most": alone[-1],
    }


def pooled_ratio(turns: Sequence[Turn]) -> float:
    """Of the p99 of all submissions under the flood to that of all without it."""
    unloaded, flooded = (
        percentile(sorted(chain(*times)), 0.99)
        for times in ([turn.unloaded_ms for turn in turns], [turn.flooded_ms for turn in turns])
    )
    return flooded / unloaded


def ratio_range(turns: Sequence[Turn]) -> tuple[float, float]:
    """Where 95 % of the ratios lie if turns are drawn with replacement, as many as there are."""
    draw = random.Random(0)
    ratios = sorted(pooled_ratio(draw.choices(turns, k=len(turns))) for _ in range(DRAWS))
    return percentile(ratios, 0.025), percentile(ratios, 0.975)


def window_figures(name: str, windows: Sequence[Window]) -> Figures:
    """How busy the learner was in windows of one kind, how late its loop and how slow its journal."""
    late_ms = sorted(1000 * late for _, after in windows for late in after.late_s)
    written_ms = sorted(1000 * took for _, after in windows for took in after.written_s)
    seconds = sum(after.at_s - before.at_s for before, after in windows)
    return {
        f"core_share_{name}": sum(after.cpu_s - before.cpu_s for before, after in windows) / seconds,
        f"loop_late_p99_ms_{name}": percentile(late_ms, 0.99),
        f"journal_p99_ms_{name}": percentile(written_ms, 0.99),
    }


def window(served: Learner, plan: Plan) -> tuple[Mark, Mark]:
    """Warm up from the first accepted rollout on, then measure; the marks at both ends."""
    served.has_begun()
    time.sleep(plan.warm_s)
    before = served.mark()
    time.sleep(plan.measure_s)
    return before, served.mark()


def latencies_between(observed: Observed, before: Mark, after: Mark) -> list[float]:
    """Milliseconds, sorted, of the submissions that began between two marks: the clock is one for all processes."""
    return sorted(1000 * took for began, took in observed.submissions if before.at_s <= began < after.at_s)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the `ordered` values that `share` (above 0) of them do not exceed."""
    if not ordered:
        return float("nan")
    return ordered[math.ceil(share * len(ordered)) - 1]


def medians(runs: Sequence[Figures]) -> Figures:
    """Each figure's median; counts are added."""
    found: Figures = {}
    for key, value in runs[0].items():
        if isinstance(value, dict):
            found[key] = dict(sum((Counter(run[key]) for run in runs), Counter[str]()))
        else:
            found[key] = round(statistics.median(run[key] for run in runs), 3)
    return found


def measure(plan: Plan, parts: Sequence[str]) -> Figures:
    """Speed, `repeats` times with a line for each, and overload. `met`: what was measured meets its targets."""
    found: Figures = {}
    if "speed" in parts:
        runs = []
        for _ in range(plan.repeats):
            runs.append(measure_speed(plan))
            print(json.dumps(runs[-1]), flush=True)
        found |= medians(runs)
    if "overload" in parts:
        overload = measure_overload(plan)
        found |= {key: value if isinstance(value, dict) else round(value, 3) for key, value in overload.items()}
    # No figure (nan) meets no target.
    found["met"] = (
        found.get("rollouts_per_s", MIN_ROLLOUTS_PER_S) >= MIN_ROLLOUTS_PER_S
        and found.get("honest_p99_ratio", MAX_P99_RATIO) <= MAX_P99_RATIO
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("speed", "overload"), help="one of the two measurements")
    parser.add_argument("--json", action="store_true", help="as without it: the last line is one JSON object")
    options = parser.parse_args()
    found = measure(Plan(), [options.only] if options.only else ["speed", "overload"])
    print(json.dumps(found))
    return 0 if found["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
