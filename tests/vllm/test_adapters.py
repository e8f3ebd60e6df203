"""Versions of an adapter in the real vLLM: what is drawn under each, beneath installs, and wrong ones that do not pass.

The tests of one engine's life come in this order; the last ones spoil it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from swarm.errors import UserError
from swarm.sampler.engine import Generate, Installed, NotInstalled, Sampled
from swarm.sampler.room import adapter_rank
from swarm.sampler.vllm import adapters, swap
from swarm.sampler.vllm.adapters import OUTLIVED
from swarm.sampler.vllm.engine import VllmEngine
from swarm.types import VersionId
from tests.builders import v
from tests.conformance import job
from tests.unit.models import Staged
from tests.vllm.support import Signal, check_logprobs, end, installed, staged_adapters, started
from tests.vllm.test_proof import EXTENSIONS, running, summed

pytestmark = pytest.mark.asyncio(loop_scope="module")
SLOTS = 3
BLIND = 90
"""From this version on the worker of `Life` says that it holds whatever adapter it was to load."""


class Life:
    """An engine with three slots, and four versions of an adapter in turn."""

    def __init__(self, staged: Sequence[Staged]) -> None:
        self.engine = VllmEngine(f"{EXTENSIONS}.Blind")
        self.staged = staged
        self.version = -1
        self.by_version: dict[VersionId, Staged] = {}

    async def install(self) -> Installed:
        self.version += 1
        self.by_version[v(self.version)] = self.staged[self.version % 4]
        return await installed(self.engine, self.by_version[v(self.version)], self.version)

    async def refused(self, version: int) -> NotInstalled:
        """Why a version is not installed. The engine is used again, which no node would do."""
        self.version = version
        done = await self.engine.install(self.staged[version % 4].install(version), lambda: None)
        assert isinstance(done, NotInstalled)
        (sampled,) = (await self.engine.generate(Generate((job(0),)), lambda: None)).samples
        assert sampled.fault.startswith(swap.UNPROVEN)
        assert self.engine._swaps is not None
        self.engine._swaps.unproven = ""
        return done

    def drawing(self, count: int, *, limit: int = 900) -> tuple[list[asyncio.Task[Any]], Signal]:
        drawing = Signal()
        jobs = [job(seed, limit=limit, stops=()) for seed in range(count)]
        return [asyncio.create_task(self.engine.generate(Generate((one,)), drawing)) for one in jobs], drawing

    async def held(self) -> set[int]:
        return set(await self.engine._engine.list_loras())

    def check(self, seed: int, sampled: Sampled, version: int, *, limit: int) -> None:
        assert [span.version for span in sampled.spans] == [v(version)]
        check_logprobs(job(seed, limit=limit, stops=()), sampled, self.by_version)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def life(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Life]:
    life = Life(staged_adapters(tmp_path_factory.mktemp("learner"), 4))
    await started(life.engine, life.staged[0], arguments={"max_loras": SLOTS})
    yield life
    end(life.engine)


async def test_each_of_more_versions_than_slots_draws_as_the_learner_s_own(life: Life) -> None:
    """The first is the model alone: its B is zero."""
    for version in range(2 * SLOTS):
        done = await life.install()
        assert done.proof == "bits and probe"
        # The base is taken once, beneath a pause; what follows pauses nothing.
        assert (done.pause_s > 0) is (version == 0)
        asked = tuple(job(seed, limit=30, temperature=(1.0, 0.7)[seed % 2]) for seed in range(4))
        for one, sampled in zip(
            asked, (await life.engine.generate(Generate(asked), lambda: None)).samples, strict=True
        ):
            assert [span.version for span in sampled.spans] == [v(version)]
            check_logprobs(one, sampled, life.by_version)
        assert len(await life.held()) <= 2


async def test_a_version_leaves_no_file(life: Life) -> None:
    await life.install()
    beside = {path.name for staged in life.staged for path in staged.staging.parent.iterdir()}
    assert beside == {"staging.bin", "model"}


async def test_samples_finish_under_the_version_with_which_they_began(life: Life) -> None:
    await life.install()
    first = life.version
    running, drawing = life.drawing(6)
    await drawing.told()
    for _ in range(2):
        done = await life.install()
        assert done.pause_s == 0
        (sampled,) = (await life.engine.generate(Generate((job(9, limit=20, stops=()),)), lambda: None)).samples
        life.check(9, sampled, life.version, limit=20)
    assert not any(task.done() for task in running)
    for seed, answer in enumerate(await asyncio.gather(*running)):
        life.check(seed, answer.samples[0], first, limit=900)


async def test_where_all_slots_are_taken_the_samples_of_the_oldest_version_are_given_up(life: Life) -> None:
    begun = []
    for _ in range(SLOTS):
        await life.install()
        running, drawing = life.drawing(2)
        begun.append((life.version, running))
        await drawing.told()
    await life.install()
    assert len(await life.held()) == SLOTS
    (_, outlived), *rest = begun
    for task in outlived:
        assert (await task).samples[0].fault == OUTLIVED
    for version, running in rest:
        for seed, answer in enumerate(await asyncio.gather(*running)):
            life.check(seed, answer.samples[0], version, limit=900)


async def test_of_a_large_model_the_adapter_alone_is_read_and_compared_bit_for_bit(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    await life.install()
    monkeypatch.setattr(swap, "PROBED_BYTES", 0)
    following = life.staged[(life.version + 1) % 4]
    whole, frozen = following.staging.read_bytes(), sum(t.nbytes for t in following.layout.tensors if t.frozen)
    following.staging.write_bytes(bytes(frozen) + whole[frozen:])
    try:
        assert (await life.install()).proof == "bits"
    finally:
        following.staging.write_bytes(whole)
    (sampled,) = (await life.engine.generate(Generate((job(1, limit=20, stops=()),)), lambda: None)).samples
    life.check(1, sampled, life.version, limit=20)


async def test_a_file_that_is_not_the_adapter_is_noticed_by_its_bits(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = adapters.write_adapter
    monkeypatch.setattr(adapters, "write_adapter", lambda to, path, *rest: write(to, life.staged[1].staging, *rest))
    done = await life.refused(BLIND - 2)
    assert (done.fault, "self_attn.qkv_proj differs from what the learner signed" in done.why) == ("engine", True)


async def test_a_file_that_is_not_the_adapter_is_noticed_by_the_probe(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = adapters.write_adapter
    monkeypatch.setattr(adapters, "write_adapter", lambda to, path, *rest: write(to, life.staged[1].staging, *rest))
    done = await life.refused(BLIND + 2)
    assert (done.fault, "the probe's log-probs are off" in done.why) == ("engine", True)


async def test_a_version_beside_another_base_is_refused_before_it_is_loaded(life: Life) -> None:
    install = life.staged[0].install(life.version + 1)
    first, *others = install.tensor_sums
    other = msgspec.structs.replace(install, tensor_sums=(first + 1, *others), proven=True)
    done = await life.engine.install(other, lambda: None)
    assert done == NotInstalled("engine", "this version stands beside other frozen weights")


@pytest.mark.long
async def test_an_engine_that_draws_without_the_adapter_is_noticed_when_that_does_something(tmp_path: Path) -> None:
    """The probe of version 0 is right, since B is zero, and the worker holds the right bits."""
    first, second = staged_adapters(tmp_path, 2)
    async with running(f"{EXTENSIONS}.Deaf") as engine:
        await started(engine, first)
        assert not isinstance(await engine.install(first.install(0), lambda: None), NotInstalled)
        done = await engine.install(second.install(1), lambda: None)
        assert isinstance(done, NotInstalled)
        assert "the probe's log-probs are off" in done.why


async def test_an_adapter_under_an_id_that_vllm_holds_already_is_noticed(life: Life) -> None:
    """vLLM says nothing and goes on with the one that it has."""
    assert life.engine._swaps is not None
    life.engine._swaps.adapters._loaded -= 1
    done = await life.refused(BLIND + 4)
    assert (done.fault, "the probe's log-probs are off" in done.why) == ("engine", True)


async def test_an_adapter_of_a_rank_for_which_vllm_has_no_kernel_is_refused_in_a_line(tmp_path: Path) -> None:
    (staged,) = staged_adapters(tmp_path, 1, rank=513)
    with pytest.raises(UserError, match=r"vLLM cannot be started with these options: .*max_lora_rank"):
        await started(VllmEngine(), staged)


@pytest.mark.parametrize(("rank", "held_as"), [(1, 1), (2, 8), (8, 8), (33, 64), (512, 512)])
async def test_a_slot_has_the_smallest_rank_that_holds_the_adapter(tmp_path: Path, rank: int, held_as: int) -> None:
    (staged,) = staged_adapters(tmp_path, 1, rank=rank)
    assert adapter_rank(staged.layout) == held_as


@pytest.mark.long
async def test_two_workers_hold_their_shards_of_the_base_and_of_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHO_NODE_TEST_KEEP_WEIGHTS", "1")
    staged = staged_adapters(tmp_path, 2, rank=8, alpha=12.0)
    async with running(f"{EXTENSIONS}.Flipping") as engine:
        await started(engine, staged[0], tensor_parallel_size=2)
        for version in (0, 1):
            assert (await installed(engine, staged[version], version)).proof == "bits and probe"
            asked = job(0, limit=30)
            (sampled,) = (await engine.generate(Generate((asked,)), lambda: None)).samples
            check_logprobs(asked, sampled, {v(version): staged[version]})
        assert await summed(engine, staged[0]) == {spec.name for spec in staged[0].layout.tensors if spec.frozen}


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (
            "qwen3",
            {"precision": "int8"},
            "--precision cannot round a model beside an adapter in vLLM yet: leave it out",
        ),
        ("qwen3", {"arguments": {"max_loras": 1}}, "max_loras has to be 2 or more"),
        ("qwen3", {"arguments": {"max_loras": "6"}}, "max_loras has to be 2 or more"),
        ("qwen3 moe", {}, "no adapter of a model of experts: join with --engine transformers"),
    ],
)
async def test_what_vllm_cannot_draw_with_an_adapter_is_refused_in_a_line(
    tmp_path: Path, kind: str, options: dict[str, Any], said: str
) -> None:
    (staged,) = staged_adapters(tmp_path, 1, kind)
    with pytest.raises(UserError, match=said):
        await started(VllmEngine(), staged, **options)
