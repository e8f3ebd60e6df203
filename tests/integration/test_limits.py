"""Owners who change their minds, machines that sleep, and clocks that are set, with real processes."""

from __future__ import annotations

import re
import signal
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.integration.processes import Learner, Node, Swarm, accepted_by, command, eventually
from tests.integration.set_clock import CLOCK

pytestmark = pytest.mark.slow

ENDLESS = ("--steps", "1000000", "--port", "0")
STOPPED_S = 90.0


def accepted(learner: Learner) -> int:
    return sum(accepted_by(learner.status()).values())


def draws(learner: Learner, sampler: Node, what: str) -> None:
    before = accepted(learner)
    eventually(lambda: accepted(learner) > before, sampler, what)


def limit(state: Path, *changes: str) -> str:
    done = command("limits", "--state-dir", str(state), *changes)
    assert done.returncode == 0, done.stderr
    return done.stdout


def hours_from_now(start_h: int, end_h: int) -> str:
    now = datetime.now()
    return "-".join(f"{now + timedelta(hours=hours):%H:%M}" for hours in (start_h, end_h))


def engine_threads(sampler: Node) -> list[str]:
    return [child.environ()["OMP_NUM_THREADS"] for child in sampler.children()]


def test_an_owner_changes_limits_while_the_node_runs_and_they_outlive_it(swarm: Swarm, tmp_path: Path) -> None:
    learner = swarm.lead(*ENDLESS)
    sampler = swarm.scripted(learner.url(), name="sampler")
    state = tmp_path / "state-sampler"
    draws(learner, sampler, "it draws")
    wrong = command("limits", "--state-dir", str(state), "nice=77", "max-uplod=3")
    assert (wrong.returncode, wrong.stderr.splitlines()) == (
        2,
        [
            "echo-node: --nice 77: input should be less than or equal to 19",
            "max-uplod is no limit: did you mean max-upload?",
        ],
    )

    hours = hours_from_now(2, 3)
    limit(state, f"hours={hours}", "nice=12", "max-upload=3")
    eventually(lambda: sampler.children() == [], sampler, "its engine has ended")
    assert sampler.says(f"limit changed: hours is {hours}, was none")
    assert sampler.says("limit changed: max-upload is 3, was none")
    paused = f"paused: outside its hours, until {hours[:5]}"
    eventually(lambda: sampler.status()["state"] == paused, sampler, "a status says so")
    eventually(lambda: sampler.status()["streams"], sampler, "it still passes weights on")

    limit(state, "hours=default", "threads=2")
    eventually(lambda: sampler.says("joining again with these limits"), sampler, "the engine is made with them")
    draws(learner, sampler, "it draws again")
    assert engine_threads(sampler) == ["2"]
    assert {child.nice() for child in sampler.children()} == {12}

    sampler.signal(signal.SIGTERM)
    assert sampler.wait() == 0
    again = swarm.scripted(learner.url(), "--threads", "1", "--max-upload", "50", name="sampler")
    draws(learner, again, "the next life draws")
    assert engine_threads(again) == ["2"], "what the owner said later holds"
    shown = dict(line.split(maxsplit=1) for line in limit(state).splitlines())
    assert (shown["threads"], shown["max-upload"], shown["hours"]) == ("2", "3", "as join was given it")


@pytest.mark.long
def test_weights_that_may_not_take_so_much_of_the_disk_are_not_fetched(swarm: Swarm, tmp_path: Path) -> None:
    learner = swarm.lead(*ENDLESS)
    state = tmp_path / "identity"
    given = ("--max-disk", "0.00005", "--weights", "disk", "--state-dir", str(state))
    relay = swarm.relay(learner.url(), *given, name="relay")
    eventually(lambda: relay.says("paused: "), relay, "it waits for its owner")
    (why,) = [line for line in relay.output().splitlines() if "paused: " in line]
    assert re.search(
        r"paused: the weights take 0\.\d+ GB of the disk with [\w.]+, and max-disk allows 5e-05: allow more, or leave "
        "this swarm$",
        why,
    )
    limit(state, "max-disk=1")
    eventually(lambda: relay.says("there is room again: going on"), relay, "it was allowed more")
    eventually(lambda: relay.status().get("map"), relay, "it holds the weights")


@pytest.mark.long
def test_a_node_that_was_stopped_for_a_minute_and_a_half_joins_again_and_the_run_goes_on(swarm: Swarm) -> None:
    learner = swarm.lead(*ENDLESS)
    sampler = swarm.join(learner.url(), name="sampler")
    relay = swarm.relay(learner.url(), "--lan", name="relay")
    eventually(lambda: learner.status()["step"] >= 2, sampler, "the run learns")
    generation = sampler.status()["generation"]
    for node in (sampler, relay):
        node.signal(signal.SIGSTOP)
    time.sleep(STOPPED_S)
    stood_at = learner.status()["step"]
    for node in (sampler, relay):
        node.signal(signal.SIGCONT)
    for node in (sampler, relay):
        eventually(lambda: node.says("joining again"), node, "it notices")  # noqa: B023
        (line,) = (line for line in node.output().splitlines() if line.endswith("joining again"))
        found = re.fullmatch(r"this process was stopped, or got no turn, for (\d+) s; joining again", line)
        assert found is not None, line
        assert int(found[1]) >= STOPPED_S
    eventually(lambda: learner.status()["step"] >= stood_at + 3, sampler, "the run learns again")
    # Its records are newer than those that told of its death.
    eventually(lambda: sampler.status()["generation"] > generation, sampler, "it came anew")
    eventually(lambda: relay.status()["map"] == relay.status()["newest"], relay, "the relay is up to date")


def set_clock(clock: Path, off_s: int) -> None:
    clock.with_suffix(".new").write_text(str(off_s))
    clock.with_suffix(".new").replace(clock)


@pytest.mark.long
def test_a_clock_that_is_set_is_told_and_hours_go_by_it(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = tmp_path / "clock"
    set_clock(clock, 0)
    monkeypatch.setenv(CLOCK, str(clock))
    learner = swarm.lead(*ENDLESS, module="tests.integration.set_clock")
    hours = hours_from_now(2, 4)
    sampler = swarm.scripted(learner.url(), "--hours", hours, name="sampler", module="tests.integration.set_clock")
    eventually(lambda: sampler.says(f"paused: outside its hours, until {hours[:5]}"), sampler, "it waits")
    assert accepted(learner) == 0
    set_clock(clock, 10800)
    eventually(lambda: sampler.says("the clock was set forward by 10,800 s; joining again"), sampler, "it notices")
    eventually(lambda: learner.says("the clock was set forward by 10,800 s\n"), learner, "a learner has none to join")
    draws(learner, sampler, "it draws within its hours")
    set_clock(clock, 7210)
    eventually(lambda: sampler.says("the clock was set back by 3,590 s\n"), sampler, "it notices")
    draws(learner, sampler, "it goes on")
    set_clock(clock, 0)
    eventually(lambda: sampler.status()["state"].startswith("paused: outside"), sampler, "they are over")
