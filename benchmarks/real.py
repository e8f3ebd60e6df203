"""A real model learns sums with echo-node and with TRL's GRPOTrainer, on the same cores.

    bin/python -m benchmarks.real --model DIR --seeds 3 --json
    bin/python -m benchmarks.real --model DIR --seeds 1 --only trl --trl dtype=float32 batch=12 --json

Same model, questions (examples/sums.jsonl), longest completion and its end, groups, objective (clipped, no KL), number
of optimiser steps on a batch, learning rate and warm-up, and the same 300 held-out questions, answered greedily and
scored by the reward `numeric`. echo-node is a learner and one sampler as `lead` and `join` start them, with a thread
each; TRL is benchmarks/real_trl.py, with the fastest settings of those that RESULTS.md lists unless --trl says others:
threads of torch, passes of training, rollouts in one of them.

A learner step is a batch of rollouts with all optimiser steps on it. Steps up to --warm-up-steps are left out of its
seconds and CPU-seconds. TRL's figures leave out its evaluations; echo-node's sampler answers held-out questions while
the learner trains, so its figures hold them. Memory is the largest sum of the processes' PSS, read once a second. The
time of a held-out round runs from when the model is loaded; of TRL it is the time of training alone.

Each run is a line of JSON with the load before and after it: on a machine that does other work the figures mean
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil

from benchmarks import learning_swarm
from benchmarks.learning_swarm import RunFailed
from swarm.settings import LeadConfig
from swarm.settings_file import load_config

SUMS = Path(__file__).parents[1] / "examples" / "sums.jsonl"
GROUPS, GROUP_SIZE, MAX_NEW_TOKENS = 12, 8, 3
LOOK_S = 1.0
"""Between two readings of memory and CPU time, each of which takes some milliseconds for a process of gigabytes."""

STEP_LIMIT_S = 300.0
"""A run that takes longer has hung."""

OWN = ("max_staleness", "publish_every_steps", "freshness", "precision")
"""echo-node's own settings; those of examples/smollm2.toml unless said."""

SHARES = (0.3, 0.4, 0.5, 0.6, 0.7)
"""Held-out accuracies, of which the time is given until a run first reached them."""

Line = dict[str, Any]
"""A run: system, seed, settings, and what was measured."""


# -- watching processes ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Watched:
    """What was seen of a tree of processes: (time, CPU-seconds until then), and the largest PSS in bytes."""

    cpu_s: list[tuple[float, float]] = field(default_factory=list)
    peak_bytes: int = 0

    def cpu_at(self, time_s: float) -> float:
        """CPU-seconds until a time, in a straight line between two readings."""
        before, after = self.cpu_s[0], self.cpu_s[0]
        for before, after in pairwise(self.cpu_s):  # noqa: B007 - read after the loop
            if after[0] >= time_s:
                break
        share = min(1.0, (time_s - before[0]) / max(1e-9, after[0] - before[0]))
        return before[1] + share * (after[1] - before[1])


@contextmanager
def watching() -> Iterator[Watched]:
    """Watch all children of this process, and their children, from a thread."""
    watched, stop = Watched(), Event()

    def watch() -> None:
        me = psutil.Process()
        while not stop.wait(LOOK_S):
            look(watched, me.children(recursive=True))

    thread = Thread(target=watch)
    thread.start()
    try:
        yield watched
    finally:
        stop.set()
        thread.join()


def look(watched: Watched, processes: Sequence[psutil.Process]) -> None:
    """One reading. A process that has ended counts in its parent's time, if the parent has waited for it."""
    cpu_s, nbytes = 0.0, 0
    for process in processes:
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            cpu_s += sum(process.cpu_times()[:4])
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            nbytes += sum(int(line.split()[1]) << 10 for line in rollup if line.startswith("Pss:"))
    watched.cpu_s.append((time.time(), cpu_s))
    watched.peak_bytes = max(watched.peak_bytes, nbytes)


# -- the two systems -------------------------------------------------------------------------------------------


def run_trl(model: Path, seed: int, settings: Line, steps: int) -> Line:
    """The figures of a run with TRL. RunFailed with its last words."""
    with tempfile.TemporaryDirectory(prefix="real-") as path, watching() as watched:
        out, log = Path(path, "out.jsonl"), Path(path, "log")
        flags = {"model": model, "data": SUMS, "out": out, "seed": seed, "steps": steps, **settings}
        command = [sys.executable, "-m", "benchmarks.real_trl"]
        command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        env = {**os.environ, "OMP_NUM_THREADS": str(settings["threads"])}
        with log.open("wb") as file:
            done = subprocess.run(command, stdout=file, stderr=file, env=env, check=False)
        if done.returncode:
            raise RunFailed(" | ".join(log.read_text(errors="replace").strip().splitlines()[-3:]))
        lines = [json.loads(line) for line in out.read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "step"]
    return {
        "step_s": [line["wall_s"] for line in trained],
        "step_cpu_s": [line["cpu_s"] for line in trained],
        "held_out": [(line["step"], line["trained_s"], line["share"]) for line in lines if line["kind"] == "held_out"],
        "peak_bytes": watched.peak_bytes,
    }


