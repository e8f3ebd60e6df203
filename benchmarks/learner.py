"""Speed and memory of a learner step.

bin/python -m benchmarks.learner --json

Seconds on the CPU are those of the process, on one thread: what else runs on the machine counts little. The parts, each
a line of JSON:
speed     tokens/s of ours, padded and packed, against the bare step, in turns in the same process, medians of the
          repeats. The bare step is what one would write first with transformers: rows padded in the order in which they
          arrive, `model(..., labels=...)`, backward, AdamW. Both cut at the same budget of tokens, clip the gradient,
          and count prompts and completions. `mixed` are completions of 16 to 240 tokens, where ours puts rows of like
          length together; `alike` are rows of one length, where nothing can be gained by that. On the CPU packed rows
          are kept apart by a mask of all pairs, which is why packing is not chosen there
memory    peak of two steps over the bytes of the weights, each variant in a process of its own (`--process VARIANT
          WORK`): of the resident set on the CPU, of torch's allocator with `--device cuda`
reckoned  what real models take by the preflight's arithmetic, GiB of a GPU + of the host, MB of a version. Nothing is
          measured: shapes are read from models on torch's meta device; 8,192 tokens at a time in bf16 with activation
          checkpointing, no KL, one rank
mfu       model FLOP/s utilisation in bf16 of a model of 0.6 billion parameters, `--parameters 1.7e9` of another, or
          with another kernel of attention (`--attention flash_attention_2`); on CUDA, and in a quick run
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks import Figures, ended, listed, parser_of, said
from benchmarks.sampler_models import QWEN3_TIED, REAL_VOCABULARY, Size, random_model
from swarm.learner.adapter import add_matrices, attach, targets_of
from swarm.learner.alarms import GRADIENT_CLIP, Alarms
from swarm.learner.memory import Setting, fit, kept_on_host, read_free_bytes, shape_of, step_bytes
from swarm.learner.messages import TrainerConfig, TrainGroup, TrainRollout
from swarm.learner.optimizer import adamw
from swarm.learner.policy import Policy, arrange, is_half
from swarm.learner.ranks import Ranks
from swarm.learner.update import Learning, Update
from swarm.models.device import pick_device
from swarm.models.memory import GIB, Shape
from swarm.types import OptimizerStates
from tests.builders import floats, ints

PARTS = ("speed", "memory", "reckoned", "mfu")
Variant = Literal["bare", "whole", "chunked", "checkpointed", "8bit", "half", "adapter"]
VARIANTS: tuple[Variant, ...] = ("bare", "whole", "chunked", "checkpointed", "half", "adapter", "8bit")
"""Ours with the logits of all tokens at once, in chunks, and with activation checkpointing besides; of that with
passes in bf16, these with an adapter beside frozen weights, and moments in 8 bits. The last is left out on the CPU,
where bitsandbytes makes the moments of a matrix float32 to step it."""

ADAPTER = 8
LEARNING_RATE = 1e-6
STEPS = 2  # That a process takes for its peak: AdamW's moments are there from the second on
SPEED_TARGET = 0.9
ESTIMATE_TARGET = 0.25  # How far the preflight's estimate may be from the measured peak
PROCESS_S = 1800.0  # Longest time for one process of the memory part; a loaded machine took 200 s

Step = Callable[[Sequence[TrainGroup]], float]


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
        context = self.prompt_tokens + self.most
        size = Size(parameters=self.parameters, vocab_size=self.vocab_size, context_tokens=context)
        return random_model(size, device=self.device).train()

    def rollouts(self, seed: int) -> tuple[TrainGroup, ...]:
        """Random tokens, and rewards so that every group has variance."""
        draw = random.Random(seed)

        def some(count: int) -> list[int]:
            return [draw.randrange(self.vocab_size) for _ in range(count)]

        def rollout(place: int) -> TrainRollout:
            tokens = draw.randint(self.least, self.most)
            claims, reward = floats(*[-10.0] * tokens), float(place % 2)
            return TrainRollout(token_ids=ints(*some(tokens)), logprobs=claims, reward=reward, staleness=0)

        return tuple(
            TrainGroup(
                prompt_token_ids=tuple(some(self.prompt_tokens)), rollouts=tuple(map(rollout, range(self.group_size)))
            )
            for _ in range(self.groups)
        )


SPEED = Work(
    parameters=2e7, vocab_size=32_768, groups=1, group_size=8, prompt_tokens=16, least=16, most=240,
    micro_batch_tokens=1024,
)  # fmt: skip
ALIKE = replace(SPEED, prompt_tokens=1, least=127, most=127)
MEMORY = replace(SPEED, parameters=1e7, vocab_size=65_536, least=200, micro_batch_tokens=2048)
QUICK = Work(
    parameters=3e5, vocab_size=512, groups=1, group_size=4, prompt_tokens=4, least=4, most=12, micro_batch_tokens=64
)
CUDA = Work(
    parameters=6e8, vocab_size=151_936, groups=8, group_size=16, prompt_tokens=256, least=768, most=1024,
    micro_batch_tokens=16_384, device="cuda",
)  # fmt: skip
MEMORY_ON_CUDA = replace(CUDA, groups=2)
LARGE_CARD = 60 * GIB  # One that holds a step of MEMORY_ON_CUDA, 50 GiB; a quarter of its tokens take 20


def tokens_of(groups: Sequence[TrainGroup]) -> int:
    return sum(len(group.prompt_token_ids) + r.length for group in groups for r in group.rollouts)


def rules_of(variant: Variant, work: Work) -> TrainerConfig:
    return TrainerConfig(
        tokens_per_micro_batch=work.micro_batch_tokens,
        activation_checkpointing=variant in VARIANTS[3:],
        precision="bfloat16" if variant in ("half", "adapter") else "auto",
        optimizer_states="8bit" if variant == "8bit" else "float32",
    )


# -- our step and the bare one -----------------------------------------------------------------------------------


class Unheard(Alarms):
    """Hears of no mismatch: no model drew the rollouts, so what they claim would have the step left out."""

    def is_fit(self, *, gradient_norm: float, mismatch_kl: float | None) -> bool:
        return super().is_fit(gradient_norm=gradient_norm, mismatch_kl=None)


def our_step(work: Work, model: Any, rules: TrainerConfig, *, in_chunks: bool = True) -> Step:
    """Takes a learner step of one optimiser step; its seconds."""
    given: dict[str, Any] = {"device": work.device, "learning_rate": LEARNING_RATE, "warmup_steps": 0}
    config = rules.model_copy(update=given | {"audit_share": 0.0, "minibatches": 1})
    device, policy = pick_device(work.device), Policy(model, rules, temperature=1.0)
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


def bare_step(work: Work, model: Any, rules: TrainerConfig) -> Step:
    """The same of bare transformers."""
    device, optimizer = torch.device(work.device), adamw(model, LEARNING_RATE)
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


def _padded(groups: Sequence[TrainGroup], budget: int, device: torch.device) -> list[list[torch.Tensor]]:
    """Token ids, attention mask and labels in the order of arrival, as many rows at a time as the longest allows."""
    rows = []
    for group in groups:
        for rollout in group.rollouts:
            tokens = torch.tensor([*group.prompt_token_ids, *array("i", rollout.token_ids)])
            labels = tokens.clone()
            labels[: len(group.prompt_token_ids)] = -100
            rows.append((tokens, torch.ones_like(tokens), labels))
    size = max(1, budget // max(len(tokens) for tokens, *_ in rows))
    parts = [zip(*rows[at : at + size], strict=True) for at in range(0, len(rows), size)]
    return [
        [pad_sequence([*kind], True, fill).to(device) for kind, fill in zip(part, (0, 0, -100), strict=True)]
        for part in parts
    ]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def speed(work: Work, repeats: int) -> dict[str, float]:
    """Tokens/s of ours, padded and packed, and of the bare step, and ratios to that, medians over alternating
    repeats."""
    rules = rules_of("chunked", work)
    steps = {
        "ours": our_step(work, work.model(), rules),
        "packed": our_step(work, work.model(), rules.model_copy(update={"packing": True})),
        "bare": bare_step(work, work.model(), rules),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        groups = work.rollouts(repeat)
        for name in sorted(steps, reverse=bool(repeat % 2)):
            took = steps[name](groups)
            if repeat:
                # The first makes AdamW's moments and warms the caches.
                seconds[name].append(took / tokens_of(groups))
    found = {f"{name}_tokens_per_s": 1 / statistics.median(took) for name, took in seconds.items()}
    for name, prefix in (("ours", ""), ("packed", "packed_")):
        pairs = [bare / ours for ours, bare in zip(seconds[name], seconds["bare"], strict=True)]
        found |= {f"{prefix}ratio": statistics.median(pairs)}
        found |= {f"least_{prefix}ratio": min(pairs), f"most_{prefix}ratio": max(pairs)}
    return found


# -- memory ------------------------------------------------------------------------------------------------------


def peak(variant: Variant, work: Work) -> Figures:
    """Measured in a process of its own. Bytes are those beyond what there was before the model, which is `model_bytes`
    of it; `estimated_bytes` is the preflight's word for the rest. The last step took `step_s`."""
    command = [sys.executable, "-m", "benchmarks.learner", "--process", variant, msgspec.json.encode(work).decode()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PROCESS_S)
    found: Figures = json.loads(done.stdout.strip().splitlines()[-1])
    whole = found["estimated_bytes"] + found["model_bytes"]
    per_model_byte, estimate_ratio = found["peak_bytes"] / found["model_bytes"], whole / found["peak_bytes"]
    return found | {"per_model_byte": per_model_byte, "estimate_ratio": estimate_ratio}


