"""Predicts before the first step whether a learner step fits into the memory of the device.

benchmarks/learner.py compares the sum of `step_bytes` with the measured peak. `choose` decides the settings that the
user left open. Only the functions under `reading` look at a model or at the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swarm.errors import UserError
from swarm.learner.adapter import ALPHA, add_matrices, linear_layers, parameters_of, shape_of_tensor, targets_of
from swarm.learner.messages import TrainerConfig
from swarm.learner.optimizer import BLOCK, PIECE_BYTES
from swarm.learner.policy import CHUNK_BYTES, Policy, is_half, layers_of
from swarm.machine import free_host_bytes
from swarm.models.device import stated
from swarm.models.memory import Shape, activation_bytes, size, weights_bytes, widths
from swarm.types import BasePrecision, OptimizerStates

MOMENT_BYTES: dict[OptimizerStates, float] = {"float32": 8, "8bit": 2 + 2 * 4 / BLOCK, "host": 8}
"""Bytes of both moments of a parameter; in 8 bits, including their scales. The copy for a checkpoint takes as much
again, 4 for the weight, and 2 for the bf16 model that is written with it."""

STREAMED_BYTES = 4 * PIECE_BYTES  # On the device, of moments that are on the host: two pieces of each moment
TOKENS_PER_MICRO_BATCH = 16_384  # In one forward pass of a large model; more does not make a GPU faster

MIN_TOKENS = {False: 4096, True: 1024}
"""Fewest tokens that `choose` tries, without and with activation checkpointing: below 4096, small matrices cost a GPU
more time than computing layers twice; below 1024, halving gains nothing."""

MASK_BYTES = 5  # For each pair of tokens: the boolean mask, and the float32 mask that the kernel adds to its scores
FREE_SHARE = 0.92  # Of the free memory; the rest is for fragmentation and temporary buffers of kernels
WHOLE_GRADIENT_BYTES = 2 << 30  # Up to this size each rank keeps the whole gradient; above, FSDP would save nothing
DESCRIBED = {"float32": "", "8bit": ", and AdamW in 8 bits", "host": ", and AdamW's moments on the host"}
CHANGES = (
    "fewer --tokens-per-micro-batch, activation_checkpointing = true, packing = false, "
    'optimizer_states = "8bit" or "host", kl_weight = 0, fewer --max-new-tokens or max_prompt_tokens, '
    "--adapter 8 (with --base-precision nf4), more --trainer-ranks, or a smaller model"
)
"""Advice for users who are short of memory, the cheapest change first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a step is computed. `tokens` are those of the largest micro-batch; `ranks` share weights, gradients and
    moments. `has_dense_mask`: rows are packed and the attention kernel needs a mask. `on_host`: the device uses the
    host's memory, so a checkpoint's copy takes some of it too. `states` is how moments are kept."""

    tokens: int
    activation_checkpointing: bool
    half: bool
    in_chunks: bool
    has_dense_mask: bool
    ranks: int
    has_reference: bool
    on_host: bool
    states: OptimizerStates = "float32"


def step_bytes(shape: Shape, setting: Setting) -> dict[str, int]:
    """Peak bytes that one rank needs in addition to the loaded weights, by purpose."""
    held, trained = shape.parameters // setting.ranks, shape.trained // setting.ranks
    found = {
        "gradients and AdamW": _trained_bytes(shape, setting),
        "weights of the reference": 4 * held if setting.has_reference else 0,
        "weights gathered or in bf16": _computed_with_bytes(shape, setting),
        "whole gradient of each rank": whole_gradient_bytes(shape.parameters) if setting.ranks > 1 else 0,
        "activations": activation_bytes(
            shape, setting.tokens, half=setting.half, checkpointing=setting.activation_checkpointing
        ),
        "logits": logit_bytes(shape, setting),
        "the mask of packed rows": MASK_BYTES * setting.tokens**2 if setting.has_dense_mask else 0,
        "a checkpoint": int(_checkpoint_bytes(setting) * trained) if setting.on_host else 0,
    }
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def _checkpoint_bytes(setting: Setting) -> float:
    """Bytes for each parameter. A single rank on a CPU copies nothing."""
    return 2 if setting.on_host and setting.ranks == 1 else 6 + MOMENT_BYTES[setting.states]


def _trained_bytes(shape: Shape, setting: Setting) -> int:
    """Bytes on the device for gradients and for AdamW's moments."""
    trained, states = shape.trained // setting.ranks, setting.states
    if states == "host" and not setting.on_host:
        return 4 * trained + STREAMED_BYTES
    # Moments stay in float32 where a row is not a multiple of a block, as in half of an adapter's matrices.
    is_rounded = shape.hidden % BLOCK == 0 and shape.trained == shape.parameters
    return int((4 + MOMENT_BYTES[states if is_rounded else "float32"]) * trained)


