"""Two trainer ranks under torchrun, on CPU over gloo, do what one does.

Those of the fixture are of two machines as far as they know, so rows are sent; those of the run at the end are of one,
so each writes its own rows.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from swarm.errors import ChildFailed, UserError
from swarm.learner.checkpoint.files import TENSORS, is_whole
from swarm.learner.checkpoint.model_files import stream_tensors
from swarm.learner.messages import (
    Audit,
    Audited,
    AuditRollout,
    Prepare,
    Prepared,
    Save,
    Saved,
    Train,
    Trained,
    TrainGroup,
    TrainRollout,
)
from swarm.learner.process import TrainerProcess, torchrun_options, trainer_config
from swarm.learner.tiny import tiny_model
from swarm.learner.trainer import Trainer
from swarm.models.device import as_streamed
from swarm.process import NoParent
from swarm.settings import LeadConfig
from swarm.types import Turn
from tests.builders import floats, ints
from tests.integration.processes import PATIENCE_S, eventually, free_port, swarm_in
from tests.unit.models import model_directory

pytestmark = pytest.mark.slow

CONFIG = LeadConfig(
    device="cpu",
    trainer_machines=f"2@127.0.0.1:{free_port()}",
    tokens_per_micro_batch=24,
    kl_weight=0.01,
    minibatches=2,
    packing=False,  # Ranks put rows of one prompt on other lines than one rank does, and round otherwise
)
LONGEST = 6
SAVED = 3
"""Learner steps taken when the checkpoint is written; one more follows it."""


def group(rewards: Sequence[float], *, longest: int) -> TrainGroup:
    """A rollout for each reward; no two have the same tokens, nor the same length."""
    rollouts = []
    for number, reward in enumerate(rewards):
        tokens = [3 + (number + place) % 10 for place in range(max(1, longest - number))]
        rollouts.append(
            TrainRollout(
                token_ids=ints(*tokens),
                logprobs=floats(*[-2.6 - 0.1 * number] * len(tokens)),
                reward=reward,
                staleness=number % 2,
            )
        )
    return TrainGroup(prompt_token_ids=(1, 4, 13), rollouts=tuple(rollouts))


def in_turns(made: TrainGroup) -> TrainGroup:
    """The same as episodes: all but the second last token are drawn, the last one by another node."""
    rollouts = (
        structs.replace(
            one,
            turns=(
                Turn(start=0, end=one.length - 2, node="a"),
                Turn(start=one.length - 1, end=one.length, node="b", reward=one.reward),
            ),
        )
        for one in made.rollouts
    )
    return structs.replace(made, rollouts=tuple(rollouts))


BATCHES = (
    # An odd number of rows.
    (group([1.0, 0.0, 0.5], longest=6), group([0.0, 1.0, 0.25], longest=4), group([0.0, 0.0, 1.0], longest=3)),
    # Nothing to learn.
    (group([0.5, 0.5], longest=3),),
    # One row in each minibatch: one of two ranks has nothing to do.
    (group([1.0, 0.0], longest=5),),
    # Going on after the checkpoint.
    (in_turns(group([0.0, 0.0, 1.0], longest=6)), group([1.0, 0.0, 0.0], longest=3)),
)


REPLAYED = tuple(
    AuditRollout((1, 3, 4), ints(*range(3, 3 + length)), floats(*[-2.0] * length), seed=None if length == 1 else length)
    for length in (6, 1, 4)
)


def trains(steps: range) -> list[Train]:
    return [Train(step=step, groups=BATCHES[step], lineage=bytes([step] * 32)) for step in steps]


@dataclass(frozen=True, kw_only=True)
class Life:
    """What a trainer answered and wrote."""

    prepared: Prepared
    trained: list[Trained]
    staged: list[bytes]
    """As prepared, at the checkpoint, and at the end."""
    audited: Audited
    """Of the weights as prepared, at the checkpoint."""
    checkpoint: Path


@dataclass(frozen=True, kw_only=True)
class Half:
    """The same batches in bf16: figures, what was published at the end, and the masters of the checkpoint there."""

    trained: list[Trained]
    staged: bytes
    masters: dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Two:
    """What two ranks did: a whole life, the last step again from two checkpoints, another model, and a life in bf16."""

    life: Life
    from_two: tuple[Trained, bytes]
    from_one: tuple[Trained, bytes]
    refusal: str
    of_directory: tuple[Prepared, bytes]
    half: Half
    end: str


def alone(directory: Path, resume: str = "", **settings: Any) -> Trainer:
    directory.mkdir(exist_ok=True)
    config = trainer_config(CONFIG.model_copy(update=settings), directory, LONGEST)
    return Trainer(config, NoParent(), resume=resume)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory as people have it, of a model whose head is not tied, with dimensions that two do not divide."""
    odd = {"tie_word_embeddings": False, "intermediate_size": 77, "vocab_size": 15}
    return model_directory(tmp_path_factory.mktemp("model"), **odd)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Life:
    """One rank, in this process."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("one")
    trainer = alone(directory)
    staging = directory / "staging.bin"
    prepared = trainer.prepared()
    staged = [staging.read_bytes()]
    (directory / "kept.bin").write_bytes(staged[0])
    trained = [trainer.step(command) for command in trains(range(SAVED))]
    audited = trainer.audit(Audit(path=str(directory / "kept.bin"), rollouts=REPLAYED))
    trainer.stage()
    staged.append(staging.read_bytes())
    checkpoint = directory / f"step-{SAVED:06}"
    trainer.save(Save(directory=str(checkpoint), step=SAVED))
    assert trainer.flush() == Saved(step=SAVED, fault="")
    trained += [trainer.step(command) for command in trains(range(SAVED, len(BATCHES)))]
    trainer.stage()
    staged.append(staging.read_bytes())
    return Life(prepared=prepared, trained=trained, staged=staged, audited=audited, checkpoint=checkpoint)


@pytest.fixture(scope="module")
def two(one: Life, other_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    """Two ranks, by way of the node's own end of a trainer; started once, since that takes longest."""
    host, port = str(CONFIG.trainer_machines).partition("@")[2].split(":")
    place = ["--nnodes", "2", "--node-rank", "1", "--master-addr", host, "--master-port", port]
    # As docs/learner.md has it.
    other_machine = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *place, "-m", "swarm.learner.trainer"]
    )
    try:
        yield asyncio.run(_live(one.checkpoint, other_model, tmp_path_factory.mktemp("two")))
        # Its rank ends when rank 0 is gone.
        assert other_machine.wait(60) == 0
    finally:
        other_machine.kill()
        other_machine.wait()


