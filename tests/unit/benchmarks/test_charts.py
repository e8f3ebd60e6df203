"""Curves as an SVG file."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.charts import picture

SVG = "{http://www.w3.org/2000/svg}"


def test_a_picture_is_well_formed_and_holds_every_point_within_it() -> None:
    curves = {"reward <shaped> & more": [(1.0, 0.0), (2.0, 0.5), (4.0, 1.5)], "held-out": [(4.0, 0.5)]}
    root = ElementTree.fromstring(picture('a "title" <b>', "below it", {"adaptive": curves, "off": curves}))
    assert len(root.findall(SVG + "svg")) == 2
    lines = [one for one in root.findall(SVG + "svg")[0].findall(SVG + "path") if "line" in one.attrib["class"]]
    points = [line.attrib["d"][1:].split("L") for line in lines]
    assert [len(line) for line in points] == [3, 1]
    for x, y in (point.split() for line in points for point in line):
        assert 0 <= float(x) <= 560
        assert 0 <= float(y) <= 250
    words = ["".join(one.itertext()) for one in root.findall(SVG + "text")]
    assert 'a "title" <b>' in words
    assert any("reward <shaped> & more" in one for one in words)
