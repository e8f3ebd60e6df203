"""How much memory is left, on machines that say it and on those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.machine import free_host_bytes, mac_free_bytes


def say(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    def read_text(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)


MEMINFO = {"/proc/meminfo": "MemTotal: 24000000 kB\nMemFree: 100 kB\nMemAvailable:   20000000 kB\n"}
"""Of a machine that has run for a while: nearly no page is free, most of the memory can be had."""


def test_where_the_system_does_not_say_what_is_left_all_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for files in ({}, {"/proc/meminfo": "MemTotal: 5 kB\n"}):
        say(monkeypatch, files)
        assert free_host_bytes() >= 2**28


@pytest.mark.parametrize(
    ("group", "limit", "used"),
    [
        ("/sys/fs/cgroup/", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory/", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_a_control_group_leaves_less(monkeypatch: pytest.MonkeyPatch, group: str, limit: str, used: str) -> None:
    stat = {group + "memory.stat": "anon 5\ninactive_file 30\n"}
    say(monkeypatch, {**MEMINFO, **stat, group + limit: "1000\n", group + used: "600\n"})
    assert free_host_bytes() == 430
    say(monkeypatch, {**MEMINFO, **stat, group + limit: "max\n", group + used: "600\n"})
    assert free_host_bytes() == 20_480_000_000


MACS = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            200000.
Pages inactive:                          190000.
Pages speculative:                         5000.
Pages purgeable:                           1000.
"""


def test_on_macos_what_others_hold_is_not_free() -> None:
    assert mac_free_bytes(MACS) == 16_384 * 206_000
    assert mac_free_bytes("no such command") is None
