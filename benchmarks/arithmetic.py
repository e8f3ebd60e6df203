"""How far examples/arithmetic.toml comes in a number of steps.

bin/python -m benchmarks.arithmetic --steps 400 --eval-every 100 --json
bin/python -m benchmarks.arithmetic --steps 400 --eval-every 100 --adapter 8 --learning-rate 1e-3 --json

What runs is the example as it is shipped, without its target: `lead` with the example's settings and one `join` on
loopback. With --adapter the base is frozen, and the learning rate ten times the example's unless --learning-rate says
it. What it shows is ELICITATION AND SHARPENING of what the base has from its warm start
(benchmarks/arithmetic_words.py); it is no sign of a skill that the base did not have.

The curve is a line of JSON for each round of --eval-every steps: pass@1 of the held-out questions, two samples each at
the temperature of training, and the mean reward of the training batches since the round before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import learning_swarm
from benchmarks.arithmetic_words import EXAMPLES
from swarm.settings import LeadConfig
from swarm.settings_file import load_config, read_settings

STEP_LIMIT_S = 30.0
"""A run that takes longer for a step has hung."""


def lead_settings(
    *, eval_every: int, seed: int, steps: int, adapter: int | None = None, learning_rate: float | None = None
) -> LeadConfig:
    """The example's settings, from wherever it is run."""
    values = read_settings(LeadConfig, EXAMPLES / "arithmetic.toml")
    del values["target"]
    values |= {
        "model": str(EXAMPLES / "arithmetic"),
        "task": f"jsonl:{EXAMPLES / 'questions.jsonl'}",
        "eval_every_steps": eval_every,
        "steps": steps,
        "beat_s": 1.0,
        "seed": seed,
    }
    if adapter:
        values |= {"adapter": adapter, "learning_rate": round(10 * values["learning_rate"], 9)}
    if learning_rate:
        values["learning_rate"] = learning_rate
    return load_config(LeadConfig, None, values)


def read_curve(run_dir: Path) -> list[dict[str, Any]]:
    """The held-out rounds of a run."""
    events, steps = (
        [json.loads(line) for line in (run_dir / name).read_text().splitlines()]
        for name in ("events.jsonl", "metrics.jsonl")
    )
    rounds = [event for event in events if event["kind"] == "evaluated"]
    rewards = [None] + [
        statistics.fmean(step["reward"] for step in steps if before["version"] < step["step"] <= found["version"])
        for before, found in pairwise(rounds)
    ]
    return [
        {
            "step": found["version"],
            "minutes": (found["time"] - rounds[0]["time"]) / 60,
            "pass_at_1": found["exact_match"],
            "prompts": found["prompts"],
            "reward": reward,
        }
        for found, reward in zip(rounds, rewards, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--eval-every", type=int, default=50, help="steps")
    parser.add_argument("--adapter", type=int, help="rank: train an adapter instead of the model")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="the whole curve as the last line")
    given = vars(parser.parse_args())
    as_json = given.pop("json")
    with tempfile.TemporaryDirectory(prefix="arithmetic-") as directory:
        learning_swarm.run(lead_settings(**given), 1, Path(directory), step_limit_s=STEP_LIMIT_S)
        curve = read_curve(Path(directory) / "run")
    for point in curve:
        print(json.dumps(point))
    if as_json:
        print(json.dumps({**given, "curve": curve}))


if __name__ == "__main__":
    main()