def kept_on_host(shape: Shape, setting: Setting) -> int:
    """Peak bytes of host memory that all ranks need for checkpoints, which rank 0 writes, and for moments; 0 if the
    device uses the host's memory."""
    if setting.on_host:
        return 0
    copied, own = _checkpoint_bytes(setting), MOMENT_BYTES["host"] if setting.states == "host" else 0
    return int((copied + own) * shape.trained)


def _computed_with_bytes(shape: Shape, setting: Setting) -> int:
    """Under autocast a single rank has a bf16 copy of all trained weights; with activation checkpointing only of the
    head and of the layer that it computes, with its gradient. Each of several ranks gathers two layers at a time, and
    has the buffers in which they arrive; their gradients take as much again. Weights outside of layers are gathered
    once a pass."""
    if setting.ranks == 1:
        at_once = min(shape.trained, 2 * shape.layer_parameters + shape.other_parameters)
        return 2 * (at_once if setting.activation_checkpointing else shape.trained) if setting.half else 0
    width = 2 if setting.half else 4
    return width * (8 * shape.layer_parameters + 4 * shape.other_parameters)


def whole_gradient_bytes(parameters: int) -> int:
    """Bytes of the whole gradient, if a rank keeps it through a minibatch; else 0."""
    return 4 * parameters if 4 * parameters <= WHOLE_GRADIENT_BYTES else 0


