"""When a swarm may be published to."""

from __future__ import annotations

from typing import Any

import msgspec

from benchmarks.broadcast import STEADY_S, Readiness
from benchmarks.links import HostLink, equal_profile, profile_of


def _statuses(streams: dict[int, int], leaves: tuple[int, ...] = ()) -> dict[int, dict[str, Any]]:
    return {n: {"streams": count, "reachability": "leaf" if n in leaves else "public"} for n, count in streams.items()}


def test_a_full_mesh_is_ready_at_once() -> None:
    readiness = Readiness(equal_profile(2, 50, 100))
    assert not readiness.is_reached(_statuses({1: 2, 2: 1, 3: 2}), now=0.0)
    assert readiness.is_reached(_statuses({1: 2, 2: 2, 3: 2}), now=1.0)


def test_fewer_streams_are_ready_when_they_stay_as_they_are() -> None:
    readiness = Readiness(equal_profile(2, 50, 100))
    chain = _statuses({1: 1, 2: 2, 3: 1})
    assert not readiness.is_reached(chain, now=10.0)
    assert not readiness.is_reached(_statuses({1: 1, 2: 1, 3: 0}), now=12.0)
    assert not readiness.is_reached(chain, now=13.0)
    assert readiness.is_reached(chain, now=13.0 + STEADY_S)


def test_a_peer_without_any_stream_or_answer_is_waited_for() -> None:
    readiness = Readiness(equal_profile(2, 50, 100))
    for now in (0.0, 100.0):
        assert not readiness.is_reached(_statuses({1: 1, 2: 1, 3: 0}), now=now)
    for now in (200.0, 300.0):
        assert not readiness.is_reached(_statuses({1: 2, 2: 2}), now=now)


def test_peers_must_be_public_or_not_as_the_profile_has_it() -> None:
    link = HostLink(up_mbit=50, down_mbit=100)
    leaf = msgspec.structs.replace(link, reachable=False)
    readiness = Readiness(profile_of("two leaves", [link, link, leaf, leaf]))
    streams = {1: 3, 2: 3, 3: 2, 4: 2}
    assert not readiness.is_reached(_statuses(streams, leaves=(2, 3, 4)), now=0.0)
    assert not readiness.is_reached(_statuses(streams, leaves=(3,)), now=50.0)
    assert readiness.is_reached(_statuses(streams, leaves=(3, 4)), now=50.0)
