"""A learner step of the program and the bare one beside it, on the same rollouts; and the peak of memory of one.

The bare step is what one would write first with transformers: rows padded in the order in which they arrive, an
attention mask, `model(..., labels=...)` with its own loss, backward, AdamW. Both cut at the same budget of tokens, clip
the gradient, and count the same tokens: prompts and completions, no filling.

As a process (`python -m benchmarks.learner_step VARIANT WORK`) it takes a few steps alone and prints a JSON line with
the peak of memory: of the resident set on the CPU, of torch's allocator on a GPU.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from benchmarks.sampler_models import Size, random_model
from swarm.learner.adapter import attach
from swarm.learner.alarms import GRADIENT_CLIP, Alarms
from swarm.learner.memory import Setting, shape_of, step_bytes
from swarm.learner.messages import TrainerConfig, TrainGroup, TrainRollout
from swarm.learner.optimizer import adamw
from swarm.learner.policy import Policy, arrange, is_half
from swarm.learner.ranks import Ranks
from swarm.learner.update import Learning, Update
from swarm.models.device import pick_device
from tests.builders import floats, ints

Variant = Literal["bare", "whole", "chunked", "checkpointed", "8bit", "half", "adapter"]
VARIANTS: tuple[Variant, ...] = ("bare", "whole", "chunked", "checkpointed", "half", "adapter", "8bit")
"""Ours with the logits of all tokens at once, in chunks, and with activation checkpointing besides; of that with
passes in bf16, these with an adapter beside frozen weights, and moments in 8 bits. The last is left out on the CPU,
where bitsandbytes makes the moments of a matrix float32 to step it."""

ADAPTER = 8

LEARNING_RATE = 1e-6
STEPS = 2
"""That a process takes for its peak: AdamW's moments are there from the second on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A model and the rollouts of a step. Completions are of `least` to `most` tokens, each as likely."""

    parameters: float
    vocab_size: int
    groups: int
    group_size: int
    prompt_tokens: int
    least: int
    most: int
    micro_batch_tokens: int
    device: str = "cpu"

    def model(self) -> Any:
        """Float32 masters, on the device."""
        size = Size(
            parameters=self.parameters, vocab_size=self.vocab_size, context_tokens=self.prompt_tokens + self.most
        )
        return random_model(size, device=self.device).train()

    def rollouts(self, seed: int) -> tuple[TrainGroup, ...]:
        """Random tokens, and rewards so that every group has variance."""
        draw = random.Random(seed)

        def some(count: int) -> list[int]:
            return [draw.randrange(self.vocab_size) for _ in range(count)]

        def rollout(place: int) -> TrainRollout:
            tokens = draw.randint(self.least, self.most)
            return TrainRollout(
                token_ids=ints(*some(tokens)),
                logprobs=floats(*[-10.0] * tokens),
                reward=float(place % 2),
                staleness=0,
            )

        return tuple(
            TrainGroup(
                prompt_token_ids=tuple(some(self.prompt_tokens)), rollouts=tuple(map(rollout, range(self.group_size)))
            )
            for _ in range(self.groups)
        )


def tokens_of(groups: Sequence[TrainGroup]) -> int:
    return sum(len(group.prompt_token_ids) + r.length for group in groups for r in group.rollouts)


class Unheard(Alarms):
    """Hears of no mismatch: no model drew the rollouts, so what they claim would have the step left out."""

    def is_fit(self, *, gradient_norm: float, mismatch_kl: float | None) -> bool:
        return super().is_fit(gradient_norm=gradient_norm, mismatch_kl=None)


def our_step(
    work: Work, model: Any, rules: TrainerConfig, *, in_chunks: bool = True
) -> Callable[[Sequence[TrainGroup]], float]:
    """Takes a learner step of one optimiser step; its seconds."""
    given: dict[str, Any] = {"audit_share": 0.0}
    given |= {"device": work.device, "learning_rate": LEARNING_RATE, "warmup_steps": 0, "minibatches": 1}
    config = rules.model_copy(update=given)
    device = pick_device(work.device)
    policy = Policy(model, rules, temperature=1.0)
    policy.module.in_chunks = in_chunks
    arrange(model, rules)
    learning = Learning(
        model=model,
        optimizer=adamw(model, LEARNING_RATE, states=rules.optimizer_states),
        shuffle=torch.Generator().manual_seed(0),
        policy=policy,
        reference=None,
        ranks=Ranks(),
        device=device,
        progress=lambda: None,
    )
    update = Update(config, learning)
    update.alarms = Unheard()

    def step(groups: Sequence[TrainGroup]) -> float:
        began = _now(device)
        figures, _ = update.step(groups, 1)
        took = _now(device) - began
        assert figures["optimizer_steps"] == 1, f"the step was left out: {figures}"
        return took

    return step


