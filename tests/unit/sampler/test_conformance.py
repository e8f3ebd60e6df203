"""The conformance suite over the engines that need no vLLM; tests/vllm runs it over that one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from swarm.sampler.engine import Engine
from swarm.sampler.transformers import Threaded, TransformersEngine
from tests.conformance import CHECKS, Life, begin, gives_up_what_is_under_way
from tests.scripted_engine import ScriptedEngine
from tests.unit.models import stage

pytestmark = pytest.mark.asyncio(loop_scope="module")


def mlx() -> Engine:
    pytest.importorskip("mlx_lm", reason="mlx-lm has no build for this system: bin/setup went on without it")
    from swarm.sampler.mlx.engine import MlxEngine

    return Threaded(MlxEngine())


ENGINES: dict[str, Callable[[], Engine]] = {
    "transformers": lambda: Threaded(TransformersEngine()),
    "mlx": mlx,
    "scripted": ScriptedEngine,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def life(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Life]:
    directory = tmp_path_factory.mktemp("learner")
    staged = stage(directory / "even", seed=0), stage(directory / "odd", seed=5)
    yield await begin(ENGINES[request.param](), directory, staged)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_it_does_as_every_engine_does(life: Life, check: Callable[[Life], Awaitable[None]]) -> None:
    await check(life)


@pytest.mark.parametrize("name", ENGINES)
async def test_it_gives_up_what_is_under_way(name: str, tmp_path: Path) -> None:
    staged = stage(tmp_path / "even", seed=0), stage(tmp_path / "odd", seed=5)
    await gives_up_what_is_under_way(await begin(ENGINES[name](), tmp_path, staged))
