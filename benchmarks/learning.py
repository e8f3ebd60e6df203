"""What staleness costs in learning: rewards and held-out accuracy against learner steps and seconds, for bounds S.

bin/python -m benchmarks.learning --only swarm --staleness 0,1,2,4,8 --json
bin/python -m benchmarks.learning --only forced --staleness 4 --objectives grpo,cispo --seeds 0 --steps 150 --json

The tiny model learns a task of digits, 32 x 16 rollouts a step, with each objective and rank of an adapter:
swarm    a real learner and three samplers on loopback, with each freshness: what the pacing makes of a bound
forced   trainer and engine in one process, in turn; what generates is exactly S versions old

Each run is a line of JSON, and so is each row of medians over the seeds; None is never. Figures: held-out `accuracy`
(greedy, 500 prompts) of the last version, `reward_last10`, `reward_per_step` and `reward_per_s`, staleness of what was
trained on, and steps and seconds until a batch's reward was 0.9, from the end of the first step. `--join` gives the
samplers more flags, such as --join='--engine mlx'. Exit status 1 if a run failed.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import sys
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch

from benchmarks import Figures, ended, listed, parser_of, said
from benchmarks.learning_swarm import Run, RunFailed, Step, step_of
from benchmarks.learning_swarm import run as run_swarm
from swarm.broadcast.version.manifest import TensorSpec
from swarm.learner.messages import Train, TrainGroup, TrainRollout
from swarm.learner.process import trainer_config
from swarm.learner.trainer import Trainer
from swarm.models.device import as_streamed
from swarm.process import NoParent
from swarm.rollout.plane.groups import sample_seed
from swarm.run.prompts import TaskRecord, open_prompts
from swarm.sampler.engine import EngineOptions, Generate, Job, Sampled, Start
from swarm.sampler.transformers import TransformersEngine
from swarm.sampler.weights import own_tensors
from swarm.settings import TINY, LeadConfig
from swarm.settings_file import load_config
from swarm.tasks import DEFAULT_NEW_TOKENS, load_task, task_options
from swarm.types import MAX_TOKENS, Freshness, GroupId, ObjectiveName, Prompt, SamplingRules, Score, VersionId

# -- one process -----------------------------------------------------------------------------------------------------

TIME_LIMIT_S = 600.0  # Of one batch; one that takes longer has hung


class OneProcess:
    """The run of `config` without a network. Batch t is drawn by version max(0, t - S); S = 0 is the synchronous
    baseline. Prompts, seeds, scores, trainer and engine are those of a swarm."""

    def __init__(self, config: LeadConfig, directory: Path) -> None:
        self._config = config
        self._task = load_task(task_options(config))
        self._max_new_tokens = config.max_new_tokens or self._task.max_new_tokens or DEFAULT_NEW_TOKENS
        self._trainer = Trainer(trainer_config(config, directory, self._max_new_tokens), NoParent())
        prepared = self._trainer.prepared()
        self._layout, self._stop_token_ids = prepared.layout, prepared.stop_token_ids
        self._engine = TransformersEngine()
        options = EngineOptions(device="cpu")
        self._engine.start(Start(directory=str(directory / "model"), layout=self._layout, options=options), _quietly)
        record = TaskRecord("", MAX_TOKENS, datetime.now(), self._stop_token_ids)
        self._prompts = open_prompts(config, self._task, directory / "model", record, say=lambda line: None)
        self._kept: deque[tuple[int, dict[TensorSpec, torch.Tensor]]] = deque(maxlen=config.max_staleness + 1)
        self._keep(0)

    def step(self, number: int) -> Step:
        """Draw batch `number` with the oldest version that the bound allows, and train on it."""
        version, weights = self._kept[0]
        self._install(version, weights)
        groups = self._draw(number, age=number - version)
        trained = self._trainer.step(Train(step=number, groups=groups))
        self._keep(number + 1)
        return step_of(trained.metrics, time.monotonic())

    def accuracy(self) -> float:
        """Greedy exact match of the newest version on held-out prompts."""
        self._install(*self._kept[-1])
        prompts = self._task.held_out(self._config.eval_prompts)
        samples = self._generate([self._job(prompt, seed=0, temperature=0.0) for prompt in prompts])
        return sum(self._score(p, s).exact for p, s in zip(prompts, samples, strict=True)) / len(prompts)

    def _keep(self, number: int) -> None:
        tensors = {spec: as_streamed(tensor.detach()) for spec, tensor in self._trainer._tensors.items()}
        self._kept.append((number, tensors))

    def _install(self, number: int, tensors: dict[TensorSpec, torch.Tensor]) -> None:
        """As the engine's own install, but from memory and without proof."""
        own = own_tensors(self._engine._model, self._layout)
        for spec, tensor in tensors.items():
            for name in (spec.name, *spec.aliases):
                own[name].copy_(tensor)
        self._engine._version = VersionId(incarnation=0, version=number)

    def _draw(self, number: int, *, age: int) -> tuple[TrainGroup, ...]:
        """The groups of batch `number`, scored; `age` is the staleness of all of them."""
        config = self._config
        places = range(number * config.groups_per_step, (number + 1) * config.groups_per_step)
        return self._groups({place: self._task.prompt(place) for place in places}, age=age)

    def _groups(self, asked: Mapping[int, Prompt], *, age: int) -> tuple[TrainGroup, ...]:
        """The groups of these numbers and prompts."""
        config, size, prompts = self._config, self._config.group_size, list(asked.values())
        seeds = [[sample_seed(config.seed, GroupId(f"t{number}"), i) for i in range(size)] for number in asked]
        jobs = [
            self._job(prompt, seed=seed, temperature=config.temperature)
            for prompt, row in zip(prompts, seeds, strict=True)
            for seed in row
        ]
        samples = self._generate(jobs)
        return tuple(
            TrainGroup(
                prompt_token_ids=self._token_ids(prompt),
                rollouts=tuple(self._rollout(prompt, s, age) for s in samples[at * size : (at + 1) * size]),
            )
            for at, prompt in enumerate(prompts)
        )

    def _job(self, prompt: Prompt, *, seed: int, temperature: float) -> Job:
        rules = SamplingRules(
            temperature=temperature,
            max_new_tokens=self._max_new_tokens,
            stop_token_ids=self._stop_token_ids,
            stop=tuple(self._config.stop),
        )
        return Job(prompt_token_ids=self._token_ids(prompt), seed=seed, rules=rules, time_limit_s=TIME_LIMIT_S)

    def _generate(self, jobs: list[Job]) -> tuple[Sampled, ...]:
        samples = self._engine.generate(Generate(jobs=tuple(jobs)), _quietly).samples
        assert not any(sample.fault for sample in samples)
        return samples

    def _rollout(self, prompt: Prompt, sample: Sampled, age: int) -> TrainRollout:
        return TrainRollout(
            token_ids=sample.token_ids,
            logprobs=sample.logprobs,
            reward=self._score(prompt, sample).reward,
            staleness=age,
            truncated=sample.finish == "length",
        )

    def _score(self, prompt: Prompt, sample: Sampled) -> Score:
        return self._task.score(prompt, self._prompts.decode(array("i", sample.token_ids)))

    def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        return self._prompts.encode(prompt).token_ids


