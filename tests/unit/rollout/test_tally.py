"""What the learner knows about its samplers."""

from __future__ import annotations

from typing import Any, cast

import pytest

from swarm.rollout import tally
from swarm.rollout.journal.entries import RolloutAccepted
from swarm.rollout.messages import Offer
from swarm.rollout.plane.effects import Judged
from swarm.types import NodeId, Span, Verdict
from tests.builders import ALICE, BOB, rollout, v


def test_of_who_names_another_class_of_engine_than_before_none_is_known() -> None:
    known = tally.Tally()
    for engine in ("a", "a", "b", "b"):
        known.runs(ALICE, engine)
    known.runs(BOB, "b")
    assert (known.engine_of(ALICE), known.engine_of(BOB)) == ("", "b")


def test_the_last_samplers_engines_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "MAX_NODES", 2)
    known = tally.Tally()
    for node in ("a", "b", "c"):
        known.runs(NodeId(node), "x")
    assert [known.engine_of(NodeId(node)) for node in ("a", "b", "c")] == ["", "x", "x"]


def test_of_two_processes_of_one_node_the_second_gives_way_and_a_restarted_one_does_not() -> None:
    known = tally.Tally()

    def heard(*lives: int) -> list[bool]:
        return [known.is_elsewhere(ALICE, life) for life in lives]

    assert heard(1, 1, 2, 2, 3, 3) == [False] * 6, "two restarts"
    # 3 is at work when 4 comes, from a copy of its directory; so is 5, which comes after 4 has ended.
    assert heard(4, 4, 3, 4) == [False, False, False, True]
    assert heard(3, 5, 3, 5, 3) == [False, False, False, True, False]
    assert heard(0, 0) == [False, False], "a sampler of an older release does not say which it is"
    assert not known.is_elsewhere(BOB, 5)
    assert [known.is_elsewhere(BOB, life) for life in (6, 7, 5, 6, 7, 5)] == [False, False, False, True, True, False]


def test_a_sampler_that_vanished_lost_at_most_what_its_engine_draws_at_once() -> None:
    known = tally.Tally()
    for node in (ALICE, BOB):
        known.samplers[node] = tally.SamplerStats(recent=tally.Recent(now=0.0), offer=Offer(samples_at_once=4))
        known.vanished(node, 2.25 if node == ALICE else 7.0)
    known.vanished(ALICE, 3.0)  # Is known no more
    status = known.status(now=1.0, why_idle=lambda node: "", is_barred=lambda node: False)
    assert (status["rollouts_lost"], status["samplers"]) == (6.2, [])


def test_tokens_are_counted_for_who_drew_them() -> None:
    class Watch:
        def __init__(self) -> None:
            self.told: dict[NodeId, list[int]] = {}

        def accepted(self, node: NodeId, tokens: list[int]) -> None:
            self.told[node] = tokens

    watch, known = Watch(), tally.Tally()
    spans = (Span(version=v(0), start=0, end=3, node=ALICE), Span(version=v(1), start=3, end=4))
    two = [RolloutAccepted(number=0, node=BOB, rollout=one) for one in (rollout(), rollout(spans=spans))]
    known.accepted(two, cast(Any, watch), now=0.0)
    assert watch.told == {ALICE: [3], BOB: [4, 1]}
    assert known.turns == 1.0, "a completion has no turns, whoever drew it"


def test_a_rate_is_of_late_and_that_of_a_young_sampler_is_not_diluted() -> None:
    recent = tally.Recent(now=100.0)
    assert recent.per_s("tokens", now=100.0) == 0
    for second in range(1, 11):
        recent.add("tokens", 50, now=100.0 + second)
    assert recent.per_s("tokens", now=110.0) == pytest.approx(50, rel=0.1)
    for second in range(11, 300):
        recent.add("up", 7, now=100.0 + second)
    assert recent.per_s("up", now=400.0) < 7
    assert recent.per_s("tokens", now=400.0) < 0.1


def test_what_a_sampler_moved_is_the_difference_of_two_offers_and_a_restart_is_no_traffic() -> None:
    stats = tally.SamplerStats(recent=tally.Recent(now=0.0))
    for second, (sent, received) in enumerate(((5_000, 9_000), (6_000, 9_000), (100, 50), (100, 2_050))):
        stats.heard_at = float(second)
        stats.offered(Offer(sent_bytes=sent, received_bytes=received))
    assert stats.recent.per_s("up", now=3.0) == pytest.approx(1_000 / 3, rel=0.1)
    assert stats.recent.per_s("down", now=3.0) == pytest.approx(2_000 / 3, rel=0.1)


def test_a_samplers_rollouts_and_tokens_a_second_are_both_those_that_were_accepted() -> None:
    """A page has them side by side: with a rate that a node claims, a rollout could have less than a token."""
    known, watch = tally.Tally(), tally.SamplerWatch()
    told: list[tuple[NodeId, list[int]]] = []
    watch.accepted = lambda node, tokens: told.append((node, list(tokens)))  # type: ignore[method-assign]
    known.begin(now=0.0)
    known.samplers[ALICE] = tally.SamplerStats(recent=tally.Recent(now=0.0))
    verdicts: tuple[tuple[NodeId, Verdict], ...] = ((ALICE, "accepted"), (ALICE, "stale"), (BOB, "stale"))
    known.judged(
        [Judged(rollout_id="", node=node, verdict=one, detail="", counted_as=one) for node, one in verdicts], now=1.0
    )
    records = [
        RolloutAccepted(number=0, node=node, rollout=rollout(tokens=range(length)))
        for node, length in ((ALICE, 100), (BOB, 600), (ALICE, 200))
    ]
    known.accepted(records, watch, now=1.0)
    assert told == [(ALICE, [100, 200]), (BOB, [600])]
    status = known.status(now=1.0, why_idle=lambda node: "", is_barred=lambda node: False)
    assert (status["rollouts_per_s"], status["tokens_per_s"]) == (1, 900)
    assert [(one["rollouts_per_s"], one["tokens_per_s"]) for one in status["samplers"]] == [(1, 300)]