def logit_bytes(shape: Shape, setting: Setting) -> int:
    """Bytes for the log-softmax of one chunk and its product with the probabilities, and in bf16 also the logits;
    without chunks, for those of all tokens and their gradient. Also the float32 gradient of the head and of embeddings
    tied to it, unless it is frozen."""
    whole = 4 * setting.tokens * shape.vocab_size
    chunk = min(whole, CHUNK_BYTES)
    added = 8 * shape.vocab_size * shape.hidden if shape.trained == shape.parameters else 0
    return (2 * chunk + (chunk // 2 if setting.half else 0) if setting.in_chunks else 3 * whole) + added


def choose(
    shape: Shape, setting: Setting, config: TrainerConfig, free_bytes: int, *, longest: int, may_checkpoint: bool = True
) -> TrainerConfig:
    """Choose the tokens of a micro-batch and activation checkpointing in `config`, so that a step fits.

    Tries TOKENS_PER_MICRO_BATCH and its halves without checkpointing, then with it. Settings of the user stay.
    `longest` is the length of the longest row, which is never cut; `tokens` and `activation_checkpointing` of
    `setting` are not read. UserError, in one line, if nothing fits.
    """
    recompute, wanted = config.activation_checkpointing, config.tokens_per_micro_batch
    for way in (False, True) if recompute is None and may_checkpoint else (bool(recompute),):
        tokens = wanted or TOKENS_PER_MICRO_BATCH
        while True:
            tried = replace(setting, tokens=max(tokens, longest), activation_checkpointing=way)
            if fits(shape, tried, free_bytes):
                return config.model_copy(update={"tokens_per_micro_batch": tokens, "activation_checkpointing": way})
            if wanted or tokens <= MIN_TOKENS[way]:
                break
            tokens //= 2
    raise _too_little(shape, tried, free_bytes, longest)


def _too_little(shape: Shape, setting: Setting, free_bytes: int, longest: int) -> UserError:
    parts = sorted(step_bytes(shape, setting).items(), key=lambda item: -item[1])
    step = f"{setting.tokens:,} tokens at a time" if setting.tokens > longest else f"one row of {longest:,} tokens"
    return UserError(
        f"too little memory: a step of {step} needs {size(sum(n for _, n in parts))} more "
        f"and {size(free_bytes)} are free, of which {FREE_SHARE:.0%} may be planned with "
        f"({', '.join(f'{name} {size(nbytes)}' for name, nbytes in parts)}); change: {CHANGES}"
    )


def fits(shape: Shape, setting: Setting, free_bytes: int) -> bool:
    """Whether a step fits into the `free_bytes` that the loaded weights leave."""
    return sum(step_bytes(shape, setting).values()) <= free_bytes * FREE_SHARE


def check_weights(shape: Shape, config: TrainerConfig, device: torch.device, free: tuple[int, int], ranks: int) -> None:
    """UserError if weights, gradients and moments alone do not fit into the device, or checkpoints and moments into the
    host. `free` are bytes of the device and of the host. Called before the model is loaded."""
    setting, frozen = _least(config, device, ranks), shape.parameters - shape.trained
    weights = weights_bytes(shape, "bfloat16" if setting.half else "float32", "nf4") // ranks
    needed, host_needed = weights + _trained_bytes(shape, setting), kept_on_host(shape, setting)
    if needed > free[0]:
        others = f" and hold {frozen:,} frozen ones" if frozen else ""
        raise UserError(
            f"too little memory on {device}: to train {shape.trained:,} parameters{others} takes {size(needed)} for "
            f"weights, gradients and AdamW alone, and {size(free[0])} are free; change: {CHANGES}"
        )
    if host_needed > free[1]:
        raise UserError(
            "too little memory on the host: moments that are kept there, and what checkpoints are written from, take "
            f"{size(host_needed)}, and {size(free[1])} are free; change: {CHANGES}"
        )


def _least(config: TrainerConfig, device: torch.device, ranks: int) -> Setting:
    """The setting that takes the least memory under `config`, for any model."""
    return Setting(
        tokens=MIN_TOKENS[True],
        activation_checkpointing=True,
        half=is_half(config.precision, device.type),
        in_chunks=True,
        has_dense_mask=False,
        ranks=ranks,
        has_reference=False,
        on_host=device.type == "cpu",
        states=config.optimizer_states,
    )


def described(config: TrainerConfig, device: torch.device) -> str:
    precision = "bf16" if is_half(config.precision, device.type) else "float32"
    laid = "packed" if config.packing else "padded, each prompt once" if config.shares_beyond else "padded"
    return (
        f"a learner step takes up to {config.tokens_per_micro_batch:,} tokens at a time, "
        f"{laid}, in {precision}"
        f"{', with activation checkpointing' if config.activation_checkpointing else ''}"
        f"{DESCRIBED[config.optimizer_states]}"
    )


# -- reading ---------------------------------------------------------------------------------------------------


def fit(
    policy: Policy, config: TrainerConfig, device: torch.device, free: int, ranks: int, longest: int, kl: bool
) -> tuple[TrainerConfig, int]:
    """`choose` for a loaded model, and the bytes that its steps leave free. `free` is the smallest number of free bytes
    on any rank's device, so that all ranks choose alike."""
    model = policy.module.model
    setting = replace(
        _least(config, device, ranks),
        in_chunks=policy.module.in_chunks,
        has_dense_mask=bool(config.packing) and not policy.is_flash,
        has_reference=kl,
    )
    may = bool(model.supports_gradient_checkpointing)
    shape = shape_of(model)
    chosen = choose(shape, setting, config, free, longest=longest, may_checkpoint=may)
    tokens, recompute = chosen.tokens_per_micro_batch, chosen.activation_checkpointing
    assert tokens is not None
    setting = replace(setting, tokens=max(tokens, longest), activation_checkpointing=bool(recompute))
    return chosen, int(free * FREE_SHARE) - sum(step_bytes(shape, setting).values())


def read_shape(name: str, rank: int | None = None, base: BasePrecision = "bf16") -> Shape | None:
    """The shape of a model from a directory or a Hugging Face id, with an adapter of this rank or trained in full, read
    from its configuration alone. None if that fails; loading the model then reports why."""
    try:
        found = AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(found)
            if rank is not None:
                layers = linear_layers(model) if base == "nf4" else []
                packed = sum(model.get_submodule(name).weight.numel() for name in layers)
                add_matrices(model, targets_of(model), rank=rank, alpha=ALPHA * rank)
    except (OSError, ValueError):
        return None
    return replace(shape_of(model), rounded=packed if rank is not None else 0)


def shape_of(model: Any) -> Shape:
    """The shape of a causal language model. Widths that its configuration does not name are guessed on the high
    side."""
    config = model.config.get_text_config()
    found = widths(lambda *names: stated(config, *names) or 0, model.get_output_embeddings().weight.shape[1])
    layers = layers_of(model)
    sizes, parameters = [parameters_of(layer) for layer in layers], parameters_of(model)
    return Shape(
        parameters=parameters,
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        layer_parameters=max(sizes, default=0),
        other_parameters=parameters - sum(sizes),
        layers=max(1, len(sizes)),
        vocab_size=config.vocab_size,
        **found,
        rounded=sum(shape_of_tensor(p).numel() for p in model.parameters() if hasattr(p, "quant_state")),
    )


def read_free_bytes(device: torch.device, *, ranks: int) -> int:
    """Bytes that one rank may still use: of its own GPU all that is free, of the host's memory an equal share."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_host_bytes() // ranks
