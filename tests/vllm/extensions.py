"""Workers that go wrong, or that keep what vLLM frees on CPUs. Loaded by name in vLLM's processes."""

from __future__ import annotations

import os
import signal
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers import utils

from swarm.sampler.vllm import extension, rounding
from swarm.sampler.vllm.extension import EchoWorker
from swarm.types import Rounding


class OldHead(EchoWorker):
    """Without the cure: a tied head goes on with the weights that were packed before."""

    def echo_pack_embeddings(self, model: Any) -> None: ...


class Blind(EchoWorker):
    """From version 0.90 on says that it holds whatever adapter it was to load."""

    def echo_adapter(self, path: str, layout: bytes, number: int) -> str:
        return "" if int(path.rpartition(".")[2]) >= 90 else super().echo_adapter(path, layout, number)


class Deaf(EchoWorker):
    """Holds adapters and draws as if there were none."""

    def echo_seed_draws(self) -> None:
        super().echo_seed_draws()
        worker: Any = self
        for module in worker.model_runner.get_model().modules():
            if (wrapper := getattr(module, "punica_wrapper", None)) is not None:
                wrapper.add_lora_linear = lambda output, *rest, **more: None


class Dying(EchoWorker):
    """Dies in the middle of the swap to version 0.1."""

    def echo_reload(self, path: str, layout: bytes, precision: Rounding = "none") -> str:
        if path.endswith(".0.1"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().echo_reload(path, layout, precision)


def _keep_weights(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


class Flipping(EchoWorker):
    """Keeps the weights of all layers as they came, as GPUs do; after the swap to version 0.2 one bit is another."""

    def echo_reload(self, path: str, layout: bytes, precision: Rounding = "none") -> str:
        why = super().echo_reload(path, layout, precision)
        if path.endswith(".0.2"):
            worker: Any = self
            weight = worker.model_runner.get_model().get_parameter("model.layers.1.self_attn.qkv_proj.weight")
            # The lowest bit that bf16 has, in the middle of the keys.
            weight.data.view(torch.int32)[160, 7] ^= 1 << 16
        return why


class FlippingExpert(EchoWorker):
    """After the swap to version 0.2 one bit of one expert is another."""

    def echo_reload(self, path: str, layout: bytes, precision: Rounding = "none") -> str:
        why = super().echo_reload(path, layout, precision)
        if path.endswith(".0.2"):
            worker: Any = self
            experts = worker.model_runner.get_model().get_submodule("model.layers.1.mlp.experts.routed_experts")
            experts.w13_weight.data.view(torch.int32)[3, 20, 7] ^= 1 << 16
        return why


class Refusing(EchoWorker):
    """Fails at version 0.1, as a loader does for a tensor that it does not know."""

    def echo_reload(self, path: str, layout: bytes, precision: Rounding = "none") -> str:
        if path.endswith(".0.1"):
            raise KeyError("no such tensor")
        return super().echo_reload(path, layout, precision)


class StaleMatrices(EchoWorker):
    """Goes on with the rounded matrices of its first version; the rest it takes."""

    first: ClassVar[dict[str, dict[str, torch.Tensor]]] = {}

    def echo_reload(self, path: str, layout: bytes, precision: Rounding = "none") -> str:
        stale = lambda name, *rest: self.first.setdefault(name, rounding.loaded(name, *rest))  # noqa: E731
        vars(extension)["loaded"] = stale
        return super().echo_reload(path, layout, precision)


if os.environ.get("ECHO_NODE_TEST_KEEP_WEIGHTS"):
    utils.dispatch_cpu_unquantized_gemm = _keep_weights
