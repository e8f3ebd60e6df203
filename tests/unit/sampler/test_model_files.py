"""What a learner's small files may make of a sampler's machine: nothing but the model that its layout describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from swarm.broadcast.version.manifest import Layout, ModelFile
from swarm.errors import ProtocolError, UserError
from swarm.process import clean_environment
from swarm.sampler.weights import CONFIG_BYTES, WrongWeights, build_model, only_known, write_model_files
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


NAMED = {
    "speculators_config": {"verifier": {"name_or_path": "/home/alice"}, "algorithm": "eagle3"},
    "auto_map": {"AutoConfig": "evil.C"},
    "attn_implementation": "evil/kernel",
    "_name_or_path": "evil/model",
    "model_file": "evil.py",
    "adapters": ["/home/alice/adapter"],
    "a_later_release": [{"path": "evil"}],
    "hidden_act": "evil/kernel",
    "dtype": "C:\\evil",
}


def test_a_configuration_loses_what_could_name_code_or_files_at_any_depth_and_keeps_a_scaled_rope() -> None:
    rope = {"rope_theta": 1e4, "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1], "factor": 4}}
    known = {"hidden_size": 64, **rope}
    kept = json.loads(only_known(json.dumps({**NAMED, **known, "text_config": NAMED | {"a": 1.5}}).encode()))
    assert kept == {**known, "text_config": {"a": 1.5}}


FAMILIES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3", "smollm3"),
    *("gpt2", "gpt_neo", "gpt_neox", "gpt_oss", "olmo2", "falcon", "bloom", "deepseek_v3", "nemotron_h", "mamba2"),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_of_models_keeps_all_that_builds_it(family: str) -> None:
    """Its own configuration, as transformers writes it, comes back the same but for labels of classifiers."""
    made = CONFIG_MAPPING[family]()
    written = made.to_json_string(use_diff=False).encode()
    read = CONFIG_MAPPING[family].from_dict(json.loads(only_known(written)))
    lost = {"_name_or_path", "id2label", "label2id", "summary_type", "init_device", "attn_impl", "architecture"}

    def plain(found: Any) -> Any:
        if isinstance(found, dict):
            return {key: plain(value) for key, value in found.items() if key not in lost}
        return list(found) if isinstance(found, tuple) else found

    assert plain(read.to_dict()) == plain(made.to_dict())


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (b"{", "is no JSON"),
        (b"\xff", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"[1]", "is no object"),
        (b'{"a": "' + b"a" * CONFIG_BYTES + b'"}', "over 1048576"),
        (b'{"num_hidden_layers": 1000000}', "num_hidden_layers = 1000000, over 1024"),
        (b'{"text_config": {"n_routed_experts": 1000000}}', "n_routed_experts = 1000000, over 1024"),
    ],
    ids=["cut", "no text", "deep", "a list", "long", "layers", "experts"],
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


@pytest.mark.parametrize(
    "sizes",
    [
        {"vocab_size": 1 << 40},
        {"hidden_size": 1 << 40},
        {"intermediate_size": 1 << 40},
        {"num_attention_heads": 1 << 30},
    ],
    ids=lambda sizes: next(iter(sizes)),
)
def test_a_configuration_larger_than_the_layout_takes_no_memory(staged: Staged, sizes: dict[str, Any]) -> None:
    with pytest.raises(WrongWeights):
        build_model(changed(staged, **sizes), staged.layout, torch.float32)


def test_a_configuration_that_contradicts_itself_is_one_line(staged: Staged) -> None:
    with pytest.raises(UserError, match="cannot build the swarm's model"):
        build_model(changed(staged, num_hidden_layers=3), staged.layout, torch.float32)


def test_an_environment_keeps_settings_and_no_secret() -> None:
    given = {"PATH": "/bin", "HF_TOKEN": "x", "AWS_SECRET": "x", "VLLM_A": "1", "VLLM_API_KEY": "x", "CUDA_KEY": "x"}
    assert {*clean_environment(given, ("VLLM_", "CUDA"))} == {"PATH", "VLLM_A", "PYTHONPATH"}
    assert {*clean_environment(given)} == {"PATH", "PYTHONPATH"}


def test_a_layout_without_a_configuration_is_written_as_it_is(tmp_path: Path) -> None:
    given: Layout = layout(("w", "U8", (1,)), files=[ModelFile(name="tokenizer.json", content=b"{}")])
    write_model_files(tmp_path / "model", given)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["tokenizer.json"]
