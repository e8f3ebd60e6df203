"""/metrics: what it says, to whom, in how many series; and that documents, dashboards and alerts speak of it alone."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from swarm.net.client import METRICS_PATH
from swarm.node.exposition import EVERY, JOINED, LEARNER, OTHER, PREFIX, metrics_route
from tests.monitoring import ALERTS, DASHBOARDS, alerts, expressions, needs_prometheus
from tests.unit.node.test_network import learner

ROOT = Path(__file__).parents[3]
FIGURES = {PREFIX + figure.name: figure for figure in (*EVERY, *LEARNER, *JOINED)}
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]
HOSTILE = '"} 1\n# \x1b[2J {evil="'


def sampler(number: int, **more: Any) -> dict[str, Any]:
    return {"installed": f"0.{40 + number % 3}", "engine": "vllm/bfloat16/x", "standby": "", "barred": False, **more}


def of_a_learner(**more: Any) -> dict[str, Any]:
    """A status in the middle of a run, as much of it as is read."""
    return {
        "role": "learner",
        "state": "running",
        "fault": "",
        "version": "0.42",
        "refused": {"requests": 2},
        "samplers": [
            *(sampler(0), sampler(1), sampler(2), sampler(3, standby="dear")),
            *(sampler(4, installed=None), sampler(5, standby="refused", barred=True)),
        ],
        "held_out": [{"version": 10, "exact_match": 0.25}, {"version": 20, "exact_match": 0.5}],
        "broadcasts": {"0.41": {"raw_bytes": 1}, "0.42": {"raw_bytes": 100, "encoded_bytes": 30}},
        "verdicts": {"accepted": 7, "stale": 3},
        "rollouts_withheld": {"a": 2, "b": 3},
        "alarms": {},
        "metrics": {"reward": 0.5, "staleness/mean": 1.5, "staleness/by": "bound", "broadcast_s": None},
        "capacity": {"binds": "broadcast", "idle_share": None},
        "cost": {"cost_total": 2.5, "max_cost": None},
        **more,
    }


async def scraped(status: Mapping[str, Any]) -> Series:
    answer = await metrics_route(lambda: status).handler(None)  # type: ignore[arg-type]
    assert isinstance(answer, aiohttp.web.Response)
    assert isinstance(answer.body, bytes)
    return series_in(answer.body.decode())


def series_in(text: str) -> Series:
    families = text_string_to_metric_families(text)
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for each in families for one in each.samples}


async def test_a_status_is_told_in_numbers() -> None:
    found = await scraped(of_a_learner())
    expected = {
        ("state", "state", "running"): 1,
        ("state", "state", "paused"): 0,
        ("bottleneck", "by", "broadcast"): 1,
        ("samplers", "state", "active"): 3,
        ("samplers", "state", "standby"): 1,
        ("samplers", "state", "fetching"): 1,
        ("samplers", "state", "refused"): 1,
        ("samplers_behind", "versions", "0"): 2,
        ("samplers_behind", "versions", "2"): 2,
        ("samplers_engines", "engine", "vllm"): 6,
        ("rollouts_judged_total", "verdict", "accepted"): 7,
        ("rollouts_judged_total", "verdict", "malformed"): 0,
        ("alarms_total", "alarm", "entropy"): 0,
        ("requests_refused_total", "reason", "requests"): 2,
    }
    for (name, label, value), number in expected.items():
        assert found[PREFIX + name, ((label, value),)] == number, name
    plain: dict[str, float] = {
        "fault": 0,
        "version_published": 42,
        "version_raw_bytes": 100,
        "rollouts_withheld_total": 5,
    }
    plain |= {"held_out_ratio": 0.5, "reward_mean": 0.5, "staleness_mean_steps": 1.5}
    assert {name: found[PREFIX + name, ()] for name in plain} == plain
    absent = {"echo_node_cost_limit", "echo_node_idle_ratio", "echo_node_broadcast_seconds", "echo_node_version_held"}
    assert not {name for name, _ in found} & absent, "what is not known yet is no zero"


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ("paused: outside its hours, until 22:00", "paused"),
        ("waiting (paced)", "waiting"),
        ("looking for the swarm", "looking_for_the_swarm"),
        ("dreaming", OTHER),
    ],
)
async def test_a_state_is_one_of_our_words(state: str, word: str) -> None:
    found = await scraped({"role": "sampler", "state": state, "refused": {}})
    assert [labels for (name, labels), value in found.items() if name == "echo_node_state" and value] == [
        (("state", word),)
    ]


async def test_strangers_add_no_series_whatever_they_send() -> None:
    words = [f"{HOSTILE}{number}" for number in range(500)]
    flood = Counter(words)
    calm = of_a_learner(rollouts_dropped={})
    hostile = of_a_learner(
        samplers=[sampler(0, engine=word, nickname=word, node=word, standby=word) for word in words],
        verdicts=flood,
        rollouts_dropped=flood,
        refused=flood,
        rollouts_withheld=flood,
        alarms=flood,
        state=words[0],
        capacity={"binds": words[0], "idle_share": None},
    )
    found = await scraped(hostile)
    assert found.keys() == (await scraped(calm)).keys()
    assert found["echo_node_rollouts_judged_total", (("verdict", OTHER),)] == 500
    named = ("refused", "verdicts", "dropped", "chunks_rejected")
    joined = {"role": "sampler", "state": "sampling", **{name: {} for name in named}}
    worse = {**joined, **dict.fromkeys(named[1:], flood)}
    assert (await scraped(worse)).keys() == (await scraped(joined)).keys()


def test_names_are_as_prometheus_wants_them() -> None:
    assert len(FIGURES) == len(EVERY) + len(LEARNER) + len(JOINED)
    for name, figure in FIGURES.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert not re.search(r"_(s|ms|mb|gb|share|percent|count|sum|bucket|info)$", name), f"{name}: no base unit"
        assert figure.help.endswith(".")
        assert bool(figure.label) == bool(figure.values)


async def test_a_real_node_answers_without_our_protocol_and_within_its_limits(tmp_path: Path) -> None:
    async with learner(tmp_path) as node, aiohttp.ClientSession() as person:
        status = node.status() | {"state": "running", "fault": "", "rollouts_withheld": {}}
        node._server._status = lambda: status
        url = f"http://127.0.0.1:{node.port}{METRICS_PATH}"
        async with person.get(url, headers={"Accept": "text/html"}) as answer:
            assert answer.status == 200
            found = series_in(await answer.text())
    assert found["echo_node_fault", ()] == 0
    assert found["echo_node_weights_sent_bytes_total", ()] == 0


def test_the_document_has_a_row_for_each_alert() -> None:
    text = (ROOT / "docs/metrics.md").read_text().partition("## Alerts\n")[2]
    assert re.findall(r"^\| `(\w+)`", text, re.MULTILINE) == [rule["alert"] for rule in alerts()]


def asked() -> list[tuple[str, str]]:
    return [*expressions(), *((rule["alert"], rule["expr"]) for rule in alerts())]


@pytest.mark.parametrize(("where", "expression"), asked(), ids=[where for where, _ in asked()])
def test_dashboards_and_alerts_ask_for_metrics_and_labels_that_are_there(where: str, expression: str) -> None:
    for name, selectors in re.findall(r"\b(\w+)(?:\{(.*?)\})?(?=[\s\[()*/<>=+-]|$)", expression):
        if name == "up" or not name.startswith(PREFIX):
            continue
        figure = FIGURES[name]
        for label, _, value in re.findall(r'(\w+)(=~|!=|=)"(.*?)"', selectors):
            if label not in ("job", "instance"):
                assert (label, set(value.split("|")) <= set(figure.values)) == (figure.label, True), (where, name)
    assert set(re.findall(r"\becho_node_\w+", expression)) <= FIGURES.keys(), where
    counted = re.findall(r"\b(rate|increase)\((echo_node_\w+)", expression)
    assert all(name.endswith("_total") for _, name in counted), where
    # A counter means something only as a rate.
    bare = set(re.findall(r"\becho_node_\w+_total\b", expression)) - {name for _, name in counted}
    assert bare == set(), where


def test_a_dashboard_takes_its_data_source_from_a_variable() -> None:
    assert [path.stem for path in DASHBOARDS] == ["learner", "swarm", "volunteers"]
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        assert board["templating"]["list"][0]["type"] == "datasource"
        for panel in board["panels"]:
            for one in (panel, *panel["targets"]):
                assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_the_rules_and_what_panels_ask_is_valid(tmp_path: Path) -> None:
    promtool("check", "rules", str(ALERTS))
    promtool("check", "config", str(ALERTS.with_name("prometheus.yml")))
    recorded = [{"record": f"asked:{number}", "expr": one} for number, (_, one) in enumerate(expressions())]
    (tmp_path / "asked.yml").write_text(json.dumps({"groups": [{"name": "asked", "rules": recorded}]}))
    promtool("check", "rules", str(tmp_path / "asked.yml"))


def told(name: str, values: str, job: str = "echo-node-learner", **labels: str) -> dict[str, str]:
    """A series as promtool takes it: a value a minute."""
    named = ",".join(f'{label}="{value}"' for label, value in {"job": job, "instance": "a", **labels}.items())
    return {"series": f"{name}{{{named}}}", "values": values}


def judged(verdict: str, values: str) -> dict[str, str]:
    return told("echo_node_rollouts_judged_total", values, verdict=verdict)


RUNNING = told("echo_node_state", "1x60", state="running")
STAGES = (
    told("echo_node_staleness_bound_steps", "2x60"),
    told("echo_node_step_seconds", "10x60"),
    told("echo_node_train_step_seconds", "1x60"),
)
CASES = {
    "EchoNodeLearnerDown": ([told("up", "0x60")], 1, 2),
    "EchoNodeNoSampler": ([RUNNING, told("echo_node_samplers", "0x60", state="active")], 4, 5),
    "EchoNodeLearnerIdle": ([RUNNING, told("echo_node_idle_ratio", "0.31x60")], 14, 15),
    "EchoNodeRolloutsRefused": ([judged("accepted", "0+88x60"), judged("stale", "0+12x60")], 5, 6),
    "EchoNodeFault": ([told("echo_node_fault", "1x60")], 0, 1),
    "EchoNodeLearningAlarm": ([told("echo_node_alarms_total", "0x4 1x60", alarm="entropy")], 4, 5),
    "EchoNodeBroadcastSlow": ([RUNNING, told("echo_node_broadcast_seconds", "31x60"), *STAGES], 9, 10),
    "EchoNodeBudgetNearlySpent": ([told("echo_node_cost", "80+1x60"), told("echo_node_cost_limit", "100x60")], 10, 11),
    "": (
        [
            told("up", "1x60"),
            told("up", "0x60", job="another"),
            RUNNING,
            told("echo_node_samplers", "1x60", state="active"),
            told("echo_node_idle_ratio", "0.29x60"),
            *(judged("accepted", "0+92x60"), judged("stale", "0+8x60")),
            told("echo_node_fault", "0x60"),
            told("echo_node_alarms_total", "3x60", alarm="entropy"),
            *(told("echo_node_broadcast_seconds", "29x60"), *STAGES),
            *(told("echo_node_cost", "89x60"), told("echo_node_cost_limit", "100x60")),
            # Another finished; a third is paused by its owner.
            told("up", "1x9 0x60", instance="b"),
            told("echo_node_state", "0x8 1 _x60", instance="b", state="finished"),
            told("echo_node_state", "1x60", instance="c", state="paused"),
            *(
                told("echo_node_idle_ratio", "0.9x60", instance="c"),
                told("echo_node_step_seconds", "1x60", instance="c"),
            ),
            told("echo_node_staleness_bound_steps", "2x60", instance="c"),
            told("echo_node_broadcast_seconds", "31x60", instance="c"),
        ],
        1,
        59,
    ),
}
"""Of each alert what makes it fire, the last minute at which it does not, and the first at which it does; and a run in
which none does."""


@needs_prometheus
def test_each_alert_fires_when_its_time_is_over_and_none_in_a_run_that_goes_well(tmp_path: Path) -> None:
    assert CASES.keys() - {""} == {rule["alert"] for rule in alerts()}
    cases = []
    for name, (series, before, after) in CASES.items():
        asked = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})'}
        fired = [{"labels": f'{{alertname="{name}"}}', "value": 1}] if name else []
        checks = [
            {**asked, "eval_time": f"{before}m", "exp_samples": []},
            {**asked, "eval_time": f"{after}m", "exp_samples": fired},
        ]
        cases.append({"name": name, "interval": "1m", "input_series": series, "promql_expr_test": checks})
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": cases}))
    promtool("test", "rules", str(path))
