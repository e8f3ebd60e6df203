"""Files with which others run samplers: valid for what reads them, with commands that this release takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from swarm.cli.machine import _joining
from swarm.extras import LIBRARIES

EXAMPLES = Path(__file__).parents[2] / "examples"
COMPOSE, KUBERNETES = EXAMPLES / "compose.yaml", EXAMPLES / "kubernetes" / "samplers.yaml"
SKYPILOT = EXAMPLES / "skypilot" / "sampler.yaml"
LINE = "127.0.0.1:7700"


def _compose() -> str:
    """As compose reads it: with its variables, or their defaults, in place."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", COMPOSE.read_text())
    return re.sub(r"\$\{JOIN:\?[^}]*\}", LINE, text)


def _commands() -> dict[str, list[str]]:
    compose = yaml.safe_load(_compose())["services"]["sampler"]["command"]
    container = yaml.safe_load(KUBERNETES.read_text())["spec"]["template"]["spec"]["containers"][0]
    (sky,) = re.findall(r"^exec bin/echo-node (.*)$", yaml.safe_load(SKYPILOT.read_text())["run"], re.MULTILINE)
    found = {"compose": compose, "kubernetes": container["args"], "skypilot": sky.split()}
    return {name: [LINE if "JOIN" in word else word for word in words] for name, words in found.items()}


@pytest.mark.parametrize("name", ["compose", "kubernetes", "skypilot"])
def test_their_commands_join_as_a_sampler_with_the_line_that_was_given(name: str) -> None:
    command, *words = _commands()[name]
    assert command == "join"
    settings = _joining(words)
    assert (settings.role, settings.bootstrap) == ("sampler", (LINE,))


def test_they_build_what_there_is_and_wait_for_what_is_under_way() -> None:
    service = yaml.safe_load(_compose())["services"]["sampler"]
    assert service["build"]["args"]["EXTRAS"] in LIBRARIES
    assert (COMPOSE.parent / service["build"]["context"] / "Dockerfile").resolve().exists()
    pod = yaml.safe_load(KUBERNETES.read_text())["spec"]["template"]["spec"]
    grace = _joining(_commands()["compose"][1:]).grace
    assert min(int(service["stop_grace_period"].rstrip("s")), pod["terminationGracePeriodSeconds"]) > 2 * grace
    uid = re.search(r"^USER (\d+)$", (EXAMPLES.parent / "Dockerfile").read_text(), re.MULTILINE)
    assert uid is not None
    assert pod["securityContext"]["runAsUser"] == int(uid[1])


def test_compose_would_take_its_file() -> None:
    reader: Any = pytest.importorskip("compose_spec", reason="compose-spec is not installed; .ci/run installs it")
    reader.PyCompose.from_yaml(_compose()).validate()


def test_a_cluster_would_take_its_file() -> None:
    reader: Any = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed; .ci/run installs it"
    )
    reader.validate(yaml.safe_load(KUBERNETES.read_text()), "1.30", strict=True)


def test_skypilot_would_take_its_file() -> None:
    reader: Any = pytest.importorskip("sky", reason="skypilot (300 MB) is not installed: pip install skypilot")
    task = reader.Task.from_yaml(str(SKYPILOT))
    assert all(one.use_spot for one in task.resources)
