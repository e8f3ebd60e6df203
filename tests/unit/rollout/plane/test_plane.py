"""The rollout plane: what is leased to whom, what happens to an answer, and when a batch is ready."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from swarm.rollout.journal.entries import GroupDropped, RolloutReturned
from swarm.rollout.messages import Answer
from swarm.rollout.plane.effects import Effect, Evaluated, GenerationFailed, Granted, Judged, NodeSilent, Refused
from swarm.rollout.plane.groups import ALL_FAILED_RETRY_S, MAX_LEASED_TO
from swarm.rollout.plane.nodes import MAX_NODES
from swarm.rollout.plane.plane import MAX_FAILURES, RolloutPlane
from swarm.rollout.plane.rules import MIN_PATIENCE_S
from swarm.types import Lease, NodeId, Score, Span
from tests.builders import (
    ALICE,
    BOB,
    answering,
    answers,
    ask,
    failed_rollout,
    lease,
    new_plane,
    prompt,
    refusal,
    rollout,
    submit_and_score,
    v,
    verdict_of,
)

SCORE = Score(reward=1.0, exact=True)


def drops(effects: list[Effect]) -> list[tuple[str, str, int]]:
    """Group, reason and number of rollouts of what was dropped."""
    return [(e.group_id, e.reason, e.rollouts) for e in effects if isinstance(e, GroupDropped)]


def fill_batch(plane: RolloutPlane, version: int) -> None:
    """Two groups of two samples, answered and scored by Alice."""
    submit_and_score(plane, ALICE, ask(plane, ALICE, version, 4), version)


def spend_batch(plane: RolloutPlane, version: int) -> None:
    """One whole step: batch `version` is generated, taken, and its successor published."""
    fill_batch(plane, version)
    plane.take()
    plane.published(v(version + 1))


def test_a_sampler_that_claims_an_unpublished_version_gets_nothing() -> None:
    plane = new_plane(newest=None)
    assert refusal(plane, ALICE, 0) == "starting"
    plane.published(v(0))
    assert refusal(plane, ALICE, 1) == "behind"
    assert plane.counts()["groups_open"] == 0
    with pytest.raises(AssertionError):
        plane.published(v(0))


def test_draining_hands_out_held_out_prompts_only_and_finished_nothing() -> None:
    plane = new_plane()
    ask(plane, ALICE, 0, 1)
    plane.end("draining")
    assert refusal(plane, ALICE, 0) == "draining"
    plane.evaluate(v(0), [prompt(0)])
    (one,) = ask(plane, ALICE, 0, 10)
    assert one.purpose == "eval"
    plane.end("finished")
    assert refusal(plane, ALICE, 0) == "finished"


def test_a_round_says_which_versions_answered_it() -> None:
    plane = new_plane(max_staleness=2)
    plane.evaluate(v(0), [prompt(0), prompt(1)])
    submit_and_score(plane, ALICE, ask(plane, ALICE, 0, 1), 0)
    plane.published(v(1))
    *_, over = submit_and_score(plane, BOB, ask(plane, BOB, 1, 1), 1)
    assert isinstance(over, Evaluated)
    assert (over.version, over.newest) == (0, 1)


def test_places_without_training_work_are_for_held_out_prompts() -> None:
    plane = new_plane(max_staleness=1)
    plane.evaluate(v(0), [prompt(i) for i in range(20)])
    granted = ask(plane, ALICE, 0, 100)
    assert Counter(one.purpose for one in granted) == {"eval": 20, "train": 4}


def test_on_policy_held_out_prompts_are_drawn_alone_and_after_training_work() -> None:
    """What is drawn beside a sample to train on does not depend on when a round began."""
    plane = new_plane(max_staleness=0)
    plane.evaluate(v(0), [prompt(i) for i in range(20)])
    granted = ask(plane, ALICE, 0, 100)
    assert Counter(one.purpose for one in granted) == {"train": 2}
    assert refusal(plane, ALICE, 0, 8) == "paced", "its next batch is for what is published meanwhile"
    assert Counter(one.purpose for one in ask(plane, BOB, 0, 15)) == {"eval": 15}
    submit_and_score(plane, ALICE, granted, 0)
    assert Counter(one.purpose for one in ask(plane, NodeId("carol"), 0, 100)) == {"eval": 5}


def test_a_node_that_has_work_is_given_no_batch_of_a_few_held_out_prompts_alone() -> None:
    """Seen in the simulation: an engine that draws all of a batch at once took as long over two as over sixteen, and a
    run with evaluations 70 % longer than without."""
    plane = new_plane(max_staleness=1)
    ask(plane, ALICE, 0, 100)
    plane.evaluate(v(0), [prompt(i) for i in range(5)])
    assert refusal(plane, ALICE, 0, 8) == "paced"
    assert len(ask(plane, ALICE, 0, 1)) == 1, "it fills the batch"
    assert len(ask(plane, BOB, 0, 100)) == 4


def test_a_node_that_is_about_to_install_new_weights_is_given_no_held_out_prompt() -> None:
    """It would train on-policy with them a whole batch later."""
    plane = new_plane(max_staleness=0, groups=1)
    plane.evaluate(v(0), [prompt(i) for i in range(20)])
    spend_batch(plane, 0)
    assert refusal(plane, ALICE, 0, 8) == "behind"
    plane.end("draining")
    assert len(ask(plane, ALICE, 0, 8)) == 8


def test_several_samples_of_a_held_out_prompt_are_drawn_as_in_training() -> None:
    plane = new_plane(eval_samples=3)
    plane.end("draining")
    plane.evaluate(v(0), [prompt(0)])
    (one,) = granted = ask(plane, ALICE, 0, 10)
    assert one.rules == plane.rules.rules
    assert len({sample.seed for sample in one.samples}) == 3
    effects = submit_and_score(plane, ALICE, granted, 0)
    assert effects[-1] == Evaluated(version=0, newest=0, scores=((SCORE,) * 3,))


def test_a_sampler_with_older_weights_answers_no_held_out_prompt() -> None:
    plane = new_plane()
    spend_batch(plane, 0)
    plane.evaluate(v(1), [prompt(0)])
    assert {one.purpose for one in ask(plane, BOB, 0, 100)} == {"train"}
    assert ask(plane, ALICE, 1, 1)[0].purpose == "eval"


def test_a_silent_nodes_sample_is_leased_again_with_the_same_id_and_seed() -> None:
    plane = new_plane()
    (one,) = ask(plane, ALICE, 0, 2, now=0.0)
    plane.beat(ALICE, now=1.0)
    assert plane.deadline() == 4.0
    assert plane.tick(now=3.9) == []
    assert plane.tick(now=4.0) == [NodeSilent(node=ALICE, samples=2)]
    assert plane.deadline() is None
    (again,) = ask(plane, BOB, 0, 2, now=4.0)
    assert (again.group_id, again.samples) == (one.group_id, one.samples)


@pytest.mark.parametrize(("tokens_per_s", "lost"), [(8.0, 2.0), (2.0, 2 * 10 / 20), (0.0, 0.0)])
def test_a_silent_node_has_lost_what_it_can_have_drawn_of_its_leases(tokens_per_s: float, lost: float) -> None:
    """Of each sample the time since it was leased, at the node's own rate, and at most an answer of mean length."""
    plane = new_plane()
    plane.leased._mean_tokens = 40.0
    ask(plane, BOB, 0, 2)
    plane.leased.hear(BOB, now=7.0, tokens_per_s=tokens_per_s)
    assert plane.tick(now=10.0) == [NodeSilent(node=BOB, samples=2, lost=lost)]


