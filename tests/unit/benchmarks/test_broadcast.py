"""The broadcast benchmark's command line, and when a swarm may be published to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import broadcast
from benchmarks.broadcast_swarm import STEADY_S, Readiness
from benchmarks.links import BadProfile, equal_profile, profile_of
from benchmarks.transfers import TransferFailed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--peers", "0"], "1 to 249 peers"),
        (["--up-mbit", "-1"], "up_mbit"),
        (["--profile", "none.toml"], "cannot read"),
        (["--schemes", "relay,carrier-pigeon"], "carrier-pigeon"),
        (["--kill", "1@0.5"], "peers are hosts 2 to 9"),
        (["--stall", "3"], "HOST@FRACTION"),
        (["--size-mib", "0"], "1 at least"),
        (["--repeat", "0"], "1 at least"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["broadcast", *arguments])
    with pytest.raises(SystemExit) as ended:
        broadcast.main()
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert says in err


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
    link = {"up_mbit": 50, "down_mbit": 100}
    readiness = Readiness(profile_of("two leaves", [link, link, *[{**link, "reachable": False}] * 2]))
    streams = {1: 3, 2: 3, 3: 2, 4: 2}
    assert not readiness.is_reached(_statuses(streams, leaves=(2, 3, 4)), now=0.0)
    assert not readiness.is_reached(_statuses(streams, leaves=(3,)), now=50.0)
    assert readiness.is_reached(_statuses(streams, leaves=(3, 4)), now=50.0)


def test_nodes_without_streams_are_told_apart_from_nodes_that_have_none_yet() -> None:
    with pytest.raises(TransferFailed, match="older"):
        Readiness(equal_profile(1, 50, 100)).is_reached({1: {"reachability": "public"}}, now=0.0)


def test_the_work_directory_must_be_new(tmp_path: Path) -> None:
    with pytest.raises(BadProfile, match="cannot make"), broadcast._directory(tmp_path):
        pass
