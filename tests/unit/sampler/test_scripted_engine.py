"""The engine without a model: worthless answers, but well-formed ones, and weights that are proven."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.broadcast.version.codec import tensor_sum
from swarm.rollout.plane.verdict import token_fault
from swarm.sampler.engine import EngineOptions, Generate, Install, Installed, Job, Start
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


class Clock:
    """Stands for the module `time`: sleeping takes no time but its own."""

    now = 0.0

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


def jobs(*limits_s: float, tokens: int = 40, stops: tuple[int, ...] = ()) -> tuple[Job, ...]:
    rules = SamplingRules(temperature=1.0, max_new_tokens=tokens, stop_token_ids=stops)
    return tuple(
        Job(prompt_token_ids=(1, 3), seed=seed, rules=rules, time_limit_s=limit_s)
        for seed, limit_s in enumerate(limits_s)
    )


async def test_at_a_pace_a_batch_takes_as_long_as_its_longest_sample(tmp_path: Path, clock: Clock) -> None:
    engine, said = await installed(tmp_path, tokens_per_s=4.0), list[None]()
    asked = Generate(jobs=jobs(*[600.0] * 20, tokens=60, stops=(2,)))
    done = await engine.generate(asked, lambda: said.append(None))
    longest = max(len(sampled.token_ids) // 4 for sampled in done.samples)
    assert done.seconds == pytest.approx(longest / 4.0)
    assert done.steps == longest > 6
    assert len(said) >= int(done.seconds)


async def test_at_a_pace_what_takes_too_long_fails_at_its_limit(tmp_path: Path, clock: Clock) -> None:
    engine, asked = await installed(tmp_path, tokens_per_s=4.0), jobs(20.0, 5.0)
    done = await engine.generate(Generate(jobs=asked), silent)
    assert [(one.finish, one.fault) for one in done.samples] == [("length", ""), ("failed", "time limit")]
    assert done.seconds == pytest.approx(10.0)
    assert (await engine.generate(Generate(jobs=asked[1:]), silent)).seconds == pytest.approx(5.0)
