"""The rules and dashboards in examples/, as tests read them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLES = Path(__file__).parents[1] / "examples"
ALERTS = EXAMPLES / "prometheus" / "alerts.yml"
CONFIG = EXAMPLES / "prometheus" / "prometheus.yml"
DASHBOARDS = sorted((EXAMPLES / "grafana" / "dashboards").glob("*.json"))

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="no prometheus here: Debian's package of that name has it, and promtool",
)


def alerts() -> list[dict[str, Any]]:
    """The rules of all groups."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def expressions(interval: str = "1m") -> Iterator[tuple[str, str]]:
    """What each panel asks, with what Grafana puts in place of its variables; `interval` is the scrape interval times
    four."""
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        names = {one["name"] for one in board["templating"]["list"]}
        for panel in board["panels"]:
            for target in panel["targets"]:
                asked = target["expr"].replace("$__rate_interval", interval)
                yield f"{path.stem}: {panel['title']}", re.sub(rf"\$({'|'.join(names)})\b", ".*", asked)