def measure_peak(variant: Variant, work: Work) -> Figures:
    """Peak of STEPS steps in this process, which has done nothing before."""
    device = torch.device(work.device)
    _warm_up(adapted=variant == "adapter")
    before, model, rules = _used(device), work.model(), rules_of(variant, work)
    if variant == "adapter":
        attach(model, ADAPTER, 2.0 * ADAPTER, name="random", seed=0)
    ours = variant != "bare"
    step = our_step(work, model, rules, in_chunks=variant != "whole") if ours else bare_step(work, model, rules)
    for seed in range(STEPS):
        groups = work.rollouts(seed)
        step_s = step(groups)
    setting = replace(
        ON_GPU,
        tokens=work.micro_batch_tokens,
        activation_checkpointing=bool(rules.activation_checkpointing),
        half=is_half(rules.precision, device.type),
        in_chunks=variant in VARIANTS[2:],
        states=rules.optimizer_states,
    )
    return {
        "variant": variant,
        "model_bytes": sum(p.nbytes for p in model.parameters()),
        "peak_bytes": _used(device) - before,
        "estimated_bytes": sum(step_bytes(shape_of(model), setting).values()),
        "step_s": step_s,
        "tokens_per_s": tokens_of(groups) / step_s,
    }


def _warm_up(*, adapted: bool) -> None:
    """Load what the first pass and the first step of any model load: it is not of this one."""
    work = replace(QUICK, parameters=1e5, vocab_size=64, group_size=2, micro_batch_tokens=32)
    model = random_model(Size(parameters=1e5, vocab_size=64))
    if adapted:
        attach(model, ADAPTER, 2.0 * ADAPTER, name="random", seed=0)
    bare_step(work, model, TrainerConfig())(work.rollouts(0))


