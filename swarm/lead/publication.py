"""How the learner publishes: staged weights become a version, which is recorded and only then announced.

A published version stands as long as its weights can be made again. After a crash the learner trains on the recorded
batches again. If the result differs from the published weights, or if others hold a version that this learner has lost,
the next publication has the next incarnation, which is newer than everything before it. `InstallTracker` measures how
long it takes until a version is installed everywhere.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from swarm.broadcast.publishing import content_of
from swarm.broadcast.service import BroadcastService
from swarm.broadcast.store.disk import DiskFull, copy_parts, require_room
from swarm.broadcast.store.store import HeldVersion
from swarm.broadcast.version.manifest import Layout, trained_spans
from swarm.lead.training import PublishedStep, Training
from swarm.node.network import NodeNetwork
from swarm.rollout.api import RolloutService
from swarm.rollout.journal.entries import VersionPublished
from swarm.run.run import Run
from swarm.run.timeline import PUBLICATION
from swarm.types import NodeId, VersionId

SHARES = {"50": 0.5, "90": 0.9, "100": 1.0}  # Shares of the samplers, by their name in `status`
MAX_FOLLOWED = 64  # Versions followed at once: after 64 later publications, install times say nothing useful any more


@dataclass(slots=True, kw_only=True)
class Spread:
    """How a version spread. The trainer was held up for `stage_s`; `prepared_s` is the time from staged weights to
    publication, `installed_s` the seconds from publication until each node held it. `is_open` until all nodes do."""

    published_at: float
    stage_s: float
    prepared_s: float
    installed_s: dict[NodeId, float] = field(default_factory=dict)
    is_open: bool = True


class InstallTracker:
    """Turns publications and installs into durations. A newer installed version counts for all older ones."""

    def __init__(self) -> None:
        self._spreads: dict[VersionId, Spread] = {}
        self._installed: dict[NodeId, VersionId] = {}
        self.last_broadcast_s: float | None = None
        self.on_everywhere: Callable[[], None] = lambda: None
        """Called when all present samplers have the newest version, or none is left."""

    def published(self, version: VersionId, *, now: float, stage_s: float = 0.0, prepared_s: float = 0.0) -> None:
        self._spreads[version] = Spread(published_at=now, stage_s=stage_s, prepared_s=prepared_s)
        if len(self._spreads) > MAX_FOLLOWED:
            del self._spreads[min(self._spreads)]

    def installed(self, node: NodeId, version: VersionId, *, now: float) -> None:
        """Note that the engine of `node` holds `version`. Its versions only rise (I4)."""
        known = self._installed.get(node)
        if known is None or version > known:
            self._installed[node] = version
            for reached, spread in self._spreads.items():
                if reached <= version:
                    spread.installed_s.setdefault(node, now - spread.published_at)
            self._settle(now)

    def gone(self, node: NodeId, *, now: float) -> None:
        """Stop waiting for `node`."""
        if self._installed.pop(node, None) is not None:
            self._settle(now)
            if not self._installed:
                self.on_everywhere()

    def install_s(self, node: NodeId, version: VersionId) -> float | None:
        """Return the seconds from the publication of `version` until `node` held it or a newer one; None if unknown."""
        return self._spreads[version].installed_s.get(node) if version in self._spreads else None

    def skipped_s(self, before: VersionId, after: VersionId) -> float:
        """Return by how much the versions that a node takes with `after`, from `before` on, are older in the mean: how
        long a publication waits for such a node, on top of an install."""
        at = [spread.published_at for version, spread in self._spreads.items() if before < version <= after]
        return max(at) - fmean(at) if at else 0.0

    def prepared_s(self, version: VersionId) -> float:
        """Return the seconds from the staged weights of `version`, which is still followed, to its publication."""
        return self._spreads[version].prepared_s

    def seen(self, version: VersionId) -> dict[str, Any]:
        """Return what `status` says of a version in addition to its transfer."""
        spread = self._spreads.get(version)
        before = {"stage_s": round(spread.stage_s, 4), "prepared_s": round(spread.prepared_s, 4)} if spread else {}
        return {**before, "installed_s": self.spread_s(version)}

    def newest_figures(self) -> dict[str, float]:
        """Return what the newest version took of the trainer's time and until its publication, for metrics.jsonl."""
        newest = self._spreads[max(self._spreads)] if self._spreads else None
        return {"stage_s": round(newest.stage_s, 4), "prepared_s": round(newest.prepared_s, 4)} if newest else {}

    def spread_s(self, version: VersionId) -> dict[str, float | None]:
        """Return the seconds until each share (SHARES) of the present samplers held `version`; None if not yet."""
        spread = self._spreads.get(version)
        times = spread.installed_s if spread is not None else {}
        known = sorted(at for node, at in times.items() if node in self._installed)
        found: dict[str, float | None] = {}
        for name, share in SHARES.items():
            needed = max(1, math.ceil(share * len(self._installed)))
            found[name] = round(known[needed - 1], 4) if needed <= len(known) else None
        return found

    def _settle(self, now: float) -> None:
        reached = min(self._installed.values(), default=None)
        for version, spread in sorted(self._spreads.items()):
            if reached is not None and version <= reached and spread.is_open:
                spread.is_open, self.last_broadcast_s = False, now - spread.published_at
                if version == max(self._spreads):
                    self.on_everywhere()


