"""Model files: loading a model, saving it for other programs, and the layout of its weights in the stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from os import SEEK_CUR
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from huggingface_hub.utils.tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from swarm.broadcast.version.manifest import ITEM_BYTES, AdapterShape, Layout, ModelFile, TensorSpec, stream_name
from swarm.errors import UserError
from swarm.learner.adapter import as_published, is_adapted, is_of_adapter, module_name, save_config, shape_of_tensor
from swarm.learner.checkpoint.files import in_stream_dtype
from swarm.learner.tiny import tiny_model, tiny_tokenizer, warm_model
from swarm.models.device import TORCH_DTYPES, as_streamed, stream_dtype
from swarm.settings import TINY, TINY_WARM
from swarm.wire import Digest

FILE_ENDINGS = (".json", ".txt", ".model", ".jinja")  # Of configuration and tokenizer; weights are in the stream
FETCHING_LINE_S = 5.0  # Between two lines about a file that is fetched
FETCHING_BYTES = 50_000_000  # Smallest file that is reported: others are fetched in a moment


class _Fetching(tqdm):
    """Reports a file that is fetched from the hub. A progress bar would go to a log file, so `tell` gets lines
    instead."""

    tell: Callable[[str], None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # tqdm disables itself where the output is a log file, and then would not call `display`.
        super().__init__(*args, **{**kwargs, "disable": False, "mininterval": FETCHING_LINE_S})

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self.total and self.total >= FETCHING_BYTES and self.n < self.total:
            name = self.desc.rpartition("/")[2]
            self.tell(f"fetching {name}: {self.n / 1e6:,.0f} of {self.total / 1e6:,.0f} MB")


def load_model(
    name: str,
    seed: int,
    made_in: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, Any]:
    """Model and tokenizer of a directory, a Hugging Face id (in `dtype`), "tiny" or "tiny-warm" (in float32). UserError
    if there is no such model. "tiny-warm" is trained here and cached in `made_in`. `tell` gets lines about a model that
    is fetched."""
    if name == TINY:
        return tiny_model(seed), tiny_tokenizer()
    if name == TINY_WARM:
        return warm_model(seed, made_in), tiny_tokenizer()
    try:
        bar = type("Fetching", (_Fetching,), {"tell": staticmethod(tell)})
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, tqdm_class=bar)
        _make_writable(model)
        return model, AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        line = str(error).strip().splitlines()[0]
        raise UserError(f"the model {name!r} cannot be loaded: {line}") from error


def _make_writable(model: Any) -> None:
    """Repair a generation config that transformers reads but refuses to write: older models have a temperature but not
    do_sample. If that is not enough, keep only the tokens that end a text."""
    found = model.generation_config
    if found is None or _can_be_written(found):
        return
    found.do_sample = True
    if not _can_be_written(found):
        ends = {name: getattr(found, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model.generation_config = GenerationConfig(**ends)


def _can_be_written(generation: GenerationConfig) -> bool:
    try:
        generation.validate(strict=True)
    except ValueError:
        return False
    return True


def save_model(model: Any, tokenizer: Any, directory: Path, state: dict[str, torch.Tensor]) -> None:
    """Save the bf16 tensors `state`, by the names of `model`, with its configuration and tokenizer, in Hugging Face's
    format. Tied tensors are in `state` once. `model` may be in training: none of its tensors is read."""
    model.save_pretrained(directory, state_dict=state)
    # save_pretrained has written the dtype of the model in memory.
    config = directory / "config.json"
    config.write_bytes(in_stream_dtype(config.name, config.read_bytes()))
    tokenizer.save_pretrained(directory)


def save_small_files(model: Any, tokenizer: Any, directory: Path) -> tuple[ModelFile, ...]:
    """Write configuration and tokenizer to `directory`. Return the same files, for the layout."""
    directory.mkdir(parents=True, exist_ok=True)
    # A model made from scratch has no architectures, and vLLM needs them to know that a model generates.
    model.config.architectures = model.config.architectures or [type(model).__name__]
    model.config.save_pretrained(directory)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if is_adapted(model):
        save_config(model, directory)
    names = sorted(p.name for p in directory.iterdir() if p.suffix in FILE_ENDINGS)
    return tuple(ModelFile(name=name, content=(directory / name).read_bytes()) for name in names)


def stream_tensors(model: Any) -> dict[TensorSpec, torch.Tensor]:
    """The tensors of the stream, in its order: by dtype, then an adapter's last, then in the model's own order. Tied
    tensors are in it once. Wide dtypes come first, so that every tensor begins at a multiple of its item size and can
    be viewed in place."""
    aliases: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    first: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
    adapted = is_adapted(model)
    for held_as, tensor in model.state_dict(keep_vars=True).items():
        name = stream_name(held_as) if adapted else held_as
        # A sharded tensor has no address, but tied ones are the same object.
        key = (tensor.data_ptr() or id(tensor), tuple(tensor.shape))
        aliases.setdefault(key, []).append(name)
        first.setdefault(key, tensor)
    specs = {
        TensorSpec(
            name=aliases[key][0],
            dtype=stream_dtype(tensor) if shape_of_tensor(tensor) == tensor.shape else "BF16",
            shape=tuple(shape_of_tensor(tensor)),
            aliases=tuple(aliases[key][1:]),
            frozen=adapted and not is_of_adapter(aliases[key][0]),
        ): tensor
        for key, tensor in first.items()
    }
    order = [(-ITEM_BYTES[spec.dtype], not spec.frozen, spec.dtype) for spec in specs]
    return {spec: specs[spec] for _, spec in sorted(zip(order, specs, strict=True), key=lambda pair: pair[0])}


def layout_of(
    tensors: dict[TensorSpec, torch.Tensor], files: tuple[ModelFile, ...], adapter: AdapterShape | None = None
) -> Layout:
    return Layout(tensors=tuple(tensors), files=files, adapter=adapter)


def digest_of_weights(model: Any) -> Digest:
    """The digest of a model's weights as they are in the stream, without its adapter."""
    found = blake3(max_threads=blake3.AUTO)
    own = [pair for pair in stream_tensors(model).items() if pair[0].frozen or not is_adapted(model)]
    for spec, tensor in own:
        flat = as_published(tensor).detach().to("cpu", TORCH_DTYPES[spec.dtype]).contiguous().reshape(-1)
        found.update(flat.view(torch.uint8).numpy().data)
    return Digest(found.digest())


