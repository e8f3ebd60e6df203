"""The staleness bound, the pacing rule, and every verdict on an answer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from swarm.errors import ProtocolError
from swarm.rollout.messages import Answer
from swarm.rollout.plane.buffer import Buffer
from swarm.rollout.plane.groups import LeaseTable
from swarm.rollout.plane.heldout import held_out_figures
from swarm.rollout.plane.rules import deadline, is_for_publication, is_fresh, may_open, publication_period, staleness
from swarm.rollout.plane.verdict import LOGPROB_SLACK, MIN_LOGPROB, token_fault, verdict_on
from swarm.types import Purpose, Rollout, SamplingRules, Score, Span, VersionId
from swarm.wire import decode, encode
from tests.builders import ALICE, RULES, STOP, VOCAB, failed_rollout, floats, ints, open_group, ready_group, rollout, v


@pytest.mark.parametrize(
    ("version", "next_batch", "bound", "age", "fresh", "last"),
    [(0, 1, 0, 1, False, 0), (0, 2, 2, 2, True, 2), (5, 7, 1, 2, False, 6), (6, 5, 0, -1, True, 6)],
)
def test_staleness_bound_and_deadline_agree(
    version: int, next_batch: int, bound: int, age: int, fresh: bool, last: int
) -> None:
    assert staleness(version, next_batch) == age
    assert is_fresh(version, next_batch, bound) is fresh
    assert deadline(version, bound) == last
    assert is_fresh(version, last, bound)
    assert not is_fresh(version, last + 1, bound)


def test_groups_past_their_deadline_are_not_opened_and_take_no_room() -> None:
    assert may_open(5, {0: 100, 3: 100}, 5, 1)
    assert not may_open(4, {}, 5, 8)


def verdict(
    drawn: Rollout,
    *,
    purpose: Purpose = "train",
    min_version: VersionId | None = None,
    rules: SamplingRules = RULES,
    newest: VersionId | None = None,
    next_batch: int = 3,
    bound: int = 2,
    fault: str | None = None,
) -> tuple[str, str]:
    """The verdict on an answer of Alice's, who was leased both samples of the group."""
    table = LeaseTable(run_seed=7, beat_s=1.0, time_limit_s=600.0)
    group = open_group(table, 0, purpose=purpose)
    group.min_version, group.rules = min_version or v(0), rules
    table.hear(ALICE, now=0.0)
    table.claim(group, ALICE, 2, now=0.0, max_tokens=1000)
    return verdict_on(
        Answer(drawn),
        ALICE,
        group,
        fault=token_fault(drawn, VOCAB) if fault is None else fault,
        newest=newest or v(3),
        next_batch=next_batch,
        max_staleness=bound,
    )


@pytest.mark.parametrize(
    ("versions", "kind", "why"),
    [
        ((v(1),), "accepted", ""),
        ((v(3),), "accepted", ""),
        ((v(0),), "stale", "version 0 is 1 step(s) past the bound of 2"),
        ((v(0), v(3)), "stale", "version 0 is"),
        ((v(1), v(0)), "malformed", "version spans must rise"),
        ((v(1), v(1)), "malformed", "version spans must rise"),
        ((v(3), v(4)), "future", ""),
    ],
)
def test_the_oldest_token_decides_and_versions_rise(versions: tuple[VersionId, ...], kind: str, why: str) -> None:
    """Each version draws as many tokens as the others."""
    each = 4 // len(versions)
    spans = [Span(version=one, start=each * n, end=each * (n + 1)) for n, one in enumerate(versions)]
    found = verdict(rollout(spans=spans))
    assert (found[0], why in found[1]) == (kind, True)


def test_age_counts_versions_whatever_their_incarnation() -> None:
    """A learner came back as incarnation 1: 1.5 is five steps older than 0.10, and 0.11 was lost with the old one."""
    mixed = (Span(version=v(10), start=0, end=2), Span(version=v(5, incarnation=1), start=2, end=4))
    assert rollout(spans=mixed).oldest == 5
    assert verdict(rollout(version=11), newest=v(10, incarnation=1), next_batch=10)[0] == "future"


