"""Episodes: turns are leased one after the other, to whoever is there, and come out as one rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NoReturn

import pytest

from swarm.rollout.journal.entries import (
    GroupDropped,
    GroupOpened,
    Record,
    RolloutAccepted,
    RolloutReturned,
    RolloutScored,
    SamplesLeased,
)
from swarm.rollout.plane.effects import Answered, Effect, Evaluated, GenerationFailed, Granted, StepWanted
from swarm.rollout.plane.episodes import STICKY_S, Episode, EpisodeRules, part_of, reads_of
from swarm.rollout.plane.grant import MAX_TOKENS
from swarm.rollout.plane.leases import seat_seed
from swarm.rollout.plane.plane import RolloutPlane
from swarm.types import Lease, NodeId, Observed, Play, Prompt, Rollout, Span, Turn, VersionId
from tests.builders import (
    ALICE,
    BOB,
    RULES,
    STOP,
    VOCAB,
    answering,
    ask,
    failed_rollout,
    floats,
    ints,
    new_plane,
    prompt,
    refusal,
    rollout,
    v,
    verdict_of,
)
from tests.simulator.rollouts.ledger import Ledger

PROMPT = (1, 3, 13)
PLAY = Play(task="lake", prompt_id="lake-0", max_turns=3, max_tokens=40)


def plane_of(episodes: EpisodeRules | None = None, *, size: int = 1, groups: int = 1, bound: int = 2) -> RolloutPlane:
    episodes = episodes or EpisodeRules(max_turns=3, max_tokens=40)
    return new_plane(max_staleness=bound, groups=groups, size=size, episodes=episodes)


def holder(plane: RolloutPlane, lease: Lease, index: int) -> NodeId:
    group = plane.leased.group(lease.group_id)
    node = group.samples[index].node if group is not None else None
    assert node is not None
    return node


def draw(
    plane: RolloutPlane, lease: Lease, *tokens: int, version: int = 0, now: float = 0.0
) -> tuple[StepWanted, list[Effect]]:
    """Answer the one sample of `lease`; what the environment is to answer, and all that the plane said."""
    (spec,) = lease.samples
    one = rollout(group_id=lease.group_id, index=spec.index, tokens=(*(tokens or (4,)), STOP), version=version)
    said = plane.submit(holder(plane, lease, spec.index), answering(lease, one), now=now)
    assert verdict_of(said) == "accepted"
    (wanted,) = [effect for effect in said if isinstance(effect, StepWanted)]
    return wanted, said


def observe(plane: RolloutPlane, wanted: StepWanted, *said: Observed, now: float = 0.0) -> list[Effect]:
    return plane.observed(wanted.group_id, wanted.index, wanted.episode, said, now=now)


def says(*tokens: int, reward: float = 0.0, done: bool = False, seat: int = 0) -> Observed:
    return Observed(token_ids=ints(*tokens), rewards=(reward,), done=done, exact=done, seat=seat)


def of_kind(effects: Sequence[Effect], kind: type) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def test_a_turn_continues_all_that_was_read_and_said() -> None:
    plane = plane_of()
    (first,) = ask(plane, ALICE, 0, 1)
    assert (first.turn, first.prompt_token_ids) == (0, PROMPT)
    wanted, said = draw(plane, first, 4)
    assert not of_kind(said, RolloutAccepted)
    assert (wanted.drawn, wanted.answered, wanted.nodes) == ((ints(4, STOP),), 0, (ALICE,))
    assert observe(plane, wanted, says(7, 8)) == []
    (second,) = ask(plane, ALICE, 0, 1)
    assert (second.turn, second.prompt_token_ids) == (1, (*PROMPT, 4, STOP, 7, 8))
    assert second.samples[0].seed == first.samples[0].seed


def test_an_episode_becomes_one_rollout_with_its_score() -> None:
    plane = plane_of()
    (first,) = ask(plane, ALICE, 0, 1)
    wanted, _ = draw(plane, first, 4)
    observe(plane, wanted, says(7, reward=0.25))
    (second,) = ask(plane, ALICE, 0, 1)
    wanted, _ = draw(plane, second, 5)
    accepted, scored, *_ = observe(plane, wanted, says(9, reward=0.5, done=True))
    assert isinstance(accepted, RolloutAccepted)
    one = accepted.rollout
    assert one.token_ids == ints(4, STOP, 7, 5, STOP, 9)
    assert one.logprobs == floats(-0.5, -0.5, 0.0, -0.5, -0.5, 0.0)
    assert one.turns == (
        Turn(start=0, end=2, node=ALICE, reward=0.25),
        Turn(start=3, end=5, node=ALICE, reward=0.5),
    )
    assert one.spans == (Span(version=v(0), start=0, end=2), Span(version=v(0), start=3, end=5))
    assert (one.finish, one.seats, one.drawn) == ("stop", (), 4)
    assert isinstance(scored, RolloutScored)
    assert (scored.score.reward, scored.score.exact) == (0.75, True)
    assert plane.can_take(now=0.0)


def test_the_parts_of_an_episode_are_what_each_node_was_leased() -> None:
    plane = plane_of()
    (first,) = ask(plane, ALICE, 0, 1)
    wanted, _ = draw(plane, first, 4)
    observe(plane, wanted, says(7))
    plane.leave(ALICE)
    (second,) = ask(plane, BOB, 0, 1)
    wanted, _ = draw(plane, second, 5)
    accepted, *_ = observe(plane, wanted, says(done=True))
    assert isinstance(accepted, RolloutAccepted)
    one = accepted.rollout
    parts = [part_of(one, turn) for turn in one.turns]
    assert [(turn.node, reads_of(one, turn, PROMPT)) for turn in one.turns] == [
        (ALICE, first.prompt_token_ids),
        (BOB, second.prompt_token_ids),
    ]
    assert [part.token_ids for part in parts] == [ints(4, STOP), ints(5, STOP)]
    assert [part.spans[0].end for part in parts] == [2, 2]


def test_a_limit_of_turns_or_tokens_ends_an_episode() -> None:
    plane = plane_of(EpisodeRules(max_turns=1, max_tokens=40))
    wanted, _ = draw(plane, ask(plane, ALICE, 0, 1)[0])
    accepted, *_ = observe(plane, wanted, says(7))
    assert isinstance(accepted, RolloutAccepted)
    assert (accepted.rollout.finish, accepted.rollout.token_ids) == ("length", ints(4, STOP, 7))
    plane = plane_of(EpisodeRules(max_turns=5, max_tokens=4))
    wanted, _ = draw(plane, ask(plane, ALICE, 0, 1)[0])
    accepted, *_ = observe(plane, wanted, says(7, 8))
    assert isinstance(accepted, RolloutAccepted)
    assert (accepted.rollout.finish, accepted.rollout.token_ids) == ("length", ints(4, STOP))


def test_an_episode_ends_before_it_is_more_than_a_rollout_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all players together: in tokens, each of the others with as many as it may still have, and in versions."""
    rules = EpisodeRules(max_turns=9, max_tokens=40)
    for name, most in (("MAX_TOKENS", 4 + 40), ("MAX_SPANS", 2)):
        monkeypatch.undo()
        monkeypatch.setattr(f"swarm.rollout.plane.episodes.{name}", most)
        episode = Episode(name="e")
        ended = []
        for seat in (1, 0, 1):
            episode.take(ALICE, rollout(tokens=(4, STOP)))
            ended.append(episode.observe(says(7, seat=seat), rules))
        assert ended == ["", "", "length"], name


