"""What is said while a model is fetched, from a hub on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers.utils import hub as transformers_hub

from swarm.learner.checkpoint import model_files as checkpoint
from swarm.learner.checkpoint.model_files import load_model
from tests.unit.models import model_directory

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
