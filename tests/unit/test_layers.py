"""Design section 3 as a test: who may import whom, and what a core may never touch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.source import Module, modules

CORES = (
    "swarm.auth",
    "swarm.node.limits",
    "swarm.rollout.admission",
    "swarm.rollout.intake",
    "swarm.rollout.leases",
    "swarm.rollout.buffer",
    "swarm.rollout.claims",
    "swarm.rollout.pacing",
    "swarm.rollout.plane",
    "swarm.rollout.effects",
    "swarm.rollout.heldout",
    "swarm.rollout.verdicts",
    "swarm.broadcast.child",
    "swarm.broadcast.manifest",
    "swarm.broadcast.notes",
    "swarm.broadcast.relay",
    "swarm.broadcast.roster",
    "swarm.broadcast.seeder",
    "swarm.broadcast.window",
    "swarm.broadcast.tracker",
    "swarm.broadcast.forest",
    "swarm.broadcast.planner",
    "swarm.broadcast.tree",
    "swarm.broadcast.pull",
    "swarm.broadcast.relief",
    "swarm.broadcast.fluid",
    "swarm.dissemination",
    "swarm.gossip.answers",
    "swarm.gossip.calls",
    "swarm.gossip.partners",
    "swarm.gossip.effects",
    "swarm.gossip.homes",
    "swarm.gossip.leaves",
    "swarm.gossip.membership",
    "swarm.gossip.owner",
    "swarm.gossip.reachability",
    "swarm.gossip.table",
    "swarm.gossip.view",
    "swarm.learner.alarms",
    *(name for name in modules() if name.startswith("swarm.capacity.")),
)
DATA = (
    "swarm.types",
    "swarm.wire",
    "swarm.errors",
    "swarm.signing",
    "swarm.rollout.entries",
    "swarm.rollout.messages",
    "swarm.broadcast.notes",
    "swarm.gossip.joinline",
    "swarm.gossip.messages",
    "swarm.gossip.records",
    "swarm.gossip.rules",
    "swarm.learner.messages",
)
"""Modules without IO that a core may build on."""

PURE = (*DATA, "swarm.broadcast.codec", "swarm.tasks.base", "swarm.tasks.copy")
"""What a simulation may use besides cores."""

IO = ("asyncio", "time", "socket", "os", "threading", "logging", "aiohttp", "torch", "vllm", "uvloop", "subprocess")
PEERS = ("gossip", "broadcast", "rollout", "capacity")
SHARED = ("types", "wire", "signing", "auth", "errors", "http", "stream", "sockets", "pace", "threads")
ABOVE = (
    "swarm.node",
    "swarm.cli",
    "swarm.cli_capacity",
    "swarm.cli_options",
    "swarm.cli_runs",
    "swarm.cli_simulate",
    "swarm.cli_status",
    "swarm.cli_tasks",
    "swarm.demo",
    "swarm.report",
    "swarm.__main__",
)

ENGINES = tuple(
    f"swarm.sampler.{part}" for part in ("transformers_engine", "vllm_engine", "vllm_worker", "proving", "weights")
)
"""What runs in the engine's process."""


def simulation() -> list[Module]:
    return [m for name, m in modules().items() if _within(name, "swarm.sim") and name != "swarm.sim.__main__"]


def cores() -> list[Module]:
    return [modules()[name] for name in (*CORES, *(d for d in DATA if d.startswith("swarm.gossip.")))] + simulation()


def _within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def _swarm_modules(module: Module) -> set[str]:
    """Modules of swarm that `module` imports; an imported name counts as the module that holds it."""
    known = modules()
    found = {i if i in known else i.rpartition(".")[0] for i in module.uses("swarm")}
    return {name for name in found if name != "swarm"}


