"""How long the engine without a model takes at a pace. The conformance suite has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.sampler.engine import Generate, Installed, Job
from swarm.types import SamplingRules
from tests import scripted_engine
from tests.scripted_engine import ScriptedEngine
from tests.unit.models import stage


def silent() -> None: ...


async def installed(directory: Path, **arguments: float) -> ScriptedEngine:
    staged, engine = stage(directory), ScriptedEngine()
    await engine.start(staged.start(places=1, arguments=arguments), silent)
    assert isinstance(await engine.install(staged.install(), silent), Installed)
    return engine


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
