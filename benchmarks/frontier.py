"""What it is worth to draw prompts at the frontier: rollouts until a held-out accuracy, against uniform prompts.

bin/python -m benchmarks.frontier --solvable 1,0.2,0.1 --json
bin/python -m benchmarks.frontier --pool 0 --json
bin/python -m benchmarks.frontier --config examples/smollm2.toml --model DIR --target 0.7 --eval-steps 5 --json

The warm tiny model, which does one of four things to four digits, learns to sort from exact match, trainer and engine
in one process, in turn. All but the share `--solvable` of the pool asks for what it cannot do, as in a set of questions
of which most are too hard; what is held out can all be learned. With `--pool 0` no prompt comes twice, and what is too
hard is longer, so that it can be foreseen. The learning rate is low enough for what a batch teaches to bind. With
`--config` it is that file's run instead, at S = 0. Each selection has the same pool, batch and target:
uniform    each prompt as often as any other, in epochs
dynamic    uniform, and others are drawn for groups of one reward (dynamic_sampling)
frontier   selection = "frontier"
both       frontier with dynamic_sampling

`rollouts` counts all that were drawn until greedy held-out accuracy, measured every `--eval-steps`, first reached the
target; None is never. Rows are followed by medians over the seeds for each share; `rollouts_uniform_over_frontier` is
the ratio of those of the smallest share.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from msgspec import structs

from benchmarks import Figures, ended, listed, parser_of, said
from benchmarks.learning import OneProcess
from swarm.learner.messages import Train, TrainGroup
from swarm.rollout.journal.entries import Tried
from swarm.rollout.plane.frontier import Frontier
from swarm.settings import TINY_WARM, LeadConfig
from swarm.settings_file import load_config
from swarm.tasks.digits import DIGITS, SKILLS
from swarm.types import Prompt

SELECTIONS = ("uniform", "dynamic", "frontier", "both")
HELD_OUT = 500
MOST_STEPS = 2500
OF_POOL = "pool", "solvable", "groups", "group_size", "learning_rate"  # Flags for runs without a file
ENDLESS = 40_000  # Numbers, of which no run sees one twice


class Selecting(OneProcess):
    """A run with a selection, as the plane applies it where S is 0."""

    def __init__(self, config: LeadConfig, directory: Path, selection: str) -> None:
        super().__init__(config, directory)
        self.drawn = 0  # Rollouts
        self.flat = 0  # Groups of one reward in batches
        self._frontier = Frontier(config.seed) if selection in ("frontier", "both") else None
        self._replaces = selection in ("dynamic", "both")
        self._opened = 0

    def train(self, number: int) -> None:
        self._install(*self._kept[0])
        kept: list[TrainGroup] = []
        left = size = self._config.groups_per_step
        while len(kept) < size:
            for group in self._some(number, size - len(kept)):
                is_flat = len({one.reward for one in group.rollouts}) == 1
                if is_flat and self._replaces and left:
                    left -= 1
                else:
                    self.flat += is_flat
                    kept.append(group)
        self._trainer.step(Train(step=number, groups=tuple(kept)))
        self._keep(number + 1)
        if self._frontier is not None:
            self._frontier.fold(before=number + 1)

    def _some(self, step: int, count: int) -> tuple[TrainGroup, ...]:
        asked: dict[int, Prompt] = {}
        numbers: list[int] = []
        for order in range(self._opened, self._opened + count):
            number, asked[order] = self._prompt_of(order, step, {prompt.prompt_id for prompt in asked.values()})
            numbers.append(number)
        self._opened += count
        groups = self._groups(asked, age=0)
        self.drawn += count * self._config.group_size
        if self._frontier is not None:
            for (order, prompt), number, group in zip(asked.items(), numbers, groups, strict=True):
                rewards = [one.reward for one in group.rollouts]
                tried = Tried(order, number, step, len(rewards), sum(rewards), min(rewards), max(rewards))
                self._frontier.note(tried, prompt)
        return groups

    def _prompt_of(self, order: int, step: int, begun: set[str]) -> tuple[int, Prompt]:
        if self._frontier is None:
            return order, self._task.prompt(order)
        return self._frontier.next_prompt(order, step, self._tokenized, begun)

    def _tokenized(self, number: int) -> Prompt:
        prompt = self._task.prompt(number)
        return structs.replace(prompt, token_ids=self._token_ids(prompt))


def write_pool(path: Path, pool: int, solvable: float, seed: int) -> None:
    """Write `pool` numbers to sort, and HELD_OUT that are held out. All but the share `solvable` of the pool want what
    the model cannot do: each digit one higher. If `pool` is 0 they are numbers to sort that have two digits more."""
    draw, count = Random(f"pool/{seed}"), pool or ENDLESS
    easy = round(count * solvable)
    numbers = [f"{number:0{DIGITS}}" for number in draw.sample(range(10**DIGITS), HELD_OUT + (pool or easy))]
    rows = [(number, SKILLS["sort"](number)) for number in numbers[: HELD_OUT + easy]]
    if pool:
        rows += [(n, "".join(str((int(digit) + 1) % 10) for digit in n)) for n in numbers[HELD_OUT + easy :]]
    else:
        longer = draw.sample(range(10 ** (DIGITS + 1), 10 ** (DIGITS + 2)), count - easy)
        rows += [(str(number), SKILLS["sort"](str(number))) for number in longer]
    lines = ({"prompt": f"{n}=", "answer": to, "held_out": i < HELD_OUT} for i, (n, to) in enumerate(rows))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def config_of(solvable: float, options: argparse.Namespace, seed: int, directory: Path) -> LeadConfig:
    """The run of the file that was given, or that of a pool of numbers, which is written into `directory`."""
    values: dict[str, Any] = {"max_staleness": 0, "seed": seed, "steps": options.steps, "model": options.model}
    if options.config is None:
        questions = directory / "questions.jsonl"
        write_pool(questions, options.pool, solvable, seed)
        values |= {
            "model": TINY_WARM,
            "task": f"jsonl:{questions}",
            "rewards": {"exact": 1.0},
            "max_new_tokens": DIGITS + 2,
            "learning_rate": options.learning_rate,
            "groups_per_step": options.groups,
            "group_size": options.group_size,
            "eval_prompts": HELD_OUT,
            "steps": options.steps or MOST_STEPS,
        }
    return load_config(LeadConfig, options.config, values)


def run_once(selection: str, solvable: float, options: argparse.Namespace, seed: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="frontier-") as name:
        config = config_of(solvable, options, seed, Path(name))
        run = Selecting(config, Path(name) / "run", selection)
        curve = [(0, run.accuracy())]
        for number in range(config.steps):
            run.train(number)
            if (number + 1) % options.eval_steps == 0:
                curve.append((run.drawn, run.accuracy()))
                if curve[-1][1] >= options.target:
                    break
    reached = next((drawn for drawn, accuracy in curve if accuracy >= options.target), None)
    return {
        "selection": selection,
        "solvable": solvable,
        "seed": seed,
        "rollouts": reached,
        "steps": number + 1,
        "accuracy": curve[-1][1],
        "flat_share": round(run.flat / ((number + 1) * config.groups_per_step), 3),
        "curve": curve[:: options.every],
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--pool", type=int, default=200, help="prompts to train on; 0: none comes twice")
    parser.add_argument("--solvable", type=listed(float), default=[0.2], help="shares of the pool")
    parser.add_argument("--target", type=float, default=0.85, help="held-out accuracy that is waited for")
    parser.add_argument("--steps", type=int, help=f"most steps of a run; the file's, or {MOST_STEPS}")
    parser.add_argument("--eval-steps", type=int, default=2, help="steps from one measurement to the next")
    parser.add_argument("--config", type=Path, help="a file of settings: its model, task, batch and rate")
    parser.add_argument("--model", help="instead of the file's")
    parser.add_argument("--groups", type=int, default=4, help="of a step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--seeds", type=listed(int), default=[0, 1, 2])
    parser.add_argument("--selections", type=listed(str), default=list(SELECTIONS))
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--every", type=int, default=25, help="of the curve's points, show one in so many")
    options = parser.parse_args(arguments)
    if options.model and not options.config:
        parser.error("--model takes the place of a file's: give --config too")
    if options.config is not None:
        if any(getattr(options, name) != parser.get_default(name) for name in OF_POOL):
            parser.error(f"--config says these itself: leave out {', '.join(OF_POOL)}")
        options.pool, options.solvable = None, [1.0]
    if options.pool == 0 and max(options.solvable) * ENDLESS > 10**DIGITS - HELD_OUT:
        parser.error(
            f"there are only {10**DIGITS - HELD_OUT} numbers that can be learned: give less than --solvable 0.23"
        )
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    cases = [(share, one) for share in options.solvable for one in options.selections]
    rows = [said(run_once(one, share, options, seed)) for seed in options.seeds for share, one in cases]
    medians: dict[str, dict[str, float | None]] = {}
    for share, one in cases:
        found = [row["rollouts"] for row in rows if (row["solvable"], row["selection"]) == (share, one)]
        medians.setdefault(str(share), {})[one] = statistics.median(found) if None not in found else None
    hardest = medians[str(min(options.solvable))]
    uniform, frontier = hardest.get("uniform"), hardest.get("frontier")
    ratio = round(uniform / frontier, 3) if uniform and frontier else None
    figures = {"pool": options.pool, "target": options.target, "rollouts": medians}
    return ended(options, figures | {"rollouts_uniform_over_frontier": ratio})


if __name__ == "__main__":
    sys.exit(main())