def test_a_late_answer_of_a_node_thought_silent_is_accepted_once() -> None:
    plane = new_plane()
    granted = ask(plane, ALICE, 0, 1)
    plane.tick(now=10.0)
    taken_over = ask(plane, BOB, 0, 1, now=10.0)
    assert taken_over[0].samples == granted[0].samples
    ((given, answer),) = answers(granted, 0)
    assert verdict_of(plane.submit(ALICE, answering(given, answer), now=11.0)) == "accepted"
    assert verdict_of(plane.submit(ALICE, answering(given, answer), now=12.0)) == "duplicate"
    ((given, answer),) = answers(taken_over, 0)
    late = plane.submit(BOB, answering(given, answer), now=13.0)
    assert verdict_of(late) == "duplicate"
    assert [type(effect) for effect in late] == [Judged]


def test_a_sample_is_answered_only_by_nodes_that_it_was_leased_to_and_for_an_attempt_that_there_was() -> None:
    plane = new_plane()
    ((given, answer),) = answers(ask(plane, ALICE, 0, 1), 0)
    judged, *_ = plane.submit(BOB, answering(given, answer), now=0.0)
    assert isinstance(judged, Judged)
    assert (judged.verdict, judged.detail) == ("malformed", "this sample was not leased to this node")
    assert verdict_of(plane.submit(ALICE, Answer(answer, attempt=1), now=0.0)) == "malformed"
    nowhere = structs.replace(answer, index=2)
    assert verdict_of(plane.submit(ALICE, Answer(nowhere), now=0.0)) == "malformed"
    assert verdict_of(plane.submit(ALICE, Answer(answer), now=0.0)) == "accepted"


