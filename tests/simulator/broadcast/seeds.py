"""Random transfers: a swarm, a version and what befalls them, drawn from one seed, then quiet until all have it.

bin/python -m tests.simulator --broadcast --seed 7       one of them, and its figures
bin/python -m tests.simulator --broadcast --seeds 100    the first hundred, up to the first that fails
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from swarm.broadcast.forest.courier import TreeCourier
from swarm.broadcast.forest.planner import MESH_PEERS
from swarm.plan.simulate.world import World
from swarm.types import NodeId
from tests.simulator.broadcast.checkers import BroadcastChecker
from tests.simulator.broadcast.network import NetworkShape
from tests.simulator.broadcast.swarm import BroadcastSwarm, Host, Member

MBIT = 1e6 / 8

Figures = dict[str, Any]

STALLED_BYTES_PER_S = MBIT
"""What a stalled link still carries: 1 Mbit/s, as in broadcast.md."""

STALL_S = 20.0

RETURN_S = 1.0
"""After its death was noticed a node may come back with what it held."""


def draw_uplink(draw: Random) -> float:
    """Bytes/s, log-normal (sigma 0.9) around 30 Mbit/s, drawn again outside of 5 to 200."""
    while True:
        mbit = 30 * draw.lognormvariate(0.0, 0.9)
        if 5 <= mbit <= 200:
            return mbit * MBIT


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastPlan:
    """A swarm, a version and its faults; a share of 0 is no such fault."""

    peers: int
    leaf_share: float
    learner_mbit: float
    chunks: int
    chunk_bytes: int
    scheme: str | None
    shape: NetworkShape
    detect_s: float
    death_share: float
    return_share: float
    joins: int
    stall_share: float
    stall_uplink_only: bool
    liar_share: float
    lie_share: float

    @classmethod
    def random(cls, seed: int) -> BroadcastPlan:
        draw = Random(f"broadcast {seed}")
        peers = draw.choice([1, 2, 5, 8, 16, 24, 32, 45])
        schemes: list[str | None] = [None, "forest", "forest", "chain", "tree", "star"]
        if peers <= MESH_PEERS:
            schemes += ["mesh", "mesh", "mesh"]
        scheme = draw.choice(schemes)
        # A mesh is dealt chunks as small as the planner wants them.
        meshed = scheme == "mesh" or (scheme is None and peers <= MESH_PEERS)
        stall_share = draw.choice([0.0, 0.0, 0.1])
        # A stalled link that many send to holds a chunk of each: at 256 KiB it takes longer than anything is awaited.
        sizes = [16, 32] if meshed else [16, 64] if stall_share else [16, 64, 256]
        return cls(
            peers=peers,
            leaf_share=draw.choice([0.0, 0.3, 0.5, 0.7, 1.0]),
            learner_mbit=draw.choice([20.0, 50.0, 100.0, 200.0]),
            chunks=draw.randint(40, 400),
            chunk_bytes=draw.choice(sizes) * 1024,
            scheme=scheme,
            shape=NetworkShape(
                latency_s=draw.choice([0.0, 0.02, 0.05, 0.15]), loss_share=draw.choice([0.0, 0.01, 0.03])
            ),
            detect_s=draw.choice([0.2, 3.0, 8.0]),
            death_share=draw.choice([0.0, 0.1, 0.3]),
            return_share=draw.choice([0.0, 0.5]),
            joins=draw.choice([0, 0, 1, 4]),
            stall_share=stall_share,
            stall_uplink_only=draw.random() < 0.5,
            liar_share=draw.choice([0.0, 0.0, 0.1, 0.2]),
            lie_share=draw.choice([0.05, 1.0]),
        )


def run_seed(seed: int, *, tell: Callable[[str], None] | None = None) -> Figures:
    """Run it, and return what it came to; InvariantBreach where an invariant does not hold. `settle_s` is from the last
    fault on; `ratio` over the bound of those who live at the end."""
    plan = BroadcastPlan.random(seed)
    draw = Random(f"broadcast faults {seed}")
    hosts = hosts_of(plan, draw)
    swarm = BroadcastSwarm(
        World(draw, tell=tell),
        plan.shape,
        hosts[0],
        hosts[1:],
        size_bytes=plan.chunks * plan.chunk_bytes - draw.randrange(plan.chunk_bytes),
        scheme=plan.scheme,
        chunk_bytes=plan.chunk_bytes,
        detect_s=plan.detect_s,
    )
    checker = BroadcastChecker(swarm, f"bin/python -m tests.simulator --broadcast --seed {seed}")
    swarm.start()
    last_s = _schedule_faults(plan, swarm, draw, checker.bound_s())
    swarm.world.schedule(last_s, "the last fault is over", lambda: None)
    swarm.world.run_until(lambda: swarm.world.now >= last_s)
    settle_s = checker.settle()
    times = [member.completed_at or 0.0 for member in swarm.live_peers()]
    trees = [member.courier for member in swarm.live_peers() if isinstance(member.courier, TreeCourier)]
    return Figures(
        scheme=swarm.plan.scheme,
        peers=len(times),
        chunks=swarm.count,
        virtual_s=swarm.world.now,
        ratio=max(times, default=0.0) / checker.bound_s(),
        settle_s=settle_s,
        events=swarm.world.events,
        refused=swarm.refused,
        duplicates=swarm.duplicates,
        pulled=sum(tree.pulled for tree in trees),
        learner_copies=swarm.network.sent_bytes(swarm.learner.node) / swarm.size_bytes,
        digest=swarm.world.trace_digest(),
    )


def hosts_of(plan: BroadcastPlan, draw: Random) -> list[Host]:
    """The learner, then the peers. A downlink is twice the uplink, 50 Mbit/s at least."""
    learner = Host(
        node=NodeId("learner"), public=True, up_bytes_per_s=plan.learner_mbit * MBIT, down_bytes_per_s=200 * MBIT
    )
    return [learner, *(new_host(draw, number, draw.random() >= plan.leaf_share) for number in range(plan.peers))]


def new_host(draw: Random, number: int, public: bool) -> Host:
    up = draw_uplink(draw)
    return Host(
        node=NodeId(f"{'public' if public else 'leaf'}-{number}"),
        public=public,
        up_bytes_per_s=up,
        down_bytes_per_s=max(2 * up, 50 * MBIT),
    )


def _schedule_faults(plan: BroadcastPlan, swarm: BroadcastSwarm, draw: Random, bound_s: float) -> float:
    """Faults within 1.2 times the bound; when the last is over."""
    span_s = 1.2 * bound_s
    peers = swarm.live_peers()
    ends = [0.0]
    for member in draw.sample(peers, round(plan.liar_share * len(peers))):
        member.lie_share = plan.lie_share
    for member in draw.sample(peers, round(plan.stall_share * len(peers))):
        at = draw.uniform(0, span_s)
        swarm.world.schedule(at, "stall", lambda member=member: _stall(plan, swarm, member))  # type: ignore[misc]
        ends.append(at + STALL_S)
    for member in draw.sample(peers, round(plan.death_share * len(peers))):
        at = draw.uniform(0, span_s)
        returns = draw.random() < plan.return_share
        swarm.world.schedule(at, "death", lambda m=member, r=returns: _kill(swarm, m, r))  # type: ignore[misc]
        ends.append(at + plan.detect_s + RETURN_S)
    for number in range(plan.joins):
        at = draw.uniform(0, span_s)
        host = new_host(draw, plan.peers + number, draw.random() >= plan.leaf_share)
        swarm.world.schedule(at, "join", lambda host=host: swarm.join(host))  # type: ignore[misc]
        ends.append(at)
    return max(ends)


def _stall(plan: BroadcastPlan, swarm: BroadcastSwarm, member: Member) -> None:
    host = member.host
    down = None if plan.stall_uplink_only else STALLED_BYTES_PER_S
    swarm.network.set_rates(host.node, up_bytes_per_s=STALLED_BYTES_PER_S, down_bytes_per_s=down)

    def heal() -> None:
        swarm.network.set_rates(host.node, up_bytes_per_s=host.up_bytes_per_s, down_bytes_per_s=host.down_bytes_per_s)

    swarm.world.schedule(STALL_S, "stall is over", heal)


def _kill(swarm: BroadcastSwarm, member: Member, returns: bool) -> None:
    swarm.kill(member.host.node)
    if returns:
        held = bytes(member.book)
        swarm.world.schedule(swarm.detect_s + RETURN_S, "return", lambda: swarm.join(member.host, held=held))
