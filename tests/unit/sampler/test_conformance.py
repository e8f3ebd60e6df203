"""The conformance suite over the engines that need no vLLM; tests/vllm runs it over that one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from swarm.sampler.engine import Engine
from swarm.sampler.transformers import Threaded, TransformersEngine
from tests.conformance import CHECKS, LONG, Life, begin, gives_up_what_is_under_way, job, tokens
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


@pytest.mark.parametrize("name", ["transformers", "apart", "mlx"])
async def test_the_tail_of_a_batch_is_handed_over_for_an_install_that_waits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is half as long again as what has ended. Others go on with it, or the same engine with the new version.
    Turns of episodes are not cut, nor is a batch of which more is left."""
    if name == "apart":
        monkeypatch.setattr("swarm.sampler.transformers.can_grow", lambda model: False)
    engine = ENGINES["mlx" if name == "mlx" else "transformers"]()
    life = await begin(engine, tmp_path, (stage(tmp_path / "even", seed=0), stage(tmp_path / "odd", seed=5)))
    version = await life.install()

    async def draw(long: int, *, is_divisible: bool = True) -> list[tuple[str, list[int]]]:
        limits = [LONG] * long + [4] * (8 - long)
        jobs = (job(60 + i, limit=limit, stops=(), is_divisible=is_divisible) for i, limit in enumerate(limits))
        drawn = await life.draw(*jobs)
        assert all([(s.version, s.end) for s in one.spans] == [(version, len(tokens(one)))] for one in drawn)
        return [(one.finish, tokens(one)) for one in drawn]

    wholes = await draw(3)
    assert {finish for finish, _ in await draw(2)} == {"length"}
    assert isinstance(engine, Threaded)
    engine._engine.haste.install_waits = True
    assert await draw(3) == wholes
    assert await draw(2, is_divisible=False) == [*wholes[:2], ("length", wholes[2][1][:4]), *wholes[3:]]
    assert await draw(2) == [
        *(("handed", whole[:6]) for _, whole in wholes[:2]),
        *(("length", w[:4]) for _, w in wholes[2:]),
    ]
