"""Membership on a virtual clock: named faults, random ones, liars, and what each must not do.

Every run is checked after whatever a node did (simulator/gossip/checkers.py); the message of a breach ends with the
command that replays it.
"""

from __future__ import annotations

import pytest

from swarm.gossip.records import Exchange, GossipRules, Rejected, SignedRecord, open_record
from tests import swarmers
from tests.simulator.breach import InvariantBreach
from tests.simulator.gossip.checkers import GossipChecker
from tests.simulator.gossip.faults import DeathLiar, HostileBootstrap, LifeLiar
from tests.simulator.gossip.seeds import HEAD_ROUNDS, run_seed
from tests.simulator.gossip.swarm import GossipNode, GossipScenario, GossipSwarm

RULES = GossipRules()
ROUND_S = RULES.round_s
DEAD_S, LIFE_S = RULES.dead_rounds * ROUND_S, RULES.life_rounds * ROUND_S
SETTLE_S = LIFE_S
"""I6: one life of a record after a fault of one kind has healed."""

MENDED = 923  # Found a defect once: leaves alone knew the newest head
SEEDS = [range(seed, seed + 1) for seed in (*range(15), MENDED)]
LONG = [pytest.param(range(first, first + 100), marks=pytest.mark.long) for first in range(15, 1000, 100)]


def swarm_of(
    nodes: int, *, seed: int = 1, honest_ages: bool = True, calm_s: float = 40.0, **shape: object
) -> tuple[GossipSwarm, GossipChecker]:
    """A swarm that has come together, half of it publics."""
    scenario = GossipScenario(nodes=nodes, **{"leaf_share": 0.5, "join_s": 5.0, "loss_share": 0.05, **shape})  # type: ignore[arg-type]
    swarm = GossipSwarm(scenario, seed)
    checker = GossipChecker(swarm, "the command", honest_ages=honest_ages)
    swarm.populate()
    swarm.run_for(scenario.join_s + calm_s)
    checker.run_until_settled(SETTLE_S)
    return swarm, checker


def orders_of(node: GossipNode) -> dict[bytes, int]:
    return {peer.signed.prefix: peer.signed.order for peer in node.core.view.table}


def view_of(node: GossipNode) -> object:
    """All that a replay must not change."""
    table = node.core.view.table
    dead = {prefix: stone.signed.order for prefix, stone in table.dead.items()}
    banned = [other for other in node.swarm.by_node if other in table.banned]
    return orders_of(node), dead, banned, node.newest, node.core.view.own.order


def knows(node: GossipNode, other: GossipNode) -> bool:
    return node.core.view.table.find(other.node) is not None


# -- random --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [*SEEDS, *LONG], ids=str)
def test_random_swarms_become_whole_again(seeds: range) -> None:
    for seed in seeds:
        run_seed(seed)


def test_the_checker_sees_who_does_not_settle_and_names_the_command_that_replays_it() -> None:
    swarm, checker = swarm_of(6)
    swarm.publish(1)
    with pytest.raises(InvariantBreach, match=r"(?s)I6: .*replay: the command"):
        checker.run_until_settled(0.0)


def test_the_checker_sees_a_beat_that_was_never_heard() -> None:
    swarm, _ = swarm_of(6)
    swarm.nodes[2].crash()
    swarm.run_for(10.0)
    peer = swarm.nodes[1].core.view.table.find(swarm.nodes[2].node)
    assert peer is not None
    peer.heard_at = swarm.world.now
    with pytest.raises(InvariantBreach, match="ages"):
        swarm.run_for(5.0)


def test_the_checker_sees_a_record_that_goes_back() -> None:
    swarm, _ = swarm_of(6)
    peer = swarm.nodes[1].core.view.table.find(swarm.nodes[2].node)
    assert peer is not None
    peer.signed = open_record(swarmers.signed(2).sealed, swarmers.THE_SWARM)
    object.__setattr__(peer.signed, "prefix", swarm.nodes[2].core.view.own.prefix)
    object.__setattr__(peer.signed, "order", 0)
    with pytest.raises(InvariantBreach, match="I4"):
        swarm.run_for(5.0)


# -- faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_share", [0.1, 0.3])
def test_loss_kills_nobody_and_stops_no_head(loss_share: float) -> None:
    """And clocks that are hours apart make no difference."""
    swarm, checker = swarm_of(24, loss_share=loss_share, skew_s=40_000.0)
    swarm.run_for(60.0)
    swarm.publish(3)
    checker.run_until_settled(HEAD_ROUNDS * ROUND_S)
    swarm.run_for(60.0)
    assert checker.false_deaths() == []


