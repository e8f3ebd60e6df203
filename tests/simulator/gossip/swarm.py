"""Membership on a virtual clock: thousands of real cores, a lossy network, stalls, crashes, partitions.

Theory of operation. Every node is the real core with a real key; signatures are checked once and the result is shared,
because 500 publics checking one record give 500 equal answers. A node that can be reached becomes public a moment after
it was first answered, as dial-back would have it. A stalled node (a blocked event loop) hears and does nothing until
its stall is over, then all at once. Bodies have their real sizes; what HTTP, signatures, TLS and TCP add is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from random import Random

from swarm.broadcast.version.manifest import open_head
from swarm.errors import ProtocolError
from swarm.gossip.membership import Membership
from swarm.gossip.records import (
    Appeared,
    Died,
    Doubled,
    Effect,
    Exchange,
    ExchangeReply,
    GossipRules,
    Greet,
    LeafGone,
    Owner,
    Post,
    Rejected,
    Wake,
    open_record,
    read_record,
)
from swarm.gossip.table import Table
from swarm.net.signing import SigningKey, swarm_id_of
from swarm.plan.simulate.world import World
from swarm.types import Address, NodeId, Role, SwarmId, VersionId
from swarm.wire import encode
from tests.simulator.network import LinkShape, Network, Reply
from tests.swarmers import head

REQUEST_BYTES, ANSWER_BYTES = 345, 165
"""What a call takes besides its bodies: 241 and 61 bytes of HTTP headers, signature and TLS records, measured on a kept
connection, and 52 bytes of TCP and IP headers for each packet and each acknowledgement."""

CACHED_PEERS = 8
"""Publics that a node remembers for its next start."""

ROUNDING_S = 1e-9

HELLO_BYTES, GREETING_BYTES = 450, 1000
"""A hello and its answer, which holds two records."""

CONNECT_BYTES = 1_900
"""A TCP connection, its end, and the handshake of TLS 1.3, both ways: 1,268 bytes of TLS, measured, in 12 packets."""

CONNECT_TRIPS = 2
"""Round trips before the first request of a new connection."""

KEPT_S = 15.0
"""How long a client keeps an idle connection."""

MAX_NODES = 60_000
"""Every node has an address in a /24 of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipScenario:
    """One run. `join_s` is the time over which the nodes arrive; monotonic clocks differ by up to `skew_s`."""

    nodes: int = 100
    leaf_share: float = 0.9
    latency_s: float = 0.04
    jitter_s: float = 0.06
    loss_share: float = 0.1
    stall_s: float = 0.0
    stall_every_s: float = 300.0
    bootstraps: int = 1
    join_s: float = 10.0
    skew_s: float = 0.0
    rules: GossipRules = field(default_factory=GossipRules)


Sized = tuple[ExchangeReply, int]
"""An answer, and the bytes that it takes."""


class Traffic:
    """Bytes sent and received by one node."""

    bytes = 0


