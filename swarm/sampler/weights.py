"""A model as it came from a learner: its small files, a model built after them, its weights as a file.

Nothing here believes the learner. What a file may configure is built without memory first.

torch is imported only when it is needed: the node, which does without it, uses this module too.
"""

from __future__ import annotations

import json
import mmap
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.broadcast.store.changes import changed_places
from swarm.broadcast.version.codec import MIX, tensor_sum
from swarm.broadcast.version.manifest import Layout, TensorSpec, stream_name, tensor_spans
from swarm.errors import EchoError, ProtocolError, UserError

if TYPE_CHECKING:
    import torch


CONFIG = "config.json"
READ = (CONFIG, "tokenizer.json")  # Of a model's small files
CONFIG_BYTES = 1 << 20  # The largest known, with the names of 20,000 classes, is under 1 MB
MAX_PARTS = 1024  # Layers, or experts of one. Modules and lists are made for each, also where no weights are

OBJECTS = frozenset((
    "text_config", "vision_config", "audio_config", "encoder_config", "decoder_config", "global_config",
    "patcher_config", "attn_config", "ffn_config", "ffn_act_fn", "per_layer_config", "compress_rates",
    "rope_parameters", "rope_scaling", "full_attention", "sliding_attention", "chunked_attention",
    "linear_attention", "hybrid", "hybrid_sliding", "main", "compress",
))  # fmt: skip
WORDS = frozenset((
    "model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "type", "rope_type", "name",
    "hidden_act", "hidden_activation", "activation", "activation_function", "afn", "ff_activation",
    "mlp_hidden_act", "conv_activation", "nemo_activation", "hidden_mamba_act", "mamba_hidden_act", "layer_types",
    "layers_block_type", "block_types", "mlp_layer_types", "indexer_types", "attention_layers", "attention_types",
    "attention_type", "attn_layers", "attn_type", "hybrid_override_pattern", "mtp_layers_block_type",
    "moe_layers_enum", "position_embedding_type", "norm_type", "scoring_func", "topk_method", "expert_selection_fn",
    "shared_expert_combination_strategy", "conv_glu_type", "use_bidirectional_attention", "time_step_init_scheme",
    "mamba_ssm_cache_dtype", "inference_state_dtype", "autocast_kernel_dtype", "mode", "weight_mode",
    "patching_mode", "vision_feature_select_strategy", "output_gate_type", "mamba_ssm_dtype", "gating", "dense_act_fn",
    "feed_forward_proj", "router_dtype",
))  # fmt: skip
"""Keys of a configuration that may have an object, and text. Any other may have numbers alone: by text a configuration
could name Python modules, kernels of a hub, or files, as `speculators_config` does to vLLM."""

WORD = re.compile(r"[A-Za-z0-9_.,+*|-]{1,1000}")  # No path and no name on a hub: those have a slash


class WrongWeights(EchoError):
    """The tensors of the model are not those of the swarm."""


def wrong_tensor(
    path: str, layout: Layout, sums: tuple[int, ...], progress: Callable[[], None], held: Sequence[int] = ()
) -> str | None:
    """Return what in the file at `path` differs from what was signed, or None. Blocking. It reads the whole file, so an
    engine then finds it in memory; but no frozen tensor that an engine holds, whose tensors have the sums `held`."""
    with open(path, "rb") as file:
        nbytes = file.seek(0, 2)
        if nbytes != layout.total_bytes:
            return f"the file has {nbytes} bytes instead of {layout.total_bytes}"
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as whole:
            for index, (tensor, span, expected) in enumerate(
                zip(layout.tensors, tensor_spans(layout), sums, strict=True)
            ):
                if tensor.frozen and held and held[index] == expected:
                    continue
                with whole[span.at] as part:
                    if tensor_sum(part) != expected:
                        return f"tensor {tensor.name} in the file is not the learner's"
                progress()
    return None


def sum_of_counts(counts: Any) -> int:
    """Return the `tensor_sum` of 16-bit words that occur `counts` times (65,536 of numpy's uint64): weights on a device
    are counted there."""
    return int((counts * MIX).sum(dtype=counts.dtype))


def mapped_tensors(path: str, layout: Layout) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Yield the file's tensors in layout order: views of one read-only map, to be copied and never kept."""
    from swarm.models.device import TORCH_DTYPES, mapped_file

    flat = mapped_file(path, layout.total_bytes)
    for spec, span in zip(layout.tensors, tensor_spans(layout), strict=True):
        yield spec, flat[span.at].view(TORCH_DTYPES[spec.dtype]).view(spec.shape)


def changed_items(
    path: str, changed: str, layout: Layout
) -> Iterator[tuple[int, TensorSpec, torch.Tensor, torch.Tensor]]:
    """Yield what may have changed in the file at `path`, as the file `changed` says: a tensor's index in the layout,
    what it is, the places of items in the flat tensor, and the items. Large tensors come several times."""
    import torch

    tensors = [(spec, flat.view(-1)) for spec, flat in mapped_tensors(path, layout)]
    for tensor, places in changed_places(changed, layout):
        spec, flat = tensors[tensor]
        at = torch.from_numpy(places)
        yield tensor, spec, at, items_at(flat, at)


