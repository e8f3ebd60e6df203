"""Rewards in real processes: computed, timed, replaced when they hang."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from swarm.tasks.copy import CopyTask
from swarm.tasks.scoring import Completion, RewardFailed, RewardPool


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate("0123456789=")}, unk_token="="))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture
def pool(tokenizer: Path) -> Iterator[RewardPool]:
    pool = RewardPool(task="copy", seed=0, reward="task", tokenizer=tokenizer, timeout_s=60.0)
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
    pool = RewardPool(task="copy", seed=0, reward="task", tokenizer=tokenizer, timeout_s=1e-6)
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
