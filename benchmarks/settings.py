"""How fast a real model learns with which settings: the learner's own step and the transformers engine in one process.

    python -m benchmarks.settings --model DIR --to FILE.jsonl steps=60 learning_rate=1e-5 minibatches=1 seed=0

Nothing is between the two but a fixed staleness: what a step trains on was drawn with the weights of `staleness` steps
before, as they are published. So cases differ by their settings alone, and take less time than a swarm.
A case that FILE holds already is not run again. Each case is a line: its settings, held-out accuracy by step (greedy),
figures of every step, and the CPU seconds of its parts. With --keep DIR every published version is kept, for
`benchmarks.codec --real DIR`; of SmolLM2-135M one has 269 MB.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from swarm.learner.messages import Train, TrainerConfig, TrainGroup, TrainRollout
from swarm.learner.trainer import Trainer
from swarm.models.device import as_streamed
from swarm.process import NoParent
from swarm.run.prompts import open_tokenizer
from swarm.sampler.engine import Generate, Job, Sampled
from swarm.sampler.transformers import TransformersEngine
from swarm.tasks import load_task
from swarm.tasks.base import TaskOptions, random_score
from swarm.types import ObjectiveName, Prompt, SamplingRules, Schedule, VersionId

SHOWN = ("reward", "frac_reward_zero_std", "grad_norm", "optimizer_steps_skipped", "mismatch_kl", "entropy", "loss")


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a run."""

    seed: int = 0
    steps: int = 60
    eval_every: int = 10
    groups: int = 12
    group_size: int = 8
    staleness: int = 1
    learning_rate: float = 3e-5
    warmup_steps: int = 10
    schedule: Schedule = "constant"
    minibatches: int = 2
    objective: ObjectiveName = "grpo"
    weight_decay: float = 0.0
    reward: str = "task"
    gradient_spike: float = 10.0
    questions: str = "examples/sums.jsonl"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"


