"""Completions that a sampler cannot end: another goes on at the next token, and each is the author of what it drew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import pytest
from msgspec import structs

from swarm.rollout.journal.entries import Record, RolloutAccepted, RolloutReturned, TurnTaken
from swarm.rollout.messages import Answer
from swarm.rollout.plane.begun import MAX_HANDED_SPANS
from swarm.rollout.plane.effects import Effect, Evaluated, Granted, Judged
from swarm.rollout.plane.episodes import MAX_SPANS, EpisodeRules
from swarm.rollout.plane.plane import RolloutPlane
from swarm.types import Finish, Lease, NodeId, Score, Span, Turn
from tests.builders import ALICE, BOB, RULES, STOP, answering, ask, ints, new_plane, prompt, rollout, v, verdict_of
from tests.simulator.rollouts.ledger import Ledger

CAROL = NodeId("carol")
RIGHT = Score(reward=1.0, exact=True)


def plane_of(*, bound: int = 2) -> RolloutPlane:
    return new_plane(max_staleness=bound, groups=1, size=1)


def part(to: Lease, *tokens: int, version: int = 0, finish: Finish = "handed") -> Answer:
    """What goes on from a lease."""
    return answering(to, rollout(group_id=to.group_id, tokens=tokens, version=version, finish=finish))


def hand_in(plane: RolloutPlane, node: NodeId, answer: Answer) -> list[Effect]:
    return plane.submit(node, answer, now=0.0)


def handed(plane: RolloutPlane, node: NodeId, *tokens: int, version: int = 0) -> Lease:
    """Have `node` lease the one sample and hand over some tokens of it."""
    (lease,) = ask(plane, node, version, 1)
    assert verdict_of(hand_in(plane, node, part(lease, *tokens, version=version))) == "accepted"
    return lease


def why(effects: Sequence[Effect]) -> tuple[str, str]:
    (judged,) = [effect for effect in effects if isinstance(effect, Judged)]
    return judged.verdict, judged.detail


def test_another_goes_on_and_each_is_the_author_of_what_it_drew() -> None:
    plane = plane_of()
    (lease,) = ask(plane, ALICE, 0, 1)
    judged, taken = hand_in(plane, ALICE, part(lease, 3, 4))
    assert isinstance(judged, Judged)
    assert (judged.verdict, judged.counted_as) == ("accepted", "handed")
    assert isinstance(taken, TurnTaken)
    assert (taken.turn, taken.node, taken.drawn.token_ids) == (0, ALICE, ints(3, 4))
    plane.published(v(1))
    rest = handed(plane, BOB, 5, version=1)
    assert (rest.begun, rest.samples) == (ints(3, 4), lease.samples)
    (last,) = ask(plane, CAROL, 1, 1)
    assert last.begun == ints(3, 4, 5)
    _, accepted, wanted = hand_in(plane, CAROL, part(last, 6, STOP, version=1, finish="stop"))
    assert isinstance(accepted, RolloutAccepted)
    whole = accepted.rollout
    assert (accepted.node, whole.token_ids, whole.finish) == (CAROL, ints(3, 4, 5, 6, STOP), "stop")
    assert whole.spans == (
        Span(version=v(0), start=0, end=2, node=ALICE),
        Span(version=v(1), start=2, end=3, node=BOB),
        Span(version=v(1), start=3, end=5),
    )
    assert getattr(wanted, "rollout", None) == whole, "the reward reads all of it"
    assert whole.turns_by(CAROL) == (
        Turn(start=0, end=2, node=ALICE),
        Turn(start=2, end=3, node=BOB),
        Turn(start=3, end=5, node=CAROL),
    )
    (group,) = plane.leased.groups()
    assert group.samples[0].authors == {ALICE, BOB, CAROL}
    assert group.samples[0].oldest == 0


@pytest.mark.parametrize("other", range(8))
def test_what_follows_other_tokens_is_not_taken(other: int) -> None:
    """Whichever of the two names is the greater number."""
    plane = plane_of()
    handed(plane, ALICE, 3, 4)
    (late,) = ask(plane, BOB, 0, 1)
    plane.release(BOB, late.group_id, 0, now=0.0)
    handed(plane, CAROL, 10 + other % 3)
    assert verdict_of(hand_in(plane, BOB, part(late, 6, STOP, finish="stop"))) == "duplicate"
    assert verdict_of(hand_in(plane, BOB, part(replace_begun(late, 3, other), 6, finish="stop"))) == "duplicate"
    (lease,) = ask(plane, BOB, 0, 1)
    assert lease.begun == ints(3, 4, 10 + other % 3)


def replace_begun(lease: Lease, *tokens: int) -> Lease:
    return structs.replace(lease, begun=ints(*tokens))


def test_only_who_holds_a_sample_hands_it_over() -> None:
    plane = plane_of()
    (lease,) = ask(plane, ALICE, 0, 1)
    plane.leave(ALICE)
    (taken,) = ask(plane, BOB, 0, 1)
    assert verdict_of(hand_in(plane, ALICE, part(lease, 3, 4))) == "duplicate"
    assert verdict_of(hand_in(plane, BOB, part(taken, 3, 4, STOP, finish="stop"))) == "accepted"


def test_with_an_author_who_is_caught_all_of_it_is_drawn_again() -> None:
    plane = plane_of()
    handed(plane, ALICE, 3, 4)
    (rest,) = ask(plane, BOB, 0, 1)
    assert [one for one in plane.bar(ALICE, "caught") if isinstance(one, RolloutReturned)] == [
        RolloutReturned(number=0, index=0)
    ]
    assert verdict_of(hand_in(plane, BOB, part(rest, 5, STOP, finish="stop"))) == "duplicate"
    (anew,) = ask(plane, BOB, 0, 1)
    assert (anew.begun, anew.samples[0].seed) == (b"", rest.samples[0].seed)


def test_an_answer_is_withdrawn_with_the_author_of_its_beginning() -> None:
    plane = plane_of()
    handed(plane, ALICE, 3, 4)
    (rest,) = ask(plane, BOB, 0, 1)
    hand_in(plane, BOB, part(rest, 5, STOP, finish="stop"))
    assert plane.bar(ALICE, "caught") == []
    assert plane.scored(rest.group_id, 0, RIGHT) == [RolloutReturned(number=0, index=0)]
    assert ask(plane, BOB, 0, 1)[0].begun == b""


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (rollout(tokens=(3, 4, STOP), finish="handed"), "a sample that has ended is handed over"),
        (rollout(tokens=[3] * RULES.max_new_tokens, finish="handed"), "all of a completion, is handed over"),
        (rollout(tokens=(), finish="handed"), "are no token ids"),
        (
            structs.replace(rollout(), spans=(Span(version=v(0), start=0, end=4, node=BOB),)),
            "an answer is drawn in one go",
        ),
    ],
)
def test_a_part_keeps_the_rules(answer: object, fault: str) -> None:
    plane = plane_of()
    (lease,) = ask(plane, ALICE, 0, 1)
    verdict, detail = why(hand_in(plane, ALICE, structs.replace(part(lease, 3), rollout=answer)))
    assert verdict == "malformed"
    assert fault in detail


def test_what_is_left_is_as_long_as_the_lease_leaves() -> None:
    plane = plane_of()
    handed(plane, ALICE, *[3] * (RULES.max_new_tokens - 2))
    (rest,) = ask(plane, BOB, 0, 1)
    assert verdict_of(hand_in(plane, BOB, part(rest, 3, 3, 3, finish="length"))) == "malformed"
    (rest,) = ask(plane, CAROL, 0, 1)
    assert verdict_of(hand_in(plane, CAROL, part(rest, 3, 3, finish="length"))) == "accepted"


def test_a_sample_changes_hands_a_limited_number_of_times() -> None:
    plane = new_plane(groups=1, size=1, newest=0)
    (lease,) = ask(plane, ALICE, 0, 1)
    (group,) = plane.leased.groups()
    group.rules = structs.replace(RULES, max_new_tokens=2 * MAX_HANDED_SPANS)
    for count, verdict in ((MAX_HANDED_SPANS, "malformed"), (MAX_HANDED_SPANS - 1, "accepted")):
        group.samples[0].begun = rollout(tokens=[3] * count, spans=[Span(version=v(0), start=0, end=count)] * count)
        late = part(replace_begun(lease, *[3] * count), 3)
        assert why(hand_in(plane, ALICE, late))[0] == verdict
        ask(plane, ALICE, 0, 1, now=100.0)


def test_what_is_joined_has_no_more_versions_than_a_rollout_takes() -> None:
    """Else the journal could not be read again. A bound of 1,000 steps lets one part have as many versions."""
    plane = plane_of(bound=1000)
    (lease,) = ask(plane, ALICE, 0, 1)
    (group,) = plane.leased.groups()
    group.rules = structs.replace(RULES, max_new_tokens=2 * MAX_SPANS)
    group.samples[0].begun = rollout(
        tokens=[3] * 64, spans=[Span(version=v(0), start=at, end=at + 1) for at in range(64)]
    )
    for version in range(1, MAX_SPANS):
        plane.published(v(version))
    for count, verdict in ((MAX_SPANS - 63, "malformed"), (MAX_SPANS - 64, "accepted")):
        spans = [Span(version=v(at), start=at, end=at + 1) for at in range(count)]
        drawn = rollout(group_id=lease.group_id, tokens=[*[3] * (count - 1), STOP], spans=spans)
        late = answering(replace_begun(lease, *[3] * 64), drawn)
        assert verdict_of(hand_in(plane, ALICE, late)) == verdict


def test_a_turn_of_an_episode_is_not_handed_over() -> None:
    plane = new_plane(groups=1, size=1, episodes=EpisodeRules(max_turns=3, max_tokens=40))
    (lease,) = ask(plane, ALICE, 0, 1)
    assert verdict_of(hand_in(plane, ALICE, part(lease, 3, 4))) == "malformed"


def test_the_next_life_of_the_learner_goes_on_with_it() -> None:
    def breach(rule: str, what: str) -> NoReturn:
        raise AssertionError(f"{rule}: {what}")

    ledger, plane = Ledger(1, breach), plane_of()
    for node, tokens in ((ALICE, (3, 4)), (BOB, (5,))):
        *opened, granted = plane.ask(node, v(0), 1, now=0.0)
        assert isinstance(granted, Granted)
        said = hand_in(plane, node, part(granted.leases[0], *tokens))
        ledger.read([one for one in (*opened, *said) if isinstance(one, Record)])
    later = RolloutPlane(replace(plane.rules, life=1), prompts=prompt)
    later.restore(ledger.run(), now=0.0)
    later.published(v(0))
    later.tick(now=60.0)  # Bob may have got it again
    (rest,) = ask(later, CAROL, 0, 1)
    assert rest.begun == ints(3, 4, 5)
    _, accepted, _ = hand_in(later, CAROL, part(rest, STOP, finish="stop"))
    assert isinstance(accepted, RolloutAccepted)
    assert [span.node for span in accepted.rollout.spans] == [ALICE, BOB, ""]
    ledger.read([accepted])


def test_held_out_answers_are_handed_over_too_and_are_on_no_record() -> None:
    plane = new_plane(groups=1, size=1)
    plane.evaluate(v(0), [prompt()])
    (lease,) = ask(plane, ALICE, 0, 1)
    assert lease.purpose == "eval"
    (judged,) = hand_in(plane, ALICE, part(lease, 3))
    assert isinstance(judged, Judged)
    (rest,) = ask(plane, BOB, 0, 1)
    hand_in(plane, BOB, part(rest, 4, STOP, finish="stop"))
    (evaluated,) = plane.scored(lease.group_id, 0, RIGHT)
    assert isinstance(evaluated, Evaluated)
    assert evaluated.groups[0].samples[0].rollout is not None
    assert evaluated.groups[0].samples[0].rollout.token_ids == ints(3, 4, STOP)