async def _live(of_one: Path, other_model: str, directory: Path) -> Two:
    process = TrainerProcess(directory, hang_s=120.0, torchrun=torchrun_options(CONFIG))
    checkpoint = directory / f"step-{SAVED:06}"

    async def train(steps: range) -> list[Trained]:
        return [await process.train(one.step, list(one.groups), one.lineage) for one in trains(steps)]

    async def stage() -> bytes:
        await process.stage()
        return process.staging.read_bytes()

    async def prepare(resume: str = "", **settings: Any) -> Prepared:
        """As at the start, but in the same process."""
        config = trainer_config(CONFIG.model_copy(update=settings), directory, LONGEST)
        return await process.call(Prepare(config=config.model_dump(mode="json"), resume=resume), Prepared)

    async def resume(there: Path) -> tuple[Trained, bytes]:
        await prepare(str(there))
        (trained,) = await train(range(SAVED, len(BATCHES)))
        return trained, await stage()

    try:
        first = await process.prepare(CONFIG, LONGEST)
        staged = [process.staging.read_bytes()]
        (directory / "kept.bin").write_bytes(staged[0])
        trained = await train(range(SAVED))
        audited = await process.audit(directory / "kept.bin", REPLAYED, fast=False)
        assert (await process.audit(directory / "none.bin", REPLAYED, fast=False)).errors == ()
        staged.append(await stage())
        await process.save(checkpoint, SAVED)
        # A step taken while it is written.
        trained += await train(range(SAVED, len(BATCHES)))
        assert await process.flush() == Saved(step=SAVED, fault="")
        staged.append(await stage())
        life = Life(prepared=first, trained=trained, staged=staged, audited=audited, checkpoint=checkpoint)
        with pytest.raises(UserError) as refused:
            await resume(directory / "nowhere")
        from_two, from_one = await resume(checkpoint), await resume(of_one)
        prepared = await prepare(model=other_model)
        # The file is that of the larger model before.
        of_directory = prepared, process.staging.read_bytes()[: prepared.layout.total_bytes]
        await prepare(precision="bfloat16")
        trained = await train(range(len(BATCHES)))
        await process.save(directory / "half", len(BATCHES))
        assert await process.flush() == Saved(step=len(BATCHES), fault="")
        masters = load_file(directory / "half" / TENSORS)
        half = Half(trained=trained, staged=await stage(), masters=masters)
        (rank,) = psutil.Process(process.pid).children()
        os.kill(rank.pid, signal.SIGSTOP)
        process._hang_s = 0.1
        with pytest.raises(ChildFailed) as ended:
            await process.stage()
        assert psutil.wait_procs([rank], timeout=60)[1] == []
        return Two(
            life=life,
            from_two=from_two,
            from_one=from_one,
            refusal=str(refused.value),
            of_directory=of_directory,
            half=half,
            end=str(ended.value),
        )
    finally:
        await process.stop()


