"""What staleness costs: the embedded model on its task, from zero, a fixed number of steps at several bounds S.

bin/python -m benchmarks.learning --json
bin/python -m benchmarks.learning --only forced --staleness 0,4,16 --seeds 0 --steps 60
bin/python -m benchmarks.learning --only baseline forced --staleness 4,8 --objectives grpo,decoupled_ppo,cispo
bin/python -m benchmarks.learning --only swarm --staleness 2 --join='--engine mlx --precision int8'
bin/python -m benchmarks.learning --only swarm --staleness 2 --model tiny-warm --task sort --adapters 0,1,8

Three modes, each run once for every seed, objective and rank of --adapters (0 trains the whole model), with the same
prompts, model and settings (those of `lead`):
baseline  trainer and engine in one process and in turn: generate a batch, train on it, generate the next. What a single
          machine does without a swarm; always on-policy. Its engine draws the whole batch at once
forced    the same, but batch t is drawn by version max(0, t - S): every rollout is as old as the bound allows. It shows
          what the objective bears; its seconds are those of the baseline and say nothing
swarm     `echo-node lead --max-staleness S` and --samplers `join` processes on loopback, with freshness "adaptive" and
          "off" (--freshness; the same at S = 0). Where samplers are faster than the trainer, as here, "off" lets them
          run ahead as far as S allows, so that what occurs is about S too

Figures, medians over the seeds (null is never):
accuracy, accuracy_min, accuracy_max   greedy exact match of the last version on 500 held-out prompts
reward_last10          mean shaped reward of the rollouts of the last ten steps (1 is a perfect copy)
reward_per_step        the same over all steps
reward_per_s           rewards of the steps after the first, added up, over `seconds`
seconds                from the end of the first step to the end of the last, without starts and evaluations
steps_to_reward_0_9, seconds_to_reward_0_9   until the first step whose batch brought 0.9
staleness_mean, staleness_max   what occurred, in steps; the maximum is of all seeds
curve                  reward of every tenth step
runs                   seeds that came to an end

Every process computes on one thread. The baseline has one process and so uses one core; a swarm uses as many as there
are. Training takes most of a step of this model (0.13 s of 0.19 s in the baseline on one core), so more samplers have
little to win: the seconds tell what the network costs, not what a fleet brings where generation dominates.
All modes of a seed come before the next seed, so that noise hits all alike. A swarm that fails is said so, and the
exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from benchmarks import learning_swarm
from benchmarks.learning_figures import MODES, Case, Figures, Mode, Run, figures_of, plot, row, table, trained
from benchmarks.learning_swarm import RunFailed
from swarm.errors import UserError
from swarm.settings import TINY, LeadConfig
from swarm.settings_file import load_config
from swarm.types import Freshness, ObjectiveName

STEPS = 120
"""The baseline has just learned all by then, so that what is slower to learn shows."""

STALENESS = "0,1,2,4,8,16"
SEEDS = "0,1,2"
OBJECTIVE = "grpo"
FRESHNESS: tuple[Freshness, ...] = get_args(Freshness)

EVAL_PROMPTS = 500
"""About half of those held out: an accuracy near 0.9 is then known to 0.013."""

SAMPLERS = 3
"""As many as the demo has."""

BEAT_S = 1.0
"""Beats on one machine cost nothing."""

FAILED, BAD_INPUT = 1, 2
"""Exit statuses."""


class Benchmark:
    """What is measured. UserError for settings that no run can have."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.steps: int = options.steps
        self.seeds = _numbers("--seeds", options.seeds)
        self.samplers: int = options.samplers
        self.join = shlex.split(options.join)
        if self.steps < 2 or self.samplers < 1:
            raise UserError("--steps is 2 at least, and --samplers 1")
        objectives = _objectives(options.objectives)
        bounds = _numbers("--staleness", options.staleness)
        ranks = _numbers("--adapters", options.adapters)
        self.cases = cases(bounds, options.only or MODES, objectives, options.freshness, ranks)
        self.what = {"model": options.model, "task": options.task}
        if not self.cases:
            raise UserError("there is nothing to run: forced at S = 0 is the baseline")
        for case in self.cases:
            for seed in self.seeds:
                self._config(case, seed)

    def run(self) -> list[Figures]:
        """A row for each case of which any run came to its end."""
        runs: dict[Case, list[Run]] = {case: [] for case in self.cases}
        for seed in self.seeds:
            for case in self.cases:
                began = time.monotonic()
                try:
                    done = self._run_once(case, seed)
                except RunFailed as error:
                    _say(f"{_name(case)}, seed {seed} failed: {error}")
                    continue
                runs[case].append(done)
                _say(_progress(case, seed, figures_of(done), time.monotonic() - began))
        return [row(case, done) for case, done in runs.items() if done]

    def is_complete(self, rows: Sequence[Figures]) -> bool:
        """No run failed."""
        return sum(int(found["runs"]) for found in rows) == len(self.cases) * len(self.seeds)

    def described(self) -> dict[str, Any]:
        """What the figures are of."""
        return {
            **self.what,
            "learning_rates": {case.adapter: self._config(case, 0).resolved_learning_rate for case in self.cases},
            "steps": self.steps,
            "seeds": self.seeds,
            "samplers": self.samplers,
            "join": self.join,
            "cpus": os.cpu_count(),
        }

    def _run_once(self, case: Case, seed: int) -> Run:
        config = self._config(case, seed)
        with tempfile.TemporaryDirectory(prefix="learning-") as directory:
            if case.mode == "swarm":
                return learning_swarm.run(config, self.samplers, Path(directory), self.join)
            from benchmarks import learning_forced

            return learning_forced.run(config, Path(directory))

    def _config(self, case: Case, seed: int) -> LeadConfig:
        """A run that is evaluated before its first step and after its last only."""
        values = {
            **self.what,
            **({"adapter": case.adapter} if case.adapter else {}),
            "max_staleness": case.max_staleness,
            "freshness": case.freshness,
            "objective": case.objective,
            "seed": seed,
            "steps": self.steps,
            "eval_prompts": EVAL_PROMPTS,
            "eval_every_steps": self.steps,
            "checkpoint_every_steps": self.steps,
            "beat_s": BEAT_S,
        }
        return load_config(LeadConfig, None, values)