class Liar:
    """A node that says other things than its core. As it stands it is honest."""

    def call(self, message: Exchange) -> Exchange:
        return message

    def answer(self, answer: ExchangeReply) -> ExchangeReply:
        return answer

    def introduction(self, own: bytes) -> bytes:
        return own


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A call as it arrived, for those who record and replay."""

    target: GossipNode
    caller: NodeId
    message: Exchange


class GossipNode:
    """One simulated node: the real core and what its shell would do."""

    def __init__(self, swarm: GossipSwarm, number: int, key: SigningKey, *, public: bool, generation: int = 1) -> None:
        self.swarm = swarm
        self._world = swarm.world
        self.number = number
        self.key = key
        self.node = key.node_id
        self.can_be_public = public
        self.alive = True
        self.stalled_until = 0.0
        self.traffic = Traffic()
        self.newest: VersionId | None = None
        self.liar = Liar()
        self.cached: list[GossipNode] = []
        self.skew_s = self._world.random.uniform(-1, 1) * swarm.scenario.skew_s
        self.acted_at = self._world.now
        self.calls = 0
        self._held: list[tuple[NodeId, Exchange, Reply[Sized]]] = []
        self._open_until: dict[int, float] = {}
        self._armed_at: float | None = None
        is_learner = key.node_id == swarm.learner_key.node_id
        role: Role = "learner" if is_learner else "relay" if public else "sampler"
        owner = Owner(
            key,
            swarm.swarm_id,
            role,
            generation=generation,
            addresses=(self.address,) if is_learner else (),
        )
        self.core = Membership(
            owner,
            swarm.scenario.rules,
            Table(swarm.scenario.rules, lambda address: True),
            read_record=swarm.read_record,
            open_record=swarm.open_record,
            open_head=swarm.open_head,
            random=Random(self._world.random.getrandbits(64)),
            now=self.now,
        )

    @property
    def now(self) -> float:
        """The node's own monotonic clock."""
        return self._world.now + self.skew_s

    @property
    def address(self) -> Address:
        return Address(host=f"20.{self.number >> 8}.{self.number & 255}.1", port=7700, fingerprint=bytes(32))

    @property
    def is_public(self) -> bool:
        return self.core.view.is_public

    def start(self) -> None:
        self._do(lambda: self.core.tick(now=self.now))

    def crash(self) -> None:
        """Gone without a word."""
        self.alive = False
        self._held.clear()

    def do(self, action: Callable[[], list[Effect]]) -> None:
        """Run `action` of the core as soon as the node is not stalled."""
        if not self.alive:
            return
        if (wait_s := self.stalled_until - self._world.now) > 0:
            self._world.schedule(wait_s, f"after stall {self.number}", lambda: self.do(action))
            return
        self._do(action)

    def hear(self, caller: NodeId, message: Exchange, reply: Reply[Sized]) -> None:
        """A call that arrived."""
        if self.swarm.heard is not None:
            self.swarm.heard.append(Heard(target=self, caller=caller, message=message))

        host = self.swarm.by_node[caller].address.host

        def receive() -> list[Effect]:
            if not self.core.affords(host, message, now=self.now):
                return []
            effects = self.core.receive(caller, message, host=host, now=self.now)
            self._perform(effects)
            if self.core.holds(message):
                held = (caller, message, reply)
                self._held.append(held)
                self._world.schedule(message.hold_s, f"held {self.number}", lambda: self._release(held))
            else:
                self._answer(caller, message, reply)
            return []

        self.do(receive)

    def introduce(self, reply: Reply[bytes]) -> list[Effect]:
        """A hello that arrived."""
        self.traffic.bytes += HELLO_BYTES + GREETING_BYTES
        reply(self.liar.introduction(self.core.view.own.sealed), GREETING_BYTES)
        return []

    # -- parts -----------------------------------------------------------------------------------------------

    def _do(self, action: Callable[[], list[Effect]]) -> None:
        self.acted_at = self._world.now
        self._perform(action())
        self._arm()
        self.swarm.after(self)

    def _arm(self) -> None:
        due = self.core.deadline()
        if self._armed_at is not None and self._armed_at <= due:
            return
        self._armed_at = due

        def fire() -> None:
            if self._armed_at == due:
                self._armed_at = None
                self.do(lambda: self.core.tick(now=self.now))

        # Clocks of different origin round differently: a tick that comes a moment early would come again for ever.
        self._world.schedule(max(0.0, due - self.now + ROUNDING_S), f"tick {self.number}", fire)

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Post():
                    self._call(effect)
                case Greet():
                    self._greet()
                case Wake():
                    self._see_head()
                    self._release_all()
                case Appeared() | Died() | LeafGone() | Rejected():
                    self.swarm.on_change(self, effect)
                case Doubled():
                    raise AssertionError("here no key is used twice")
                case _:
                    pass

    def _see_head(self) -> None:
        newest = self.core.view.newest
        if newest is not None and newest != self.newest:
            assert self.newest is None or newest > self.newest, "I4: a head went back"
            self.newest = newest
            self.swarm.on_head(self, newest)

    def _release_all(self) -> None:
        for held in list(self._held):
            self._release(held)

    def _release(self, held: tuple[NodeId, Exchange, Reply[Sized]]) -> None:
        if self.alive and held in self._held:
            self._held.remove(held)
            self.do(lambda: self._answer(*held))

    def _answer(self, caller: NodeId, message: Exchange, reply: Reply[Sized]) -> list[Effect]:
        answer = self.liar.answer(self.core.answer(caller, message, now=self.now))
        nbytes = len(encode(answer)) + ANSWER_BYTES
        self.traffic.bytes += nbytes
        reply((answer, nbytes), nbytes)
        return []

    def _call(self, call: Post) -> None:
        self.calls += 1
        message = self.liar.call(call.message)
        nbytes = len(encode(message)) + REQUEST_BYTES
        target = self.swarm.at(call.address)
        wait_s = 0.0
        if target is not None and self._open_until.get(target.number, -1.0) < self._world.now:
            nbytes += CONNECT_BYTES
            wait_s = 2 * CONNECT_TRIPS * (self.swarm.scenario.latency_s + self.swarm.scenario.jitter_s / 2)
        self.traffic.bytes += nbytes

        def arrive(reply: Reply[Sized]) -> None:
            if target is not None and target.alive:
                target.traffic.bytes += nbytes
                target.hear(self.node, message, reply)

        def answered(sized: Sized) -> None:
            self.calls -= 1
            answer, answer_bytes = sized
            self.traffic.bytes += answer_bytes
            assert target is not None
            self._open_until[target.number] = self._world.now + KEPT_S
            self.do(lambda: self.core.answered(call, answer, now=self.now))

        def failed() -> None:
            self.calls -= 1
            self._open_until.pop(target.number if target is not None else -1, None)
            self.do(lambda: self.core.failed(call, now=self.now))

        other = str(target.number) if target else "nobody"

        def send() -> None:
            if not self.alive:
                return
            self.acted_at = self._world.now
            left_s = call.timeout_s - wait_s
            self.swarm.network.request(str(self.number), other, nbytes, arrive, answered, failed, timeout_s=left_s)

        if wait_s:
            self._world.schedule(wait_s, f"connect {self.number}", send)
        else:
            send()

    def _greet(self) -> None:
        target = self.swarm.bootstrap(self)
        self.traffic.bytes += HELLO_BYTES

        def arrive(reply: Reply[bytes]) -> None:
            target.do(lambda: target.introduce(reply))

        def answered(sealed: bytes) -> None:
            self.traffic.bytes += GREETING_BYTES
            try:
                signed = self.swarm.open_record(sealed)
            except ProtocolError:
                failed()
                return
            self.do(lambda: self.core.introduced(signed, target.address, now=self.now))
            if self.can_be_public and not self.is_public:
                self._world.schedule(1.0, f"public {self.number}", self._become_public)

        def failed() -> None:
            if self.alive:
                self.core.greet_failed(now=self.now)
                self._arm()

        self.swarm.network.request(
            str(self.number), str(target.number), HELLO_BYTES, arrive, answered, failed, timeout_s=3.0
        )

    def _become_public(self) -> None:
        self.swarm.on_public(self)
        self.do(lambda: self.core.set_reachability("public", (self.address,), now=self.now))


