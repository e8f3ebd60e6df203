"""Rows and small models of several architectures, for tests of how a learner step is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from swarm.learner.batch import Row
from swarm.learner.tiny import tiny_model

CPU = torch.device("cpu")
VOCAB = 14
"""Of the tiny model, and of all others here."""

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # Wide enough that a token that is seen, or is not, changes log-probs by more than rounding does.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
OLDER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


# Annotated in part only.
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "window": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=3)),
    "capped": (Gemma2ForCausalLM, Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=2.0)),
    "scaled": (GraniteForCausalLM, GraniteConfig(**SHAPE, logits_scaling=4.0)),
    "dropout": (GPT2LMHeadModel, GPT2Config(**OLDER, n_embd=32, resid_pdrop=0.5)),
    "functional": (
        OPTForCausalLM,
        OPTConfig(**SHAPE | {"hidden_size": 32}, ffn_dim=64, word_embed_proj_dim=32, dropout=0.5, init_std=0.3),
    ),
    "alibi": (BloomForCausalLM, BloomConfig(**OLDER, hidden_size=32)),
}


def small_model(name: str) -> Any:
    """The tiny Qwen3 ("qwen3") or another architecture, the same each time; `capped` and `scaled` change their logits
    after the output layer, `functional` has dropout that is no module, `alibi` takes no position ids, `window` attends
    to the last three tokens."""
    if name == "qwen3":
        return tiny_model(0)
    torch.manual_seed(0)
    make, config = MODELS[name]
    return make(config)


def row(prompt: Sequence[int], completion: Sequence[int], *, staleness: int = 0, advantage: float = 1.0) -> Row:
    """Log-probs are -1, -2, ... so that a shift would show."""
    return Row(
        token_ids=torch.tensor([*prompt, *completion]),
        prompt_tokens=len(prompt),
        behaviour=-1.0 - torch.arange(len(completion)),
        advantage=advantage,
        staleness=staleness,
    )


def random_rows(count: int, *, longest: int = 20, seed: int = 0) -> list[Row]:
    """Prompts of 1 to 5 tokens and completions of 1 to `longest`."""
    draw = torch.Generator().manual_seed(seed)

    def some(least: int, most: int) -> list[int]:
        size = int(torch.randint(least, most + 1, (1,), generator=draw))
        return torch.randint(VOCAB, (size,), generator=draw).tolist()

    return [row(some(1, 5), some(1, longest), staleness=number % 3, advantage=float(number)) for number in range(count)]


def grouped_rows(groups: int, size: int, *, seed: int = 0) -> list[Row]:
    """Rows of `groups` prompts of 4 to 9 tokens, one after another, with completions of 1 to 6."""
    draw = torch.Generator().manual_seed(seed)

    def some(least: int, most: int) -> list[int]:
        count = int(torch.randint(least, most + 1, (1,), generator=draw))
        return torch.randint(VOCAB, (count,), generator=draw).tolist()

    prompts = [some(4, 9) for _ in range(groups)]
    return [row(prompt, some(1, 6), advantage=float(number)) for prompt in prompts for number in range(size)]
