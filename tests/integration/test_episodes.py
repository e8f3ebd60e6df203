"""Runs on episodes, as real processes with a real model: whoever dies, each episode is whole and counts once.

All turns are drawn again by the learner, and nobody may be caught."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.cli.runs import verify_directory
from tests.integration.processes import Learner, Node, Swarm, accepted_by, command, eventually, swarm_in
from tests.integration.thinking import thinking

THINKING = "python:tests.integration.thinking:ThinkingLake"
DUEL = "python:tests.integration.thinking:Duel"

FIRST_TURNS = 8
"""More than the four episodes of the held-out prompts have: some are of episodes to train on."""

pytestmark = pytest.mark.slow


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with swarm_in(tmp_path) as processes:
        processes.lead_with(audit_share=1.0, reward_timeout_s=120, eval_prompts=4)
        yield processes


def lead(swarm: Swarm, task: str, *arguments: str, steps: int = 3) -> Learner:
    place = () if "--port" in arguments else ("--port", "0")
    return swarm.lead(*place, "--model", "tiny", "--task", task, "--steps", str(steps), *arguments)


def join(swarm: Swarm, learner: Learner, count: int, *, name: str = "sampler") -> list[Node]:
    return [swarm.join(learner.url(), name=f"{name}-{number}") for number in range(count)]


def node_of(sampler: Node) -> str:
    return str(sampler.status()["node"])


def has_drawn(learner: Learner, sampler: Node, turns: int) -> bool:
    return accepted_by(learner.status()).get(node_of(sampler), 0) >= turns


def silent(learner: Learner) -> set[str]:
    return {event["node"] for event in learner.events() if event["kind"] == "sampler_silent"}


def ends_well(learner: Learner, *samplers: Node, steps: int = 3) -> list[dict[str, Any]]:
    """Wait for the end of the run, in which nothing was amiss. Return its episodes."""
    assert learner.wait() == 0, learner.output()
    for sampler in samplers:
        assert sampler.wait() == 0, sampler.output()
    assert {event["kind"] for event in learner.events()} & {"caught", "unaudited", "reward_failed"} == set()
    assert learner.verified()["batches"] == steps
    lines = learner.metrics()
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert lines[-1]["audit/rollouts"] > 0
    assert max(line.get("mismatch_kl", 0.0) for line in lines) < 1e-3
    episodes = exported(learner)
    names = [(one["group"], one["index"]) for one in episodes]
    assert len(names) == len(set(names))
    assert sum(one["step"] is not None for one in episodes) == 16 * steps
    for one in episodes:
        is_whole(one)
    return episodes


def exported(learner: Learner) -> list[dict[str, Any]]:
    to = learner.run_dir.parent / "rollouts.jsonl"
    done = command("export", "rollouts", str(learner.run_dir), "--to", str(to))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in to.read_text().splitlines()]


def is_whole(one: dict[str, Any]) -> None:
    """An episode has turns, all of its drawn tokens are in them, and its first player has its reward."""
    first = one["turns"][0]["seat"]
    drawn = {place for turn in one["turns"] for place in range(turn["start"], turn["end"])}
    assert drawn == {place for span in one["spans"] for place in range(span["start"], span["end"])}
    assert all(one["logprobs"][place] == 0 for place in range(len(one["token_ids"])) if place not in drawn)
    assert one["reward"] == pytest.approx(sum(turn["reward"] for turn in one["turns"] if turn["seat"] == first))


def nodes_of(one: dict[str, Any]) -> set[str]:
    return {turn["node"] for turn in one["turns"]}


def test_a_sampler_killed_in_the_middle_of_episodes_leaves_them_to_others(swarm: Swarm) -> None:
    learner = lead(swarm, THINKING)
    with thinking(learner.process.pid):
        (victim,) = join(swarm, learner, 1, name="victim")
        eventually(lambda: has_drawn(learner, victim, FIRST_TURNS), learner, "the first turns are drawn")
        killed = node_of(victim)
        victim.kill()
        (other,) = join(swarm, learner, 1, name="other")
        eventually(lambda: killed in silent(learner), learner, "the victim is missed")
    episodes = ends_well(learner, other)
    moved = [one for one in episodes if killed in nodes_of(one) and len(nodes_of(one)) > 1]
    assert moved
    for one in moved:
        assert [turn["node"] == killed for turn in one["turns"]] == [True] + [False] * (len(one["turns"]) - 1)
        assert one["node"] == one["turns"][-1]["node"]


@pytest.mark.long
def test_a_learner_killed_in_the_middle_of_episodes_begins_them_again(swarm: Swarm) -> None:
    learner = lead(swarm, THINKING)
    with thinking(learner.process.pid):
        (early,) = join(swarm, learner, 1, name="early")
        eventually(lambda: has_drawn(learner, early, FIRST_TURNS), learner, "the first turns are drawn")
        began = node_of(early)
        learner.kill()
    early.kill()
    again = swarm.resume(learner, name="again")
    episodes = ends_well(again, *join(swarm, again, 1, name="late"))
    assert began not in {turn["node"] for one in episodes for turn in one["turns"]}


@pytest.mark.long
def test_two_players_train_on_their_games(swarm: Swarm) -> None:
    learner = lead(swarm, DUEL)
    episodes = ends_well(learner, *join(swarm, learner, 2))
    for one in episodes:
        assert sorted(turn["seat"] for turn in one["turns"]) == [0, 0, 1, 1]
        assert (one["seats"][0], len(one["seats"])) == (0, 2)
        assert one["rewards"]["reward_of_player_2"] == -one["reward"]
    assert {one["reward"] for one in episodes} >= {-1.0, 1.0}
    assert command("report", str(learner.run_dir)).returncode == 0
    assert '"player":2' in (learner.run_dir / "report.html").read_text()


@pytest.mark.slow
def test_an_agent_is_trained_on_through_the_endpoint(swarm: Swarm) -> None:
    """It makes three calls an episode, of which the second goes on from the first unless a stop token ended that. The
    engine draws each within its limits."""
    pytest.importorskip("openai", reason="the extra agents is not installed")
    learner = lead(swarm, f"agent:{Path(__file__).with_name('players.py')}:counts")
    episodes = ends_well(learner, *join(swarm, learner, 1))
    for one in episodes:
        seats = [turn["seat"] for turn in one["turns"]]
        assert seats in ([1, 1, 2], [1, 2, 3])
        assert [turn["end"] - turn["start"] <= 2 for turn in one["turns"]] == [True] * 3
        assert len({round(sum(t["reward"] for t in one["turns"] if t["seat"] == seat), 6) for seat in seats}) == 1
    lines = learner.metrics()
    assert all(line["grad_norm"] > 0 for line in lines), "rewards differ, and are trained on"
    assert all(1.0 <= line["rewards/forks/mean"] < 2.0 for line in lines)
    report, *_ = verify_directory(learner.run_dir)
    assert (report.turns, report.breaches) == (3 * report.payloads, [])
    assert 2 * report.payloads <= report.streams < 3 * report.payloads


@pytest.mark.long
def test_a_taskset_of_verifiers_is_trained_on_through_the_endpoint(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verifiers' own environment server plays; all that it asks for are turns of leased episodes."""
    pytest.importorskip("verifiers", reason="the extra verifiers is not installed")
    # Modules are found where the learner was started.
    monkeypatch.chdir(Path(__file__).parents[2] / "examples" / "verifiers")
    learner = lead(swarm, "verifiers:echo_digits")
    episodes = ends_well(learner, *join(swarm, learner, 1))
    assert {turn["seat"] for one in episodes for turn in one["turns"]} == {1}
    # A turn that is too long for its digit ends some of them.
    assert {len(one["turns"]) for one in episodes} <= {1, 2}
    assert sum(len(one["turns"]) == 2 for one in episodes) > len(episodes) / 2
    lines = learner.metrics()
    assert all(line["grad_norm"] > 0 for line in lines), "rewards differ, and are trained on"
