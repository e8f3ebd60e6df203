"""What three clocks say about a sleep, a stop, and a clock that was set."""

from __future__ import annotations

import pytest

from swarm.join.owner import Reading, notice

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
def test_what_happened_is_one_line_and_who_was_away_joins_again(
    seen: dict[str, float], line: str, was_away: bool
) -> None:
    assert after(**seen) == (line, was_away)