def bare_step(work: Work, model: Any, rules: TrainerConfig) -> Callable[[Sequence[TrainGroup]], float]:
    """The same of bare transformers."""
    device = torch.device(work.device)
    optimizer = adamw(model, LEARNING_RATE)
    arrange(model, rules)

    def step(groups: Sequence[TrainGroup]) -> float:
        began = _now(device)
        for token_ids, attention, labels in _padded(groups, work.micro_batch_tokens, device):
            with torch.autocast(device.type, torch.bfloat16, enabled=is_half(rules.precision, device.type)):
                loss = model(input_ids=token_ids, attention_mask=attention, labels=labels, use_cache=False).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return _now(device) - began

    return step


def _padded(
    groups: Sequence[TrainGroup], budget: int, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Token ids, attention mask and labels in the order of arrival, as many rows at a time as the longest allows."""
    pairs = [(group.prompt_token_ids, r) for group in groups for r in group.rollouts]
    rows = [
        (torch.tensor([*prompt, *torch.frombuffer(bytearray(r.token_ids), dtype=torch.int32).tolist()]), len(prompt))
        for prompt, r in pairs
    ]
    size = max(1, budget // max(len(tokens) for tokens, _ in rows))
    made = []
    for at in range(0, len(rows), size):
        part = rows[at : at + size]
        width = max(len(tokens) for tokens, _ in part)
        token_ids = torch.zeros((len(part), width), dtype=torch.long)
        attention, labels = torch.zeros_like(token_ids), torch.full_like(token_ids, -100)
        for line, (tokens, prompt) in enumerate(part):
            token_ids[line, : len(tokens)] = tokens
            attention[line, : len(tokens)] = 1
            labels[line, prompt : len(tokens)] = tokens[prompt:]
        made.append((token_ids.to(device), attention.to(device), labels.to(device)))
    return made


def rules_of(variant: Variant, work: Work) -> TrainerConfig:
    return TrainerConfig(
        tokens_per_micro_batch=work.micro_batch_tokens,
        activation_checkpointing=variant in VARIANTS[3:],
        precision="bfloat16" if variant in ("half", "adapter") else "auto",
        optimizer_states="8bit" if variant == "8bit" else "float32",
    )


def _now(device: torch.device) -> float:
    """Seconds: of a GPU by the clock, of the CPU those of this process, so that what else runs there counts little."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


# -- a process of its own ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes beyond what there was before the model, which is `model_bytes` of it; `estimated_bytes` is the preflight's
    word for the rest. The last step took `step_s`, for so many tokens a second."""

    variant: Variant
    model_bytes: int
    peak_bytes: int
    estimated_bytes: int
    step_s: float
    tokens_per_s: float

    @property
    def per_model_byte(self) -> float:
        return self.peak_bytes / self.model_bytes

    @property
    def estimate_ratio(self) -> float:
        """Estimated over measured, both with the weights."""
        return (self.estimated_bytes + self.model_bytes) / self.peak_bytes


def measure_peak(variant: Variant, work: Work) -> Peak:
    """Peak of STEPS steps in this process, which has done nothing before."""
    device = torch.device(work.device)
    _warm_up(adapted=variant == "adapter")
    before = _used(device)
    model = work.model()
    if variant == "adapter":
        attach(model, ADAPTER, 2.0 * ADAPTER, name="random", seed=0)
    rules = rules_of(variant, work)
    step = (
        bare_step(work, model, rules)
        if variant == "bare"
        else our_step(work, model, rules, in_chunks=variant != "whole")
    )
    for seed in range(STEPS):
        groups = work.rollouts(seed)
        step_s = step(groups)
    shape = shape_of(model)
    setting = Setting(
        tokens=work.micro_batch_tokens,
        activation_checkpointing=bool(rules.activation_checkpointing),
        half=is_half(rules.precision, device.type),
        in_chunks=variant in VARIANTS[2:],
        has_dense_mask=False,
        ranks=1,
        has_reference=False,
        on_host=False,
        states=rules.optimizer_states,
    )
    return Peak(
        variant=variant,
        model_bytes=sum(p.nbytes for p in model.parameters()),
        peak_bytes=_used(device) - before,
        estimated_bytes=sum(step_bytes(shape, setting).values()),
        step_s=step_s,
        tokens_per_s=tokens_of(groups) / step_s,
    )


def _warm_up(*, adapted: bool) -> None:
    """Load what the first pass and the first step of any model load: it is not of this one."""
    model = random_model(Size(parameters=1e5, vocab_size=64))
    if adapted:
        attach(model, ADAPTER, 2.0 * ADAPTER, name="random", seed=0)
    work = Work(
        parameters=0,
        vocab_size=64,
        groups=1,
        group_size=2,
        prompt_tokens=4,
        least=4,
        most=8,
        micro_batch_tokens=32,
    )
    bare_step(work, model, TrainerConfig())(work.rollouts(0))


def _used(device: torch.device) -> int:
    """The most that was ever taken. Not of getrusage, which begins at the peak of the process that started this one."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def main() -> None:
    variant, work = sys.argv[1:]
    if variant not in VARIANTS:
        sys.exit(f"there is no variant {variant!r}; known ones: {', '.join(VARIANTS)}")
    print(json.dumps(asdict(measure_peak(variant, msgspec.json.decode(work, type=Work)))))


if __name__ == "__main__":
    main()
