"""Owners who pause, change and end their nodes and their runs, as real processes."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator

import psutil
import pytest

from swarm.node.control import SOCKET
from tests.integration.processes import Learner, Node, Swarm, command, eventually, swarm_in

ENDLESS = ("--steps", "1000000", "--port", "0")


@pytest.fixture(scope="module")
def led(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Swarm, Learner]]:
    """A swarm whose learner the tests share: each has nodes of its own, which are gone at its end."""
    with swarm_in(tmp_path_factory.mktemp("led")) as processes:
        yield processes, processes.lead(*ENDLESS)


@pytest.fixture
def learner(led: tuple[Swarm, Learner]) -> Learner:
    return led[1]


@pytest.fixture
def swarm(led: tuple[Swarm, Learner]) -> Iterator[Swarm]:
    processes, learner = led
    yield processes
    for node in processes.nodes:
        if node is not learner:
            node.end()
    eventually(lambda: not learner.status()["samplers"], learner, "it has missed who did not leave")


def ask(swarm: Swarm, node: Node, *words: str) -> str:
    """What the command says about the node."""
    done = command(*words, "--state-dir", str(swarm.directory / f"state-{node.name}"))
    assert done.returncode == 0, done.stderr
    return done.stdout


def slow(swarm: Swarm, learner: Learner, *arguments: str, name: str) -> Node:
    """A sampler whose samples do not end while a test runs, once it draws some."""
    swarm.draw_at(0.001)
    node = swarm.scripted(learner.url(), *arguments, name=name)
    eventually(lambda: node.status()["state"] == "sampling", node, "it draws")
    swarm.draw_at(0.0)
    return node


@pytest.mark.long
def test_a_paused_node_gives_its_samples_to_others_and_passes_weights_on_until_it_resumes(
    swarm: Swarm, learner: Learner
) -> None:
    held = slow(swarm, learner, name="held")
    events = len(learner.events())
    other = swarm.scripted(learner.url(), name="other")
    engine = held.status()["engine_pid"]
    assert "`echo-node resume` lifts it" in ask(swarm, held, "pause")
    eventually(lambda: not psutil.pid_exists(engine), held, "its engine ends")
    paused = "paused: by its owner, until `echo-node resume`"
    eventually(lambda: held.status()["state"] == paused, held, "it says so")
    assert "engine_pid" not in held.status()
    # What it held is drawn by the other: at a bound of 2 no more steps could follow without that.
    step = learner.status()["step"]
    eventually(lambda: learner.status()["step"] > step + 5, other, "the run goes on")
    eventually(lambda: held.status()["map"] == learner.status()["version"], held, "it still receives weights")
    (left,) = [event for event in learner.events()[events:] if event["kind"] == "sampler_left"]
    assert left["samples_released"] > 0
    assert not {"sampler_silent", "lease_overdue"} & {event["kind"] for event in learner.events()[events:]}
    assert not learner.says("one sample at a time"), "the learner does not hold it against the node"

    # A node that a service starts again is paused still.
    held.kill()
    held = swarm.scripted(learner.url(), name="held")
    eventually(lambda: held.says("paused: by its owner"), held, "it is paused still")
    assert ask(swarm, held, "resume") == "drawing again\n"
    eventually(lambda: held.status()["verdicts"].get("accepted"), held, "its rollouts are accepted again")
    assert ask(swarm, held, "status").startswith(f"sampler {held.status()['node'][:12]} · ")
    assert ask(swarm, held, "leave") == "leaving; others draw the samples that were under way\n"
    assert held.wait() == 0
    assert not (swarm.directory / "state-held" / SOCKET).exists()
    said = ask(swarm, held, "logs").splitlines()
    assert any(line.endswith("nothing holds this node any more: drawing again") for line in said)
    assert "left the swarm; " in said[-1]


@pytest.mark.long
def test_a_node_that_finishes_hands_in_what_it_was_drawing(swarm: Swarm, learner: Learner) -> None:
    swarm.draw_at(3.0)
    node = swarm.scripted(learner.url(), "--grace", "0", name="node")
    eventually(lambda: node.status()["state"] == "sampling", node, "it draws")
    assert not node.status()["verdicts"]
    assert ask(swarm, node, "finish") == "finishing the samples under way, then leaving\n"
    assert node.wait() == 0
    last = node.output().splitlines()[-1]
    assert last.startswith("left the swarm; ")
    assert not last.startswith("left the swarm; 0 of its rollouts")
    assert not node.says("samples under way are handed back")


@pytest.mark.slow
def test_a_signal_leaves_time_for_what_ends_soon_and_a_second_one_does_not(swarm: Swarm, learner: Learner) -> None:
    once = slow(swarm, learner, "--grace", "0.5", name="once")
    events = len(learner.events())
    once.signal(signal.SIGTERM)
    assert once.wait() == 0
    assert once.says("samples under way are given up: 8; others go on with them")
    assert not (swarm.directory / "state-once" / SOCKET).exists()
    twice = slow(swarm, learner, "--grace", "3600", name="twice")
    twice.signal(signal.SIGTERM)
    eventually(lambda: twice.says("waiting for the samples under way, 3,600 s at most"), twice, "it waits")
    twice.signal(signal.SIGTERM)
    assert twice.wait() == 130
    assert twice.output().splitlines()[-1].startswith("left at once; ")
    released = [event["samples_released"] for event in learner.events()[events:] if event["kind"] == "sampler_left"]
    assert len(released) == 2


@pytest.mark.slow
def test_the_one_node_that_runs_is_found_and_several_are_told_apart(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(swarm.directory))
    root = swarm.directory / "echo-node"
    none = command("pause")
    assert (none.returncode, none.stdout) == (2, "")
    assert none.stderr.startswith(f"echo-node: no node of yours runs from {root}: ")
    # They look for a swarm all the while.
    relays = [swarm.relay("127.0.0.1:1", "--state-dir", str(root / f"relay-{at}"), name=f"relay-{at}") for at in (0, 1)]
    for relay in relays:
        relay.url()
        eventually(lambda: (root / relay.name / SOCKET).exists(), relay, "it takes requests")  # noqa: B023
    several = command("leave")
    assert several.returncode == 2
    assert f"2 nodes of yours run here: choose one with --state-dir {root}/relay-0 or --state-dir" in several.stderr
    # A killed one leaves its socket behind.
    relays[0].kill()
    refused = command("pause")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "a relay draws nothing that could be paused" in refused.stderr
    assert command("leave").stdout.startswith("leaving; ")
    assert relays[1].wait() == 0
    assert command("logs").stdout.splitlines()[-1].endswith(" ended before it was in a swarm")


def copied(swarm: Swarm, name: str, to: str) -> None:
    """A copy of a node's state directory, as on another machine: the lock does not reach there."""
    state = swarm.directory / f"state-{name}"
    shutil.copytree(state, swarm.directory / f"state-{to}", ignore=shutil.ignore_patterns(SOCKET, "swarms"))


