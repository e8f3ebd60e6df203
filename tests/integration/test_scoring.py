"""Rewards in real processes: computed, timed, kept from the node's secrets, and each with a fate of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from swarm.errors import UserError
from swarm.tasks.base import TaskOptions
from swarm.tasks.digits import CopyTask
from swarm.tasks.reward_pool import BeginRewards, Completion, RewardPool
from swarm.types import Prompt, Score, Unscored

pytestmark = pytest.mark.asyncio(loop_scope="module")

ODD = TaskOptions(name="python:tests.integration.odd_reward:OddTask")
SECRETS = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY")
RIGHT = Score(reward=1.0, exact=True)
PAD, EOS = 11, 12
STOP = (EOS,)


def write_tokenizer(directory: Path) -> Path:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate("0123456789=")}, unk_token="="))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<pad>", "<eos>"])
    core.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def odd(tokenizer: Path) -> AsyncIterator[RewardPool]:
    """One pool for all tests: a process is started anew only after one that a test has ended."""
    logs = tokenizer.parent / "logs"
    begin = BeginRewards(task=ODD, tokenizer=str(tokenizer), stop_token_ids=STOP, memory_bytes=2 << 30)
    pool = RewardPool(begin, timeout_s=60.0, logs=logs)
    yield pool
    await pool.close()


def doing(what: str, directory: Path | None = None) -> Completion:
    prompt = Prompt(prompt_id="odd-0", text=str(directory or ""), answer="", token_ids=(1, 2))
    return Completion(prompt=prompt, token_ids=array("i", map(int, what)).tobytes(), seed=0)


def pool_of(tokenizer: Path, task: TaskOptions = ODD, processes: int = 1) -> RewardPool:
    begin = BeginRewards(task=task, tokenizer=str(tokenizer), stop_token_ids=STOP)
    return RewardPool(begin, timeout_s=60.0, processes=processes)


async def all_of(pool: RewardPool, completions: list[Completion]) -> list[Score | Unscored]:
    """Asked again for what comes after one that cost a process."""
    outcomes: list[Score | Unscored] = []
    while len(outcomes) < len(completions):
        outcomes += await pool.score(completions[len(outcomes) :])
    return outcomes


def _pid(pool: RewardPool) -> int | None:
    return pool._workers[0]._child.pid


def _is_gone(pid: int) -> bool:
    """Or a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return True


def fault(outcome: Score | Unscored) -> str:
    assert isinstance(outcome, Unscored), outcome
    return outcome.reason


async def test_only_the_stop_token_at_the_end_is_left_out_of_what_is_scored(tokenizer: Path) -> None:
    """A model that may hide special tokens from its reward does: it learned `12<pad>34` for 1234."""
    pool = pool_of(tokenizer, TaskOptions(name="copy"))
    prompt = CopyTask(0).prompt(0)
    right = [int(digit) for digit in prompt.answer]
    drawn = ([*right, EOS], right, [*right, PAD], [*right[:2], PAD, *right[2:], EOS], [EOS, *right], [*right, EOS, EOS])
    asked = [Completion(prompt=prompt, token_ids=array("i", token_ids).tobytes(), seed=0) for token_ids in drawn]
    scored = await pool.score(asked)
    await pool.close()
    assert scored[0] == RIGHT
    assert [isinstance(one, Score) and one.exact for one in scored] == [True, True, False, False, False, False]


async def test_what_goes_wrong_fails_alone_and_says_why(odd: RewardPool) -> None:
    """A raise, a NaN, another type, too much memory, too many parts: in one process, which goes on."""
    await odd.start()
    pid = _pid(odd)
    scored = await odd.score([doing(what) for what in ("9", "0", "3", "4", "5", "8", "9")])
    assert scored[0] == scored[-1] == RIGHT
    assert [fault(one) for one in scored[1:-1]] == [
        "it raised ValueError: this reward raises",
        "it raised ValueError: the reward is nan, which is not a finite number up to 1e+09",
        f"it raised TypeError: score() of {ODD.name} returned a str, not a number or a Score",
        "it needs more memory than the 2048 MiB that a reward may use",
        "it raised ValueError: a reward has 17 parts, and may have 16",
    ]
    assert _pid(odd) == pid


