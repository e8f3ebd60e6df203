"""A real engine's process tries what a model from a hostile learner would try."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from swarm.broadcast.version.manifest import Layout
from swarm.confine import FILE_RIGHTS
from swarm.sampler.engine import EngineOptions, Generate, Generated, Installed, NotInstalled
from swarm.sampler.worker import EngineWorker
from tests.conformance import job
from tests.integration.reaching_engine import PORT, SECRET, TOLD
from tests.scripted_engine import ENGINE
from tests.unit.models import Staged, stage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has namespaces to confine a process in")


@pytest.fixture
def staged(tmp_path: Path) -> Staged:
    return stage(tmp_path / "learner")


async def reached(directory: Path, staged: Staged, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], str]:
    """What an engine's process could do that then loaded a model and drew from it, and what it said of itself."""
    key = directory / "node.key"
    key.write_text("the key")
    os.set_inheritable(inherited := os.open(key, os.O_RDONLY), True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name, value in ((PORT, str(server.getsockname()[1])), (SECRET, str(key)), (TOLD, str(directory / "told"))):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SOME_TOKEN", "secret")
        monkeypatch.setenv("VLLM_API_KEY", "secret")
        worker = EngineWorker(
            directory,
            kind="transformers",
            options=EngineOptions(device="cpu"),
            module="tests.integration.reaching_engine",
            secrets=[key],
        )
        try:
            await worker.launch()
            started = await worker.load(staged.layout)
            install = staged.install()
            done: Any = await worker._child.call(install, Installed | NotInstalled)
            assert isinstance(done, Installed)
            drawn = await worker._child.call(Generate(jobs=(job(1),)), Generated)
            assert drawn.samples[0].finish in ("stop", "length")
        finally:
            await worker.stop()
            os.close(inherited)
    return json.loads(await asyncio.to_thread((directory / "told").read_text)), started.exposed


@pytest.mark.slow
async def test_an_engine_reaches_no_network_no_key_and_no_variable(
    tmp_path: Path, staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, exposed = await reached(tmp_path, staged, monkeypatch)
    assert "SOME_TOKEN" not in told["variables"]
    assert "VLLM_API_KEY" not in told["variables"]
    assert PORT in told["variables"], "an owner's own settings of an engine stay"
    assert not any("node.key" in one for one in told["descriptors"])
    assert "HF_HUB_OFFLINE" in told["variables"]
    capabilities, no_new_privileges = told["rights"]
    assert (int(capabilities, 16) & ~FILE_RIGHTS, no_new_privileges) == (0, "1")
    assert 0 < told["limit"] < 1 << 50
    if "reach the network" in exposed:
        pytest.skip(f"this system confines no process: {exposed}")
    assert told["network"] in ("ConnectionRefusedError", "OSError")
    if exposed:
        pytest.skip(f"this system has a filter of system calls alone: {exposed}")
    assert told["network"] == "ConnectionRefusedError"
    assert told["loopback"] == "reached"
    assert told["key"] == ""
    assert told["memory"] == "PermissionError"
    assert (tmp_path / "node.key").read_text() == "the key"


async def test_only_what_an_engine_reads_is_written_and_nothing_of_before_stays(tmp_path: Path, staged: Staged) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "modeling_evil.py").write_text("raise SystemExit")
    worker = EngineWorker(tmp_path, kind="transformers", options=EngineOptions(), module=ENGINE)
    try:
        await worker.launch()
        assert isinstance(staged.layout, Layout)
        await worker.load(staged.layout)
    finally:
        await worker.stop()
    assert {"tokenizer_config.json", "config.json"} <= {file.name for file in staged.layout.files}
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["config.json", "tokenizer.json"]
