"""How many rollouts one learner node takes in: `bin/python -m benchmarks.ingest --json`.

One process on one core is the learner's network side (ingest_learner.py); samplers are processes on the other core
(ingest_clients.py). Completions have 512 tokens and come one group a submission. Two measurements, each repeated, with
medians of the repeats; the first seconds of every phase do not count.

- Speed: steady samplers submit as fast as they get verdicts. `rollouts_per_s` are accepted and journaled ones by the
  wall clock, `rollouts_per_cpu_s` by the CPU seconds that the learner spent, which says what a core of its own could do
  where the machine has other work; latencies are from send to verdict.
- Overload: the honest half submits at a moderate fixed rate, at first with the other half at rest, then with the other
  half sending ten times as much as it may. The flood is niced, or it would starve the honest half of the core that they
  share and measure nothing but that. The window begins when the flood has spent what a node may hand in for nothing.

The learner has one core, so it meets its target with at least 1,500 `rollouts_per_s`; and the honest half's p99 under
overload may be twice the unloaded one at most. `met` says whether what was measured meets both; exit status 1 if not.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.ingest_clients import ClientPlan, Kind, Observed, run_clients
from benchmarks.ingest_learner import Address, LearnerPlan, Mark, run_learner

Figures = dict[str, Any]

FLOOD_NICE = 10
"""A tenth of the weight of the honest samplers on the core that they share."""

REPLY_S = 60.0
"""Longest wait for a process; it starts in two seconds."""

POLL_S = 0.05
"""Between two looks at whether the first rollout was accepted: a hundredth of a warm-up."""

MIN_ROLLOUTS_PER_S = 1500.0
"""Accepted and journaled, on one core: what the project promises of a learner."""

MAX_P99_RATIO = 2.0
"""What a flood may do to those who keep to the rules, promised likewise."""

SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured. Each half has `half_nodes` samplers, which submit `half_rollouts_per_s` together."""

    nodes: int = 16
    half_nodes: int = 4
    half_rollouts_per_s: float = 600.0
    group_size: int = 8
    groups_per_step: int = 64
    max_staleness: int = 8
    warm_s: float = 5.0
    measure_s: float = 10.0
    repeats: int = 3
    profile: Path | None = None


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
                    profile=plan.profile,
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
            port=learner.address.port,
            learner_key=learner.address.key,
            nodes=nodes,
            group_size=learner.group_size,
            groups_per_s=rollouts_per_s / nodes / learner.group_size,
            core=cores()[1],
            nice=FLOOD_NICE if kind == "flooding" else 0,
        )
        self._process = SPAWN.Process(target=run_clients, args=(plan, theirs), daemon=True)
        self._process.start()

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


def measure_overload(plan: Plan) -> Figures:
    """The honest half alone, then with the other half flooding."""
    with learner(plan) as served:
        honest = Clients(served, "paced", plan.half_nodes, rollouts_per_s=plan.half_rollouts_per_s)
        alone = window(served, plan)
        flood = Clients(served, "flooding", plan.half_nodes, rollouts_per_s=plan.half_rollouts_per_s)
        flooded = window(served, plan)
        attacked, observed = flood.stop(), honest.stop()
    unloaded_ms, overload_ms = (latencies_between(observed, *marks) for marks in (alone, flooded))
    unloaded, overloaded = percentile(unloaded_ms, 0.99), percentile(overload_ms, 0.99)
    return {
        "honest_p50_ms_unloaded": percentile(unloaded_ms, 0.50),
        "honest_p99_ms_unloaded": unloaded,
        "honest_p50_ms_under_overload": percentile(overload_ms, 0.50),
        "honest_p99_ms_under_overload": overloaded,
        "honest_p99_ratio": overloaded / unloaded,
        "overload_rss_mb": flooded[1].peak_rss_mb,
        "core_share_unloaded": core_share(*alone),
        "core_share_under_overload": core_share(*flooded),
        "honest_outcomes": dict(observed.outcomes),
        "flood_outcomes": dict(attacked.outcomes),
    }


def window(served: Learner, plan: Plan) -> tuple[Mark, Mark]:
    """Warm up from the first accepted rollout on, then measure; the marks at both ends."""
    served.has_begun()
    time.sleep(plan.warm_s)
    before = served.mark()
    time.sleep(plan.measure_s)
    return before, served.mark()


def core_share(before: Mark, after: Mark) -> float:
    return (after.cpu_s - before.cpu_s) / (after.at_s - before.at_s)


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
    """Speed and overload, `repeats` times in turn, with a line for each."""
    found: Figures = {}
    for name, part in (("speed", measure_speed), ("overload", measure_overload)):
        if name not in parts:
            continue
        runs = []
        for _ in range(plan.repeats):
            runs.append(part(plan))
            print(
                name, " ".join(f"{key}={value:.4g}" for key, value in runs[-1].items() if not isinstance(value, dict))
            )
            print(name, *(value for value in runs[-1].values() if isinstance(value, dict)), flush=True)
        found |= medians(runs)
    return found


def targets(found: Figures) -> dict[str, bool]:
    """Whether the figures meet their targets, in words; of what was measured alone. No figure (nan) meets none."""
    verdicts = {}
    if "rollouts_per_s" in found:
        words = f"{found['rollouts_per_s']:.0f} rollouts/s on a core, at least {MIN_ROLLOUTS_PER_S:.0f}"
        verdicts[words] = found["rollouts_per_s"] >= MIN_ROLLOUTS_PER_S
    if "honest_p99_ratio" in found:
        words = f"honest p99 under overload {found['honest_p99_ratio']:.2f} x unloaded, at most {MAX_P99_RATIO:g} x"
        verdicts[words] = found["honest_p99_ratio"] <= MAX_P99_RATIO
    return verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    plan = Plan()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=plan.nodes, help="steady samplers of the speed measurement")
    parser.add_argument("--half-nodes", type=int, default=plan.half_nodes, help="samplers of each half")
    parser.add_argument("--half-rate", type=float, default=plan.half_rollouts_per_s, help="rollouts/s of a half")
    parser.add_argument("--group-size", type=int, default=plan.group_size)
    parser.add_argument("--groups-per-step", type=int, default=plan.groups_per_step)
    parser.add_argument("--max-staleness", type=int, default=plan.max_staleness)
    parser.add_argument("--warm-up", type=float, default=plan.warm_s, help="seconds before each window")
    parser.add_argument("--seconds", type=float, default=plan.measure_s, help="of each window")
    parser.add_argument("--repeats", type=int, default=plan.repeats)
    parser.add_argument("--only", choices=("speed", "overload"), help="one of the two measurements")
    parser.add_argument("--profile", type=Path, help="cProfile of the learner goes here (the last run's)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    plan = Plan(
        nodes=options.nodes,
        half_nodes=options.half_nodes,
        half_rollouts_per_s=options.half_rate,
        group_size=options.group_size,
        groups_per_step=options.groups_per_step,
        max_staleness=options.max_staleness,
        warm_s=options.warm_up,
        measure_s=options.seconds,
        repeats=options.repeats,
        profile=options.profile,
    )
    found = measure(plan, [options.only] if options.only else ["speed", "overload"])
    verdicts = targets(found)
    for words, met in verdicts.items():
        print(f"target {'met' if met else 'missed'}: {words}")
    if options.json:
        print(json.dumps({"met": all(verdicts.values()), **found}))
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
