"""Environments in real processes: stepped many at once, played again where one was lost, each with its own fate."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from swarm.lead.check import reward_pool
from swarm.run.directory import write_json
from swarm.run.prompts import RECORD, TaskRecord
from swarm.settings import LeadConfig
from swarm.tasks import load_task, task_options
from swarm.tasks.base import TaskOptions
from swarm.tasks.episodes import EnvironmentTask
from swarm.tasks.reward_pool import BeginRewards, RewardPool, StepCall
from swarm.types import Observed, Unscored
from tests.integration.odd_environment import OddEnvironment
from tests.integration.test_scoring import EOS, STOP, write_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

ODD = TaskOptions(name="python:tests.integration.odd_environment:OddEnvironment")
TASK = EnvironmentTask(ODD, OddEnvironment)
PLAYS = {f"episode {n}": tuple(Random(n).choice("123456789") for _ in range(6)) for n in range(100)}
WORDS = "0123456789="


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def odd(tokenizer: Path) -> AsyncIterator[RewardPool]:
    """One pool for most tests: a process is started anew only after one that a test has ended."""
    began = datetime(2026, 1, 1)
    begin = BeginRewards(task=ODD, tokenizer=str(tokenizer), stop_token_ids=STOP, memory_bytes=2 << 30, began=began)
    pool = RewardPool(begin, timeout_s=60.0)
    yield pool
    await pool.close()


def asked(name: str, said: Sequence[str]) -> StepCall:
    drawn = tuple(array("i", [*map(WORDS.index, text), EOS]).tobytes() for text in said)
    prompt = TASK.prompt(int(name.split()[-1]) % 7)
    return StepCall(episode=name, prompt=prompt, drawn=drawn)


async def seen(pool: RewardPool, name: str, said: Sequence[str]) -> Observed:
    found = await pool.step(asked(name, said))
    assert not isinstance(found, Unscored), found
    return found


async def play(pool: RewardPool, name: str, said: Sequence[str]) -> tuple[Observed, ...]:
    """BeginRewards it, and step it turn by turn."""
    assert await seen(pool, name, ()) == Observed()
    return tuple([await seen(pool, name, said[: count + 1]) for count in range(len(said))])


async def alone(pool: RewardPool) -> list[tuple[Observed, ...]]:
    """One episode after the other."""
    return [await play(pool, name, said) for name, said in PLAYS.items()]


async def together(pool: RewardPool) -> list[tuple[Observed, ...]]:
    return await asyncio.gather(*(play(pool, name, said) for name, said in PLAYS.items()))


def pids(pool: RewardPool) -> list[int]:
    return [worker._child.pid for worker in pool._workers if worker._child.pid is not None]


def fault(outcome: object) -> str:
    assert isinstance(outcome, Unscored), outcome
    return outcome.reason


async def test_processes_killed_in_the_middle_of_episodes_change_nothing(
    odd: RewardPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each at another step: one that had died of the same step twice would have failed it."""
    expected = await alone(odd)
    child, killed, numbers = odd._workers[0]._child, list[int | None](), iter(range(10_000))
    call = child.call

    async def killing(*arguments: Any, **options: Any) -> Any:
        if next(numbers) in (150, 300):
            killed.append(child.pid)
            await child.kill()
        return await call(*arguments, **options)

    monkeypatch.setattr(child, "call", killing)
    assert await together(odd) == expected
    assert len({*killed, child.pid}) == 3


async def test_what_goes_wrong_fails_alone_and_says_why(odd: RewardPool) -> None:
    """In one process, which goes on, with the other episodes that it has. Answers that are none: unit/tasks."""
    await seen(odd, "episode 0", ("1",))
    pid = pids(odd)
    wrong = ("=0", "=8", "=5")
    tried = [odd.step(asked(f"wrong {n}", ("1", text))) for n, text in enumerate(wrong)]
    *found, right = await asyncio.gather(*tried, odd.step(asked("episode 0", ("1", "2"))))
    assert [fault(one) for one in found] == [
        "it raised ValueError: this environment raises",
        "it raised SystemExit: enough",
        "it needs more memory than the 2048 MiB that a reward may use",
    ]
    assert right == await seen(odd, "episode 0", ("1", "2"))
    assert pids(odd) == pid


async def test_environments_that_take_all_memory_together_give_it_back(odd: RewardPool) -> None:
    """One of them finds none left; after that there is room again, and what was given up is played again."""
    expected = await seen(odd, "episode 0", ("1", "2"))
    pid = pids(odd)
    names = [f"hoard {n}" for n in range(3)]
    outcomes = [await odd.step(asked(name, ("=55",))) for name in names]
    assert [isinstance(one, Unscored) for one in outcomes] == [False, True, False]
    assert await seen(odd, "episode 0", ("1", "2")) == expected
    assert pids(odd) == pid


async def test_the_settings_of_a_run_and_its_record_reach_the_environment(tmp_path: Path) -> None:
    """As `lead` makes the pool: from the run's directory, with its tokenizer, stop tokens and control reward."""
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model")
    record = TaskRecord(data_digest="", most_tokens=64, began=datetime(2026, 1, 1))
    write_json(tmp_path / RECORD, msgspec.to_builtins(record))
    config = LeadConfig(model="tiny", task="frozen-lake", rewards={"random": 1.0})
    prompt = load_task(task_options(config)).prompt(0)
    pool = reward_pool(config, tmp_path / "model", STOP, processes=1)
    first = StepCall(episode="lake", prompt=prompt, seed=7, drawn=(array("i", [5, EOS]).tobytes(),))
    found = await pool.step(first)
    await pool.close()
    assert not isinstance(found, Unscored), found
    assert found.rewards == (Random(7).random(),)
    assert found.token_ids or found.done
