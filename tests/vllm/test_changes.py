"""The words that changed, put into a real engine's weights."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from swarm.broadcast.store.changes import read_changes, write_changes
from swarm.broadcast.version.manifest import regions_of
from swarm.sampler.engine import Generate, Install, Installed
from swarm.sampler.vllm.engine import VllmEngine
from tests.builders import v
from tests.conformance import differing, job
from tests.unit.models import Staged, stage_model
from tests.vllm.support import check_logprobs, installed, staged_pair, started
from tests.vllm.test_proof import EXTENSIONS, running


def moved(staged: Staged, directory: Path) -> Staged:
    """Where one of 50 weights of every tensor is another."""
    with torch.no_grad():
        for parameter in staged.model.parameters():
            parameter += 0.1 * (torch.rand_like(parameter) < 0.02)
    return stage_model(staged.model, directory)


def changes(before: Staged, after: Staged, version: int, directory: Path) -> Install:
    changed = differing(before.staging, after.staging, before.layout, directory / "changed")
    return msgspec.structs.replace(after.install(version), since=v(version - 1), changed=str(changed))


async def check_draws(engine: VllmEngine, staged: Staged, version: int) -> None:
    asked = job(0, limit=30)
    (sampled,) = (await engine.generate(Generate((asked,)), lambda: None)).samples
    check_logprobs(asked, sampled, {v(version): staged})


@pytest.mark.long
@pytest.mark.parametrize("tied", [True, False])
async def test_an_engine_takes_the_words_that_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    """Fused ones too. It keeps all weights as they came, as GPUs do."""
    monkeypatch.setenv("ECHO_NODE_TEST_KEEP_WEIGHTS", "1")
    first, _ = staged_pair(tmp_path, tied=tied)
    async with running(f"{EXTENSIONS}.Flipping") as engine:
        await started(engine, first)
        await installed(engine, first, 0)
        before, latest = first, moved(first, tmp_path / "one")
        done = await engine.install(changes(before, latest, 1, tmp_path), lambda: None)
        assert isinstance(done, Installed), done
        assert done.proof == "changed words"
        await check_draws(engine, latest, 1)
        # What lacks a word is not what was signed: it takes all of the file.
        before, latest = latest, moved(latest, tmp_path / "two")
        asked = changes(before, latest, 2, tmp_path)
        found = dict(read_changes(asked.changed, len(regions_of(latest.layout))))
        last = max(found)
        places = found[last]
        assert places is not None
        write_changes(Path(asked.changed), len(regions_of(latest.layout)), {**found, last: places[:-1]})
        await installed(engine, latest, 1)


@pytest.mark.long
async def test_an_engine_that_packs_its_weights_takes_all_of_them(tmp_path: Path) -> None:
    first, _ = staged_pair(tmp_path)
    async with running() as engine:
        await started(engine, first)
        await installed(engine, first, 0)
        latest = moved(first, tmp_path / "one")
        done = await engine.install(changes(first, latest, 1, tmp_path), lambda: None)
        assert isinstance(done, Installed), done
        assert done.proof in ("sums and probe", "probe")
        await check_draws(engine, latest, 1)
