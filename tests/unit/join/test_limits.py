"""What an owner allows: when nothing is drawn and why, the file that changes the flags; and what clocks tell."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import UserError
from swarm.join.owner import (
    DAY,
    FILE_BYTES,
    Holds,
    Reading,
    change_limits,
    described,
    holds,
    notice,
    read_limits,
    unknown,
)
from swarm.settings import JoinConfig, LimitsSection
from swarm.settings_file import load_config
from tests.unit.wires import many_turns

START = JoinConfig(bootstrap=("127.0.0.1",), max_upload=10.0, nice=3)


def outside(hours: str, minute: int) -> str:
    return holds(LimitsSection(hours=hours), minute=minute, on_battery=False, in_use=False)["hours"]


@pytest.mark.parametrize(
    ("hours", "time", "until"),
    [
        ("", "12:00", None),
        *(("22:00-08:00", "21:59", "22:00"), ("22:00-08:00", "22:00", None), ("22:00-08:00", "07:59", None)),
        *(("22:00-08:00", "08:00", "22:00"), ("09:30-17:00", "23:59", "09:30")),
        *((("22:00-06:00, 12:00-13:30"), at, until) for at, until in (("10:00", "12:00"), ("13:30", "22:00"))),
        *(("20:00-00:00", "00:00", "20:00"), ("20:00-00:00", "23:59", None)),
    ],
)
def test_nothing_is_drawn_outside_the_hours_and_it_says_until_when(hours: str, time: str, until: str | None) -> None:
    hour, minute = map(int, time.split(":"))
    assert outside(hours, 60 * hour + minute) == (f"outside its hours, until {until}" if until else "")


@given(st.integers(0, DAY - 1), st.integers(0, DAY - 1), st.integers(0, DAY - 1))
def test_a_range_and_its_complement_share_the_day(start: int, end: int, minute: int) -> None:
    if start == end:
        return
    there, back = (f"{a // 60:02}:{a % 60:02}-{b // 60:02}:{b % 60:02}" for a, b in ((start, end), (end, start)))
    assert bool(outside(there, minute)) != bool(outside(back, minute))
    assert outside(f"{there},{back}", minute) == ""


@pytest.mark.parametrize(
    "hours", ["22-8", "25:00-08:00", "22:60-23:00", "08:00-08:00", "22:00-08:00,", "24:00-08:00", "x"]
)
def test_other_hours_are_refused_by_the_flag_and_by_the_command_with_the_same_words(hours: str, tmp_path: Path) -> None:
    words = f"--hours {hours}: hours are written as 22:00-08:00, several of them with commas between"
    with pytest.raises(UserError) as flag:
        load_config(JoinConfig, None, {"bootstrap": "127.0.0.1", "hours": hours})
    with pytest.raises(UserError) as command:
        change_limits(tmp_path / "limits.json", [f"hours={hours}"])
    assert str(flag.value) == str(command.value) == words


def test_battery_and_desktop_hold_only_where_their_owner_said_so_and_the_machine_does() -> None:
    wary = load_config(LimitsSection, None, {"only_when": ["mains,idle"]})
    assert wary == LimitsSection(only_when=("mains", "idle"))

    def reasons(limits: LimitsSection, says: bool | None) -> list[str]:
        return [why for why in holds(limits, minute=0, on_battery=says, in_use=says).values() if why]

    assert reasons(wary, True) == ["on battery", "somebody uses this machine"]
    assert reasons(wary, False) == reasons(wary, None) == reasons(LimitsSection(), True) == []
    assert unknown(wary, on_battery=None, in_use=None) == [
        "this machine does not say whether it is on battery: only-when=mains has no effect",
        "this machine does not say (by loginctl or xprintidle) who uses it: only-when=idle has no effect",
    ]
    assert unknown(wary, on_battery=True, in_use=False) == unknown(LimitsSection(), on_battery=None, in_use=None) == []


def test_what_the_command_sets_is_kept_until_it_is_reset(tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    assert read_limits(path) == {}
    wanted = ["max-upload=2.5", "--max_disk=40", "hours=22:00-08:00", "only-when=mains, idle", "threads=2"]
    change_limits(path, wanted)
    assert json.loads(path.read_text()) | {"only_when": ("mains", "idle")} == read_limits(path)
    changed = START.model_copy(update=read_limits(path))
    assert (changed.max_upload, changed.max_disk, changed.hours) == (2.5, 40.0, "22:00-08:00")
    assert (changed.only_when, changed.threads, changed.nice) == (("mains", "idle"), 2, 3), "what was not changed stays"
    change_limits(path, ["max-upload=none", "hours=none", "only-when=none", "threads=default", "nice=0"])
    again = START.model_copy(update=read_limits(path))
    assert (again.max_upload, again.hours, again.only_when, again.threads, again.nice) == (None, "", (), None, 0)
    change_limits(path, [f"{name}=default" for name in LimitsSection.model_fields])
    assert START.model_copy(update=read_limits(path)) == START
    assert described({"max_upload": None})[0].split() == ["max-upload", "none"]


def test_each_fault_of_a_command_is_a_line_and_nothing_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    change_limits(path, ["nice=4"])
    with pytest.raises(UserError) as caught:
        change_limits(path, ["max-uplod=3", "threads=0", "nice=none", "nice-ness=default", "max-download=7"])
    assert str(caught.value).splitlines() == [
        "max-uplod is no limit: did you mean max-upload?",
        "--threads 0: input should be greater than or equal to 1",
        "--nice none: input should be a valid integer, unable to parse string as an integer",
        "nice-ness is no limit: did you mean nice?",
    ]
    with pytest.raises(UserError, match=r"^pause: write NAME=VALUE, or NAME=default$"):
        change_limits(path, ["pause"])
    assert read_limits(path) == {"nice": 4}


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "7", '{"nice": 99}', '{"nise": 1}', " " * FILE_BYTES + "{}", "\0", "[" * 4000]
)
def test_a_file_that_the_command_did_not_write_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "limits.json"
    path.write_text(content)
    with pytest.raises(UserError):
        read_limits(path)


async def test_a_node_draws_again_when_the_last_reason_is_lifted() -> None:
    holds = Holds()
    held: list[str] = []
    holds.on_hold = lambda: held.append(holds.reason)
    holds.set("hours", "")
    assert (holds.free.is_set(), held) == (True, [])
    holds.set("battery", "on battery")
    holds.set("owner", "by its owner")
    assert held == ["on battery"] * 2
    free = asyncio.create_task(holds.free.wait())
    assert holds.reason == "on battery"
    holds.set("battery", "")
    holds.set("hours", "")
    await many_turns()
    assert holds.reason == "by its owner"
    assert not free.done()
    holds.set("owner", "")
    await free
    assert holds.reason == ""


BEFORE = Reading(wall=1.7e9, monotonic=500.0, boot=9000.0)


def after(*, wall: float = 1.0, monotonic: float = 1.0, boot: float = 1.0) -> tuple[str, bool]:
    return notice(
        BEFORE, Reading(wall=BEFORE.wall + wall, monotonic=BEFORE.monotonic + monotonic, boot=BEFORE.boot + boot)
    )


@pytest.mark.parametrize("seen", [{"wall": 14, "monotonic": 14, "boot": 14}, {"wall": -3}, {"wall": 1.5}, {"wall": 5}])
def test_a_busy_machine_is_no_sleeping_one_and_a_clock_that_is_kept_in_step_is_not_told(seen: dict[str, float]) -> None:
    assert after(**seen) == ("", False)


@pytest.mark.parametrize(
    ("seen", "line", "was_away"),
    [
        ({"wall": 91, "monotonic": 91, "boot": 91}, "this process was stopped, or got no turn, for 91 s", True),
        ({"wall": 3600, "monotonic": 1, "boot": 3600}, "this machine slept for 3,600 s", True),
        ({"wall": 3601}, "the clock was set forward by 3,600 s", True),
        ({"wall": 11}, "the clock was set forward by 10 s", False),
        ({"wall": -3599}, "the clock was set back by 3,600 s", False),
        (
            {"wall": 91 - 7200, "monotonic": 1, "boot": 91},
            "this machine slept for 91 s; the clock was set back by 7,200 s",
            True,
        ),
    ],
)
def test_what_happened_is_a_line_and_who_was_away_rejoins(seen: dict[str, float], line: str, was_away: bool) -> None:
    assert after(**seen) == (line, was_away)
