"""What staleness costs: the embedded model on its task, from zero, a fixed number of steps at several bounds S.

bin/python -m benchmarks.learning --json
bin/python -m benchmarks.learning --only forced --staleness 0,4,16 --seeds 0 --steps 60
bin/python -m benchmarks.learning --only forced --staleness 4,8 --objectives grpo,decoupled_ppo,cispo
bin/python -m benchmarks.learning --only swarm --staleness 2 --join='--engine mlx --precision int8'
bin/python -m benchmarks.learning --only swarm --staleness 2 --model tiny-warm --task sort --adapters 0,1,8

Two modes, each run once for every seed, objective and rank of --adapters (0 trains the whole model), with the same
prompts, model and settings (those of `lead`):
forced    trainer and engine in one process and in turn: batch t is drawn by version max(0, t - S), so every rollout is
          as old as the bound allows. It shows what the objective bears. S = 0 is what a single machine does without a
          swarm
swarm     `echo-node lead --max-staleness S` and three `join` processes on loopback, with freshness "adaptive" and
          "off" (--freshness; the same at S = 0). Where samplers are faster than the trainer, as here, "off" lets them
          run ahead as far as S allows, so that what occurs is about S too

Each run is a line of JSON, and so is each row of medians over the seeds (null is never):
accuracy, accuracy_min, accuracy_max   greedy exact match of the last version on 500 held-out prompts
reward_last10          mean shaped reward of the rollouts of the last ten steps (1 is a perfect copy)
reward_per_step        the same over all steps
reward_per_s           rewards of the steps after the first, added up, over `seconds`
seconds                from the end of the first step to the end of the last, without starts and evaluations
steps_to_reward_0_9, seconds_to_reward_0_9   until the first step whose batch brought 0.9
staleness_mean, staleness_max   what occurred, in steps; the maximum is of all seeds
curve                  reward of every tenth step
runs                   seeds that came to an end

Every process computes on one thread. Training takes most of a step of this model (0.13 s of 0.19 s on one core), so
more samplers have little to win: the seconds tell what the network costs, not what a fleet brings where generation
dominates. All cases of a seed come before the next seed, so that noise hits all alike. A swarm that fails is said so,
and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from benchmarks import learning_forced, learning_swarm
from benchmarks.learning_swarm import Run, RunFailed
from swarm.report.charts import Chart, Curve, picture
from swarm.report.figures import Column
from swarm.settings import TINY, LeadConfig
from swarm.settings_file import load_config
from swarm.types import Freshness, ObjectiveName

Mode = Literal["forced", "swarm"]
Figures = dict[str, Any]

STEPS = 120
"""On policy it has just learned all by then, so that what is slower to learn shows."""

EVAL_PROMPTS = 500
"""About half of those held out: an accuracy near 0.9 is then known to 0.013."""

SAMPLERS = 3
"""As many as the demo has."""

LAST_STEPS = 10
"""The reward at the end is the mean of the last steps: one batch alone is noisy to about 0.01."""

LEARNED_REWARD = 0.9
"""The reward that is waited for: nearly all copies are whole."""

CURVE_EVERY = 10
"""Steps between two points of the curves."""


class Case(NamedTuple):
    """What a row is of."""

    mode: Mode
    max_staleness: int
    objective: str
    freshness: Freshness = "off"
    adapter: int = 0
    """Its rank; 0 if the whole model is trained."""


def cases(options: argparse.Namespace) -> list[Case]:
    """Each mode at each bound, with each objective and rank. A swarm has each freshness, at S = 0 the first."""
    places: list[tuple[Mode, int, Freshness]] = []
    if "forced" in options.only:
        places += [("forced", bound, "off") for bound in options.staleness]
    if "swarm" in options.only:
        places += [
            ("swarm", bound, fresh)
            for bound in options.staleness
            for fresh in options.freshness[: None if bound else 1]
        ]
    of_each = [(objective, rank) for objective in options.objectives for rank in options.adapters]
    return [Case(mode, bound, objective, fresh, rank) for mode, bound, fresh in places for objective, rank in of_each]


def config_of(case: Case, options: argparse.Namespace, seed: int) -> LeadConfig:
    """A run that is evaluated before its first step and after its last only."""
    values = {
        "model": options.model,
        "task": options.task,
        **({"adapter": case.adapter} if case.adapter else {}),
        "max_staleness": case.max_staleness,
        "freshness": case.freshness,
        "objective": case.objective,
        "seed": seed,
        "steps": options.steps,
        "eval_prompts": EVAL_PROMPTS,
        "eval_every_steps": options.steps,
        "checkpoint_every_steps": options.steps,
        "beat_s": 1.0,
    }
    return load_config(LeadConfig, None, values)


def run_once(case: Case, options: argparse.Namespace, seed: int) -> Run:
    config = config_of(case, options, seed)
    with tempfile.TemporaryDirectory(prefix="learning-") as directory:
        if case.mode == "swarm":
            return learning_swarm.run(config, SAMPLERS, Path(directory), shlex.split(options.join))
        return learning_forced.run(config, Path(directory))


def figures_of(run: Run) -> Figures:
    """The figures of one run. The clock runs from the end of its first step, so that no start of a process counts."""
    rewards = [step.reward for step in run.steps]
    seconds = run.steps[-1].at_s - run.steps[0].at_s
    learned = next((number for number, reward in enumerate(rewards) if reward >= LEARNED_REWARD), None)
    return {
        "accuracy": run.accuracy,
        "reward_last10": statistics.fmean(rewards[-LAST_STEPS:]),
        "reward_per_step": statistics.fmean(rewards),
        "reward_per_s": sum(rewards[1:]) / seconds,
        "staleness_mean": statistics.fmean(step.staleness_mean for step in run.steps),
        "staleness_max": max(step.staleness_max for step in run.steps),
        "seconds": seconds,
        "steps_to_reward_0_9": math.inf if learned is None else learned + 1,
        "seconds_to_reward_0_9": math.inf if learned is None else run.steps[learned].at_s - run.steps[0].at_s,
        "curve": rewards[CURVE_EVERY - 1 :: CURVE_EVERY],
    }


def row(case: Case, runs: Sequence[Run]) -> Figures:
    """Medians over the runs, of which there is one at least; the largest for staleness_max. None is never."""
    found = [figures_of(run) for run in runs]
    medians = {name: statistics.median(f[name] for f in found) for name in found[0] if name != "curve"}
    return {
        **case._asdict(),
        "runs": len(runs),
        # JSON has no infinity.
        **{name: value if math.isfinite(value) else None for name, value in medians.items()},
        "accuracy_min": min(f["accuracy"] for f in found),
        "accuracy_max": max(f["accuracy"] for f in found),
        "staleness_max": max(f["staleness_max"] for f in found),
        "curve": [statistics.median(points) for points in zip(*(f["curve"] for f in found), strict=True)],
    }


def plot(rows: Sequence[Figures]) -> str:
    """An .svg picture of the rewards of swarms over their steps, for each freshness."""
    swarms = [found for found in rows if found["mode"] == "swarm"]
    charts: list[Chart] = []
    for fresh in get_args(Freshness):
        # At S = 0 both are the same, and in both charts a bound has the same colour.
        shown = [found for found in swarms if found["freshness"] == fresh or not found["max_staleness"]]
        charts.append(Chart(title=fresh, unit="", curves=[_curve(found) for found in shown], floor=0, ceiling=1))
    runs = min(found["runs"] for found in swarms)
    said = f"reward over learner steps, median of {runs} runs; in brackets the mean age of the data in steps"
    return picture("What staleness costs, with freshness adaptive and off", said, charts)


def _curve(found: Figures) -> Curve:
    points = enumerate(found["curve"], 1)
    column = Column.of((CURVE_EVERY * number, reward) for number, reward in points)
    return Curve(name=f"S = {found['max_staleness']} ({found['staleness_mean']:.1f})", column=column)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def objectives(text: str) -> list[str]:
        return text.split(",")

    fresh: tuple[Freshness, ...] = get_args(Freshness)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--model", default=TINY)
    parser.add_argument("--task", default="copy")
    parser.add_argument("--adapters", type=numbers, default=[0], help="ranks; 0 is the whole model")
    parser.add_argument("--staleness", type=numbers, default=[0, 1, 2, 4, 8, 16], help="the bounds S")
    parser.add_argument("--objectives", type=objectives, default=["grpo"], help=",".join(get_args(ObjectiveName)))
    parser.add_argument("--only", choices=get_args(Mode), nargs="+", default=get_args(Mode))
    parser.add_argument("--freshness", choices=fresh, nargs="+", default=fresh, help="of the swarm")
    parser.add_argument("--join", default="", help="more flags of its samplers, such as --join='--engine mlx'")
    parser.add_argument("--plot", type=Path, help="draw the swarms' rewards into this .svg file")
    parser.add_argument("--json", action="store_true", help="all rows as the last line")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    runs: dict[Case, list[Run]] = {case: [] for case in cases(options)}
    for seed in options.seeds:
        for case, found in runs.items():
            try:
                found.append(run_once(case, options, seed))
            except RunFailed as error:
                print(f"{case}, seed {seed} failed: {error}", file=sys.stderr, flush=True)
                continue
            print(json.dumps({**case._asdict(), "seed": seed, **figures_of(found[-1])}), flush=True)
    rows = [row(case, found) for case, found in runs.items() if found]
    for one in rows:
        print(json.dumps(one))
    if options.plot:
        options.plot.write_text(plot(rows))
    if options.json:
        print(json.dumps({"rows": rows}))
    return int(any(len(found) < len(options.seeds) for found in runs.values()))


if __name__ == "__main__":
    sys.exit(main())