@pytest.mark.long
def test_of_two_samplers_with_one_identity_the_second_ends_and_the_first_goes_on(
    swarm: Swarm, learner: Learner
) -> None:
    first = swarm.scripted(learner.url(), name="first")
    eventually(lambda: first.status()["verdicts"].get("accepted"), first, "it draws")
    again = swarm.join(learner.url(), "--state-dir", str(swarm.directory / "state-first"), name="again")
    assert again.wait() == 2
    assert again.says("another node uses ")
    copied(swarm, "first", "second")
    second = swarm.scripted(learner.url(), name="second")
    assert second.wait() == 2
    assert second.output().splitlines()[-1].startswith("echo-node: another process uses this node's identity, ")
    step = learner.status()["step"]
    eventually(lambda: learner.status()["step"] > step + 5, first, "the first one goes on")
    assert first.process.poll() is None


@pytest.mark.slow
def test_of_two_relays_with_one_identity_one_ends_and_the_other_goes_on(swarm: Swarm, learner: Learner) -> None:
    first = swarm.relay(learner.url(), name="relay")
    eventually(lambda: first.status()["reachability"] == "public", first, "others can dial it")
    copied(swarm, "relay", "its-copy")
    second = swarm.relay(learner.url(), name="its-copy")
    both = (first, second)
    eventually(lambda: any(one.process.poll() is not None for one in both), second, "one of them ends")
    ended, other = both if first.process.poll() is not None else both[::-1]
    assert ended.wait() == 2
    assert not ended.says("left the swarm")
    assert ended.output().splitlines()[-1].startswith("echo-node: another process uses this node's identity, ")
    at = other.address()

    def is_known() -> bool:
        return any(public["address"].endswith(at) for public in learner.status()["publics"])

    eventually(is_known, other, "the swarm knows where the other one is")
    assert other.process.poll() is None


def change(learner: Learner, *words: str) -> str:
    """What the command says about the learner's run."""
    done = command("set", str(learner.run_dir), *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_a_paused_run_waits_over_a_restart_and_goes_on_when_its_owner_says_so(swarm: Swarm) -> None:
    learner = swarm.lead(*ENDLESS, name="paused")
    first, second = (swarm.scripted(learner.url(), name=name) for name in ("one", "two"))
    eventually(lambda: learner.status()["step"] > 1, learner, "it takes steps")
    assert change(learner, "paused=true") == "paused is true (was false)\n"
    eventually(lambda: learner.status()["state"] == "paused by its owner", learner, "a status says so")
    eventually(lambda: not learner.status()["samples_leased"], learner, "what was leased comes in")
    eventually(lambda: "this run's owner paused it" in first.status()["state"], first, "samplers hear why they wait")
    change(learner, "checkpoint=now")
    eventually(lambda: any(e["kind"] == "checkpoint" for e in learner.events()), learner, "it is written")
    (kept,) = [e["step"] for e in learner.events() if e["kind"] == "checkpoint"]
    # The step that was under way when it was paused is a part of it.
    eventually(lambda: learner.status()["step"] == kept, learner, "it is the newest step")

    learner.kill()
    again = swarm.resume(learner, name="resumed")
    eventually(lambda: again.says("paused by its owner, as before"), again, "it is paused still")
    assert (again.status()["state"], again.status()["step"]) == ("paused by its owner", kept)
    refused = first.status()["node"]
    assert change(again, f"refuse={refused}", "paused=false").count("\n") == 2
    eventually(lambda: again.status()["barred"] == [refused], again, "a status says so")
    eventually(lambda: again.status()["step"] > kept + 3, second, "the other draws all")
    eventually(lambda: "refused by this run's owner" in first.status()["state"], first, "it hears why")
    assert change(again, f"let-in={refused}") == f"let_in is {refused}\n"
    eventually(lambda: again.status()["barred"] == [], again, "a status says so")
    assert change(again, "stop=after-step") == "stop is after-step\n"
    assert again.wait() == 130
    told = [(e["key"], e["before"], e["after"]) for e in again.events() if e["kind"] == "set"]
    assert told == [
        ("paused", False, True),
        ("checkpoint", None, kept),
        ("refuse", None, refused),
        ("paused", True, False),
        ("let_in", None, refused),
        ("stop", None, "after-step"),
    ]
    assert {event["by"] for event in again.events() if event["kind"] == "set"} == {"socket"}