def _used(device: torch.device) -> int:
    """The most that was ever taken. Not of getrusage, which begins at the peak of the process that started this one."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def memory_on_cuda() -> Work:
    is_large = torch.cuda.get_device_properties(0).total_memory >= LARGE_CARD
    return MEMORY_ON_CUDA if is_large else replace(MEMORY_ON_CUDA, micro_batch_tokens=4096)


# -- what real models take -----------------------------------------------------------------------------------------

RANKS = (1, 8, 32)  # Of adapters
STATES: tuple[OptimizerStates, ...] = ("float32", "8bit", "host")
MODELS = {"0.6B": 6e8, "1.7B": 1.7e9, "4B": 4e9, "8B": 8e9, "14B": 14e9, "32B": 32e9}

ON_GPU = Setting(
    tokens=8192,
    activation_checkpointing=True,
    half=True,
    in_chunks=True,
    has_dense_mask=False,
    ranks=1,
    has_reference=False,
    on_host=False,
)


@cache
def shape(name: str, adapter: int | None = None) -> Shape:
    """Of the model, or of an adapter of that rank beside it."""
    size = Size(parameters=MODELS[name], vocab_size=REAL_VOCABULARY)
    model = random_model(size, tied=size.parameters <= QWEN3_TIED, device="meta")
    if adapter is not None:
        with torch.device("meta"):
            add_matrices(model, targets_of(model), rank=adapter, alpha=2.0 * adapter)
    return shape_of(model)


def weight_bytes(of: Shape, ranks: int = 1) -> int:
    """On one rank: float32 masters of what is trained, bf16 of what is frozen."""
    return (4 * of.trained + 2 * (of.parameters - of.trained)) // ranks


def reckoned(names: Sequence[str] = tuple(MODELS)) -> list[Figures]:
    """Of every model and way: GiB of a GPU, weights included, and of the host, and MB of a published version."""
    found: list[Figures] = []
    for name in names:
        ways = {f"full, {states}": (shape(name), states) for states in STATES}
        ways |= {f"adapter {rank}": (shape(name, rank), STATES[0]) for rank in RANKS}
        for way, (of, states) in ways.items():
            setting = replace(ON_GPU, states=states)
            gpu = weight_bytes(of) + sum(step_bytes(of, setting).values())
            gib = {"gpu_gib": gpu / GIB, "host_gib": kept_on_host(of, setting) / GIB}
            found.append({"model": name, "way": way, **gib, "version_mb": of.trained / 5e5})
    return found


def table_of(found: Sequence[Figures]) -> list[str]:
    """As docs/learner.md has it."""
    ways = list(dict.fromkeys(row["way"] for row in found))
    made = ["|  | " + " | ".join(ways) + " |", "|---" * (len(ways) + 1) + "|"]
    for name in dict.fromkeys(row["model"] for row in found):
        own = [row for row in found if row["model"] == name]
        cells = [f"{row['gpu_gib']:.1f} + {row['host_gib']:.1f}, {row['version_mb']:,.0f}" for row in own]
        made.append("| " + " | ".join([name, *cells]) + " |")
    return made


# -- FLOP/s --------------------------------------------------------------------------------------------------------

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
"""Dense bf16 of a device, by a part of its name, from the vendor's data sheets. Of any other its largest product of
matrices is measured, which flatters it by a fifth or so."""

PRODUCT_WIDTH = 8192  # A square product of 1.1 TFLOP: large enough to reach what a device can, and 0.01 s of it


def flops_per_token(shape: Shape, context: float) -> float:
    """Forward and backward of one token that sees `context` others: 6 of each weight that multiplies, and 12 of each
    element of queries in each layer (the appendix of PaLM), halved since attention is causal."""
    return 6 * shape.parameters + 6 * shape.layers * shape.queries * context


def utilisation(work: Work, repeats: int, *, attention: str = "") -> dict[str, float]:
    """Model FLOP/s over the peak of the device; recomputed layers and filling are not counted as work. The
    micro-batches are those that the preflight chooses. The first step is not counted."""
    model = work.model()
    if attention:
        model.set_attn_implementation(attention)
    shape, device = shape_of(model), torch.device(work.device)
    asked = TrainerConfig(packing="flash" in attention)
    policy, longest = Policy(model, asked, temperature=1.0), work.prompt_tokens + work.most
    free = read_free_bytes(device, ranks=1)
    rules, _ = fit(policy, asked, device, free, ranks=1, longest=longest, kl=False)
    step = our_step(work, model, rules)
    step(work.rollouts(0))
    rates = []
    for seed in range(1, repeats + 1):
        groups = work.rollouts(seed)
        rates.append(tokens_of(groups) / step(groups))
    rate, most = statistics.median(rates), peak_flops(device)
    return {
        "tokens_per_s": rate,
        "parameters": float(shape.parameters),
        "tokens_at_a_time": float(rules.tokens_per_micro_batch or 0),
        "recomputes_layers": float(bool(rules.activation_checkpointing)),
        "peak_flops": most,
        "mfu": rate * flops_per_token(shape, work.prompt_tokens + (work.least + work.most) / 2) / most,
    }


def peak_flops(device: torch.device) -> float:
    """Dense bf16 of a device by its name, or as a product of large matrices shows it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    for part, flops in PEAK_FLOPS.items():
        if part in name:
            return flops
    width = PRODUCT_WIDTH if device.type == "cuda" else 256
    one = torch.ones(width, width, device=device, dtype=torch.bfloat16)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        float((one @ one)[0, 0])  # Reading an item waits for the product.
        seconds.append(time.perf_counter() - began)
    return 2 * width**3 / min(seconds)