def test_the_last_tokens_of_an_episode_bound_a_turn() -> None:
    plane = plane_of(EpisodeRules(max_turns=5, max_tokens=5))
    wanted, _ = draw(plane, ask(plane, ALICE, 0, 1)[0])
    observe(plane, wanted, says(7))
    assert ask(plane, ALICE, 0, 1)[0].rules.max_new_tokens == 2


def test_a_turn_waits_for_the_node_that_has_the_others_in_its_cache() -> None:
    plane = plane_of(bound=0)
    plane.beat(BOB, now=0.0)
    wanted, _ = draw(plane, ask(plane, ALICE, 0, 1)[0])
    observe(plane, wanted, says(7))
    chances = plane.leased.chances
    assert refusal(plane, BOB, 0) == "paced"
    assert plane.deadline() == STICKY_S
    plane.tick(now=STICKY_S)
    assert plane.leased.chances > chances
    assert ask(plane, BOB, 0, 1)[0].turn == 1


def test_every_turn_is_kept_for_as_long_however_soon_it_follows() -> None:
    plane = plane_of(bound=0)
    wanted, _ = draw(plane, ask(plane, ALICE, 0, 1)[0])
    observe(plane, wanted, says(7))
    wanted, _ = draw(plane, ask(plane, ALICE, 0, 1, now=1.0)[0], 5, now=1.0)
    observe(plane, wanted, says(7), now=1.5)
    plane.beat(ALICE, now=STICKY_S)
    plane.tick(now=STICKY_S)
    assert refusal(plane, BOB, 0, now=STICKY_S) == "paced"
    assert plane.deadline() == 1.5 + STICKY_S
    plane.beat(ALICE, now=1.5 + STICKY_S)
    plane.tick(now=1.5 + STICKY_S)
    assert ask(plane, BOB, 0, 1, now=1.5 + STICKY_S)[0].turn == 2


