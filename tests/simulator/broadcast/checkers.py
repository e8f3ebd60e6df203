"""A transfer under watch: every member is checked after whatever it did.

    I2        a member sends only chunks that truly arrived at it, whole; what a liar sends is in nobody's books
    I4        a courier says that it is complete when, and only when, it holds all, and never takes it back
    I5        queues are under their caps, notes pass the decoder's limits, unacknowledged bytes fit their window
    I6        `settle`: after the last fault every live peer holds all within a stated time

What is true is in the books of the simulation, never in a courier.
"""

from __future__ import annotations

from swarm.broadcast.forest.courier import ASKED_OF_ONE, MAX_NOTES, TreeCourier
from swarm.broadcast.notes import MAX_BITMAP_BYTES, MAX_INDICES, Note, Send
from swarm.errors import ProtocolError
from swarm.types import NodeId
from swarm.wire import decode, encode
from tests.simulator.breach import InvariantBreach
from tests.simulator.broadcast.schemes import bound_bytes_per_s
from tests.simulator.broadcast.swarm import BroadcastSwarm, Member

NOTE_CAP_BYTES = MAX_BITMAP_BYTES + 64

SETTLE_S = 60.0
"""For everything that takes its time whatever the size: detection, new plans, stripes given up, chunks asked for."""

SETTLE_BOUNDS = 8.0
"""And so many times what the whole transfer takes at best: at the end there may be one slow parent left for many. The
baselines are given the time of a star: one slow node above all is what they are like."""

CAPS_EVERY_ACTS = 16
"""To look at every queue after every act would take most of a run."""


class BroadcastChecker:
    """Watches a swarm. `replay` is what a breach names."""

    def __init__(self, swarm: BroadcastSwarm, replay: str) -> None:
        self._swarm = swarm
        self._replay = replay
        self._acts = 0
        self._complete: dict[NodeId, Member] = {}
        swarm.after = self._after
        swarm.on_send = self._on_send

    def settle(self) -> float:
        """I6. Seconds until all live peers hold all."""
        began = self._swarm.world.now
        limit_s = SETTLE_S + SETTLE_BOUNDS * self.bound_s()
        if self._swarm.plan.scheme in ("chain", "tree", "star"):
            slowest = min(m.host.up_bytes_per_s for m in self._swarm.members.values() if m.alive)
            limit_s += 2 * len(self._swarm.members) * self._swarm.size_bytes / slowest
        if not self._swarm.run(limit_s):
            late = [m.host.node for m in self._swarm.live_peers() if m.missing]
            lack = [m.missing for m in self._swarm.live_peers() if m.missing]
            self._breach("I6", f"{limit_s:.0f} s after the last fault {late} still lack {lack} chunks")
        return self._swarm.world.now - began

    def bound_s(self) -> float:
        """What the whole transfer takes at best among those who live: design.md section 7."""
        peers = [member.host for member in self._swarm.live_peers()]
        slowest = min((host.down_bytes_per_s for host in peers), default=float("inf"))
        rate = bound_bytes_per_s(
            self._swarm.learner.up_bytes_per_s, [host.profile for host in peers], slowest_downlink=slowest
        )
        return self._swarm.size_bytes / rate

    def _on_send(self, member: Member, content: Send | Note) -> None:
        if isinstance(content, Send):
            if not 0 <= content.index < self._swarm.count or not member.book[content.index]:
                self._breach("I2", f"{member.host.node} sends chunk {content.index}, which it does not hold")
            return
        try:
            decode(encode(content), type(content), cap_bytes=NOTE_CAP_BYTES)
        except ProtocolError as error:
            self._breach("I5", f"{member.host.node} says what nobody would accept: {error}")

    def _after(self, member: Member) -> None:
        node, courier = member.host.node, member.courier
        if courier.complete != (member.missing == 0):
            self._breach("I4", f"{node} says complete={courier.complete} and lacks {member.missing} chunks")
        if courier.complete:
            self._complete[node] = member
        elif self._complete.get(node) is member:
            self._breach("I4", f"{node} was complete and no longer is")
        self._acts += 1
        if self._acts % CAPS_EVERY_ACTS == 0:
            self._check_caps(member)

    def _check_caps(self, member: Member) -> None:
        if isinstance(member.courier, TreeCourier):
            if not within_caps(member.courier):
                self._breach("I5", f"a queue of {member.host.node} is over its cap")
            if member.courier._missing != member.missing:
                self._breach("I2", f"{member.host.node} believes to lack {member.courier._missing} chunks")
        if self._swarm.network.over_window:
            self._breach("I5", "more is unacknowledged on a connection than its window")

    def _breach(self, rule: str, what: str) -> None:
        raise InvariantBreach(rule, what, replay=self._replay, now=self._swarm.world.now)


def within_caps(courier: TreeCourier) -> bool:
    """I5: every queue under the bound that its definition states."""
    return len(courier._pulls.asks) <= MAX_INDICES and all(
        len(link.queue) <= courier._count
        and len(link.asked) <= MAX_INDICES
        and sum(ask.peer == peer for ask in courier._pulls.asks.values()) <= ASKED_OF_ONE
        and len(link.notes) <= MAX_NOTES + 1
        for peer, link in courier._links.items()
    )
