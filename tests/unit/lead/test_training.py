"""The trainer child, kept alive: what is trained again after it ends, and what is made of the difference."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from benchmarks.payload import layout_of
from swarm.broadcast.publishing import content_of_file
from swarm.broadcast.store.disk import DiskFull
from swarm.errors import ChildFailed
from swarm.lead.training import MAX_FAULTS, PublishedStep, Training, reward_figures, train_group
from swarm.learner.checkpoint.files import TrainerState, best_checkpoint, checkpoint_path, whole_checkpoints
from swarm.learner.messages import Audited, AuditRollout, Prepared, Saved, Trained, TrainGroup
from swarm.rollout.journal.entries import BoundSet
from swarm.rollout.journal.journal import Journal
from swarm.settings import LeadConfig
from swarm.types import MAX_PARTS, NodeId, Score
from swarm.wire import digest
from tests.builders import prompt
from tests.unit.episodes import TWO, played
from tests.unit.lead.test_drawing import prepared
from tests.unit.learner.checkpoint.test_files import save
from tests.unit.rollout.journal.test_journal import group, taken
from tests.unit.runs import Log, run_in

LAYOUT = layout_of(1 << 16)
BATCHES = 4


class Child:
    """A trainer whose weights are the digest of all that it was trained on. It dies when told to, and begins anew."""

    def __init__(self, staging: Path) -> None:
        self.staging = staging
        self.dies_at: list[tuple[str, int]] = []
        self.starts = 0
        self.half_prepared_at: set[int] = set()
        self.gone = False
        self.trained: list[int] = []
        self.rates: list[tuple[int, float | None]] = []
        self.other_weights = False
        self.lives_for = self.steps_left = 1000
        self.saved: dict[Path, tuple[int, bytes]] = {}

    async def prepare(self, config: LeadConfig, longest_completion: int, resume: Path | None = None) -> Prepared:
        self.starts += 1
        self.step, self.state = self.saved[resume] if resume is not None else (0, digest(b""))
        self.gone = False
        self.steps_left = self.lives_for
        await asyncio.sleep(0)
        if self.starts in self.half_prepared_at:
            raise ChildFailed("the trainer failed: no space left on device")
        self._write()
        return replace(prepared("cpu"), layout=LAYOUT, step=self.step)

    async def train(
        self, step: int, groups: list[TrainGroup], lineage: bytes = b"", learning_rate: float | None = None
    ) -> Trained:
        self.steps_left -= 1
        if self.steps_left < 0:
            self.gone = True
        self._live("train", step)
        assert step == self.step
        self.lineage = lineage
        self.rates.append((step, learning_rate))
        rewards = [one.reward for group in groups for one in group.rollouts]
        self.state = digest(self.state + repr((rewards, learning_rate, self.other_weights)).encode() + lineage)
        self.step += 1
        self.trained.append(step)
        return Trained(metrics={"reward": sum(rewards)}, seconds=0.0)

    async def stage(self) -> None:
        self._live("stage", self.step)
        self._write()

    async def save(self, directory: Path, step: int) -> None:
        self._live("save", step)
        assert step == self.step
        save(directory.parent, step, state=TrainerState(step=step, lineage=self.lineage.hex(), parameters=3))
        self.saved[directory] = step, self.state

    async def audit(self, path: Path, rollouts: tuple[AuditRollout, ...], fast: bool) -> Audited:
        self._live("audit", self.step)
        return Audited()

    async def flush(self) -> Saved:
        return Saved(step=None, fault="")

    async def stop(self) -> None:
        await asyncio.sleep(0)
        self.gone = True

    def _live(self, call: str, step: int) -> None:
        if self.gone:
            raise ChildFailed("the trainer died")
        if (call, step) in self.dies_at:
            self.dies_at.remove((call, step))
            raise ChildFailed("the trainer died")

    def _write(self) -> None:
        self.staging.write_bytes((self.state * (LAYOUT.total_bytes // 32 + 1))[: LAYOUT.total_bytes])


class Run:
    def __init__(self, directory: Path, journal: Journal, config: LeadConfig | None = None) -> None:
        self.said: list[str] = []
        self.log = Log()
        self.diverged = 0
        self.did: list[str] = []
        self.training = Training(
            run_in(
                directory,
                config=config,
                log=self.log,
                journal=journal,
                note=lambda lane, state, began: self.did.append(state),
                say=self.said.append,
            ),
            prompt,
            6,
            on_divergence=self._note,
        )
        self.child = Child(self.training.staging)
        self.training._trainer = cast(Any, self.child)

    @property
    def events(self) -> list[str]:
        return [kind for kind, _ in self.log.events]

    def _note(self) -> None:
        self.diverged += 1

    async def content(self) -> bytes:
        await self.training.stage()
        return content_of_file(self.training.staging, LAYOUT)


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    """Of four batches of one group each."""
    journal = Journal(tmp_path, group_size=2)
    await journal.start()
    for number in range(BATCHES):
        await journal.write([*group(number), taken(number, number)])
    yield journal
    await journal.close()


@pytest.fixture
async def run(tmp_path: Path, journal: Journal) -> Run:
    run = Run(tmp_path, journal)
    await run.training.look()
    await run.training.open()
    return run


async def test_batches_are_trained_on_again_at_the_rates_that_were_set_for_them(run: Run, journal: Journal) -> None:
    for step, rate in ((2, 1e-5), (4, 1e-7)):
        await journal.write([BoundSet(max_staleness=2, publish_every_steps=1, step=step, learning_rate=rate)])
    await run.training.catch_up(3)
    assert [figures["step"] for figures in run.log.figures] == [1, 2, 3]
    content = await run.content()
    await journal.write([*group(BATCHES), taken(BATCHES, BATCHES)])
    await journal.write([BoundSet(max_staleness=2, publish_every_steps=1, step=3, learning_rate=1e-6)])
    run.child.dies_at = [("stage", 3)]
    assert await run.content() == content
    await run.training.catch_up(BATCHES + 1)
    first = [(0, None), (1, None), (2, 1e-5)]
    assert run.child.rates == [*first, *first, (3, 1e-6), (4, 1e-6)], "what was set last holds"


@pytest.mark.parametrize("call", ["train", "stage", "save"])
async def test_a_child_that_dies_in_any_call_is_brought_to_where_it_was(run: Run, call: str) -> None:
    await run.training.catch_up(2)
    content = await run.content()
    run.child.dies_at = [(call, 2)]
    if call == "train":
        await run.training.catch_up(3)
    elif call == "stage":
        assert await run.content() == content
    else:
        await run.training.save()
    assert run.child.starts == 2
    assert set(run.did[:4]) == {"train", "stage", "wait"}
    assert run.did[-1] == "wait"
    assert run.events == ["trainer_restarted"]
    assert run.child.trained[:4] == [0, 1, 0, 1]
    assert run.child.step == run.training.step == (3 if call == "train" else 2)


async def test_one_that_dies_again_and_again_ends_the_run(run: Run) -> None:
    run.child.dies_at = [("train", 1)] * MAX_FAULTS
    with pytest.raises(ChildFailed, match="the trainer died"):
        await run.training.catch_up(2)
    assert run.child.starts == MAX_FAULTS


async def test_one_death_that_two_calls_see_is_one_fault(run: Run) -> None:
    """An audit and a save are made at once; the first finds the trainer dead, and the second the new one."""
    await run.training.catch_up(2)
    run.child.gone = True
    await asyncio.gather(run.training.audit(Path("weights"), (), False), run.training.save(), run.training.stage())
    assert run.child.starts == 2
    assert run.events == ["trainer_restarted"]
    assert run.child.step == run.training.step == 2


async def test_a_trainer_that_lives_for_three_steps_gets_through_a_long_run(tmp_path: Path) -> None:
    """What is trained again is saved as often as ever, and a step that none had come to forgives the faults before."""
    batches = 12
    journal = Journal(tmp_path, group_size=2)
    await journal.start()
    for number in range(batches):
        await journal.write([*group(number), taken(number, number)])
    run = Run(tmp_path, journal, LeadConfig(checkpoint_every_steps=2))
    run.child.lives_for = 3
    await run.training.open()
    await run.training.catch_up(batches)
    assert run.training.step == batches
    assert run.child.starts > MAX_FAULTS
    await journal.close()


async def test_a_child_that_was_prepared_by_half_is_not_trained_on_from_where_the_last_one_was(run: Run) -> None:
    """It lives, at the checkpoint, and would take the next batch without those before it."""
    await run.training.catch_up(3)
    run.child.dies_at, run.child.half_prepared_at = [("train", 3)], {2}
    await run.training.catch_up(4)
    assert run.child.trained == [0, 1, 2, 0, 1, 2, 3]
    assert run.child.starts == 3


async def test_what_a_killed_learner_left_beside_its_checkpoints_goes_at_the_start(run: Run, tmp_path: Path) -> None:
    """At its next checkpoint would be too late for one that was killed after its last."""
    left = tmp_path / "checkpoints" / "step-000025.removed.partial"
    left.mkdir(parents=True)
    (left / "trainer.safetensors").write_bytes(b"as large as the model")
    await run.training.look()
    assert not left.exists()


@pytest.mark.parametrize("other_weights", [False, True])
async def test_weights_that_come_out_otherwise_than_published_are_told(run: Run, other_weights: bool) -> None:
    await run.training.catch_up(2)
    run.training.published = PublishedStep(step=2, content=cast(Any, await run.content()))
    run.child.other_weights = other_weights
    run.child.dies_at = [("train", 2)]
    await run.training.catch_up(3)
    assert run.diverged == run.events.count("diverged") == other_weights
    assert run.training.step == 3


async def test_staging_waits_while_a_publication_reads_the_file(run: Run) -> None:
    await run.training.catch_up(1)
    async with run.training.staging_lock:
        before = run.training.staging.read_bytes()
        staging = asyncio.create_task(run.training.stage())
        await asyncio.sleep(0)
        assert run.training.staging.read_bytes() == before
    await staging
    assert run.training.staged_step == 1
    assert run.training.staging.read_bytes() != before


@pytest.mark.parametrize(("room", "dies"), [(True, False), (False, False), (True, True)])
async def test_weights_that_may_be_audited_are_not_staged_over_nor_by_a_trainer_that_is_started_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool, dies: bool
) -> None:
    """Without room for both, the learner's own come first."""
    await run.training.stage()
    before = run.training.staging.read_bytes()
    run.training.audited.mkdir()
    held = run.training.audited / "0.1.bin"
    os.link(run.training.staging, held)
    if not room:
        monkeypatch.setattr("swarm.lead.training.allocate", _no_room)
    run.child.dies_at = [("train", 0)] * dies
    await run.training.catch_up(1)
    await run.training.stage()
    assert run.child.starts == 1 + dies
    assert run.training.staging.read_bytes() != before
    assert held.exists() == room
    if room:
        assert held.read_bytes() == before
    assert not (tmp_path / "staging.next").exists()


