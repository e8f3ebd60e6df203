"""What a learner's small files may make of a sampler's machine: nothing but the model that its layout describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.broadcast.version.manifest import Layout, ModelFile
from swarm.errors import ProtocolError, UserError
from swarm.process import clean_environment
from swarm.sampler.weights import (
    CONFIG_BYTES,
    WrongWeights,
    build_model,
    without_code,
    write_model_files,
)
from tests.builders import layout
from tests.unit.models import Staged, stage


@pytest.fixture
def staged(tmp_path: Path) -> Staged:
    return stage(tmp_path)


def changed(staged: Staged, **changes: Any) -> str:
    """The directory of a model whose configuration says something else."""
    path = staged.files_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return str(staged.files_dir)


def test_a_configuration_loses_what_names_code_at_any_depth() -> None:
    named = {"auto_map": {"AutoConfig": "evil.C"}, "attn_implementation": "evil/kernel", "hidden_size": 64}
    kept = json.loads(without_code(json.dumps({**named, "text_config": named, "list": [named]}).encode()))
    assert kept == {"hidden_size": 64, "text_config": {"hidden_size": 64}, "list": [{"hidden_size": 64}]}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (b"{", "is no JSON"),
        (b"\xff", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"[1]", "is no object"),
        (b'{"a": "' + b"a" * CONFIG_BYTES + b'"}', "over 1048576"),
    ],
    ids=["cut", "no text", "deep", "a list", "long"],
)
def test_a_configuration_that_makes_no_sense_is_refused_before_it_is_written(
    tmp_path: Path, config: bytes, why: str
) -> None:
    files = [ModelFile(name="config.json", content=config)]
    with pytest.raises(ProtocolError, match=why):
        write_model_files(tmp_path / "model", layout(("w", "U8", (1,)), files=files))
    assert not (tmp_path / "model").exists()


def test_a_model_that_only_its_own_code_could_build_is_refused_with_what_to_do(staged: Staged) -> None:
    directory = changed(staged, model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    (staged.files_dir / "evil.py").write_text("open('ran', 'w')")
    with pytest.raises(UserError, match="a sampler runs no code that comes with one: join with the learner's release"):
        build_model(directory, staged.layout, torch.float32)


def test_a_configuration_larger_than_the_layout_takes_no_memory(staged: Staged) -> None:
    directory = changed(staged, vocab_size=1 << 40)
    with pytest.raises(WrongWeights):
        build_model(directory, staged.layout, torch.float32)


def test_an_environment_keeps_settings_and_no_secret() -> None:
    given = {"PATH": "/bin", "HF_TOKEN": "x", "AWS_SECRET": "x", "VLLM_A": "1", "VLLM_API_KEY": "x", "CUDA_KEY": "x"}
    assert {*clean_environment(given, ("VLLM_", "CUDA"))} == {"PATH", "VLLM_A", "PYTHONPATH"}
    assert {*clean_environment(given)} == {"PATH", "PYTHONPATH"}


def test_a_layout_without_a_configuration_is_written_as_it_is(tmp_path: Path) -> None:
    given: Layout = layout(("w", "U8", (1,)), files=[ModelFile(name="tokenizer.json", content=b"{}")])
    write_model_files(tmp_path / "model", given)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["tokenizer.json"]
