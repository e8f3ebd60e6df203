"""What runs inside vLLM's workers: an extension of their class, called by name with plain strings.

vLLM takes new weights through `reload_weights`, which copies them into the parameters that its kernels know and, on
CPUs, packs them again. It packs only what was loaded: a head tied to the embeddings is not loaded and would keep the
old weights, so embeddings and heads are packed once more afterwards. Experts are packed only while their kernel is
made, so on CPUs each reload begins without one.

vLLM's second model runner draws as draws.py says. The first one, of CPUs and of models that the second cannot run yet,
draws from generators that nobody else can follow, and is made to draw so too.

A worker ends with the engine's process, however that ended: vLLM's own processes would wait for its calls for ever.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from math import prod
from typing import Any

import msgspec
import torch
from vllm import _custom_ops
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from swarm.broadcast.version.manifest import LORA_A, LORA_B, Layout, TensorSpec, by_expert
from swarm.models.device import TORCH_DTYPES
from swarm.models.draws import gumbel
from swarm.sampler.room import is_rounded
from swarm.sampler.vllm.rounding import loaded
from swarm.sampler.vllm.versions import ENGINE_PID_VARIABLE
from swarm.sampler.weights import changed_items, items_at, mapped_tensors, put_items, sum_of_counts, sum_of_items
from swarm.types import Rounding

EXPERTS = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}  # vLLM's names of grouped experts, and transformers'
WRAPPED = ".base_layer"  # Ends the path of a layer that vLLM gave room for adapters
SUM_BLOCK_ITEMS = 1 << 24  # Items counted at a time: bincount takes 8 bytes for each on the device, next to the model


class EchoWorker:
    """The calls. Their names must differ from those of vLLM's own workers."""

    def echo_reload(self, path: str, layout: bytes, precision: Rounding = "none") -> str:
        """Take the weights of the file, matrices rounded to `precision`. Return "", or why the model did not take all
        of them. Only plain values travel, so the answer is a string."""
        worker: Any = self
        model = worker.model_runner.get_model()
        taken = set[str]()
        load_weights = model.load_weights

        def noting(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            taken.update(name.replace(WRAPPED, "") for name in load_weights(weights))
            return taken

        model.load_weights = noting
        self.echo_unmake_kernels(model)
        try:
            worker.reload_weights(weights_iterator=_named(path, msgspec.json.decode(layout, type=Layout), precision))
        finally:
            del model.load_weights
        self.echo_pack_embeddings(model)
        # Kernels of rounded matrices hold more than they were given.
        own = {name.rpartition(".")[0] for name in taken if name.endswith(".weight_scale")}
        held = (name.replace(WRAPPED, "") for name, _ in model.named_parameters())
        missing = sorted(name for name in held if name not in taken and name.rpartition(".")[0] not in own)
        return f"{missing[0]} and {len(missing) - 1} more were not taken" if missing else ""

    def echo_change(self, path: str, changed: str, layout: bytes, growth: bytes) -> str:
        """Take only the words that changed, as the file `changed` says, if this worker holds all of these tensors as
        the stream has them. By how much each tensor's sum grows (JSON, in layout order) proves that, order included,
        before anything is written: what is held at these places counts. Return "", or why nothing was taken."""
        worker: Any = self
        known = msgspec.json.decode(layout, type=Layout)
        held = _as_streamed(worker.model_runner.get_model(), known, worker.rank)
        left = msgspec.json.decode(growth, type=list[int])
        for index, spec, at, items in changed_items(path, changed, known):
            if not held.get(spec.name):
                return f"{spec.name} has another form"
            for flat in held[spec.name][:1]:
                left[index] -= sum_of_items(items) - sum_of_items(items_at(flat, at).to(items.dtype))
        if wrong := [spec.name for spec, rest in zip(known.tensors, left, strict=True) if rest % 2**64]:
            return f"{wrong[0]} would not be what was signed"
        for _, spec, at, items in changed_items(path, changed, known):
            for flat in (one for name in (spec.name, *spec.aliases) for one in held.get(name, ())):
                put_items(flat, at, items)
                if sum_of_items(items_at(flat, at).to(items.dtype)) != sum_of_items(items):
                    raise RuntimeError(f"{spec.name} does not hold what was written to it")
        self.echo_pack_embeddings(worker.model_runner.get_model())
        return ""

    def echo_seed_draws(self) -> None:
        """Let every draw follow from the seed of its sample, the position and the token alone."""
        worker: Any = self
        runner = worker.model_runner
        if hasattr(runner.sampler, "topk_topp_sampler"):
            runner.sampler.topk_topp_sampler.forward = partial(_draw, runner)

    def echo_unmake_kernels(self, model: Any) -> None:
        for module in model.modules():
            # On GPUs captured graphs use the kernel, and every reload puts the weights into its form.
            if isinstance(module, RoutedExperts) and module.w13_weight.device.type == "cpu":
                module.quant_method.moe_kernel = None

    def echo_pack_embeddings(self, model: Any) -> None:
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)

    def echo_adapter(self, path: str, layout: bytes, number: int) -> str:
        """Return "" if this worker holds under the id `number` the adapter in the file, bit for bit, or how not."""
        worker: Any = self
        manager, known = worker.model_runner.lora_manager._adapter_manager, msgspec.json.decode(layout, type=Layout)
        assert known.adapter is not None
        dtype, scale = manager.lora_config.lora_dtype, known.adapter.alpha / known.adapter.rank
        given = {spec.name: tensor.to(dtype) for spec, tensor in mapped_tensors(path, known) if not spec.frozen}
        slot = manager.lora_index_to_id.index(number)
        for name, layer in manager.modules.items():
            parts = manager.packed_modules.get(name, [name])
            a = [given.pop(part + LORA_A, None) for part in parts]
            b = [None if (one := given.pop(part + LORA_B, None)) is None else one * scale for part in parts]
            if layer.tp_size > 1 and any(one is not None for one in a):
                cut_a, cut_b = (layer.slice_lora_a, a), (layer.slice_lora_b, b)
                a, b = (cut(all_of) if len(parts) > 1 else [cut(all_of[0])] for cut, all_of in (cut_a, cut_b))
            for stacked, matrix in zip((*layer.lora_a_stacked, *layer.lora_b_stacked), (*a, *b), strict=True):
                wanted = torch.zeros_like(stacked[slot, 0])
                if matrix is not None:
                    wanted[: matrix.shape[0], : matrix.shape[1]] = matrix
                if not torch.equal(stacked[slot, 0], wanted):
                    return f"the adapter of {name} differs from what the learner signed"
        return f"{next(iter(given))} and {len(given) - 1} more have no place in it" if given else ""

    def echo_sums(self, layout: bytes) -> bytes:
        """Return as JSON, by stream name, the sum of the part of each tensor that this worker counts: its shard, or the
        whole tensor if it is the first of several workers that hold it. Summed over all workers modulo 2^64 they are
        `tensor_sum`. A missing tensor has another form in this worker."""
        worker: Any = self
        model, known = worker.model_runner.get_model(), msgspec.json.decode(layout, type=Layout)
        sums: dict[str, int] = {}
        for name, spec, part, counted in _pieces(model, known, worker.rank):
            if name == spec.name:
                sums[name] = _sum(part, TORCH_DTYPES[spec.dtype]) if counted else 0
        return msgspec.json.encode(sums)