def test_the_last_nodes_of_a_sample_are_known_and_no_more_than_these() -> None:
    plane = new_plane(groups=1, size=1)
    nodes = [NodeId(f"node-{n}") for n in range(MAX_LEASED_TO + 1)]
    for node in nodes:
        ((given, answer),) = answers(ask(plane, node, 0, 1), 0)
        plane.leave(node)
    assert verdict_of(plane.submit(nodes[0], answering(given, answer), now=0.0)) == "malformed"
    assert verdict_of(plane.submit(nodes[1], answering(given, answer), now=0.0)) == "accepted"


@pytest.mark.parametrize("spoilt", [{"tokens": (99, 2)}, {"version": 7}])
def test_who_gives_an_answer_that_cannot_be_taken_does_not_get_its_sample_again_before_others(spoilt: Any) -> None:
    plane = new_plane(groups=1, size=1)
    plane.beat(BOB, now=0.0)
    (one,) = ask(plane, ALICE, 0, 1)
    assert verdict_of(plane.submit(ALICE, answering(one, rollout(**spoilt)), now=0.0)) in ("malformed", "future")
    assert one.group_id not in {lease.group_id for lease in ask(plane, ALICE, 0, 1)}
    (again,) = ask(plane, BOB, 0, 1)
    assert (again.group_id, again.samples) == (one.group_id, one.samples)


def test_an_answer_of_a_version_that_never_was_is_not_taken() -> None:
    plane = new_plane()
    ((given, answer), *_) = answers(ask(plane, ALICE, 0, 2), 0)
    plane.published(v(2))
    unheard = structs.replace(answer, spans=(Span(version=v(1), start=0, end=answer.length),))
    assert verdict_of(plane.submit(ALICE, answering(given, unheard), now=0.0)) == "future"
    ((given, answer), *_) = answers(ask(plane, BOB, 2, 2), 2)
    assert verdict_of(plane.submit(BOB, answering(given, answer), now=0.0)) == "accepted"


def fail_once(plane: RolloutPlane, *, now: float = 0.0) -> list[Effect]:
    """Alice takes sample 0 of group 0 and fails it."""
    (one,) = ask(plane, ALICE, 0, 1, now=now)
    return plane.submit(ALICE, answering(one, failed_rollout(group_id=one.group_id)), now=now)


def test_a_group_that_fails_eight_times_is_dropped_and_its_room_is_freed() -> None:
    plane = new_plane(max_staleness=0, groups=1, size=1)
    for tries in range(MAX_FAILURES - 1):
        effects = fail_once(plane, now=tries * ALL_FAILED_RETRY_S)
        assert [type(effect) for effect in effects] == [Judged, GenerationFailed], "it is never scored"
    end = MAX_FAILURES * ALL_FAILED_RETRY_S
    assert drops(fail_once(plane, now=end)) == [("t0", "generation_failed", 0)]
    assert ask(plane, ALICE, 0, 1, now=end)[0].group_id == "t1"


