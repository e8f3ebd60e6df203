"""Games: what a sampler draws next of a completion or an episode, and what it does with what an environment says."""

from __future__ import annotations

from msgspec.structs import replace

from swarm.rollout.messages import Answer, Stepped
from swarm.rollout.plane.begun import begun_name
from swarm.rollout.plane.episodes import seat_seed
from swarm.sampler.engine import Sampled
from swarm.sampler.playing import Game
from swarm.types import EpisodeProgress, Lease, Span, TurnLimits
from tests.builders import STOP, floats, ints, lease, v

PROMPT = lease().prompt_token_ids


def drawn(*tokens: int) -> Sampled:
    return Sampled(ints(*tokens), floats(*[-0.5] * len(tokens)), (Span(v(1), 0, len(tokens)),), "stop")


def said(answer: Answer, *tokens: int, seat: int = 0, ended: bool = False) -> Stepped:
    group_id, index = answer.sample
    told = Stepped(group_id=group_id, index=index, turn=answer.turn, verdict="accepted", token_ids=ints(*tokens))
    return replace(told, seat=seat, ended=ended)


def games(leased: Lease) -> list[Game]:
    return [Game(leased, spec) for spec in leased.samples]


def episode(*streams: bytes, turn: int = 0, seat: int = 0, max_tokens: int = 100) -> Lease:
    progress = EpisodeProgress(max_tokens=max_tokens, turn=turn, seat=seat, streams=streams)
    return replace(lease(indices=(3,)), episode=progress)


def test_a_turn_continues_all_that_was_read_and_said_within_what_is_left() -> None:
    (game,) = games(episode(max_tokens=8))
    job = game.job()
    assert (job.prompt_token_ids, job.seed, job.rules.max_new_tokens) == (PROMPT, 3, 6)
    first = game.answer(drawn(4, STOP))
    assert (first.sample, first.turn, first.attempt) == (("t0", 3), 0, 0)
    assert game.goes_on(said(first, 7, 8))
    job = game.job()
    assert (job.prompt_token_ids, job.seed, job.rules.max_new_tokens) == ((*PROMPT, 4, STOP, 7, 8), 3, 4)
    second = game.answer(drawn(5, STOP))
    assert (second.turn, second.rollout.token_ids) == (1, ints(5, STOP))
    assert not game.goes_on(said(second, ended=True))
    part = game.answer(replace(drawn(5), finish="handed"))
    assert (part.rollout.finish, part.rollout.reason, part.rollout.token_ids) == ("failed", "time limit", b"")


def test_a_completion_goes_on_where_it_was_handed_over() -> None:
    (game,) = games(replace(lease(indices=(3,)), begun=ints(4, 9)))
    job = game.job()
    assert not game.is_episode
    assert (job.prompt_token_ids, job.seed, job.rules.max_new_tokens) == ((*PROMPT, 4, 9), 3, 4)
    answer = game.answer(drawn(5, STOP))
    assert (answer.turn, answer.rollout.token_ids) == (begun_name(ints(4, 9)), ints(5, STOP))
    (anew,) = games(lease(indices=(3,)))
    assert anew.answer(replace(drawn(5), finish="handed")).rollout.finish == "handed"


def test_a_long_completion_is_handed_over_after_portions_that_grow_unless_a_string_may_end_it() -> None:
    (game,) = games(lease(indices=(3,)))
    assert game.job(4).rules.max_new_tokens == 4
    assert game.answer(replace(drawn(5, 5, 5, 5), finish="length")).rollout.finish == "handed"
    assert game.answer(drawn(5, STOP)).rollout.finish == "stop"
    assert game.job(6).rules.max_new_tokens == 6
    assert game.answer(replace(drawn(*[5] * 6), finish="length")).rollout.finish == "length", "that was all of it"
    long = replace(lease().rules, max_new_tokens=1000)
    (game,) = games(replace(lease(indices=(3,), rules=long), begun=ints(*[4] * 800)))
    assert game.job(4).rules.max_new_tokens == 100
    (game,) = games(lease(indices=(3,), rules=replace(long, stop=("x",))))
    assert game.job(4).rules.max_new_tokens == 1000


def test_the_limits_of_a_turn_hold_for_that_turn_alone() -> None:
    progress = EpisodeProgress(max_tokens=100, limits=TurnLimits(max_new_tokens=2, stop=("x",)))
    (game,) = games(replace(lease(indices=(3,)), episode=progress))
    rules, own = lease().rules, game.job().rules
    assert (own.max_new_tokens, own.stop) == (2, (*rules.stop, "x"))
    first = game.answer(drawn(4, STOP))
    assert game.goes_on(replace(said(first, 7), limits=TurnLimits(max_new_tokens=3)))
    assert (game.job().rules.max_new_tokens, game.job().rules.stop) == (3, rules.stop)
    assert game.goes_on(said(game.answer(drawn(5, STOP)), 7))
    assert game.job().rules == rules


def test_another_player_reads_its_own_stream_and_draws_from_a_seed_of_its_own() -> None:
    (game,) = games(episode())
    assert game.goes_on(said(game.answer(drawn(4, STOP)), 9, 9, seat=1))
    job = game.job()
    assert (job.prompt_token_ids, job.seed) == ((9, 9), seat_seed(3, 1))
    assert game.goes_on(said(game.answer(drawn(5, STOP)), 7, seat=0))
    assert game.job().prompt_token_ids == (*PROMPT, 4, STOP, 7)
    (lost,) = games(episode(ints(4, STOP, 7), ints(9), turn=3, seat=1))
    assert lost.job().prompt_token_ids == (9,), "one of a lost sampler goes on where it stood"
    assert lost.answer(drawn(5, STOP)).turn == 3