def lead_settings(model: Path, seed: int, settings: Line, steps: int) -> LeadConfig:
    values = {
        "model": str(model.resolve()),
        "task": f"jsonl:{SUMS}",
        "rewards": {"numeric": 1.0},
        "chat": False,
        "stop": ["\n"],
        "max_prompt_tokens": 32,
        "objective": "grpo",
        "groups_per_step": settings["groups"],
        "steps": steps,
        "seed": seed,
        "eval_every_steps": settings["eval_every"],
        "checkpoint_every_steps": steps,
        "dashboard": "off",
        "beat_s": 1.0,
    }
    same = ("group_size", "max_new_tokens", "learning_rate", "warmup_steps", "minibatches", "eval_prompts")
    return load_config(LeadConfig, None, values | {name: settings[name] for name in (*same, *OWN)})


def run_echo_node(model: Path, seed: int, settings: Line, steps: int) -> Line:
    """The figures of a learner and one sampler. RunFailed if one of them fails."""
    with tempfile.TemporaryDirectory(prefix="real-") as path, watching() as watched:
        config = lead_settings(model, seed, settings, steps)
        learning_swarm.run(config, 1, Path(path), step_limit_s=STEP_LIMIT_S)
        metrics, events = (
            [json.loads(line) for line in Path(path, "run", name).read_text().splitlines()]
            for name in ("metrics.jsonl", "events.jsonl")
        )
    began = next(event["time"] for event in events if event["kind"] == "prepared")
    ends = [began, *(line["time"] for line in metrics)]
    cpu_s = [watched.cpu_at(end) for end in ends]
    return {
        "step_s": [after - before for before, after in pairwise(ends)],
        "step_cpu_s": [after - before for before, after in pairwise(cpu_s)],
        "held_out": [
            (event["version"], event["time"] - began, event["exact_match"])
            for event in events
            if event["kind"] == "evaluated"
        ],
        "peak_bytes": watched.peak_bytes,
        "staleness": statistics.fmean(line["staleness/mean"] for line in metrics),
    }


SYSTEMS = {"echo-node": run_echo_node, "trl": run_trl}


# -- figures ---------------------------------------------------------------------------------------------------


def step_s(line: Line, warm_up: int, name: str = "step_s") -> float:
    """Mean of a learner step after the warm-up, of which the last step is never a part."""
    values: list[float] = line[name]
    return statistics.fmean(values[min(warm_up, len(values) - 1) :])


def seconds_to(line: Line, share: float) -> float | None:
    """When a held-out round first reached a share of right answers."""
    return next((seconds for _, seconds, found in line["held_out"] if found >= share), None)


def summary(lines: Sequence[Line], warm_up: int) -> Line:
    """Medians over the seeds. A share that some seed did not reach has no time."""
    times = {f"{share:g}": [seconds_to(line, share) for line in lines] for share in SHARES}
    return {
        "seeds": [line["seed"] for line in lines],
        "step_s": statistics.median(step_s(line, warm_up) for line in lines),
        "cpu_s_per_step": statistics.median(step_s(line, warm_up, "step_cpu_s") for line in lines),
        "peak_gb": statistics.median(line["peak_bytes"] for line in lines) / 1e9,
        "held_out_before": [line["held_out"][0][2] for line in lines],
        "held_out_after": [line["held_out"][-1][2] for line in lines],
        "seconds_to": {
            share: statistics.median(one for one in found if one is not None) if None not in found else None
            for share, found in times.items()
        },
        "settings": lines[0]["settings"],
    }


def done(options: argparse.Namespace, system: str, seed: int, settings: Line) -> Line:
    """A run's line, after running it."""
    load = os.getloadavg()[0]
    figures = SYSTEMS[system](options.model, seed, settings, options.steps)
    line = {"system": system, "seed": seed, "settings": settings, **figures, "load": (load, os.getloadavg()[0])}
    print(json.dumps(line), flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--trl", nargs="+", default=[], metavar="NAME=VALUE", help="threads, dtype or batch")
    parser.add_argument("--only", choices=SYSTEMS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warm-up-steps", type=int, default=3)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--eval-prompts", type=int, default=300)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--warmup-steps", type=int, default=10, help="in which the learning rate rises")
    parser.add_argument("--minibatches", type=int, default=2, help="optimiser steps on a batch")
    parser.add_argument("--max-staleness", type=int, default=2, help="echo-node's, as all below")
    parser.add_argument("--publish-every-steps", type=int, default=2)
    parser.add_argument("--freshness", choices=("adaptive", "off"), default="off")
    parser.add_argument("--precision", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--json", action="store_true", help="as without it: the last line is one JSON object")
    options = parser.parse_args()
    given = ("learning_rate", "warmup_steps", "minibatches", "eval_every", "eval_prompts")
    common = {"groups": GROUPS, "group_size": GROUP_SIZE, "max_new_tokens": MAX_NEW_TOKENS}
    common |= {name: getattr(options, name) for name in given}
    own = {
        "echo-node": {name: getattr(options, name) for name in OWN},
        "trl": {"threads": 2, "dtype": "bf16", "batch": 48} | dict(one.split("=") for one in options.trl),
    }
    found = {}
    for system in [options.only] if options.only else SYSTEMS:
        settings = {**common, **own[system]}
        lines = [done(options, system, seed, settings) for seed in range(options.seeds)]
        found[system] = summary(lines, options.warm_up_steps)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
