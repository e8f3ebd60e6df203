"""The masters of the version benchmark: a Qwen3 of normal weights, and an AdamW that moves them by noise."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from swarm.learner.checkpoint.model_files import layout_of, save_small_files, stream_tensors, write_staging
from swarm.learner.tiny import tiny_tokenizer

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 1024, 16, 8, 64, 3072, 1024
WEIGHT_SD = 0.02
NOISE_ITEMS = 1 << 24
"""Gradients are cut from so many random numbers at random places: drawing new ones takes longer than a step."""


def shape_for(nbytes: int) -> tuple[int, int, int]:
    """Width, feed-forward width and layers of a model that takes about `nbytes` in bf16."""
    width = WIDTH if nbytes >= 1 << 28 else WIDTH // 4
    feed = 3 * width
    kv_width, width_of_heads = KV_HEADS * HEAD_DIM * width // WIDTH, HEADS * HEAD_DIM * width // WIDTH
    layer = 2 * width * width_of_heads + 2 * width * kv_width + 3 * width * feed
    return width, feed, max(1, round((nbytes // 2 - VOCAB * width) / layer))


class Masters:
    """A float32 model of about `nbytes` in bf16 and its AdamW. Gradients are noise, independent from step to step."""

    def __init__(self, nbytes: int, lr: float, directory: Path) -> None:
        width, feed, layers = shape_for(nbytes)
        config = Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=width,
            intermediate_size=feed,
            num_hidden_layers=layers,
            num_attention_heads=HEADS * width // WIDTH,
            num_key_value_heads=KV_HEADS * width // WIDTH,
            head_dim=HEAD_DIM,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        )
        make: Any = Qwen3ForCausalLM  # Annotated in part only
        with torch.device("meta"):
            model: Any = make(config)
        self._random = torch.Generator().manual_seed(0)
        self._noise = torch.randn(NOISE_ITEMS, generator=self._random)
        self._model = model.to_empty(device="cpu")
        self._model.tie_weights()
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.copy_(WEIGHT_SD * self._cut(parameter.numel()).view(parameter.shape))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=lr, foreach=False, fused=True)
        self._tensors = stream_tensors(self._model)
        self._staging = directory / "staging.bin"
        files = save_small_files(self._model, tiny_tokenizer(), directory / "files")
        self.layout = layout_of(self._tensors, files)

    def step(self) -> None:
        """Take a step, tensor by tensor, so that one gradient is in memory at a time."""
        for parameter in self._model.parameters():
            parameter.grad = self._cut(parameter.numel()).view(parameter.shape)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def stage(self) -> None:
        write_staging(self._tensors, self._staging)

    def memcpy_s(self) -> float:
        """Seconds of one copy of the weights in bf16, the fastest of three."""
        held = torch.zeros(self.layout.total_bytes, dtype=torch.uint8)
        copy = torch.zeros_like(held)
        times = []
        for _ in range(3):
            began = time.monotonic()
            copy.copy_(held)
            times.append(time.monotonic() - began)
        return min(times)

    def _cut(self, items: int) -> torch.Tensor:
        """Numbers from a random place of the noise, repeated if there are too few."""
        at = int(torch.randint(NOISE_ITEMS, (1,), generator=self._random))
        return (
            self._noise.roll(-at).repeat(-(-items // NOISE_ITEMS))[:items]
            if items > NOISE_ITEMS - at
            else self._noise[at : at + items].clone()
        )
