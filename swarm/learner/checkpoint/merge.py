"""Merges an adapter into its model, so that programs can load it without peft. Blocking."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from swarm.errors import UserError
from swarm.learner.adapter import as_published, hold_in
from swarm.learner.checkpoint.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, name_in_adapter
from swarm.learner.checkpoint.model_files import digest_of_weights, load_model, save_model, stream_tensors
from swarm.models.device import TORCH_DTYPES
from swarm.types import BasePrecision


@torch.no_grad()
def merge_into(directory: Path, *, model: str, seed: int, made_in: Path, precision: BasePrecision = "bf16") -> None:
    """Replace the adapter of a run in `directory` by the merged model in bf16: W + alpha / rank · B A, added in
    float32. UserError if `model`, loaded as the run's learner did, is not the model that the adapter was trained
    with."""
    config = json.loads((directory / ADAPTER_CONFIG).read_text())
    base, tokenizer = load_model(model, seed, made_in, dtype=torch.bfloat16)
    hold_in(base, precision)
    with safe_open(directory / ADAPTER_WEIGHTS, framework="pt") as file:
        if (file.metadata() or {}).get("base") != digest_of_weights(base).hex():
            raise UserError(f"{model} is not the model that this adapter was trained with: restore its files")
    held = load_file(directory / ADAPTER_WEIGHTS)
    matrices = {name.removeprefix(name_in_adapter("")): tensor.float() for name, tensor in held.items()}
    weights = {one.name: as_published(own).to(TORCH_DTYPES[one.dtype]) for one, own in stream_tensors(base).items()}
    for name in [name for name in matrices if ".lora_A." in name]:
        layer = name.replace(".lora_A.", ".")
        added = config["lora_alpha"] / config["r"] * matrices[name.replace(".lora_A.", ".lora_B.")] @ matrices[name]
        weights[layer] = (weights[layer].float() + added).to(weights[layer].dtype)
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        (directory / name).unlink()
    # No progress bar for so short a time. The setting applies to the whole process.
    disable_progress_bar()
    try:
        save_model(base, tokenizer, directory, weights)
    finally:
        enable_progress_bar()
