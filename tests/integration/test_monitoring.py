"""A real Prometheus scrapes a real run: every alert of examples/ fires once, and every panel has something to show.

The run is brought into each state by what brings it there elsewhere: no samplers, SIGKILL, an attacker, a slow line, a
budget. The rules are those of examples/ with their thresholds, but in this copy a rule waits FOR instead of minutes and
looks back WINDOW instead of ten minutes, since the scrape interval is a second instead of fifteen. That the real times
are right, tests/unit/node/test_exposition.py shows with promtool.
"""

from __future__ import annotations

import json
import re
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from swarm.node.exposition import EVERY, JOINED, LEARNER, PREFIX
from tests.integration.processes import Learner, Node, Swarm, eventually, free_port
from tests.monitoring import ALERTS, CONFIG, alerts, expressions, needs_prometheus

pytestmark = [pytest.mark.long, needs_prometheus]

FOR, WINDOW = "2s", "20s"
BUDGET = 1.08
"""Of what the run has cost when it goes on with a budget: 92.6 % are spent."""


class Prometheus(Node):
    """One with the configuration of examples/, which scrapes the nodes that it is told."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._url = f"http://127.0.0.1:{free_port()}"
        config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        for job in config["scrape_configs"]:
            # Nodes on loopback speak without TLS, and their ports are known later.
            del job["static_configs"], job["tls_config"]
            files = [str(self._targets(job["job_name"]))]
            job |= {"scheme": "http", "file_sd_configs": [{"files": files, "refresh_interval": "1s"}]}
            self.scrape(job["job_name"])
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        quick = re.sub(r"\[\d+m\]", f"[{WINDOW}]", re.sub(r"for: \d+m", f"for: {FOR}", ALERTS.read_text()))
        (directory / "alerts.yml").write_text(quick)
        given = [f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/tsdb"]
        words = ["prometheus", *given, f"--web.listen-address={self._url.removeprefix('http://')}"]
        self._start("prometheus", directory / "prometheus.log", words)
        eventually(lambda: self.says("Server is ready to receive web requests"), self, "Prometheus answers")

    def scrape(self, job: str, *nodes: Node) -> None:
        """Scrape these from now on."""
        targets = [node.address() for node in nodes]
        new = self._targets(job).with_suffix(".new")
        new.write_text(json.dumps([{"targets": targets}]))
        new.rename(self._targets(job))

    def ask(self, path: str, **given: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(given)}", timeout=10) as answer:
            return json.loads(answer.read())["data"]

    def values(self, expression: str) -> list[float]:
        return [float(one["value"][1]) for one in self.ask("query", query=expression)["result"]]

    def firing(self) -> set[str]:
        return {one["labels"]["alertname"] for one in self.ask("alerts")["alerts"] if one["state"] == "firing"}

    def _targets(self, job: str) -> Path:
        return self._directory / f"{job}.json"


@pytest.fixture
def prometheus(swarm: Swarm) -> Prometheus:
    found = Prometheus(swarm.directory)
    swarm.nodes.append(found)
    return found


def attacker(swarm: Swarm, learner: Learner) -> Node:
    """A sampler that hands in two answers for each sample."""
    return swarm.scripted(learner.url(), name="attacker", module="tests.redteam.sampler equivocation")


def fell(prometheus: Prometheus, job: str) -> list[str]:
    """The counters that did not only rise."""
    counters = [PREFIX + figure.name for figure in (*EVERY, *LEARNER, *JOINED) if figure.name.endswith("_total")]
    return [name for name in counters if prometheus.values(f'resets({name}{{job=~"{job}"}}[30m]) > 0')]


def test_every_alert_fires_once_and_every_panel_shows_something(swarm: Swarm, prometheus: Prometheus) -> None:
    fired: set[str] = set()
    unseen = dict(expressions("5s"))

    def fires(alert: str, node: Node) -> None:
        def look() -> bool:
            for panel in [panel for panel, asked in unseen.items() if prometheus.values(asked)]:
                del unseen[panel]
            return alert in prometheus.firing()

        eventually(look, node, f"{alert} fires")
        fired.add(alert)

    # Alone. Some rewards will fail later on, which is an alarm.
    brittle = "python:tests.integration.odd_reward:BrittleCopy"
    swarm.lead_with(task=brittle, cost_per_hour=36_000, checkpoint_every_steps=20, eval_every_steps=2)
    learner = swarm.lead("--port", "0", "--steps", "1000000")
    prometheus.scrape("echo-node-learner", learner)
    fires("EchoNodeNoSampler", learner)
    assert prometheus.firing() == {"EchoNodeNoSampler"}

    # At work.
    sampler = swarm.scripted(learner.url(), "--cost-per-hour", "1", name="sampler")
    relay = swarm.relay(learner.url(), "--lan", name="relay")
    prometheus.scrape("echo-node-joined", sampler, relay)
    fires("EchoNodeLearningAlarm", learner)
    eventually(lambda: "EchoNodeNoSampler" not in prometheus.firing(), learner, "an alert ends")
    assert not prometheus.firing() & {"EchoNodeRolloutsRefused", "EchoNodeFault", "EchoNodeBudgetNearlySpent"}

    # Attacked.
    attacking = attacker(swarm, learner)
    fires("EchoNodeRolloutsRefused", attacking)
    attacking.kill()

    # Without a place for checkpoints.
    checkpoints = learner.run_dir / "checkpoints"
    checkpoints.rename(learner.run_dir / "elsewhere")
    checkpoints.write_text("in the way")
    fires("EchoNodeFault", learner)
    checkpoints.unlink()
    (learner.run_dir / "elsewhere").rename(checkpoints)

    # Killed.
    assert fell(prometheus, ".*") == []
    spent = learner.status()["cost"]["cost_total"]
    learner.kill()
    fires("EchoNodeLearnerDown", learner)

    # On policy, over a slow line, with little money left.
    slow = ("--max-staleness", "0", "--max-upload", "0.05", "--cost-per-hour", "0", "--max-cost", str(BUDGET * spent))
    again = swarm.resume(learner, *slow, "--host", "127.0.0.1", name="again")
    prometheus.scrape("echo-node-learner", again)
    fires("EchoNodeBudgetNearlySpent", again)
    fires("EchoNodeBroadcastSlow", again)
    fires("EchoNodeLearnerIdle", again)
    assert fired == {rule["alert"] for rule in alerts()}

    def all_shown() -> bool:
        for panel in [panel for panel, asked in unseen.items() if prometheus.values(asked)]:
            del unseen[panel]
        return not unseen

    eventually(all_shown, again, f"something to show in {sorted(unseen)}")
    known = {name for name in prometheus.ask("label/__name__/values") if name.startswith(PREFIX)}
    # This task has no episodes.
    figures = [figure.name for figure in (*EVERY, *LEARNER, *JOINED) if not figure.name.startswith("episode_")]
    assert known == {PREFIX + name for name in figures}
    assert fell(prometheus, "echo-node-joined") == []
