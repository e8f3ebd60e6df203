"""Adapters: low-rank matrices A and B beside the linear layers of a frozen model, by peft.

peft puts its layers into the model in place and names them itself. In the stream, in checkpoints and in what is
exported, the model's own weights have their own names, and an adapter's are NAME.lora_A.weight and NAME.lora_B.weight
(manifest.stream_name). B begins as zeros: version 0 is the model itself, and an adapter without B is none.

A model may be held in 4 bits (NF4, arXiv 2305.14314). What these stand for, in bf16, is what is computed with, what is
published, and what the base's digest is of.
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
from swarm.learner.checkpoint.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_metadata, name_in_adapter
from swarm.learner.policy import Policy, TokenFigures
from swarm.types import BasePrecision
from swarm.wire import Digest

NEEDS_PEFT = f"this run trains an adapter, which takes the package peft: {how_to_have('adapter')}"
ALPHA = 2.0  # Of a rank: alpha / rank scales the adapter, so it is the same at every rank
NF4_BLOCK = 64  # Numbers of a matrix that share a scale, as QLoRA has it and transformers by default
OF_ADAPTER = re.compile(r"\.lora_[AB](?=\.weight$)")  # In the stream
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def targets_of(model: Any) -> list[str]:
    """What names the linear layers, which get an adapter; never the head, which is often the embedding. The last parts
    of their names if these name no others. UserError if there are none."""
    found = linear_layers(model)
    if not found:
        raise UserError("this model has no linear layers of torch's beside its head, so it can have no adapter")
    short = {name.rpartition(".")[2] for name in found}
    meant = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in short]
    return sorted(short) if meant == found else found


def linear_layers(model: Any) -> list[str]:
    head = model.get_output_embeddings()
    return [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head]


def add_matrices(model: Any, targets: Sequence[str], *, rank: int, alpha: float) -> None:
    """Give the layers `targets` matrices of `rank`, of the dtype of the layer, and freeze all else. UserError without
    peft, ValueError for layers that are not there."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(NEEDS_PEFT) from error
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), task_type="CAUSAL_LM")  # type: ignore[arg-type]
    inject_adapter_in_model(config, model)


def attach(model: Any, rank: int, alpha: float, *, name: str, seed: int) -> None:
    """Make `model` one that trains an adapter of `rank`, in float32, and freeze its own weights in bf16, as samplers
    hold them. `name` is the model's. The same seed gives the same adapter."""
    torch.manual_seed(seed)
    add_matrices(model, targets_of(model), rank=rank, alpha=alpha)
    model.peft_config["default"].base_model_name_or_path = name if is_hub_name(name) else None
    for parameter in model.parameters():
        if parameter.is_floating_point():  # Not what is packed
            parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else torch.bfloat16)


def shape_of_adapter(model: Any, base: Digest) -> AdapterShape:
    config = model.peft_config["default"]
    return AdapterShape(rank=config.r, alpha=float(config.lora_alpha), base=base)


def is_adapted(model: Any) -> bool:
    return hasattr(model, "peft_config")


def is_of_adapter(name: str) -> bool:
    """Whether a tensor of the stream is part of an adapter, if there is one."""
    return OF_ADAPTER.search(name) is not None


def module_name(name: str) -> str:
    """The name that a model has for what is trained of it, by its name in the stream."""
    return OF_ADAPTER.sub(lambda found: f"{found[0]}.default", name)


def is_hub_name(name: str) -> bool:
    """Whether others may know a model by this name: a path is this machine's."""
    return HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


class WithoutAdapter:
    """The policy as it began: with B as zeros it is the frozen model, and takes no memory beside it."""

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
    """Pack the linear layers of a bf16 model, all but the head, if they are to have 4 bits. It is on the CPU, whatever
    device it then goes to: so the same model gives the same bits. UserError without bitsandbytes."""
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
        # With scales that are rounded too (double quantisation) what was rounded once would not round to itself.
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
    """x Wᵀ with a packed W. It is unpacked in each pass and never kept: those of all layers would take what 4 bits
    save. bitsandbytes' own product has kernels that round otherwise than what is published."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return x @ as_published(weight).to(x.dtype).T

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        return gradients[0] @ as_published(ctx.weight).to(gradients[0].dtype), None


def shape_of_tensor(tensor: torch.Tensor) -> torch.Size:
    """Of the numbers that a tensor stands for, packed or not."""
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
    """Write adapter_config.json as peft reads it, the same for the same adapter: peft's own has sets in it."""
    values = model.peft_config["default"].to_dict() | {"inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}
    (directory / ADAPTER_CONFIG).write_text(json.dumps(plain, indent=2, sort_keys=True) + "\n")


def save_adapter(model: Any, tokenizer: Any, directory: Path, state: dict[str, torch.Tensor], base: str) -> None:
    """The bf16 tensors `state` of an adapter, by their names in the stream, as peft and vLLM load them; and the
    tokenizer."""
    tensors = {name_in_adapter(name): tensor.contiguous() for name, tensor in state.items()}
    metadata = adapter_metadata(base) | {"base_precision": getattr(model, "base_precision", "bf16")}
    save_file(tensors, directory / ADAPTER_WEIGHTS, metadata=metadata)
    save_config(model, directory)
    tokenizer.save_pretrained(directory)
