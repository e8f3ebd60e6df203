"""A tiny model as learner and engine hold it, for tests that need torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from swarm.broadcast.version.codec import tensor_sum
from swarm.broadcast.version.manifest import Layout
from swarm.learner.adapter import attach, is_adapted, shape_of_adapter
from swarm.learner.checkpoint.model_files import layout_of, save_small_files, stream_tensors, write_staging
from swarm.learner.tiny import tiny_model, tiny_tokenizer
from swarm.models.device import as_streamed
from swarm.sampler.engine import EngineOptions, Install, Start
from swarm.wire import Digest
from tests.builders import v


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A learner's model and what its samplers get of it."""

    model: Any
    layout: Layout
    files_dir: Path
    staging: Path
    sums: tuple[int, ...]

    def start(self, **options: Any) -> Start:
        asked = EngineOptions(**{"device": "cpu", **options})
        return Start(directory=str(self.files_dir), layout=self.layout, options=asked)

    def install(self, version: int = 0) -> Install:
        return Install(version=v(version), path=str(self.staging), tensor_sums=self.sums)


def stage(directory: Path, *, seed: int = 0) -> Staged:
    """A tiny model with its small files and its bf16 weights under `directory`."""
    return stage_model(tiny_model(seed), directory)


def moe_model(seed: int) -> Any:
    """A tiny Qwen3-MoE: two layers of four experts, of which a token takes two."""
    tiny = tiny_model(0).config.to_dict()
    config = Qwen3MoeConfig(
        **{name: value for name, value in tiny.items() if name not in ("architectures", "model_type")},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    )
    torch.manual_seed(seed)
    untyped: Any = Qwen3MoeForCausalLM
    return untyped(config)


def model_directory(directory: Path, model: Any = None, **changed: Any) -> str:
    """A directory as people have it, with the tiny tokenizer and `model`, or the tiny model with `changed` settings."""
    if model is None:
        config = tiny_model(0).config
        config.update(changed)
        torch.manual_seed(5)
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config)
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return str(directory)


def stage_model(model: Any, directory: Path) -> Staged:
    """`model` with the tiny tokenizer, published under `directory`."""
    tensors = stream_tensors(model)
    adapter = shape_of_adapter(model, Digest(bytes(32))) if is_adapted(model) else None
    layout = layout_of(tensors, save_small_files(model, tiny_tokenizer(), directory / "model"), adapter)
    staging = directory / "staging.bin"
    write_staging(tensors, staging)
    return Staged(
        model=model, layout=layout, files_dir=directory / "model", staging=staging, sums=sums_of(staging, layout)
    )


def adapted_model(*, rank: int = 4, alpha: float = 8.0, drawn: int = 0, base: Any = None) -> Any:
    """The tiny model of seed 0, or `base`, rounded as it is when frozen, with an adapter that is not zero, drawn by
    `drawn`."""
    model = base or tiny_model(0)
    attach(model, rank, alpha, name="tiny", seed=drawn)
    model.float()
    draw = torch.Generator().manual_seed(drawn)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) / 4)
    return model


def sums_of(staging: Path, layout: Layout) -> tuple[int, ...]:
    """The sum of each tensor in a staging file."""
    data, at, sums = staging.read_bytes(), 0, list[int]()
    for tensor in layout.tensors:
        sums.append(tensor_sum(data[at : at + tensor.nbytes]))
        at += tensor.nbytes
    return tuple(sums)


def published(model: Any) -> Any:
    """A copy of `model` with the weights that are published of it."""
    return _with(model, as_streamed)


def frozen(model: Any) -> Any:
    """A copy of `model` with its weights as they are beside an adapter: rounded to the nearest number of bf16."""
    return _with(model, torch.Tensor.bfloat16)


def _with(model: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(cast(parameter).float())
    return twin


@torch.no_grad()
def logprobs_of(
    model: Any, prompt: Sequence[int], completion: Sequence[int], *, temperature: float = 1.0
) -> list[float]:
    """The log-prob of each token of a completion, one sequence at a time, without any padding and without a cache."""
    tokens = torch.tensor([[*prompt, *completion]], device=model.device)
    table = (model(input_ids=tokens, use_cache=False).logits[0].float() / temperature).log_softmax(-1)
    return [float(table[len(prompt) - 1 + i, token]) for i, token in enumerate(completion)]
