"""The rollout plane, restored from its own records at any moment, beside the simulator's naive books.

Every call goes through WatchedPlane, which keeps its own account and compares; every record is read by the naive ledger
at once. So the machine only has to come up with histories.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swarm.rollout.journal.entries import BoundSet, Record, VersionPublished
from swarm.rollout.plane.effects import Effect, Granted, ScoreWanted
from swarm.types import Lease, NodeId, Rollout, SampleSpec, Score, VersionId
from swarm.wire import Digest
from tests.builders import failed_rollout, rollout, v
from tests.simulator.rollouts.checkers import WatchedPlane
from tests.simulator.rollouts.cluster import new_plane
from tests.simulator.rollouts.ledger import Ledger
from tests.simulator.rollouts.scenario import Scenario

NODES = st.sampled_from([NodeId("alice"), NodeId("bob"), NodeId("carol")])
PICK = st.integers(0, 1_000)
"""Which of the things there are, modulo how many."""


class PlaneMachine(RuleBasedStateMachine):
    """Samplers, a learner and its crashes, without a clock of their own."""

    @initialize(bound=st.integers(0, 3), patient=st.booleans(), dynamic=st.booleans(), frontier=st.booleans())
    def begin(self, bound: int, patient: bool, dynamic: bool, frontier: bool) -> None:
        self.now = 0.0
        self.scenario = Scenario(
            name="default",
            max_staleness=bound,
            groups_per_step=2,
            group_size=2,
            capacity=8,
            samplers=3,
            beat_s=5.0,
            lease_time_limit_s=60.0,
            patient=patient,
            dynamic_sampling=dynamic,
            selection="frontier" if frontier else "uniform",
        )
        self.plane = WatchedPlane(self.scenario, seed=0, clock=lambda: self.now)
        self.ledger = Ledger(self.scenario.group_size, self.plane.breach)
        self.life = 0
        self.bound = bound
        self.installed: dict[NodeId, VersionId] = {}
        self.hands: list[tuple[NodeId, Lease, SampleSpec]] = []
        self.sent: list[tuple[NodeId, Lease, Rollout]] = []
        self.wanted: list[ScoreWanted] = []
        self.restore()
        self.publish()
        for node in (NodeId("alice"), NodeId("bob")):
            self.install(node)

    def restore(self) -> None:
        self.wanted = []
        plane = new_plane(self.scenario, 7, self.life, self.bound)
        self.perform(self.plane.begin(plane, self.ledger, bound=self.bound))

    def perform(self, effects: list[Effect]) -> None:
        self.ledger.read([effect for effect in effects if isinstance(effect, Record)])
        self.wanted += [effect for effect in effects if isinstance(effect, ScoreWanted)]

    def holding(self, node: NodeId) -> frozenset[tuple[str, int]]:
        return frozenset((lease.group_id, spec.index) for holder, lease, spec in self.hands if holder == node)

    # -- samplers --------------------------------------------------------------------------------------------

    @rule(node=NODES)
    def install(self, node: NodeId) -> None:
        newest = self.plane.newest
        assert newest is not None
        self.installed[node] = newest

    @rule(node=NODES, capacity=st.integers(1, 8), arrives=st.sampled_from([True, True, True, False]))
    def ask(self, node: NodeId, capacity: int, arrives: bool) -> None:
        """The answer may be lost on the way."""
        if node in self.installed:
            effects = self.plane.ask(node, self.installed[node], capacity, self.holding(node))
            self.perform(effects)
            if isinstance(effects[-1], Granted) and arrives:
                self.hands += [(node, lease, spec) for lease in effects[-1].leases for spec in lease.samples]

    @precondition(lambda self: self.hands)
    @rule(which=PICK, fails=st.sampled_from([False, False, False, True]))
    def answer(self, which: int, fails: bool) -> None:
        node, lease, spec = self.hands.pop(which % len(self.hands))
        make = failed_rollout(group_id=lease.group_id, index=spec.index)
        if not fails:
            version = self.installed[node].version
            make = rollout(group_id=lease.group_id, index=spec.index, version=version)
        self.sent.append((node, lease, make))
        self.perform(self.plane.submit(node, lease, make))

    @precondition(lambda self: self.hands)
    @rule(which=PICK, tokens=st.integers(1, 2))
    def hand_over(self, which: int, tokens: int) -> None:
        """The first tokens of a sample, which another is to go on with. They differ from part to part."""
        node, lease, spec = self.hands.pop(which % len(self.hands))
        version, drawn = self.installed[node].version, [3 + len(self.sent) % 90] * tokens
        part = rollout(group_id=lease.group_id, index=spec.index, version=version, tokens=drawn, finish="handed")
        self.sent.append((node, lease, part))
        self.perform(self.plane.submit(node, lease, part))

    @rule(node=NODES)
    def finish_everything(self, node: NodeId) -> None:
        """So that whole batches come about."""
        for which in [i for i, hand in enumerate(self.hands) if hand[0] == node][::-1]:
            self.answer(which, fails=False)
        while self.wanted:
            self.score(0, fails=False)

    @precondition(lambda self: self.sent)
    @rule(which=PICK)
    def answer_once_more(self, which: int) -> None:
        self.perform(self.plane.submit(*self.sent[which % len(self.sent)]))

    @precondition(lambda self: self.hands)
    @rule(which=PICK)
    def release(self, which: int) -> None:
        node, lease, spec = self.hands.pop(which % len(self.hands))
        self.plane.release(node, lease.group_id, spec.index)

    @rule(node=NODES, says_so=st.booleans())
    def go(self, node: NodeId, says_so: bool) -> None:
        self.hands = [hand for hand in self.hands if hand[0] != node]
        if says_so:
            self.plane.leave(node)

    @rule(seconds=st.sampled_from([1.0, 7.0, 16.0, 50.0, 130.0]), heard=st.sets(NODES))
    def pass_time(self, seconds: float, heard: set[NodeId]) -> None:
        self.now += seconds
        for node in sorted(heard):
            self.plane.beat(node, 1.0)
        self.perform(self.plane.tick())

    # -- the learner -----------------------------------------------------------------------------------------

    @precondition(lambda self: self.wanted)
    @rule(which=PICK, fails=st.sampled_from([False, False, False, False, True]), right=st.booleans())
    def score(self, which: int, fails: bool, right: bool = True) -> None:
        one = self.wanted.pop(which % len(self.wanted))
        if fails:
            self.perform(self.plane.refused(one.group_id, one.index))
        else:
            reward = float(right)
            self.perform(self.plane.scored(one.group_id, one.index, Score(reward=reward, exact=right)))

    @rule()
    def take(self) -> None:
        if self.plane.can_take():
            _, effects = self.plane.take()
            self.perform(effects)

    @rule(node=NODES)
    def make_a_step(self, node: NodeId) -> None:
        """What usually happens, at one go."""
        self.publish()
        self.install(node)
        self.ask(node, capacity=8, arrives=True)
        self.finish_everything(node)
        self.take()

    @rule()
    def publish(self) -> None:
        version = v(self.plane.next_batch)
        if self.plane.newest is None or version > self.plane.newest:
            self.ledger.read([VersionPublished(version=version, content=Digest(b""))])
            self.plane.published(version)

    @rule(bound=st.integers(0, 4))
    def set_bound(self, bound: int) -> None:
        self.bound = bound
        self.ledger.read([BoundSet(max_staleness=bound, publish_every_steps=1)])
        self.perform(self.plane.set_bound(bound))

    @rule(paused=st.sampled_from([False, False, True]))
    def pause(self, paused: bool) -> None:
        self.plane.pause(paused)

    @rule(down_s=st.sampled_from([0.0, 20.0, 200.0]))
    def crash(self, down_s: float) -> None:
        newest = self.plane.newest
        assert newest is not None
        self.plane.close()
        self.now += down_s
        self.life += 1
        self.restore()
        self.plane.published(newest)

    @invariant()
    def agrees_with_the_books_and_the_record(self) -> None:
        if hasattr(self, "plane"):
            self.plane.check(sorted(self.installed.items()), connected=False)
            self.plane.settle(self.ledger)


PlaneMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=60)
test_the_plane_is_what_its_records_say = PlaneMachine.TestCase
