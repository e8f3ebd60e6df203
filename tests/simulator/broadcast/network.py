"""Bulk transfer between simulated nodes: shared uplinks and downlinks, connections with little room, loss as delay.

Theory of operation. A node's uplink sends one frame at a time, its connections taking turns; a frame of n bytes holds
it for n / rate. Latency later the frame is at the receiver, whose downlink takes frames in the order in which they
arrive, overlapping with their sending: a frame is there when its last byte is, and when the downlink has had time for
all bytes before. A connection pulls its next frame when the one before has left the uplink and what is not yet
acknowledged leaves room: twice the round trip at the slower of its two ends, or two frames. That is what send and
receive buffers do, and the reason why a receiver that stalls is felt by its sender.

Of the packets of a frame each is lost with `loss_share`. What is lost is sent again, a round trip later, and all that
follows on the connection waits for it. Loss does not slow a connection down otherwise.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from swarm.plan.simulate.world import World
from swarm.types import NodeId

PACKET_BYTES = 1448
"""Payload of a TCP segment on Ethernet with timestamps."""

PACKET_OVERHEAD = 1514 / 1448
"""Bytes of Ethernet for each byte of payload, as traffic shapers count them."""

SPARE_FRAMES = 2
"""What a connection may have on the way at least: buffers of any socket hold that."""

SPARE_TRIPS = 2.0
"""Bandwidth-delay products on the way at most: as far as a kernel grows its buffers."""


class Sized(Protocol):
    """What can be sent: it knows how large it is."""

    @property
    def nbytes(self) -> int: ...


F = TypeVar("F", bound=Sized)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShape:
    """`overhead` is bytes on the line for each byte of payload."""

    latency_s: float = 0.0
    loss_share: float = 0.0
    overhead: float = 1.0


@dataclass(slots=True)
class Port:
    """A node's two directions, in bytes/s, and what they are at."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    alive: bool = True
    busy: bool = False
    down_free_at: float = 0.0
    sent_bytes: int = 0
    turn: deque[Lane[Any]] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class Lane(Generic[F]):
    """One direction of a connection. `staged` is pulled and waits for the uplink; `unacked` are (when, bytes)."""

    source: NodeId
    target: NodeId
    sender: Port
    receiver: Port
    label: str
    staged: F | None = None
    open: bool = True
    unacked: deque[tuple[float, int]] = field(default_factory=deque)
    unacked_bytes: int = 0
    largest_bytes: int = 0
    widest_bytes: float = 0.0
    last_arrival: float = 0.0
    blocked: bool = False
    waking: bool = False


class Handler(Protocol[F]):
    """What the nodes do with the network."""

    def pull(self, source: NodeId, target: NodeId) -> F | None:
        """The next frame for a connection that can take one."""

    def taken(self, source: NodeId, target: NodeId, frame: F) -> None:
        """The uplink has sent all of it."""

    def deliver(self, source: NodeId, target: NodeId, frame: F) -> None:
        """It has arrived."""


