"""How long the demo takes and what it reaches: the real command, repeated.

bin/python -m benchmarks.demo --repeat 3 --json
bin/python -m benchmarks.demo --seeds 20 --json    # does it learn every time? one demo a seed: steps, median and worst
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import Figures, parser_of, said

MODES: dict[str, list[str]] = {
    "asynchronous (S = 2)": [],
    "sequential (S = 0)": ["--max-staleness", "0"],
    "a sampler killed half-way": ["--kill-one"],
    "one sampler": ["--samplers", "1"],
    "random reward (control)": ["--reward", "random", "--steps", "100"],
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seeds", type=int, help="one demo for each seed from 0 on, in place of the modes")
    options = parser.parse_args()
    if options.seeds:
        said(over_seeds(options.seeds))
    else:
        said({name: measure(arguments, options.repeat) for name, arguments in MODES.items()})


def over_seeds(count: int) -> Figures:
    runs = [said(run_demo(["--seed", str(seed)])) for seed in range(count)]
    steps, walls_s = ([run[name] for run in runs] for name in ("steps", "wall_s"))
    return {
        "learned": sum(run["learned"] for run in runs),
        "seeds": count,
        "steps_median": statistics.median(steps),
        "steps_worst": max(steps),
        "held_out_least": min(run["held_out_after"] for run in runs),
        "wall_s_median": statistics.median(walls_s),
        "wall_s_worst": max(walls_s),
        "steps": steps,
    }


def measure(arguments: list[str], repeat: int) -> dict[str, float]:
    runs = [run_demo(arguments) for _ in range(repeat)]
    names = [name for name, value in runs[0].items() if isinstance(value, int | float) and not isinstance(value, bool)]
    return {name: statistics.median(run[name] for run in runs) for name in names}


def run_demo(arguments: list[str]) -> Figures:
    """The summary of one demo, with the rate over the steps (without the start of the processes)."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "swarm", "demo", "--json", "--run-dir", f"{directory}/run", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(done.stderr)
        summary: Figures = json.loads(done.stdout.splitlines()[-1])
        lines = (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()
        first, last = json.loads(lines[0])["time"], json.loads(lines[-1])["time"]
    return {**summary, "rollouts_per_s": summary["rollouts_accepted"] / (last - first)}


if __name__ == "__main__":
    main()
