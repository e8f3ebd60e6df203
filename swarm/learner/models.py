"""Models that are made here: the tiny one, and supervised training that gives it something to begin with.

The tiny model is a Qwen3 of about 120,000 parameters with a tokenizer of single characters, made from a seed: a whole
swarm runs on it with no download. Its architecture is that of real Qwen3 models (grouped queries, tied embeddings), so
code that carries its weights carries theirs.

A reward only raises what a model already does now and then. Real bases have skills from their pre-training; models made
here are taught some. What a run does with them is elicitation, and has to be called that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_model as read_weights
from safetensors.torch import save_model as write_weights
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

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
        # Small for its size, and the least that vLLM has a kernel for on CPUs.
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


IGNORED = -100  # The label of a position that is not to be learned: cross_entropy's own
ADAM_BETAS = (0.9, 0.95)
GRADIENT_CLIP = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A prompt and the completion to give; the end of the text follows it."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """`steps` optimiser steps of `batch` lessons each. The learning rate warms up over `warmup_steps` and falls in a
    straight line to 0."""

    steps: int
    batch: int
    learning_rate: float
    warmup_steps: int = 20

    def rate(self, step: int) -> float:
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps) * (1 - step / self.steps)


FOUR_SKILLS = Curriculum(steps=600, batch=64, learning_rate=3e-3)
"""Nine CPU seconds; then each skill comes in a little more than a fifth of the samples, of a quarter at best."""


def teach(
    model: Any,
    tokenizer: Any,
    lesson: Callable[[int], Lesson],
    course: Curriculum,
    told: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train `model` in place on lessons 0, 1, ...: cross-entropy of their completions, AdamW without weight decay.
    `told` hears of every step and its loss, in nats a token. On one thread of one machine the weights are the same
    every time."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), betas=ADAM_BETAS, weight_decay=0.0)
    model.train()
    for step in range(course.steps):
        for group in optimizer.param_groups:
            group["lr"] = course.rate(step)
        token_ids, labels = _rows(tokenizer, [lesson(step * course.batch + place) for place in range(course.batch)])
        # Padded on the right, where a causal model's earlier positions do not look: no attention mask is needed.
        logits = model(input_ids=token_ids.to(device), use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten().to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        told(step, loss.item())


def warm_model(seed: int, kept_in: Path | None = None) -> Any:
    """The tiny model after FOUR_SKILLS, the same for the same seed. Kept as base.safetensors in the directory."""
    model = tiny_model(seed)
    kept = kept_in / "base.safetensors" if kept_in is not None else None
    if kept is not None and kept.is_file():
        read_weights(model, kept)
        return model
    threads = torch.get_num_threads()
    # Sums of several threads come in no fixed order, and for a small model a second one costs more than it brings.
    torch.set_num_threads(1)
    try:
        teach(model, tiny_tokenizer(), lambda index: four_skills(seed, index), FOUR_SKILLS)
    finally:
        torch.set_num_threads(threads)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        # Every rank of a trainer makes it, and none may read half of another's.
        partial = kept.with_suffix(f".{os.getpid()}.partial")
        write_weights(model, str(partial))
        partial.replace(kept)
    return model


def four_skills(seed: int, index: int) -> Lesson:
    """A number of the training split and what one of the skills, drawn evenly, makes of it."""
    draw = Random(f"four skills/{seed}/{index}")
    number = draw_number(draw)
    return Lesson(prompt=f"{number}=", completion=draw.choice(list(SKILLS.values()))(number))


def _rows(tokenizer: Any, lessons: Sequence[Lesson]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, and labels that are IGNORED but for completions and ends; both [lessons, longest]."""
    prompts = tokenizer([lesson.prompt for lesson in lessons])["input_ids"]
    completions = tokenizer([lesson.completion for lesson in lessons], add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    pairs = list(zip(prompts, completions, strict=True))
    texts = [torch.tensor([*prompt, *completion, end]) for prompt, completion in pairs]
    answers = [torch.tensor([IGNORED] * len(prompt) + [*completion, end]) for prompt, completion in pairs]
    return (
        pad_sequence(texts, batch_first=True, padding_value=end),
        pad_sequence(answers, batch_first=True, padding_value=IGNORED),
    )
