"""The worker of an engine: how fast it is, from what it answers, and what is told of what it did."""

from __future__ import annotations

import heapq
from itertools import pairwise
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.rollout.messages import MAX_DID
from swarm.sampler.engine import Generated, Sampled, Started
from swarm.sampler.worker import TOLD_S, TURNS, Doings, Rates


def sampled(tokens: int) -> Sampled:
    return Sampled(token_ids=b"\0" * 4 * tokens, logprobs=b"", spans=(), finish="stop")


def one(tokens: int, seconds: float) -> Generated:
    return Generated(samples=(sampled(tokens),), seconds=seconds, steps=tokens)


def test_the_rate_at_full_load_is_that_of_a_full_batch_and_of_what_lies_between() -> None:
    """Two samples in a second, of ten that would have taken as long, after a quarter of a second for an install."""
    rates = Rates(10)
    rates.batch(Generated(samples=(sampled(5),) * 2, seconds=1.0, steps=5), 0.25)
    assert (rates.rollouts_per_s, rates.full_rollouts_per_s) == (2.0, 8.0)


def test_a_batch_with_free_places_is_not_taken_for_a_fast_engine() -> None:
    rates = Rates(2)
    # Of lengths 1 and 3 the longest of two is 2.5 in the mean, that of one is 2: a full batch takes 1.25 times as long.
    rates.batch(Generated(samples=(sampled(1), sampled(3)), seconds=1.0, steps=3), 0.0)
    rates.batch(one(1, 0.8), 0.0)
    assert rates.full_rollouts_per_s == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(
    ("seconds", "drawing", "rollouts_per_s", "tokens_per_s"),
    [(2.0, 4, 2.0, 50.0), (2.5, 10, 4.0, 40.0)],
    ids=["four places are free", "two samples wait"],
)
def test_of_samples_that_come_and_go_the_eight_places_count(
    seconds: float, drawing: int, rollouts_per_s: float, tokens_per_s: float
) -> None:
    rates = Rates(8)
    for _ in range(100):
        rates.sample(one(100, seconds), drawing)
    assert rates.rollouts_per_s == pytest.approx(rollouts_per_s)
    assert rates.full_rollouts_per_s == pytest.approx(4.0)
    assert rates.tokens_per_s == pytest.approx(tokens_per_s)


def test_no_rate_is_known_until_samples_of_all_lengths_have_ended() -> None:
    """The first to end of samples that began together are the short ones: alone they say nothing."""
    rates = Rates(8)
    assert (rates.rollouts_per_s, rates.full_rollouts_per_s, rates.tokens_per_s) == (0.0, 0.0, 0.0)
    rates.sample(one(100, 2.0), 1)
    assert (rates.rollouts_per_s, rates.full_rollouts_per_s) == (0.0, 0.0)
    assert rates.tokens_per_s == 50.0
    rates.sample(one(100, 2.0), 1)
    assert (rates.rollouts_per_s, rates.full_rollouts_per_s) == pytest.approx((0.5, 4.0))


def test_short_samples_do_not_pass_for_a_fast_engine() -> None:
    """16 places that are always full, where each sample grows by ten tokens a second to a length from 1 to 200."""
    rates, random, places, now = Rates(16), Random(1), 16, 0.0
    drawn = [(random.randint(1, 200) / 10, 0.0) for _ in range(places)]
    for answered in range(1, 1001):
        now, began = heapq.heappop(drawn)
        rates.sample(one(round(10 * (now - began)), now - began), places)
        heapq.heappush(drawn, (now + random.randint(1, 200) / 10, now))
        if answered >= TURNS * places:
            assert rates.rollouts_per_s == pytest.approx(1.6, rel=0.4)
            assert rates.full_rollouts_per_s == pytest.approx(1.6, rel=0.4)


def test_a_completion_that_is_drawn_in_three_parts_is_one_rollout() -> None:
    """Two parts a second, as a sampler with --spot draws them: in lockstep two at a time, and side by side two of four
    places."""
    lockstep, side_by_side = Rates(2), Rates(4)
    part, last = (msgspec.structs.replace(one(100, 1.0).samples[0], finish=finish) for finish in ("handed", "stop"))
    for number in range(300):
        drawn = (part, last) if number % 3 == 1 else (part, part)
        lockstep.batch(Generated(samples=drawn, seconds=1.0, steps=100), 0.0)
        side_by_side.sample(Generated(samples=(last if number % 3 == 2 else part,), seconds=1.0, steps=100), 2)
    assert side_by_side.rollouts_per_s == pytest.approx(2 / 3, rel=0.2)
    assert side_by_side.full_rollouts_per_s == pytest.approx(4 / 3, rel=0.2)
    assert lockstep.rollouts_per_s == lockstep.full_rollouts_per_s == pytest.approx(1 / 3, rel=0.4)
    assert lockstep.tokens_per_s == pytest.approx(100.0)


