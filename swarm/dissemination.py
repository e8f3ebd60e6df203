"""What a version costs a set of workers, by the plan that the swarm itself would make for them.

Here because the capacity model knows nothing of broadcasts, and broadcasts nothing of prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from swarm.broadcast.fluid import flow_of
from swarm.broadcast.forest import PeerProfile
from swarm.broadcast.planner import Scheme, plan_of
from swarm.capacity.fleet import Disseminate, Dissemination, Worker
from swarm.types import NodeId

LEARNER = NodeId("learner of the version")
"""No worker is named so: names have no blanks in a swarm, and come with a number in a scenario."""

MOST_SETS = 64
"""Sets that are remembered: a search asks for the same few again and again. A thousand workers take a megabyte."""


def disseminate_by(
    *, learner_uplink_bytes_per_s: float, encoded_bytes: float, apply_s: float, scheme: Scheme | None = None
) -> Disseminate:
    """Plans for versions of `encoded_bytes` that a worker has applied `apply_s` after its last byte. `scheme` None is
    the planner's choice. An unknown uplink is taken for the median of the others, an unknown downlink for infinite."""
    learner = PeerProfile(node=LEARNER, public=True, uplink_bytes_per_s=learner_uplink_bytes_per_s)

    @lru_cache(maxsize=MOST_SETS)
    def disseminated(workers: tuple[Worker, ...]) -> Dissemination:
        profiles = [
            PeerProfile(node=NodeId(one.name), public=one.public, uplink_bytes_per_s=one.uplink_bytes_per_s)
            for one in workers
        ]
        plan = plan_of(learner, profiles, encoded_bytes=max(1, round(encoded_bytes)), scheme=scheme)
        flow = flow_of(
            plan,
            encoded_bytes=encoded_bytes,
            downlinks={NodeId(one.name): one.downlink_bytes_per_s for one in workers},
        )
        return Dissemination(
            install_s=tuple(flow.arrival_s[peer.node] + apply_s for peer in profiles),
            down_bytes=(flow.down_bytes,) * len(workers),
            up_bytes=tuple(flow.up_bytes[peer.node] for peer in profiles),
            learner_up_bytes=flow.up_bytes[LEARNER],
        )

    def disseminate(workers: Sequence[Worker]) -> Dissemination:
        return disseminated(tuple(workers))

    return disseminate
