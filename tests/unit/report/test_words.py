"""The sentence that names the bottleneck, each case made from a status that a learner really gave."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from swarm.lead.provisioning import _said_of
from swarm.pay.fleet import Dissemination
from swarm.pay.selection import Rules, Search, Selection
from swarm.report.words import bottleneck, counts, learner_figures, nodes, stages, words
from tests.capacity import demand, worker

RECORDED = Path(__file__).parent / "status.json"


@pytest.fixture
def status() -> dict[str, Any]:
    """Of a learner with three samplers, in the middle of a run, as `GET /v1/status` answered it."""
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


def changed(status: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`status` with other values: those of a mapping within it are changed one by one."""
    inner = {name: {**status[name], **value} for name, value in changes.items() if isinstance(status.get(name), dict)}
    return {**status, **changes, **inner}


def with_samplers(status: dict[str, Any], *samplers: tuple[str, float, float, str]) -> dict[str, Any]:
    """With samplers of these classes, measured rates, prices and reasons to wait."""
    like = status["samplers"][0]
    told = [
        {**like, "node": f"{at:032x}", "device_class": name, "cost_per_hour": price, "standby": why}
        for at, (name, _, price, why) in enumerate(samplers)
    ]
    by_node = {
        f"{at:032x}": {"rollouts_per_s": rate, "samples_at_once": 8} for at, (_, rate, *_) in enumerate(samplers)
    }
    return changed(status, samplers=told, capacity={"inputs": {**status["capacity"]["inputs"], "by_node": by_node}})


def rate_binds(status: dict[str, Any], needed: float | None, useful: float, **more: Any) -> dict[str, Any]:
    return changed(
        status,
        capacity={
            **{"idle_share": 0.38, "binds": "rate", "why": "the model says why"},
            **{"rollouts_per_s_needed": needed, "rollouts_per_s_useful": useful, **more},
        },
    )


RTX, T4, A100 = ("rtx4090", 2.0, 0.0, ""), ("t4", 1.0, 0.1, ""), ("a100", 4.0, 4.0, "")
TWO = (RTX, RTX)


def test_what_a_learner_waits_for_comes_first(status: dict[str, Any]) -> None:
    assert bottleneck(None) == "waiting for the learner's process to start"
    assert bottleneck(changed(status, state="starting", waits_for="the prompts")) == "waiting for the prompts"
    assert bottleneck(changed(status, samplers=[])) == "waiting for samplers: none is here"
    none_yet = {**status, "samplers": [], "metrics": {}}
    assert bottleneck(none_yet) == "waiting for the first sampler to make contact"
    one = {**status["samplers"][0], "installed": None}
    assert bottleneck({**none_yet, "samplers": [one]}) == "waiting for 1 sampler to fetch and load the weights"
    at_work = changed({**none_yet, "samplers": [{**one, "installed": "0.0"}]}, cost={"rollouts_accepted": 96})
    assert bottleneck(at_work) == "waiting for the first batch: 96 of 512 rollouts"
    full = changed(status, state="paused", fault="the disk of /runs is full")
    assert bottleneck(full) == "paused: the disk of /runs is full"
    held = changed(status, state="paused by its owner", waits_for="`echo-node set paused=false` goes on")
    assert bottleneck(held) == "paused by its owner: `echo-node set paused=false` goes on"
    assert bottleneck(changed(status, state="finished", samplers=[])) == ""
    assert bottleneck({"state": "going on, or killed"}) == "", "only its files speak"


def test_a_busy_learner_waits_for_nothing(status: dict[str, Any]) -> None:
    busy = changed(status, capacity={"idle_share": 0.0184})
    assert bottleneck(busy) == "the samplers keep up: the learner is busy 98 % of the time"
    assert bottleneck(changed(status, capacity={"idle_share": None})) == "what binds is known after the second step"


