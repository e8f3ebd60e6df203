"""What people look at, drawn from a status as the learner gives it, at its first moment and in the middle of a run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from swarm.lead.learner import LearnerNode
from swarm.node.network import NodeNetwork
from swarm.report.terminal import console, figures, live_view, plain_line, sparkline, status_screen
from swarm.rollout.journal.entries import RecordedRun
from swarm.rollout.journal.journal import Journal
from swarm.run.log import RunLog
from swarm.settings import LeadConfig
from tests.unit.runs import run_in


def early_learner(tmp_path: Path) -> LearnerNode:
    node = LearnerNode(LeadConfig(run_dir=tmp_path), lambda line: None)
    node._network = NodeNetwork(
        tmp_path, "learner", LeadConfig(host="127.0.0.1", port=7700), say=print, emit=lambda kind, **fields: None
    )
    node._life = run_in(tmp_path, log=RunLog(tmp_path), journal=Journal(tmp_path, group_size=2))
    node._recorded = RecordedRun(next_batch=0, opened=0, groups=(), published=None, bound=None)
    node._build(node._network)
    return node


@pytest.fixture
def early(tmp_path: Path) -> dict[str, Any]:
    return early_learner(tmp_path).status()


@pytest.fixture
def running(early: dict[str, Any]) -> dict[str, Any]:
    rates = {"samples": 128, "rollouts_per_s": 250.4, "silent_s": 0.3, "verdicts": {"accepted": 900, "stale": 2}}
    sampler = {"node": "0123456789abcdef", "installed": "0.41", "device_class": "T4", "standby": "", **rates}
    waiting = {**sampler, "node": "fedcba9876543210", "installed": None, "verdicts": {}, "standby": "you are dear"}
    tally = {"rent": 2.5, "traffic": 0.0, "active_s": 1800.0, "rollouts": 900, "tokens": 9000, "cost": 2.5}
    metrics: dict[str, Any] = {"reward": 0.71, "exact_match": 0.5, "train_step_s": 0.25, "broadcast_s": None}
    metrics |= {"staleness/mean": 0.5, "staleness/aim": 1.25, "staleness/by": "generation"}
    now = {"state": "running", "step": 42, "version": "0.42", "broadcast_s": 0.31, "verdicts": {"accepted": 1800}}
    return {
        **{**early, **now, "metrics": metrics, "samplers": [sampler, waiting]},
        "held_out": [{"version": 0, "exact_match": 0.0}, {"version": 40, "exact_match": 0.625}],
        "capacity": {**early["capacity"], "active": 1, "standby": 1, "idle_share": 0.031, "binds": "learner"},
        "cost": {**early["cost"], "cost_total": 2.5, "cost_per_step": 0.0595, "by_class": {"T4": tally}},
    }


def printed(view: RenderableType, width: int = 80) -> str:
    console = Console(width=width, color_system=None, record=True, file=io.StringIO())
    console.print(view)
    return console.export_text()


def test_a_learner_that_has_just_started_says_what_it_waits_for(early: dict[str, Any]) -> None:
    assert plain_line(early) == "starting; waiting for the network to open; step 0 of 200"
    view = printed(live_view(early, [], 78, "echo-node lead"))
    assert "echo-node lead · starting" in view
    assert "waiting for the network to open" in view
    assert " - " not in view


def test_a_running_learner_shows_its_figures(running: dict[str, Any]) -> None:
    running["waits_for"] = ""
    assert plain_line(running) == (
        "running; step 42 of 200; reward 0.710; held-out 0.625, version 40; samplers 2, 1 on standby; "
        "staleness 0.5, max 0 of 2"
    )
    assert "learner idle 3.1%" in plain_line({**running, "held_out": []}), "what is left out makes room"
    known = dict(figures(running))
    assert (known["version"], known["train step"]) == ("42", "0.25 s")
    assert known["staleness aim"] == "1.2, answers take that long"
    assert "withheld" not in known
    assert [known[name] for name in ("learner idle", "cost", "cost of a step")] == ["3.1%", "2.50", "0.0595"]
    assert known["of a held-out point"] == "0.04, 0.672 steps", "2.50 and 42 for 62.5 points"
    lost = {
        "verdicts": {"accepted": 80, "handed": 30, "stale": 10, "overloaded": 5, "failed": 10},
        "rollouts_dropped": {"stale": 5, "no_variance": 20},
        "rollouts_withheld": {"a" * 32: 1},
        "rollouts_lost": 25.0,
        "cost": {**running["cost"], "standby": 0.3, "by_class": {"a card": {"cost": 2.0}, "another": {"cost": 0.5}}},
    }
    lossy = dict(figures({**running, **lost}))
    in_vain = "0.5 lost, 0.4 no_variance, 0.3 stale, 0.2 failed, 0.02 audit"
    assert lossy["paid in vain"] == in_vain, "of 2.50 for 125 rollouts"
    assert lossy["cost of standby"] == "0.3 if it is paid"
    assert lossy["refused"] == "10 stale, 5 overloaded, 10 failed"
    assert lossy["discarded"] == "51 rollouts"
    fell = dict(figures({**running, "held_out": running["held_out"][::-1]}))
    assert "of a held-out point" not in fell
    doubted = dict(figures({**running, "rollouts_withheld": {"a" * 32: 3, "b" * 32: 1200}}))
    assert doubted["withheld"] == "1,203 rollouts, 1,200 of " + "b" * 32


@pytest.mark.parametrize("width", [40, 10_000])
def test_no_figure_is_cut_on_any_screen(running: dict[str, Any], width: int) -> None:
    """What does not fit goes on in the next line. Only kinds and reasons in the table of nodes may be cut."""
    long = {**running, "verdicts": {f"reason_{n}": 10_000 + n for n in range(6)}, "samplers": []}
    for view in (status_screen(long, width, None), live_view(long, [0.5], width, "echo-node lead")):
        found = printed(view, width)
        assert "…" not in found
        assert set(found.replace("│", " ").split()) >= {f"{10_000 + n:,}" for n in range(6)}


@pytest.mark.parametrize("width", [40, 60, 78])
def test_the_live_view_fits_its_width_and_shows_the_curve(running: dict[str, Any], width: int) -> None:
    view = printed(live_view(running, [0.0, 0.5, 1.0], width, "echo-node demo"), width)
    assert {len(line) for line in view.splitlines()} == {width}
    assert "▄█" in view
    if width == 78:
        assert "…" not in view
        assert len(view.splitlines()) < 24


def test_a_screen_of_status_shows_each_figure_once_and_each_node_with_its_own_rate(running: dict[str, Any]) -> None:
    shown = printed(status_screen(running, 80, 24))
    assert len(shown.splitlines()) < 24
    for part in ("0123456789ab", "fedcba987654", "250.4", " 41 ", "held-out", "rollouts/s", "accepted", "T4"):
        assert part in shown, part
    names = [name for name, _ in figures(running)]
    assert len(set(names)) == len(names)
    assert shown.count("0.625, version 40") == 1


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50)])
def test_nodes_that_do_not_fit_onto_the_screen_are_counted(running: dict[str, Any], width: int, height: int) -> None:
    many = [{**running["samplers"][0], "node": f"{number:032x}"} for number in range(1000)]
    shown = printed(status_screen({**running, "samplers": many}, width, height), width).splitlines()
    assert len(shown) == height - 1
    rows = sum(line.startswith("0000000") for line in shown)
    assert shown[-1] == f"and {1000 - rows} more (--json has all)"
    assert max(len(line) for line in shown) <= width
    assert len(printed(status_screen({**running, "samplers": many}, width, None), width).splitlines()) > 1000


def test_a_relay_and_a_sampler_have_a_screen_too(early: dict[str, Any]) -> None:
    member = {"node": "ab" * 16, "role": "learner", "state": "alive", "address": "http://127.0.0.1:7700"}
    publics = [{**member, "beat_s": 1.5, "leaves": 0, "held": "0.7", "lag": 2}]
    relay: dict[str, Any] = {
        "role": "relay",
        "node": "cd" * 16,
        "state": "relaying",
        "swarm": "ef" * 16,
        "publics": publics,
    }
    relay |= {"leaves": [], "map": "0.5", "newest": "0.7", "streams": 3, "stream_bytes_sent": 2_500_000}
    shown = printed(status_screen(relay, 80, 24))
    for part in ("relay cdcdcdcdcdcd · relaying", "7 (2 behind)", "1.5 s", "127.0.0.1:7700", "2.5 MB"):
        assert part in shown
    rates = {"rollouts_per_s": 12.5, "tokens_per_s": 180.0, "verdicts": {"accepted": 9, "stale": 1}, "places": 128}
    shown = printed(status_screen({**relay, **rates, "role": "sampler", "engine": "vllm", "install_s": 0.31}, 80, 24))
    for part in ("this node draws", "12.5 rollouts/s", "180 tokens/s", "9 rollouts", "1 stale", "0.31 s"):
        assert part in shown
    stages = {"announced_s": 10.0, "first_chunk_s": 10.02, "complete_s": 11.0, "applied_s": 11.25, "installed_s": None}
    older = {**stages, "applied_s": 9.0}
    shown = printed(status_screen({**relay, "versions": {"0.4": older, "0.5": stages}}, 100, 24), 100)
    assert "last version" in shown
    assert {"0.02,", "1.00,", "1.25"} <= set(shown.split())
    bare = printed(status_screen({"role": "sampler", "node": "abc", "state": "starting", "verdicts": {}}, 80, 24))
    assert "sampler abc · starting" in bare
    assert "in no swarm yet" in bare


def test_a_volunteer_is_told_in_one_line_what_its_machine_does_and_gave() -> None:
    status: dict[str, Any] = {
        "role": "sampler",
        "node": "cd" * 16,
        "engine": "vllm",
        "state": "standby: cheaper ones suffice",
    }
    status |= {"verdicts": {"accepted": 1234, "stale": 3, "malformed": 0}, "accepted_tokens": 56_789}
    status |= {"syncing": {"version": "0.17", "share": 0.43}}
    told = plain_line(status)
    assert told == (
        "standby: cheaper ones suffice; accepted 1,234 rollouts, 56,789 tokens; not accepted 3 stale; "
        "syncing 43% of version 17"
    )
    shown = printed(live_view(status, (), 78, "echo-node join"))
    for part in ("echo-node join · standby: cheaper", "1,234 rollouts,", "56,789 tokens", "3 stale", "43% of version"):
        assert part in shown
    assert "waiting for" not in shown, "what a learner waits for is not this node's"


@pytest.mark.parametrize("name", ["[/red]x", "[link=http://evil]x", "\x1b[2Jx"])
def test_a_samplers_name_is_shown_as_it_is_and_does_nothing(running: dict[str, Any], name: str) -> None:
    running["samplers"][0]["node"] = name
    running["samplers"][1]["nickname"] = name
    running["samplers"][1]["standby"] = name
    running["fault"] = name
    shown = printed(status_screen(running, 80, 24)) + plain_line({**running, "state": name})
    assert name.replace("\x1b", "")[:11] in shown.replace("\x1b", "")
    assert "\x1b" not in shown


def test_what_goes_into_a_pipe_is_as_long_as_it_is(
    running: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    running["samplers"][1]["standby"] = why = "cheaper ones suffice, " * 9
    console().print(status_screen(running, console().width, None))
    assert why.strip() in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    assert console().width == 80


def test_a_sparkline_shows_the_last_values_on_a_scale_that_holds_them_all() -> None:
    assert sparkline([9.0, -1.0, 0.0, 0.5, 1.0, 2.0], 5) == " ▃▄▅█"
    assert sparkline([], 5) == ""


def test_a_status_that_is_cut_says_how_many_samplers_there_are(running: dict[str, Any]) -> None:
    cut = {**running, "cut": {"samplers": 4096, "cost.by_node": 4096}}
    assert "there are 4,096 samplers, 4,096 cost.by_node" in printed(status_screen(cut, 120, 60), width=120)
    assert dict(figures(cut))["samplers"].startswith("4096")


def test_nobody_who_asks_is_told_where_the_run_is(running: dict[str, Any], tmp_path: Path) -> None:
    assert str(tmp_path) not in str(running)
