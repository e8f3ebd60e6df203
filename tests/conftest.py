"""Settings of the rings. Hypothesis draws the same examples at every run, so that a red run is red again; a skip that
does not say why is a failure."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

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