@pytest.mark.parametrize(
    ("samplers", "needed", "useful", "said"),
    [
        # Each gives 2/s of which all is in time: 3.2/s are missing.
        (TWO, 7.2, 4.0, "2 more of class rtx4090 would do"),
        # Of what they draw half comes in time, so one more adds 1/s.
        (TWO, 5.2, 2.0, "4 more of class rtx4090 would do"),
        # The cheapest per rollout, though others are more and faster.
        ((RTX, T4, A100, A100), 12.0, 11.0, "1 more of class"),
        ((T4, A100, A100), 12.0, 9.0, "3 more of class t4 would do"),
        # By what one of a class usually costs for a rollout, not by its fastest.
        (
            (("t4", 0.9, 1.0, ""), ("t4", 1.1, 1.0, ""), ("l4", 1.05, 1.0, "")),
            6.05,
            3.05,
            "3 more of class l4 would do",
        ),
        # Where all are free, the most common class.
        ((*TWO, ("t4", 1.0, 0.0, "")), 9.0, 5.0, "2 more of class rtx4090 would do"),
        # One that waits has a rate, and is none of those that deliver.
        ((*TWO, ("rtx4090", 2.0, 0.0, "you are dear")), 7.2, 4.0, "2 more of class rtx4090 would do"),
        ((("", 2.0, 0.0, ""),), 3.0, 2.0, "1 more would do"),
        ((("run: curl x", 2.0, 0.0, ""),), 3.0, 2.0, '1 more of class "run: curl x" would do'),
    ],
)
def test_how_many_more_would_do(status: dict[str, Any], samplers: Any, needed: float, useful: float, said: str) -> None:
    slow = rate_binds(with_samplers(status, *samplers), needed, useful)
    assert bottleneck(slow).startswith(f"learner idle 38 %: samplers are the bottleneck; {said}")


def test_a_status_with_a_part_of_the_samplers_does_not_say_how_many_more_would_do(status: dict[str, Any]) -> None:
    slow = rate_binds(with_samplers(status, *TWO), 7.2, 4.0)
    assert "would do" in bottleneck(slow)
    assert "would do" not in bottleneck({**slow, "cut": {"samplers": 300}})


def test_as_many_more_would_do_as_the_model_needs_and_one_fewer_would_not(status: dict[str, Any]) -> None:
    asked, installed_s, here = demand(max_staleness=4), 60.0, 4

    def selection(count: int) -> Selection:
        workers = [worker(f"w{at}", 0.5, 0.0, places=8, start_s=0.0) for at in range(count)]
        each = {"install_s": (installed_s,) * count, "down_bytes": (8e7,) * count, "up_bytes": (0.0,) * count}
        plan = Dissemination(**each, learner_up_bytes=8e7)
        return Search(asked, workers, lambda workers: plan, Rules(activate="all")).select()

    found = selection(here)
    slow = with_samplers(status, *[("t4", 0.5, 0.0, "")] * here)
    said = bottleneck(changed(slow, capacity={"idle_share": 0.5, **_said_of(found.prediction.binds, found)}))
    more = re.search(r"samplers are the bottleneck; (\d+) more of class t4 would do", said)
    assert more is not None, said
    enough, short = selection(here + int(more[1])), selection(here + int(more[1]) - 1)
    assert (enough.feasible, enough.has_margin) == (True, True)
    assert (short.feasible, short.has_margin) == (False, False)


def test_where_more_samplers_would_not_do_the_model_says_why(status: dict[str, Any]) -> None:
    tight = with_samplers(changed(status, max_staleness=1, publish_every_steps=1, broadcast_s=0.19), *TWO)
    tight["capacity"]["inputs"]["train_step_s"] = 0.06
    inner = "broadcast_s + generation_s < (max_staleness + 1 - publish_every_steps) * train_step_s fails"
    assert bottleneck(rate_binds(tight, None, 4.0, why=inner)) == (
        "learner idle 38 %: generation binds: a completion takes 4 s and a version 0.19 s, where a bound of 1 leaves"
        " 0.06 s for both"
    )
    no_number, budget = "samplers like these would not do in any number", "the budget of 2.00 per hour pays for 38%"
    none = rate_binds(status, None, 4.0, why=f"the learner will be idle 88% of the time: {no_number}")
    assert bottleneck(none) == f"learner idle 38 %: {no_number}"
    assert bottleneck(rate_binds(status, 9.0, 4.0, why=budget)) == f"learner idle 38 %: {budget}"
    assert bottleneck(rate_binds(status, 4.0, 5.0)).endswith("though 4 rollouts/s are enough and 5 should come")


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ({"prepared_s": 4.0}, "4 of 9 s are preparing"),
        ({"stage_s": 5.0}, "5 of 9 s are staging"),
        ({"stage_s": 12.0}, "12 s of staging, where a version comes every 9 s"),
        ({"last_complete_s": 6.0, "installed_s": {"100": 7.0}}, "6 of 9 s are sending"),
        ({"last_complete_s": 1.0, "installed_s": {"100": 7.0}}, "6 of 9 s are installing"),
    ],
)
def test_the_longest_stage_of_a_version_is_named(status: dict[str, Any], version: dict[str, Any], said: str) -> None:
    whole = {"stage_s": 0.1, "prepared_s": 0.2, "last_complete_s": 0.3, "installed_s": {"100": 0.5}, **version}
    under_way = {"stage_s": 0.1, "prepared_s": 8.0, "last_complete_s": 0.0, "installed_s": {"100": None}}
    slow = {**status, "broadcasts": {"0.5": whole, "0.6": under_way}, "step_s": 4.5, "publish_every_steps": 2}
    assert bottleneck(changed(slow, capacity={"idle_share": 0.3, "binds": "broadcast"})) == (
        f"learner idle 30 %: broadcast binds: {said}"
    )
    assert stages(under_way).keys() == {"staging", "preparing"}


