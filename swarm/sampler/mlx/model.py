"""A swarm's model as mlx-lm builds it: which of its parameters are which tensors of the stream, and what it holds.

mlx-lm has names and shapes of its own for some models. Its `sanitize` is called once on tensors that are never
computed: what comes out unchanged, under whatever name, is **direct** and travels one tensor at a time. The rest
(experts that are stacked, kernels that are transposed) is held back until it is complete. Only direct tensors can be
summed, so the rest is left to the audit. So can an adapter's, though held transposed: a sum has no order.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import mlx.core as mx
import torch
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import utils as mlx_lm
from mlx_lm.tuner.lora import LoRALinear

from swarm.broadcast.version.codec import tensor_sum
from swarm.broadcast.version.manifest import LORA_A, LORA_B, Layout, TensorSpec, by_expert
from swarm.errors import UserError
from swarm.sampler.engine import Told
from swarm.sampler.weights import mapped_tensors
from swarm.types import Rounding

BITS: dict[Rounding, int] = {"int8": 8, "int4": 4}
GROUP = 64  # Numbers of a row that share a scale and an offset: mlx-lm's default
OTHERWISE = "take --engine transformers, which draws whatever the learner trains"


class Rounded(NamedTuple):
    """How a matrix is rounded: groups of `group_size` numbers of a row, `bits` each."""

    group_size: int
    bits: int

    def round(self, matrix: Any) -> tuple[Any, Any, Any]:
        """Return the packed integers, the scales and the offsets."""
        packed, scales, offsets = mx.quantize(matrix, group_size=self.group_size, bits=self.bits)
        return packed, scales, offsets


class HeldModel:
    """The model that `config` (transformers' own) and `layout` describe, without weights. Building it computes nothing.
    Raise UserError if mlx-lm has no such model, or another one of the same name."""

    def __init__(self, config: Any, layout: Layout, dtype: Any, precision: Rounding) -> None:
        self.module = _build(config)
        self._layout = by_expert(layout)
        self._signed = [spec.name for spec in layout.tensors]
        self._own = [spec for spec in self._layout.tensors if spec.frozen or layout.adapter is None]
        self._dtype = dtype
        self._names, self._stacked = self._matched()
        self.module.set_dtype(dtype)
        if precision != "none":
            # Leaves out what rows of GROUP do not divide, and what the model's own rules except.
            mlx_lm.quantize_model(self.module, {}, GROUP, BITS[precision])
        self._adapt(layout)
        self._rounded = {
            path: Rounded(module.group_size, module.bits)
            for path, module in self.module.named_modules()
            if "scales" in module
        }
        if precision != "none" and not self._rounded:
            raise UserError(f"no matrix of this model has rows of {GROUP} numbers to be rounded: leave out --precision")

    @property
    def is_proven_by_itself(self) -> bool:
        """Whether `take` proves all that this holds."""
        return not self._stacked

    def _sent(self) -> dict[str, Any]:
        """A stand-in for each tensor, by all of its names. They are never computed, and take no memory."""
        return {
            name: mx.zeros(spec.shape, dtype=self._dtype) for spec in self._own for name in (spec.name, *spec.aliases)
        }

    def _sanitized(self, weights: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = self.module.sanitize(weights) if hasattr(self.module, "sanitize") else weights
        return made

    def _matched(self) -> tuple[dict[str, list[str]], dict[str, int]]:
        """Return the parameters that each tensor is, by any name of the tensor, and those that are made of several
        tensors or of a changed one, with the length of their rows."""
        sent = self._sent()
        own = {name: array.shape for name, array in tree_flatten(self.module.parameters())}
        aliased = {name for spec in self._own if spec.aliases for name in (spec.name, *spec.aliases)}
        # Of a tied tensor's names mlx-lm may know one: checkpoints have no other.
        made = {name: one for name, one in self._sanitized(dict(sent)).items() if name in own or name not in aliased}
        names: dict[str, list[str]] = {}
        signed = set(self._signed)
        for spec in self._own:
            # Matrices of single experts have no sums of their own.
            ids = {id(sent[name]) for name in (spec.name, *spec.aliases) if spec.name in signed}
            same = [name for name, array in made.items() if id(array) in ids]
            names.update((name, same) for name in (spec.name, *spec.aliases))
        direct = {name for own_names in names.values() for name in own_names}
        stacked = {name: (one.shape or (1,))[-1] for name, one in made.items() if name not in direct}
        for name in sorted(own.keys() | made.keys()):
            if name not in made or own.get(name) != made[name].shape:
                raise UserError(f"mlx-lm has another model of this name (its parameter {name} differs): {OTHERWISE}")
        return names, stacked

    def _adapt(self, layout: Layout) -> None:
        """Have mlx-lm's own layers with an adapter take the places of those that get one, which they hold. They are
        around what was rounded, and are not rounded themselves."""
        rank, scale = (one.rank, one.alpha / one.rank) if (one := layout.adapter) else (1, 1.0)
        wrapped = {}
        for name in layout.adapted:
            path = "".join(self._names[f"{name}.weight"]).removesuffix(".weight")
            linear = self._held(path) if path else None
            if not isinstance(linear, nn.Linear | nn.QuantizedLinear):
                raise UserError(f"mlx-lm holds {name} in a form of its own, which can have no adapter: {OTHERWISE}")
            wrapped[path] = LoRALinear.from_base(linear, r=rank, scale=scale)
            wrapped[path].apply(lambda held: held if held.dtype == mx.uint32 else held.astype(self._dtype))
            for kind in ("weight", "bias") if "bias" in linear else ("weight",):
                self._names[f"{name}.{kind}"] = [f"{path}.linear.{kind}"]
            self._names |= {f"{name}{LORA_A}": [f"{path}.lora_a"], f"{name}{LORA_B}": [f"{path}.lora_b"]}
        self.module.update_modules(tree_unflatten(list(wrapped.items())))

    def take(self, path: str, sums: tuple[int, ...], progress: Told, *, only_trained: bool = False) -> str | None:
        """Take the weights of the file in place, or `only_trained` ones, a tensor at a time, and prove each that is
        direct: by its signed sum, or, if it is rounded, by rounding it once more. Return what differs, or None."""
        signed = dict(zip(self._signed, sums, strict=True))
        kept: dict[str, Any] = {}
        for spec, tensor in mapped_tensors(path, self._layout):
            if only_trained and spec.frozen:
                continue
            array = _from_torch(tensor)
            direct = self._names[spec.name]
            if not direct:
                kept.update((name, array) for name in (spec.name, *spec.aliases))
            for name in direct:
                self._put(name, array)
                if not self._holds(name, spec, tensor, signed):
                    return f"after the install {spec.name} differs from what the learner signed"
            progress()
        if self._stacked and not only_trained:
            made = self._sanitized({**self._sent(), **kept})
            kept.clear()  # So that each is freed as soon as it is stacked
            for name in self._stacked:
                self._put(name, made.pop(name))
                progress()
        return None

    def _put(self, name: str, array: Any) -> None:
        path, _, kind = name.rpartition(".")
        array = array.astype(self._dtype) if mx.issubdtype(array.dtype, mx.floating) else array
        array = mx.contiguous(array.T) if kind in ("lora_a", "lora_b") else array
        pieces = [(name, array)]
        if path in self._rounded and kind == "weight":
            packed = self._rounded[path].round(array)
            pieces = [(f"{path}.{part}", one) for part, one in zip(PARTS, packed, strict=True)]
        self.module.load_weights(pieces, strict=False)
        mx.eval([one for _, one in pieces])

    def _holds(self, name: str, spec: TensorSpec, tensor: torch.Tensor, signed: dict[str, int]) -> bool:
        path, _, kind = name.rpartition(".")
        if path in self._rounded and kind == "weight":
            again = self._rounded[path].round(_from_torch(tensor).astype(self._dtype))
            held = [self._held(f"{path}.{part}") for part in PARTS]
            return all(bool(mx.array_equal(one, other)) for one, other in zip(held, again, strict=True))
        held = self._held(name)
        sent = held.astype(mx.bfloat16).view(mx.uint16) if mx.issubdtype(held.dtype, mx.floating) else held
        mx.eval(sent)
        return tensor_sum(memoryview(sent).cast("B")) == signed[spec.name]

    def _held(self, name: str) -> Any:
        found: Any = self.module
        for part in name.split("."):
            found = found[int(part)] if isinstance(found, list) else found[part]
        return found


PARTS = ("weight", "scales", "biases")  # Of a rounded matrix, by mlx's names


def _build(config: Any) -> Any:
    """Return mlx-lm's model. Where a file of transformers 5 has another name for a setting, or leaves out a default,
    mlx-lm would fail or assume one of its own: it is given what transformers takes."""
    try:
        model, arguments = mlx_lm._get_classes(config.to_dict())
        settings = {one.name: getattr(config, one.name) for one in fields(arguments) if hasattr(config, one.name)}
        return model(arguments.from_dict({**config.to_dict(), **settings, **_rope(config)}))
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
        said = str(error).strip().partition("\n")[0][:200]
        raise UserError(f"mlx-lm cannot build the swarm's model ({said}): {OTHERWISE}") from error


def _rope(config: Any) -> dict[str, Any]:
    """Return what transformers 5 has in `rope_parameters`, for all layers or by their kind, under its older names."""
    given = getattr(config, "rope_parameters", None)
    if not given:
        return {}
    every = given.get("full_attention", given)
    found = {"rope_scaling": None if every.get("rope_type", "default") == "default" else every}
    for name, kind in (("rope_theta", every), ("rope_local_base_freq", given.get("sliding_attention", {}))):
        if "rope_theta" in kind:
            found[name] = kind["rope_theta"]
    return found


def _from_torch(tensor: torch.Tensor) -> Any:
    """Copy a tensor. bfloat16 travels as its bits, since the buffers that both know have none."""
    if tensor.dtype == torch.bfloat16:
        return mx.array(tensor.view(torch.int16).numpy()).view(mx.bfloat16)
    return mx.array(tensor.numpy())
