"""How a run's files are read, and what the table says."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from swarm.errors import UserError
from swarm.redteam.campaign import EXPECTED, NOT_TARGETED, Report, chosen, crowds, row_of
from swarm.redteam.runs import Ran
from swarm.redteam.sampler import ENGINES, NODES, RELAYS
from swarm.redteam.wire import WIRE
from swarm.types import NodeId


def ran(
    *events: dict[str, Any], said: str = "", stopped: dict[str, str] | None = None, at: int = 40, **verdicts: int
) -> Ran:
    """A run with honest h and attackers named as their only node."""
    nodes = {name: {NodeId(name)} for name in EXPECTED} | {
        "honest": {NodeId("h")},
        "sybils": {NodeId("s1"), NodeId("s2")},
    }
    samplers = [{"node": name, "installed": f"0.{at}", "verdicts": verdicts} for name in ("equivocation", "h")]
    summary = {"samplers": samplers, "step": 40}
    return Ran(nodes=nodes, events=list(events), summary=summary, stopped=stopped or {}, said=said)


def caught(node: str, detector: str = "draws", audited: int = 9) -> dict[str, Any]:
    return {"kind": "caught", "node": node, "detector": detector, "audited": audited}


def withheld(**rollouts: int) -> dict[str, Any]:
    return {"kind": "withheld", "step": 1, "rollouts": rollouts}


def test_a_verdict_names_detector_and_rollouts_and_is_of_its_node_alone() -> None:
    run = ran(caught("oracle", "draws", 5), {"kind": "suspect", "node": "copies", "detector": "draws", "audited": 3})
    assert run.caught("oracle") == ("draws", 5)
    assert run.caught("copies") is None
    assert run.false_alarms() == 0


def test_claims_that_were_withheld_count_where_there_is_no_verdict() -> None:
    run = ran(withheld(temperature=4, oracle=2), caught("oracle", "draws", 5))
    assert run.caught("temperature") == ("claims", 1)
    assert run.caught("oracle") == ("draws", 5)


def test_of_several_identities_each_has_to_be_caught() -> None:
    assert ran(withheld(s1=4)).caught("sybils") is None
    assert ran(withheld(s1=4), caught("s2", "log-probs", 7)).caught("sybils") == ("log-probs", 7)
    nobody = ran()
    nobody.nodes["sybils"] = set()
    assert nobody.caught("sybils") is None


def test_what_stops_the_others_is_read_from_where_it_shows() -> None:
    assert ran(duplicate=3).caught("equivocation") == ("duplicates", 1)
    assert ran(accepted=3).caught("equivocation") is None
    assert ran(said="node x sent wrong chunks again and again; ignoring").caught("wrong-chunks") == ("digests", None)
    assert ran().caught("wrong-chunks") is None
    assert ran(stopped={"floods": "status 429", "bombs": ""}).caught("floods") == ("status 429", None)
    assert ran(stopped={"floods": "status 429", "bombs": ""}).caught("bombs") is None


def test_an_honest_node_that_is_caught_or_doubted_is_a_false_alarm() -> None:
    assert ran(caught("h")).false_alarms() == 1
    assert ran(withheld(h=1, oracle=2)).false_alarms() == 1
    assert ran(caught("h"), withheld(h=1)).false_alarms() == 1


def test_every_attack_is_expected_to_be_stopped_by_something() -> None:
    assert {*ENGINES, *NODES, *RELAYS, *WIRE} == EXPECTED.keys()
    assert EXPECTED.keys() > NOT_TARGETED
    assert len(EXPECTED) >= 12


def test_attacks_are_chosen_by_name() -> None:
    assert chosen("floods,oracle,floods") == ("floods", "oracle")
    assert chosen("") == tuple(EXPECTED)
    with pytest.raises(UserError, match="--only flods: one of wrong-model"):
        chosen("oracle,flods")


def test_all_that_was_chosen_attacks_once() -> None:
    assert [len(crowd) for crowd in crowds(["floods"])] == [1]
    together = crowds(tuple(EXPECTED))
    assert sorted(name for crowd in together for name in crowd) == sorted(EXPECTED)
    assert len(together) == 2


def report(*rows: Any, **rest: Any) -> Report:
    return Report(attacks=list(rows), **rest)


def test_the_campaign_fails_for_a_false_alarm_a_miss_or_a_cost() -> None:
    good, missed = row_of("oracle", ("draws", 2)), row_of("oracle", None)
    assert report(good, row_of("unmeasured-class", None)).as_expected
    assert not report(good, missed).as_expected
    assert not report(good, false_alarms=1).as_expected
    cheap, costly = replace(good, held_out_on=0.96), replace(good, held_out_on=0.94)
    assert report(cheap, held_out_honest=1.0).as_expected
    assert not report(costly, held_out_honest=1.0).as_expected


def test_the_table_has_a_line_for_each_attack_and_one_for_the_honest() -> None:
    row = replace(row_of("invented-log-probs", ("log-probs", 4)), held_out_on=0.99, held_out_off=0.0)
    lines = report(row, row_of("floods", None), false_alarms=2, held_out_honest=1.0, wall_s=61.0).table().splitlines()
    assert lines[1].split() == ["invented-log-probs", "log-probs", "4", "0.99", "0", "log-probs", "or", "claims"]
    assert lines[2].split() == ["floods", "nobody", "status", "429"]
    assert lines[3] == "false alarms: 2; held-out of honest samplers alone 1.000; 61 s"


def test_the_object_has_what_scripts_read() -> None:
    told = report(row_of("oracle", ("draws", 2))).as_object()
    assert told["false_alarms"] == 0
    assert (
        told["attacks"][0].items()
        >= {
            "name": "oracle",
            "targeted": True,
            "caught": True,
            "after_rollouts": 2,
            "detector": "draws",
        }.items()
    )


def test_the_room_loads_no_heavy_library_before_an_engine_is_wanted() -> None:
    program = "import swarm.redteam.campaign, sys; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
