"""Curves as an SVG file."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from benchmarks.charts import Chart, Curve, picture
from swarm.report.figures import MAX_POINTS, Column

CURVES = [
    Curve(name="reward <shaped> & more", column=Column.of([(1, 0.0), (2, 0.5), (4, 1.5)])),
    Curve(name="held-out", column=Column.of([(0, -0.2), (4, 0.5)])),
    Curve(name="once", column=Column.of([(3, 0.25)])),
]
SVG = "{http://www.w3.org/2000/svg}"


def test_a_picture_is_well_formed_and_holds_every_point_within_it() -> None:
    chart = Chart(title="A", unit="share", curves=CURVES, ceiling=1, marks=[(2, "loss <b>"), (9, "late")])
    root = ElementTree.fromstring(picture('a "title" <b>', "below it", [chart, chart]))
    assert len(root.findall(SVG + "svg")) == 2
    drawn = root.findall(SVG + "svg")[0]
    paths = {kind: [one for one in drawn.findall(SVG + "path") if kind in (one.get("class") or "")] for kind in KINDS}
    points = [(line.get("d") or "")[1:].split("L") for line in paths["line"]]
    assert [len(line) for line in points] == [3, 2]
    assert len(drawn.findall(SVG + "circle")) == 1, "a single point has no length to draw"
    assert ["".join(one.itertext()) for one in paths["mark"]] == ["loss <b> at learner step 2"]
    for x, y in (point.split() for line in points for point in line):
        assert 0 <= float(x) <= 560
        assert 0 <= float(y) <= 250
    words = ["".join(one.itertext()) for one in root.findall(SVG + "text")]
    assert 'a "title" <b>' in words
    assert any("reward <shaped> & more" in one for one in words)


KINDS = ("line", "mark")


@pytest.mark.parametrize("curves", [[], [Curve(name="none", column=Column())], [CURVES[2]]])
def test_a_run_of_no_steps_has_a_picture_too(curves: list[Curve]) -> None:
    drawn = picture("nothing yet", "", [Chart(title="A", unit="", curves=curves, ceiling=1)])
    ElementTree.fromstring(drawn)
    assert not re.search(r"nan|inf", drawn)


def test_what_is_too_much_for_a_curve_is_drawn_as_mean_least_and_most() -> None:
    column = Column()
    for step in range(100_000):
        column.add(step, step % 10)
    points = column.points()
    assert len(points) <= MAX_POINTS
    assert {(point.low, point.high) for point in points} == {(0.0, 9.0)}
    assert all(point.mean == pytest.approx(4.5, abs=0.1) for point in points)
    assert [point.step for point in points] == sorted(point.step for point in points)
    assert "band c0" in picture("", "", [Chart(title="A", unit="", curves=[Curve(name="a", column=column)])])