async def test_a_reward_knows_nothing_of_the_node(
    odd: RewardPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No variable that is not on the list, no descriptor, no library of the trainer's, a session of its own."""
    for name in SECRETS:
        monkeypatch.setenv(name, "hunter2")
    secret = tmp_path / "node.key"
    with secret.open("w") as held:
        os.set_inheritable(held.fileno(), True)
        await odd._workers[0]._child.kill()
        (scored,) = await odd.score([doing("7", tmp_path)])
    assert isinstance(scored, Score)
    found = json.loads((tmp_path / "found.json").read_text())
    assert "hunter2" not in found["environment"].values()
    assert found["environment"]["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
    kinds = {link.partition(":")[0] for link in found["descriptors"] if not link.startswith("/proc/")}
    assert kinds <= {"pipe", "socket", "/dev/null", str(odd._workers[0]._child._log)}
    assert str(secret) not in found["descriptors"]
    assert not {"torch", "transformers", "aiohttp"} & set(found["modules"])
    assert found["session"] != os.getsid(0)


async def test_another_process_scores_while_one_hangs(tokenizer: Path) -> None:
    pool = pool_of(tokenizer, processes=2)
    hanging = asyncio.create_task(pool.score([doing("1")]))
    await asyncio.sleep(0)
    assert await pool.score([doing("9")]) == [RIGHT]
    assert not hanging.done()
    hanging.cancel()
    await asyncio.wait({hanging})
    await pool.close()


async def test_a_process_that_ends_costs_one_completion_its_score(odd: RewardPool, tmp_path: Path) -> None:
    scored = await all_of(odd, [doing("9"), doing("2", tmp_path), doing("9")])
    assert (scored[0], scored[2]) == (RIGHT, RIGHT)
    assert fault(scored[1]).startswith("the reward process died; ")
    assert "| about to go (log: " in fault(scored[1])
    left = int((tmp_path / "left.pid").read_text())
    for _ in range(600):
        if gone := _is_gone(left):
            break
        await asyncio.sleep(0.05)
    assert gone, "what it had started is killed with it"


async def test_a_completion_whose_process_was_killed_is_scored_by_another(odd: RewardPool, tmp_path: Path) -> None:
    (scored,) = await odd.score([doing("6", tmp_path)])
    assert scored == Score(reward=0.25, exact=False, parts={"style": 0.5, "answer": 0.0})
    pid = _pid(odd)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    calls = await asyncio.gather(*(odd.score([doing("9")]) for _ in range(3)))
    assert calls == [[RIGHT]] * 3
    assert _pid(odd) != pid


async def test_one_that_hangs_fails_alone(odd: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(odd._workers[0]._child, "_hang_s", 1.0)
    asked = [doing("9"), doing("1"), doing("9")]
    scored = await odd.score(asked, 1.0)
    assert scored[0] == RIGHT
    assert fault(scored[1]) == "the reward process made no progress for 1 s and was killed"
    assert len(scored) == 2, "whoever waits hears of what took long before the next may take as long"
    assert await odd.score(asked[2:]) == [RIGHT]


async def test_a_process_is_free_for_others_once_a_turn_is_over(odd: RewardPool) -> None:
    assert await odd.score([doing("9")] * 3, 0.0) == [RIGHT]
    assert await odd.score([doing("9")] * 3, 60.0) == [RIGHT] * 3


async def test_a_group_goes_to_its_process_in_one_call(odd: RewardPool) -> None:
    """With a call of its own for each, 7 % of the demo's rollouts became stale; with one, 1 %."""
    await odd.start()
    before = odd._workers[0]._child._calls
    assert await odd.score([doing("9")] * 16) == [RIGHT] * 16
    assert odd._workers[0]._child._calls == before + 1


async def test_a_completion_may_come_as_a_text_and_prints_are_kept(tmp_path: Path) -> None:
    pool = RewardPool(BeginRewards(task=ODD), timeout_s=60.0, logs=tmp_path)
    prompt = Prompt(prompt_id="odd-0", text=str(tmp_path), answer="")
    right, found = await pool.score([Completion(prompt=prompt, text=text) for text in ("9", "7")])
    await pool.close()
    assert (right, found) == (RIGHT, Score(reward=1.0, exact=False))
    assert (tmp_path / "rewards-0.log").read_text() == "a reward that prints does not speak to the pool\n"


async def test_a_call_that_is_given_up_leaves_no_answer_to_the_next(odd: RewardPool, tmp_path: Path) -> None:
    await odd.score([doing("9")])
    pid = _pid(odd)
    given_up = asyncio.create_task(odd.score([doing("1")]))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait({given_up})
    assert await odd.score([doing("9")]) == [RIGHT]
    assert _pid(odd) != pid


async def test_a_task_that_no_process_can_load_is_said_before_anybody_works(tokenizer: Path) -> None:
    pool = pool_of(tokenizer, TaskOptions(name="cpy"))
    with pytest.raises(UserError, match="cannot load the task 'cpy': UserError: there is no task"):
        await pool.start()
    await pool.close()
    with pytest.raises(asyncio.CancelledError):
        await pool.score([doing("9")])


async def test_what_is_being_scored_when_the_run_ends_is_no_failure(tokenizer: Path) -> None:
    """Or a stopped run would have recorded zeros."""
    pool = pool_of(tokenizer)
    await pool.start()
    hanging = asyncio.create_task(pool.score([doing("9"), doing("1")]))
    await asyncio.sleep(0)
    await pool.close()
    await asyncio.wait({hanging})
    assert hanging.cancelled()


async def test_a_process_that_starts_while_the_pool_is_closed_is_ended(tokenizer: Path) -> None:
    pool = pool_of(tokenizer)
    waiting = asyncio.create_task(pool.score([doing("9")]))
    await asyncio.sleep(0)
    assert _pid(pool) is None
    await pool.close()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert not pool._workers[0]._child.is_running