@dataclass(frozen=True, slots=True)
class Fault:
    """A change to a good answer, and what the refusal has to speak of."""

    name: str
    reason: str
    change: dict[str, Any]
    min_version: VersionId = field(default_factory=lambda: v(0))


def _spans(*bounds: tuple[int, int], version: int = 0) -> tuple[Span, ...]:
    return tuple(Span(version=v(version), start=start, end=end) for start, end in bounds)


def _logprob(value: float) -> dict[str, Any]:
    return {"logprobs": floats(-0.5, value, -0.5, -0.5)}


FAULTS = [
    Fault("another sample", "no such sample", {"index": 2, "spans": _spans((0, 4), version=9)}),
    Fault("failed with tokens", "carries no tokens", {"finish": "failed"}),
    Fault("failed with spans", "carries no tokens", {"finish": "failed", "token_ids": b""}),
    Fault("no tokens", "token ids", {"token_ids": b"", "logprobs": b"", "spans": ()}),
    Fault("ragged tokens", "token ids", {"token_ids": ints(3, 4, 5, STOP)[:-1]}),
    Fault("too long", "more than the lease's 6", {"token_ids": ints(*[3] * 7), "logprobs": floats(*[-0.5] * 7)}),
    Fault("too few log-probs", "differ in length", {"logprobs": floats(-1, -1, -1)}),
    Fault("ragged log-probs", "differ in length", {"logprobs": floats(-1, -1, -1, -1)[:-1]}),
    Fault("a negative id", "outside the vocabulary", {"token_ids": ints(3, -1, 5, STOP)}),
    Fault("an id too large", "outside the vocabulary", {"token_ids": ints(3, VOCAB, 5, STOP)}),
    Fault("no stop token", "stop token", {"token_ids": ints(3, 4, 5, 6)}),
    Fault("length not reached", "before the length", {"finish": "length"}),
    Fault("NaN", "finite", _logprob(math.nan)),
    Fault("+inf", "finite", _logprob(math.inf)),
    Fault("-inf", "finite", _logprob(-math.inf)),
    Fault("+inf and -inf", "finite", {"logprobs": floats(math.inf, -math.inf, -1, -1)}),
    Fault("hugely unlikely", "finite", _logprob(-1e30)),
    Fault("a little under the floor", "finite", _logprob(MIN_LOGPROB * 1.001)),
    Fault("more than certain", "finite", _logprob(2 * LOGPROB_SLACK)),
    Fault("no spans", "without gaps", {"spans": ()}),
    Fault("a gap", "without gaps", {"spans": _spans((0, 1), (2, 4))}),
    Fault("an overlap", "without gaps", {"spans": _spans((0, 3), (2, 4))}),
    Fault("a late start", "without gaps", {"spans": _spans((1, 4))}),
    Fault("an early end", "without gaps", {"spans": _spans((0, 3))}),
    Fault("a late end", "without gaps", {"spans": _spans((0, 5))}),
    Fault("an empty span", "without gaps", {"spans": _spans((0, 0), (0, 4))}),
    Fault("older than the lease", "below the lease's 0.2", {"spans": _spans((0, 4), version=1)}, v(2)),
    Fault("of an older incarnation", "below the lease's 1.0", {}, v(0, incarnation=1)),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_malformed_answer_is_refused_with_its_reason(fault: Fault) -> None:
    good = rollout()
    bad = msgspec.structs.replace(good, **fault.change)
    assert verdict(good, bound=3) == ("accepted", "")
    kind, why = verdict(bad, min_version=fault.min_version, bound=3)
    assert (kind, fault.reason in why) == ("malformed", True)


@pytest.mark.parametrize(
    ("drawn", "more"),
    [
        (failed_rollout(), {}),
        (rollout(version=0), {"purpose": "eval", "next_batch": 100}),
        (rollout(tokens=[VOCAB - 1] * 6, finish="length"), {}),
        *(
            (msgspec.structs.replace(rollout(), **_logprob(x)), {})
            for x in (0.0, LOGPROB_SLACK / 2, -1e-30, MIN_LOGPROB)
        ),
    ],
    ids=["failed", "held out", "full length and last word", "certain", "rounded", "nearly certain", "least likely"],
)
def test_honest_extremes_are_accepted(drawn: Rollout, more: dict[str, Any]) -> None:
    assert verdict(drawn, bound=3, **more) == ("accepted", "")


def test_a_fault_that_was_found_before_is_not_looked_for_again() -> None:
    """What took its time is done in another thread."""
    good = rollout()
    assert verdict(good, fault="too short") == ("malformed", "too short")
    assert verdict(rollout(tokens=(99, STOP)), bound=3, fault="") == ("accepted", "")
    assert verdict(rollout(tokens=(99, STOP)))[0] == "malformed"


def test_where_stop_strings_are_asked_for_any_token_may_have_completed_one() -> None:
    """It may have been cut off anywhere, and is judged as ever otherwise."""
    ruled = msgspec.structs.replace(RULES, stop=("4", "\n\n"))
    cut = rollout(tokens=[3, 4])
    assert verdict(cut, bound=3) == ("malformed", "finished by a stop token that is not there")
    assert verdict(cut, rules=ruled, bound=3) == ("accepted", "")
    short = msgspec.structs.replace(cut, finish="length")
    assert verdict(short, rules=ruled, bound=3) == ("malformed", "finished by length before the length was reached")


@pytest.mark.parametrize("stop", [("",), ("a" * 257,), ("a",) * 17], ids=["empty", "long", "many"])
def test_stop_strings_are_bounded(stop: tuple[str, ...]) -> None:
    rules = msgspec.structs.replace(RULES, stop=stop)
    with pytest.raises(ProtocolError):
        decode(encode(rules), SamplingRules, cap_bytes=1 << 20)


@pytest.mark.parametrize(("every", "bound", "period"), [(4, 0, 1), (4, 2, 3), (4, 3, 4), (4, 9, 4)])
def test_versions_are_published_often_enough_for_the_bound(every: int, bound: int, period: int) -> None:
    assert publication_period(every, bound) == period


@pytest.mark.parametrize(
    ("step", "newest", "due"), [(4, 2, False), (5, 2, True), (7, 2, True), (9, 8, False), (10, 9, True)]
)
def test_a_period_counts_from_the_newest_version_and_the_last_step_is_published(
    step: int, newest: int, due: bool
) -> None:
    assert is_for_publication(step, newest, 3, 10) is due


# -- complete groups, and held-out rounds --------------------------------------------------------------------------


def test_an_incomplete_group_is_not_taken_in() -> None:
    group = ready_group(0, 0, samples=2)
    group.samples[1].score = None
    with pytest.raises(AssertionError):
        Buffer(batch_groups=1).add(group)
    group.samples[1].score = Score(reward=0.0, exact=False)
    Buffer(batch_groups=1).add(group)


def row(right: int, samples: int, reward: float = 0.5) -> list[Score]:
    return [Score(reward=reward, exact=i < right) for i in range(samples)]


@pytest.mark.parametrize(
    ("right", "samples", "pass_at_1", "pass_at_k"),
    [([1, 0, 1, 1], 1, 0.75, 0.75), ([4, 0, 1], 4, 5 / 12, 2 / 3), ([0, 0], 8, 0.0, 0.0), ([8], 8, 1.0, 1.0)],
)
def test_one_of_k_and_any_of_k(right: list[int], samples: int, pass_at_1: float, pass_at_k: float) -> None:
    figures = held_out_figures([row(count, samples) for count in right])
    assert figures == {
        "exact_match": pytest.approx(pass_at_1),
        "pass_at_1": pytest.approx(pass_at_1),
        "pass_at_k": pytest.approx(pass_at_k),
        "reward": 0.5,
        "samples": samples,
    }