def _no_room(descriptor: int, nbytes: int, path: Path) -> None:
    raise DiskFull(f"the disk of {path.parent} is full")


@pytest.mark.parametrize(("best", "led_to", "left"), [(2, 2, [2]), (3, 2, [2]), (4, 5, [5]), (8, 8, []), (30, 9, [])])
async def test_the_checkpoint_nearest_to_the_best_version_is_found_and_never_pruned(
    run: Run, tmp_path: Path, best: int, led_to: int, left: list[int]
) -> None:
    root = tmp_path / "checkpoints"
    for step in (2, 5, 7, 8, 9):
        save(root, step)
    run.training.best = best
    await run.training._note_save(Saved(step=9, fault=""))
    assert os.readlink(tmp_path / "best") == f"checkpoints/step-{led_to:06}"
    assert [found.step for found in whole_checkpoints(root)] == [*left, 7, 8, 9]
    # The last version may be measured after the last checkpoint.
    run.training.best = 7
    await run.training.flush()
    assert best_checkpoint(tmp_path) == checkpoint_path(root, 7)
    save(root, 10)
    await run.training._note_save(Saved(step=10, fault=""))
    assert [found.step for found in whole_checkpoints(root)] == [7, 8, 9, 10]


def test_each_of_several_rewards_has_its_mean_and_deviation() -> None:
    scores = [Score(reward=0.0, exact=False, parts={"exact": value, "form": 1.0}) for value in (0.0, 1.0, 2.0)]
    assert reward_figures([*scores, Score(reward=0.0, exact=False)]) == {
        "rewards/exact/mean": 1.0,
        "rewards/exact/std": 1.0,
        "rewards/form/mean": 1.0,
        "rewards/form/std": 0.0,
    }
    alone = [Score(reward=0.0, exact=False, parts={f"r{number}": 0.5}) for number in range(40)]
    assert len(reward_figures(alone)) == 2 * MAX_PARTS


def test_the_trainer_hears_of_the_turns_of_an_episode() -> None:
    one = played(TWO, seats=(0, 3))
    (made,) = train_group(prompt(0), [(one, Score(reward=1.0, exact=True), NodeId("a"))], step=2).rollouts
    assert (made.turns, made.seats, made.staleness) == (TWO, (0, 3), 2)
    assert (made.length, made.drawn) == (7, 4)