GRADIENT_TOLERANCE = 1e-5
"""Of the largest element: float32 sums of a few hundred terms, taken in another order. Measured: 2e-6."""

WEIGHT_TOLERANCE = 1e-6
"""A step of Adam is the learning rate, at most 4e-4 here, times a quotient that no more than GRADIENT_TOLERANCE of an
element changes, unless that element is next to nothing. Measured: 4e-8, an ulp of a weight."""


def test_figures_are_those_of_one_rank(one: Life, two: Two) -> None:
    for step, (alone_, together) in enumerate(zip(one.trained, two.life.trained, strict=True)):
        assert together.metrics == pytest.approx(alone_.metrics, rel=1e-4, abs=1e-6), step
        assert together.alarms == alone_.alarms
    assert [trained.metrics["optimizer_steps"] for trained in two.life.trained] == [2, 0, 2, 2]


def test_weights_and_moments_are_those_of_one_rank(one: Life, two: Two) -> None:
    expected, found = load_file(one.checkpoint / TENSORS), load_file(two.life.checkpoint / TENSORS)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if name.startswith("adam/exp_"):
            atol = GRADIENT_TOLERANCE * float(tensor.abs().max())
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol, msg=name)
        else:
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=WEIGHT_TOLERANCE, msg=name)
    assert is_whole(two.life.checkpoint)
    # Steps were taken: they are not those that both began with.
    assert not torch.equal(found["weight/model.norm.weight"], torch.ones(64))


def test_what_is_published_is_that_of_one_rank(one: Life, two: Two) -> None:
    assert two.life.prepared.layout == one.prepared.layout
    assert two.life.staged[0] == one.staged[0]
    for staged, expected in zip(two.life.staged[1:], one.staged[1:], strict=True):
        assert staged != two.life.staged[0]
        assert_rounded_alike(staged, expected)


def assert_rounded_alike(staged: bytes, expected: bytes) -> None:
    """The same bf16 numbers but where the two sides of WEIGHT_TOLERANCE round to neighbours, 2^-8 apart; those are
    few."""
    found, wanted = (torch.frombuffer(bytearray(data), dtype=torch.bfloat16).float() for data in (staged, expected))
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=WEIGHT_TOLERANCE)
    assert float((found != wanted).float().mean()) < 1e-3


