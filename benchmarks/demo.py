"""Does the demo learn every time? The real command, once for each seed from 0 on: steps, median and worst.

bin/python -m benchmarks.demo --seeds 20 --json
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import Figures, parser_of, said


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    said(over_seeds(parser.parse_args().seeds))


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
