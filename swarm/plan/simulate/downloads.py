"""Who gets which version when: broadcasts to nodes that hold the previous one, and separate transfers for all others.

Theory of operation. A broadcast goes to the learner's roster: all nodes last known to hold weights, including dead ones
until their death is known. Its times and bytes come from the planner's forest as a fluid (`deltas_to`). The
learner's uplink carries one version after another, the newest next; versions published meanwhile are skipped, and the
next patch is larger by that. If a member vanishes during a broadcast, those still waiting for the version are held up
for STALL_S while the part of the forest below it looks for other parents.

A node that starts, returns, or was not done with one version when the next one went out fetches alone: a patch over all
the versions that it missed, or everything if its disk is empty. It receives at its own downlink, at most at its share
of what the publics and the learner can send to all fetching nodes; the sender is drawn by uplink.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from swarm.pay.fleet import Disseminate
from swarm.plan.scenario import BYTES_PER_MBIT, Scenario, delta_bytes
from swarm.plan.simulate.machines import Node
from swarm.plan.simulate.timeline import Carried
from swarm.plan.simulate.world import World

STALL_S = 8.0  # A child gives up a parent that sends nothing for this long (broadcast/forest/pulls.py)


@dataclass(slots=True, kw_only=True)
class Flight:
    """One version on its way to the roster. `stalls` counts gone members. `done_at` is the last member's planned
    time of arrival, plus STALL_S for each member that vanished on the way."""

    version: int
    done_at: float
    members: frozenset[str]
    stalls: int = 0


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Bytes so far: received in broadcasts and in separate transfers (`join`), sent by the learner."""

    broadcast_bytes: float = 0.0
    join_bytes: float = 0.0
    learner_up_bytes: float = 0.0
    joins: int = 0


class Weights:
    """It reports `moved(node, down, up)`, bytes of a node or the learner (None), and `installed`: a node has a version
    and its engine is running."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        world: World,
        random: Random,
        deltas_to: Callable[[int], Disseminate],
        moved: Callable[[Node | None, float, float], None],
        installed: Callable[[Node, int], None],
    ) -> None:
        self.newest = 0
        self.carried = 0
        self.traffic = Traffic()
        self.flights: list[Flight] = []
        self.carried_to_active: list[Carried] = []
        self._roster: dict[str, Node] = {}
        self._scenario = scenario
        self._world = world
        self._random = random
        self._deltas_to = deltas_to
        self._moved = moved
        self._installed = installed
        self._uplink = scenario.learner.up_mbps * BYTES_PER_MBIT
        self._uplink_free_at = 0.0
        self._fetching = 0

    # -- broadcasts ------------------------------------------------------------------------------------------

    def publish(self, version: int) -> None:
        """Publish `version`; it is carried as soon as the previous one has left the learner."""
        self.newest = version
        wait_s = max(0.0, self._uplink_free_at - self._world.now)
        if version:
            self._world.schedule(wait_s, f"carry {version}", lambda: self._carry(version))

    def forget(self, node: Node) -> None:
        """The learner knows that `node` is gone."""
        self._roster.pop(node.name, None)

    def vanished(self, node: Node) -> None:
        """`node` is gone; the nodes it would have fed wait until they notice."""
        for flight in self._under_way():
            if node.name in flight.members:
                flight.stalls += 1
                flight.done_at += STALL_S

    def _under_way(self) -> list[Flight]:
        self.flights = [flight for flight in self.flights if flight.done_at > self._world.now]
        return self.flights

    def _carry(self, version: int) -> None:
        if version != self.newest:
            return
        members = [node for node in self._roster.values() if not node.there or self._follows(node)]
        steps_apart, self.carried = version - self.carried, version
        if not members:
            return
        found = self._deltas_to(steps_apart)([node.worker for node in members])
        now = self._world.now
        flight = Flight(
            version=version,
            done_at=now + found.broadcast_s,
            members=frozenset(node.name for node in members),
            stalls=sum(not node.there for node in members),
        )
        self.flights.append(flight)
        last_active_s = max((found.install_s[i] for i, node in enumerate(members) if node.wanted), default=0.0)
        self.carried_to_active.append(Carried(now, now + last_active_s))
        self._uplink_free_at = now + found.learner_up_bytes / self._uplink
        self.traffic.learner_up_bytes += found.learner_up_bytes
        self._moved(None, 0.0, found.learner_up_bytes)
        for i, node in enumerate(members):
            if node.there:
                node.busy = True
                self.traffic.broadcast_bytes += found.down_bytes[i]
                self._moved(node, found.down_bytes[i], found.up_bytes[i])
                self._arrive_later(node, flight, found.install_s[i], 0)

    def _follows(self, node: Node) -> bool:
        """Return whether `node` holds the base of the next patch and is fetching nothing else."""
        return node.ready and not node.busy and node.disk == self.carried

    def _arrive_later(self, node: Node, flight: Flight, delay_s: float, stalls: int) -> None:
        life = node.life

        def arrive() -> None:
            if node.life != life:
                return
            if flight.stalls > stalls:
                self._arrive_later(node, flight, STALL_S * (flight.stalls - stalls), flight.stalls)
            else:
                self._has(node, flight.version)

        self._world.schedule(delay_s, "install", arrive)

    # -- transfers of one's own --------------------------------------------------------------------------------

    def fetch(self, node: Node) -> None:
        """Bring `node` up to date, and start its engine if it is not running."""
        if node.busy:
            return
        target, life = self.newest, node.life
        missing = self._missing_bytes(node, target)
        node.busy = True
        self._fetching += missing > 0
        duration_s = missing / min(node.worker.downlink_bytes_per_s or self._uplink, self._part())
        duration_s += 0.0 if node.ready else self._scenario.model.load_s
        duration_s += self._scenario.delta.apply_s if node.disk is not None and missing else 0.0
        if missing:
            self._count_join(node, missing)

        def fetched() -> None:
            self._fetching -= missing > 0
            if node.life == life:
                self._has(node, target)

        self._world.schedule(duration_s, f"fetched {node.name}", fetched)

    def _has(self, node: Node, version: int) -> None:
        node.busy = False
        node.disk = version
        self._roster[node.name] = node
        self._installed(node, version)
        # A node outside the current broadcast would never hear of its version.
        if version < self.carried:
            self.fetch(node)

    def _missing_bytes(self, node: Node, target: int) -> float:
        if node.disk == target:
            return 0.0
        return self._scenario.model.bytes_bf16 if node.disk is None else delta_bytes(self._scenario, target - node.disk)

    def _part(self) -> float:
        pool = self._uplink + sum(sender.worker.uplink_bytes_per_s for sender in self._senders())
        return pool / max(1, self._fetching)

    def _senders(self) -> list[Node]:
        """Return the nodes with weights that others can dial."""
        return [node for node in self._roster.values() if node.there and node.worker.public]

    def _count_join(self, node: Node, nbytes: float) -> None:
        self.traffic.join_bytes += nbytes
        self.traffic.joins += 1
        self._moved(node, nbytes, 0.0)
        senders = [other for other in self._senders() if other is not node]
        uplinks = [self._uplink, *(other.worker.uplink_bytes_per_s for other in senders)]
        (sender,) = self._random.choices([None, *senders], uplinks)
        if sender is None:
            self.traffic.learner_up_bytes += nbytes
        self._moved(sender, 0.0, nbytes)
