"""A curve of more steps than a page shows."""

from __future__ import annotations

import pytest

from swarm.report.figures import MAX_POINTS, Column


def test_what_is_too_much_for_a_curve_is_drawn_as_mean_least_and_most() -> None:
    points = Column.of((step, step % 10) for step in range(100_000)).points()
    assert len(points) <= MAX_POINTS
    assert {(point.low, point.high) for point in points} == {(0.0, 9.0)}
    assert all(point.mean == pytest.approx(4.5, abs=0.1) for point in points)
    assert [point.step for point in points] == sorted(point.step for point in points)