def test_two_ranks_draw_again_with_other_weights_what_one_does_and_have_theirs_back(one: Life, two: Two) -> None:
    """That they have theirs back shows in what is published next."""
    assert len(two.life.audited.errors) == len(REPLAYED)
    for kind in ("errors", "margins"):
        for found, expected in zip(getattr(two.life.audited, kind), getattr(one.audited, kind), strict=True):
            assert array("f", found) == pytest.approx(array("f", expected), abs=1e-4)
    assert two.life.audited.exact
    assert_rounded_alike(two.life.staged[1], one.staged[1])


def test_a_checkpoint_of_two_ranks_is_one_as_anybody_loads_it(two: Two) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(two.life.checkpoint, dtype=torch.float32)
    held = load_file(two.life.checkpoint / TENSORS)
    assert type(loaded).__name__ == loaded.config.architectures[0] == "Qwen3ForCausalLM"
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, as_streamed(held[f"weight/{name}"]).float()), name


def test_two_ranks_go_on_from_a_checkpoint_of_two_as_if_never_stopped(two: Two) -> None:
    trained, staged = two.from_two
    assert trained.metrics == two.life.trained[SAVED].metrics
    assert staged == two.life.staged[2]


def test_two_ranks_go_on_from_a_checkpoint_of_one(one: Life, two: Two) -> None:
    trained, staged = two.from_one
    assert trained.metrics == pytest.approx(one.trained[SAVED].metrics, rel=1e-4, abs=1e-6)
    assert_rounded_alike(staged, one.staged[2])


def test_one_rank_goes_on_from_a_checkpoint_of_two(one: Life, two: Two, tmp_path: Path) -> None:
    trainer = alone(tmp_path, str(two.life.checkpoint))
    assert trainer.prepared().lineage == bytes([SAVED - 1] * 32)
    assert (tmp_path / "staging.bin").read_bytes() == two.life.staged[1]
    (trained,) = [trainer.step(command) for command in trains(range(SAVED, len(BATCHES)))]
    assert trained.metrics == pytest.approx(one.trained[SAVED].metrics, rel=1e-4, abs=1e-6)
    trainer.stage()
    assert_rounded_alike((tmp_path / "staging.bin").read_bytes(), one.staged[2])


def test_a_fault_that_all_ranks_know_of_is_one_line_and_they_go_on(two: Two) -> None:
    """What was trained after it is asserted above."""
    assert "is not a checkpoint that a run can go on from" in two.refusal
    assert "\n" not in two.refusal


def test_a_model_of_a_directory_comes_to_all_from_rank_0(two: Two, other_model: str, tmp_path: Path) -> None:
    prepared, staged = two.of_directory
    apart = alone(tmp_path, model=other_model).prepared()
    # What the machine has free is another matter from one moment to the next.
    assert prepared == msgspec.structs.replace(apart, left_bytes=prepared.left_bytes)
    assert staged == (tmp_path / "staging.bin").read_bytes()


@pytest.fixture(scope="module")
def one_in_half(tmp_path_factory: pytest.TempPathFactory) -> Half:
    """One rank, in this process."""
    directory = tmp_path_factory.mktemp("half")
    trainer = alone(directory, precision="bfloat16")
    trainer.prepared()
    trained = [trainer.step(command) for command in trains(range(len(BATCHES)))]
    trainer.stage()
    trainer.save(Save(directory=str(directory / "half"), step=len(BATCHES)))
    assert trainer.flush() == Saved(step=len(BATCHES), fault="")
    masters = load_file(directory / "half" / TENSORS)
    return Half(trained=trained, staged=(directory / "staging.bin").read_bytes(), masters=masters)


HALF_TOLERANCE = 0.02
"""Of a figure, or of the norm of a moment: bf16 has steps of 2^-8, and ranks round sums of other rows. Measured: 0.006
and 0.023 of the smallest; rows left out would be half of it."""


