"""Trainer and engine in one process, in turn: generate, train, generate. What generates is exactly S versions old."""

from __future__ import annotations

import time
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks.learning_swarm import Run, Step, step_of
from swarm.broadcast.version.manifest import TensorSpec
from swarm.learner.messages import Train, Trained, TrainGroup, TrainRollout
from swarm.learner.process import trainer_config
from swarm.learner.trainer import Trainer
from swarm.models.device import as_streamed
from swarm.process import NoParent
from swarm.rollout.plane.groups import sample_seed
from swarm.sampler.engine import EngineOptions, Generate, Job, Sampled, Start
from swarm.sampler.transformers import TransformersEngine
from swarm.sampler.weights import own_tensors
from swarm.settings import LeadConfig
from swarm.tasks import DEFAULT_NEW_TOKENS, load_task, task_options
from swarm.tasks.turns import completion_text
from swarm.types import GroupId, Prompt, SamplingRules, Score, VersionId

TIME_LIMIT_S = 600.0
"""Of one batch; one that takes longer has hung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Weights as they are published."""

    number: int
    tensors: dict[TensorSpec, torch.Tensor]


class OneProcess:
    """The run of `config` without a network. Batch t is drawn by version max(0, t - S); S = 0 is the synchronous
    baseline. Prompts, seeds, scores, trainer and engine are those of a swarm. `spent_s` are CPU seconds by part."""

    def __init__(self, config: LeadConfig, directory: Path) -> None:
        self._config = config
        self._task = load_task(task_options(config))
        self._max_new_tokens = config.max_new_tokens or self._task.max_new_tokens or DEFAULT_NEW_TOKENS
        self._trainer = Trainer(trainer_config(config, directory, self._max_new_tokens), NoParent())
        prepared = self._trainer.prepared()
        self._layout = prepared.layout
        self._engine = TransformersEngine()
        options = EngineOptions(device="cpu")
        self._engine.start(Start(directory=str(directory / "model"), layout=self._layout, options=options), _quietly)
        self._tokenizer = Tokenizer.from_file(str(directory / "model" / "tokenizer.json"))
        self._stop_token_ids = prepared.stop_token_ids
        self._kept: deque[Version] = deque(maxlen=config.max_staleness + 1)
        self.spent_s: dict[str, float] = defaultdict(float)
        self._keep(0)

    @property
    def newest(self) -> Version:
        return self._kept[-1]

    def step(self, number: int) -> Step:
        return step_of(self.train(number).metrics, time.monotonic())

    def train(self, number: int) -> Trained:
        """Draw batch `number` with the oldest version that the bound allows, and train on it."""
        drawn_by = self._kept[0]
        self._install(drawn_by)
        with self._timed("draw"):
            groups = self._draw(number, age=number - drawn_by.number)
        with self._timed("train"):
            trained = self._trainer.step(Train(step=number, groups=groups))
        self._keep(number + 1)
        return trained

    def accuracy(self) -> float:
        """Greedy exact match of the newest version on held-out prompts."""
        self._install(self.newest)
        prompts = self._task.held_out(self._config.eval_prompts)
        with self._timed("evaluate"):
            samples = self._generate([self._job(prompt, seed=0, temperature=0.0) for prompt in prompts])
        return sum(self._score(p, s).exact for p, s in zip(prompts, samples, strict=True)) / len(prompts)

    def _keep(self, number: int) -> None:
        with self._timed("publish"):
            tensors = {spec: as_streamed(tensor.detach()) for spec, tensor in self._trainer._tensors.items()}
        self._kept.append(Version(number=number, tensors=tensors))

    def _install(self, version: Version) -> None:
        """As the engine's own install, but from memory and without proof."""
        own = own_tensors(self._engine._model, self._layout)
        with self._timed("install"):
            for spec, tensor in version.tensors.items():
                for name in (spec.name, *spec.aliases):
                    own[name].copy_(tensor)
        self._engine._version = VersionId(incarnation=0, version=version.number)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.spent_s[part] += time.process_time() - began

    def _draw(self, number: int, *, age: int) -> tuple[TrainGroup, ...]:
        """The groups of batch `number`, scored; `age` is the staleness of all of them."""
        config, size = self._config, self._config.group_size
        places = range(number * config.groups_per_step, (number + 1) * config.groups_per_step)
        prompts = [self._task.prompt(place) for place in places]
        seeds = [[sample_seed(config.seed, GroupId(f"t{place}"), i) for i in range(size)] for place in places]
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
        text = completion_text(self._tokenizer, array("i", sample.token_ids), self._stop_token_ids)
        return self._task.score(prompt, text)

    def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(prompt.text).ids)


def run(config: LeadConfig, directory: Path) -> Run:
    """All steps of `config` in this process, and then the held-out prompts; files go to `directory`."""
    process = OneProcess(config, directory)
    steps = [process.step(number) for number in range(config.steps)]
    return Run(steps=steps, accuracy=process.accuracy())


def _quietly() -> None: ...
