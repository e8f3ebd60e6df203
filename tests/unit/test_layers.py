"""Design section 3 as a test: who may import whom, and what a core may never touch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tests.unit.source import ROOT, Module, modules

CORES = tuple(
    f"swarm.{core}"
    for core in (
        *("net.sessions", "net.limits", "gossip", "broadcast.version.manifest", "broadcast.notes", "broadcast.mesh"),
        *("broadcast.forest", "rollout.plane", "rollout.intake", "pay", "learner.alarms", "audit.auditor"),
        *("learner.claims", "models.memory", "plan", "run.timeline", "report.words", "dashboard.digest"),
        "dashboard.feed",
    )
)
"""Rooms, and single modules of others."""

SHELLS = ("swarm.gossip.service",)
"""In a room of cores."""

DATA = tuple(
    f"swarm.{data}"
    for data in (
        *("types", "errors", "wire", "bounded", "net.hosts", "net.signing", "rollout.journal.entries"),
        *("rollout.messages", "learner.messages"),
    )
)
"""Modules without IO that a core may build on."""

PURE = (*DATA, "swarm.broadcast.version.codec", "swarm.environments.base", "swarm.tasks.base", "swarm.tasks.digits")
"""What a simulation may use besides cores."""

IO = (
    *("asyncio", "time", "socket", "os", "threading", "logging", "torch", "vllm", "uvloop", "subprocess"),
    *("aiohappyeyeballs", "aiohttp"),
)
PEERS = ("gossip", "broadcast", "rollout", "pay")
SHARED = tuple(
    f"swarm.{ground}"
    for ground in ("types", "errors", "extras", "wire", "aio", "bounded", "files", "machine", "process", "net")
)
CROSSING = {"swarm.pay.delivery": ("swarm.broadcast.forest",)}
"""What a version costs a fleet is what the broadcast itself would plan for it."""

NODES = ("swarm.node", "swarm.run", "swarm.join", "swarm.audit.auditing", "swarm.lead")
ABOVE = (*NODES, "swarm.cli", "swarm.dashboard", "swarm.report", "swarm.__main__")
ENGINES = tuple(f"sampler.{part}" for part in ("transformers", "growing", "vllm", "mlx", "proving", "room", "weights"))
"""What runs in the engine's process."""

SAMPLERS = tuple(f"sampler.{part}" for part in ("transformers", "growing", "weights", "vllm.versions"))
NUMBERS = ("version.codec", "store.weight_map", "store.region_file", "store.changes")


def cores() -> list[Module]:
    return [module for name, module in modules().items() if _within(name, *CORES) and not _within(name, *SHELLS)]


def _within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def _swarm_modules(module: Module) -> set[str]:
    """Modules of swarm that `module` imports; an imported name counts as the module that holds it."""
    known = modules()
    found = {i if i in known else i.rpartition(".")[0] for i in module.uses("swarm")}
    return {name for name in found if name != "swarm"}


def _random_functions(tree: ast.Module) -> list[str]:
    """Uses of the module `random` other than the class Random: they share one hidden state."""
    nodes = list(ast.walk(tree))
    imported = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names = {alias.asname or alias.name for alias in imported if alias.name == "random"}
    found = [
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names
    ]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "random":
            found += [alias.name for alias in node.names]
    return [f"random.{name}" for name in found if name != "Random"]


def test_every_named_core_exists_so_that_a_rename_cannot_empty_this_test() -> None:
    for named in (*CORES, *SHELLS, *PURE, *CROSSING):
        assert any(_within(name, named) for name in modules()), named


def test_a_core_imports_no_io() -> None:
    assert {core.name: core.uses(*IO) for core in cores() if core.uses(*IO)} == {}


def test_a_core_builds_only_on_cores_and_plain_data() -> None:
    for core in cores():
        allowed = PURE if _within(core.name, "swarm.plan") else DATA
        built_on = {name for name in _swarm_modules(core) if not _within(name, *allowed)}
        assert built_on - {one.name for one in cores()} == set(), core.name


def test_a_core_uses_no_hidden_random_state() -> None:
    assert {core.name: _random_functions(core.tree) for core in cores() if _random_functions(core.tree)} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import random as r\nr.choice([1])", ["random.choice"]),
        ("from random import shuffle", ["random.shuffle"]),
        ("import random\nrandom.Random(1)", []),
    ],
)
def test_hidden_random_state_is_seen(source: str, found: list[str]) -> None:
    assert _random_functions(ast.parse(source)) == found


