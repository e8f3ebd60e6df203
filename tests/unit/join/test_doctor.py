"""What `doctor` makes of what it sees: which facts are faults, and the fix that each is given."""

from __future__ import annotations

import errno
from collections.abc import Iterable

import pytest

from swarm.join import doctor
from swarm.join.doctor import Check

GB = 10**9
HERE = "/state"
ALL = ("torch", "transformers")


def one(checks: Iterable[Check]) -> Check:
    (check,) = checks
    return check


@pytest.mark.parametrize(
    "fine",
    [
        doctor.check_python("3.12.1", 64),
        one(doctor.check_torch("2.13.0+cpu", (), "engine: transformers", sees_gpu=None)),
        one(doctor.check_torch("2.13.0", (), "engine: vllm", sees_gpu=True)),
        doctor.check_memory(4 * GB, 0),
        doctor.check_memory(4 * GB, 4 * GB),
        doctor.check_state(HERE, 0),
        doctor.check_disk(HERE, GB, 0),
        doctor.check_files(1024),
        doctor.check_clock(""),
        one(doctor.check_proxy(["https_proxy"], cut_off=False)),
        doctor.check_line(1000, 0.1, 8 * GB),
        doctor.check_line(10_000_000, 1.0, 8 * GB),
    ],
    ids=lambda check: str(check.about),
)
def test_what_is_fine_has_no_fix(fine: Check) -> None:
    assert fine.what
    assert fine.fix == ""


def test_what_cannot_be_a_fault_here_is_not_mentioned() -> None:
    assert list(doctor.check_wear(GB, 4 * GB, 4 * GB, 0.25)) == []
    assert list(doctor.check_sockets("/tmp")) == []
    assert list(doctor.check_proxy([], cut_off=True)) == []


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        (doctor.check_python("3.12.1", 32), "64-bit system"),
        (one(doctor.check_torch("", ALL, "", sees_gpu=None)), "pip install '.[sampler]'"),
        (list(doctor.check_torch("2.13.0+cpu", (), "", sees_gpu=False))[1], "pip uninstall torch"),
        (list(doctor.check_torch("2.13.0", (), "", sees_gpu=False))[1], "update the NVIDIA driver"),
        (doctor.check_memory(4 * GB, 6 * GB), "until 6.0 GB are free, or pass --role relay"),
        (one(doctor.check_wear(2 * GB, 4 * GB, 4 * GB, 0.25)), "8.0 GB of memory free"),
        (one(doctor.check_wear(2 * GB, 16 * GB, 64 * 10**6, 0.25)), "remount,size=8G /dev/shm"),
        (one(doctor.check_wear(2 * GB, 16 * GB, 0, 0.25)), "only Linux"),
        (doctor.check_state(HERE, errno.EACCES), 'sudo chown -R "$USER" /state'),
        (doctor.check_state(HERE, errno.EROFS), "read-only"),
        (doctor.check_state(HERE, errno.ENOSPC), "free some space"),
        (doctor.check_state(HERE, errno.EIO), "another --state-dir"),
        (doctor.check_disk(HERE, GB, GB), "free 0.8 GB there"),
        (one(doctor.check_sockets("/" + 90 * "x")), "TMPDIR=/tmp"),
        (doctor.check_files(256), "ulimit -n 4096"),
        (doctor.check_clock("this clock is behind that of http://a:1: set it"), "set it"),
        (one(doctor.check_proxy(["https_proxy"], cut_off=True)), "open TCP connections itself"),
        (doctor.check_line(0, 20.0, GB), "a faster line"),
        (doctor.check_line(10_000_000, 20.0, 8 * GB), "--base"),
    ],
    ids=lambda value: value.about if isinstance(value, Check) else "",
)
def test_a_fault_names_its_fix(wrong: Check, fix: str) -> None:
    assert fix in wrong.fix


def test_a_rate_and_wear_are_told_with_what_they_mean() -> None:
    told = doctor.check_line(10_000_000, 2.0, 8 * GB).what
    assert told.endswith("40.0 Mbit/s, at which the first version takes 18 min")
    assert doctor.check_line(10_000_000, 2.0, 0).what.endswith("40.0 Mbit/s")
    what = one(doctor.check_wear(8 * GB, 8 * GB, 8 * GB, 0.5)).what
    assert "each version rewrites 8.0 GB, 11.5 TB a day if one comes each minute" in what