class GossipSwarm:
    """All nodes of one run. Node 0 is the learner's first life; a later life of a node has a number of its own."""

    def __init__(self, scenario: GossipScenario, seed: int, *, tell: Callable[[str], None] | None = None) -> None:
        assert scenario.nodes <= MAX_NODES
        self.scenario = scenario
        self.world = World(Random(seed), tell=tell)
        shape = LinkShape(
            latency_s=scenario.latency_s,
            jitter_s=scenario.jitter_s,
            loss_share=scenario.loss_share,
            bytes_per_s=1e6,
        )
        self.network = Network(self.world, shape)
        self.learner_key = self._new_key()
        self.swarm_id: SwarmId = swarm_id_of(self.learner_key.public_bytes)
        self.nodes: list[GossipNode] = []
        self.by_node: dict[NodeId, GossipNode] = {}
        self._by_host: dict[str, GossipNode] = {}
        self.heard: list[Heard] | None = None
        self.after: Callable[[GossipNode], None] = lambda node: None
        self.on_public: Callable[[GossipNode], None] = lambda node: None
        self.stall_s = scenario.stall_s
        self.on_head: Callable[[GossipNode, VersionId], None] = lambda node, version: None
        self.on_change: Callable[[GossipNode, Effect], None] = lambda node, effect: None
        self.read_record = cache(lambda sealed: read_record(sealed, self.swarm_id))
        self.open_record = cache(lambda sealed: open_record(sealed, self.swarm_id))
        self.open_head = cache(lambda sealed: open_head(sealed, self.learner_key.public_bytes).version)

    def populate(self) -> None:
        """The learner at once, everybody else within `join_s`."""
        scenario = self.scenario
        publics = max(1, round(scenario.nodes * (1 - scenario.leaf_share)))
        self.add(self.learner_key, public=True).start()
        for number in range(1, scenario.nodes):
            delay_s = self.world.random.uniform(0.0, scenario.join_s)
            # The publics first, as a swarm that was planned would do.
            delay_s *= 0.3 if number < publics else 1.0
            public = number < publics
            self.world.schedule(delay_s, f"join {number}", partial(self._join, public))
        if scenario.stall_s:
            self.start_stalls(scenario.stall_s)

    def _join(self, public: bool) -> None:
        self.add_new(public=public).start()

    def add_new(self, *, public: bool) -> GossipNode:
        return self.add(self._new_key(), public=public)

    def add(self, key: SigningKey, *, public: bool, generation: int = 1) -> GossipNode:
        node = GossipNode(self, len(self.nodes), key, public=public, generation=generation)
        self.nodes.append(node)
        self.by_node[node.node] = node
        self._by_host[node.address.host] = node
        return node

    def restart(self, node: GossipNode) -> GossipNode:
        """Another life of a node: the same key at another address, with the next generation and a cache of peers."""
        node.crash()
        known = [self.by_node[peer.signed.node] for peer in node.core.view.table]
        public = node.can_be_public
        made = self.add(node.key, public=public, generation=node.core.view.own.record.generation + 1)
        made.cached = known[:CACHED_PEERS]
        made.start()
        return made

    def run_for(self, seconds: float) -> None:
        until = self.world.now + seconds
        over = False

        def end() -> None:
            nonlocal over
            over = True

        self.world.schedule(seconds, "end of phase", end)
        self.world.run_until(lambda: over)
        assert self.world.now <= until + 1e-6

    def publish(self, version: int, *, incarnation: int = 0) -> VersionId:
        """The learner signs the head of a version."""
        sealed = head(version, incarnation, learner=self.learner_key)
        learner = self.by_node[self.learner_key.node_id]
        learner.do(lambda: learner.core.take_head(sealed, now=learner.now))
        return VersionId(incarnation=incarnation, version=version)

    def at(self, address: Address) -> GossipNode | None:
        return self._by_host.get(address.host)

    def bootstrap(self, asking: GossipNode) -> GossipNode:
        """A random one of the first nodes, the learner among them, and of those that it knew in a former life."""
        choices = [*self.nodes[: self.scenario.bootstraps], *asking.cached]
        return self.world.random.choice(choices)

    def live(self) -> list[GossipNode]:
        return [node for node in self.nodes if node.alive]

    def publics(self) -> list[GossipNode]:
        return [node for node in self.nodes if node.alive and node.is_public]

    def _new_key(self) -> SigningKey:
        return SigningKey.from_bytes(self.world.random.randbytes(32))

    def start_stalls(self, stall_s: float) -> None:
        """From now on every node stalls for `stall_s`, once in `stall_every_s` on average; `stall_s` 0 ends that."""
        self.stall_s = stall_s
        self._schedule_stall()

    def _schedule_stall(self) -> None:
        rate = self.scenario.nodes / self.scenario.stall_every_s
        self.world.schedule(self.world.random.expovariate(rate), "stall", self._stall)

    def _stall(self) -> None:
        if self.stall_s:
            node = self.nodes[self.world.random.randrange(len(self.nodes))]
            node.stalled_until = self.world.now + self.stall_s
            self._schedule_stall()