def test_stalls_of_five_seconds_kill_nobody() -> None:
    swarm, checker = swarm_of(24, loss_share=0.1, stall_s=5.0, stall_every_s=60.0)
    swarm.run_for(300.0)
    assert checker.false_deaths() == []


@pytest.mark.parametrize("alone", ["the learner with a few", "a few without the learner", "half"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_partition_of_a_minute_heals(alone: str, seed: int) -> None:
    swarm, checker = swarm_of(20, seed=seed, leaf_share=0.3)
    island = {"the learner with a few": range(4), "a few without the learner": range(1, 5), "half": range(10)}[alone]
    heal = swarm.network.cut(str(number) for number in island)
    swarm.publish(1)
    swarm.run_for(60.0)
    assert checker.deaths, "each side has buried the other"
    swarm.publish(2)
    heal()
    checker.run_until_settled(SETTLE_S)


def test_a_running_swarm_does_without_its_bootstrap() -> None:
    swarm, checker = swarm_of(20, bootstraps=1)
    swarm.nodes[0].crash()
    swarm.run_for(DEAD_S + 5 * ROUND_S)
    checker.run_until_settled(SETTLE_S)
    assert checker.false_deaths() == []


def test_a_third_that_crashes_at_once_is_buried_and_nobody_else() -> None:
    swarm, checker = swarm_of(24, leaf_share=0.25)
    crashed = [node for node in swarm.publics() if node.number % 3 == 1]
    assert len(crashed) >= 5
    for node in crashed:
        node.crash()
    swarm.run_for(DEAD_S + 6 * ROUND_S)
    assert not any(knows(node, dead) for node in swarm.publics() for dead in crashed)
    checker.run_until_settled(SETTLE_S)
    assert checker.false_deaths() == []
    swarm.publish(5)
    checker.run_until_settled(HEAD_ROUNDS * ROUND_S)


def test_a_learner_that_comes_back_elsewhere_is_told_to_every_leaf_within_seconds() -> None:
    swarm, checker = swarm_of(24, loss_share=0.0)
    swarm.publish(1)
    swarm.nodes[0].crash()
    swarm.run_for(DEAD_S + 5 * ROUND_S)
    again = swarm.restart(swarm.nodes[0])
    assert again.address != swarm.nodes[0].address
    leaves = [node for node in swarm.live() if not node.is_public]
    assert len(leaves) >= 10

    def all_know() -> bool:
        records = [leaf.core.view.learner() for leaf in leaves]
        return all(record is not None and record.record.addresses == (again.address,) for record in records)

    swarm.run_for(3 * ROUND_S)
    assert all_know()
    checker.run_until_settled(SETTLE_S)


# -- replays -------------------------------------------------------------------------------------------------


def captured(swarm: GossipSwarm, gone: GossipNode, wait_s: float) -> list[tuple[str, Exchange]]:
    """All messages of the time in which two versions came, `gone` crashed, and `wait_s` passed."""
    swarm.heard = []
    swarm.publish(1)
    swarm.run_for(30.0)
    gone.crash()
    swarm.publish(2)
    swarm.run_for(wait_s)
    heard = [(str(one.caller), one.message) for one in swarm.heard]
    swarm.heard = None
    return heard


def replay(swarm: GossipSwarm, target: GossipNode, heard: list[tuple[str, Exchange]]) -> None:
    """All of the recorded messages again, by somebody who has a key and no right to them."""
    stranger = swarmers.key(999).node_id
    for _, message in heard:
        target.core.receive(stranger, message, host=swarmers.ELSEWHERE, now=target.now)
        target.core.answer(stranger, message, now=target.now)


@pytest.mark.slow
def test_a_capture_that_is_replayed_changes_nothing() -> None:
    swarm, checker = swarm_of(8, leaf_share=0.25, honest_ages=False)
    heard = captured(swarm, swarm.nodes[2], 70.0)
    assert len(heard) > 200
    for wait_s in (1.0, 69.0, 3600.0 - 200.0):
        swarm.run_for(wait_s)
        for node in swarm.publics():
            before = view_of(node)
            replay(swarm, node, heard)
            assert view_of(node) == before
    assert checker.false_deaths() == []


def test_a_capture_that_is_replayed_to_a_restarted_node_is_over_after_one_life() -> None:
    swarm, checker = swarm_of(8, leaf_share=0.25, honest_ages=False)
    gone = swarm.nodes[2]
    heard = captured(swarm, gone, LIFE_S + DEAD_S)
    again = swarm.restart(swarm.nodes[3])
    swarm.run_for(20.0)
    before = orders_of(again)
    replay(swarm, again, heard)
    after = orders_of(again)
    assert {prefix: after[prefix] for prefix in before} == before
    assert after.keys() - before.keys() <= {gone.core.view.own.prefix}
    swarm.run_for(LIFE_S + 5 * ROUND_S)
    checker.run_until_settled(SETTLE_S)
    assert again.newest is not None
    assert again.newest.version == 2
    assert checker.false_deaths() == []


# -- liars ---------------------------------------------------------------------------------------------------


def records_so_far(swarm: GossipSwarm) -> list[SignedRecord]:
    return [node.core.view.own for node in swarm.publics()]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_third_of_liars_can_bury_nobody(seed: int) -> None:
    swarm, checker = swarm_of(24, seed=seed, leaf_share=0.25, loss_share=0.1)
    old = records_so_far(swarm)
    swarm.run_for(2 * RULES.reissue_rounds * ROUND_S)
    honest = [node for node in swarm.publics() if node.number % 3 != 1]
    before = {node.number: node.core.view.own.order for node in honest}
    for node in swarm.publics():
        if node not in honest:
            node.liar = DeathLiar(old)
    assert len(honest) < len(swarm.publics())
    elapsed_s = 200.0
    swarm.run_for(elapsed_s)
    assert checker.false_deaths() == []
    reissues = elapsed_s / ((1 - RULES.jitter) * RULES.reissue_rounds * ROUND_S)
    counted = elapsed_s / (RULES.reissue_rounds * ROUND_S / 6)
    for node in honest:
        assert node.core.view.own.order - before[node.number] <= reissues + counted + 1
        assert node.core.view.own.record.generation == 1


def test_a_dead_node_of_which_liars_say_that_it_lives_is_dead_within_one_life() -> None:
    swarm, checker = swarm_of(20, leaf_share=0.2, honest_ages=False)
    dead = swarm.nodes[2]
    ghost = dead.core.view.own
    for node in swarm.publics():
        if node.number % 3 == 1:
            node.liar = LifeLiar(lambda: [ghost])
    honest = [node for node in swarm.publics() if node.number % 3 != 1 and node is not dead]
    dead.crash()
    swarm.run_for(DEAD_S + 5 * ROUND_S)
    assert any(knows(node, dead) for node in honest), "they are believed for a while"
    swarm.run_for(LIFE_S - DEAD_S)
    assert not any(knows(node, dead) for node in honest)
    swarm.run_for(2 * LIFE_S)
    assert not any(knows(node, dead) for node in honest)
    assert checker.false_deaths() == []


def test_a_hostile_bootstrap_keeps_nobody_out_and_teaches_nothing() -> None:
    swarm, _ = swarm_of(10, leaf_share=0.2, bootstraps=2, honest_ages=False)
    gone = swarm.nodes[4]
    gone.crash()
    swarm.run_for(LIFE_S)
    hostile = swarm.nodes[1]
    forged = gone.core.view.own.sealed[:-1] + bytes([gone.core.view.own.sealed[-1] ^ 1])
    foreign = swarmers.signed(7).sealed
    useless = [forged, foreign, gone.core.view.own.sealed, b"junk"]
    hostile.liar = HostileBootstrap(useless, useless)
    rejected: list[str] = []
    swarm.on_change = lambda node, effect: rejected.append(effect.reason) if isinstance(effect, Rejected) else None
    newcomers = [swarm.add_new(public=number % 2 == 0) for number in range(8)]
    for node in newcomers:
        node.start()
    swarm.publish(4)
    swarm.run_for(LIFE_S + 120.0)
    honest = {node.node for node in swarm.publics()}
    for node in newcomers:
        assert node.newest is not None
        assert node.newest.version == 4
        if node.is_public:
            assert {peer.signed.node for peer in node.core.view.table} <= honest
        else:
            served = {home.node for home in node.core.homes.homes if home.served and not home.failures}
            assert served & honest
    assert set(rejected) & {"bad_record", "zombie"}
