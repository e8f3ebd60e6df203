"""Rewards in real processes: computed, timed, replaced when they hang."""

from __future__ import annotations

import asyncio
import multiprocessing
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from swarm.tasks import scoring
from swarm.tasks.base import TaskOptions
from swarm.tasks.copy import CopyTask
from swarm.tasks.scoring import Completion, RewardFailed, RewardPool
from tests.integration.dying_reward import score_after_deaths
from tests.unit.wires import until


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate("0123456789=")}, unk_token="="))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture
def pool(tokenizer: Path) -> Iterator[RewardPool]:
    pool = RewardPool(task=TaskOptions(name="copy"), reward="task", tokenizer=tokenizer, timeout_s=60.0)
    yield pool
    pool.close()


def _completion(digits: str) -> Completion:
    prompt = CopyTask(0).prompt(0)
    return Completion(prompt=prompt, token_ids=array("i", [int(d) for d in digits]).tobytes(), seed=0)


async def test_completions_are_decoded_and_scored_elsewhere(pool: RewardPool) -> None:
    answer = CopyTask(0).prompt(0).answer
    right, wrong = await pool.score([_completion(answer), _completion("")])
    assert (right.reward, right.exact) == (1.0, True)
    assert (wrong.reward, wrong.exact) == (0.0, False)


async def test_a_call_over_its_time_fails_and_the_next_one_is_computed(tokenizer: Path) -> None:
    pool = RewardPool(task=TaskOptions(name="copy"), reward="task", tokenizer=tokenizer, timeout_s=1e-6)
    answer = _completion(CopyTask(0).prompt(0).answer)
    try:
        with pytest.raises(RewardFailed, match="within"):
            await pool.score([answer] * 200_000)
        pool._timeout_s = 60.0
        (again,) = await pool.score([answer])
    finally:
        pool.close()
    assert again.exact


async def test_a_reward_that_raises_fails_its_call_alone(pool: RewardPool) -> None:
    broken = Completion(prompt=CopyTask(0).prompt(0), token_ids=b"\1\2\3", seed=0)
    with pytest.raises(RewardFailed, match="raised"):
        await pool.score([broken])
    (score,) = await pool.score([_completion(CopyTask(0).prompt(0).answer)])
    assert score.exact


def _right() -> Completion:
    return _completion(CopyTask(0).prompt(0).answer)


def _kill_worker() -> None:
    (worker,) = [child for child in multiprocessing.active_children() if child.name == "pebble_pool_worker"]
    worker.kill()
    worker.join()


@pytest.mark.parametrize("noticed", [True, False])
async def test_a_process_that_is_killed_while_idle_is_replaced(pool: RewardPool, noticed: bool) -> None:
    """Whether pebble has seen it or not; calls that come together share the new process."""
    await pool.score([_right()])
    _kill_worker()
    if noticed:
        broken = pool._pool
        await until(lambda: not broken.active)
    scores = await asyncio.gather(*(pool.score([_right()]) for _ in range(5)))
    assert [one.exact for (one,) in scores] == [True] * 5
    assert len([child for child in multiprocessing.active_children() if child.name == "pebble_pool_worker"]) == 1


async def test_a_call_whose_process_is_killed_is_made_once_more(
    pool: RewardPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "_score", partial(score_after_deaths, str(tmp_path / "deaths"), 1))
    (score,) = await pool.score([_right()])
    assert score.exact
    assert (tmp_path / "deaths").stat().st_size == 1


async def test_a_reward_that_ends_its_process_each_time_fails_its_call_alone(
    pool: RewardPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as dying:
        dying.setattr(scoring, "_score", partial(score_after_deaths, str(tmp_path / "deaths"), 100))
        with pytest.raises(RewardFailed, match="died twice"):
            await pool.score([_right()])
    assert (tmp_path / "deaths").stat().st_size == 2
    (score,) = await pool.score([_right()])
    assert score.exact


async def test_a_pool_that_was_closed_starts_no_process(tokenizer: Path) -> None:
    pool = RewardPool(task=TaskOptions(name="copy"), reward="task", tokenizer=tokenizer, timeout_s=60.0)
    pool.close()
    with pytest.raises(RewardFailed):
        await pool.score([_right()])
    assert [child for child in multiprocessing.active_children() if child.name == "pebble_pool_worker"] == []