def test_nothing_between_nodes_depends_on_the_time_of_day() -> None:
    """Clocks of volunteers are hours apart: sessions, leases and records count from when they were received."""
    between = [one for name, one in modules().items() if _within(name, "swarm.net", "swarm.gossip", "swarm.rollout")]
    assert len(between) > 30
    assert [one.name for one in between if re.search(r"time\.time\(|time_ns\(|datetime\.now", one.text)] == []


def test_the_product_needs_neither_tests_nor_benchmarks() -> None:
    assert [name for name, module in modules().items() if module.uses("tests", "benchmarks")] == []


@pytest.mark.parametrize("package", PEERS)
def test_the_four_parts_know_one_another_only_through_shared_modules(package: str) -> None:
    for name, module in modules().items():
        if _within(name, f"swarm.{package}"):
            allowed = (f"swarm.{package}", *SHARED, *CROSSING.get(name, ()))
            assert [i for i in module.uses("swarm") if not _within(i, *allowed)] == [], name


@pytest.mark.parametrize(
    ("library", "homes"),
    [
        ("torch", ("learner", "models", *ENGINES)),
        ("transformers", ("learner", "models", *SAMPLERS)),
        ("numpy", (*(f"broadcast.{part}" for part in NUMBERS), "audit.auditor", "audit.auditing")),
        ("vllm", ("sampler.vllm.extension", "sampler.vllm.versions")),
        ("mlx", ("sampler.mlx", "sampler.room")),
        ("mlx_lm", ("sampler.mlx",)),
    ],
)
def test_a_heavy_library_has_its_few_homes(library: str, homes: tuple[str, ...]) -> None:
    users = [name for name, module in modules().items() if module.uses(library)]
    assert [name for name in users if not _within(name, *(f"swarm.{home}" for home in homes))] == []
    assert users


def test_only_what_is_above_a_node_imports_it() -> None:
    for name, module in modules().items():
        if not _within(name, *ABOVE):
            assert module.uses(*ABOVE) == [], name
        if _within(name, *NODES):
            assert [one for one in module.uses(*ABOVE) if not _within(one, *NODES)] == [], name


def test_no_two_rooms_import_each_other() -> None:
    def room(name: str) -> str:
        return name.split(".")[1]

    uses = {
        (room(name), room(one)) for name, module in modules().items() if "." in name for one in _swarm_modules(module)
    }
    circles = {frozenset(pair) for pair in uses if pair[0] != pair[1] and pair[::-1] in uses}
    assert circles == set()


ARCHITECTURE = (ROOT.parent / "ARCHITECTURE.md").read_text()


def test_the_map_has_every_room_once() -> None:
    block, _, _ = ARCHITECTURE[ARCHITECTURE.index("    swarm/\n") :].partition("\n\n")
    named = re.findall(r"\b(\w+)/", block.partition("\n")[2])
    packages = [name for name, module in modules().items() if module.path.name == "__init__.py"]
    rooms = [name.rpartition(".")[2] for name in packages if name != "swarm"]
    assert sorted(named) == sorted(rooms)


@pytest.mark.parametrize(("journey", "most"), [("version", 35), ("rollout", 32), ("decision", 10), ("membership", 12)])
def test_a_journey_is_told_in_few_stops_that_exist(journey: str, most: int) -> None:
    """A stop is a module in which something is decided or in which data changes its form."""
    section = ARCHITECTURE.partition(f"## Life of a {journey}\n")[2].partition("\n## ")[0]
    stops = re.findall(r"^\d+\. `([\w/]+\.py)`", section, flags=re.MULTILINE)
    assert len(stops) == len(re.findall(r"^\d+\. ", section, flags=re.MULTILINE)) > 0
    assert len(set(stops)) <= most
    if told := re.search(r"These are (\d+) different\smodules", section):
        assert len(set(stops)) == int(told[1])
    named = set(re.findall(r"`([\w/]+\.py)`", section))
    assert {one for one in named if not (ROOT / one).is_file()} == set()


def test_the_command_line_loads_no_heavy_library() -> None:
    heavy = {"torch", "numpy", "transformers", "prometheus_client"}
    program = f"import swarm.cli.run, sys; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
