"""The trial at join and the places that fit: figures against arithmetic by hand, on a clock that the test sets."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from swarm.broadcast.version.manifest import Layout, ModelFile, TensorSpec
from swarm.errors import ChildFailed, UserError
from swarm.sampler.engine import EngineOptions, Generate, Generated, Sampled, Start, Started
from swarm.sampler.scripted_engine import ScriptedEngine
from swarm.sampler.trial import (
    ENTRIES,
    FIRST_TOKENS,
    MAX_TOKENS,
    ModelShape,
    Round,
    Trial,
    TrialCache,
    assumed_mean_tokens,
    cache_key,
    lengths_in,
    next_tokens,
    places_that_fit,
    rate_of,
    rollouts_per_s,
    shape_of,
    try_out,
)

QWEN3_600M = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 1024,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
}
"""Of Qwen/Qwen3-0.6B."""

LLAMA_1B = {
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 2048,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
}
"""Of meta-llama/Llama-3.2-1B, without its head_dim, which follows."""


def layout_with(config: dict[str, object], rows: int = 0) -> Layout:
    name = "model.embed_tokens.weight"
    spec = TensorSpec(name=name, dtype="BF16", shape=(rows or int(str(config["vocab_size"])), 8))
    return Layout(tensors=(spec,), files=(ModelFile(name="config.json", content=json.dumps(config).encode()),))


TINY = layout_with({**QWEN3_600M, "vocab_size": 50, "max_position_embeddings": 4096})


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
        options = EngineOptions(arguments={} if lockstep else {"continuous": True})
        start = Start(directory="", layout=TINY, device="cpu", places=places, options=options)
        started = await engine.start(start, lambda: None)
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

    async def tried_out(self, cache: TrialCache, *, limit_s: float = 30.0, layout: Layout = TINY) -> Trial:
        return await try_out(self, self.started, layout, cache, limit_s=limit_s, clock=lambda: self.now)


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
    layout = layout_with({**QWEN3_600M, "vocab_size": 70, "max_position_embeddings": 48}, rows=50)
    machine = await Machine.begun(0.01, places=2)
    await machine.tried_out(cache, layout=layout)
    jobs = [job for call in machine.calls for job in call.jobs]
    assert {token < 50 for job in jobs for token in job.prompt_token_ids} == {True}
    assert max(len(job.prompt_token_ids) + job.rules.max_new_tokens for job in jobs) == 48
    assert len({job.prompt_token_ids for job in jobs}) == len(jobs)
    assert {job.rules.stop_token_ids for job in jobs} == {()}


@pytest.mark.parametrize(
    ("token_s", "rounds"),
    [(0.01, [4, 4, 16, 64, 64]), (0.3, [4, 4, 16, 64]), (0.6, [4, 4, 16, 26]), (2.0, [4, 4, 7]), (4.0, [4, 4])],
)
async def test_a_slower_machine_draws_less_within_the_limit_and_has_the_same_kind_of_figure(
    cache: TrialCache, token_s: float, rounds: list[int]
) -> None:
    machine = await Machine.begun(token_s, places=2)
    trial = await machine.tried_out(cache)
    assert [call.jobs[0].rules.max_new_tokens for call in machine.calls] == rounds
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


def a_round(tokens: int, seconds: float, drawn: int | None = None, places: int = 2) -> Round:
    return Round(places=places, tokens=tokens, drawn=tokens * places if drawn is None else drawn, seconds=seconds)


@pytest.mark.parametrize(
    ("rounds", "left_s", "expected"),
    [
        ([], 30.0, FIRST_TOKENS),
        ([], 0.0, 0),
        ([a_round(4, 29.0)], 1.0, 4),
        ([a_round(4, 1.0), a_round(4, 1.0)], 28.0, 16),
        ([a_round(4, 1.0), a_round(4, 4.0)], 10.0, 10),
        ([a_round(4, 1.0), a_round(4, 4.0)], 3.9, 0),
        ([a_round(4, 1.0), a_round(4, 1.0, drawn=3)], 28.0, 0),
        ([a_round(4, 0.0), a_round(4, 0.0)], 28.0, 16),
        ([a_round(4, 1.0), a_round(MAX_TOKENS, 1.0)], 28.0, MAX_TOKENS),
        ([a_round(4, 1.0), a_round(MAX_TOKENS, 1.0), a_round(MAX_TOKENS, 1.0)], 28.0, 0),
    ],
)
def test_the_next_round(rounds: list[Round], left_s: float, expected: int) -> None:
    assert next_tokens(rounds, MAX_TOKENS, left_s) == expected


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([], 0.0),
        ([a_round(4, 2.0)], 4.0),
        ([a_round(4, 2.0), a_round(4, 1.0), a_round(16, 2.0)], 16.0),
        ([a_round(4, 2.0), a_round(64, 1.0), a_round(64, 3.0)], 64.0),
        ([a_round(4, 2.0), a_round(4, 1.0, drawn=0)], 4.0),
        ([a_round(4, 2.0, drawn=0)], 0.0),
        ([a_round(4, 0.0)], 0.0),
    ],
)
def test_the_figure_is_of_the_longest_rounds(rounds: list[Round], expected: float) -> None:
    assert rate_of(rounds) == pytest.approx(expected)


def test_lengths_fit_in_any_context() -> None:
    assert [lengths_in(context) for context in (40_960, 128, 100, 64, 2)] == [
        (64, 64),
        (64, 64),
        (50, 50),
        (32, 32),
        (1, 1),
    ]


def test_rollouts_are_tokens_over_their_mean_length() -> None:
    trial = Trial(tokens_per_s=1000.0, places=8, seconds=2.0)
    assert rollouts_per_s(trial, 250.0) == 4.0
    assert rollouts_per_s(trial, 0.0) == 1000.0
    assert [assumed_mean_tokens(context) for context in (40_960, 64)] == [1024.0, 32.0]


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
    deeper = layout_with({**QWEN3_600M, "vocab_size": 50, "num_hidden_layers": 29})
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


# -- places --------------------------------------------------------------------------------------------------


def test_the_shape_of_real_models() -> None:
    assert shape_of(layout_with({**QWEN3_600M})) == ModelShape(
        layers=28, kv_heads=8, head_dim=128, vocab_size=151_936, context_tokens=40_960
    )
    assert shape_of(layout_with({**LLAMA_1B})).head_dim == 64
    gpt2: dict[str, object] = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50_257, "n_positions": 1024}
    assert shape_of(layout_with(gpt2)) == ModelShape(
        layers=12, kv_heads=12, head_dim=64, vocab_size=50_257, context_tokens=1024
    )
    mamba = shape_of(layout_with({"num_hidden_layers": 24, "hidden_size": 768, "vocab_size": 50_280}))
    assert (mamba.kv_heads, mamba.head_dim) == (1, 768)
    nested = layout_with({"vocab_size": 5, "text_config": {**LLAMA_1B}}, rows=128_256)
    assert shape_of(nested).layers == 16


def test_a_sample_takes_its_keys_and_values_and_one_draw() -> None:
    # Of one token in bf16: 2 x 28 layers x 8 heads x 128 x 2 bytes = 114,688.
    qwen = shape_of(layout_with({**QWEN3_600M}))
    assert qwen.sample_bytes(4096, 2) == 114_688 * 4096 + 8 * 4 * 151_936
    # 2 x 16 x 8 x 64 x 2 = 32,768; twice that in float32.
    llama = shape_of(layout_with({**LLAMA_1B}))
    assert llama.sample_bytes(1000, 4) == 65_536_000 + 8 * 4 * 128_256


@pytest.mark.parametrize(
    ("free_gib", "share", "wanted", "tokens", "expected"),
    [
        # 15.46e9 / 474.6e6 = 32.6
        (16.0, 0.9, 64, 4096, 32),
        (16.0, 0.9, 8, 4096, 8),
        # 15.46e9 / (114,688 x 40,960 + 4.9e6) = 3.3: no sample is longer than the context.
        (16.0, 0.9, 64, 1_000_000, 3),
        (1.0, 0.5, 64, 40_960, 1),
        (0.0, 0.9, 64, 4096, 1),
    ],
)
def test_as_many_samples_as_fit_and_no_more_than_are_wanted(
    free_gib: float, share: float, wanted: int, tokens: int, expected: int
) -> None:
    shape, free_bytes = shape_of(layout_with({**QWEN3_600M})), int(free_gib * 2**30)
    places = places_that_fit(shape, free_bytes=free_bytes, share=share, wanted=wanted, tokens=tokens, dtype_bytes=2)
    assert places == expected


@pytest.mark.parametrize("content", [b"{", b'{"hidden_size": 8}', b'{"num_hidden_layers": "many"}'])
def test_a_model_that_does_not_say_its_shape_is_the_learners_fault(content: bytes) -> None:
    layout = msgspec.structs.replace(TINY, files=(ModelFile(name="config.json", content=content),))
    with pytest.raises(UserError, match=r"config\.json"):
        shape_of(layout)
    with pytest.raises(UserError, match=r"no config\.json"):
        shape_of(msgspec.structs.replace(TINY, files=()))