def cases(
    bounds: Sequence[int],
    modes: Sequence[Mode],
    objectives: Sequence[str],
    freshness: Sequence[Freshness] = FRESHNESS,
    adapters: Sequence[int] = (0,),
) -> list[Case]:
    """The baseline, which is what forced is at S = 0, then each mode at each bound; all with each objective and rank.
    A swarm has each freshness, at S = 0 the first."""
    places: list[tuple[Mode, int, Freshness]] = [("baseline", 0, "off")] if "baseline" in modes else []
    places += [("forced", bound, "off") for bound in bounds if bound > 0 and "forced" in modes]
    if "swarm" in modes:
        places += [("swarm", bound, fresh) for bound in bounds for fresh in freshness[: None if bound else 1]]
    of_each = [(objective, rank) for objective in objectives for rank in adapters]
    return [Case(mode, bound, objective, fresh, rank) for mode, bound, fresh in places for objective, rank in of_each]


def _objectives(text: str) -> list[str]:
    """UserError for one that does not exist."""
    names, known = list(dict.fromkeys(text.split(","))), get_args(ObjectiveName)
    if wrong := [name for name in names if name not in known]:
        raise UserError(f"there is no objective {wrong[0]!r}: give some of {', '.join(known)}")
    return names


def _numbers(flag: str, text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise UserError(f"{flag} {text}: give whole numbers with commas between them") from None


def _name(case: Case) -> str:
    fresh = f" {case.freshness}" if case.mode == "swarm" else ""
    return f"{case.mode}, S = {case.max_staleness}{fresh}, {case.objective}, {trained(case.adapter)}"


def _progress(case: Case, seed: int, found: Figures, wall_s: float) -> str:
    return (
        f"{_name(case)}, seed {seed}: accuracy {found['accuracy']:.3f}, last rewards {found['reward_last10']:.3f}, "
        f"staleness {found['staleness_mean']:.2f}, {found['seconds']:.1f} s ({wall_s:.0f} s in all)"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", default=SEEDS, help=f"default: {SEEDS}")
    parser.add_argument("--model", default=TINY)
    parser.add_argument("--task", default="copy")
    parser.add_argument("--adapters", default="0", help="ranks with commas between them; default: 0, the whole model")
    parser.add_argument("--staleness", default=STALENESS, help=f"the bounds S; default: {STALENESS}")
    parser.add_argument("--objectives", default=OBJECTIVE, help=f"with commas between them; default: {OBJECTIVE}")
    parser.add_argument("--only", choices=MODES, nargs="+", help="default: all modes")
    parser.add_argument("--freshness", choices=FRESHNESS, nargs="+", default=FRESHNESS, help="of the swarm")
    parser.add_argument("--samplers", type=int, default=SAMPLERS, help="of the swarm")
    parser.add_argument("--join", default="", help="more flags of its samplers, such as --join='--engine mlx'")
    parser.add_argument("--plot", type=Path, help="draw the swarms' rewards into this .svg file")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _say(line: str) -> None:
    print(line, flush=True)


def _fail(message: str) -> NoReturn:
    print(f"benchmarks.learning: {message}", file=sys.stderr)
    sys.exit(BAD_INPUT)


def main() -> None:
    options = _options()
    # Asked to end, it first ends what it started.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        benchmark = Benchmark(options)
        rows = benchmark.run()
    except UserError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    _say("\n".join(["", *table(rows)]))
    if options.plot:
        options.plot.write_text(plot(rows))
    if options.json:
        _say(json.dumps({**benchmark.described(), "rows": rows}))
    sys.exit(0 if benchmark.is_complete(rows) else FAILED)


if __name__ == "__main__":
    main()
