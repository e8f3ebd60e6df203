"""A dozen real nodes on loopback, without a model: they find one another, and nothing depends on one of them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import Learner, Node, Swarm, accepted_by, command, eventually, eventually_each
from tests.scripted_engine import ENGINE

ENDLESS = ("--steps", "1000000", "--lan", "--max-staleness", "9", "--publish-every-steps", "10")
"""A dozen nodes on two cores: a version every ten steps is often enough to be followed."""
RELAYS, SAMPLERS, LEAVES = 4, 5, 3


def publics(node: Node) -> set[str]:
    """Ids of the publics that a node sees alive."""
    return {public["node"] for public in node.status()["publics"]}


def ids(nodes: list[Node]) -> set[str]:
    return {node.status()["node"] for node in nodes}


def contributors(learner: Learner) -> set[str]:
    return {node for node, accepted in accepted_by(learner.status()).items() if accepted}


@pytest.mark.long
def test_a_swarm_outlives_its_bootstrap_and_follows_its_learner(swarm: Swarm, tmp_path: Path) -> None:
    """One life of 13 nodes: joined through different members, then the first relay dies, then the learner moves."""
    identity = str(tmp_path / "identity")
    learner = swarm.lead("--port", "0", "--state-dir", identity, *ENDLESS)
    first = swarm.relay(learner.url(), "--lan", name="relay-0")
    relays = [first, *(swarm.relay(first.address(), "--lan", name=f"relay-{i}") for i in range(1, RELAYS))]
    samplers = [swarm.scripted(relays[i % RELAYS].address(), "--lan", name=f"sampler-{i}") for i in range(SAMPLERS)]
    # Without --lan nobody may call a node on this machine back: these stay leaves.
    leaves = [swarm.scripted(relays[-1].address(), "--no-lan", name=f"leaf-{i}") for i in range(LEAVES)]

    dialable = [*relays, *samplers]
    eventually(lambda: len(publics(learner)) == len(dialable), learner, "the learner sees every public")
    everybody = ids(dialable) | ids([learner])
    eventually_each(dialable, lambda node: publics(node) | ids([node]) == everybody, "it sees every public")
    expected = ids([*samplers, *leaves])
    eventually(lambda: contributors(learner) == expected, leaves[0], "every sampler finds the learner and contributes")
    assert {leaf.status()["reachability"] for leaf in leaves} == {"leaf"}
    eventually(lambda: _leaves_at(relays) == ids(leaves), relays[-1], "each leaf has a home that knows it")
    eventually(lambda: _versions_travel(dialable), first, "heads travel with gossip")

    first.kill()
    gone = everybody - ids([*dialable[1:], learner])
    assert len(gone) == 1
    eventually_each(dialable[1:], lambda node: not publics(node) & gone, "it notices that the bootstrap is dead")
    late = swarm.scripted(relays[3].address(), name="late")
    eventually(lambda: ids([late]) <= contributors(learner), late, "a newcomer joins through another member")

    # Its only bootstrap is dead: an engine that dies is replaced without another look for the swarm.
    orphan = samplers[0]
    (engine,) = [child for child in orphan.children() if ENGINE in child.cmdline()]
    engine.kill()
    eventually(lambda: orphan.says("starting again"), orphan, "the node says that its engine died")
    accepted = accepted_by(learner.status()).get(orphan.status()["node"], 0)
    eventually(
        lambda: accepted_by(learner.status()).get(orphan.status()["node"], 0) > accepted,
        orphan,
        "it contributes again",
    )

    version = str(learner.status()["version"])
    learner.end()
    moved = swarm.lead(
        "--port", "0", "--state-dir", identity, "--bootstrap", relays[2].address(), *ENDLESS, name="moved"
    )
    assert moved.url() != learner.url()
    eventually(lambda: contributors(moved) == expected | ids([late]), late, "every sampler follows the learner")
    assert (version.split(".")[0], moved.status()["version"].split(".")[0]) == ("0", "1")
    assert late.says("the learner answers again")

    assert all(node.process.poll() is None for node in [*dialable[1:], *leaves, late])


@pytest.mark.slow
def test_a_learner_alone_says_what_that_costs_until_a_join_line_brings_somebody_over_tls(swarm: Swarm) -> None:
    """TLS on loopback, because it was asked for."""
    learner = swarm.lead("--port", "0", "--tls", *ENDLESS)
    assert learner.url().startswith("https://")
    assert "--role relay" in learner.status()["advice"]
    sampler = swarm.scripted(learner.join_line(), "--tls", "--lan", name="sampler")
    eventually(lambda: contributors(learner) == ids([sampler]), sampler, "the sampler contributes over TLS")
    assert sampler.says("which the join line names")
    eventually(lambda: ids([sampler]) == publics(learner), sampler, "it was called back over TLS")
    assert learner.status()["advice"] is None
    (node,) = ids([sampler])
    assert node[:12] in command("status", learner.url()).stdout
    assert json.loads(command("status", sampler.url(), "--json").stdout.splitlines()[-1])["node"] == node


def _leaves_at(homes: list[Node]) -> set[str]:
    found: list[dict[str, Any]] = [leaf for home in homes for leaf in home.status()["leaves"]]
    return {leaf["node"] for leaf in found}


def _versions_travel(nodes: list[Node]) -> bool:
    """Everybody knows of a version beyond the first, relays too, which fetch none."""
    newest = [node.status()["newest"] for node in nodes]
    return all(version is not None and version != "0.0" for version in newest)


def test_what_was_ignored_at_the_start_stays_ignored(swarm: Swarm) -> None:
    """`nohup echo-node join ... &` goes on after the terminal is closed."""
    node = swarm.relay("127.0.0.1:9", name="relay", place=("nohup",))
    eventually(lambda: node.says("trying again"), node, "it looks for its bootstrap")
    (line,) = [line for line in Path(f"/proc/{node.process.pid}/status").read_text().splitlines() if "SigIgn" in line]
    assert int(line.split()[1], 16) & 1 << (signal.SIGHUP - 1)
    node.signal(signal.SIGTERM)
    assert node.wait() == 0
