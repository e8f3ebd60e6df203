"""The figures of benchmarks.real."""

from __future__ import annotations

from benchmarks import real

LINE = {"step_s": [9.0, 5.0, 7.0], "step_cpu_s": [20.0, 8.0, 10.0], "peak_bytes": 2_000_000_000, "seed": 0}
HELD_OUT = [(0, 0.0, 0.1), (10, 60.0, 0.45), (20, 120.0, 0.4)]


def test_a_summary_leaves_the_warm_up_out_and_says_when_a_share_was_reached() -> None:
    found = real.summary([{**LINE, "held_out": HELD_OUT, "settings": {}}], warm_up=1)
    assert (found["step_s"], found["cpu_s_per_step"], found["peak_gb"]) == (6.0, 9.0, 2.0)
    assert found["seconds_to"] == {"0.3": 60.0, "0.4": 60.0, "0.5": None, "0.6": None, "0.7": None}
    assert real.step_s({"step_s": [9.0, 5.0]}, 3) == 5.0


def test_cpu_time_is_read_between_two_readings() -> None:
    watched = real.Watched(cpu_s=[(10.0, 1.0), (20.0, 3.0), (30.0, 9.0)])
    assert [watched.cpu_at(time_s) for time_s in (10.0, 15.0, 25.0, 40.0)] == [1.0, 2.0, 6.0, 9.0]
