"""What a version costs a set of workers, where it can be reckoned by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from swarm.broadcast.forest.planner import PeerProfile, plan_of
from swarm.pay.delivery import WIRE_BYTES, disseminate_by, flow_of, level_of
from swarm.pay.fleet import Dissemination, Worker
from swarm.types import NodeId

MB = 1e6


def spread_over(workers: Sequence[Worker], *, learner: float, nbytes: float, apply_s: float = 0.0) -> Dissemination:
    return disseminate_by(learner_uplink_bytes_per_s=learner, encoded_bytes=nbytes, apply_s=apply_s)(workers)


def worker(name: str, *, up: float, down: float, public: bool = True) -> Worker:
    return Worker(name=name, rollouts_per_s=1.0, uplink_bytes_per_s=up, downlink_bytes_per_s=down, public=public)


@pytest.mark.parametrize(
    ("caps", "capacity", "level"),
    [
        ([], 1.0, math.inf),
        ([10.0], 4.0, 4.0),
        ([1.0, 2.0, 10.0], 9.0, 6.0),
        ([1.0, 2.0], 9.0, math.inf),
        ([math.inf, 1.0], 5.0, 4.0),
    ],
)
def test_water_is_filled_to_one_level(caps: list[float], capacity: float, level: float) -> None:
    assert level_of(caps, capacity) == level


@pytest.mark.parametrize("count", [pytest.param(20, id="mesh"), pytest.param(40, id="forest")])
def test_alike_peers_receive_at_the_rate_of_all_uplinks_over_their_number(count: int) -> None:
    workers = [worker(f"peer-{n}", up=5 * MB, down=100 * MB) for n in range(count)]
    spread = spread_over(workers, learner=20 * MB, nbytes=100 * MB)
    bound_s = count * 100 * WIRE_BYTES / (20 + count * 5)
    assert bound_s <= spread.broadcast_s <= 1.25 * bound_s


@pytest.mark.parametrize("count", [pytest.param(15, id="mesh"), pytest.param(45, id="forest")])
def test_all_that_is_received_is_sent_by_somebody(count: int) -> None:
    workers = [worker(f"peer-{n}", up=(1 + n) * MB, down=50 * MB, public=n % 3 > 0) for n in range(count)]
    spread = spread_over(workers, learner=10 * MB, nbytes=40 * MB)
    assert spread.learner_up_bytes + sum(spread.up_bytes) == pytest.approx(sum(spread.down_bytes))
    assert spread.learner_up_bytes >= spread.down_bytes[0] * 0.999


def test_who_needs_no_version_costs_nothing() -> None:
    spread = spread_over([], learner=1 * MB, nbytes=1 * MB, apply_s=1.0)
    assert (spread.install_s, spread.learner_up_bytes, spread.broadcast_s) == ((), 0.0, 0.0)


def test_an_unknown_uplink_is_the_median_and_an_unknown_downlink_no_limit() -> None:
    known = [worker(f"peer-{n}", up=5 * MB, down=100 * MB) for n in range(4)]
    one, other = (
        spread_over([*known, last], learner=10 * MB, nbytes=100 * MB)
        for last in (worker("last", up=5 * MB, down=100 * MB), worker("last", up=0.0, down=0.0))
    )
    assert one.install_s == other.install_s


def test_a_slow_downlink_is_late_in_a_forest_and_those_below_it_soon_have_another_parent() -> None:
    peers = [PeerProfile(node=NodeId(f"peer-{n}"), public=True, uplink_bytes_per_s=5 * MB) for n in range(40)]
    learner = PeerProfile(node=NodeId("learner"), public=True, uplink_bytes_per_s=20 * MB)
    plan = plan_of(learner, peers, encoded_bytes=200_000_000)
    assert plan.scheme == "forest"
    flow = flow_of(plan, encoded_bytes=200 * MB, downlinks={NodeId("peer-7"): 0.5 * MB})
    others = [at for node, at in flow.arrival_s.items() if node != "peer-7"]
    assert flow.arrival_s[NodeId("peer-7")] > 400
    assert max(others) < 60
