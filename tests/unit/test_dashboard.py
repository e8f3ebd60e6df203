"""What people look at, drawn from a status as the learner gives it, at its first moment and in the middle of a run."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console, RenderableType

from swarm.config import LeadConfig
from swarm.dashboard.chart import Curve, learning_chart
from swarm.dashboard.terminal import live_figures, live_view, plain_line, sparkline, status_table
from swarm.node.learner import LearnerNode
from swarm.node.metrics import RunLog
from swarm.node.network import NetworkSettings, NodeNetwork
from swarm.rollout.entries import RecordedRun
from swarm.rollout.journal import Journal

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def early(tmp_path: Path) -> dict[str, Any]:
    """The status of a learner that has not loaded its model yet."""
    node = LearnerNode(LeadConfig(run_dir=tmp_path), lambda line: None)
    node._network = NodeNetwork(
        tmp_path, "learner", NetworkSettings(host="127.0.0.1", port=7700), say=print, emit=lambda kind, **fields: None
    )
    node._log = RunLog(tmp_path)
    node._journal = Journal(tmp_path, group_size=2)
    node._recorded = RecordedRun(next_batch=0, opened=0, groups=(), published=None, bound=None)
    node._build(node._network)
    return node.status()


@pytest.fixture
def running(early: dict[str, Any]) -> dict[str, Any]:
    """The same, in the middle of a run."""
    sampler = {
        "node": "0123456789abcdef",
        "installed": "0.41",
        "samples": 128,
        "rollouts_per_s": 250.4,
        "silent_s": 0.3,
        "verdicts": {"accepted": 900, "stale": 2},
        "device_class": "T4",
        "standby": "",
    }
    waiting = {**sampler, "node": "fedcba9876543210", "installed": None, "verdicts": {}, "standby": "you are dear"}
    tally = {"rent": 2.5, "traffic": 0.0, "active_s": 1800.0, "rollouts": 900, "tokens": 9000, "cost": 2.5}
    metrics = {"reward": 0.71, "exact_match": 0.5, "train_step_s": 0.25, "staleness/mean": 0.5, "broadcast_s": None}
    return {
        **early,
        "state": "running",
        "step": 42,
        "version": "0.42",
        "broadcast_s": 0.31,
        "held_out": [{"version": 0, "exact_match": 0.0}, {"version": 40, "exact_match": 0.625}],
        "metrics": metrics,
        "samplers": [sampler, waiting],
        "capacity": {**early["capacity"], "active": 1, "standby": 1, "idle_share": 0.031, "binds": "learner"},
        "cost": {**early["cost"], "cost_total": 2.5, "cost_per_step": 0.0595, "by_class": {"T4": tally}},
        "verdicts": {"accepted": 1800},
    }


def printed(view: RenderableType) -> str:
    console = Console(width=100, color_system=None, record=True, file=io.StringIO())
    console.print(view)
    return console.export_text()


def test_a_learner_that_has_just_started_can_be_looked_at(early: dict[str, Any]) -> None:
    assert "starting" in plain_line(early)
    assert "step 0 / 200  version -  shaped reward -" in plain_line(early)
    assert "echo-node demo · starting" in printed(live_view(early, [], 80))
    assert "max_staleness" in printed(status_table(early))


def test_a_running_learner_shows_its_figures(running: dict[str, Any]) -> None:
    line = plain_line(running)
    for part in (
        "step 42 / 200",
        "version 0.42",
        "held-out 0.625 (version 40)",
        "samplers 2, 1 on standby",
        "train step 0.25 s",
    ):
        assert part in line
    assert "0.5 mean, 0 max of 2 allowed" in line
    assert "\n" not in line


def test_the_live_view_fits_its_width_and_shows_the_curve(running: dict[str, Any]) -> None:
    view = printed(live_view(running, [0.0, 0.5, 1.0], 80))
    assert max(len(line) for line in view.splitlines()) <= 80
    assert "▄█" in view
    assert len(live_figures(running)) % 2 == 0


def test_a_status_table_names_every_sampler(running: dict[str, Any]) -> None:
    table = printed(status_table(running))
    for part in ("0123456789ab", "fedcba987654", "900 accepted", "0.41", "held_out"):
        assert part in table


def test_a_status_of_a_node_without_samplers_is_a_table_too() -> None:
    table = printed(status_table({"role": "sampler", "node": "abc", "installed": None, "verdicts": {}}))
    assert "abc" in table
    assert "none" in table


@pytest.mark.parametrize("name", ["[/red]x", "[bold]", "[link=http://evil]x", "\x1b[2Jx"])
def test_a_samplers_name_is_shown_as_it_is_and_does_nothing(running: dict[str, Any], name: str) -> None:
    running["samplers"][0]["node"] = name
    table = printed(status_table(running))
    assert name.replace("\x1b", "")[:11] in table.replace("\x1b", "")
    assert "\x1b" not in table


def test_a_sparkline_shows_the_last_values_within_its_bounds() -> None:
    assert sparkline([9.0, -1.0, 0.0, 0.5, 1.0, 2.0], 5) == "  ▄██"
    assert sparkline([], 5) == ""


CURVES = [
    Curve(name="reward <shaped> & more", color="#1f77b4", points=[(1, 0.0), (2, 0.5), (4, 1.5)]),
    Curve(name="held-out", color="#2ca02c", points=[(0, -0.2), (4, 0.5)], dots=True),
]


def test_a_chart_is_well_formed_and_holds_every_point() -> None:
    root = ElementTree.fromstring(learning_chart('a "title" <b>', CURVES))
    lines = root.findall(SVG + "polyline")
    assert [len((line.get("points") or "").split()) for line in lines] == [3, 2]
    assert len(root.findall(SVG + "circle")) == 2
    texts = [text.text for text in root.findall(SVG + "text")]
    assert 'a "title" <b>' in texts
    assert "reward <shaped> & more" in texts


def test_a_point_is_drawn_within_the_chart_whatever_its_value() -> None:
    root = ElementTree.fromstring(learning_chart("t", CURVES))
    for line in root.findall(SVG + "polyline"):
        for x, y in (point.split(",") for point in (line.get("points") or "").split()):
            assert 0 <= float(x) <= 720
            assert 40 <= float(y) <= 316


@pytest.mark.parametrize("curves", [[], [Curve(name="none", color="#000", points=[])], [CURVES[1]]])
def test_a_run_of_no_steps_has_a_chart_too(curves: list[Curve]) -> None:
    text = learning_chart("nothing yet", curves)
    ElementTree.fromstring(text)
    assert not re.search(r"nan|inf", text)


def test_idle_time_and_costs_are_shown_where_there_are_any(early: dict[str, Any], running: dict[str, Any]) -> None:
    assert "cost" not in plain_line(early)
    line = plain_line(running)
    for part in ("learner idle 3.1%", "predicted idle -", "cost 2.50", "cost of a step 0.0595"):
        assert part in line
    shown = printed(status_table(running))
    for part in ("cost by device class", "2.778", "0.50 h", "on standby", "you are dear", "binds"):
        assert part in shown