def test_a_sample_that_is_refused_at_once_says_nothing() -> None:
    rates = Rates(2)
    for _ in range(2):
        rates.sample(one(100, 2.0), 1)
    refused = Sampled(token_ids=b"", logprobs=b"", spans=(), finish="failed", fault="over this engine's max_model_len")
    rates.sample(Generated(samples=(refused,), seconds=1e-5, steps=0), 1)
    assert (rates.rollouts_per_s, rates.full_rollouts_per_s, rates.tokens_per_s) == (0.5, 1.0, 50.0)


@pytest.mark.parametrize(
    ("started", "engine_class", "device_class"),
    [
        (Started(engine="transformers", device="cpu", dtype="float32"), "transformers/float32/cpu", "transformers"),
        (Started(engine="vllm", device="cuda:1", dtype="bfloat16", device_name="L4"), "vllm/bfloat16/cuda", "L4"),
        (Started("vllm", "cuda", "bfloat16", device_name="L4", precision="int8"), "vllm/int8/cuda", "L4 int8"),
        (Started(engine="mlx", device="cpu", dtype="float32", precision="int4"), "mlx/int4/cpu", "mlx int4"),
    ],
)
def test_what_rounds_its_weights_is_of_another_class_of_engine_and_of_device(
    started: Started, engine_class: str, device_class: str
) -> None:
    assert (started.engine_class, started.device_class) == (engine_class, device_class)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_one_thing_follows_another_and_what_goes_on_is_told_up_to_now_and_again() -> None:
    clock = Clock()
    doings = Doings(clock)
    for after, what in ((2.0, "wait"), (1.0, "draw"), (1.0, "draw")):
        clock.now += after
        doings.now(what)  # type: ignore[arg-type]
    clock.now += 1.0
    assert doings.take() == (("fetch", 5.0, 2.0), ("wait", 3.0, 1.0), ("draw", 2.0, 2.0))
    clock.now += 4.0
    assert doings.take() == (("draw", 4.0, 4.0),)
    assert doings.take() == ()
    clock.now += 1e8
    assert doings.take() == (("draw", TOLD_S, TOLD_S),), "what was long ago is no news"


def test_an_install_beneath_running_samples_is_its_pause_alone() -> None:
    clock = Clock()
    doings = Doings(clock)
    doings.now("draw")
    clock.now += 3.0
    doings.now("install", since_s=0.5)
    doings.now("draw")
    clock.now += 1.0
    assert doings.take() == (("draw", 4.0, 2.5), ("install", 1.5, 0.5), ("draw", 1.0, 1.0))


def test_an_install_that_began_before_the_last_beat_is_told_since_then() -> None:
    clock = Clock()
    doings = Doings(clock)
    doings.now("draw")
    doings.take()
    clock.now += 1.0
    doings.now("install", since_s=7.0)
    doings.now("wait")
    clock.now += 1.0
    assert doings.take() == (("install", 2.0, 1.0), ("wait", 1.0, 1.0))


@given(st.lists(st.tuples(st.floats(0.001, 1), st.sampled_from(("draw", "wait", "install"))), max_size=200))
def test_of_many_the_newest_are_told_without_a_gap(changes: list[tuple[float, str]]) -> None:
    clock = Clock()
    doings = Doings(clock)
    for after, what in changes:
        clock.now += after
        doings.now(what)  # type: ignore[arg-type]
    clock.now += 1.0
    told = doings.take()
    assert 1 <= len(told) <= MAX_DID
    assert abs(sum(lasted for _, _, lasted in told) - told[0][1]) < 1e-6
    assert len(told) == MAX_DID or abs(told[0][1] - (clock.now - 100.0)) < 1e-6
    assert all(one[0] != other[0] for one, other in pairwise(told))
    assert told[-1][0] == (changes[-1][1] if changes else "fetch")
