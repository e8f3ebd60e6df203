"""The interface between a trainer and the ranks that share its work, implemented for a single rank; sharded.py has it
for several.

Every rank gets every command and runs the same code. Ranks differ in the rows that they compute and in the rows of each
tensor that they hold, but never in their decisions: a figure that decides anything is first added up over all ranks in
a fixed order, so it is the same number everywhere.

`python -m swarm.learner.ranks OPTIONS` runs torchrun for the trainer's ranks and reports a fault in one line.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from swarm.broadcast.version.manifest import TensorSpec
from swarm.learner.batch import MicroBatch, Row, micro_batches
from swarm.learner.checkpoint.model_files import load_model, stored_weights, write_staging
from swarm.learner.messages import TrainerConfig
from swarm.learner.optimizer import local
from swarm.learner.policy import PolicyModel
from swarm.models.device import pick_device, put_back, round_off

R = TypeVar("R")


class Ranks:
    """A single rank."""

    rank = 0
    count = 1

    # -- decisions of all ranks -----------------------------------------------------------------------------

    def together(self, work: Callable[[], R]) -> R:
        """Run `work`, in which no rank waits for another. If it fails on one rank, all ranks raise."""
        return work()

    def from_first(self, value: R) -> R:
        """Rank 0's `value`, on every rank."""
        return value

    def most(self, count: int) -> int:
        """The largest `count` of any rank."""
        return count

    def add_up(self, sums: dict[str, float]) -> dict[str, float]:
        """Add up the sums that each rank has over its tokens."""
        return sums

    def merge(self, found: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Combine the ranks' tensors, which have the numbers of rows."""
        return found

    # -- a learner step --------------------------------------------------------------------------------------

    def share(self, tokens: Sequence[int]) -> list[int]:
        """The indices, in order, of the rows that this rank computes; `tokens` are the lengths of all rows."""
        return list(range(len(tokens)))

    def divide(
        self, rows: Sequence[Row], config: TrainerConfig, device: torch.device
    ) -> tuple[list[int], list[MicroBatch], list[MicroBatch]]:
        """The indices of this rank's rows, their micro-batches, and micro-batches without weight that make up the
        number: every rank takes part in every pass."""
        places = self.share([len(row.token_ids) for row in rows])
        parts = micro_batches([rows[place] for place in places], config, device)
        shortest = min(rows, key=lambda row: len(row.token_ids))
        (idle,) = micro_batches([shortest], config, device)
        return places, parts, [idle.without_weight()] * (self.most(len(parts)) - len(parts))

    def backward(self, loss: torch.Tensor, module: PolicyModel, *, is_last: bool) -> None:
        """Add the gradient of `loss` to the minibatch's, summed over ranks. `is_last`: this is its last pass."""
        loss.backward()

    def clip_gradient(self, model: Any, limit: float) -> float:
        """Scale the gradient to a norm of at most `limit`. Return the norm it had; NaN if that is not finite."""
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit))
        # If it is not finite, the gradient is now NaN, and the optimiser must not step.
        return norm if math.isfinite(norm) else math.nan

    # -- the model -------------------------------------------------------------------------------------------

    def device(self, wanted: str) -> torch.device:
        """The device of this rank. UserError if there is none."""
        return pick_device(wanted)

    def read(self, name: str, seed: int, made_in: Path, tell: Callable[[str], None]) -> tuple[Any, Any, Any]:
        """A model to give to `place`; on rank 0 also the tokenizer and, if that model has no weights, a second one
        with them. UserError if there is no such model."""
        model, tokenizer = load_model(name, seed, made_in, tell)
        return model, tokenizer, None

    def place(self, module: PolicyModel, source: Any, device: torch.device, *, half: bool) -> None:
        """Move the model that `read` returned to `device`, as fp32 masters. `half`: passes are computed in bf16."""
        module.to(device)

    @contextmanager
    def rounded(self, model: Any) -> Iterator[None]:
        """Round trained matrices for the block, so that casting them to bf16 gives the published numbers."""
        trained = [(local(one), self.first(one)) for one in model.parameters() if one.requires_grad and one.dim() > 1]
        for own, first in trained:
            round_off(own, first)
        try:
            yield
        finally:
            for own, first in trained:
                put_back(own, first)

    def first(self, tensor: torch.Tensor) -> int:
        """How many items of a tensor come before those that this rank holds."""
        return 0

    def copy_whole(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A copy of the whole tensor in rank 0's CPU memory; None on other ranks."""
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())

    @torch.no_grad()
    def fill(self, tensor: torch.Tensor, whole: torch.Tensor | None) -> None:
        """Overwrite `tensor` with `whole`, which has the same shape and is on rank 0."""
        assert whole is not None
        tensor.copy_(whole)

    @contextmanager
    def with_weights(
        self, tensors: dict[TensorSpec, torch.Tensor], path: Path
    ) -> Iterator[dict[str, torch.Tensor] | None]:
        """Yield the weights that were staged to `path`, by PolicyModel's names; or None if the model itself
        holds them within the block. FileNotFoundError, on every rank, if there is no such file."""
        yield stored_weights(tensors, path)

    def stage(self, tensors: dict[TensorSpec, torch.Tensor], path: Path) -> None:
        """Write the stream of bf16 weights into the file at `path`."""
        write_staging(tensors, path)


TORCHRUN_VARIABLE = "ECHO_NODE_TORCHRUN_PID"  # Lets a rank check whether torchrun still runs


def main() -> None:
    os.environ[TORCHRUN_VARIABLE] = str(os.getpid())
    # torchrun's own report of a rank's end takes thirty lines, and hides the error of the rank.
    logging.disable(logging.CRITICAL)
    try:
        run.main([*sys.argv[1:], "--max-restarts", "0", "--module", "swarm.learner.trainer"])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        sys.exit(f"rank {rank} of the trainer {how}")


if __name__ == "__main__":
    main()
