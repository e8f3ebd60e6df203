"""How long the demo takes and what it reaches: medians over repeats of the real command.

bin/python -m benchmarks.demo --repeat 3 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODES: dict[str, list[str]] = {
    "asynchronous (S = 2)": [],
    "sequential (S = 0)": ["--max-staleness", "0"],
    "a sampler killed half-way": ["--kill-one"],
    "one sampler": ["--samplers", "1"],
    "random reward (control)": ["--reward", "random", "--steps", "100"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = {name: measure(arguments, options.repeat) for name, arguments in MODES.items()}
    print(f"{'mode':28} {'held-out':>14} {'steps':>6} {'wall s':>7} {'rollouts/s':>11} {'staleness':>10} {'stale':>6}")
    for name, found in results.items():
        held_out = f"{found['held_out_before']:.2f} -> {found['held_out_after']:.2f}"
        print(
            f"{name:28} {held_out:>14} {found['steps']:>6.0f} {found['wall_s']:>7.1f} {found['rollouts_per_s']:>11.0f} "
            f"{found['max_staleness_seen']:>10.0f} {found['rollouts_stale']:>6.0f}"
        )
    if options.json:
        print(json.dumps(results))


def measure(arguments: list[str], repeat: int) -> dict[str, float]:
    """Medians of the demo's figures."""
    runs = [run_demo(arguments) for _ in range(repeat)]
    names = [name for name, value in runs[0].items() if isinstance(value, int | float) and not isinstance(value, bool)]
    return {name: statistics.median(run[name] for run in runs) for name in names}


def run_demo(arguments: list[str]) -> dict[str, Any]:
    """The summary of one demo, with the rate over the steps (without the start of the processes)."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "swarm", "demo", "--json", "--run-dir", f"{directory}/run", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(done.stderr)
        summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        lines = (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()
        first, last = json.loads(lines[0])["time"], json.loads(lines[-1])["time"]
    return {**summary, "rollouts_per_s": summary["rollouts_accepted"] / (last - first)}


if __name__ == "__main__":
    main()