class BulkNetwork(Generic[F]):
    """All ports and lanes. `kick` says that a lane may have something to send."""

    def __init__(self, world: World, shape: NetworkShape, handler: Handler[F]) -> None:
        self._world = world
        self._shape = shape
        self._handler = handler
        self._ports: dict[NodeId, Port] = {}
        self._lanes: dict[tuple[NodeId, NodeId], Lane[F]] = {}
        self.over_window = 0

    def add(self, node: NodeId, *, up_bytes_per_s: float, down_bytes_per_s: float) -> None:
        self._ports[node] = Port(up_bytes_per_s, down_bytes_per_s)

    def set_rates(
        self, node: NodeId, *, up_bytes_per_s: float | None = None, down_bytes_per_s: float | None = None
    ) -> None:
        """Change a port from its next frame on. What is on its way to it was reckoned at the old rate, and stays so."""
        port = self._ports[node]
        port.up_bytes_per_s = up_bytes_per_s or port.up_bytes_per_s
        port.down_bytes_per_s = down_bytes_per_s or port.down_bytes_per_s

    def sent_bytes(self, node: NodeId) -> int:
        """What its uplink has sent, repetitions and notes included."""
        return self._ports[node].sent_bytes

    def kill(self, node: NodeId) -> None:
        """It sends and takes nothing from now on. What has left its uplink still arrives."""
        self._ports[node].alive = False

    def connect(self, a: NodeId, b: NodeId) -> None:
        for source, target in ((a, b), (b, a)):
            sender, receiver = self._ports[source], self._ports[target]
            lane: Lane[F] = Lane(source, target, sender, receiver, f"{source} > {target}")
            self._lanes[source, target] = lane

    def block(self, source: NodeId, target: NodeId) -> None:
        """One direction of a connection carries nothing from now on, and nobody is told."""
        self._lanes[source, target].blocked = True

    def disconnect(self, a: NodeId, b: NodeId) -> None:
        for pair in ((a, b), (b, a)):
            lane = self._lanes.pop(pair, None)
            if lane is not None:
                lane.open = False

    def connected(self, a: NodeId, b: NodeId) -> bool:
        return (a, b) in self._lanes

    def kick(self, source: NodeId, target: NodeId) -> None:
        lane = self._lanes.get((source, target))
        if lane is not None:
            self._fill(lane)

    def _window(self, lane: Lane[F]) -> float:
        rate = min(lane.sender.up_bytes_per_s, lane.receiver.down_bytes_per_s)
        return max(SPARE_FRAMES * lane.largest_bytes, SPARE_TRIPS * 2 * self._shape.latency_s * rate)

    def _fill(self, lane: Lane[F]) -> None:
        """Stage a frame if the lane may take one."""
        if lane.staged is not None or lane.waking or lane.blocked or not lane.sender.alive or not self._has_room(lane):
            return
        frame = self._handler.pull(lane.source, lane.target)
        if frame is None:
            return
        lane.staged = frame
        lane.sender.turn.append(lane)
        if not lane.sender.busy:
            self._send_next(lane.sender)

    def _has_room(self, lane: Lane[F]) -> bool:
        """Whether it may send now; else it will be looked at again when it may."""
        now = self._world.now
        unacked = lane.unacked
        while unacked and unacked[0][0] <= now:
            lane.unacked_bytes -= unacked.popleft()[1]
        if unacked and lane.unacked_bytes + lane.largest_bytes > self._window(lane):
            self._wake(lane, unacked[0][0])
            return False
        return True

    def _wake(self, lane: Lane[F], at: float) -> None:
        if at == float("inf"):
            return
        lane.waking = True

        def look() -> None:
            lane.waking = False
            if lane.open:
                self._fill(lane)

        self._world.schedule(max(0.0, at - self._world.now), "room", look)

    def _send_next(self, port: Port) -> None:
        while port.turn:
            lane = port.turn.popleft()
            if lane.open:
                self._send(port, lane)
                return

    def _send(self, port: Port, lane: Lane[F]) -> None:
        frame = lane.staged
        assert frame is not None
        port.busy = True
        packets = -(-frame.nbytes // PACKET_BYTES)
        lost = self._lost_of(packets)
        nbytes = int((frame.nbytes + lost * PACKET_BYTES) * self._shape.overhead)
        took_s = nbytes / port.up_bytes_per_s

        def left() -> None:
            port.busy = False
            if not port.alive:
                return
            port.sent_bytes += nbytes
            if lane.open:
                self._launch(lane, nbytes, took_s, repeated=lost > 0)
            if not port.busy:
                self._send_next(port)

        self._world.schedule(took_s, lane.label, left)

    def _lost_of(self, packets: int) -> int:
        """Packets of a frame that have to be sent again."""
        share = self._shape.loss_share
        if not share:
            return 0
        # Poisson by Knuth's product of uniform draws: losses are rare, and frames are many.
        lost, left = 0, self._world.random.random()
        limit = math.exp(-packets * share)
        while left > limit:
            lost += 1
            left *= self._world.random.random()
        return lost

    def _launch(self, lane: Lane[F], nbytes: int, took_s: float, *, repeated: bool) -> None:
        """The frame has left the uplink: reckon when it will be there, and stage the next."""
        world, latency_s = self._world, self._shape.latency_s
        frame, lane.staged = lane.staged, None
        assert frame is not None
        receiver = lane.receiver
        arrives = world.now + latency_s
        began = max(receiver.down_free_at, arrives - took_s)
        receiver.down_free_at = began + nbytes / receiver.down_bytes_per_s
        there = max(arrives, receiver.down_free_at) + (2 * latency_s if repeated else 0.0)
        there = lane.last_arrival = max(there, lane.last_arrival)
        lane.unacked.append((there + latency_s if receiver.alive else float("inf"), nbytes))
        lane.unacked_bytes += nbytes
        lane.largest_bytes = max(lane.largest_bytes, nbytes)
        lane.widest_bytes = max(lane.widest_bytes, self._window(lane))
        self.over_window += lane.unacked_bytes > lane.widest_bytes + lane.largest_bytes

        def arrive() -> None:
            if lane.open and receiver.alive:
                self._handler.deliver(lane.source, lane.target, frame)

        world.schedule(there - world.now, lane.label, arrive)
        self._handler.taken(lane.source, lane.target, frame)
        if lane.open:
            self._fill(lane)