def _random_functions(tree: ast.Module) -> list[str]:
    """Uses of the module `random` other than the class Random: they share one hidden state."""
    module_names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "random"
    }
    found = [
        f"random.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in module_names
        and node.attr != "Random"
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "random":
            found += [f"random.{alias.name}" for alias in node.names if alias.name != "Random"]
    return found


def test_every_named_core_exists_so_that_a_rename_cannot_empty_this_test() -> None:
    assert set(CORES) <= set(modules())
    assert set(PURE) <= set(modules())


def test_every_module_of_gossip_but_its_shell_is_a_core_or_plain_data() -> None:
    of_gossip = {name for name in modules() if name.startswith("swarm.gossip.")}
    assert of_gossip - {*CORES, *DATA} == {"swarm.gossip.service"}


def test_a_core_imports_no_io() -> None:
    assert {core.name: core.uses(*IO) for core in cores() if core.uses(*IO)} == {}


def test_a_core_builds_only_on_cores_and_plain_data() -> None:
    allowed = {*CORES, *DATA}
    above = {name: _swarm_modules(modules()[name]) - allowed for name in CORES}
    assert {name: extra for name, extra in above.items() if extra} == {}


def test_a_core_uses_no_hidden_random_state() -> None:
    assert {core.name: _random_functions(core.tree) for core in cores() if _random_functions(core.tree)} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import random\nrandom.random()", ["random.random"]),
        ("import random as r\nr.choice([1])", ["random.choice"]),
        ("from random import shuffle", ["random.shuffle"]),
        ("import random\nrandom.Random(1)", []),
        ("def f(random):\n    return random.random()", []),
    ],
)
def test_hidden_random_state_is_seen(source: str, found: list[str]) -> None:
    assert _random_functions(ast.parse(source)) == found


def test_the_simulation_imports_cores_and_plain_data_but_no_shell() -> None:
    allowed = {*CORES, *PURE, *(module.name for module in simulation())}
    above = {module.name: _swarm_modules(module) - allowed for module in simulation()}
    assert {name: extra for name, extra in above.items() if extra} == {}


@pytest.mark.parametrize("package", PEERS)
def test_the_four_parts_know_one_another_only_through_shared_modules(package: str) -> None:
    allowed = (f"swarm.{package}", *(f"swarm.{name}" for name in SHARED))
    for name, module in modules().items():
        if _within(name, f"swarm.{package}"):
            assert [i for i in module.uses("swarm") if not _within(i, *allowed)] == [], name


@pytest.mark.parametrize(
    ("library", "homes"),
    [
        ("torch", ("swarm.learner", *ENGINES)),
        (
            "transformers",
            (
                "swarm.learner",
                "swarm.sampler.transformers_engine",
                "swarm.sampler.proving",
                "swarm.sampler.vllm_versions",
            ),
        ),
        ("numpy", ("swarm.broadcast.codec",)),
        ("vllm", ("swarm.sampler.vllm_worker", "swarm.sampler.vllm_versions")),
    ],
)
def test_a_heavy_library_has_its_few_homes(library: str, homes: tuple[str, ...]) -> None:
    users = [name for name, module in modules().items() if module.uses(library)]
    assert [name for name in users if not _within(name, *homes)] == []
    assert users


def test_only_what_is_above_a_node_imports_it() -> None:
    for name, module in modules().items():
        if not _within(name, *ABOVE):
            assert module.uses(*ABOVE) == [], name
        if _within(name, "swarm.node"):
            assert [one for one in module.uses(*ABOVE) if not _within(one, "swarm.node")] == [], name


def _map() -> Iterator[str]:
    """The modules that the map of ARCHITECTURE.md names; of sim/ it says in words what it is."""
    text = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text()
    block, _, _ = text[text.index("    swarm/\n") :].partition("\n\n")
    package = ""
    for line in block.splitlines()[1:]:
        if line[6] != " ":
            named = re.match(r" +(\w+)/", line)
            package = f"{named[1]}." if named else ""
        if package != "sim.":
            entries = re.sub(r"\([^)]*\)|\w+/", "", line)
            yield from (f"swarm.{package}{name}" for name in re.findall(r"\w+", entries))


def test_the_map_has_every_module_once() -> None:
    packages = {name.rpartition(".")[0] for name in modules()}
    there = [n for n in modules() if n not in packages and not _within(n, "swarm.sim") and not n.endswith("__main__")]
    assert sorted(_map()) == sorted(there)


def test_the_command_line_loads_no_heavy_library() -> None:
    program = "import swarm.cli, sys; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
