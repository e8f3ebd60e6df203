"""The real vLLM in this process's front: what it draws and says of its draws, and swaps beneath running samples."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from swarm.errors import UserError
from swarm.sampler.engine import Generate, Job
from swarm.sampler.vllm.engine import VllmEngine
from swarm.types import VersionId
from tests.builders import STOP, v
from tests.conformance import CHECKS, PROMPT, Life, begin, gives_up_what_is_under_way, job, logprobs, tokens
from tests.unit.models import Staged
from tests.vllm.support import LENGTH, Signal, check_logprobs, end, staged_pair

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def life(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Life]:
    directory = tmp_path_factory.mktemp("learner")
    life = await begin(VllmEngine(), directory, staged_pair(directory))
    yield life
    assert isinstance(life.engine, VllmEngine)
    end(life.engine)


def models(life: Life) -> dict[VersionId, Staged]:
    return {v(version): life.staged[version % 2] for version in range(life.version + 1)}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_it_does_as_every_engine_does(life: Life, check: Callable[[Life], Awaitable[None]]) -> None:
    await check(life)


async def test_it_takes_on_each_sample_by_itself(life: Life) -> None:
    assert not life.started.lockstep
    assert life.started.places == 8
    assert (life.started.device, life.started.dtype) == ("cpu", "float32")


async def test_only_the_lease_s_stop_tokens_end_a_sample(life: Life) -> None:
    """2 is the end-of-sequence token of the model's own configuration."""
    await life.installed()
    free = await life.draw(*(job(seed, limit=60, temperature=2.0, stops=()) for seed in range(4)))
    assert {len(tokens(one)) for one in free} == {60}
    assert any(2 in tokens(one) for one in free)
    stopped = await life.draw(*(job(seed, limit=60, stops=(7, 9)) for seed in range(4)))
    assert {tokens(one)[-1] for one in stopped} <= {7, 9}
    assert all(len(logprobs(one)) == len(tokens(one)) for one in stopped)


async def test_a_sample_that_cannot_fit_is_a_fault_that_says_which_limit(life: Life) -> None:
    await life.installed()
    long, fits = await life.draw(job(0, limit=LENGTH), job(0, limit=LENGTH - len(PROMPT), stops=(STOP,)))
    assert long.fault == f"4 prompt tokens and {LENGTH} new ones are over this engine's max_model_len of {LENGTH}"
    assert fits.fault == ""


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        (job(0, temperature=0.001), "vLLM draws at temperatures from 0.01 to 2.0, or at 0"),
        (job(0, temperature=2.1), "vLLM draws at temperatures from 0.01 to 2.0, or at 0"),
        (job(0, prompt=(1, 14)), "token 14 of the prompt is not in the model's vocabulary"),
    ],
)
async def test_what_vllm_would_do_otherwise_is_a_fault(life: Life, asked: Job, fault: str) -> None:
    await life.installed()
    (sampled,) = await life.draw(asked)
    assert (sampled.finish, sampled.fault) == ("failed", fault)


async def test_prompts_that_do_not_fit_into_one_step_together_are_drawn_from_as_others(life: Life) -> None:
    """A step takes some 2,000 tokens. A part of a prompt, with a seed, was the end of the engine on CPUs."""
    await life.installed()
    jobs = [job(seed, prompt=(1, 3, 4, 5, 6) * 180, stops=()) for seed in range(8)]
    for asked, sampled in zip(jobs, await life.draw(*jobs), strict=True):
        check_logprobs(asked, sampled, models(life))


async def test_time_ends_one_sample_and_no_other(life: Life) -> None:
    await life.installed()
    slow = [job(seed, limit=900, stops=()) for seed in range(7)]
    answers = await asyncio.gather(
        life.draw(*slow),
        life.engine.generate(Generate((job(9, limit=900, stops=(), time_limit_s=0.05),)), lambda: None),
    )
    late = answers[1].samples[0]
    assert (late.finish, late.fault) in (("handed", ""), ("failed", "time limit"))
    assert len(tokens(late)) < 900
    assert {len(tokens(one)) for one in answers[0]} == {900}


async def test_a_swap_beneath_running_samples_splits_them_exactly(life: Life) -> None:
    await life.installed()
    drawing, jobs = Signal(), [job(seed, limit=800, stops=()) for seed in range(6)]
    running = [asyncio.create_task(life.engine.generate(Generate((one,)), drawing)) for one in jobs]
    await drawing.told()
    first = life.version
    await life.install()
    await life.install()
    for asked, answer in zip(jobs, await asyncio.gather(*running), strict=True):
        (sampled,) = answer.samples
        assert sampled.spans[0].version == v(first)
        assert len(sampled.spans) > 1
        check_logprobs(asked, sampled, models(life))


async def test_a_swap_is_proven_though_more_samples_wait_than_there_are_seats(life: Life) -> None:
    """The engine's seats are all taken, and all are samples' that go on for longer than any limit of a proof."""
    await life.installed()
    drawing, jobs = Signal(), [job(seed, limit=1000, stops=()) for seed in range(24)]
    running = [asyncio.create_task(life.engine.generate(Generate((one,)), drawing)) for one in jobs]
    await drawing.told()
    version = await life.install()
    assert not any(task.done() for task in running)
    for asked, answer in zip(jobs, await asyncio.gather(*running), strict=True):
        check_logprobs(asked, answer.samples[0], models(life))
        assert answer.samples[0].spans[-1].version == version


async def test_installs_asked_for_at_once_come_one_after_another(life: Life) -> None:
    await life.installed()
    await asyncio.gather(*(life.install() for _ in range(3)))
    (sampled,) = await life.draw(job(1))
    assert sampled.spans[0].version == v(life.version)
    check_logprobs(job(1), sampled, models(life))


async def test_a_swap_leaves_no_second_file(life: Life) -> None:
    await life.install()
    assert [path.name for path in life.staged[0].staging.parent.glob("staging*")] == ["staging.bin"]


async def test_a_store_that_cannot_be_linked_is_said_so(life: Life) -> None:
    await life.installed()
    staged = life.staged[(life.version + 1) % 2]
    # A directory of that name can be neither replaced nor linked over.
    blocked = staged.staging.with_name(f"staging.bin.{v(life.version + 1)}")
    blocked.mkdir()
    try:
        with pytest.raises(UserError, match="keep it where hard links work"):
            await life.engine.install(staged.install(life.version + 1), lambda: None)
    finally:
        blocked.rmdir()
    (sampled,) = await life.draw(job(1))
    assert sampled.spans[0].version == v(life.version)
    assert sampled.fault == ""


async def test_it_gives_up_what_is_under_way(life: Life) -> None:
    """The last of them, since nothing is drawn afterwards."""
    await gives_up_what_is_under_way(life)