# -- the command ---------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> Figures:
    quick, repeats = options.quick, 1 if options.quick else options.repeats
    figures: Figures = {"load_average": os.getloadavg()[0], "threads": torch.get_num_threads()}
    if "speed" in options.parts:
        for name, work in (("mixed", SPEED), ("alike", ALIKE)):
            figures[name] = said({"speed": name, **speed(QUICK if quick else work, repeats)})
    if "memory" in options.parts:
        work = QUICK if quick else MEMORY if options.device == "cpu" else memory_on_cuda()
        # Logits of all tokens at once are many gigabytes of a real vocabulary.
        variants = options.variants or (VARIANTS[:-1] if options.device == "cpu" else VARIANTS[2:])
        figures["memory"] = [said(peak(variant, work)) for variant in variants]
    if "reckoned" in options.parts:
        figures["reckoned"] = reckoned(("0.6B",) if quick else tuple(MODELS))
        print("\n".join(table_of(figures["reckoned"])), flush=True)
    if "mfu" in options.parts and (quick or torch.cuda.is_available()):
        work = QUICK if quick else replace(CUDA, parameters=options.parameters)
        figures["mfu"] = said(utilisation(work, repeats, attention=options.attention))
    return figures


def met(figures: Figures) -> bool:
    speeds = [figures["mixed"][name] >= SPEED_TARGET for name in ("ratio", "packed_ratio") if "mixed" in figures]
    ours = [of for of in figures.get("memory", ()) if of["variant"] != "bare"]
    return all(speeds) and all(abs(of["estimate_ratio"] - 1) <= ESTIMATE_TARGET for of in ours)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", type=listed(str), default=PARTS, help=",".join(PARTS))
    parser.add_argument("--variants", type=listed(str), help=f"of memory: {','.join(VARIANTS)}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parameters", type=float, default=6e8, help="of the model on CUDA")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where memory is measured")
    parser.add_argument("--attention", default="", help="of the MFU: transformers' name of a kernel")
    parser.add_argument("--quick", action="store_true", help="tiny models and one repeat: does it run at all?")
    parser.add_argument("--process", nargs=2, metavar=("VARIANT", "WORK"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := [one for one in options.variants or () if one not in VARIANTS]:
        parser.error(f"there is no variant {unknown[0]!r}; known ones: {', '.join(VARIANTS)}")
    if options.process:
        variant, work = options.process
        said(measure_peak(variant, msgspec.json.decode(work, type=Work)))
        return 0
    torch.set_num_threads(1)
    figures = run(options)
    # Figures of a toy say nothing about a target.
    passed = options.quick or met(figures)
    return ended(options, figures | {"met": passed}, met=passed)


if __name__ == "__main__":
    sys.exit(main())