def test_a_turn_is_kept_for_the_node_that_drew_the_last_one() -> None:
    plane = plane_of(bound=0)
    wanted, _ = draw(plane, ask(plane, ALICE, 0, 1)[0])
    observe(plane, wanted, says(7))
    plane.leave(ALICE)
    wanted, _ = draw(plane, ask(plane, BOB, 0, 1)[0], 5)
    plane.beat(ALICE, now=0.0)
    observe(plane, wanted, says(7))
    assert refusal(plane, ALICE, 0) == "paced"
    assert ask(plane, BOB, 0, 1)[0].turn == 2


def begun(*nodes: NodeId) -> RolloutPlane:
    """An episode of each node in a group, with one turn drawn and the next one waiting."""
    plane = plane_of(bound=0, size=len(nodes))
    given = [one for node in dict.fromkeys(nodes) for one in ask(plane, node, 0, nodes.count(node))]
    (group,) = plane.leased.groups()
    for one, spec in [(each, spec) for each in given for spec in each.samples]:
        said = plane.submit(
            holder(plane, one, spec.index), answering(one, rollout(index=spec.index, tokens=(4, STOP))), now=0.0
        )
        (wanted,) = [effect for effect in said if isinstance(effect, StepWanted)]
        waiting, chances = group.waiting, plane.leased.chances
        observe(plane, wanted, says(7))
        assert (group.waiting, plane.leased.chances) == (waiting + 1, chances + 1)
    return plane


def test_a_node_gets_as_many_turns_as_it_asks_for() -> None:
    plane = begun(ALICE, ALICE, ALICE)
    first = ask(plane, ALICE, 0, 2)
    assert [one.samples[0].index for one in first] == [0, 1]
    assert [one.samples[0].index for one in ask(plane, ALICE, 0, 2)] == [2]


def test_the_turns_of_one_answer_fit_into_a_reply() -> None:
    plane = begun(ALICE, ALICE, ALICE)
    (group,) = plane.leased.groups()
    most_tokens = len(PROMPT) + 3 + 1
    given = plane.leased.claim_turns(group, ALICE, 3, now=0.0, own=False, most_tokens=most_tokens)
    assert len(given) == 2


