"""How many rollouts one learner node takes in.

bin/python -m benchmarks.ingest --only speed --json

One process on one core is the learner's network side, with TLS as on any line but the loopback; samplers are processes
on the other core (both in ingest_nodes.py). Completions have 512 tokens and come one group a submission, as fast as
there are verdicts. Medians of the repeats: `rollouts_per_s` are accepted and journaled ones by the wall clock,
`rollouts_per_cpu_s` by the CPU seconds that the learner spent, which says what a core of its own could do where the
machine has other work; latencies are from send to verdict. The target is 1,500 `rollouts_per_s`; exit status 1 if it is
missed.
"""

from __future__ import annotations

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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import Figures, parser_of, said
from benchmarks.ingest_nodes import Listening, Mark, Observed, Plan, run_clients, run_learner

REPLY_S = 60.0  # Longest wait for a process; it starts in two seconds
POLL_S = 0.05  # Between two looks at whether the first rollout was accepted: a hundredth of a warm-up
MIN_ROLLOUTS_PER_S = 1500.0  # Accepted and journaled, on one core: what the project promises of a learner
SPAWN = multiprocessing.get_context("spawn")


class Learner:
    def __init__(self, plan: Plan, directory: Path) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=run_learner, args=(plan, directory, theirs))
        self._process.start()
        self.address: Listening = receive(self._pipe)

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

    def __init__(self, plan: Plan, learner: Listening) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=run_clients, args=(plan, learner, theirs), daemon=True)
        self._process.start()

    def stop(self) -> Observed:
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
    directory = Path(tempfile.mkdtemp(prefix="ingest-"))
    started = Learner(plan, directory)
    try:
        yield started
    finally:
        started.stop()
        shutil.rmtree(directory, ignore_errors=True)


def measure_speed(plan: Plan) -> Figures:
    with learner(plan) as served:
        clients = Clients(plan, served.address)
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
    found: Figures = {}
    for key, value in runs[0].items():
        if isinstance(value, dict):
            found[key] = dict(sum((Counter(run[key]) for run in runs), Counter[str]()))
        else:
            found[key] = round(statistics.median(run[key] for run in runs), 3)
    return found


def measure(plan: Plan) -> Figures:
    """The speed, `repeats` times with a line for each. `met`: it meets its target, as nan does not."""
    found = medians([said(measure_speed(plan)) for _ in range(plan.repeats)])
    return found | {"met": found["rollouts_per_s"] >= MIN_ROLLOUTS_PER_S}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=("speed",), help="all that is measured")
    parser.parse_args()
    return 0 if said(measure(Plan(cores=cores())))["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
