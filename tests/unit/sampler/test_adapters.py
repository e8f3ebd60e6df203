"""How an engine that draws in batches takes adapters: as the learner has them, next to a base that it reads once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarm.broadcast.version.manifest import trained_spans
from swarm.learner.tiny import tiny_model
from swarm.sampler.engine import Generate, Installed, NotInstalled
from swarm.sampler.transformers import Blocking, Threaded, TransformersEngine
from tests.builders import v
from tests.conformance import PROMPT, job, logprobs, tokens
from tests.unit.models import Staged, adapted_model, logprobs_of, published, stage_model


def mlx() -> Blocking:
    pytest.importorskip("mlx_lm", reason="mlx-lm has no build for this system: bin/setup went on without it")
    from swarm.sampler.mlx.engine import MlxEngine

    return MlxEngine()


ENGINES: dict[str, Callable[[], Blocking]] = {"transformers": TransformersEngine, "mlx": mlx}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Blocking:
    return ENGINES[request.param]()


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Staged, Staged]:
    """Two versions of a run that trains an adapter."""
    first, second = (stage_model(adapted_model(drawn=drawn), tmp_path / str(drawn)) for drawn in range(2))
    assert first.layout == second.layout
    return first, second


def silent() -> None: ...


def error_against(model: Any, engine: Blocking, temperature: float = 1.3) -> float:
    """The largest difference of a log-prob from the model's own."""
    jobs = tuple(job(seed, prompt=PROMPT[: 2 + seed % 3], temperature=temperature, stops=()) for seed in range(6))
    drawn = engine.generate(Generate(jobs=jobs), silent).samples
    return max(
        abs(one - other)
        for asked, sampled in zip(jobs, drawn, strict=True)
        for one, other in zip(
            logprobs(sampled),
            logprobs_of(model, asked.prompt_token_ids, tokens(sampled), temperature=temperature),
            strict=True,
        )
    )


def test_it_draws_with_an_adapter_as_the_learner_does_and_takes_the_next_one(
    engine: Blocking, pair: tuple[Staged, Staged]
) -> None:
    first, second = pair
    engine.start(first.start(places=8), silent)
    for version, staged in enumerate((first, second, first)):
        assert engine.install(staged.install(version), silent) == "sums"
        assert error_against(published(staged.model), engine) < 1e-4
        assert error_against(published(tiny_model(0)), engine) > 1e-2


async def test_what_is_frozen_is_read_and_proven_once_and_a_torn_adapter_is_refused(
    engine: Blocking, pair: tuple[Staged, Staged]
) -> None:
    """Later versions come from a file whose base is not even looked at; their adapter is proven as ever."""
    (first, second), threaded = pair, Threaded(engine)
    await threaded.start(first.start(places=8), silent)
    assert isinstance(await threaded.install(first.install(), silent), Installed)
    (adapter,) = trained_spans(first.layout.tensors)
    content = second.staging.read_bytes()
    second.staging.write_bytes(bytes(adapter.start) + content[adapter.start :])
    assert isinstance(await threaded.install(second.install(1), silent), Installed)
    assert error_against(published(second.model), engine) < 1e-4
    second.staging.write_bytes(bytes(adapter.start) + content[adapter.start : -1] + b"?")
    refused = await threaded.install(second.install(2), silent)
    assert isinstance(refused, NotInstalled)
    assert refused.fault == "file"
    # A file that was whole when it was checked. From here on nothing is held, and the base is read again.
    proven = msgspec.structs.replace(second.install(2), proven=True)
    for name in ("lora_B", "embed_tokens"):
        refused = await threaded.install(proven, silent)
        assert isinstance(refused, NotInstalled)
        assert name in refused.why
    assert isinstance(await threaded.install(first.install(3), silent), Installed)
    assert error_against(published(first.model), engine) < 1e-4


async def test_an_adapter_that_comes_while_a_batch_is_drawn_waits_for_its_end(
    engine: Blocking, pair: tuple[Staged, Staged]
) -> None:
    (first, second), threaded = pair, Threaded(engine)
    await threaded.start(first.start(places=8), silent)
    await threaded.install(first.install(), silent)
    has_begun, may_go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def step() -> None:
        loop.call_soon_threadsafe(has_begun.set)
        assert may_go_on.wait(30)

    asked = job(1, stops=())
    drawing = asyncio.create_task(threaded.generate(Generate(jobs=(asked,)), step))
    await has_begun.wait()
    installing = asyncio.create_task(threaded.install(second.install(1), silent))
    await asyncio.sleep(0)
    may_go_on.set()
    before, done = (await drawing).samples[0], await installing
    assert isinstance(done, Installed)
    after = (await threaded.generate(Generate(jobs=(asked,)), silent)).samples[0]
    for version, (staged, sampled) in enumerate(((first, before), (second, after))):
        assert [span.version for span in sampled.spans] == [v(version)]
        expected = logprobs_of(published(staged.model), PROMPT, tokens(sampled))
        assert logprobs(sampled) == pytest.approx(expected, abs=1e-4)
