"""How a run's files are read, and what the table says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swarm.types import NodeId
from tests.redteam.campaign import FLATTERING, NAMES, NOT_TARGETED, AttackRow, CampaignReport, plans, row_of
from tests.redteam.runs import AttackPlan, Ran, Swarm

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


@pytest.mark.parametrize(
    ("run", "attack", "verdict"),
    [
        (ran(caught("oracle", "draws", 5), withheld(oracle=2)), "oracle", ("draws", 5)),
        (ran(caught("oracle", "draws", 5)), "copies", None),
        (ran(withheld(temperature=4)), "temperature", ("claims", None)),
        (ran(withheld(s1=4)), "sybils", None),
        (ran(withheld(s1=4), caught("s2", "log-probs", 7)), "sybils", ("log-probs", 7)),
        (ran(duplicate=3), "equivocation", ("duplicates", None)),
        (ran(accepted=3), "equivocation", None),
        (ran(printed="node x sent wrong chunks again and again; ignoring"), "wrong-chunks", ("digests", None)),
        (ran(), "wrong-chunks", None),
        (ran(stopped={"floods": "status 429"}), "floods", ("status 429", None)),
        (ran(stopped={"bombs": ""}), "bombs", None),
    ],
)
def test_a_verdict_is_read_where_it_shows(run: Ran, attack: str, verdict: tuple[str, int | None] | None) -> None:
    assert run.caught(attack) == verdict


def test_of_a_pair_that_steals_one_is_enough_and_of_nobody_nobody_is_caught() -> None:
    run = ran(caught("s2", "draws", 1))
    run.nodes |= {"stolen-answers": {NodeId("s1"), NodeId("s2")}, "sybils": set()}
    assert (run.caught("stolen-answers"), run.caught("sybils")) == (("draws", 1), None)


def test_an_honest_node_that_is_caught_or_doubted_is_a_false_alarm() -> None:
    assert [ran(*told).false_alarms() for told in ([], [caught("h")], [caught("h"), withheld(h=1)])] == [0, 1, 1]
    alarmed = ran(caught("h"), withheld(h=1, oracle=2), withheld(oracle=1))
    alarmed.evidence = [{"node": one, "why": "it is off"} for one in ("oracle", "h")]
    assert alarmed.alarms() == [withheld(h=1, oracle=2), {"node": "h", "why": "it is off"}]


def test_every_attack_is_described() -> None:
    rows = [line.split("`")[1] for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(NAMES)
    assert {*NAMES} > NOT_TARGETED | FLATTERING


def test_who_hands_in_answers_attacks_alone_among_honest_samplers_and_all_others_together() -> None:
    def planned(*names: str) -> list[tuple[int, tuple[str, ...], int, bool]]:
        found = plans(names, steps=120, crowd_steps=40, seed=3)
        return [(one.honest, one.attackers, one.steps, one.measured) for one in found]

    assert planned("two-liars", "five-keys", "floods", "equivocation") == [
        (4, (), 120, True),
        (2, ("two-liars",) * 2, 120, True),
        (3, ("five-keys",) * 5, 120, True),
        (3, ("floods", "equivocation"), 40, False),
    ]
    assert planned() == [(4, (), 120, True)]


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


def test_the_campaign_fails_for_a_false_alarm_and_for_a_run_that_is_stuck_though_the_attacker_was_caught() -> None:
    assert CampaignReport(control=[1.0]).as_expected
    assert not CampaignReport(attacks=[row()], false_alarms=1).as_expected
    stuck = ran(caught("hanging-answers"), held_out=0.0)
    stuck.ended = False
    assert not CampaignReport(attacks=[row_of("hanging-answers", [stuck])], control=[1.0]).as_expected


@pytest.mark.parametrize(
    ("summary", "held_out"),
    [
        ({"held_out": [{"version": 0, "exact_match": 0.0}, {"version": 20, "exact_match": 0.75}]}, 0.75),
        ({"held_out": [{"version": 0, "exact_match": 0.5}]}, 0.0),
        (None, 0.0),
    ],
)
def test_a_run_that_breaks_off_learned_nothing(summary: dict[str, Any] | None, held_out: float, tmp_path: Path) -> None:
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
