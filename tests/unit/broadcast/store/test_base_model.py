"""A local copy of the base model: files as the safetensors package writes them, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from swarm.broadcast.store.base_model import BaseModel, begin_from_base, find_base
from swarm.broadcast.store.weight_map import open_weights
from swarm.broadcast.version.manifest import ByteSpan, Layout, TensorSpec, tensor_spans
from swarm.errors import UserError
from tests.builders import MIXED_LAYOUT, v
from tests.publishers import Publisher, receiver_store

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64, "U8": torch.uint8}


def save(
    directory: Path, layout: Layout, content: bytes | bytearray, *, files: int = 1, frozen_only: bool = False
) -> Path:
    """The tensors of a stream in safetensors files, in turn."""
    directory.mkdir(exist_ok=True)
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(files)]
    for place, (tensor, span) in enumerate(zip(layout.tensors, tensor_spans(layout), strict=True)):
        if frozen_only and not tensor.frozen:
            continue
        flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)[span.at]
        parts[place % files][tensor.name] = flat.clone().view(DTYPES[tensor.dtype]).view(tensor.shape)
    for number, part in enumerate(parts):
        save_file(part, directory / f"model-{number}.safetensors")
    return directory


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    publisher = Publisher(tmp_path / "learner")
    publisher.publish(0)
    return publisher


@pytest.mark.parametrize("files", [1, 3])
def test_the_base_is_the_first_version_where_digests_match(publisher: Publisher, tmp_path: Path, files: int) -> None:
    content = bytearray(publisher.history[v(0)])
    version = publisher.published.store.versions()[0]
    whole = open_weights(receiver_store(tmp_path / "whole"))
    assert begin_from_base(BaseModel(save(tmp_path / "a", MIXED_LAYOUT, content, files=files)), whole, version) == 0
    assert whole.version == v(0)
    assert whole.path.read_bytes() == content
    content[70_000] ^= 1
    other = open_weights(receiver_store(tmp_path / "other"))
    base = BaseModel(save(tmp_path / "b", MIXED_LAYOUT, content, files=files))
    assert begin_from_base(base, other, version) == other.regions[1].nbytes
    assert other.lacking(version.table) == [1]
    assert other.version is None


def test_regions_over_empty_and_several_tensors_are_put_together(tmp_path: Path) -> None:
    names = (("a", (5,)), ("none", (0,)), ("b", (7,)), ("c", (3,)), ("last", (0,)))
    layout = Layout(tensors=tuple(TensorSpec(name=n, dtype="BF16", shape=shape) for n, shape in names), files=())
    content = bytes(range(30))
    base = BaseModel(save(tmp_path / "base", layout, content))
    spans = tensor_spans(layout)
    for start in range(30):
        for end in range(start + 1, 31):
            assert base.fill(layout, spans, ByteSpan(start=start, nbytes=end - start)) == content[start:end]


def test_tensors_under_another_name_shape_or_dtype_are_not_taken(publisher: Publisher, tmp_path: Path) -> None:
    base = BaseModel(save(tmp_path / "base", MIXED_LAYOUT, publisher.history[v(0)]))

    def filled(name: str, dtype: str, shape: tuple[int, ...], aliases: tuple[str, ...] = ()) -> bool:
        spec = TensorSpec(name=name, dtype=dtype, shape=shape, aliases=aliases)  # type: ignore[arg-type]
        layout = Layout(tensors=(spec,), files=())
        return base.fill(layout, tensor_spans(layout), ByteSpan(start=8, nbytes=16)) is not None

    assert filled("embed", "BF16", (700, 512))
    assert filled("lm_head", "BF16", (700, 512), aliases=("other", "embed"))
    assert not filled("lm_head", "BF16", (700, 512))
    assert not filled("embed", "F16", (700, 512))
    assert not filled("embed", "BF16", (512, 700))


def file_of(header: object) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"x" * 8


@pytest.mark.parametrize(
    "content",
    [
        b"",
        (100).to_bytes(8, "little") + b"{}",
        file_of([1, 2]),
        file_of({"w": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 9]}}),
    ],
)
def test_a_file_that_is_no_safetensors_is_said(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UserError, match=r"there is no .safetensors file in"):
        BaseModel(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="is no whole safetensors file"):
        BaseModel(tmp_path)


def test_a_model_is_found_by_path_and_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--some--model"
    snapshot = cached / "snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    assert find_base("some/model") == snapshot
    assert find_base(str(tmp_path)) == tmp_path
    for name in ("other/model", str(tmp_path / "nowhere")):
        with pytest.raises(UserError, match="neither a directory nor a model in the Hugging Face cache"):
            find_base(name)
