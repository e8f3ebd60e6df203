"""The trial at join and the places that fit: figures against arithmetic by hand, on a clock that the test sets."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from swarm.broadcast.version.manifest import Layout, ModelFile, TensorSpec
from swarm.errors import ChildFailed
from swarm.sampler.engine import EngineOptions, Generate, Generated, Sampled, Start, Started
from swarm.sampler.scripted_engine import ScriptedEngine
from swarm.sampler.trial import (
    ENTRIES,
    ROUNDS,
    Trial,
    TrialCache,
    assumed_rollouts_per_s,
    cache_key,
    lengths_in,
    rate_of,
    try_out,
)


def layout_with(**config: object) -> Layout:
    spec = TensorSpec(name="model.embed_tokens.weight", dtype="BF16", shape=(50, 8))
    return Layout(tensors=(spec,), files=(ModelFile(name="config.json", content=json.dumps(config).encode()),))


TINY = layout_with(num_hidden_layers=28)


@dataclass
class Machine:
    """The scripted engine on a machine that takes `token_s` for a token of each sample, and `compile_s` more the first
    time. Jobs end by their time limits."""

    started: Started
    token_s: float
    compile_s: float = 0.0
    begun_at: float = 100.0
    now: float = 100.0
    calls: list[Generate] = field(default_factory=list)
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)

    @classmethod
    async def begun(cls, token_s: float, *, places: int = 4, lockstep: bool = True, compile_s: float = 0.0) -> Machine:
        engine = ScriptedEngine()
        options = EngineOptions(places=places, arguments={} if lockstep else {"continuous": True})
        start = Start(directory="", layout=TINY, options=options)
        started = await engine.start(start, lambda: None)
        started = msgspec.structs.replace(started, vocab_size=50, context_tokens=4096)
        return cls(started=started, token_s=token_s, compile_s=compile_s, engine=engine)

    async def __call__(self, call: Generate) -> Generated:
        self.calls.append(call)
        began = self.now
        # Samples that are begun side by side begin at one time.
        await asyncio.sleep(0)
        generated = await self.engine.generate(call, lambda: None)
        took_s = generated.steps * self.token_s + (self.compile_s if began == self.begun_at else 0.0)
        limit_s = call.jobs[0].time_limit_s
        self.now = max(self.now, began + min(took_s, limit_s))
        if took_s <= limit_s:
            return generated
        failed = Sampled(token_ids=b"", logprobs=b"", spans=(), finish="failed", fault="time limit")
        steps = int(limit_s / self.token_s)
        return msgspec.structs.replace(generated, samples=(failed,) * len(call.jobs), steps=steps)

    async def tried_out(self, cache: TrialCache, *, limit_s: float = 30.0) -> Trial:
        return await try_out(self, self.started, TINY, cache, limit_s=limit_s, clock=lambda: self.now)


@pytest.fixture
def cache(tmp_path: Path) -> TrialCache:
    return TrialCache(tmp_path / "trials.json")


# -- what is measured ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lockstep", [True, False])
async def test_the_figure_is_of_all_places_together_and_without_what_is_compiled_first(
    cache: TrialCache, lockstep: bool
) -> None:
    machine = await Machine.begun(0.01, places=4, lockstep=lockstep, compile_s=5.0)
    trial = await machine.tried_out(cache)
    assert trial.tokens_per_s == pytest.approx(400.0)
    assert trial.places == 4
    assert trial.seconds == pytest.approx(5.0 + 0.01 * (4 + 4 + 16 + 64 + 64))


async def test_an_engine_in_lockstep_gets_one_call_and_another_one_for_each_place(cache: TrialCache) -> None:
    together = await Machine.begun(0.01, places=3)
    await together.tried_out(cache)
    assert [len(call.jobs) for call in together.calls] == [3] * 5
    apart = await Machine.begun(0.01, places=2, lockstep=False)
    await apart.tried_out(cache)
    assert [len(call.jobs) for call in apart.calls] == [1] * 10
    assert all(call.trial for call in (*together.calls, *apart.calls))


async def test_prompts_are_in_the_vocabulary_and_fit_the_context_with_what_is_drawn(cache: TrialCache) -> None:
    machine = await Machine.begun(0.01, places=2)
    machine.started = msgspec.structs.replace(machine.started, context_tokens=48)
    await machine.tried_out(cache)
    jobs = [job for call in machine.calls for job in call.jobs]
    assert {token < 50 for job in jobs for token in job.prompt_token_ids} == {True}
    assert max(len(job.prompt_token_ids) + job.rules.max_new_tokens for job in jobs) == 48
    assert len({job.prompt_token_ids for job in jobs}) == len(jobs)
    assert {job.rules.stop_token_ids for job in jobs} == {()}


@pytest.mark.parametrize(
    ("token_s", "rounds"),
    [(0.01, ROUNDS), (0.3, ROUNDS), (0.6, ROUNDS[:4]), (2.0, ROUNDS[:3]), (4.0, ROUNDS[:2])],
)
async def test_a_slower_machine_draws_less_within_the_limit_and_has_the_same_kind_of_figure(
    cache: TrialCache, token_s: float, rounds: tuple[int, ...]
) -> None:
    machine = await Machine.begun(token_s, places=2)
    trial = await machine.tried_out(cache)
    assert tuple(call.jobs[0].rules.max_new_tokens for call in machine.calls) == rounds
    assert trial.tokens_per_s == pytest.approx(2 / token_s, rel=0.15)
    assert trial.seconds <= 30.0


async def test_a_machine_that_ends_no_round_in_time_still_has_a_figure(cache: TrialCache) -> None:
    machine = await Machine.begun(12.0, places=2)
    trial = await machine.tried_out(cache)
    assert trial.seconds == pytest.approx(30.0)
    assert trial.tokens_per_s == pytest.approx(2 * 2 / 30.0)


async def test_a_machine_that_draws_nothing_is_told_as_nothing_and_is_tried_again(cache: TrialCache) -> None:
    machine = await Machine.begun(40.0)
    assert (await machine.tried_out(cache)).tokens_per_s == 0.0
    assert cache.get(cache_key(machine.started, TINY)) is None


async def test_jobs_may_take_what_is_left_of_the_limit_and_no_more(cache: TrialCache) -> None:
    machine = await Machine.begun(0.5, places=1)
    await machine.tried_out(cache, limit_s=10.0)
    assert [call.jobs[0].time_limit_s for call in machine.calls] == pytest.approx([10.0, 8.0, 6.0])


async def test_a_broken_engine_is_the_callers(cache: TrialCache) -> None:
    async def broken(call: Generate) -> Generated:
        raise ChildFailed("the engine died")

    machine = await Machine.begun(0.01)
    with pytest.raises(ExceptionGroup) as caught:
        await try_out(broken, machine.started, TINY, cache)
    assert caught.group_contains(ChildFailed, match="the engine died")


async def test_a_call_that_is_under_way_is_not_cut_off_by_the_limit(cache: TrialCache) -> None:
    machine = await Machine.begun(0.01, places=1, compile_s=50.0)

    async def compiling(call: Generate) -> Generated:
        await asyncio.sleep(0)
        longer = msgspec.structs.replace(call.jobs[0], time_limit_s=100.0)
        return await machine(Generate(jobs=(longer,), trial=True))

    trial = await try_out(compiling, machine.started, TINY, cache, clock=lambda: machine.now)
    assert trial.seconds == pytest.approx(50.04)
    assert trial.tokens_per_s == pytest.approx(4 / 50.04)


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([], 0.0),
        ([(8, 2.0)], 4.0),
        ([(8, 2.0), (8, 1.0), (32, 2.0)], 16.0),
        ([(8, 2.0), (128, 1.0), (128, 3.0)], 64.0),
        ([(8, 2.0), (32, 1.0), (20, 1.0)], 26.0),
        # The last one had no time to draw as much as the one before it.
        ([(8, 2.0), (32, 1.0), (4, 0.5)], 32.0),
        ([(8, 2.0), (0, 1.0)], 4.0),
        ([(0, 2.0)], 0.0),
        ([(8, 0.0)], 0.0),
    ],
)
def test_the_figure_is_of_the_longest_rounds(rounds: list[tuple[int, float]], expected: float) -> None:
    assert rate_of(rounds) == pytest.approx(expected)


def test_lengths_fit_in_any_context() -> None:
    assert [lengths_in(context) for context in (40_960, 128, 100, 64, 2)] == [
        (64, 64),
        (64, 64),
        (50, 50),
        (32, 32),
        (1, 1),
    ]


def test_rollouts_are_tokens_over_an_assumed_length() -> None:
    trial = Trial(tokens_per_s=1024.0, places=8, seconds=2.0)
    assert [assumed_rollouts_per_s(trial, context) for context in (40_960, 0, 64)] == [1.0, 1.0, 32.0]


# -- what is kept --------------------------------------------------------------------------------------------


async def test_the_same_device_engine_and_model_are_not_tried_out_twice(cache: TrialCache, tmp_path: Path) -> None:
    machine = await Machine.begun(0.01)
    first = await machine.tried_out(cache)
    calls = len(machine.calls)
    assert await machine.tried_out(TrialCache(tmp_path / "trials.json")) == first
    assert len(machine.calls) == calls


@pytest.mark.parametrize(
    "change",
    [
        {"device_name": "B"},
        {"device": "cuda:0"},
        {"dtype": "bfloat16"},
        {"engine": "vllm"},
        {"versions": "2"},
        {"places": 9},
    ],
)
def test_another_device_engine_or_number_of_places_is_another_trial(change: dict[str, object]) -> None:
    started = Started(engine="e", device="cpu", dtype="float32", device_name="A", versions="1", places=8)
    assert cache_key(msgspec.structs.replace(started, **change), TINY) != cache_key(started, TINY)


def test_another_model_is_another_trial_and_other_files_are_not() -> None:
    started = Started(engine="e", device="cpu", dtype="float32")
    deeper = layout_with(num_hidden_layers=29)
    told = msgspec.structs.replace(TINY, files=(*TINY.files, ModelFile(name="tokenizer.json", content=b"{}")))
    assert cache_key(started, deeper) != cache_key(started, TINY)
    assert cache_key(started, told) == cache_key(started, TINY)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"a": {"tokens_per_s": -1}}', b"[" * 100_000])
def test_a_damaged_file_is_as_none_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trials.json"
    path.write_bytes(content)
    cache, trial = TrialCache(path), Trial(tokens_per_s=5.0, places=1, seconds=1.0)
    assert cache.get("a") is None
    cache.put("a", trial)
    assert TrialCache(path).get("a") == trial


def test_the_oldest_trials_go(cache: TrialCache) -> None:
    for number in range(ENTRIES + 2):
        cache.put(f"key {number}", Trial(tokens_per_s=number, places=1, seconds=1.0))
        cache.put("key 0", Trial(tokens_per_s=7.0, places=1, seconds=1.0))
    kept = [cache.get(f"key {number}") is not None for number in range(ENTRIES + 2)]
    assert kept == [True, False, False] + [True] * (ENTRIES - 1)
