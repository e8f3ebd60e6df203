"""What a resumed learner makes of the version on its disk; how long one takes to be installed everywhere."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.payload import write_weights
from swarm.broadcast.publishing import content_of
from swarm.broadcast.version.manifest import trained_spans
from swarm.lead.publication import MAX_FOLLOWED, InstallTracker, Publication, hold_weights
from swarm.learner.messages import Train
from swarm.rollout.journal.entries import VersionPublished
from swarm.rollout.journal.journal import Journal
from swarm.types import NodeId, VersionId
from swarm.wire import digest
from tests.builders import ALICE, BOB, MIXED_LAYOUT, v
from tests.unit.broadcast.test_receiver import SIZE, LearnerHost, World
from tests.unit.runs import run_in
from tests.unit.trainers import group, trainer_in


class Network:
    """The learner's place in gossip: which incarnation it publishes under."""

    def __init__(self) -> None:
        self.incarnation = 0
        self.on_generation: Any = None

    def outlive(self, version: VersionId) -> None:
        self.incarnation = version.incarnation + 2

    def published(self, sealed_head: bytes) -> None: ...

    def set_held(self, version: object) -> None: ...


class Life:
    """One life of a learner over the same directory: real versions and a real journal."""

    def __init__(self, directory: Path, learner: LearnerHost, journal: Journal) -> None:
        self.learner, self.journal = learner, journal
        self.network = Network()
        self.told: list[VersionId] = []
        self.did: list[str] = []
        self.said: list[str] = []
        training = SimpleNamespace(
            published=None, staged_step=0, stage_s=0.5, staging=directory / "staging.bin", stage=self._stage
        )
        training.staging_lock = asyncio.Lock()
        self.training = cast(Any, training)
        network: Any = self.network
        rollouts: Any = SimpleNamespace(published=self._published, samplers={"a": 1})
        self.step = 0
        self.tracker = InstallTracker()
        self.publication = Publication(
            run_in(
                directory,
                journal=journal,
                note=lambda lane, state, *times: self.did.append(state if len(times) == 1 else f"end of {state}"),
                say=self.said.append,
            ),
            network,
            learner.service,
            rollouts,
            self.training,
            self.tracker,
        )

    async def _published(self, version: VersionId) -> None:
        self.told.append(version)

    async def _stage(self) -> None:
        self.training.staged_step = self.step
        write_weights(self.training.staging, SIZE, seed=0, step_lr=1e-5 * self.step)

    async def resume_at(self, step: int, *, period: int = 1) -> VersionId:
        """Go on after so many recorded batches; what samplers are told to work with."""
        await self.publication.look_back()
        self.step = step
        await self.publication.go_on(step, period)
        return self.told[-1]

    def recorded(self, number: int) -> VersionPublished | None:
        return self.journal.published(number)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(tmp_path, stack)


@asynccontextmanager
async def life(world: World, *, again: bool = True) -> AsyncIterator[Life]:
    learner = await world.learner(again=again)
    journal = Journal(world.directory / "journal", group_size=2)
    await journal.start()
    try:
        yield Life(world.directory, learner, journal)
    finally:
        await journal.close()
        await learner.stop()


async def test_what_was_published_and_recorded_stands(world: World) -> None:
    async with life(world, again=False) as first:
        assert await first.resume_at(0) == v(0)
        first.step = 3
        await first.publication.publish(3)
        first.tracker.installed(ALICE, v(3), now=0.0)
        assert first.did == ["encode", "send", "encode", "send", "end of send"]
        assert first.tracker.prepared_s(v(3)) > 0
        assert first.tracker.seen(v(3))["stage_s"] == first.tracker.newest_figures()["stage_s"] == 0.5
    async with life(world) as second:
        assert await second.resume_at(3) == v(3)
        assert second.told == [v(3)]
        assert second.training.published.step == 3
        assert (second.tracker.prepared_s(v(3)), second.tracker.seen(v(3))["stage_s"]) == (0, 0)


async def test_a_version_that_was_encoded_and_not_recorded_is_recorded_and_stands(world: World) -> None:
    """The learner was killed in between; the recorded batches make the same weights again."""
    async with life(world, again=False) as first:
        await first.resume_at(0)
        held = await first.learner.publish(1)
        assert first.recorded(1) is None
    async with life(world) as second:
        assert await second.resume_at(1) == v(1)
        assert second.recorded(1) == VersionPublished(version=v(1), content=content_of(held.table))
        # It is compared with what the batches make, as a recorded one is.
        assert (second.training.published.step, second.training.published.content) == (1, content_of(held.table))


async def test_a_version_of_which_the_journal_says_something_else_is_replaced(world: World) -> None:
    async with life(world, again=False) as first:
        await first.journal.write([VersionPublished(version=v(1), content=digest(b"other weights"))])
        await first.learner.publish(1)
    async with life(world) as second:
        assert await second.resume_at(1) == v(1, incarnation=2)