def items_at(flat: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return `flat[at]`, where it lies. On CPUs numpy finds few items in half of torch's time."""
    if flat.device.type != "cpu":
        return flat[at.to(flat.device)]
    import torch

    return torch.from_numpy(_bits(flat)[at.numpy()]).view(flat.dtype)


def put_items(flat: torch.Tensor, at: torch.Tensor, items: torch.Tensor) -> None:
    """Do `flat[at] = items`, whatever the device and the dtype of the items."""
    given = items.to(device=flat.device, dtype=flat.dtype)
    if flat.device.type != "cpu":
        flat[at.to(flat.device)] = given
    else:
        _bits(flat)[at.numpy()] = _bits(given)


def _bits(flat: torch.Tensor) -> Any:
    """Return a numpy view of a flat tensor's bit patterns, since numpy knows no bf16."""
    import torch

    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.detach().view(sizes[flat.element_size()]).numpy()


def sum_of_items(items: torch.Tensor) -> int:
    """Return the `tensor_sum` of a few items, faster than that where they are fewer than there are words."""
    import torch

    raw = items.cpu().contiguous().view(torch.uint8).numpy()
    return int(MIX[raw.view("<u2")].sum(dtype=MIX.dtype)) if raw.size % 2 == 0 else tensor_sum(raw.data)


def planned_model(directory: str, layout: Layout, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the configuration in `directory` and its model, which takes no memory. Raise UserError if this release of
    transformers has no such model, and WrongWeights if the model has other tensors than the layout."""
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM, __version__

    untyped: Any = AutoModelForCausalLM
    try:
        config = AutoConfig.from_pretrained(Path(directory), trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            planned = _adapted(untyped.from_config(config, dtype=dtype, trust_remote_code=False), layout)
    except (ValueError, TypeError, KeyError, AttributeError, OSError, ImportError, StrictDataclassError) as error:
        raise UserError(
            f"transformers {__version__} here cannot build the swarm's model, and a sampler runs no code that comes "
            f"with one: join with the learner's release of it ({str(error).strip().partition(chr(10))[0][:200]})"
        ) from error
    planned.tie_weights()
    check_coverage(own_tensors(planned, layout), layout)
    return config, planned


def build_model(directory: str, layout: Layout, dtype: torch.dtype) -> Any:
    """Return the model that `directory` configures, without weights. Raise as `planned_model` does."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    untyped: Any = AutoModelForCausalLM
    config, _ = planned_model(directory, layout, dtype)
    with no_init_weights():
        model = _adapted(untyped.from_config(config, dtype=dtype, trust_remote_code=False), layout)
    # Only from_pretrained ties the embeddings by itself; an untied head would keep random weights.
    model.tie_weights()
    return model


def _adapted(model: Any, layout: Layout) -> Any:
    """Give a model the adapter of a layout, if that has one. What is not the model's shows in `check_coverage`."""
    if layout.adapter is not None:
        from swarm.learner.adapter import add_matrices

        add_matrices(model, layout.adapted, rank=layout.adapter.rank, alpha=layout.adapter.alpha)
    return model


def own_tensors(model: Any, layout: Layout) -> dict[str, torch.Tensor]:
    """Return the tensors of a model that `build_model` made, by their names in the stream."""
    found = model.state_dict()
    return found if layout.adapter is None else {stream_name(name): tensor for name, tensor in found.items()}


def write_model_files(directory: Path, layout: Layout) -> None:
    """Write those of the layout's files that an engine reads, and leave nothing else in `directory`. Raise
    ProtocolError if the configuration makes no sense. Blocking."""
    files = {file.name: file.content for file in layout.files if file.name in READ}
    if CONFIG in files:
        files[CONFIG] = only_known(files[CONFIG])
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)


def only_known(config: bytes) -> bytes:
    """Return a config.json with nothing but numbers, and known keys with objects and words. Raise ProtocolError if it
    is none, or has more layers or experts than MAX_PARTS."""
    if len(config) > CONFIG_BYTES:
        raise ProtocolError(f"the learner's {CONFIG} has {len(config)} bytes, over {CONFIG_BYTES}")
    try:
        found = json.loads(config, object_pairs_hook=lambda pairs: {k: v for k, v in pairs if _is_known(k, v)})
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the learner's {CONFIG} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ProtocolError(f"the learner's {CONFIG} is no object")
    return json.dumps(found).encode()


def _is_known(key: str, value: Any) -> bool:
    if key.endswith(("layer", "layers", "experts")) and isinstance(value, int) and value > MAX_PARTS:
        raise ProtocolError(f"the learner's {CONFIG} has {key} = {value}, over {MAX_PARTS}")
    if isinstance(value, list):
        return all(_is_known(key, one) for one in value)
    if isinstance(value, dict):
        return key in OBJECTS or key.isdecimal()  # Layers by number
    return not isinstance(value, str) or (key in WORDS and WORD.fullmatch(value) is not None)


def check_coverage(own: Mapping[str, torch.Tensor], layout: Layout) -> None:
    """Check that the stream carries exactly the model's tensors. Raise WrongWeights that names one that differs."""
    held = {name: tuple(tensor.shape) for name, tensor in own.items()}
    sent = {name: spec.shape for spec in layout.tensors for name in (spec.name, *spec.aliases)}
    for name in sorted(held.keys() | sent.keys()):
        if held.get(name) != sent.get(name):
            raise WrongWeights(
                f"tensor {name} has shape {held.get(name)} in this model and {sent.get(name)} in the swarm"
            )
