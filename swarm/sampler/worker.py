"""The engine child, as the sampler node uses it: leases in, answers out, versions installed between batches."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any, Literal

from swarm.broadcast.manifest import ChunkTable, Head, Layout
from swarm.capacity.fleet import Lengths, mean_longest
from swarm.child import Child
from swarm.rollout.client import Answer, SealedLease
from swarm.sampler.engine import Generate, Generated, Install, Installed, Job, Sampled, Start, Started
from swarm.types import Rollout, VersionId

EngineKind = Literal["transformers", "scripted"]

ENGINE_MODULES: dict[EngineKind, str] = {
    "transformers": "swarm.sampler.engine_child",
    "scripted": "swarm.sampler.scripted_engine",
}
"""What a child process runs. The scripted one has no model: for trying out networks, and for tests."""

MOST_PER_S = 1e9
"""What a beat may tell of; only an engine without a model comes near it."""

LEAST_S = 1e-6
"""What a clock may not see."""

LENGTHS_KEPT = 512
"""Lengths by which a batch with free places is compared with a full one: of four batches at least, with 128 places."""

RATE_SMOOTHING = 0.3
"""Weight of the newest batch in the measured rate: three batches forget a slow start."""


class EngineWorker:
    """One engine process. `installed` is what it holds, proven by the tensor sums; it only rises (I4).

    `rollouts_per_s` is what it gets done, `full_rollouts_per_s` what it would with batches of `batch_samples`, and
    `tokens_per_s` how fast one sample grows meanwhile; 0 before the first batch.
    """

    def __init__(
        self,
        directory: Path,
        *,
        kind: EngineKind,
        device: str,
        hang_s: float,
        batch_samples: int = 1,
        rehearse_tokens_per_s: float | None = None,
        rehearse_noise: float = 0.0,
    ) -> None:
        self._kind: EngineKind = kind
        self._batch_samples = batch_samples
        self._rehearse_tokens_per_s = rehearse_tokens_per_s or 0.0
        self._rehearse_noise = rehearse_noise
        self._files_dir = directory / "model"
        self._device = device
        self._child = Child("engine", ENGINE_MODULES[kind], log=directory / "engine.log", hang_s=hang_s)
        self.installed: VersionId | None = None
        self.rollouts_per_s = 0.0
        self.full_rollouts_per_s = 0.0
        self.tokens_per_s = 0.0
        self.device_class: str = kind
        """The maker's name of the device once it is known, else the kind of engine."""
        self._install_s = self._ended_at = 0.0
        self._full_batch_s = 0.0
        self._lengths: deque[int] = deque(maxlen=LENGTHS_KEPT)

    async def launch(self) -> None:
        """Start the process; it imports its libraries while the node looks for the learner."""
        await self._child.start()

    async def load(self, layout: Layout) -> Started:
        """Build the model that the swarm trains, from the files that came with its layout."""
        self._files_dir.mkdir(parents=True, exist_ok=True)
        for file in layout.files:
            (self._files_dir / file.name).write_bytes(file.content)
        command = Start(
            directory=str(self._files_dir),
            layout=layout,
            device=self._device,
            rehearse_tokens_per_s=self._rehearse_tokens_per_s,
            rehearse_noise=self._rehearse_noise,
        )
        started = await self._child.call(command, Started)
        self.device_class = started.device_name or self._kind
        return started

    async def install(self, head: Head, table: ChunkTable, weights: Path) -> None:
        """Have the engine copy the weights; waits for the running batch. The file must not change meanwhile."""
        command = Install(version=head.version, path=str(weights), tensor_sums=table.tensor_sums)
        done = await self._child.call(command, Installed)
        assert self.installed is None or head.version > self.installed
        self.installed = head.version
        self._install_s = done.seconds

    async def generate(self, leases: list[SealedLease], *, follows: bool = False) -> list[Answer]:
        """Draw every sample of the leases in one call. `follows`: they were at hand when the last batch ended, so what
        lay between (an install, the spool) is part of what a batch takes."""
        now = time.monotonic()
        between_s = now - self._ended_at if follows else 0.0
        jobs = [
            Job(
                prompt_token_ids=sealed.lease.prompt_token_ids,
                seed=spec.seed,
                rules=sealed.lease.rules,
                time_limit_s=max(0.0, sealed.deadline - now),
            )
            for sealed in leases
            for spec in sealed.lease.samples
        ]
        generated = await self._child.call(Generate(jobs=tuple(jobs)), Generated)
        self._ended_at = time.monotonic()
        self._measure(generated, between_s)
        samples = iter(generated.samples)
        return [
            Answer(
                lease=sealed,
                rollouts=tuple(
                    _rollout(sealed.lease.group_id, spec.index, next(samples)) for spec in sealed.lease.samples
                ),
            )
            for sealed in leases
        ]

    async def stop(self) -> None:
        await self._child.stop()

    def status(self) -> dict[str, Any]:
        return {
            "engine_pid": self._child.pid,
            "installed": str(self.installed) if self.installed else None,
            "install_s": round(self._install_s, 4),
            "rollouts_per_s": round(self.rollouts_per_s, 1),
            "tokens_per_s": round(self.tokens_per_s, 1),
        }

    def _measure(self, generated: Generated, between_s: float) -> None:
        count = len(generated.samples)
        self.rollouts_per_s = _smoothed_rate(self.rollouts_per_s, count, generated.seconds)
        self._lengths.extend(length for one in generated.samples if (length := len(one.token_ids) // 4))
        if count:
            full = max(count, self._batch_samples)
            took_s = generated.seconds * self._stretch(count, full) + between_s
            # Times are averaged: the mean of rates would be more than what comes of them.
            self._full_batch_s = _smoothed(self._full_batch_s, took_s)
            self.full_rollouts_per_s = min(MOST_PER_S, full / max(self._full_batch_s, LEAST_S))
        self.tokens_per_s = _smoothed_rate(self.tokens_per_s, generated.steps, generated.seconds)

    def _stretch(self, count: int, full: int) -> float:
        """How much longer a batch of `full` takes than one of `count`: its longest sample is longer. What is at hand
        must not pass for what the engine could do: where samplers are too many, batches are small."""
        if count == full or not self._lengths:
            return 1.0
        lengths = Lengths.of(self._lengths).tokens
        return mean_longest(lengths, full) / mean_longest(lengths, count)


def _smoothed_rate(before: float, count: int, seconds: float) -> float:
    """A mean rate that forgets."""
    return _smoothed(before, min(MOST_PER_S, count / max(seconds, LEAST_S)))


def _smoothed(before: float, value: float) -> float:
    """A mean that forgets; 0 is no measurement."""
    return before + RATE_SMOOTHING * (value - before) if before and value else value or before


def _rollout(group_id: str, index: int, sampled: Sampled) -> Rollout:
    return Rollout(
        group_id=group_id,
        index=index,
        token_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        loss_mask=b"\1" * (len(sampled.token_ids) // 4),
        spans=sampled.spans,
        finish=sampled.finish,
        reason=sampled.fault[:200],
    )
