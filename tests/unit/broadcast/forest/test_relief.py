"""Children of parents that cannot keep up: who complains, whom the learner believes, where they go."""

from __future__ import annotations

from random import Random

from swarm.broadcast.forest.courier import TreeCourier
from swarm.broadcast.forest.planner import ECHO_S, LASTING_S, PeerProfile, Relief, VersionPlan, plan_of, relieved
from swarm.broadcast.forest.pulls import BEHIND_S, TICK_S
from swarm.broadcast.notes import NO_NODE, Behind, NoteKind, Routing
from swarm.types import NodeId

LEARNER, PARENT, A = (NodeId(name) for name in ("learner", "parent", "a"))


def equal_plan(peers: int) -> VersionPlan:
    learner, *others = (
        PeerProfile(node=NodeId(f"n{number}"), public=True, uplink_bytes_per_s=1e6) for number in range(peers + 1)
    )
    return plan_of(learner, others, encoded_bytes=1 << 26, scheme="forest")


def edge_below_a_peer(plan: VersionPlan) -> tuple[NodeId, NodeId, NodeId]:
    """A grandparent that is a peer, its child, and the child's child, in stripe 0."""
    tree = plan.trees[0]
    for node, parent in tree.items():
        if parent in plan.peers and tree[parent] in plan.peers:
            return tree[parent], parent, node
    raise AssertionError("no tree is that deep")


def test_a_child_gets_another_parent_that_is_not_late_and_its_old_one_is_believed_slower() -> None:
    plan = equal_plan(100)
    parent, child, _ = edge_below_a_peer(plan)
    after = relieved(plan, [(child, 0)])
    assert after.trees[0][child] not in (parent, child)
    assert after.peers[parent].uplink_bytes_per_s < plan.peers[parent].uplink_bytes_per_s
    changed = [(s, node) for s in range(16) for node, old in plan.trees[s].items() if after.trees[s][node] != old]
    assert changed == [(0, child)]


def test_only_the_first_in_a_tree_is_believed_and_only_if_it_goes_on() -> None:
    plan = equal_plan(100)
    _, child, below = edge_below_a_peer(plan)
    relief = Relief()
    assert relief.plan(plan, [(below, 0), (child, 0)], now=0.0) is plan
    assert relief.plan(plan, [(below, 0), (child, 0)], now=LASTING_S - 1) is plan
    after = relief.plan(plan, [(below, 0), (child, 0)], now=LASTING_S)
    assert after.trees[0][child] != plan.trees[0][child]
    assert after.trees[0][below] == child
    assert relief.plan(after, [(below, 0)], now=LASTING_S + ECHO_S / 2) is after
    assert relief.plan(after, [(below, 0)], now=LASTING_S + 1.2 * ECHO_S).trees[0][below] != child


def test_who_complained_a_while_ago_begins_anew() -> None:
    plan = equal_plan(100)
    _, child, _ = edge_below_a_peer(plan)
    relief = Relief()
    for moment in (0.0, LASTING_S + ECHO_S, 3 * ECHO_S + LASTING_S):
        assert relief.plan(plan, [(child, 0)], now=moment) is plan


def test_whom_the_learner_feeds_stays_and_strangers_are_not_heard() -> None:
    plan = equal_plan(100)
    fed = next(node for node, parent in plan.trees[3].items() if parent == plan.learner.node)
    assert relieved(plan, [(fed, 3), (NodeId("stranger"), 3)]).trees == plan.trees


def test_who_falls_behind_in_one_stripe_says_so_to_the_learner_who_keeps_it_for_the_planner() -> None:
    routes = Routing(parents=(PARENT, A, A), children=((), (), ()), chunks_per_s=30.0)
    core = TreeCourier(count=3000, learner=LEARNER, routes=routes, random=Random(1))
    for peer in (LEARNER, PARENT, A):
        core.join(peer, leaf=False, now=0.0)
    now = 0.0
    said: list[Behind] = []
    while not said and now < 4 * BEHIND_S:
        now += TICK_S
        for step in range(10):
            at = round(now) * 30 + 3 * step
            for index in (at + 1, at + 2):
                core.arrived(A, index, NoteKind.FRESH, None, now=now)
        core.tick(now=now)
        said = [note for note in iter(lambda at=now: core.next_for(LEARNER, now=at), None) if isinstance(note, Behind)]  # type: ignore[misc]
    assert said == [Behind(stripes=(0,))]
    whole = Routing(parents=(NO_NODE,) * 3, children=((), (), ()), chunks_per_s=0.0)
    learner = TreeCourier(count=3000, learner=LEARNER, routes=whole, held=b"\xff" * 375, random=Random(1))
    learner.join(A, leaf=False, now=0.0)
    learner.heard(A, Behind(stripes=(0, 7)), now=0.0)
    assert learner.complaints() == [(A, 0)]
    assert learner.complaints() == []