def test_two_ranks_in_bf16_do_what_one_does(one: Life, one_in_half: Half, two: Two) -> None:
    for alone_, together in zip(one_in_half.trained, two.half.trained, strict=True):
        shared = {name: alone_.metrics[name] for name in together.metrics}
        assert together.metrics == pytest.approx(shared, rel=HALF_TOLERANCE, abs=2e-3)
    # They were computed in bf16.
    assert one_in_half.trained[0].metrics["entropy"] != one.trained[0].metrics["entropy"]
    for name, tensor in one_in_half.masters.items():
        if not tensor.is_floating_point():  # The state of a generator
            continue
        apart = float((two.half.masters[name] - tensor).norm())
        assert apart <= (2 * HALF_TOLERANCE if name.startswith("adam/exp_") else 1e-3) * float(tensor.norm()), name


def test_in_bf16_ranks_publish_their_float32_masters_rounded(one: Life, two: Two) -> None:
    """What is trained is float32 on every rank: the rows that each of them wrote are those of its masters."""
    masters = two.half.masters
    assert {tensor.dtype for name, tensor in masters.items() if name.startswith("weight/")} == {torch.float32}
    assert two.half.staged == b"".join(
        as_streamed(masters[f"weight/{spec.name}"]).view(torch.uint8).numpy().tobytes()
        for spec in one.prepared.layout.tensors
    )
    assert any(
        not torch.equal(tensor, tensor.bfloat16().float())
        for name, tensor in masters.items()
        if name.startswith("weight/")
    )


def test_a_rank_that_stands_still_is_ended(two: Two) -> None:
    """Though torchrun gives it a session of its own; asserted where it is ended."""
    assert "made no progress" in two.end


@pytest.mark.long
def test_a_run_goes_on_after_a_rank_was_killed(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        swarm.lead_with(checkpoint_every_steps=2, device="cpu")
        # Many steps, so that the run is not over before its rank is found and killed.
        learner = swarm.lead("--port", "0", "--steps", "40", "--trainer-ranks", "2")
        swarm.scripted(learner.url(), name="sampler")
        eventually(lambda: learner.status()["step"] > 2, learner, "a checkpoint and more steps")
        (second,) = [child for child in learner.children() if child.environ().get("RANK") == "1"]
        second.kill()
        assert learner.wait() == 0, learner.output()
        (restarted,) = [event for event in learner.events() if event["kind"] == "trainer_restarted"]
        assert "rank 1 of the trainer was killed by SIGKILL" in restarted["reason"]
        assert not [event for event in learner.events() if event["kind"] == "diverged"]
        # What each rank wrote into the published file, and what rank 0 gathered for the checkpoint.
        saved = load_file(learner.run_dir / "checkpoints" / "step-000040" / "model.safetensors")
        assert (learner.run_dir / "versions" / "weights.bin").read_bytes() == b"".join(
            saved[spec.name].view(torch.uint8).numpy().tobytes() for spec in stream_tensors(tiny_model(0))
        )


@pytest.mark.long
def test_no_rank_outlives_a_node_that_goes_while_it_starts(tmp_path: Path) -> None:
    """The node ends torchrun, which cannot end ranks that are still importing."""
    with swarm_in(tmp_path) as swarm:
        swarm.lead_with(device="cpu")
        learner = swarm.lead("--port", "0", "--trainer-ranks", "2")

        def ranks() -> list[psutil.Process]:
            return [child for child in learner.children() if "RANK" in child.environ()]

        eventually(lambda: len(ranks()) == 2, learner, "both ranks")
        started = ranks()
        try:
            learner.signal(signal.SIGINT)
            assert learner.wait() == 130, learner.output()
            assert psutil.wait_procs(started, timeout=PATIENCE_S)[1] == []
        finally:
            for rank in started:
                if rank.is_running():
                    rank.kill()