def _as_streamed(model: Any, layout: Layout, rank: int) -> dict[str, list[torch.Tensor]]:
    """Return by stream name the tensors that are held whole and as the stream has them, flat. Several modules may hold
    one, each in memory of its own."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, spec, part, _ in _pieces(model, layout, rank):
        if part.numel() == prod(spec.shape) and part.is_contiguous():
            found.setdefault(name, []).append(part.detach().view(-1))
    return found


def _pieces(model: Any, layout: Layout, rank: int) -> Iterator[tuple[str, TensorSpec, torch.Tensor, bool]]:
    """Yield the tensors of the stream, or their shards, that a worker holds exactly: by which of its names, the tensor,
    the piece, and whether this worker counts it."""
    specs = {name: spec for spec in layout.tensors for name in (spec.name, *spec.aliases)}
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            for name, part, counted in _parts(module, path.removesuffix(WRAPPED), own, parameter, fused, rank):
                spec = specs.get(name)
                if spec is not None and _is_whole(part, spec, module):
                    yield name, spec, part, counted


def _draw(runner: Any, logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token of each row and all log-probs. Leases know no top-k and no top-p, and `logits` are already divided
    by the temperature. Rows that are greedy, probes among them, are replaced by the caller."""
    requests = [runner.requests[name] for name in runner.input_batch.req_ids]
    seeds = torch.tensor([request.sampling_params.seed or 0 for request in requests], device=logits.device)
    positions = torch.tensor([request.num_tokens - 1 for request in requests], device=logits.device)
    drawn = (logits + gumbel(seeds, positions, logits.shape[1])).argmax(dim=-1)
    return drawn, logits.log_softmax(dim=-1, dtype=torch.float32)


def _named(path: str, layout: Layout, precision: Rounding = "none") -> Iterator[tuple[str, torch.Tensor]]:
    for spec, tensor in mapped_tensors(path, by_expert(layout)):
        if spec.name.endswith((LORA_A, LORA_B)):
            continue
        if precision != "none" and is_rounded(spec):
            yield from loaded(spec.name, tensor, precision).items()
        else:
            yield spec.name, tensor