ROOM_S = 1.0  # Pause between two tries on a full disk
R = TypeVar("R")


class Publication:
    """Publishes the learner's versions. `due` is set when a version must be published outside of the usual period."""

    def __init__(
        self,
        run: Run,
        network: NodeNetwork,
        broadcast: BroadcastService,
        rollouts: RolloutService,
        training: Training,
        tracker: InstallTracker,
    ) -> None:
        self._run = run
        self._network = network
        self._broadcast = broadcast
        self._rollouts = rollouts
        self._training = training
        self.tracker = tracker
        self._overtaken = asyncio.Event()
        self._diverged = False
        self._publishing = asyncio.Lock()
        self.due = asyncio.Event()
        self.count = 0
        self.kept_at: Callable[[VersionId], Path] | None = None
        """Where each version's weights get a second name, so that what it draws can be drawn again."""
        self.fault = ""
        """Why nothing can be published now; "" if something can."""
        network.on_generation = self._overtaken.set
        self._note = partial(run.timeline.note, PUBLICATION)
        tracker.on_everywhere = lambda: self._note("send", time.time(), time.time())

    @property
    def newest(self) -> VersionId:
        """The newest version. At least one must have been published."""
        assert self._broadcast.newest is not None
        return self._broadcast.newest.head.version

    async def look_back(self) -> None:
        """Have the trainer compare its weights with the version that was published before a restart. Call it before the
        trainer catches up."""
        held = self._broadcast.newest
        if held is None:
            return
        content = content_of(held.table)
        recorded = await asyncio.to_thread(self._run.journal.published, held.head.version.version)
        # If a version has no record, the learner was killed before it wrote one. The version stands if the batches give
        # the same weights again.
        if recorded is not None and recorded != VersionPublished(version=held.head.version, content=content):
            self._diverged = True
        self._training.published = PublishedStep(step=held.head.version.version, content=content)

    async def go_on(self, step: int, period: int) -> None:
        """Let samplers work with the newest version, once the trainer has caught up to `step`. Publish if necessary."""
        held = self._broadcast.newest
        if held is None or self._diverged or held.head.version.version > step:
            if held is not None and self._network.incarnation <= held.head.version.incarnation:
                self._network.outlive(held.head.version)
            await self.publish(step)
            return
        await self._record(held)
        if step - held.head.version.version >= period:
            await self.publish(step)
        else:
            await self._told(held)

    async def publish(self, step: int) -> None:
        """Stage and publish the trainer's present weights, those after `step` steps."""
        await self._training.stage()
        await self.publish_staged(step)

    async def publish_staged(self, step: int) -> None:
        """Publish the staged weights, those after `step` steps. Wait while the disk is full."""
        staged_at = time.monotonic()
        async with self._publishing:
            version = VersionId(incarnation=self._network.incarnation, version=step)
            held = self._broadcast.newest
            if held is not None and held.head.version >= version:
                return
            self.due.clear()
            if (encoded := await self._with_room(lambda: self._encode(version))) is None:
                self.due.set()
                return
            self._diverged = False
            await self._announce(encoded, staged_at=staged_at)

    async def settled(self) -> VersionId:
        """Return the newest version, once the publication under way is over."""
        async with self._publishing:
            return self.newest

    async def watch(self) -> None:
        """Publish again under the next incarnation whenever others know a later one than the published one. Runs for
        ever."""
        while True:
            await self._overtaken.wait()
            self._overtaken.clear()
            if self._diverged or self.count == 0:
                self.due.set()
                continue
            self._run.say("others know a later run of this learner: publishing under the next incarnation")
            async with self._publishing:
                version = VersionId(incarnation=self._network.incarnation, version=self.newest.version)
                await self._announce(await self._with_room(partial(self._broadcast.encode_again, version)))

    def diverged(self) -> None:
        """Replace the newest version by the next one, since its weights cannot be made again."""
        self._run.say("the recorded batches give other weights than were published: the next version replaces them")
        self._diverged = True
        self._network.outlive(self.newest)

    # -- parts -----------------------------------------------------------------------------------------------

    async def _encode(self, version: VersionId) -> HeldVersion | None:
        """Encode the staged weights. Return None if a restarted trainer has staged other weights meanwhile."""
        async with self._training.staging_lock:
            if self._training.staged_step != version.version:
                return None
            self._note("encode", time.time())
            return await self._broadcast.encode(self._training.staging, version)

    async def _announce(self, held: HeldVersion, *, staged_at: float | None = None) -> None:
        version = held.head.version
        await self._record(held)
        self._broadcast.announce(held)
        self._network.published(held.sealed_head)
        await self._told(held, staged_at=staged_at)
        if self._network.incarnation > version.incarnation:
            # Others announced a later life while this version was being encoded.
            self._overtaken.set()

    async def _record(self, held: HeldVersion) -> None:
        version, content = held.head.version, content_of(held.table)
        await self._run.journal.write([VersionPublished(version=version, content=content)])
        self._training.published = PublishedStep(step=version.version, content=content)

    async def _told(self, held: HeldVersion, *, staged_at: float | None = None) -> None:
        version = held.head.version
        self.count += 1
        self._note("send", time.time())
        self._network.set_held(version)
        if not self._rollouts.samplers:
            self._note("send", time.time(), time.time())
        now = time.monotonic()
        stage_s, prepared_s = (0.0, 0.0) if staged_at is None else (self._training.stage_s, now - staged_at)
        self.tracker.published(version, now=now, stage_s=stage_s, prepared_s=prepared_s)
        if self.kept_at is not None and (weights := self._broadcast.raw_weights) is not None:
            assert self._training.layout is not None
            with suppress(OSError, DiskFull):
                await asyncio.to_thread(hold_weights, weights, self.kept_at(version), self._training.layout)
        await self._rollouts.published(version)

    async def _with_room(self, work: Callable[[], Awaitable[R]]) -> R:
        """Repeat `work` while the disk is full."""
        while True:
            try:
                done = await work()
            except DiskFull as error:
                self.fault = str(error)
                await asyncio.sleep(ROOM_S)
            else:
                self.fault = ""
                return done


def hold_weights(weights: Path, held: Path, layout: Layout) -> None:
    """Give the weights file the second name `held`. Copy it if the file system has no hard links; of an adapter run
    copy what is not frozen, so that the file can be staged over without its base being written again."""
    held.unlink(missing_ok=True)
    if layout.adapter is not None:
        copy_parts(weights, held, trained_spans(layout.tensors))
        return
    try:
        os.link(weights, held)
    except OSError:
        require_room(held.parent, weights.stat().st_size, held.name)
        shutil.copyfile(weights, held)
