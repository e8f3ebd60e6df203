"""Who is active in a swarm of real processes at the pace of a large model's: a step takes a second, each sampler draws
about 8.4 rollouts a second, and three of them are what the learner needs. How busy the learner is then:
tests/simulation/test_capacity_swarm.py."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.integration.processes import Learner, Node, Swarm, eventually

NOISE = 0.1
"""Every step and every batch takes up to so much more or less; on top of it comes what the machine does."""

NEEDED = 3


def _join(swarm: Swarm, learner: Learner, kind: str, price: float, count: int) -> list[Node]:
    asked, names = ("--cost-per-hour", str(price)), [f"{kind}-{number}" for number in range(count)]
    return [swarm.scripted(learner.url(), *asked, name=name, device_name=kind) for name in names]


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
    # As if its model were large; so behave scripted samplers too.
    swarm.lead_with(groups_per_step=5, max_new_tokens=8)
    swarm.draw_at(8.0, NOISE)
    learner = swarm.lead("--port", "0", "--steps", "100000", module=f"tests.slow_steps 1.0 {NOISE}")
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
