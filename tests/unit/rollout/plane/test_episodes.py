"""Episodes: a sampler plays one, turn by turn; another one goes on where it was lost; it comes out as one rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import pytest
from msgspec import structs

from swarm.rollout.journal.entries import (
    GroupDropped,
    GroupOpened,
    Record,
    RolloutAccepted,
    RolloutReturned,
    RolloutScored,
    TurnTaken,
)
from swarm.rollout.messages import Answer
from swarm.rollout.plane.effects import Effect, Evaluated, GenerationFailed, Granted, Judged, StepWanted
from swarm.rollout.plane.episodes import Episode, EpisodeRules, part_of, reads_of
from swarm.rollout.plane.groups import LEASE_SLACK_S, MAX_LEASED_TOKENS
from swarm.rollout.plane.plane import RolloutPlane
from swarm.types import EpisodeProgress, Lease, NodeId, Observed, Prompt, Rollout, Score, Span, Turn, TurnLimits
from tests.builders import (
    ALICE,
    BOB,
    STOP,
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


def plane_of(episodes: EpisodeRules | None = None, *, size: int = 1, groups: int = 1, bound: int = 2) -> RolloutPlane:
    episodes = episodes or EpisodeRules(max_turns=3, max_tokens=40)
    return new_plane(max_staleness=bound, groups=groups, size=size, episodes=episodes)


def turn(lease: Lease, number: int, *tokens: int, index: int = 0, version: int = 0) -> Answer:
    """A turn of a sample of `lease`."""
    one = rollout(group_id=lease.group_id, index=index, tokens=(*(tokens or (4,)), STOP), version=version)
    return answering(lease, one, number)


def draw(plane: RolloutPlane, answer: Answer, node: NodeId = ALICE, *, now: float = 0.0) -> StepWanted:
    """Hand in a turn; what the environment is to answer."""
    said = plane.submit(node, answer, now=now)
    assert verdict_of(said) == "accepted", said
    (wanted,) = [effect for effect in said if isinstance(effect, StepWanted)]
    assert plane.next_of(node, answer) is None, "its environment thinks"
    return wanted


def observe(plane: RolloutPlane, wanted: StepWanted, said: Observed | None, now: float = 0.0) -> list[Effect]:
    return plane.observed(wanted.group_id, wanted.index, wanted.episode, said, now=now)


def play(plane: RolloutPlane, answer: Answer, said: Observed, node: NodeId = ALICE) -> list[Effect]:
    """Hand in a turn and have it answered."""
    return observe(plane, draw(plane, answer, node), said)


def says(*tokens: int, reward: float = 0.0, done: bool = False, seat: int = 0) -> Observed:
    return Observed(token_ids=ints(*tokens), rewards=(reward,), done=done, exact=done, seat=seat)


def of_kind(effects: Sequence[Effect], kind: type) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def begun(plane: RolloutPlane) -> tuple[Lease, list[Effect]]:
    """What ALICE is leased first, and the effects until then."""
    *records, granted = plane.ask(ALICE, v(0), 1, now=0.0)
    assert isinstance(granted, Granted)
    return granted.leases[0], records


def first_step(plane: RolloutPlane) -> StepWanted:
    """What an environment that begins is asked first."""
    *begun, _ = plane.ask(ALICE, v(0), 1, now=0.0)
    (wanted,) = [effect for effect in begun if isinstance(effect, StepWanted)]
    return wanted


def ended(effects: Sequence[Effect]) -> tuple[Rollout, Score]:
    """What an episode became."""
    accepted, scored, *_ = effects
    assert isinstance(accepted, RolloutAccepted)
    assert isinstance(scored, RolloutScored)
    return accepted.rollout, scored.score


def program(turns: int) -> tuple[RolloutPlane, Lease]:
    """An episode that a program plays, and the lease of its first conversation."""
    plane = plane_of(EpisodeRules(max_turns=turns, max_tokens=40, begins=True))
    observe(plane, first_step(plane), Observed(token_ids=ints(5, 6), seat=1))
    return plane, ask(plane, ALICE, 0, 1)[0]


def verdict(plane: RolloutPlane, answer: Answer, node: NodeId = ALICE) -> tuple[str, str]:
    (judged,) = [one for one in plane.submit(node, answer, now=0.0) if isinstance(one, Judged)]
    return judged.verdict, judged.detail


def test_a_sampler_plays_an_episode_under_one_lease_and_it_becomes_one_rollout() -> None:
    plane = plane_of()
    (lease,) = ask(plane, ALICE, 0, 1)
    assert lease.episode == EpisodeProgress(max_tokens=40)
    first = turn(lease, 0, 4)
    wanted = draw(plane, first)
    assert (wanted.drawn, wanted.node, wanted.newest) == ((ints(4, STOP),), ALICE, first.rollout)
    said = says(7, 8, reward=0.25)
    assert observe(plane, wanted, said) == [TurnTaken(number=0, turn=0, node=ALICE, drawn=first.rollout, said=said)]
    assert plane.next_of(ALICE, first) == said
    assert plane.leased.held_by(ALICE) == {("t0", 0)}
    second = turn(lease, 1, 5)
    one, score = ended(play(plane, second, says(9, reward=0.5, done=True)))
    assert plane.next_of(ALICE, second) == Observed(done=True)
    assert one.token_ids == ints(4, STOP, 7, 8, 5, STOP, 9)
    assert one.logprobs == floats(-0.5, -0.5, 0.0, 0.0, -0.5, -0.5, 0.0)
    assert one.turns == (Turn(start=0, end=2, node=ALICE, reward=0.25), Turn(start=4, end=6, node=ALICE, reward=0.5))
    assert one.spans == (Span(version=v(0), start=0, end=2), Span(version=v(0), start=4, end=6))
    assert (one.finish, one.seats, one.drawn) == ("stop", (), 4)
    assert (score.reward, score.exact) == (0.75, True)
    assert plane.can_take(now=0.0)


def test_another_sampler_goes_on_from_the_last_turn_of_one_that_was_lost() -> None:
    plane = plane_of(size=2)
    (lease,) = ask(plane, ALICE, 0, 2)
    play(plane, turn(lease, 0, 4), says(7))
    plane.leave(ALICE)
    fresh, begun = ask(plane, BOB, 0, 2)
    assert (fresh.samples[0].index, fresh.episode) == (1, EpisodeProgress(max_tokens=40))
    assert begun.samples == lease.samples[:1], "from the same seed"
    assert begun.episode == EpisodeProgress(max_tokens=40, turn=1, streams=(ints(4, STOP, 7),))
    accepted, *_ = play(plane, turn(begun, 1, 5), says(done=True), BOB)
    assert isinstance(accepted, RolloutAccepted)
    one = accepted.rollout
    assert [(each.node, reads_of(one, each, PROMPT)) for each in one.turns] == [
        (ALICE, PROMPT),
        (BOB, (*PROMPT, 4, STOP, 7)),
    ]
    assert [part_of(one, each).token_ids for each in one.turns] == [ints(4, STOP), ints(5, STOP)]
    assert accepted.node == BOB


def test_an_episode_whose_sampler_is_lost_while_it_thinks_waits_once_it_is_answered() -> None:
    plane = plane_of(bound=0)
    (lease,) = ask(plane, ALICE, 0, 1)
    wanted = draw(plane, turn(lease, 0))
    plane.leave(ALICE)
    assert refusal(plane, BOB, 0) == "paced"
    chances = plane.leased.chances
    observe(plane, wanted, says(7))
    assert plane.leased.chances > chances
    assert ask(plane, BOB, 0, 1)[0].episode == EpisodeProgress(max_tokens=40, turn=1, streams=(ints(4, STOP, 7),))


def test_a_turn_that_is_handed_in_again_is_answered_as_before() -> None:
    plane = plane_of()
    (lease,) = ask(plane, ALICE, 0, 1)
    first = turn(lease, 0)
    wanted = draw(plane, first)
    assert plane.is_taken(ALICE, first)
    observe(plane, wanted, says(7))
    assert (plane.is_taken(ALICE, first), plane.next_of(ALICE, first)) == (True, says(7))
    play(plane, turn(lease, 1), says(8))
    assert not plane.is_taken(ALICE, first), "it has been answered: its sampler asked for the next"
    assert verdict(plane, first) == ("duplicate", "this turn is drawn")
    assert plane.next_of(ALICE, first) == Observed(done=True)


def test_a_sampler_that_was_thought_lost_may_be_first_with_a_turn_and_then_has_the_episode() -> None:
    plane = plane_of(bound=0)
    (lease,) = ask(plane, ALICE, 0, 1)
    play(plane, turn(lease, 0), says(7))
    plane.leave(ALICE)
    (moved,) = ask(plane, BOB, 0, 1)
    play(plane, turn(lease, 1, 5), says(8))
    assert (plane.leased.held_by(ALICE), set(plane.leased.held_by(BOB))) == ({("t0", 0)}, set())
    late = turn(moved, 1, 6)
    assert verdict(plane, late, BOB)[0] == "duplicate"
    assert plane.next_of(BOB, late) == Observed(done=True)
    one, _ = ended(play(plane, turn(lease, 2, 6), says(done=True)))
    assert {each.node for each in one.turns} == {ALICE}


def test_turns_come_one_after_the_other_each_from_a_node_that_has_the_episode() -> None:
    plane = plane_of()
    (lease,) = ask(plane, ALICE, 0, 1)
    assert verdict(plane, turn(lease, 1)) == ("stale", "this episode has begun again")
    assert verdict(plane, turn(lease, 0), BOB) == ("malformed", "this sample was not leased to this node")
    claimed = structs.replace(turn(lease, 0).rollout, turns=(Turn(start=0, end=1),))
    assert verdict(plane, Answer(claimed)) == ("malformed", "an answer is drawn in one go")
    plane.leave(ALICE)
    (lease,) = ask(plane, ALICE, 0, 1)
    draw(plane, turn(lease, 0))
    assert verdict(plane, turn(lease, 1)) == ("malformed", "its environment has not answered yet")


def test_the_last_tokens_of_an_episode_bound_a_turn() -> None:
    plane = plane_of(EpisodeRules(max_turns=5, max_tokens=5))
    (lease,) = ask(plane, ALICE, 0, 1)
    play(plane, turn(lease, 0), says(7))
    assert verdict(plane, turn(lease, 1, 4, 5)) == ("malformed", "3 tokens are more than the lease's 2")
    assert verdict(plane, turn(lease, 1, 4))[0] == "accepted"


def test_a_time_limit_is_for_a_turn_and_the_environments_time_does_not_count() -> None:
    plane = plane_of()
    plane.beat(ALICE, now=0.0, tokens_per_s=1.0)
    (lease,) = ask(plane, ALICE, 0, 1)
    wanted = draw(plane, turn(lease, 0), now=100.0)
    plane.beat(ALICE, now=1000.0)
    assert plane.tick(now=1000.0) == []
    observe(plane, wanted, says(7), now=1000.0)
    due = 1000.0 + lease.time_limit_s + LEASE_SLACK_S
    plane.beat(ALICE, now=due)
    assert plane.tick(now=due - 0.1) == []
    assert plane.tick(now=due) != []


def test_each_failure_of_a_turn_counts_once_and_others_go_on() -> None:
    """A long episode has a right to some failures."""
    plane = plane_of(bound=0)
    for node in (BOB, NodeId("carol")):
        plane.beat(node, now=0.0)
    (lease,) = ask(plane, ALICE, 0, 1)
    play(plane, turn(lease, 0), says(7))
    failed = answering(lease, failed_rollout(), 1)
    assert of_kind(plane.submit(ALICE, failed, now=0.0), GenerationFailed)
    assert not of_kind(plane.submit(ALICE, failed, now=0.0), GenerationFailed)
    assert plane.next_of(ALICE, failed) == Observed(done=True)
    assert refusal(plane, ALICE, 0) == "paced", "others have it first"
    (moved,) = ask(plane, BOB, 0, 1)
    assert (moved.episode, moved.samples[0].attempt) == (
        EpisodeProgress(max_tokens=40, turn=1, streams=(ints(4, STOP, 7),)),
        1,
    )
    play(plane, turn(moved, 1), says(8), BOB)
    plane.leave(BOB)
    assert ask(plane, ALICE, 0, 1)[0].episode is not None


def test_a_limit_of_turns_or_tokens_ends_an_episode() -> None:
    for turns, tokens, said, left in ((1, 40, says(7), (7,)), (5, 4, says(7, 8), ())):
        plane = plane_of(EpisodeRules(max_turns=turns, max_tokens=tokens))
        one, _ = ended(play(plane, turn(ask(plane, ALICE, 0, 1)[0], 0), said))
        assert (one.finish, one.token_ids) == ("length", ints(4, STOP, *left))


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


def test_an_old_turn_makes_a_group_stale_and_its_sampler_is_not_to_go_on() -> None:
    plane = plane_of(bound=0, size=2)
    (lease,) = ask(plane, ALICE, 0, 2)
    first = turn(lease, 0)
    wanted = draw(plane, first)
    observe(plane, wanted, says(7))
    plane.next_batch = 1
    dropped = [effect for effect in plane.set_bound(0) if isinstance(effect, GroupDropped)]
    assert [one.reason for one in dropped] == ["stale"]
    assert observe(plane, wanted, says(7)) == []
    assert plane.next_of(ALICE, first) == Observed(done=True)


def test_a_fresh_episode_goes_on_though_its_group_was_opened_for_an_old_version() -> None:
    plane = plane_of(bound=1)
    (lease,) = ask(plane, ALICE, 0, 1)
    plane.published(v(1))
    plane.next_batch = 2
    wanted = draw(plane, turn(lease, 0, version=1))
    assert plane.set_bound(1) == []
    observe(plane, wanted, says(7))
    plane.leave(ALICE)
    assert ask(plane, BOB, 1, 1)[0].group_id == lease.group_id


def test_players_have_streams_of_their_own_and_are_rewarded_for_their_last_turns() -> None:
    plane = plane_of()
    (lease,) = ask(plane, ALICE, 0, 1)
    play(plane, turn(lease, 0, 4), Observed(token_ids=ints(9, 9), seat=1, rewards=(0.25, 8.0)))
    plane.leave(ALICE)
    (moved,) = ask(plane, BOB, 0, 1)
    assert moved.episode == EpisodeProgress(max_tokens=40, turn=1, seat=1, streams=(ints(4, STOP), ints(9, 9)))
    one, score = ended(play(plane, turn(moved, 1, 5), Observed(rewards=(-1.0, 1.0), done=True), BOB))
    assert (one.token_ids, one.seats) == (ints(4, STOP, 9, 9, 5, STOP), (0, 2))
    assert one.spans == (Span(version=v(0), start=0, end=2), Span(version=v(0), start=4, end=6))
    assert [(each.start, each.end, each.seat, each.reward) for each in one.turns] == [(0, 2, 0, -0.75), (4, 6, 1, 1.0)]
    assert (score.reward, score.parts) == (-0.75, {"reward_of_player_2": 1.0})
    assert [reads_of(one, each, PROMPT) for each in one.turns] == [PROMPT, (9, 9)]


def test_an_environment_that_begins_says_what_is_read_first() -> None:
    plane = plane_of(EpisodeRules(max_turns=3, max_tokens=40, begins=True))
    wanted = first_step(plane)
    assert (wanted.drawn, wanted.node) == ((), None)
    assert refusal(plane, ALICE, 0) == "paced"
    assert observe(plane, wanted, Observed(token_ids=ints(5, 6), seat=1)) == []
    (lease,) = ask(plane, ALICE, 0, 1)
    assert lease.episode == EpisodeProgress(max_tokens=40, seat=1, streams=(b"", ints(5, 6)))
    assert draw(plane, turn(lease, 0)).newest == rollout(group_id="t0", tokens=(4, STOP))
    held_out = plane.evaluate(v(0), [prompt(0), prompt(1)])
    assert [(one.group_id, one.index, one.drawn) for one in held_out] == [("e0.1-0", 0, ()), ("e0.1-1", 0, ())]


def test_a_turn_is_held_to_the_limits_that_its_program_set() -> None:
    plane = plane_of(EpisodeRules(max_turns=5, max_tokens=40, begins=True))
    short = TurnLimits(max_new_tokens=2, stop=("x",))
    observe(plane, first_step(plane), Observed(token_ids=ints(5, 6), seat=1, limits=short))
    (lease,) = ask(plane, ALICE, 0, 1)
    assert lease.episode == EpisodeProgress(max_tokens=40, seat=1, streams=(b"", ints(5, 6)), limits=short)
    assert verdict(plane, turn(lease, 0, 4, 4)) == ("malformed", "3 tokens are more than the lease's 2")
    (lease,) = ask(plane, BOB, 0, 1)
    stopped = structs.replace(rollout(group_id="t0", tokens=(4,)), finish="stop")  # By a string that only it has
    wanted = draw(plane, answering(lease, stopped, 0), BOB)
    observe(plane, wanted, Observed(token_ids=ints(7), seat=1))
    went_on = plane.next_of(BOB, answering(lease, stopped, 0))
    assert went_on is not None
    assert went_on.limits == TurnLimits()
    assert verdict(plane, answering(lease, stopped, 1), BOB)[1] == "finished by a stop token that is not there"


def test_the_conversations_of_a_program_are_one_player_with_one_reward() -> None:
    plane, lease = program(5)
    play(plane, turn(lease, 0), Observed(token_ids=ints(7), seat=2))
    end = Observed(rewards=(0.0, 0.5, 0.5), done=True, parts={"forks": 1.0})
    one, score = ended(play(plane, turn(lease, 1), end))
    assert [(each.seat, each.reward) for each in one.turns] == [(1, 0.5), (2, 0.5)]
    assert (score.reward, score.parts) == (0.5, {"forks": 1.0})


def test_conversations_that_a_limit_ended_have_all_that_was_given_so_far() -> None:
    plane, lease = program(2)
    play(plane, turn(lease, 0), Observed(token_ids=ints(7), seat=2, rewards=(0.0, 0.25)))
    one, score = ended(play(plane, turn(lease, 1), Observed(token_ids=ints(7), seat=1, rewards=(0.0, 0.0, 0.5))))
    assert one.finish == "length"
    assert [(each.seat, each.reward) for each in one.turns] == [(1, 0.75), (2, 0.75)]
    assert score.reward == 0.75


def test_held_out_prompts_are_played_too_and_nothing_of_them_is_recorded() -> None:
    plane = plane_of()
    plane.end("draining")
    plane.evaluate(v(0), [prompt(9)])
    (lease,) = ask(plane, ALICE, 0, 1)
    assert (lease.purpose, lease.rules.temperature) == ("eval", 0.0)
    assert play(plane, turn(lease, 0), says(7)) == []
    (done,) = play(plane, turn(lease, 1), says(reward=1.0, done=True))
    assert isinstance(done, Evaluated)
    assert done.scores[0][0].exact


def test_what_a_barred_node_drew_any_turn_of_is_drawn_by_others_from_the_beginning() -> None:
    plane = plane_of()
    (lease,) = ask(plane, ALICE, 0, 1)
    play(plane, turn(lease, 0), says(7))
    plane.leave(ALICE)
    (moved,) = ask(plane, BOB, 0, 1)
    assert plane.bar(ALICE, "lied") == [RolloutReturned(number=0, index=0)]
    assert verdict(plane, turn(moved, 1), BOB) == ("stale", "this episode has begun again")
    plane.leave(BOB)
    (again,) = ask(plane, BOB, 0, 1)
    assert (again.episode, again.samples[0].attempt) == (EpisodeProgress(max_tokens=40), 1)
    play(plane, turn(again, 0, 6), says(7), BOB)
    assert verdict(plane, turn(moved, 1), BOB)[0] == "stale", "though it is this turn's number"


# -- another life of the learner ---------------------------------------------------------------------------------


def never(rule: str, what: str) -> NoReturn:
    raise AssertionError(f"{rule}: {what}")


def later(plane: RolloutPlane, effects: Sequence[Effect]) -> tuple[RolloutPlane, list[Effect]]:
    """The plane of the next life, which knows the records among `effects`."""
    ledger = Ledger(1, never)
    ledger.read([one for one in effects if isinstance(one, Record)])
    found = RolloutPlane(replace(plane.rules, life=1), prompts=prompt)
    said = found.restore(ledger.run(), now=100.0)
    found.published(v(0))
    return found, said


def test_the_next_life_goes_on_from_the_last_recorded_turn() -> None:
    plane = plane_of(bound=0)
    lease, records = begun(plane)
    records += play(plane, turn(lease, 0, 4), says(7, reward=0.5))
    draw(plane, unanswered := turn(lease, 1, 5))
    restored, effects = later(plane, records)
    assert effects == []
    assert restored.leased.held_by(ALICE) == {("t0", 0)}
    first = turn(lease, 0, 4)
    told = restored.is_taken(ALICE, first), restored.next_of(ALICE, first)
    assert told == (True, says(7, reward=0.5)), "it was recorded, and perhaps not answered"
    assert draw(restored, unanswered).drawn == (ints(4, STOP), ints(5, STOP))
    restored.leave(ALICE)
    assert refusal(restored, BOB, 0, now=100.0) == "paced"


def test_an_episode_of_which_no_turn_is_recorded_begins_again() -> None:
    """Nobody can tell its leases from those of an attempt that was given up."""
    plane = plane_of(bound=0)
    lease, records = begun(plane)
    restored, _ = later(plane, records)
    assert restored.leased.held_by(ALICE) == ()
    assert verdict(restored, turn(lease, 0))[0] == "stale"
    assert ask(restored, BOB, 0, 1, now=100.0)[0].samples[0].attempt == 1


def test_an_episode_that_a_program_plays_begins_again() -> None:
    plane = plane_of(EpisodeRules(max_turns=3, max_tokens=40, begins=True))
    *records, _ = plane.ask(ALICE, v(0), 1, now=0.0)
    (begin,) = of_kind(records, StepWanted)
    assert isinstance(begin, StepWanted)
    observe(plane, begin, Observed(token_ids=ints(5, 6), seat=1))
    lease, more = begun(plane)
    records += [*more, *play(plane, turn(lease, 0), Observed(token_ids=ints(7), seat=1))]
    assert of_kind(records, TurnTaken)
    _, effects = later(plane, records)
    assert [type(one) for one in effects] == [RolloutReturned, StepWanted]


def test_an_episode_on_record_without_a_score_begins_once_in_the_next_life() -> None:
    """The learner died between the two records."""
    plane = plane_of()
    lease, records = begun(plane)
    accepted, scored, *_ = play(plane, turn(lease, 0), says(done=True))
    assert isinstance(scored, RolloutScored)
    _, effects = later(plane, [*records, accepted])
    assert effects == [RolloutReturned(number=0, index=0)]


# -- the room of an answer -----------------------------------------------------------------------------------------


def test_streams_and_prompts_fit_into_a_reply_together() -> None:
    plane = plane_of(size=3)
    (lease,) = ask(plane, ALICE, 0, 3)
    for index in range(3):
        play(plane, turn(lease, 0, index=index), says(7))
    plane.leave(ALICE)
    plane.beat(BOB, now=0.0)
    (group,) = plane.leased.groups()
    given = plane.leased.claim(group, BOB, 3, now=0.0, max_tokens=len(PROMPT) + 3 + 1)
    assert [one.samples[0].index for one in given] == [0, 1]


def test_no_group_is_opened_that_has_no_room_in_the_answer() -> None:
    long = Prompt(prompt_id="long", text="", answer="", token_ids=(1,) * (MAX_LEASED_TOKENS * 2 // 3))
    plane = RolloutPlane(new_plane(max_staleness=2, groups=4, size=1).rules, prompts=lambda number: long)
    plane.published(v(0))
    *records, answer = plane.ask(ALICE, v(0), 4, now=0.0)
    assert isinstance(answer, Granted)
    assert len(answer.leases) == len(of_kind(records, GroupOpened))
