"""What `doctor` makes of what it sees: which facts are faults, and the fix that each is given."""

from __future__ import annotations

import errno
from collections.abc import Iterable

import pytest

from swarm.join import findings
from swarm.join.findings import Check

GB = 10**9
HERE = "/state"
ALL = ("torch", "transformers")


def one(checks: Iterable[Check]) -> Check:
    (check,) = checks
    return check


@pytest.mark.parametrize(
    "fine",
    [
        findings.python("3.12.1", 64),
        one(findings.torch("2.13.0+cpu", (), "engine: transformers", sees_gpu=None)),
        one(findings.torch("2.13.0", (), "engine: vllm", sees_gpu=True)),
        findings.memory(4 * GB, 0),
        findings.memory(4 * GB, 4 * GB),
        findings.state(HERE, 0),
        findings.disk(HERE, GB, 0),
        findings.files(1024),
        findings.clock(""),
        one(findings.proxy(["https_proxy"], cut_off=False)),
        findings.line(1000, 0.1, 8 * GB),
        findings.line(10_000_000, 1.0, 8 * GB),
    ],
    ids=lambda check: str(check.about),
)
def test_what_is_fine_has_no_fix(fine: Check) -> None:
    assert fine.what
    assert fine.fix == ""


def test_what_cannot_be_a_fault_here_is_not_mentioned() -> None:
    assert list(findings.wear(GB, 4 * GB, 4 * GB, 0.25)) == []
    assert list(findings.sockets("/tmp")) == []
    assert list(findings.proxy([], cut_off=True)) == []


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        (findings.python("3.12.1", 32), "64-bit system"),
        (one(findings.torch("", ALL, "", sees_gpu=None)), "pip install '.[sampler]'"),
        (list(findings.torch("2.13.0+cpu", (), "", sees_gpu=False))[1], "pip uninstall torch"),
        (list(findings.torch("2.13.0", (), "", sees_gpu=False))[1], "update the NVIDIA driver"),
        (findings.memory(4 * GB, 6 * GB), "until 6.0 GB are free, or pass --role relay"),
        (one(findings.wear(2 * GB, 4 * GB, 4 * GB, 0.25)), "8.0 GB of memory free"),
        (one(findings.wear(2 * GB, 16 * GB, 64 * 10**6, 0.25)), "remount,size=8G /dev/shm"),
        (one(findings.wear(2 * GB, 16 * GB, 0, 0.25)), "only Linux"),
        (findings.state(HERE, errno.EACCES), 'sudo chown -R "$USER" /state'),
        (findings.state(HERE, errno.EROFS), "read-only"),
        (findings.state(HERE, errno.ENOSPC), "free some space"),
        (findings.state(HERE, errno.EIO), "another --state-dir"),
        (findings.disk(HERE, GB, GB), "free 0.8 GB there"),
        (one(findings.sockets("/" + 90 * "x")), "TMPDIR=/tmp"),
        (findings.files(256), "ulimit -n 4096"),
        (findings.clock("this clock is behind that of http://a:1: set it"), "set it"),
        (one(findings.proxy(["https_proxy"], cut_off=True)), "open TCP connections itself"),
        (findings.line(0, 20.0, GB), "a faster line"),
        (findings.line(10_000_000, 20.0, 8 * GB), "--base"),
    ],
    ids=lambda value: value.about if isinstance(value, Check) else "",
)
def test_a_fault_names_its_fix(wrong: Check, fix: str) -> None:
    assert fix in wrong.fix


def test_a_rate_is_told_with_what_it_means_for_the_first_version() -> None:
    assert findings.line(10_000_000, 2.0, 8 * GB).what.endswith("40.0 Mbit/s, at which the first version takes 18 min")
    assert findings.line(10_000_000, 2.0, 0).what.endswith("40.0 Mbit/s")


def test_wear_is_told_by_version_and_by_day() -> None:
    what = one(findings.wear(8 * GB, 8 * GB, 8 * GB, 0.5)).what
    assert "each version rewrites 8.0 GB, 23.0 TB a day if one comes each minute" in what
