"""Who is active in a swarm of real processes at the pace of a large model's: the trainer takes a second for a step,
each sampler draws about 8.4 rollouts a second, and three of them are what the learner needs."""

from __future__ import annotations

import json
import math
import re
from statistics import median
from typing import Any

import pytest

from tests.integration.processes import Learner, Node, Swarm, eventually

MISSED = 0.5
"""Of the idle time that one sampler too few costs: whoever steps in leaves the learner less idle than this."""

NOISE = 0.1
"""Every step and every batch takes up to so much more or less; on top of it comes what the machine does."""

NEEDED = 3
STEADY_STEPS = 8
PERIODS = 3
"""Of publications, within which the learner is busy again after a loss."""

BY_THE_HOUR = 3600.0
"""A sampler of this price costs 1 in a second."""


def _lead(swarm: Swarm, *arguments: str, groups_per_step: int, step_s: float) -> Learner:
    """A learner that behaves as if its model were large, as scripted samplers to come will."""
    swarm.lead_with(groups_per_step=groups_per_step, max_new_tokens=8)
    swarm.draw_at(8.0, NOISE)
    module = f"tests.slow_steps {step_s} {NOISE}"
    return swarm.lead("--port", "0", "--steps", "100000", *arguments, module=module)


def _join(swarm: Swarm, learner: Learner, kind: str, price: float, count: int) -> list[Node]:
    asked, names = ("--cost-per-hour", str(price)), [f"{kind}-{number}" for number in range(count)]
    return [swarm.scripted(learner.url(), *asked, name=name, device_name=kind) for name in names]


def _join_when_it_runs(swarm: Swarm, learner: Learner, kind: str) -> Node:
    """The one sampler of a run that pays for it: not for the time that a trainer takes to start."""
    eventually(lambda: learner.status()["state"] == "running", learner, "it runs")
    return _join(swarm, learner, kind, BY_THE_HOUR, 1)[0]


def _node(sampler: Node) -> str:
    """Its id, as it says at its start."""
    sampler.url()
    found = re.search(r"^sampler ([0-9a-f]{32})", sampler.output(), re.MULTILINE)
    assert found is not None
    return found.group(1)


def _active(learner: Learner) -> set[str]:
    """Those that have said what they are, and are not on standby."""
    return {one["node"] for one in learner.status()["samplers"] if one["device_class"] and not one["standby"]}


def _rows(learner: Learner) -> list[dict[str, Any]]:
    """Whole lines of metrics.jsonl."""
    text = (learner.run_dir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _events(learner: Learner, *kinds: str) -> list[dict[str, Any]]:
    text = (learner.run_dir / "events.jsonl").read_text()
    events = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [event for event in events if event["kind"] in kinds]


def _passes(learner: Learner, steps: int) -> int:
    """Wait for so many more steps; the number of the last one."""
    wanted = learner.status()["step"] + steps
    eventually(lambda: learner.status()["step"] >= wanted, learner, f"{steps} more steps")
    return int(wanted)


@pytest.mark.long
def test_cheaper_samplers_take_over_and_standbys_step_in_for_those_that_die(swarm: Swarm) -> None:
    learner = _lead(swarm, groups_per_step=5, step_s=1.0)
    dear = _join(swarm, learner, "dear", 80.0, NEEDED)
    eventually(lambda: len(_active(learner)) == NEEDED, learner, "all are needed and active")
    _passes(learner, 3)

    cheap = _join(swarm, learner, "cheap", 40.0, NEEDED)
    cheap_nodes, dear_nodes = {_node(one) for one in cheap}, {_node(one) for one in dear}
    eventually(lambda: _active(learner) == cheap_nodes, learner, "the cheap ones alone are active")
    why = "you cost more than the samplers that suffice"
    for sampler in dear:
        eventually(lambda: sampler.says("\nstandby: "), sampler, "it says that it waits")  # noqa: B023
        eventually(lambda: why in sampler.status()["state"], sampler, "it can show why")  # noqa: B023
    assert {one["standby"] == "" for one in learner.status()["samplers"] if one["node"] in dear_nodes} == {False}

    changes = len(_events(learner, "activated", "stood_by"))
    step = _passes(learner, STEADY_STEPS)
    assert len(_events(learner, "activated", "stood_by")) == changes, "nothing flaps at this noise"
    assert median(row["idle_share"] for row in _rows(learner)[step - STEADY_STEPS : step]) < MISSED / NEEDED

    for sampler in cheap[: math.ceil(NEEDED / 3)]:
        sampler.kill()
    eventually(lambda: _events(learner, "sampler_silent"), learner, "the loss is noticed")
    noticed = learner.status()["step"]
    eventually(lambda: _active(learner) & dear_nodes, learner, "a standby steps in")
    assert len(_events(learner, "activated", "stood_by")) > changes
    assert [event["reason"] for event in _events(learner, "activated")][-1] == "samplers were lost: you step in"
    _passes(learner, PERIODS + STEADY_STEPS)
    after = {row["step"]: row["idle_share"] for row in _rows(learner)}
    assert min(after[noticed + i] for i in range(1, PERIODS + 1)) < MISSED / NEEDED, after
    assert median(after[noticed + i] for i in range(PERIODS, PERIODS + STEADY_STEPS)) < MISSED / NEEDED, after


@pytest.mark.long
def test_a_run_ends_in_good_order_when_it_has_cost_enough_and_goes_on_with_more(swarm: Swarm) -> None:
    learner = _lead(swarm, "--max-cost", "12", groups_per_step=2, step_s=0.3)
    sampler = _join_when_it_runs(swarm, learner, "only")
    assert learner.wait() == 0, learner.output()
    assert sampler.wait() == 0, sampler.output()
    said = [line for line in learner.output().splitlines() if "--max-cost" in line]
    assert len(said) == 1
    assert said[0].endswith("--max-cost is 12: it ends here; to go on, resume it with more")
    summary = learner.summary()
    assert summary["cost"]["cost_total"] >= 12
    assert sum(tally["rollouts"] for tally in summary["cost"]["by_class"].values()) > 0
    rows = _rows(learner)
    assert rows[-1]["step"] == summary["step"] > 0
    assert (learner.run_dir / "checkpoints" / f"step-{summary['step']:06d}").is_dir()
    costs = [row["cost_total"] for row in rows]
    assert costs == sorted(costs)
    assert rows[-1]["cost_per_step"] == pytest.approx(costs[-1] / summary["step"])

    again = swarm.resume(learner, "--max-cost", "24", "--target", "0.99", name="again")
    sampler = _join_when_it_runs(swarm, again, "other")
    assert again.wait() == 1, again.output()
    assert sampler.wait() == 0
    more = _rows(again)[len(rows) :]
    assert more
    assert costs[-1] <= more[0]["cost_total"]
    assert again.summary()["cost"]["cost_total"] >= 24
