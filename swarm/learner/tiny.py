"""Models that need no download: the tiny one, and the same after training on a few skills.

The tiny model is a Qwen3 of about 120,000 parameters with a tokenizer of single characters, made from a seed. Its
architecture is that of real Qwen3 models (grouped queries, tied embeddings), so code that works with its weights works
with theirs.

A reward can only reinforce what a model already does now and then. Real base models have skills from their
pre-training; `tiny-warm` is taught some. A run elicits these skills and does not teach new ones, and documents must say
so.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_model, save
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from swarm.files import write_atomically
from swarm.learner.messages import TrainerConfig
from swarm.settings import TINY
from swarm.tasks.digits import SKILLS, draw_number

SPECIAL = ("<pad>", "<bos>", "<eos>")
CHARACTERS = "0123456789="


def tiny_tokenizer() -> Any:
    """A fast tokenizer: one token a character, and <bos> before a prompt."""
    words = {word: i for i, word in enumerate((*SPECIAL, *CHARACTERS))}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", words["<bos>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=128
    )


def tiny_model(seed: int) -> Any:
    config = Qwen3Config(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        # Large for this size, but the smallest for which vLLM has a kernel on CPUs.
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


WARM_STEPS, WARM_BATCH = 600, 64
"""Ten CPU seconds. Afterwards each skill makes up a little more than a fifth of the samples; the ideal is a quarter."""


def warm_model(seed: int, kept_in: Path | None = None) -> Any:
    """The tiny model after training on examples of four skills, the same for the same seed. It is cached as
    base.safetensors in the directory `kept_in`."""
    kept = kept_in / "base.safetensors" if kept_in is not None else None
    if kept is not None and kept.is_file():
        model = tiny_model(seed)
        load_model(model, kept)
        return model
    from swarm.learner.sft import Example, Tuner  # It imports this module

    given: dict[str, Any] = {"seed": seed, "device": "cpu", "minibatches": 1, "audit_share": 0.0}
    rate: dict[str, Any] = {"learning_rate": 3e-3, "warmup_steps": 20, "schedule": "linear", "steps": WARM_STEPS}
    tuner = Tuner(TrainerConfig(model=TINY, **given, **rate))
    for first in range(0, WARM_STEPS * WARM_BATCH, WARM_BATCH):
        skills = (four_skills(seed, first + place) for place in range(WARM_BATCH))
        tuner.learn([tuner.row(Example(prompt=prompt, completion=answer), {}) for prompt, answer in skills])
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, save(dict(tuner.model.named_parameters())))
    return tuner.model


def four_skills(seed: int, index: int) -> tuple[str, str]:
    """A training prompt, and the answer of one of the skills, each with the same probability."""
    draw = Random(f"four skills/{seed}/{index}")
    number = draw_number(draw)
    return f"{number}=", draw.choice(list(SKILLS.values()))(number)
