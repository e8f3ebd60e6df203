"""The report: the page with a snapshot in place of its server. tests/browser opens one."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from swarm.dashboard.report import STATIC, report_of, write_report
from swarm.errors import UserError
from swarm.run.log import RunLog
from swarm.tasks.base import Read
from swarm.types import Prompt
from tests.builders import prompt
from tests.unit.episodes import record
from tests.unit.report.test_figures import log_steps, run_in
from tests.unit.rollout.journal.test_journal import damage, group, taken

HOSTILE = "</script><script>alert(1)</script><!--<script><img src=x onerror=alert(2)>\u2028"


def no_readers() -> Read:
    raise UserError("the run never came to its first step")


def read() -> Read:
    return (prompt, lambda tokens: "answer " + "+".join(map(str, tokens)), lambda prompt, said: [])


def kept_in(run_dir: Path, readers: Callable[[], Read] = read, **more: Any) -> dict[str, Any]:
    page, _ = report_of(run_dir, readers, now=5000.0, **more)
    found = re.findall(r'<script type="application/json" id="kept">(.*?)</script>', page, re.DOTALL)
    kept: dict[str, Any] = json.loads(found[0])
    return kept


BATCHES = [[*group(number), taken(number, number)] for number in range(6)]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    run_dir = run_in(tmp_path / "run", seed=4711)
    log_steps(run_dir, 6, reward=lambda step: step / 8)
    record(run_dir, *BATCHES)
    return run_dir


def test_a_report_has_all_that_the_page_asks_for(recorded: Path) -> None:
    with closing(RunLog(recorded)) as log:
        log.event("stopped", state="finished")
    kept = kept_in(recorded)
    snapshot, answers = kept["snapshot"], kept["answers"]
    assert snapshot["columns"]["reward"]["mean"] == [step / 8 for step in range(1, 7)]
    assert (snapshot["config"]["seed"], snapshot["live"], snapshot["name"]) == (4711, False, "run")
    assert [one["group"] for one in answers["api/rollouts"]["groups"]] == [5, 3, 0], "late, middle and early"
    assert answers["api/rollouts"]["groups"][0]["rollouts"][0]["completion"].startswith("answer ")
    assert [one["lane"] for one in answers["api/timeline"]["all"]] == ["learner", "publication"]
    assert [event["kind"] for event in snapshot["events"]] == ["stopped"]
    asked = {path for name in STATIC.glob("*.js") for path in re.findall(r"ask\(`(api/\w+)", name.read_text())}
    assert asked == set(answers), "the page asks for nothing else"
    public = {"node": "cd" * 16, "role": "relay", "state": "alive", "address": "http://10.0.0.1:7701"}
    status = {"state": "running", "node": "ab" * 16, "join": "echo-node join 10.0.0.1:7700", "publics": [public]}
    led = kept_in(recorded, status=status)["snapshot"]
    assert led["digest"]["state"] == "running"
    assert "10.0.0.1" not in json.dumps(led), "not where anybody is"


def test_a_report_loads_nothing_and_allows_only_its_own_code(recorded: Path) -> None:
    page, lacks = report_of(recorded, read, now=5000.0)
    assert page.startswith("<!doctype html>\n<!-- echo-node report -->\n")
    assert lacks == ""
    assert not re.search(r'(src|href)="(?!#|download/|\./)', page[: page.index('id="kept"')])
    policy = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">', page)
    assert len(policy) == 1
    assert "default-src 'none'" in policy[0]
    assert "unsafe" not in policy[0]
    modules = json.loads(re.findall(r'<script type="importmap">(.*?)</script>', page)[0])["imports"]
    texts = [b64decode(url.partition(",")[2]).decode() for url in modules.values()]
    imported = {name for text in texts for name in re.findall(r'from "([^"]+)"', text)}
    assert imported <= set(modules)
    assert "page/app.js" in modules


def test_no_strangers_text_ends_the_script_that_it_is_in(recorded: Path) -> None:
    with closing(RunLog(recorded)) as log:
        log.event("generation_failed", node=HOSTILE, reason=HOSTILE)
        log.metrics({"step": 9, HOSTILE: 1.0})
    asked = Prompt(prompt_id="p", text=HOSTILE, answer=HOSTILE, token_ids=(1,))

    def readers() -> Read:
        return (lambda number: asked), (lambda tokens: HOSTILE), (lambda prompt, said: [])

    page, _ = report_of(recorded, readers, now=5000.0)
    clean, _ = report_of(recorded, read, now=5000.0)
    assert page.count("<script") == clean.count("<script")
    assert "<img" not in page
    assert kept_in(recorded, readers)["answers"]["api/rollouts"]["groups"][0]["prompt"] == HOSTILE


def test_what_is_damaged_is_said_and_the_rest_is_there(recorded: Path) -> None:
    with (recorded / "metrics.jsonl").open("ab") as file:
        file.write(b'[1]\n\xff\xfe\n{"step": 7, "rew')
    damage(recorded, 5, 0)
    kept = kept_in(recorded)
    assert kept["snapshot"]["torn"] == 3
    assert kept["answers"]["api/rollouts"]["fault"] == "the texts of 1 rollouts are damaged or no longer kept"
    (recorded / "journal.db").write_bytes(b"no database" * 1000)
    _, lacks = report_of(recorded, read, now=5000.0)
    assert lacks
    assert kept_in(recorded)["snapshot"]["columns"]["reward"]["mean"]


def test_a_run_without_any_step_has_a_report(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run")
    assert "no rollouts" in kept_in(run_dir, no_readers)["answers"]["api/rollouts"]["fault"]
    record(run_dir, *BATCHES)
    assert "never came to its first step" in kept_in(run_dir, no_readers)["answers"]["api/rollouts"]["fault"]


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run")
    config = json.loads((run_dir / "config.json").read_text()) | {"swarm_password": "hunter2"}
    (run_dir / "config.json").write_text(json.dumps(config))
    assert kept_in(run_dir)["snapshot"]["config"]["swarm_password"] == "not shown"


def test_a_run_of_100_000_steps_gives_a_page_of_bounded_size(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run")
    with (run_dir / "metrics.jsonl").open("w") as file:
        file.writelines(f'{{"step": {s}, "a": {s % 97}.5, "b": {s % 89}.5}}\n' for s in range(1, 100_001))
    page, _ = report_of(run_dir, read, now=5000.0)
    assert len(page) < 450_000


def test_a_report_is_written_anew_but_over_nothing_else(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run")
    path, _ = write_report(run_dir, None, no_readers)
    log_steps(run_dir, 1, reward=float)
    assert write_report(run_dir, None, no_readers)[0] == path == run_dir / "report.html"
    assert '"reward"' in path.read_text()
    other = tmp_path / "mine.html"
    other.write_text("mine")
    with pytest.raises(UserError, match="not a report"):
        write_report(run_dir, other, no_readers)
    with pytest.raises(UserError, match="not a directory"):
        write_report(run_dir, tmp_path / "nowhere" / "r.html", no_readers)
    assert other.read_text() == "mine"
    assert list(tmp_path.rglob("*.partial")) == []
