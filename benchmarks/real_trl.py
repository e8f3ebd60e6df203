"""The run of benchmarks.real with TRL's GRPOTrainer, in a process of its own: benchmarks.real starts it.

A learner step is one batch of rollouts with all optimiser steps on it, as in echo-node. Its time and CPU leave out the
evaluations, which are written with the time that training has taken until then. Every token whose text holds a line's
end ends a completion, which is what the stop string "\\n" does in echo-node.

With --dtype bf16 the weights are float32 and the passes of training run in bf16 (TRL's `bf16`), as in echo-node.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from swarm.tasks import load_task
from swarm.tasks.base import Task, TaskOptions
from swarm.types import Prompt

STOP = "\n"
EVALUATED_AT_ONCE = 100
"""Questions in one batch of greedy generation."""


def stop_tokens(tokenizer: Any) -> list[int]:
    """Every token that ends a completion."""
    return [token for token in range(len(tokenizer)) if STOP in tokenizer.decode([token])] + [tokenizer.eos_token_id]


class Watch(TrainerCallback):
    """Writes a line for each learner step and each evaluation to `file`."""

    def __init__(self, options: argparse.Namespace, held_out: Sequence[Prompt], task: Task) -> None:
        self._options, self._held_out, self._task = options, held_out, task
        self._file = options.out.open("w")
        self._step, self._trained_s = 0, 0.0
        self._began = (0.0, 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._evaluate(kwargs["model"], kwargs["processing_class"])
        self._began = time.monotonic(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._options.minibatches:
            return
        wall_s, cpu_s = time.monotonic() - self._began[0], time.process_time() - self._began[1]
        self._step, self._trained_s = self._step + 1, self._trained_s + wall_s
        self._write(kind="step", step=self._step, wall_s=wall_s, cpu_s=cpu_s)
        if self._step % self._options.eval_every == 0 or self._step == self._options.steps:
            self._evaluate(kwargs["model"], kwargs["processing_class"])
        self._began = time.monotonic(), time.process_time()

    @torch.no_grad()
    def _evaluate(self, model: Any, tokenizer: Any) -> None:
        if not self._held_out:
            return
        model.eval()
        right = 0
        for start in range(0, len(self._held_out), EVALUATED_AT_ONCE):
            some = self._held_out[start : start + EVALUATED_AT_ONCE]
            batch = tokenizer([prompt.text for prompt in some], return_tensors="pt", padding=True, padding_side="left")
            rows = model.generate(
                **batch,
                max_new_tokens=self._options.max_new_tokens,
                do_sample=False,
                eos_token_id=model.generation_config.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
            texts = tokenizer.batch_decode(rows[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            right += sum(self._task.score(*pair).exact for pair in zip(some, texts, strict=True))
        model.train()
        self._write(kind="held_out", step=self._step, trained_s=self._trained_s, share=right / len(self._held_out))

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def config_of(options: argparse.Namespace, directory: str) -> GRPOConfig:
    rollouts = options.groups * options.group_size
    return GRPOConfig(
        output_dir=directory,
        use_cpu=True,
        bf16=options.dtype == "bf16",
        seed=options.seed,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        # TRL recomputes activations unless told not to; here there is memory enough, and it would only cost time.
        gradient_checkpointing=False,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=options.warmup_steps * options.minibatches,
        max_steps=options.steps * options.minibatches,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=rollouts // options.minibatches // options.batch,
        generation_batch_size=rollouts,
        num_generations=options.group_size,
        max_completion_length=options.max_new_tokens,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        delta=10.0,  # What echo-node calls ratio_cap
        loss_type="dapo",
        scale_rewards="group",
    )


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    task = load_task(TaskOptions(name=f"jsonl:{options.data}", rewards={"numeric": 1.0}, stop=(STOP,)))
    prompts = [task.prompt(number) for number in range(task.size or 0)]
    known = {prompt.text: prompt for prompt in prompts}

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [task.score(known[text], said).reward for text, said in zip(prompts, completions, strict=True)]

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model.generation_config.eos_token_id = stop_tokens(tokenizer)
    held_out = task.held_out(options.eval_prompts) if options.eval_prompts else []
    with tempfile.TemporaryDirectory(prefix="real-trl-") as directory:
        GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config_of(options, directory),
            train_dataset=Dataset.from_dict({"prompt": [prompt.text for prompt in prompts]}),
            processing_class=tokenizer,
            callbacks=[Watch(options, held_out, task)],
        ).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("steps", "eval_every", "eval_prompts", "seed", "threads", "batch", "minibatches", "warmup_steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("groups", "group_size", "max_new_tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning_rate", type=float, required=True)
    parser.add_argument("--dtype", choices=("float32", "bf16"), required=True)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
