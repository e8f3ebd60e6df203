"""The benchmark of machines that are taken away: each way to go, on a small scale, and its test of lengths."""

from __future__ import annotations

import json
from random import Random

import pytest

from benchmarks.handover import WAYS, main, same_lengths_p


def test_each_way_of_going_loses_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--seeds", "0", "--steps", "6", "--preempted", "0.95", "--means", "600", "--json"]
    assert main(few) == 0
    *rows, figures = map(json.loads, capsys.readouterr().out.splitlines())
    assert [row["way"] for row in rows] == list(WAYS)
    assert {row["answers"] for row in rows} == {6 * 64}
    share = {row["way"]: row["useful_share"] for row in rows}
    assert share["restart"] < 0.85
    assert share["vanished"] < 0.85
    assert share["portions"] > 0.9
    assert share["handed"] == figures["useful_share"] > 0.999


def test_lengths_of_one_distribution_are_found_alike_and_others_are_not() -> None:
    draw = Random(0)
    first, second = ([round(100 * draw.lognormvariate(0, 1)) for _ in range(2000)] for _ in range(2))
    assert same_lengths_p(first, second) > 0.05
    assert same_lengths_p(first, first) == 1.0
    assert same_lengths_p(first, [one for one in second if one < 400]) < 1e-3
