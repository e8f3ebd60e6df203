"""What the learner and its samplers did, and when: the last ten minutes as spans, the whole run in buckets of time.

A lane is one worker, which does one thing at a time. `learner` is the trainer, `publication` what brings its versions
to the samplers; every other lane is a sampler, by the id of its node. What samplers tell is believed only within the
time since they spoke last. Times are Unix seconds.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat, zip_longest
from typing import Any

STATES = ("train", "wait", "stage", "encode", "send", "draw", "install", "fetch", "standby", "gone")
LEARNER, PUBLICATION = "learner", "publication"
INDEX = {state: index for index, state in enumerate(STATES)}

RECENT_S = 600.0  # Spans are kept as long
SLACK_S = 5.0  # By which the clocks of page and learner may differ
CLOCK_S = 60.0  # A lane that is known until so much later than now is one of a clock that was ahead
JOINED_S = 0.25  # A shorter gap within one state is the way of a beat, not a pause
MAX_BUCKETS = 240  # Of the whole run: a page shows no more of them side by side
MAX_BUCKET_S = 2**22  # In milliseconds it fits into a count; all of them are 32 years
MAX_LANES = 2_000  # Twice the samplers that a page shows
MAX_LANE_SPANS = 2_000  # Three a second for ten minutes
MAX_SPANS = 300_000  # In all lanes together: 5 MB
TRIMMED = 16  # Spans that come before old ones go: one by one that would take most of the time
MAX_ASKED = 64  # Lanes of one answer: as many fit on a screen


@dataclass(slots=True)
class Lane:
    """Its spans are in order and apart, in arrays, because the garbage collector would look at each of 300,000 objects.
    `counts` are milliseconds by state and bucket. All is known `until`; `doing` goes on since then."""

    name: str
    until: float
    heard: float
    doing: int | None = None
    gone: bool = False
    states: bytearray = field(default_factory=bytearray)
    begins: array[float] = field(default_factory=lambda: array("d"))
    ends: array[float] = field(default_factory=lambda: array("d"))
    counts: dict[int, array[int]] = field(default_factory=dict)


class Timeline:
    """The lanes of a run that began at `began`."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._bucket_s = 1
        self._lanes = {lane: Lane(lane, began, began) for lane in (LEARNER, PUBLICATION)}

    def note(self, lane: str, state: str, began: float, ended: float | None = None) -> None:
        """Add a span; without `ended` it goes on until the lane's next one begins. What the lane already has does not
        change: a span begins after it. A span without length only ends what goes on."""
        if (one := self._lane(lane, began)) is None:
            return
        if one.until > (ended or began) + CLOCK_S:
            self._set_back(ended or began)
        self._settle(one, began)
        one.until, one.doing, one.gone = max(one.until, began), None, state == "gone"
        if ended is None:
            one.doing = INDEX[state]
        else:
            self._add(one, INDEX[state], began, ended)

    def heard(
        self, lane: str, told: Iterable[tuple[str, float, float]], *, state: str, now: float, name: str = ""
    ) -> None:
        """Add what a sampler told at `now`: what it did, how many seconds ago that began, and for how many. It counts
        within the time since the sampler was heard last; all of that is `state` if it told nothing. A wait on standby
        is that. `name` is what its owner calls it."""
        if (one := self._lane(lane, now)) is None:
            return
        one.name = name or lane
        if one.until > now + CLOCK_S:
            self._set_back(now)
        self._settle(one, now)
        since, one.heard, one.doing, one.gone = (now if one.gone else one.heard), now, None, False
        spans = [(now - ago, now - ago + lasted, what) for what, ago, lasted in told]
        for began, ended, what in sorted(spans) or [(since, now, state)]:
            is_standby = what == "wait" and state == "standby"
            self._add(one, INDEX[state if is_standby else what], max(since, began), min(now, ended))

    def answer(self, lanes: Sequence[str], began: float, ended: float, *, now: float) -> dict[str, Any]:
        """Return what these lanes did from `began` to `ended`: spans if that is recent, else each state's share of each
        bucket. All lanes are named with it, present ones first."""
        asked = {lane: self._lanes[lane] for lane in lanes[:MAX_ASKED] if lane in self._lanes}
        everybody = sorted(self._lanes.items(), key=lambda item: item[1].gone)
        answer = {
            **{"now": now, "began": self._began, "states": list(STATES)},
            "all": [{"lane": lane, "name": one.name, "gone": one.gone} for lane, one in everybody],
        }
        for one in asked.values():
            self._settle(one, now)
        if began >= now - RECENT_S - SLACK_S and any(one.ends for one in self._lanes.values()):
            return answer | {"spans": {lane: _spans(one, began, ended) for lane, one in asked.items()}}
        first, last = (int(max(0.0, min(now, time) - self._began) // self._bucket_s) for time in (began, ended))
        shares = {lane: self._shares(one, first, last + 1) for lane, one in asked.items()}
        starts = self._began + first * self._bucket_s
        return answer | {"buckets": {"began": starts, "bucket_s": self._bucket_s, "lanes": shares}}

    def kept(self, *, now: float) -> dict[str, Any]:
        """Return the buckets of all lanes, for a file."""
        lanes = {}
        for lane, one in self._lanes.items():
            self._settle(one, now)
            self._trim(one, now)
            ms = {STATES[state]: counts.tolist() for state, counts in one.counts.items()}
            lanes[lane] = {"name": one.name, "until": round(one.until, 3), "ms": ms}
        return {"began": self._began, "bucket_s": self._bucket_s, "lanes": lanes}

    @classmethod
    def of(cls, kept: Mapping[str, Any], *, now: float = math.inf) -> Timeline:
        """Return the timeline that `kept` came from, without spans, its samplers gone until they are heard. Raise
        ValueError if it came from none."""
        try:
            timeline, width = cls(float(kept["began"])), int(kept["bucket_s"])
            if not (0 <= timeline._began < 1e11 and 1 <= width <= MAX_BUCKET_S):
                raise ValueError("no timeline has such times")
            timeline._bucket_s = width
            for lane, one in list(kept["lanes"].items())[:MAX_LANES]:
                counts = {INDEX[state]: array("I", ms[:MAX_BUCKETS]) for state, ms in one["ms"].items()}
                name, until, gone = str(one["name"]), float(one["until"]), lane not in timeline._lanes
                timeline._lanes[lane] = Lane(name, until, until, gone=gone, counts=counts)
        except (AttributeError, LookupError, TypeError, OverflowError) as error:
            raise ValueError(f"not a timeline: {error}") from error
        if any(one.until > now for one in timeline._lanes.values()):
            timeline._set_back(now)
        return timeline

    # -- parts -----------------------------------------------------------------------------------------------

    def _lane(self, lane: str, now: float) -> Lane | None:
        """Return a lane. A new one takes the place of the one that is gone longest; None if there is no room."""
        if (one := self._lanes.get(lane)) is None:
            if len(self._lanes) >= MAX_LANES:
                gone = [(other.heard, name) for name, other in self._lanes.items() if other.gone]
                if not gone:
                    return None
                del self._lanes[min(gone)[1]]
            one = self._lanes[lane] = Lane(lane, now, now)
        return one

    def _settle(self, one: Lane, at: float) -> None:
        if one.doing is not None:
            self._add(one, one.doing, one.until, at)

    def _set_back(self, now: float) -> None:
        """Forget what lies after `now`: the clock was ahead, and counted again it would not fit into its buckets."""
        first = max(0, int((now - self._began) // self._bucket_s))
        for one in self._lanes.values():
            one.until, one.heard = min(one.until, now), min(one.heard, now)
            out = bisect_left(one.begins, now)
            del one.states[out:], one.begins[out:], one.ends[out:]
            if one.ends:
                one.ends[-1] = min(one.ends[-1], now)
            for counts in one.counts.values():
                del counts[first:]
        if not first:
            self._bucket_s = 1

    def _add(self, one: Lane, state: int, began: float, ended: float) -> None:
        began = max(one.until, began)
        if not ended > began:
            return
        if one.states and one.states[-1] == state and began - one.ends[-1] <= JOINED_S:
            began, one.ends[-1] = one.ends[-1], ended
        else:
            one.states.append(state)
            one.begins.append(began)
            one.ends.append(ended)
            if len(one.ends) % TRIMMED == 0:
                self._trim(one, began)
        self._count(one, state, began, ended)
        one.until = ended

    def _trim(self, one: Lane, now: float) -> None:
        room = min(MAX_LANE_SPANS, MAX_SPANS // len(self._lanes))
        if (out := max(len(one.ends) - room, bisect_left(one.ends, now - RECENT_S))) > 0:
            del one.states[:out], one.begins[:out], one.ends[:out]

    def _count(self, one: Lane, state: int, began: float, ended: float) -> None:
        """Count a span in buckets, which become twice as wide when the run outgrows them."""
        # A clock that was set may be decades off.
        end = min(max(0, round((ended - self._began) * 1000)), MAX_BUCKETS * MAX_BUCKET_S * 1000)
        at = max(0, round((began - self._began) * 1000))
        while end > MAX_BUCKETS * self._bucket_s * 1000:
            self._widen()
        if (counts := one.counts.get(state)) is None:
            counts = one.counts[state] = array("I")
        width = self._bucket_s * 1000
        if end > width * len(counts):
            counts.extend(repeat(0, -(-end // width) - len(counts)))
        while at < end:
            bucket, before = at // width, at
            at = min(end, (bucket + 1) * width)
            counts[bucket] += at - before

    def _widen(self) -> None:
        self._bucket_s *= 2
        for one in self._lanes.values():
            for state, counts in one.counts.items():
                one.counts[state] = array("I", map(sum, zip_longest(counts[0::2], counts[1::2], fillvalue=0)))

    def _shares(self, one: Lane, first: int, last: int) -> list[list[float]]:
        width = self._bucket_s * 1000
        buckets = range(first, min(last, max(map(len, one.counts.values()), default=0)))
        columns = [
            [counts[i] * 1000 // width / 1000 if i < len(counts) else 0 for i in buckets]
            for counts in map(one.counts.get, range(len(STATES)), repeat(array("I")))
        ]
        return [list(row) for row in zip(*columns, strict=True)]


def _spans(one: Lane, began: float, ended: float) -> list[list[float | None]]:
    """Return state, beginning and end (None: it goes on) of the spans that lie from `began` to `ended`."""
    lie = slice(bisect_right(one.ends, began), bisect_left(one.begins, ended))
    spans = zip(one.states[lie], one.begins[lie], one.ends[lie], strict=True)
    found: list[list[float | None]] = list(map(list, spans))
    if found and one.doing is not None and lie.stop == len(one.ends):
        found[-1][2] = None
    return found