def _quietly() -> None: ...


# -- the command -----------------------------------------------------------------------------------------------------

Mode = Literal["forced", "swarm"]
STEPS = 120  # On policy it has just learned all by then, so that what is slower to learn shows
EVAL_PROMPTS = 500  # About half of those held out: an accuracy near 0.9 is then known to 0.013
SAMPLERS = 3  # As many as the demo has
LAST_STEPS = 10  # The reward at the end is the mean of the last steps: one batch alone is noisy to about 0.01
LEARNED_REWARD = 0.9  # The reward that is waited for: nearly all copies are whole
CURVE_EVERY = 10  # Steps between two points of the curves


class Case(NamedTuple):
    """What a row is of."""

    mode: Mode
    max_staleness: int
    objective: str
    freshness: Freshness = "off"
    adapter: int = 0  # Its rank; 0 if the whole model is trained


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
            return run_swarm(config, SAMPLERS, Path(directory), shlex.split(options.join))
        process = OneProcess(config, Path(directory))
        return Run(steps=[process.step(number) for number in range(config.steps)], accuracy=process.accuracy())


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


def main(arguments: Sequence[str] | None = None) -> int:
    numbers, fresh = listed(int), get_args(Freshness)
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--model", default=TINY)
    parser.add_argument("--task", default="copy")
    parser.add_argument("--adapters", type=numbers, default=[0], help="ranks; 0 is the whole model")
    parser.add_argument("--staleness", type=numbers, default=[0, 1, 2, 4, 8, 16], help="the bounds S")
    parser.add_argument("--objectives", type=listed(str), default=["grpo"], help=",".join(get_args(ObjectiveName)))
    parser.add_argument("--only", choices=get_args(Mode), nargs="+", default=get_args(Mode))
    parser.add_argument("--freshness", choices=fresh, nargs="+", default=fresh, help="of the swarm")
    parser.add_argument("--join", default="", help="more flags of its samplers")
    options = parser.parse_args(arguments)
    runs: dict[Case, list[Run]] = {case: [] for case in cases(options)}
    for seed in options.seeds:
        for case, found in runs.items():
            try:
                found.append(run_once(case, options, seed))
            except RunFailed as error:
                print(f"{case}, seed {seed} failed: {error}", file=sys.stderr, flush=True)
                continue
            said({**case._asdict(), "seed": seed, **figures_of(found[-1])})
    rows = [said(row(case, found)) for case, found in runs.items() if found]
    return ended(options, {"rows": rows}, met=all(len(found) == len(options.seeds) for found in runs.values()))


if __name__ == "__main__":
    sys.exit(main())