@torch.no_grad()
def write_staging(tensors: dict[TensorSpec, torch.Tensor], path: Path, *, only_trained: bool = False) -> None:
    """Cast to bf16 and write, tensor by tensor: so there is no second copy of the model in memory, and no map, whose
    pages would count as this process's. `only_trained`: the file already has the frozen tensors."""
    path.touch()
    with path.open("r+b") as file:
        for spec, own in tensors.items():
            if only_trained and spec.frozen:
                file.seek(spec.nbytes, SEEK_CUR)
            else:
                file.write(streamed_bytes(as_published(own)))


def streamed_bytes(tensor: torch.Tensor, first: int = 0) -> memoryview:
    """The bytes of a tensor in the stream, or of the part of it that begins at item `first`."""
    # Cast on the device: half as many bytes cross the bus.
    return as_streamed(tensor, first).cpu().reshape(-1).view(torch.uint8).numpy().data


def stored_weights(tensors: dict[TensorSpec, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """The trained weights that were staged to `path`, with device and dtype of `tensors`, by the names of
    policy.PolicyModel, so that it can be called with them. FileNotFoundError if there is no such file."""
    return {
        f"model.{module_name(spec.name)}": kept.to(tensors[spec].device).to(tensors[spec].dtype)
        for spec, kept in read_stored(tensors, path)
    }


def read_stored(specs: Iterable[TensorSpec], path: Path) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Yield the trained tensors that were staged to `path`, one at a time. FileNotFoundError if there is no such
    file."""
    with path.open("rb") as file:
        for spec in specs:
            if spec.frozen:
                file.seek(spec.nbytes, SEEK_CUR)
                continue
            kept = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
            file.readinto(kept.view(-1).view(torch.uint8).numpy().data)
            yield spec, kept
