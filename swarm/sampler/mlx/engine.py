"""Generation with mlx-lm: on the GPU of Apple silicon, or on a CPU for tests, with swaps between batches.

mlx-lm has its own code for each model. If some of it computes something else than the learner does, the audit sees that
in the first rollouts and tells the sampler by how much its log-probs are off.
"""

from __future__ import annotations

import threading
import time

import mlx.core as mx
import torch

from swarm.errors import UserError
from swarm.sampler.engine import (
    Generate,
    Generated,
    Install,
    Job,
    NotInstalled,
    Proof,
    Start,
    Started,
    Told,
)
from swarm.sampler.mlx.drawing import Drawing, GrowingRow
from swarm.sampler.mlx.model import OTHERWISE, HeldModel
from swarm.sampler.room import reckon
from swarm.sampler.stopping import StopStrings, load_tokenizer
from swarm.sampler.weights import planned_model
from swarm.types import SamplingRules, VersionId


class MlxEngine:
    """The `Blocking` calls over mlx-lm, all in one thread."""

    _model: HeldModel
    _started: Started

    def __init__(self) -> None:
        self._version: VersionId | None = None
        self.held_sums: tuple[int, ...] = ()
        self._directory = ""
        self._is_given_up = threading.Event()

    def start(self, command: Start, progress: Told) -> Started:
        options = command.options
        if options.tensor_parallel_size > 1:
            raise UserError("mlx draws on one device: leave --tensor-parallel-size out")
        if options.precision == "fp8":
            raise UserError("mlx rounds to int8 or int4, not to fp8: choose --precision int8")
        device = _pick_device(options.device)
        room = reckon("mlx", command.layout, options)
        made_of, _ = planned_model(command.directory, command.layout, torch.float32)
        self._frozen = [at for at, spec in enumerate(command.layout.tensors) if spec.frozen]
        self._model = HeldModel(made_of, command.layout, getattr(mx, room.dtype), options.precision)
        self._directory, self._vocab_size = command.directory, made_of.get_text_config().vocab_size
        self._started = Started(
            engine="mlx",
            device=device,
            dtype=room.dtype,
            device_name=str(mx.device_info().get("device_name", "")) if device != "cpu" else "",
            places=room.places,
            context_tokens=room.context_tokens,
            precision=options.precision,
        )
        rules = SamplingRules(temperature=1.0, max_new_tokens=2, stop_token_ids=())
        rows = [
            GrowingRow(Job(prompt_token_ids=(0,) * n, seed=0, rules=rules, time_limit_s=float("inf"))) for n in (1, 3)
        ]
        try:
            self._drawing(rows).run(progress)
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            raise UserError(f"mlx-lm cannot draw from this model ({str(error)[:200]}): {OTHERWISE}") from error
        return self._started

    def install(self, command: Install, progress: Told) -> Proof | NotInstalled:
        """Take all of the weights but a base that is held, whatever `changed` says: an array of mlx's is replaced as a
        whole anyhow."""
        held, sums, frozen = self.held_sums, command.tensor_sums, self._frozen
        has_base = bool(held and frozen) and all(held[at] == sums[at] for at in frozen)
        self._version, self.held_sums = None, ()
        if (wrong := self._model.take(command.path, sums, progress, only_trained=has_base)) is not None:
            return NotInstalled("engine", wrong)
        self._version, self.held_sums = command.version, sums
        if has_base:
            return "sums"
        if not self._model.is_proven_by_itself:
            return "some sums"
        return "sums" if self._started.precision == "none" else "rounding"

    def _drawing(self, rows: list[GrowingRow]) -> Drawing:
        given_up = self._is_given_up.is_set
        return Drawing(self._model.module, rows, self._started.places, self._vocab_size, given_up)

    def give_up(self) -> None:
        self._is_given_up.set()

    def generate(self, command: Generate, progress: Told) -> Generated:
        assert self._version is not None
        began = time.monotonic()
        rows = [GrowingRow(job, self._stops(job)) for job in command.jobs]
        steps = self._drawing(rows).run(progress)
        samples = tuple(row.sampled(self._version) for row in rows)
        return Generated(samples=samples, seconds=time.monotonic() - began, steps=steps)

    def _stops(self, job: Job) -> StopStrings | None:
        if not job.rules.stop:
            return None
        return StopStrings(load_tokenizer(self._directory), job.rules.stop)


def _pick_device(wanted: str) -> str:
    """Return "mps" for Apple's GPU, which torch calls so too, or "cpu"; new arrays are made there."""
    has_gpu = mx.metal.is_available()
    if wanted == "cpu" or (wanted == "auto" and not has_gpu):
        mx.set_default_device(mx.cpu)
        return "cpu"
    if wanted in ("auto", "mps") and has_gpu:
        return "mps"
    raise UserError(f"mlx draws on Apple's GPU (mps, {'here' if has_gpu else 'not here'}) or a cpu, not on {wanted}")