def test_an_old_answer_that_comes_again_does_not_take_the_new_lease() -> None:
    plane = new_plane(max_staleness=0, groups=1, size=2)
    (old,) = ask(plane, ALICE, 0, 1)
    plane.submit(ALICE, answering(old, failed_rollout()), now=0.0)
    (new,) = ask(plane, ALICE, 0, 1, now=ALL_FAILED_RETRY_S)
    plane.next_batch = 1
    stale = rollout(group_id="t0", version=0)
    assert verdict_of(plane.submit(ALICE, answering(old, stale), now=0.0)) == "stale"
    assert plane.counts()["samples_leased"] == 1
    assert verdict_of(plane.submit(ALICE, answering(new, stale), now=0.0)) == "stale"
    assert plane.counts()["samples_leased"] == 0


def test_who_has_the_newest_version_waits_for_the_learner() -> None:
    plane = new_plane(max_staleness=0)
    submit_and_score(plane, ALICE, ask(plane, ALICE, 0, 100), 0)
    plane.take()
    assert refusal(plane, ALICE, 0) == "paced"


def test_a_full_table_of_nodes_refuses_one_more_politely() -> None:
    plane = new_plane()
    for number in range(MAX_NODES):
        plane.beat(NodeId(f"n{number}"), now=0.0)
    assert refusal(plane, ALICE, 0) == "draining"
    ((given, answer),) = answers([lease(indices=(0,))], 0)
    assert verdict_of(plane.submit(ALICE, answering(given, answer), now=0.0)) == "duplicate"


# -- classes of engines that were never measured ---------------------------------------------------------------


CAROL = NodeId("carol")


def lease_as(plane: RolloutPlane, node: NodeId, *, measured: bool, most: int = 8, now: float = 0.0) -> int:
    """Return how many samples a node gets that asks once, and answer them."""
    granted = [one for one in plane.ask(node, v(0), most, now=now, measured=measured) if isinstance(one, Granted)]
    leases = granted[0].leases if granted else ()
    submit_and_score(plane, node, leases, 0)
    return sum(len(one.samples) for one in leases)


def works(plane: RolloutPlane, node: NodeId) -> None:
    """A node of a measured class has given an answer."""
    plane.leased.hear(node, now=0.0, measured=True)
    plane.leased._nodes[node].answers += 1


def test_beside_a_measured_class_others_give_half_of_each_group_together() -> None:
    plane = new_plane(max_staleness=0, groups=1, size=8)
    works(plane, CAROL)
    assert [lease_as(plane, node, measured=False, most=3) for node in (ALICE, BOB, ALICE)] == [3, 1, 0]
    assert not plane.can_take(now=0.0)
    assert lease_as(plane, CAROL, measured=True) == 4
    assert plane.can_take(now=0.0)


def test_what_a_measured_node_gives_up_others_may_not_have_beyond_their_half() -> None:
    plane = new_plane(max_staleness=0, groups=1, size=8)
    plane.ask(CAROL, v(0), 8, now=0.0, measured=True)
    plane.leave(CAROL)
    works(plane, CAROL)
    assert lease_as(plane, ALICE, measured=False) == 4


def test_who_only_says_that_it_is_here_binds_nobody() -> None:
    """A barred sampler beats on, and anybody can beat."""
    plane = new_plane(max_staleness=0, groups=1, size=8)
    plane.beat(CAROL, now=0.0)
    plane.leased.hear(BOB, now=0.0, measured=True)
    assert lease_as(plane, ALICE, measured=False) == 8