def _parts(
    module: Any, path: str, name: str, parameter: torch.Tensor, fused: dict[str, list[str]], rank: int
) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield the pieces of a parameter that are tensors of the stream or their shards: the name, the piece, and whether
    the worker of this rank counts it."""
    size = getattr(module, "tp_size", 1)
    parent, _, own = path.rpartition(".")
    if isinstance(module, VocabParallelEmbedding):
        # The rows after these only pad the vocabulary to a round number.
        yield f"{path}.{name}", parameter[: module.shard_indices.num_org_elements], size > 1 or rank == 0
    elif isinstance(module, MergedColumnParallelLinear | QKVParallelLinear) and own in fused:
        extents = [extent // size for extent in module.output_sizes]
        # Freed, or in a form of the kernel's own.
        if parameter.dim() == 0 or parameter.shape[0] != sum(extents):
            return
        rows = parameter.split(extents)
        replicas = getattr(module, "num_kv_head_replicas", 1)
        for i, (piece, part) in enumerate(zip(fused[own], rows, strict=True)):
            # If there are fewer key-value heads than workers, several workers hold the same ones.
            counted = (size > 1 or rank == 0) and (i == 0 or rank % replicas == 0)
            yield f"{parent}.{piece}.{name}" if parent else f"{piece}.{name}", part, counted
    elif isinstance(module, RoutedExperts) and name in EXPERTS:
        # Some rows of all experts, or all rows of some: together the workers hold each item once.
        yield f"{parent}.{EXPERTS[name]}", parameter, True
    else:
        # All ranks hold the same norms, and the same biases that are added after the ranks' shares are summed.
        split = isinstance(module, ColumnParallelLinear) or (isinstance(module, RowParallelLinear) and name == "weight")
        yield f"{path}.{name}" if path else name, parameter, (split and size > 1) or rank == 0


def _is_whole(part: torch.Tensor, spec: TensorSpec, module: Any) -> bool:
    """Return whether `part` can be the tensor or its shard: not freed, not padded, not in a dtype that rounds it."""
    items = spec.nbytes // TORCH_DTYPES[spec.dtype].itemsize
    exact = part.dtype in (TORCH_DTYPES[spec.dtype], torch.float32)
    if isinstance(module, VocabParallelEmbedding):
        # With a small vocabulary a late worker may hold only padding.
        return exact and part.shape == (module.shard_indices.num_org_elements, *spec.shape[1:])
    if isinstance(module, RoutedExperts):
        parallel = module.moe_config.moe_parallel_config
        return exact and part.numel() * parallel.tp_size * parallel.ep_size == items
    size = getattr(module, "tp_size", 1)
    replicas = getattr(module, "num_kv_head_replicas", 1)
    return exact and part.numel() > 0 and part.numel() in (items, items // size, items * replicas // size)


def _sum(part: torch.Tensor, dtype: torch.dtype) -> int:
    """Return `tensor_sum` of the items as the stream has them, counted where they are stored."""
    total = 0
    flat = part.detach().reshape(-1)
    for start in range(0, flat.numel(), SUM_BLOCK_ITEMS):
        block = flat[start : start + SUM_BLOCK_ITEMS].to(dtype)
        words = block.view(torch.int16).to(torch.int32) & 0xFFFF
        total += sum_of_counts(torch.bincount(words, minlength=1 << 16).cpu().numpy().astype("uint64"))
    return total % (1 << 64)


def _keep_scales(make: Any, weight: torch.Tensor, scales: torch.Tensor, *rest: Any) -> Any:
    kernel = make(weight, scales, *rest)
    kernel.echo_scales = scales
    return kernel


# A kernel of oneDNN reads its scales where they lay when it was made, and a reload frees them there.
_custom_ops.create_onednn_scaled_mm = partial(_keep_scales, _custom_ops.create_onednn_scaled_mm)


def _end_with_engine(engine_pid: int) -> None:
    """Wait for the engine's process to end, then end the vLLM process that started this one, and this one."""
    starter = os.getppid()
    try:
        engine = os.pidfd_open(engine_pid)
    except ProcessLookupError:
        os._exit(0)
    select.select([engine], [], [])
    # The engine started the core, and the core this worker; with one worker the two may be the same process.
    if starter not in (engine_pid, 1) and os.getppid() == starter:
        os.kill(starter, signal.SIGKILL)
    os._exit(0)


def _watch_engine() -> None:
    engine_pid = os.environ.get(ENGINE_PID_VARIABLE)
    if engine_pid is not None and int(engine_pid) != os.getpid():
        threading.Thread(target=_end_with_engine, args=(int(engine_pid),), daemon=True, name="engine").start()


_watch_engine()
