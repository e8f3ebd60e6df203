"""How a run's files are read, and what the table says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import UserError
from swarm.types import NodeId
from tests.redteam.campaign import FLATTERING, NAMES, NOT_TARGETED, AttackRow, CampaignReport, chosen, plans, row_of
from tests.redteam.runs import AttackPlan, Ran, Swarm
from tests.redteam.sampler import ENGINES

DOCUMENT = Path(__file__).parents[3] / "docs" / "redteam.md"


def ran(
    *events: dict[str, Any],
    printed: str = "",
    stopped: dict[str, str] | None = None,
    held_out: float | None = None,
    **verdicts: int,
) -> Ran:
    """A run with honest h and attackers named as their only node."""
    nodes = {name: {NodeId(name)} for name in NAMES}
    nodes |= {"honest": {NodeId("h")}, "sybils": {NodeId("s1"), NodeId("s2")}}
    summary = {"samplers": [{"node": name, "verdicts": verdicts} for name in ("equivocation", "h")]}
    found = Ran(nodes=nodes, events=list(events), summary=summary, stopped=stopped or {}, printed=printed)
    found.held_out = held_out
    return found


def caught(node: str, detector: str = "draws", audited: int = 9) -> dict[str, Any]:
    return {"kind": "caught", "node": node, "detector": detector, "audited": audited}


def withheld(**rollouts: int) -> dict[str, Any]:
    return {"kind": "withheld", "step": 1, "rollouts": rollouts}


def test_a_verdict_names_detector_and_rollouts_and_is_of_its_node_alone() -> None:
    run = ran(caught("oracle", "draws", 5), {"kind": "unaudited", "version": "0.3", "rollouts": 3})
    assert run.caught("oracle") == ("draws", 5)
    assert run.caught("copies") is None
    assert run.false_alarms() == 0


def test_claims_that_were_withheld_count_where_there_is_no_verdict() -> None:
    run = ran(withheld(temperature=4, oracle=2), caught("oracle", "draws", 5))
    assert run.caught("temperature") == ("claims", None)
    assert run.caught("oracle") == ("draws", 5)


def test_of_several_identities_each_has_to_be_caught() -> None:
    assert ran(withheld(s1=4)).caught("sybils") is None
    assert ran(withheld(s1=4), caught("s2", "log-probs", 7)).caught("sybils") == ("log-probs", 7)
    thief = ran(caught("s2", "draws", 1))
    thief.nodes["stolen-answers"] = {NodeId("s1"), NodeId("s2")}
    assert thief.caught("stolen-answers") == ("draws", 1)
    nobody = ran()
    nobody.nodes["sybils"] = set()
    assert nobody.caught("sybils") is None


def test_what_stops_the_others_is_read_from_where_it_shows() -> None:
    assert ran(duplicate=3).caught("equivocation") == ("duplicates", None)
    assert ran(accepted=3).caught("equivocation") is None
    assert ran(printed="node x sent wrong chunks again and again; ignoring").caught("wrong-chunks") == ("digests", None)
    assert ran().caught("wrong-chunks") is None
    assert ran(stopped={"floods": "status 429", "bombs": ""}).caught("floods") == ("status 429", None)
    assert ran(stopped={"floods": "status 429", "bombs": ""}).caught("bombs") is None


def test_an_honest_node_that_is_caught_or_doubted_is_a_false_alarm() -> None:
    assert ran(caught("h")).false_alarms() == 1
    assert ran(withheld(h=1, oracle=2)).false_alarms() == 1
    assert ran(caught("h"), withheld(h=1)).false_alarms() == 1
    alarmed = ran(caught("h"), withheld(h=1, oracle=2), withheld(oracle=1))
    alarmed.evidence = [{"node": one, "why": "it is off"} for one in ("oracle", "h")]
    assert alarmed.alarms() == [withheld(h=1, oracle=2), {"node": "h", "why": "it is off"}]


def test_every_attack_is_described() -> None:
    rows = [line.split("`")[1] for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(NAMES)
    assert {*NAMES} > NOT_TARGETED | FLATTERING


def test_attacks_are_chosen_by_name() -> None:
    assert chosen("floods,oracle,floods") == ("floods", "oracle")
    assert chosen("") == NAMES
    with pytest.raises(UserError, match="--only flods: one of wrong-model"):
        chosen("oracle,flods")


def planned(*names: str) -> list[tuple[int, tuple[str, ...], int, bool]]:
    found = plans(names, steps=120, crowd_steps=40, seed=3)
    assert {one.seed for one in found} <= {3}
    return [(one.honest, one.attackers, one.steps, one.measured) for one in found]


def test_who_hands_in_answers_attacks_alone_and_is_compared_with_honest_samplers() -> None:
    assert planned("oracle", "two-liars", "five-keys") == [
        (4, (), 120, True),
        (3, ("oracle",), 120, True),
        (2, ("two-liars",) * 2, 120, True),
        (3, ("five-keys",) * 5, 120, True),
    ]


def test_all_others_attack_together() -> None:
    assert planned("floods", "equivocation") == [(3, ("floods", "equivocation"), 40, False)]
    assert planned() == [(4, (), 120, True)]
    everybody = [name for _, attackers, _, _ in planned(*NAMES) for name in dict.fromkeys(attackers)]
    assert sorted(everybody) == sorted(NAMES)
    assert len(planned(*NAMES)) == len(ENGINES) + 2


def row(name: str = "oracle", *, by: str = "draws", held_out: float | None = None) -> AttackRow:
    return row_of(name, [ran(*([caught(name, by)] if by else []), held_out=held_out)])


def test_a_row_is_of_all_seeds() -> None:
    always = row_of("oracle", [ran(caught("oracle", "draws", 3), held_out=0.9), ran(caught("oracle"), held_out=1.0)])
    assert (always.caught, always.audited, always.detector, always.held_out) == (True, 9, "draws", 0.9)
    once = row_of("oracle", [ran(caught("oracle"), held_out=1.0), ran(held_out=0.2)])
    assert (once.caught, once.audited, once.detector, once.held_out) == (False, 9, "draws", 0.2)


@pytest.mark.parametrize(
    ("found", "is_expected"),
    [
        (row(), True),
        (row(held_out=0.0), True),
        (row(by="", held_out=0.92), True),
        (row(by="", held_out=0.90), False),
        (row(by=""), False),
        (row("hoarded-leases", by=""), True),
        (row("held-out-oracle", by="", held_out=1.0), False),
        (row("held-out-oracle", held_out=1.0), True),
    ],
)
def test_the_campaign_fails_for_a_harmful_attacker_that_is_not_caught(found: AttackRow, is_expected: bool) -> None:
    assert CampaignReport(attacks=[row(), found], control=[0.99, 0.96]).as_expected == is_expected


def test_the_campaign_fails_for_a_run_that_is_stuck_though_the_attacker_was_caught() -> None:
    stuck = ran(caught("hanging-answers"), held_out=0.0)
    stuck.ended = False
    report = CampaignReport(attacks=[row_of("hanging-answers", [stuck])], control=[1.0])
    assert not report.as_expected
    assert report.table().splitlines()[1].split() == ["hanging-answers", "draws", "9", "stuck"]


def test_the_campaign_fails_for_a_false_alarm() -> None:
    assert CampaignReport(control=[1.0]).as_expected
    assert not CampaignReport(attacks=[row()], false_alarms=1).as_expected


def test_the_table_has_a_line_for_each_attack_and_one_for_the_honest() -> None:
    rows = [row("invented-log-probs", by="log-probs", held_out=0.99), row("floods", by="")]
    lines = CampaignReport(attacks=rows, false_alarms=2, control=[1.0], wall_s=61.0).table().splitlines()
    assert lines[1].split() == ["invented-log-probs", "log-probs", "9", "0.99"]
    assert lines[2].split() == ["floods", "nobody"]
    assert lines[3] == "false alarms: 2; honest samplers alone: 1.000; 61 s"
    seldom = row_of("oracle", [ran(caught("oracle")), ran()])
    assert "not always draws" in CampaignReport(attacks=[seldom]).table()


def test_the_object_has_what_scripts_read() -> None:
    found = json.loads(json.dumps(CampaignReport(attacks=[row(held_out=0.98)], control=[1.0]).as_object()))
    (attack,) = found.pop("attacks")
    known = {"name": "oracle", "targeted": True, "caught": True, "audited": 9, "detector": "draws", "ended": True}
    assert attack == {**known, "held_out": 0.98, "noted": None}
    run = {"control": {"held_out": [1.0]}, "false_alarms": 0, "alarms": [], "as_expected": True, "wall_s": 0.0}
    assert found == run


@pytest.mark.parametrize(
    ("summary", "held_out"),
    [
        ({"held_out": [{"version": 0, "exact_match": 0.0}, {"version": 20, "exact_match": 0.75}]}, 0.75),
        ({"held_out": [{"version": 0, "exact_match": 0.5}]}, 0.0),
        ({"held_out": []}, 0.0),
        (None, 0.0),
    ],
)
def test_a_run_that_does_not_reach_its_end_has_learned_nothing(
    summary: dict[str, Any] | None, held_out: float, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text(json.dumps(caught("x")) + "\n")
    (tmp_path / "noting").mkdir()
    (tmp_path / "noting" / "noted").write_text("2.5")
    if summary is not None:
        (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    run = Ran()
    Swarm(tmp_path)._read(AttackPlan(honest=0, steps=20), run)
    assert (run.held_out, run.noted, len(run.events)) == (held_out, 2.5, 1)
    assert run.ended == bool(held_out)
    Swarm(tmp_path)._read(AttackPlan(honest=0, steps=20, measured=False), crowd := Ran())
    assert crowd.held_out is None


def test_the_room_loads_no_heavy_library_before_an_engine_is_wanted() -> None:
    program = "import tests.redteam.campaign, sys; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
