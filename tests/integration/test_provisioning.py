"""Who is active and what is paid in a swarm of real processes at the pace of a large model's: a step takes a second,
each sampler draws about 8.4 rollouts a second, and three of them are what the learner needs. How busy the learner is
then: tests/simulation/test_capacity_swarm.py."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.integration.processes import Learner, Node, Swarm, eventually

NOISE = 0.1
"""Every step and every batch takes up to so much more or less; on top of it comes what the machine does."""

NEEDED = 3

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


def _changes(learner: Learner) -> list[dict[str, Any]]:
    """Who stepped in and who stepped back; the last line of the file may be half written."""
    text = (learner.run_dir / "events.jsonl").read_text()
    events = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [event for event in events if event["kind"] in ("activated", "stood_by")]


def _passes(learner: Learner, steps: int) -> None:
    wanted = learner.status()["step"] + steps
    eventually(lambda: learner.status()["step"] >= wanted, learner, f"{steps} more steps")


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
    changes = len(_changes(learner))
    _passes(learner, 8)
    assert len(_changes(learner)) == changes, "nothing flaps at this noise"

    cheap[0].kill()
    eventually(lambda: _active(learner) & dear_nodes, learner, "a standby steps in")
    assert [one["reason"] for one in _changes(learner)][-1] == "samplers were lost: you step in"
    _passes(learner, 3)


@pytest.mark.long
def test_a_run_ends_in_good_order_when_it_has_cost_enough_and_goes_on_with_more(swarm: Swarm) -> None:
    learner = _lead(swarm, "--max-cost", "12", groups_per_step=2, step_s=0.3)
    sampler = _join_when_it_runs(swarm, learner, "only")
    assert learner.wait() == 0, learner.output()
    assert sampler.wait() == 0, sampler.output()
    assert learner.says("--max-cost is 12: it ends here; to go on, resume it with more")
    summary = learner.summary()
    assert summary["cost"]["cost_total"] >= 12
    assert (learner.run_dir / "checkpoints" / f"step-{summary['step']:06d}").is_dir()
    costs = [row["cost_total"] for row in learner.metrics()]
    assert (costs, len(costs)) == (sorted(costs), summary["step"])

    again = swarm.resume(learner, "--max-cost", "24", "--target", "0.99", name="again")
    sampler = _join_when_it_runs(swarm, again, "other")
    assert again.wait() == 1, again.output()
    assert sampler.wait() == 0
    more = [row["cost_total"] for row in again.metrics()][len(costs) :]
    assert costs[-1] <= more[0]
    assert again.summary()["cost"]["cost_total"] >= 24