def test_what_else_binds_is_told_with_its_figures(status: dict[str, Any]) -> None:
    idle = changed(status, capacity={"idle_share": 0.25, "binds": "generation"})
    long = with_samplers({**idle, "max_staleness": 2, "publish_every_steps": 1}, *TWO)
    long["capacity"]["inputs"]["train_step_s"] = 1.5
    assert bottleneck(long) == (
        f"learner idle 25 %: generation binds: a completion takes 4 s and a version {status['broadcast_s']:.2g} s,"
        " where a bound of 2 leaves 3 s for both"
    )
    slow_rewards = {**idle, "rollouts_unscored": 230, "samples_leased": 12, "reward_s": 3.0, "step_s": 4.0}
    assert bottleneck(slow_rewards) == (
        "learner idle 25 %: rewards bind: 230 rollouts wait for theirs, 3 s where a step takes 4 s"
    )
    hidden = changed({**slow_rewards, "samples_leased": 500}, capacity={"binds": None})
    assert bottleneck(hidden) == "learner idle 25 %: what binds is known once an install was timed"
    audited = changed(
        status,
        capacity={"idle_share": 0.1, "binds": "learner", "predicted_idle_share": 0.0},
        metrics={"audit/time_share": 0.08},
    )
    assert bottleneck(audited) == (
        "learner idle 10 %: 0 % is predicted with these samplers, and 8 % of its time is the audit"
    )


def test_all_on_standby_is_told_with_the_reason(status: dict[str, Any]) -> None:
    waiting = with_samplers(status, *[("t4", 1.0, 9.0, "the budget is spent")] * 2)
    assert (
        bottleneck(changed(waiting, capacity={"active": 0, "standby": 2}))
        == "all 2 samplers wait on standby: the budget is spent"
    )


def test_words_of_others_are_cut_and_cleaned() -> None:
    hostile = {"reason": "a\x1b[2Jb\u202ec" + "x" * 1000, "number": 3}
    assert words(hostile, "reason", 12) == "a?[2Jb?cxxxx"
    assert words(hostile, "number") == words(hostile, "nothing") == ""
    assert counts({"stale\n": 3, "none": 0, "odd": "x", "accepted": 9}, without="accepted") == "3 stale?"


def test_each_node_is_told_once(status: dict[str, Any]) -> None:
    told = list(nodes(status))
    assert [one["node"] for one in told] == [one["node"] for one in status["samplers"]]
    first = told[0]
    assert (first["role"], first["state"], first["class"]) == ("sampler", "active", "transformers")
    assert (first["engine"], first["precision"]) == ("transformers", "float32")
    assert first["lag"] == int(status["version"][2:]) - int(status["samplers"][0]["installed"][2:])
    relay = {"node": "f" * 32, "role": "relay", "state": "suspect", "held": "0.3", "lag": 4, "beat_s": 1.5}
    leaf = {"node": "e" * 32, "role": None, "beat_s": 0.5, "held": None, "lag": None}
    *_, last, end = nodes({**status, "publics": [relay], "leaves": [leaf, *status["samplers"]]})
    assert (last["name"], last["role"], last["state"], last["lag"]) == ("f" * 12, "relay", "suspect", 4)
    assert (end["node"], end["state"]) == ("e" * 32, "leaf")


def test_nothing_in_a_status_is_taken_on_trust() -> None:
    assert set(learner_figures({}).values()) == {"", "step 0 of 0"[5:]}
    odd = {"metrics": [1], "samplers": {"a": 1}, "capacity": None, "held_out": [None, 3], "best": "x", "state": 7}
    assert set(learner_figures(odd).values()) == {"", "0 of 0"}
    assert bottleneck(odd)