async def test_a_version_beyond_the_recorded_batches_is_replaced(world: World) -> None:
    async with life(world, again=False) as first:
        await first.learner.publish(5)
    async with life(world) as second:
        assert await second.resume_at(4) == v(4, incarnation=2)


async def test_weights_that_came_out_otherwise_are_published_under_another_incarnation(world: World) -> None:
    async with life(world, again=False) as first:
        await first.resume_at(0)
    async with life(world) as second:
        await second.publication.look_back()
        second.publication.diverged()
        assert "other weights than were published" in second.said[-1]
        second.step = 2
        await second.publication.go_on(2, 1)
        assert second.told == [v(2, incarnation=2)]


async def test_a_step_whose_publication_was_due_is_published(world: World) -> None:
    async with life(world, again=False) as first:
        await first.resume_at(0)
    async with life(world) as second:
        assert await second.resume_at(1, period=2) == v(0)
    async with life(world) as third:
        assert await third.resume_at(3, period=2) == v(3)


# -- weights that are kept for audits ------------------------------------------------------------------------


def test_a_second_name_costs_no_copy_and_where_there_is_none_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no hard links here")

    weights, held = tmp_path / "weights.bin", tmp_path / "held.bin"
    weights.write_bytes(b"abc")
    hold_weights(weights, held, MIXED_LAYOUT)
    assert os.path.samefile(weights, held)
    held.unlink()
    monkeypatch.setattr(os, "link", refuse)
    hold_weights(weights, held, MIXED_LAYOUT)
    weights.write_bytes(b"xyz")
    assert held.read_bytes() == b"abc"


def test_of_an_adapter_run_the_adapter_alone_is_held(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, adapter=4, learning_rate=1e-1)
    layout = trainer.prepared().layout
    trainer.step(Train(step=0, groups=(group([1.0, 0.0]),)))
    trainer.stage()
    staging = tmp_path / "staging.bin"
    hold_weights(staging, tmp_path / "held.bin", layout)
    assert staging.stat().st_nlink == 1
    (adapter,) = trained_spans(layout.tensors)
    assert (tmp_path / "held.bin").read_bytes() == bytes(adapter.start) + staging.read_bytes()[adapter.start :]


# -- how long a version takes to be installed everywhere -----------------------------------------------------


def test_a_version_is_broadcast_when_the_last_sampler_holds_it() -> None:
    tracker = InstallTracker()
    tracker.installed(ALICE, v(0), now=0.0)
    tracker.installed(BOB, v(0), now=0.0)
    tracker.published(v(1), now=10.0)
    tracker.installed(ALICE, v(1), now=11.0)
    tracker.installed(ALICE, v(0), now=12.0)  # It never goes back
    assert tracker.last_broadcast_s is None
    assert tracker.install_s(ALICE, v(1)) == 1.0
    assert tracker.install_s(BOB, v(1)) is tracker.install_s(ALICE, v(2)) is None
    assert tracker.skipped_s(v(8), v(9)) == 0.0
    tracker.published(v(2), now=13.0)
    tracker.installed(BOB, v(2), now=13.5)
    assert tracker.last_broadcast_s == 3.5, "a newer version counts for the older one"


def test_it_tells_when_the_newest_version_is_everywhere_and_not_of_older_ones() -> None:
    tracker, told = InstallTracker(), list[int]()
    tracker.on_everywhere = lambda: told.append(1)
    for number in (1, 2):
        tracker.published(v(number), now=0.0)
    tracker.installed(ALICE, v(1), now=1.0)
    assert told == []
    tracker.installed(ALICE, v(2), now=2.0)
    assert told == [1]
    tracker.published(v(3), now=3.0)
    tracker.gone(ALICE, now=4.0)
    assert (told, tracker.last_broadcast_s) == ([1, 1], 2.0), "to nobody, once nobody is left"


def test_the_oldest_of_too_many_open_versions_is_given_up() -> None:
    tracker = InstallTracker()
    for number in range(MAX_FOLLOWED + 1):
        tracker.published(v(number), now=float(number))
    tracker.installed(ALICE, v(0), now=100.0)
    assert tracker.last_broadcast_s is None
    tracker.installed(ALICE, v(1), now=101.0)
    assert tracker.last_broadcast_s == 100.0


def test_the_spread_of_a_version_over_the_samplers() -> None:
    tracker = InstallTracker()
    nodes = [NodeId(f"{i:032x}") for i in range(10)]
    for node in nodes:
        tracker.installed(node, v(0), now=0.0)
    tracker.published(v(1), now=10.0)
    assert tracker.spread_s(v(1)) == {"50": None, "90": None, "100": None}
    for seconds, node in enumerate(nodes[:9], start=1):
        tracker.installed(node, v(1), now=10.0 + seconds)
    assert tracker.spread_s(v(1)) == {"50": 5.0, "90": 9.0, "100": None}
    tracker.gone(nodes[9], now=30.0)
    assert (tracker.spread_s(v(1))["100"], tracker.last_broadcast_s) == (9.0, 20.0), "it is no longer waited for"
