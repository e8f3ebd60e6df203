"""When an engine that draws samples side by side counts as hanging."""

from __future__ import annotations

from swarm.sampler.vllm.swap import TokenWatch


def test_only_an_engine_that_is_busy_can_hang() -> None:
    watch = TokenWatch(10)
    assert watch.due_s(now=1_000) == 10
    watch.begin(now=1_000)
    assert watch.due_s(now=1_004) == 6
    assert watch.due_s(now=1_010) <= 0
    watch.end()
    assert watch.due_s(now=1_011) == 10


def test_a_token_of_any_sample_puts_it_off_and_another_sample_does_not() -> None:
    watch = TokenWatch(10)
    watch.begin(now=0)
    watch.token(now=8)
    assert watch.due_s(now=10) == 8
    watch.begin(now=15)
    assert watch.due_s(now=15) == 3
    watch.end()
    assert watch.due_s(now=18) <= 0


def test_after_an_idle_hour_the_next_sample_has_its_full_time() -> None:
    watch = TokenWatch(10)
    watch.begin(now=0)
    watch.end()
    watch.begin(now=3_600)
    assert watch.due_s(now=3_600) == 10


def test_nothing_has_to_be_drawn_in_a_pause() -> None:
    watch = TokenWatch(10)
    watch.begin(now=0)
    watch.pause()
    assert watch.due_s(now=50) == 10
    watch.resume(now=50)
    assert watch.due_s(now=52) == 8