def test_who_leaves_and_hands_in_what_it_held_has_given_it_as_what_it_was() -> None:
    plane = new_plane(max_staleness=0, groups=1, size=8)
    works(plane, CAROL)
    (granted,) = [one for one in plane.ask(ALICE, v(0), 8, now=0.0, measured=False) if isinstance(one, Granted)]
    plane.leave(ALICE)
    submit_and_score(plane, ALICE, granted.leases, 0)
    assert lease_as(plane, ALICE, measured=False) == 0


def test_what_no_seed_draws_goes_to_others_first() -> None:
    plane = new_plane(max_staleness=0, groups=1, size=1)
    (lease,) = ask(plane, ALICE, 0, 1)
    plane.beat(BOB, now=0.0)
    ((one, answer),) = answers([lease], 0)
    plane.submit(ALICE, answering(one, answer), now=1.0)
    assert plane.refused(one.group_id, 0, now=1.0) == [RolloutReturned(number=0, index=0)]
    assert refusal(plane, ALICE, 0, 1, now=1.0) == "paced"
    (again,) = ask(plane, BOB, 0, 1, now=1.0)
    assert [one.seed for one in again.samples] == [one.seed for one in lease.samples], "from the same seed"


def test_a_batch_that_is_late_lifts_the_bound_until_it_is_taken() -> None:
    """A slow sampler of a measured class must not hold up all others."""
    plane = new_plane(max_staleness=0, groups=1, size=8)
    works(plane, CAROL)
    assert lease_as(plane, ALICE, measured=False) == 4
    assert not plane.can_take(now=0.0)
    plane.tick(now=MIN_PATIENCE_S)
    assert lease_as(plane, ALICE, measured=False, now=MIN_PATIENCE_S) == 0
    chances = plane.leased.chances
    plane.tick(now=MIN_PATIENCE_S + 0.1)
    assert plane.leased.chances > chances, "those that wait are asked again"
    assert lease_as(plane, ALICE, measured=False, now=MIN_PATIENCE_S + 0.1) == 4
    assert plane.can_take(now=MIN_PATIENCE_S + 0.1)
    plane.take()
    assert not plane.leased.is_late


def test_held_out_prompts_know_no_bound() -> None:
    plane = new_plane(eval_samples=4)
    works(plane, CAROL)
    plane.end("draining")
    plane.evaluate(v(0), [prompt(0)])
    assert lease_as(plane, ALICE, measured=False) == 4


# -- another bound -------------------------------------------------------------------------------------------------


def without_an_aim(*, max_staleness: int = 1) -> RolloutPlane:
    """Batches of one group of one sample; version 0 is published."""
    rules = replace(new_plane(max_staleness=max_staleness, groups=1, size=1).rules, adaptive=False)
    plane = RolloutPlane(rules, prompts=prompt)
    plane.published(v(0))
    return plane


def one_left_behind(plane: RolloutPlane) -> Lease:
    """Alice's t0 is due by batch 1, which is ready without it: Bob's t1 was batch 0, and his t2 is of version 1."""
    (slow,) = ask(plane, ALICE, 0, 1)
    submit_and_score(plane, BOB, ask(plane, BOB, 0, 1), 0)
    assert plane.can_take(now=0.0)
    plane.take()
    plane.published(v(1))
    submit_and_score(plane, BOB, ask(plane, BOB, 1, 1), 1)
    return slow


def test_a_lower_bound_drops_what_is_ready_and_too_old_by_it() -> None:
    plane = without_an_aim(max_staleness=2)
    submit_and_score(plane, ALICE, ask(plane, ALICE, 0, 3), 0)
    plane.take()
    plane.published(v(1))
    first, second = plane.set_bound(0)
    assert isinstance(first, GroupDropped)
    assert isinstance(second, GroupDropped)
    assert {first.reason, second.reason} == {"bound_lowered"}
    assert (first.nodes, first.next_batch, first.max_staleness) == ({ALICE: 1}, 1, 0)
    assert refusal(plane, ALICE, 0) == "behind"
    assert len(ask(plane, BOB, 1, 9)) == 1


