"""Adapters: low-rank matrices A and B that peft adds to the linear layers of a frozen model.

peft replaces layers of the model in place and renames the weights. In the stream, in checkpoints and in exports, the
model's own weights keep their names, and the adapter's are NAME.lora_A.weight and NAME.lora_B.weight
(manifest.stream_name). B begins as zeros, so version 0 computes what the model itself does.

A model may be held in 4 bits (NF4, arXiv 2305.14314). Passes, published versions and the base's digest all use the bf16
numbers that these bits stand for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from swarm.broadcast.version.manifest import AdapterShape
from swarm.errors import UserError
from swarm.extras import how_to_have, require
from swarm.learner.batch import MicroBatch
from swarm.learner.checkpoint.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_hub_name, name_in_adapter
from swarm.learner.policy import Policy, TokenFigures
from swarm.types import BasePrecision
from swarm.wire import Digest

NEEDS_PEFT = f"this run trains an adapter, which takes the package peft: {how_to_have('adapter')}"
ALPHA = 2.0  # Times the rank. The adapter is scaled by alpha / rank, so the scale is the same at every rank.
NF4_BLOCK = 64  # Numbers of a matrix that share a scale, as in QLoRA and by default in transformers
OF_ADAPTER = re.compile(r"\.lora_[AB](?=\.weight$)")  # In names of the stream


def targets_of(model: Any) -> list[str]:
    """Names of the linear layers, which get an adapter: their last parts if those match no other module, else whole
    names. The head is left out, since it is often the embedding too. UserError if there are none."""
    found = linear_layers(model)
    if not found:
        raise UserError("this model has no linear layers of torch's except its head, so it cannot have an adapter")
    short = {name.rpartition(".")[2] for name in found}
    meant = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in short]
    return sorted(short) if meant == found else found


def linear_layers(model: Any) -> list[str]:
    head = model.get_output_embeddings()
    return [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head]


def add_matrices(model: Any, targets: Sequence[str], *, rank: int, alpha: float) -> None:
    """Add matrices of `rank` to the layers `targets`, in the dtype of each layer, and freeze all other weights.
    UserError without peft, ValueError for layers that do not exist."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(NEEDS_PEFT) from error
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), task_type="CAUSAL_LM")  # type: ignore[arg-type]
    inject_adapter_in_model(config, model)


def attach(model: Any, rank: int, alpha: float, *, name: str, seed: int) -> None:
    """Add a trainable adapter of `rank`, in float32, and freeze the model's own weights in bf16, as samplers hold them.
    `name` is the model's. The same seed gives the same adapter."""
    torch.manual_seed(seed)
    add_matrices(model, targets_of(model), rank=rank, alpha=alpha)
    model.peft_config["default"].base_model_name_or_path = name if is_hub_name(name) else None
    for parameter in model.parameters():
        if parameter.is_floating_point():  # Packed weights are not
            parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else torch.bfloat16)


def shape_of_adapter(model: Any, base: Digest) -> AdapterShape:
    config = model.peft_config["default"]
    return AdapterShape(rank=config.r, alpha=float(config.lora_alpha), base=base)


def is_adapted(model: Any) -> bool:
    return hasattr(model, "peft_config")


def is_of_adapter(name: str) -> bool:
    """Whether a tensor of the stream belongs to an adapter, by its name."""
    return OF_ADAPTER.search(name) is not None


def module_name(name: str) -> str:
    """The model's own name of a trained tensor, by its name in the stream."""
    return OF_ADAPTER.sub(lambda found: f"{found[0]}.default", name)


class WithoutAdapter:
    """The policy as it began: the same model with B as zeros, so it takes no further memory."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._weights = {
            name: parameter.new_zeros(()).expand(parameter.shape)
            for name, parameter in policy.module.named_parameters()
            if name.endswith(".lora_B.default.weight")
        }

    def read(self, part: MicroBatch) -> TokenFigures:
        return self._policy.read(part, self._weights)


def hold_in(model: Any, precision: BasePrecision) -> None:
    """With `nf4`, pack the linear layers of a bf16 model, except the head. It must be on the CPU, whichever device it
    moves to later, so that the same model gives the same bits. UserError without bitsandbytes."""
    if precision == "nf4":
        require("quantized", "base_precision nf4")
    model.base_precision = precision
    for name in linear_layers(model) if precision == "nf4" else ():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, FourBit(model.get_submodule(name)))


class FourBit(torch.nn.Linear):
    """A frozen linear layer whose weight is packed, two numbers a byte."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        from bitsandbytes.functional import quantize_4bit
        from bitsandbytes.nn.modules import Params4bit

        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        # With rounded scales (double quantisation), packing unpacked weights again would give other bits.
        half = layer.weight.detach().to(torch.bfloat16)
        packed, state = quantize_4bit(half, blocksize=NF4_BLOCK, compress_statistics=False, quant_type="nf4")
        self.weight = Params4bit(packed, quant_state=state, blocksize=NF4_BLOCK, quant_type="nf4", bnb_quantized=True)
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        product: torch.Tensor = _Product.apply(x.to(dtype), self.weight)
        return product if self.bias is None else product + self.bias.to(product.dtype)


class _Product(torch.autograd.Function):
    """x Wᵀ with a packed W, which is unpacked in each pass and not kept: kept for all layers, it would take the memory
    that 4 bits save. bitsandbytes' own product rounds differently from the published weights."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return x @ as_published(weight).to(x.dtype).T

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        return gradients[0] @ as_published(ctx.weight).to(gradients[0].dtype), None


def shape_of_tensor(tensor: torch.Tensor) -> torch.Size:
    """The shape of a tensor, also if it is packed."""
    return getattr(tensor, "quant_state", tensor).shape


def as_published(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or, if it is packed, the bf16 numbers that it stands for."""
    if not hasattr(tensor, "quant_state"):
        return tensor
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(tensor.data, tensor.quant_state)


def parameters_of(model: Any) -> int:
    return sum(shape_of_tensor(parameter).numel() for parameter in model.parameters())


# -- files ---------------------------------------------------------------------------------------------------


def save_config(model: Any, directory: Path) -> None:
    """Write adapter_config.json in peft's format. Sets are sorted, so the same adapter gives the same file."""
    values = model.peft_config["default"].to_dict() | {"inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}
    (directory / ADAPTER_CONFIG).write_text(json.dumps(plain, indent=2, sort_keys=True) + "\n")


def save_adapter(model: Any, tokenizer: Any, directory: Path, state: dict[str, torch.Tensor], base: str) -> None:
    """Write the bf16 tensors `state` of an adapter, by their names in the stream, so that peft and vLLM can load them;
    and the tokenizer. `base` is the digest of its model."""
    tensors = {name_in_adapter(name): tensor.contiguous() for name, tensor in state.items()}
    metadata = {"format": "pt", "base": base, "base_precision": getattr(model, "base_precision", "bf16")}
    save_file(tensors, directory / ADAPTER_WEIGHTS, metadata=metadata)
    save_config(model, directory)
    tokenizer.save_pretrained(directory)
