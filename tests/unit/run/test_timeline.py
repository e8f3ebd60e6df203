"""What the timeline makes of what it is told: spans, buckets, a file."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.run import timeline as rules
from swarm.run.timeline import STATES, Timeline

BEGAN = 1_700_000_000.0
NODE = "a1b2"


@pytest.fixture
def timeline() -> Timeline:
    return Timeline(BEGAN)


def spans(timeline: Timeline, lane: str, *, now: float) -> list[tuple[str, float, float | None]]:
    found = timeline.answer([lane], now - 600, now, now=now)["spans"][lane]
    return [(STATES[s], began - BEGAN, None if ended is None else ended - BEGAN) for s, began, ended in found]


def shares(timeline: Timeline, lane: str, *, now: float) -> list[dict[str, float]]:
    found = timeline.answer([lane], BEGAN - 1, now, now=max(now, BEGAN + 700))["buckets"]["lanes"][lane]
    return [{state: share for state, share in zip(STATES, row, strict=True) if share} for row in found]


def test_what_goes_on_ends_where_the_next_begins(timeline: Timeline) -> None:
    timeline.note("learner", "wait", BEGAN)
    assert spans(timeline, "learner", now=BEGAN + 1) == [("wait", 0, None)]
    timeline.note("learner", "train", BEGAN + 2)
    timeline.note("learner", "train", BEGAN + 3, BEGAN + 3)
    assert spans(timeline, "learner", now=BEGAN + 9) == [("wait", 0, 2), ("train", 2, 3)]


def test_a_beat_is_believed_within_the_time_since_the_one_before(timeline: Timeline) -> None:
    timeline.heard(NODE, [("draw", 500.0, 500.0)], state="wait", now=BEGAN + 10)
    timeline.heard(NODE, [("draw", 500.0, 499.0), ("install", 1.0, 7.0)], state="wait", now=BEGAN + 12)
    assert spans(timeline, NODE, now=BEGAN + 12) == [("draw", 10, 11), ("install", 11, 12)]


def test_a_sampler_that_tells_nothing_does_what_the_learner_takes_it_for(timeline: Timeline) -> None:
    for second in range(0, 6, 2):
        timeline.heard(NODE, [], state="fetch", now=BEGAN + second)
    assert spans(timeline, NODE, now=BEGAN + 5) == [("fetch", 0, 4)]


def test_a_wait_on_standby_is_that_and_a_batch_under_way_is_not(timeline: Timeline) -> None:
    timeline.heard(NODE, [], state="wait", now=BEGAN)
    timeline.heard(NODE, [("draw", 4.0, 1.0), ("wait", 3.0, 3.0)], state="standby", now=BEGAN + 4)
    assert spans(timeline, NODE, now=BEGAN + 4) == [("draw", 0, 1), ("standby", 1, 4)]


def test_who_is_gone_is_so_until_it_is_heard_again(timeline: Timeline) -> None:
    for second in (0, 2):
        timeline.heard(NODE, [], state="draw", now=BEGAN + second, name="Ada's card")
    timeline.note(NODE, "gone", BEGAN + 2)
    said = timeline.answer([], BEGAN, BEGAN, now=BEGAN + 5)["all"]
    assert said[-1] == {"lane": NODE, "name": "Ada's card", "gone": True}
    timeline.heard(NODE, [("draw", 4.0, 4.0)], state="draw", now=BEGAN + 6)
    timeline.heard(NODE, [], state="draw", now=BEGAN + 8)
    assert spans(timeline, NODE, now=BEGAN + 8) == [("draw", 0, 2), ("gone", 2, 6), ("draw", 6, 8)]


def test_a_gap_within_a_state_stays_unless_it_is_a_beats_way(timeline: Timeline) -> None:
    for began, ended in ((0.0, 1.0), (1.2, 2.0), (10.0, 11.0)):
        timeline.note(NODE, "draw", BEGAN + began, BEGAN + ended)
    assert spans(timeline, NODE, now=BEGAN + 11) == [("draw", 0, 2), ("draw", 10, 11)]


def test_spans_older_than_ten_minutes_are_left_to_the_buckets(timeline: Timeline) -> None:
    timeline.note("learner", "train", BEGAN, BEGAN + 1.5)
    timeline.note("learner", "wait", BEGAN + 1.5, BEGAN + 2)
    timeline.note("learner", "train", BEGAN + 605, BEGAN + 606)
    assert spans(timeline, "learner", now=BEGAN + 606) == [("train", 605, 606)]
    assert [sum(row.values()) for row in shares(timeline, "learner", now=BEGAN + 606)][:1] == [pytest.approx(2 / 4)]
    assert shares(timeline, "learner", now=BEGAN + 606)[0] == {"train": 0.375, "wait": 0.125}


@pytest.mark.parametrize("moment", [float("nan"), float("inf"), -float("inf"), -1e18])
def test_a_page_may_ask_for_any_time(timeline: Timeline, moment: float) -> None:
    timeline.note("learner", "train", BEGAN, BEGAN + 5)
    for began, ended in ((moment, BEGAN + 5), (BEGAN - 9e9, moment), (moment, moment)):
        json.dumps(timeline.answer(["learner", "nobody"], began, ended, now=BEGAN + 5))


def test_a_file_gives_the_same_buckets_and_samplers_that_are_gone(timeline: Timeline) -> None:
    timeline.heard(NODE, [], state="draw", now=BEGAN)
    timeline.heard(NODE, [], state="draw", now=BEGAN + 300)
    timeline.note("learner", "train", BEGAN)
    kept = timeline.kept(now=BEGAN + 310)
    assert kept["lanes"]["learner"]["ms"] == {"train": [2000] * 155}
    again = Timeline.of(json.loads(json.dumps(kept)))
    assert again.kept(now=BEGAN + 320) == kept
    assert [one["gone"] for one in again.answer([], 0, 0, now=BEGAN + 320)["all"]] == [False, False, True]
    # A week later nothing has been added.
    week = BEGAN + 7 * 86_400
    assert again.answer([NODE], 0, week, now=week)["buckets"]["bucket_s"] == 2
    again.note("learner", "wait", BEGAN + 320, BEGAN + 330)
    assert spans(again, "learner", now=BEGAN + 330) == [("wait", 320, 330)]


@pytest.mark.parametrize(
    "kept",
    [
        [],
        {"began": "x", "bucket_s": 1, "lanes": {}},
        {"began": 1.0, "bucket_s": 0, "lanes": {}},
        {"began": float("nan"), "bucket_s": 1, "lanes": {}},
        {"began": 1.0, "bucket_s": 1, "lanes": {"learner": 3}},
        {"began": 1.0, "bucket_s": 1, "lanes": {"learner": {"name": "", "until": 1.0, "ms": {"dance": [1]}}}},
        {"began": 1.0, "bucket_s": 1, "lanes": {"learner": {"name": "", "until": 1.0, "ms": {"train": [-1]}}}},
        {"began": 1.0, "bucket_s": 1, "lanes": {"learner": {"name": "", "until": 1.0, "ms": {"train": [1.5]}}}},
    ],
)
def test_a_damaged_file_is_no_timeline(kept: Any) -> None:
    with pytest.raises(ValueError, match="no"):
        Timeline.of(kept)


def test_who_is_gone_longest_gives_way_and_a_present_one_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_LANES", 5)
    timeline = Timeline(BEGAN)
    for second, lane in enumerate(("a", "b", "c")):
        timeline.heard(lane, [], state="draw", now=BEGAN + second)
    timeline.heard("d", [], state="draw", now=BEGAN + 3)
    assert _lanes(timeline) == {"learner", "publication", "a", "b", "c"}
    timeline.note("b", "gone", BEGAN + 4)
    timeline.note("a", "gone", BEGAN + 5)
    timeline.heard("d", [], state="draw", now=BEGAN + 6)
    assert _lanes(timeline) == {"learner", "publication", "d", "b", "c"}


def _lanes(timeline: Timeline) -> set[str]:
    return {one["lane"] for one in timeline.answer([], 0, 0, now=BEGAN)["all"]}


def test_a_clock_that_was_set_does_no_harm() -> None:
    """A machine without a battery begins in 1970; another is set back by a year."""
    timeline, year = Timeline(0.0), 365 * 86_400.0
    timeline.note("learner", "wait", 5.0)
    timeline.note("learner", "train", BEGAN)
    assert spans(timeline, "learner", now=BEGAN + 5) == [("wait", 5 - BEGAN, 0), ("train", 0, None)]
    assert len(timeline.kept(now=BEGAN + 5)["lanes"]["learner"]["ms"]["wait"]) == rules.MAX_BUCKETS
    timeline = Timeline(BEGAN)
    timeline.note("learner", "wait", BEGAN)
    timeline.note("learner", "train", BEGAN - year, BEGAN - year + 5)
    timeline.note("learner", "train", BEGAN + 7, BEGAN + 9)
    assert spans(timeline, "learner", now=BEGAN + 9) == [("train", 7, 9)]


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("ahead", [3600.0, 20 * 365 * 86_400.0])
def test_a_clock_that_was_ahead_for_a_while_costs_that_while(timeline: Timeline, ahead: float, resumed: bool) -> None:
    """Lanes would stay empty for as long, and all buckets be years wide."""
    for shift in (0, ahead):
        timeline.heard(NODE, [("draw", 5, 5)], state="draw", now=BEGAN + 10 + shift)
        timeline.note("learner", "train", BEGAN + 10 + shift)
        timeline.note("learner", "wait", BEGAN + 20 + shift)
    if resumed:
        kept = json.loads(json.dumps(timeline.kept(now=BEGAN + 20 + ahead)))
        timeline = Timeline.of(kept, now=BEGAN + 25)
    for second in range(30, 90, 10):
        timeline.heard(NODE, [("draw", 10, 10)], state="draw", now=BEGAN + second)
        timeline.note("learner", "train", BEGAN + second, BEGAN + second + 5)
    assert spans(timeline, "learner", now=BEGAN + 90)[-1] == ("train", 80, 85)
    assert spans(timeline, NODE, now=BEGAN + 90)[-1][1:] == (30, 80)
    assert timeline.kept(now=BEGAN + 90)["bucket_s"] <= 16


WILD = st.floats(allow_nan=True, allow_infinity=True)
BEATS = st.lists(
    st.tuples(
        st.floats(0, 400),
        st.lists(st.tuples(st.sampled_from(("draw", "wait", "install", "fetch")), WILD | st.floats(0, 9), WILD)),
        st.sampled_from(("wait", "standby", "draw")),
    ),
    max_size=30,
)


@given(beats=BEATS)
def test_whatever_is_told_shares_add_up(beats: list[tuple[float, list[tuple[str, float, float]], str]]) -> None:
    timeline, now = Timeline(BEGAN), BEGAN
    for later, told, state in beats:
        before, now = now, now + later
        timeline.heard(NODE, told, state=state, now=now)
        if later:
            recent = timeline.answer([NODE], now - 600, now, now=now).get("spans", {NODE: []})[NODE]
            assert all(began < ended for _, began, ended in recent if ended - began > 0.001)
            assert all(first[2] <= second[1] for first, second in pairwise(recent))
            assert all(ended <= now + 0.001 for _, _, ended in recent)
            assert before <= now
    end = max(now, BEGAN + 700)
    rows = timeline.answer([NODE], 0, end, now=end)["buckets"]["lanes"].get(NODE, [])
    assert len(rows) <= rules.MAX_BUCKETS
    assert all(share >= 0 for row in rows for share in row)
    assert all(sum(row) <= 1 + 1e-9 for row in rows)


@given(lengths=st.lists(st.floats(0.001, 300), max_size=40))
def test_no_time_is_lost_when_buckets_double(lengths: list[float]) -> None:
    timeline, at = Timeline(BEGAN), BEGAN
    total = {"draw": 0.0, "install": 0.0}
    for number, length in enumerate(lengths):
        state = "install" if number % 2 else "draw"
        timeline.note(NODE, state, at, at + length)
        total[state], at = total[state] + length, at + length
    ms = timeline.kept(now=at)["lanes"].get(NODE, {"ms": {}})["ms"]
    for state, seconds in total.items():
        assert sum(ms.get(state, [])) == pytest.approx(seconds * 1000, abs=len(lengths))
    assert sum(map(sum, ms.values())) == pytest.approx((at - BEGAN) * 1000, abs=2)


@given(lengths=st.lists(st.floats(0.001, 2), min_size=1, max_size=200))
def test_spans_are_bounded(lengths: list[float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "MAX_LANE_SPANS", 20)
        timeline, at = Timeline(BEGAN), BEGAN
        for number, length in enumerate(lengths):
            timeline.note(NODE, ("draw", "wait")[number % 2], at, at + length)
            at += length
        found = spans(timeline, NODE, now=at)
        assert min(20, len(lengths)) <= len(found) <= 20 + rules.TRIMMED
        assert found[-1][2] == pytest.approx(at - BEGAN, abs=0.002)