def test_the_prompts_of_all_groups_fit_into_a_reply_together() -> None:
    """Two thirds of it each: two come in an answer, whether they are openings or turns, and others in the next one."""
    long = Prompt(prompt_id="long", text="", answer="", token_ids=(1,) * (MAX_TOKENS * 2 // 3))
    plane = RolloutPlane(plane_of(groups=4).rules, prompts=lambda number: long)
    plane.published(v(0))

    def given() -> list[Lease]:
        *_, answer = plane.ask(ALICE, v(0), 4, now=0.0, at_once=4)
        assert isinstance(answer, Granted)
        return [*answer.leases]

    openings = [given(), given()]
    assert [[one.group_id for one in each] for each in openings] == [["t0", "t1"], ["t2", "t3"]]
    for first in chain.from_iterable(openings):
        observe(plane, draw(plane, first)[0], says(7))
    turns = [given(), given()]
    assert [[(one.group_id, one.turn) for one in each] for each in turns] == [
        [("t0", 1), ("t1", 1)],
        [("t2", 1), ("t3", 1)],
    ]


def test_a_nodes_own_turns_are_those_that_are_kept_for_it() -> None:
    plane = begun(ALICE, BOB)
    (group,) = plane.leased.groups()
    for sample, keeper in zip(group.samples, (ALICE, None), strict=True):
        assert sample.episode is not None
        sample.episode.keeper = keeper
    given = plane.leased.claim_turns(group, ALICE, 2, now=0.0, own=True, most_tokens=1000)
    assert [one.samples[0].index for one in given] == [0]


def test_a_turn_that_is_kept_for_another_node_does_not_come_with_those_that_are_not() -> None:
    plane = begun(ALICE, BOB, BOB)
    (group,) = plane.leased.groups()
    last = group.samples[2].episode
    assert last is not None
    last.keeper = None
    given = ask(plane, BOB, 0, 3)
    assert [one.samples[0].index for one in given] == [1, 2]


def test_each_failure_of_a_turn_counts_once() -> None:
    plane = begun(ALICE)
    plane.beat(BOB, now=0.0)
    failed = failed_rollout()
    (first,) = ask(plane, ALICE, 0, 1)
    assert of_kind(plane.submit(ALICE, answering(first, failed), now=0.0), GenerationFailed)
    assert not of_kind(plane.submit(ALICE, answering(first, failed), now=0.0), GenerationFailed)
    (second,) = ask(plane, BOB, 0, 1)
    assert (first.samples[0].attempt, second.samples[0].attempt) == (0, 1)
    assert of_kind(plane.submit(BOB, answering(second, failed), now=0.0), GenerationFailed)


def test_who_failed_a_turn_that_others_drew_may_have_the_next_one() -> None:
    """A long episode has a right to some failures."""
    plane = begun(ALICE)
    for node in (BOB, NodeId("carol")):
        plane.beat(node, now=0.0)
    plane.submit(ALICE, answering(ask(plane, ALICE, 0, 1)[0], failed_rollout()), now=0.0)
    assert refusal(plane, ALICE, 0) == "paced"
    wanted, _ = draw(plane, ask(plane, BOB, 0, 1)[0], 5)
    observe(plane, wanted, says(7))
    plane.leave(BOB)
    (after,) = ask(plane, ALICE, 0, 1)
    assert (after.turn, after.samples[0].attempt) == (2, 1)


def test_a_turn_is_an_answer_of_its_node() -> None:
    plane = plane_of(EpisodeRules(max_turns=3, max_tokens=40, play=PLAY))
    plane.beat(ALICE, now=0.0, tokens_per_s=1.0)
    (lease,) = ask(plane, ALICE, 0, 1)
    alone = played(lease, 0, (4, STOP, 7, 5, STOP), [(0, 2), (3, 5)])
    (wanted,) = of_kind(plane.submit(ALICE, answering(lease, alone), now=0.0), StepWanted)
    assert isinstance(wanted, StepWanted)
    observe(plane, wanted, says(7), says(done=True))
    assert plane.leased.answer_s(ALICE) == 4.0


def test_what_a_player_gets_in_the_turns_of_others_is_its_last_turns() -> None:
    plane = plane_of(EpisodeRules(max_turns=3, max_tokens=5))
    wanted, _ = draw(plane, ask(plane, ALICE, 0, 1)[0], 4)
    observe(plane, wanted, Observed(token_ids=ints(9), seat=1, rewards=(0.25, 8.0)))
    (second,) = ask(plane, ALICE, 0, 1)
    assert second.rules.max_new_tokens == 4, "what the first player has read and said is not the second's"
    wanted, _ = draw(plane, second, 5)
    _, scored, *_ = observe(plane, wanted, Observed(rewards=(0.5, 1.0), done=True))
    assert isinstance(scored, RolloutScored)
    assert (scored.score.reward, scored.score.parts) == (0.75, {"reward_of_player_2": 1.0})


def test_the_turn_of_a_silent_node_moves_at_once_and_nothing_is_lost() -> None:
    plane = plane_of()
    wanted, _ = draw(plane, ask(plane, ALICE, 0, 1)[0])
    observe(plane, wanted, says(7))
    held = ask(plane, ALICE, 0, 1)[0]
    plane.beat(BOB, now=2.9)
    plane.tick(now=3.0)
    (moved,) = ask(plane, BOB, 0, 1, now=3.0)
    assert (moved.turn, moved.prompt_token_ids) == (1, held.prompt_token_ids)
    wanted, _ = draw(plane, moved, 6, now=3.0)
    assert wanted.drawn == (ints(4, STOP), ints(6, STOP))
    late = rollout(group_id=held.group_id, tokens=(5, STOP))
    assert verdict_of(plane.submit(ALICE, answering(held, late), now=3.1)) == "duplicate"


def test_a_turn_is_taken_once() -> None:
    plane = plane_of()
    (first,) = ask(plane, ALICE, 0, 1)
    wanted, _ = draw(plane, first)
    again = rollout(group_id=first.group_id, tokens=(5, STOP))
    assert verdict_of(plane.submit(ALICE, answering(first, again), now=0.0)) == "duplicate"
    observe(plane, wanted, says(7))
    assert observe(plane, wanted, says(7)) == []
    (second,) = ask(plane, ALICE, 0, 1)
    assert verdict_of(plane.submit(ALICE, answering(first, again), now=0.0)) == "duplicate"
    assert second.samples[0].index in [index for _, index in plane.leased.held_by(ALICE)]


def test_turns_cannot_be_skipped_or_taken_from_another_episode() -> None:
    plane = plane_of(size=2)
    (first,) = ask(plane, ALICE, 0, 2)
    for index, tokens in ((0, (4, STOP)), (1, (5, STOP))):
        said = plane.submit(ALICE, answering(first, rollout(index=index, tokens=tokens)), now=0.0)
        (wanted,) = [effect for effect in said if isinstance(effect, StepWanted)]
        observe(plane, wanted, says(7))
    one, other = ask(plane, ALICE, 0, 2)
    foreign = rollout(index=other.samples[0].index, tokens=(6,))
    assert verdict_of(plane.submit(ALICE, answering(one, foreign), now=0.0)) == "malformed"
    whole = rollout(index=one.samples[0].index, tokens=(6,))
    claimed = Rollout(
        group_id=whole.group_id,
        index=whole.index,
        token_ids=whole.token_ids,
        logprobs=whole.logprobs,
        spans=whole.spans,
        finish="stop",
        turns=(Turn(start=0, end=1),),
    )
    assert verdict_of(plane.submit(ALICE, answering(one, claimed), now=0.0)) == "malformed"


def test_a_failed_turn_is_given_to_others_and_the_episode_stays() -> None:
    plane = plane_of()
    plane.beat(BOB, now=0.0)
    wanted, _ = draw(plane, ask(plane, ALICE, 0, 1)[0])
    observe(plane, wanted, says(7))
    (second,) = ask(plane, ALICE, 0, 1)
    failed = Rollout(group_id="t0", index=0, token_ids=b"", logprobs=b"", spans=(), finish="failed", reason="broken")
    plane.submit(ALICE, answering(second, failed), now=0.0)
    assert ask(plane, BOB, 0, 1)[0].prompt_token_ids == second.prompt_token_ids


def test_an_old_turn_makes_a_group_stale() -> None:
    plane = plane_of(bound=0, size=2)
    (lease,) = ask(plane, ALICE, 0, 2)
    said = plane.submit(ALICE, answering(lease, rollout(index=0)), now=0.0)
    (wanted,) = [effect for effect in said if isinstance(effect, StepWanted)]
    observe(plane, wanted, says(7))
    plane.next_batch = 1
    dropped = [effect for effect in plane.set_bound(0) if isinstance(effect, GroupDropped)]
    assert [one.reason for one in dropped] == ["stale"]
    assert observe(plane, wanted, says(7)) == []


def test_a_fresh_episode_goes_on_though_its_group_was_opened_for_an_old_version() -> None:
    plane = plane_of(bound=1)
    (lease,) = ask(plane, ALICE, 0, 1)
    plane.published(v(1))
    plane.next_batch = 2
    wanted, _ = draw(plane, lease, version=1)
    assert plane.set_bound(1) == []
    observe(plane, wanted, says(7))
    assert ask(plane, ALICE, 1, 1)[0].turn == 1


def test_the_age_of_an_episode_is_that_of_its_oldest_token() -> None:
    plane = plane_of()
    wanted, _ = draw(plane, ask(plane, ALICE, 0, 1)[0])
    observe(plane, wanted, says(7))
    plane.published(v(1))
    wanted, _ = draw(plane, ask(plane, ALICE, 1, 1)[0], version=1)
    (group,) = plane.leased.groups()
    assert group.oldest_drawn == 0
    accepted, *_ = observe(plane, wanted, says(done=True))
    assert isinstance(accepted, RolloutAccepted)
    assert accepted.rollout.oldest == 0


def test_players_have_streams_and_seeds_of_their_own() -> None:
    plane = plane_of()
    (first,) = ask(plane, ALICE, 0, 1)
    wanted, _ = draw(plane, first, 4)
    observe(plane, wanted, Observed(token_ids=ints(9, 9), seat=1, rewards=(0.0, 0.0)))
    (second,) = ask(plane, ALICE, 0, 1)
    assert second.prompt_token_ids == (9, 9)
    assert second.samples[0].seed == seat_seed(first.samples[0].seed, 1) != first.samples[0].seed
    wanted, _ = draw(plane, second, 5)
    accepted, scored, *_ = observe(plane, wanted, Observed(rewards=(-1.0, 1.0), done=True))
    assert isinstance(accepted, RolloutAccepted)
    assert isinstance(scored, RolloutScored)
    one = accepted.rollout
    assert (one.token_ids, one.seats) == (ints(4, STOP, 9, 9, 5, STOP), (0, 2))
    assert one.spans == (Span(version=v(0), start=0, end=2), Span(version=v(0), start=4, end=6))
    assert [(turn.start, turn.end, turn.seat, turn.reward) for turn in one.turns] == [(0, 2, 0, -1.0), (4, 6, 1, 1.0)]
    assert (scored.score.reward, scored.score.parts) == (-1.0, {"reward_of_player_2": 1.0})
    assert [reads_of(one, turn, PROMPT) for turn in one.turns] == [PROMPT, (9, 9)]


def test_an_environment_that_begins_says_what_is_read_first() -> None:
    plane = plane_of(EpisodeRules(max_turns=3, max_tokens=40, begins=True))
    *begun, _ = plane.ask(ALICE, v(0), 1, now=0.0)
    (wanted,) = [effect for effect in begun if isinstance(effect, StepWanted)]
    assert (wanted.drawn, wanted.nodes) == ((), ())
    assert refusal(plane, ALICE, 0) == "paced"
    (group,) = (group for group in plane.leased.groups() if group.group_id == wanted.group_id)
    observe(plane, wanted, Observed(token_ids=ints(5, 6), seat=1))
    (lease,) = ask(plane, ALICE, 0, 1)
    assert (lease.turn, lease.prompt_token_ids) == (0, (5, 6))
    assert lease.samples[0].seed == seat_seed(group.samples[0].seed, 1)
    wanted, _ = draw(plane, lease, 4)
    assert wanted.newest == rollout(group_id="t0", tokens=(4, STOP))
    observe(plane, wanted, Observed(token_ids=ints(7), seat=1))
    assert ask(plane, ALICE, 0, 1)[0].samples[0].seed == lease.samples[0].seed


def test_held_out_episodes_begin_with_their_round() -> None:
    plane = plane_of(EpisodeRules(max_turns=3, max_tokens=40, begins=True))
    begun = plane.evaluate(v(0), [prompt(0), prompt(1)])
    assert [(one.group_id, one.index, one.drawn) for one in begun] == [("e0.1-0", 0, ()), ("e0.1-1", 0, ())]
    assert plane_of().evaluate(v(0), [prompt(0)]) == [], "a prompt says what is read first"


def test_an_episode_on_record_without_a_score_begins_once_in_the_next_life() -> None:
    """The learner died between the two records."""
    rules = EpisodeRules(max_turns=3, max_tokens=40, begins=True)
    plane, ledger = plane_of(rules, size=2), Ledger(2, never)
    *begun, _ = plane.ask(ALICE, v(0), 1, now=0.0)
    first, _ = of_kind(begun, StepWanted)
    assert isinstance(first, StepWanted)
    observe(plane, first, Observed(token_ids=ints(5, 6), seat=1))
    *said, _ = plane.ask(ALICE, v(0), 1, now=0.0)
    (granted,) = of_kind(plane.ask(ALICE, v(0), 1, now=0.0, holding=[]), Granted)
    assert isinstance(granted, Granted)
    wanted, _ = draw(plane, granted.leases[0])
    accepted, scored, *_ = observe(plane, wanted, Observed(rewards=(0.0, 1.0), seat=1, done=True))
    assert isinstance(scored, RolloutScored)
    ledger.read([one for one in (*begun, *said, accepted) if isinstance(one, Record)])

    later = RolloutPlane(replace(plane.rules, life=1), prompts=prompt)
    effects = later.restore(ledger.run(), now=100.0)
    assert [one.index for one in effects if isinstance(one, RolloutReturned)] == [wanted.index]
    assert sorted(one.index for one in effects if isinstance(one, StepWanted)) == [0, 1]


def never(rule: str, what: str) -> NoReturn:
    raise AssertionError(f"{rule}: {what}")


def test_an_environment_that_fails_leaves_an_episode_without_a_reward() -> None:
    plane = plane_of()
    wanted, _ = draw(plane, ask(plane, ALICE, 0, 1)[0])
    observe(plane, wanted, says(7, reward=1.0))
    wanted, _ = draw(plane, ask(plane, ALICE, 0, 1)[0], 5)
    accepted, scored, *_ = plane.observed(wanted.group_id, wanted.index, wanted.episode, None, now=0.0)
    assert isinstance(accepted, RolloutAccepted)
    assert isinstance(scored, RolloutScored)
    assert scored.score.reward == 0.0
    assert {turn.reward for turn in accepted.rollout.turns} == {0.0}


def test_what_a_barred_node_drew_is_drawn_by_others_from_the_beginning() -> None:
    plane = plane_of()
    wanted, _ = draw(plane, ask(plane, ALICE, 0, 1)[0])
    observe(plane, wanted, says(7))
    plane.leave(ALICE)
    wanted, _ = draw(plane, ask(plane, BOB, 0, 1)[0], 5)
    accepted, *_ = observe(plane, wanted, says(done=True))
    assert isinstance(accepted, RolloutAccepted)
    assert accepted.node == BOB
    assert len(of_kind(plane.bar(ALICE, "lied"), RolloutReturned)) == 1
    assert ask(plane, BOB, 0, 1)[0].prompt_token_ids == PROMPT


def test_what_a_barred_node_drew_of_an_open_episode_goes_too() -> None:
    plane = plane_of()
    wanted, _ = draw(plane, ask(plane, ALICE, 0, 1)[0])
    plane.bar(ALICE, "lied")
    assert observe(plane, wanted, says(7)) == []
    assert ask(plane, BOB, 0, 1)[0].turn == 0


def test_a_turn_that_continues_what_was_taken_back_is_refused() -> None:
    plane = plane_of(bound=0)
    wanted, _ = draw(plane, ask(plane, ALICE, 0, 1)[0], 4)
    observe(plane, wanted, says(7))
    plane.leave(ALICE)
    (old,) = ask(plane, BOB, 0, 1)
    plane.bar(ALICE, "lied")
    plane.release(BOB, "t0", 0, now=0.0)
    wanted, _ = draw(plane, ask(plane, BOB, 0, 1)[0], 5)
    observe(plane, wanted, says(7))
    assert verdict_of(plane.submit(BOB, answering(old, rollout(tokens=(6, STOP))), now=0.0)) == "stale"


def test_only_the_first_turn_of_a_sample_is_on_record_as_leased() -> None:
    plane = plane_of()
    *records, _ = plane.ask(ALICE, v(0), 1, now=0.0)
    assert len(of_kind(records, SamplesLeased)) == 1
    held = plane.leased.claimable(v(0))
    assert held == []


def played(lease: Lease, index: int, tokens: Sequence[int], turns: Sequence[tuple[int, int]]) -> Rollout:
    drawn = {place for start, end in turns for place in range(start, end)}
    return Rollout(
        group_id=lease.group_id,
        index=index,
        token_ids=ints(*tokens),
        logprobs=floats(*(-0.5 if place in drawn else 0.0 for place in range(len(tokens)))),
        spans=tuple(Span(version=VersionId(incarnation=0, version=0), start=a, end=b) for a, b in turns),
        finish="stop",
        turns=tuple(Turn(start=a, end=b) for a, b in turns),
    )


def test_a_sampler_that_plays_alone_is_believed_as_far_as_the_environment_says_the_same() -> None:
    plane = plane_of(EpisodeRules(max_turns=3, max_tokens=40, play=PLAY), size=2)
    (lease,) = ask(plane, ALICE, 0, 2)
    assert lease.play is not None
    assert lease.play.prompt_id == "p0"
    honest = played(lease, 0, (4, STOP, 7, 5, STOP), [(0, 2), (3, 5)])
    (wanted,) = of_kind(plane.submit(ALICE, answering(lease, honest), now=0.0), StepWanted)
    assert isinstance(wanted, StepWanted)
    assert wanted.drawn == (ints(4, STOP), ints(5, STOP))
    accepted, *_ = observe(plane, wanted, says(7, reward=0.5), says(done=True))
    assert isinstance(accepted, RolloutAccepted)
    assert [turn.reward for turn in accepted.rollout.turns] == [0.5, 0.0]
    forged = played(lease, 1, (4, STOP, 8, 5, STOP), [(0, 2), (3, 5)])
    (wanted,) = of_kind(plane.submit(ALICE, answering(lease, forged), now=0.0), StepWanted)
    assert isinstance(wanted, StepWanted)
    (failed,) = observe(plane, wanted, says(7, reward=0.5), says(done=True))
    assert isinstance(failed, GenerationFailed)
    assert ask(plane, ALICE, 0, 1)[0].group_id == "t1", "others have it first"
    assert ask(plane, BOB, 0, 1)[0].samples[0].index == 1


def test_a_played_episode_that_ended_too_early_or_too_late_is_refused() -> None:
    for turns, observed in (([(0, 2)], [says(7)]), ([(0, 2), (3, 5)], [says(7, done=True), says()])):
        plane = plane_of(EpisodeRules(max_turns=3, max_tokens=40, play=PLAY))
        (lease,) = ask(plane, ALICE, 0, 1)
        one = played(lease, 0, (4, STOP, 7, 5, STOP)[: turns[-1][1]], turns)
        (wanted,) = of_kind(plane.submit(ALICE, answering(lease, one), now=0.0), StepWanted)
        assert isinstance(wanted, StepWanted)
        assert of_kind(observe(plane, wanted, *observed), GenerationFailed)


def test_the_shape_of_a_played_episode_is_checked() -> None:
    plane = plane_of(EpisodeRules(max_turns=3, max_tokens=8, play=PLAY), size=1)
    (lease,) = ask(plane, ALICE, 0, 1)
    good = played(lease, 0, (4, STOP, 7, 5, STOP), [(0, 2), (3, 5)])
    bad = [
        played(lease, 0, (4, STOP, 7, 5, STOP), [(3, 5), (0, 2)]),
        played(lease, 0, (4, STOP, 7, 5, STOP), [(0, 2), (1, 5)]),
        played(lease, 0, (4,) * 8, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        played(lease, 0, (4,) * 9, [(0, 2)]),
        played(lease, 0, (4, VOCAB, 7), [(0, 2)]),
        rollout(),
    ]
    for one in bad:
        assert verdict_of(plane.submit(ALICE, answering(lease, one), now=0.0)) == "malformed"
    (again,) = ask(plane, BOB, 0, 1)
    assert verdict_of(plane.submit(BOB, answering(again, good), now=0.0)) == "accepted"


def test_held_out_prompts_are_played_too() -> None:
    plane = plane_of()
    plane.end("draining")
    plane.evaluate(v(0), [prompt(9)])
    (lease,) = ask(plane, ALICE, 0, 1)
    assert (lease.purpose, lease.rules.temperature) == ("eval", 0.0)
    wanted, _ = draw(plane, lease)
    observe(plane, wanted, says(7))
    wanted, _ = draw(plane, ask(plane, ALICE, 0, 1)[0], 5)
    (done,) = observe(plane, wanted, says(reward=1.0, done=True))
    assert isinstance(done, Evaluated)
    assert done.scores[0][0].exact


@pytest.mark.parametrize(("bound", "first"), [(0, "train"), (1, "eval")])
def test_a_held_out_episode_goes_on_before_training_unless_a_run_must_repeat(bound: int, first: str) -> None:
    """At S = 0 only one kind is drawn at a time: the last bits of log-probs depend on neighbours in the batch."""
    plane = plane_of(bound=bound, size=2)
    plane.evaluate(v(0), [prompt(9)])
    given = [(one, node) for node in (ALICE, BOB) for one in ask(plane, node, 0, 2)]
    ((held_out, node),) = [one for one in given if one[0].purpose == "eval"]
    observe(plane, draw(plane, held_out)[0], says(7))
    plane.leave(ALICE if node == BOB else BOB)
    assert [one.purpose for one in ask(plane, node, 0, 1)] == [first]


def test_a_question_goes_before_the_run_and_leaves_no_trace() -> None:
    plane = plane_of()
    name = plane.question(prompt(5), RULES)
    first, second = ask(plane, ALICE, 0, 2)
    assert (first.group_id, first.purpose, second.purpose) == (name, "ask", "train")
    effects = plane.submit(ALICE, answering(first, rollout(group_id=first.group_id)), now=0.0)
    assert len(of_kind(effects, Answered)) == 1
    assert not of_kind(effects, RolloutAccepted)
    assert plane.leased.group(first.group_id) is None


def test_a_question_that_all_samplers_refuse_is_given_up_at_once() -> None:
    """Its temperature may be one that their engines do not draw at: honest samplers are not to fail it again."""
    plane = plane_of()
    plane.question(prompt(5), RULES)
    (first,) = ask(plane, ALICE, 0, 1)
    effects = plane.submit(ALICE, answering(first, failed_rollout(group_id=first.group_id)), now=0.0)
    assert [one.group_id for one in effects if isinstance(one, GroupDropped)] == [first.group_id]


def test_a_question_waits_for_no_step_where_the_only_sampler_does() -> None:
    """It has the newest version, so its request is held open and answered with the question."""
    plane = plane_of(bound=0)
    plane.next_batch = 1
    assert refusal(plane, ALICE, 0) == "paced"
    before = plane.leased.chances
    plane.question(prompt(5), RULES)
    assert plane.leased.chances > before
    assert [one.purpose for one in ask(plane, ALICE, 0, 1)] == ["ask"]


def test_no_group_is_opened_that_has_no_room_in_the_answer() -> None:
    long = Prompt(prompt_id="long", text="", answer="", token_ids=(1,) * (MAX_TOKENS * 2 // 3))
    plane = RolloutPlane(new_plane(max_staleness=2, groups=4, size=1).rules, prompts=lambda number: long)
    plane.published(v(0))
    *records, answer = plane.ask(ALICE, v(0), 4, now=0.0)
    assert isinstance(answer, Granted)
    assert len(answer.leases) == len(of_kind(records, GroupOpened))
