"""Settings of the rings. Hypothesis draws the same examples at every run, so that a red run is red again; a skip that
does not say why is a failure; side by side run at most two swarms of a ring."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Container, Generator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

from swarm.broadcast.store.place import sweep

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling
    from xdist.workermanage import WorkerController

settings.register_profile(
    "default",
    derandomize=True,
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("long", parent=settings.get_profile("default"), derandomize=False, max_examples=2_000)
settings.load_profile("default")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in the background of a script: nothing that a test starts would hear a Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

SWARMS = ("integration", "browser", "netns", "vllm")
"""Rings whose tests start many processes each, and wait for them: one test of a ring at a time, or two."""

SMALL = frozenset(
    {
        *("test_bad_input.py", "test_killed_apply.py", "test_killed_save.py", "test_plan.py", "test_service.py"),
        "test_simulate.py",
    }
)
"""Of those rings, what starts one process at a time and measures nothing."""

SLOW_RINGS = ("browser", "netns", "vllm")
"""Rings that are slow as a whole: they want root, Chromium or vLLM, and start engines or networks."""

TIERS = {"slow": "bin/test --submission, as .ci/run does", "long": "bin/test --all"}
"""Marks that a shorter run leaves out, and the command that runs them too."""

left_out = pytest.StashKey[Counter[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        ring = item.path.parent.name
        if ring in SWARMS:
            item.add_marker(ring)
        if ring == "gpu":
            item.add_marker("gpu")
        if ring in SLOW_RINGS:
            item.add_marker(pytest.mark.slow)


def tier(marks: Container[str]) -> str | None:
    """Return the longest tier that a test with these marks belongs to."""
    return next((mark for mark in reversed(TIERS) if mark in marks), None)


def pytest_deselected(items: list[pytest.Item]) -> None:
    if not items or items[0].config.option.keyword:
        return
    config = items[0].config
    counts = Counter(mark for item in items if (mark := tier(item.keywords)))
    config.stash[left_out] = counts
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = dict(counts)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController) -> None:
    # Every worker collects the same tests, so the last one to end speaks for all.
    node.config.stash[left_out] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for mark, count in terminalreporter.config.stash.get(left_out, Counter()).items():
        terminalreporter.write_line(f"left out: {count} {mark} tests ({TIERS[mark]})")


def unit_of_work(nodeid: str) -> str:
    """What one worker of pytest-xdist gets at once: a ring of swarms or half of the longest, else a test."""
    path = PurePosixPath(nodeid.partition("::")[0])
    ring = next((part for part in path.parts[:2] if part in SWARMS), None)
    if ring is None or path.name in SMALL:
        return nodeid
    # All of a file, which may share what it has started; which half is as good as drawn by lot.
    return f"{ring}-{crc32(path.name.encode()) % 2}" if ring == "integration" else ring


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    """Not --dist loadgroup: it writes groups into node ids, which pytest 9.2 ignores, and then nothing is grouped."""
    from xdist.scheduler import LoadScopeScheduling

    class Rings(LoadScopeScheduling):  # type: ignore[misc]  # xdist is untyped
        def _split_scope(self, nodeid: str) -> str:
            return unit_of_work(nodeid)

    return Rings(config, log)


def _without_reason(report: pytest.TestReport | pytest.CollectReport) -> bool:
    """True for a skip that does not say why. An expected failure counts as skipped too, and is none."""
    if not report.skipped or hasattr(report, "wasxfail") or not isinstance(report.longrepr, tuple):
        return False
    words = report.longrepr[2].removeprefix("Skipped").removeprefix(":").strip()
    return words in ("", "unconditional skip")


def _fail_without_reason(report: pytest.TestReport | pytest.CollectReport) -> None:
    if _without_reason(report):
        report.outcome = "failed"
        report.longrepr = "a skip has to say why: pytest.skip(reason), @pytest.mark.skip(reason=...)"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _fail_without_reason(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_without_reason(report)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    # Nodes that were killed leave their weights in memory, and nobody starts another one now.
    if not hasattr(session.config, "workerinput"):
        sweep()