class Bench:
    """A trainer and an engine of the same model."""

    def __init__(self, case: Case, model: str, kept: Path) -> None:
        self.case = case
        self.spent: dict[str, float] = defaultdict(float)
        options = TaskOptions(name=f"jsonl:{case.questions}", seed=case.seed, rewards={"numeric": 1.0}, stop=("\n",))
        self.task = load_task(options)
        config = TrainerConfig(
            model=model,
            task="copy",
            run_dir=kept,
            seed=case.seed,
            device="cpu",
            learning_rate=case.learning_rate,
            warmup_steps=case.warmup_steps,
            minibatches=case.minibatches,
            schedule=case.schedule,
            steps=case.steps,
            objective=case.objective,
            weight_decay=case.weight_decay,
            precision=case.precision,
            max_prompt_tokens=32,
            longest_completion=4,
        )
        self.trainer = Trainer(config, NoParent())
        self.stops = self.trainer.prepared().stop_token_ids
        self.tokenizer = open_tokenizer(model, kept / "model")
        self.held = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.held.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
        self.engine = TransformersEngine()
        self.engine._model, self.engine._directory = self.held.train(False), str(kept / "model")
        self.engine._version = VersionId(0, 0)
        self.versions: deque[list[torch.Tensor]] = deque(maxlen=case.staleness + 1)
        self.publish()

    def publish(self) -> None:
        with self.timed("publish"):
            self.versions.append([as_streamed(one) for one in self.trainer._model.parameters()])

    def draw(self, prompts: Sequence[Prompt], seeds: Sequence[int], temperature: float, age: int) -> list[Sampled]:
        """Samples of a version that is `age` steps old, or the oldest there is."""
        with self.timed("install"), torch.no_grad():
            kept = self.versions[max(0, len(self.versions) - 1 - age)]
            for own, value in zip(self.held.parameters(), kept, strict=True):
                own.copy_(value)
        rules = SamplingRules(temperature=temperature, max_new_tokens=4, stop_token_ids=self.stops, stop=("\n",))
        ids = {prompt.prompt_id: tuple(self.tokenizer.encode(prompt.text).ids) for prompt in prompts}
        jobs = [Job(ids[one.prompt_id], seed, rules, 600.0) for one, seed in zip(prompts, seeds, strict=True)]
        with self.timed("draw" if temperature else "evaluate"):
            return list(self.engine.generate(Generate(tuple(jobs)), lambda: None).samples)

    def right(self, prompt: Prompt, sample: Sampled, seed: int) -> float:
        text = self.tokenizer.decode(memoryview(sample.token_ids).cast("i").tolist(), skip_special_tokens=False)
        if self.case.reward == "random" and seed:
            return random_score(self.task, prompt, text, seed).reward
        return self.task.score(prompt, text).reward

    def evaluate(self) -> float:
        prompts = list(self.task.held_out(1000))
        found = self.draw(prompts, [0] * len(prompts), 0.0, age=0)
        return sum(self.right(prompt, one, 0) for prompt, one in zip(prompts, found, strict=True)) / len(prompts)

    def step(self, step: int) -> dict[str, float]:
        case = self.case
        prompts = [self.task.prompt(step * case.groups + number) for number in range(case.groups)]
        each = [prompt for prompt in prompts for _ in range(case.group_size)]
        draws = Random(f"{case.seed}/{step}")
        seeds = [draws.getrandbits(62) + 1 for _ in each]
        age = min(case.staleness, len(self.versions) - 1)
        samples = self.draw(each, seeds, 1.0, age)
        rollouts = [
            TrainRollout(
                token_ids=one.token_ids,
                logprobs=one.logprobs,
                reward=self.right(prompt, one, seed),
                staleness=age,
                truncated=one.finish == "length",
                sampler="sampler",
            )
            for prompt, one, seed in zip(each, samples, seeds, strict=True)
        ]
        size = case.group_size
        groups = tuple(
            TrainGroup(tuple(self.tokenizer.encode(prompt.text).ids), tuple(rollouts[at * size : (at + 1) * size]))
            for at, prompt in enumerate(prompts)
        )
        with self.timed("train"):
            trained = self.trainer.step(Train(step=step, groups=groups))
        self.publish()
        alarms = {f"alarm/{one.kind}": one.value for one in trained.alarms}
        return {name: trained.metrics[name] for name in SHOWN if name in trained.metrics} | alarms

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.spent[part] += time.process_time() - began


def run(case: Case, model: str, versions: Path | None = None) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as kept:
        bench = Bench(case, model, Path(kept))
        held_out = {0: bench.evaluate()}
        figures: list[dict[str, float]] = []
        for step in range(case.steps):
            figures.append(bench.step(step))
            if versions is not None:
                names = (name for name, _ in bench.trainer._model.named_parameters())
                kept_in = versions / str(step + 1)
                kept_in.mkdir(parents=True, exist_ok=True)
                save_file(dict(zip(names, bench.versions[-1], strict=True)), kept_in / "model.safetensors")
            if (step + 1) % case.eval_every == 0:
                held_out[step + 1] = bench.evaluate()
                wall_s = time.monotonic() - began
                print(f"{step + 1:4} held-out {held_out[step + 1]:.3f} {figures[-1]} {wall_s:.0f} s", flush=True)
    per_step = {part: round(seconds / case.steps, 3) for part, seconds in bench.spent.items()}
    rows = {name: [round(one.get(name, 0.0), 4) for one in figures] for name in {n for one in figures for n in one}}
    return {
        "case": msgspec.to_builtins(case),
        "held_out": held_out,
        "cpu_s_per_step": per_step,
        "wall_s": round(time.monotonic() - began, 1),
        "figures": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where every version is kept, if one is named")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    case = msgspec.convert(dict(one.split("=", 1) for one in options.settings), Case, strict=False)
    kept = options.to.read_text().splitlines() if options.to.exists() else []
    if any(msgspec.convert(json.loads(line)["case"], Case) == case for line in kept):
        print(f"{options.to} has this case already")
        return
    found = run(case, options.model, options.keep)
    with options.to.open("a") as file:
        file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
