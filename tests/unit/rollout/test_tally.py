"""What the learner knows about its samplers."""

from __future__ import annotations

import pytest

from swarm.rollout import tally
from swarm.rollout.messages import Offer
from swarm.types import NodeId
from tests.builders import ALICE, BOB


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


def test_traffic_is_what_a_sampler_counted_since_it_last_said_so() -> None:
    stats = tally.SamplerStats()
    stats.offered(Offer(sent_bytes=500, received_bytes=0), now=10.0)
    seen = [(stats.up_bytes_per_s, stats.down_bytes_per_s)]
    stats.offered(Offer(sent_bytes=900, received_bytes=100), now=12.0)
    seen.append((stats.up_bytes_per_s, stats.down_bytes_per_s))
    stats.offered(Offer(sent_bytes=0, received_bytes=300), now=14.0)
    seen.append((stats.up_bytes_per_s, stats.down_bytes_per_s))
    assert seen == [(None, None), (200.0, 50.0), (0.0, 100.0)], "its process was restarted at the end"
