"""A sampler's engine that plays episodes with the environment in a real process, which ends with the engine."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from swarm.broadcast.version.manifest import ModelFile
from swarm.learner.tiny import tiny_tokenizer
from swarm.sampler.client import TimedLease
from swarm.sampler.engine import EngineOptions
from swarm.sampler.worker import EngineWorker
from swarm.types import Play, SamplingRules
from tests.builders import MIXED_LAYOUT, STOP, lease
from tests.publishers import Publisher
from tests.scripted_engine import ENGINE

PLAY = Play(task="frozen-lake:size=3", prompt_id="episode-7", max_turns=4, max_tokens=200)


@pytest.mark.parametrize("continuous", [False, True], ids=["lockstep", "continuous"])
async def test_an_engine_plays_episodes_to_their_end(tmp_path: Path, continuous: bool) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    files = tuple(ModelFile(name=one.name, content=one.read_bytes()) for one in (tmp_path / "tiny").iterdir())
    publisher = Publisher(tmp_path / "learner")
    held = publisher.publish(0)
    options = EngineOptions(arguments={"continuous": continuous})
    engine = EngineWorker(tmp_path / "sampler", kind="transformers", options=options, module=ENGINE)
    before = set(psutil.Process().children(recursive=True))
    try:
        await engine.launch()
        await engine.load(replace(MIXED_LAYOUT, files=files))
        await engine.install(held.head, held.table, publisher.directory / "versions" / "weights.bin")
        rules = SamplingRules(temperature=1.0, max_new_tokens=3, stop_token_ids=(STOP,))
        leased = replace(lease(indices=range(2), rules=rules), play=PLAY)
        timed = TimedLease(lease=leased, deadline=time.monotonic() + 60.0)
        if continuous:
            rollouts = [(await engine.draw(timed, spec)).rollout for spec in leased.samples]
        else:
            rollouts = [answer.rollout for answer in await engine.draw_batch([timed])]
        assert [one.index for one in rollouts] == [0, 1]
        for one in rollouts:
            assert one.reason == ""
            assert 1 <= len(one.turns) <= 4
            assert all(one.tokens()[turn.end - 1] == STOP for turn in one.turns)
            assert one.drawn == sum(span.end - span.start for span in one.spans) < one.length or len(one.turns) == 1
        assert len(set(psutil.Process().children(recursive=True)) - before) == 2
    finally:
        await engine.stop()
    assert set(psutil.Process().children(recursive=True)) <= before
