"""Weights in the stream, a model's small files, and what is said while one is fetched from a hub on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers.utils import hub as transformers_hub

from swarm.errors import UserError
from swarm.learner.checkpoint import model_files as checkpoint
from swarm.learner.checkpoint.model_files import layout_of, load_model, save_small_files, stream_tensors, write_staging
from swarm.models.device import as_streamed
from tests.unit.models import Staged, model_directory, stage


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Staged:
    return stage(tmp_path_factory.mktemp("learner"))


def test_every_name_of_the_model_and_every_small_file_is_in_the_layout_and_tied_tensors_once(staged: Staged) -> None:
    specs = {spec.name: spec for spec in staged.layout.tensors}
    assert specs["model.embed_tokens.weight"].aliases == ("lm_head.weight",)
    assert "lm_head.weight" not in specs
    assert staged.layout.total_bytes == 2 * sum(p.numel() for p in staged.model.parameters())
    names = {name for spec in staged.layout.tensors for name in (spec.name, *spec.aliases)}
    assert names == set(staged.model.state_dict())
    files = {file.name: file.content for file in staged.layout.files}
    assert {"config.json", "tokenizer.json"} <= set(files)
    assert all((staged.files_dir / name).read_bytes() == content for name, content in files.items())


def test_the_stream_is_the_weights_as_they_are_published_bit_for_bit(staged: Staged) -> None:
    data, at = staged.staging.read_bytes(), 0
    state = staged.model.state_dict()
    assert len(data) == staged.layout.total_bytes
    for spec in staged.layout.tensors:
        bits = as_streamed(state[spec.name]).contiguous().view(torch.int16).numpy().tobytes()
        assert data[at : at + spec.nbytes] == bits, spec.name
        at += spec.nbytes


class Odd(torch.nn.Module):
    """Tensors of sizes that fall between the alignments of their dtypes, one of them a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.5, -2.0, 0.25]))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("steps", torch.arange(4))
        self.register_buffer("table", torch.arange(6, dtype=torch.int32).reshape(2, 3).T)


def test_tensors_of_odd_sizes_and_mixed_dtypes_can_be_staged(tmp_path: Path) -> None:
    tensors = stream_tensors(Odd())
    write_staging(tensors, tmp_path / "staging.bin")
    data, at = (tmp_path / "staging.bin").read_bytes(), 0
    assert len(data) == layout_of(tensors, ()).total_bytes == 6 + 3 + 32 + 24
    for spec, tensor in tensors.items():
        stored = tensor.detach().to(torch.bfloat16) if spec.dtype == "BF16" else tensor
        expected = stored.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert data[at : at + spec.nbytes] == expected, spec.name
        at += spec.nbytes


def test_a_model_that_is_not_there_is_one_line_for_the_user(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        load_model(str(tmp_path), 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("odd", "kept"),
    [
        ({"temperature": 0.9, "top_p": 0.6}, {"temperature": 0.9, "top_p": 0.6, "do_sample": True}),
        ({"early_stopping": True, "num_beams": 1}, {}),
    ],
)
def test_a_generation_config_that_transformers_would_not_write_again_is_written(
    tmp_path: Path, odd: dict[str, Any], kept: dict[str, Any]
) -> None:
    base, files = tmp_path / "base", tmp_path / "files"
    model, tokenizer = load_model("tiny", 0)
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5], **odd}))
    model, tokenizer = load_model(str(base), 0)
    save_small_files(model, tokenizer, files)
    written = json.loads((files / "generation_config.json").read_text())
    assert {name: value for name, value in written.items() if name in odd or name == "do_sample"} == kept
    assert written["eos_token_id"] == [1, 5]


NAME = "someone/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serves the tiny model under NAME, and nothing else."""
    files = tmp_path / "files"
    model_directory(files)

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            place, _, name = self.path.rpartition("/")
            file = files / name
            if place != f"/{NAME}/resolve/main" or not file.is_file():
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.end_headers()
                return
            content = file.read_bytes()
            self.send_response(200)
            self.send_header("ETag", f'"{sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    # transformers keeps the address that it first asked, perhaps for an earlier test.
    monkeypatch.setattr(transformers_hub, "_hf_api", None)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_model_that_is_fetched_is_told_of_and_one_that_is_there_is_not(
    hub: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "FETCHING_BYTES", 100_000)
    said: list[str] = []
    model, _ = load_model(NAME, 0, tell=said.append)
    assert sum(p.numel() for p in model.parameters()) == 124_224
    assert said
    assert said[0] == "fetching model.safetensors: 0 of 0 MB"
    said.clear()
    load_model(NAME, 0, tell=said.append)
    assert said == []
