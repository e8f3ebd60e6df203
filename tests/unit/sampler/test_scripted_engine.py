"""The engine without a model: worthless answers, but well-formed ones, and weights that are proven."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.broadcast.version.codec import tensor_sum
from swarm.rollout.plane.verdict import token_fault
from swarm.sampler.engine import EngineOptions, Generate, Generated, Install, Installed, Job, Start
from swarm.sampler.playing import Game
from swarm.types import SamplingRules
from tests import scripted_engine
from tests.builders import MIXED_LAYOUT, VOCAB, lease, v, weights_of
from tests.scripted_engine import ScriptedEngine


def silent() -> None: ...


async def installed(directory: Path, **arguments: float) -> ScriptedEngine:
    weights = weights_of(MIXED_LAYOUT, 3)
    sums, at = [], 0
    for tensor in MIXED_LAYOUT.tensors:
        sums.append(tensor_sum(weights[at : at + tensor.nbytes]))
        at += tensor.nbytes
    path = directory / "weights"
    path.write_bytes(weights)
    engine = ScriptedEngine()
    options = EngineOptions(places=1, arguments=arguments)
    command = Start(directory=str(directory), layout=MIXED_LAYOUT, options=options)
    await engine.start(command, silent)
    done = await engine.install(Install(version=v(4), path=str(path), tensor_sums=tuple(sums)), silent)
    assert isinstance(done, Installed)
    return engine


@pytest.mark.parametrize("stops", [(2,), ()])
async def test_its_answers_are_well_formed(tmp_path: Path, stops: tuple[int, ...]) -> None:
    rules = SamplingRules(temperature=1.0, max_new_tokens=6, stop_token_ids=stops)
    one = lease(indices=range(20), rules=rules, min_version=v(4))
    jobs = tuple(
        Job(prompt_token_ids=one.prompt_token_ids, seed=spec.seed, rules=rules, time_limit_s=60.0)
        for spec in one.samples
    )
    engine = await installed(tmp_path)
    first = (await engine.generate(Generate(jobs=jobs), silent)).samples
    faults = [
        token_fault(Game(one, spec).answer(sampled).rollout, VOCAB)
        for spec, sampled in zip(one.samples, first, strict=True)
    ]
    assert faults == [""] * 20
    assert (await engine.generate(Generate(jobs=jobs), silent)).samples == first, "a sample depends on its seed alone"


async def test_it_tells_how_many_tokens_it_drew_one_after_another(tmp_path: Path) -> None:
    rules = SamplingRules(temperature=1.0, max_new_tokens=60, stop_token_ids=(2,))
    jobs = tuple(Job(prompt_token_ids=(1, 3), seed=seed, rules=rules, time_limit_s=60.0) for seed in range(20))
    done = await (await installed(tmp_path)).generate(Generate(jobs=jobs), silent)
    assert done.steps == max(len(sampled.token_ids) // 4 for sampled in done.samples) > 6


class Clock:
    """Stands for the module `time`: sleeping takes no time but its own."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(scripted_engine, "time", clock)
    monkeypatch.setattr(scripted_engine, "sleep", clock.sleep)
    return clock


async def paced(directory: Path, jobs: tuple[Job, ...]) -> tuple[Generated, int]:
    """What an engine gives at 4 tokens a second, and how often it said meanwhile that it is alive."""
    said = 0

    def progress() -> None:
        nonlocal said
        said += 1

    engine = await installed(directory, tokens_per_s=4.0)
    return await engine.generate(Generate(jobs=jobs), progress), said


async def test_at_a_pace_a_batch_takes_as_long_as_its_longest_sample(tmp_path: Path, clock: Clock) -> None:
    rules = SamplingRules(temperature=1.0, max_new_tokens=60, stop_token_ids=(2,))
    jobs = tuple(Job(prompt_token_ids=(1, 3), seed=seed, rules=rules, time_limit_s=600.0) for seed in range(20))
    done, said = await paced(tmp_path, jobs)
    longest = max(len(sampled.token_ids) // 4 for sampled in done.samples)
    assert done.seconds == pytest.approx(longest / 4.0)
    assert done.steps == longest
    assert said >= int(done.seconds)


async def test_at_a_noisy_pace_batches_take_up_to_that_share_more_or_less(tmp_path: Path, clock: Clock) -> None:
    rules = SamplingRules(temperature=1.0, max_new_tokens=40, stop_token_ids=())
    engine = await installed(tmp_path, tokens_per_s=4.0, noise=0.1)
    jobs = [Job(prompt_token_ids=(1, 3), seed=seed, rules=rules, time_limit_s=600.0) for seed in range(50)]
    took_s = [(await engine.generate(Generate(jobs=(job,)), silent)).seconds for job in jobs]
    assert 9.0 <= min(took_s) < 9.3
    assert 10.7 < max(took_s) <= 11.0


async def test_at_a_pace_what_takes_too_long_fails_at_its_limit(tmp_path: Path, clock: Clock) -> None:
    rules = SamplingRules(temperature=1.0, max_new_tokens=40, stop_token_ids=())
    limits = (20.0, 5.0)
    jobs = tuple(Job(prompt_token_ids=(1, 3), seed=1, rules=rules, time_limit_s=limit_s) for limit_s in limits)
    done, _ = await paced(tmp_path, jobs)
    assert [(one.finish, one.fault) for one in done.samples] == [("length", ""), ("failed", "time limit")]
    assert done.seconds == pytest.approx(10.0)
    done, _ = await paced(tmp_path, jobs[1:])
    assert done.seconds == pytest.approx(5.0)
