"""The engine child as seen by the sampler node: leases in, answers out, versions installed, its speed measured."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from swarm.broadcast.version.manifest import Layout
from swarm.errors import ChildFailed, UserError
from swarm.pay.fleet import Lengths, mean_longest
from swarm.process import Child, clean_environment
from swarm.rollout.messages import MAX_DID, Did, Doing
from swarm.sampler.engine import (
    EngineKind,
    EngineOptions,
    Generate,
    Generated,
    GiveUp,
    Install,
    Installed,
    Job,
    NotInstalled,
    Reckon,
    Reckoned,
    Sampled,
    Start,
    Started,
)
from swarm.sampler.playing import Game
from swarm.sampler.weights import CONFIG, write_model_files
from swarm.types import MAX_TOKENS, Lease, VersionId

MAX_PER_S = 1e9  # Largest rate that a beat may report; only engines of tests come near it
MIN_S = 1e-6  # Shorter times may be invisible to a clock
LENGTHS_KEPT = 512  # Lengths by which a partial batch is compared with a full one: four batches of 128 places
RATE_SMOOTHING = 0.3  # Weight of the newest batch in the measured rate: three batches forget a slow start
TURNS = 2  # Single samples count after this many times the places: the short ones end first and look too fast


class Rates:
    """Measured rates of an engine that draws `places` samples side by side; 0 until its first answers give them.

    `rollouts_per_s` is its rate while it works, `full_rollouts_per_s` the rate with all places filled, `tokens_per_s`
    the growth of one sample. Of a completion that is drawn in parts only the last counts as a rollout.
    """

    def __init__(self, places: int) -> None:
        self.rollouts_per_s = self.full_rollouts_per_s = self.tokens_per_s = 0.0
        self._places = places
        self._full_batch_s = self._sample_s = self._side_by_side = self._drawn_per_s = 0.0
        self._ended = 1.0  # Of what was drawn: the rest was handed over half-done
        self._answered = self._max_side_by_side = 0
        self._lengths: deque[int] = deque(maxlen=LENGTHS_KEPT)

    def batch(self, generated: Generated, between_s: float) -> None:
        """Count a batch. `between_s` is the time since the end of the last one, if it could have started then."""
        count = len(generated.samples)
        self._note(generated, RATE_SMOOTHING)
        self._drawn_per_s = _smoothed_rate(self._drawn_per_s, count, generated.seconds)
        self.rollouts_per_s = self._ended * self._drawn_per_s
        if count:
            full = max(count, self._places)
            took_s = generated.seconds * self._stretch(count, full) + between_s
            # Times are averaged: the mean of rates would exceed the actual throughput.
            self._full_batch_s = _smoothed(self._full_batch_s, took_s)
            self.full_rollouts_per_s = min(MAX_PER_S, self._ended * full / max(self._full_batch_s, MIN_S))
        self.tokens_per_s = _smoothed_rate(self.tokens_per_s, generated.steps, generated.seconds)

    def sample(self, generated: Generated, side_by_side: int) -> None:
        """Count one of `side_by_side` samples; its time includes the wait for a place. Samples refused at once do not
        count."""
        if generated.steps == 0:
            return
        self._answered += 1
        self._max_side_by_side = max(self._max_side_by_side, side_by_side)
        # A plain mean at first: otherwise the very first sample would weigh like hundreds.
        weight = max(RATE_SMOOTHING / self._places, 1 / self._answered)
        self._note(generated, weight)
        self._sample_s = _smoothed(self._sample_s, max(generated.seconds, MIN_S), weight)
        self._side_by_side = _smoothed(self._side_by_side, side_by_side, weight)
        self.tokens_per_s = _smoothed_rate(self.tokens_per_s, generated.steps, generated.seconds, weight)
        if self._answered < TURNS * self._max_side_by_side:
            return
        # Times are averaged, as in `batch`: short samples would inflate a mean of rates.
        per_s = self._ended / self._sample_s
        self.rollouts_per_s = min(MAX_PER_S, self._side_by_side * per_s)
        self.full_rollouts_per_s = min(MAX_PER_S, max(self._places, self._side_by_side) * per_s)

    def _note(self, generated: Generated, weight: float) -> None:
        ended = [one.finish != "handed" for one in generated.samples]
        self._ended += weight * (sum(ended) / len(ended) - self._ended) if ended else 0.0
        self._lengths.extend(length for one in generated.samples if (length := len(one.token_ids) // 4))

    def _stretch(self, count: int, full: int) -> float:
        """Return how much longer a batch of `full` takes than one of `count`, because its longest sample is longer.
        Small batches, which occur if there are too many samplers, must not make the engine look slow."""
        if count == full or not self._lengths:
            return 1.0
        lengths = Lengths.of(self._lengths).tokens
        return mean_longest(lengths, full) / mean_longest(lengths, count)


def _smoothed_rate(before: float, count: int, seconds: float, weight: float = RATE_SMOOTHING) -> float:
    return _smoothed(before, min(MAX_PER_S, count / max(seconds, MIN_S)), weight)


def _smoothed(before: float, value: float, weight: float = RATE_SMOOTHING) -> float:
    """Return an exponentially smoothed mean; 0 means not measured."""
    return before + weight * (value - before) if before and value else value or before


TOLD_S = 3600.0  # What was longer ago is no news to a learner that was away


class Doings:
    """What an engine does, as the learner is told: one thing after another, without a gap."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: list[tuple[float, Doing]] = [(clock(), "fetch")]

    def now(self, what: Doing, *, since_s: float = 0.0) -> None:
        """Note that the engine does `what`, and has done so for `since_s`, whatever was noted meanwhile."""
        since = max(self._began[0][0], self._clock() - since_s)
        while self._began and self._began[-1][0] >= since:
            self._began.pop()
        if not self._began or self._began[-1][1] != what:
            self._began.append((since, what))
        del self._began[:-MAX_DID]

    def take(self) -> tuple[Did, ...]:
        """Return what was done since the last call."""
        now = self._clock()
        ends = [*self._began, (now, "wait")]
        self._began = [(now, self._began[-1][1])]
        spans = ((what, now - began, ended - began) for (began, what), (ended, _) in pairwise(ends))
        return tuple((what, min(TOLD_S, ago), min(TOLD_S, lasted)) for what, ago, lasted in spans if lasted > 0)