@pytest.mark.parametrize(("lowered", "said"), [(True, "bound_lowered"), (False, "stale")])
def test_an_answer_that_only_a_lower_bound_makes_stale_is_counted_as_such(lowered: bool, said: str) -> None:
    plane = without_an_aim()
    slow = one_left_behind(plane)
    if lowered:
        plane.set_bound(0)
    else:
        plane.take()
    lease, late = answers([slow], 0)[0]
    judged, *_ = plane.submit(ALICE, answering(lease, late), now=0.0)
    assert isinstance(judged, Judged)
    assert (judged.verdict, judged.counted_as) == ("stale", said)


# -- a sampler that was caught: others draw again what it gave -----------------------------------------------------

WHY = "its draws are not what was asked for"


def ready(plane: RolloutPlane) -> bool:
    return plane.can_take(now=0.0)


def test_it_gets_nothing_and_what_it_holds_goes_to_others() -> None:
    plane = new_plane()
    leased = ask(plane, ALICE, 0, 2)
    plane.bar(ALICE, WHY)
    (said,) = plane.ask(ALICE, v(0), 4, now=0.0)
    assert isinstance(said, Refused)
    assert said.detail == WHY
    assert [one.samples for one in ask(plane, BOB, 0, 2)] == [one.samples for one in leased]
    (lease, late), *_ = answers(leased, 0)
    assert verdict_of(plane.submit(ALICE, answering(lease, late), now=0.0)) == "barred"
    plane.unbar(ALICE)
    assert ask(plane, ALICE, 0, 2)


def test_it_gets_no_held_out_prompt_either() -> None:
    plane = new_plane()
    plane.evaluate(v(0), [prompt()])
    plane.bar(ALICE, WHY)
    plane.set_standby({ALICE: "not needed"})
    assert isinstance(plane.ask(ALICE, v(0), 4, now=0.0)[-1], Refused)


def test_it_keeps_no_held_out_prompt_from_those_on_standby() -> None:
    plane = new_plane()
    plane.evaluate(v(0), [prompt()])
    plane.beat(ALICE, now=0.0)
    plane.beat(BOB, now=0.0)
    plane.set_standby({BOB: "not needed"})
    assert isinstance(plane.ask(BOB, v(0), 4, now=0.0)[-1], Refused), "while another draws they go there"
    plane.bar(ALICE, WHY)
    assert ask(plane, BOB, 0, 4)


def seeds_of(leases: Sequence[Lease]) -> set[tuple[str, int, int]]:
    return {(one.group_id, spec.index, spec.seed) for one in leases for spec in one.samples}


def test_what_it_gave_is_drawn_again_from_the_same_seeds_also_in_groups_that_were_ready() -> None:
    """One group is its own, one half its own, one another's."""
    plane = new_plane(groups=3)
    first = ask(plane, ALICE, 0, 3)
    submit_and_score(plane, ALICE, first, 0)
    rest = ask(plane, BOB, 0, 3)
    submit_and_score(plane, BOB, rest, 0)
    assert ready(plane)
    returned = plane.bar(ALICE, WHY)
    assert [(one.number, one.index) for one in returned if isinstance(one, RolloutReturned)] == [(0, 0), (0, 1), (1, 0)]
    assert not ready(plane)
    again = ask(plane, BOB, 0, 3)
    assert seeds_of(again) == seeds_of(first)
    submit_and_score(plane, BOB, again, 0)
    assert ready(plane)
    batch, _ = plane.take()
    assert {sample.author for group in batch for sample in group.samples} == {BOB}


def test_a_group_that_is_too_old_to_be_drawn_again_is_dropped() -> None:
    plane = new_plane(max_staleness=1, groups=1)
    submit_and_score(plane, ALICE, ask(plane, ALICE, 0, 2), 0)
    plane.take()
    submit_and_score(plane, ALICE, ask(plane, ALICE, 0, 2), 0)
    plane.next_batch += 1
    returned = plane.bar(ALICE, WHY)
    assert any(isinstance(one, GroupDropped) for one in returned)
    assert plane.counts()["groups_open"] == 0