MIN_PORTION_TOKENS = 256  # Fewer take less time than what it costs to hand them over and read them again

ENGINE_MODULE = "swarm.sampler.engine_child"

ENGINE_VARIABLES = (
    *("ECHO_", "CUDA", "NVIDIA_", "NCCL_", "GLOO_", "HIP_", "HSA_", "ROC", "VLLM_", "TORCH", "PYTORCH_", "TRITON_"),
    *("FLASHINFER_", "MLX_", "OMP_", "KMP_", "GOMP_", "MKL_", "MALLOC_", "LD_PRELOAD", "CC", "CXX", "TOKENIZERS_"),
    "PYTHON",
)
"""Beginnings of the names of variables by which an owner tunes an engine; others may hold secrets."""

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables that say with how many threads the libraries of an engine compute."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
"""All that an engine needs came from the learner: a configuration that names anything else gets nothing."""


class ProofFailed(ChildFailed):
    """After an install the engine does not hold what the learner signed."""


class EngineWorker:
    """One engine process. `installed` is the version that it provably holds; it only rises (I4). `device_class` is the
    maker's name of the GPU once it is known, else the kind of engine; and the precision, if it rounds weights. Its
    process cannot read the files `secrets`, where the system allows that, and computes with `threads`, if not None.
    Completions are handed over after about `portion_s`, if not None: a machine may vanish without a notice."""

    def __init__(
        self,
        directory: Path,
        *,
        kind: EngineKind,
        options: EngineOptions,
        module: str = ENGINE_MODULE,
        secrets: Sequence[Path] = (),
        threads: int | None = None,
        portion_s: float | None = None,
    ) -> None:
        self._portion_s = portion_s
        self.kind: EngineKind = kind
        self._directory = directory
        self._files_dir = directory / "model"
        self._options = options
        self._started: Started | None = None
        computes_with = dict.fromkeys(THREADS, str(threads)) if threads else {}
        self._child = Child(
            "engine",
            module,
            kind,
            *(str(path.absolute()) for path in secrets),
            log=directory / "engine.log",
            hang_s=options.hang_s,
            environment=lambda given: {**clean_environment(given, ENGINE_VARIABLES), **OFFLINE, **computes_with},
        )
        self.installed: VersionId | None = None
        self.places = options.places or 1
        self.lockstep = True
        self.rates = Rates(self.places)
        self.doings = Doings()
        self.last_install: Installed | None = None
        self.device_class: str = kind
        self._ended_at = 0.0
        self._drawing = 0

    async def launch(self) -> None:
        """Start the process; it imports its libraries while the node looks for the learner."""
        await self._child.start()

    async def reckon(self, layout: Layout) -> Reckoned:
        """Ask whether the swarm's model fits, before its weights are fetched. Raise UserError if it does not."""
        config = tuple(file for file in layout.files if file.name == CONFIG)
        command = Reckon(kind=self.kind, layout=msgspec.structs.replace(layout, files=config), options=self._options)
        return await self._child.call(command, Reckoned)

    async def load(self, layout: Layout) -> Started:
        """Build the swarm's model from the files that came with its layout."""
        await asyncio.to_thread(write_model_files, self._files_dir, layout)
        command = Start(directory=str(self._files_dir), layout=layout, options=self._options)
        started = await self._child.call(command, Started)
        self.device_class = started.device_class
        self.places, self.lockstep = started.places, started.lockstep
        self.rates = Rates(started.places)
        self._started = started
        return started

    async def install(
        self,
        version: VersionId,
        tensor_sums: tuple[int, ...],
        weights: Path,
        *,
        proven: bool = False,
        changed: Path | None = None,
    ) -> NotInstalled | None:
        """Let the engine take the weights. Return None if it has. The files must not change meanwhile. `changed` says
        which words differ from the version that is installed, if that is known."""
        command = Install(
            version=version,
            path=str(weights),
            tensor_sums=tensor_sums,
            proven=proven,
            since=self.installed if changed is not None else None,
            changed=str(changed) if changed is not None else "",
        )
        done: Installed | NotInstalled = await self._child.call(command, Installed | NotInstalled)
        if isinstance(done, NotInstalled):
            return done
        assert self.installed is None or version > self.installed
        self.installed = version
        self.last_install = done
        self.doings.now("install", since_s=done.pause_s or done.seconds)
        self.doings.now("draw" if self._drawing else "wait")
        return None

    async def draw(self, games: Sequence[Game], *, follows: bool = False) -> tuple[Sampled, ...]:
        """Draw what is next of one game, or in lockstep of a batch. `follows`: they were at hand when the last batch
        ended, so the time between (an install) counts as part of this batch's time."""
        between_s = time.monotonic() - self._ended_at if follows else 0.0
        self._drawing += len(games)
        self.doings.now("draw")
        try:
            generated = await self.generate([game.job(self._portion_tokens) for game in games])
            if self.lockstep:
                self.rates.batch(generated, between_s)
            else:
                self.rates.sample(generated, self._drawing)
        finally:
            self._drawing -= len(games)
            self.doings.now("draw" if self._drawing else "wait")
        self._ended_at = time.monotonic()
        return generated.samples

    @property
    def _portion_tokens(self) -> int:
        if self._portion_s is None:
            return MAX_TOKENS
        return max(MIN_PORTION_TOKENS, int(self._portion_s * self.rates.tokens_per_s))

    async def generate(self, jobs: Sequence[Job]) -> Generated:
        """Draw one sample, or in lockstep a batch."""
        return await self._child.call(Generate(jobs=tuple(jobs)), Generated)

    async def give_up(self) -> None:
        """Have samples under way end with what they have."""
        await self._child.call(GiveUp(), GiveUp)

    def check_fits(self, leases: list[Lease]) -> None:
        """Raise UserError if a sample is longer than this engine can draw. Submitting it as failed would spoil its
        group, which larger machines can draw."""
        most = self._started.context_tokens if self._started else 0
        for lease in leases:
            episode, rules = lease.episode, lease.rules
            tokens = len(lease.prompt_token_ids) + (episode.max_tokens if episode else rules.max_new_tokens)
            if most and tokens > most:
                raise UserError(
                    f"this run's samples take up to {tokens} tokens with their prompts, and this engine has room for "
                    f"{most}: give it more with --gpu-memory-share or --max-model-len, or leave them to larger machines"
                )

    async def stop(self) -> None:
        await self._child.stop()

    def status(self) -> dict[str, Any]:
        last = self.last_install
        return {
            "engine": self.kind,
            "engine_pid": self._child.pid,
            "places": self.places,
            "installed": str(self.installed) if self.installed else None,
            "install_s": round(last.seconds, 4) if last else 0.0,
            "pause_s": round(last.pause_s, 4) if last else 0.0,
            "proof": last.proof if last else None,
            "rollouts_per_s": round(self.rates.rollouts_per_s, 1),
            "tokens_per_s": round(self.rates.tokens_per_s, 1),
        }
