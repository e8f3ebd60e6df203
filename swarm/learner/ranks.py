"""The processes that share one trainer's work: what a step asks of them, for one rank alone. Several: sharded.py.

Every rank gets every command and runs the same code. Ranks differ in the rows that they compute and in the rows of each
tensor that they hold, but never in their decisions: a figure that decides anything is first added up over all ranks in
one order, so it is the same number everywhere.

`python -m swarm.learner.ranks OPTIONS` is torchrun for the trainer's ranks, with its faults told in one line.
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
from swarm.learner.checkpoint.model_files import load_model, stored_weights, write_staging
from swarm.learner.optimizer import local
from swarm.learner.policy import PolicyModel
from swarm.models.device import pick_device, put_back, round_off

R = TypeVar("R")


class Ranks:
    """One rank alone."""

    rank = 0
    count = 1

    # -- what all of them decide -----------------------------------------------------------------------------

    def together(self, work: Callable[[], R]) -> R:
        """`work()`, in which no rank waits for another one. If it fails on one rank, all of them raise."""
        return work()

    def from_first(self, value: R) -> R:
        """Rank 0's `value`, on every rank."""
        return value

    def most(self, count: int) -> int:
        """The largest `count` of any rank."""
        return count

    def add_up(self, sums: dict[str, float]) -> dict[str, float]:
        """Sums over the tokens of this rank, added up over all."""
        return sums

    def merge(self, found: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """What any rank has found, by its number."""
        return found

    # -- a learner step --------------------------------------------------------------------------------------

    def share(self, tokens: Sequence[int]) -> list[int]:
        """Places, rising, of the rows that this rank computes; `tokens` are the lengths of all."""
        return list(range(len(tokens)))

    def backward(self, loss: torch.Tensor, module: PolicyModel, *, is_last: bool) -> None:
        """Add the gradient of `loss` to that of the minibatch; `is_last`: its last pass. Gradients of ranks add up."""
        loss.backward()

    def clip_gradient(self, model: Any, limit: float) -> float:
        """Scale the gradient to a norm of at most `limit`; the norm that it had, which may not be finite."""
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit))
        # Scaled by NaN if it is not finite; nobody may step on it.
        return norm if math.isfinite(norm) else math.nan

    # -- the model -------------------------------------------------------------------------------------------

    def device(self, wanted: str) -> torch.device:
        """Where this rank computes. UserError if it cannot be there."""
        return pick_device(wanted)

    def read(self, name: str, seed: int, made_in: Path, tell: Callable[[str], None]) -> tuple[Any, Any, Any]:
        """A model to be placed, and what only rank 0 has: the tokenizer, and a model with the weights if the first has
        none. UserError if there is no such model."""
        model, tokenizer = load_model(name, seed, made_in, tell)
        return model, tokenizer, None

    def place(self, module: PolicyModel, source: Any, device: torch.device, *, half: bool) -> None:
        """Bring what `read` gave onto `device` as fp32 masters. `half`: passes are computed in bf16."""
        module.to(device)

    @contextmanager
    def rounded(self, model: Any) -> Iterator[None]:
        """For a while the nearest numbers of bf16 are what is published of the trained matrices."""
        trained = [(local(one), self.first(one)) for one in model.parameters() if one.requires_grad and one.dim() > 1]
        for own, first in trained:
            round_off(own, first)
        try:
            yield
        finally:
            for own, first in trained:
                put_back(own, first)

    def first(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's items before those that this rank holds."""
        return 0

    def copy_whole(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A copy in rank 0's own CPU memory; None on the others."""
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())

    @torch.no_grad()
    def fill(self, tensor: torch.Tensor, whole: torch.Tensor | None) -> None:
        """Overwrite `tensor` with `whole`, of the same shape, which rank 0 has."""
        assert whole is not None
        tensor.copy_(whole)

    @contextmanager
    def with_weights(
        self, tensors: dict[TensorSpec, torch.Tensor], path: Path
    ) -> Iterator[dict[str, torch.Tensor] | None]:
        """For a while compute with the weights that were staged to `path`: by the names of PolicyModel, or None if the
        model itself has them meanwhile. FileNotFoundError if there are none, on every rank."""
        yield stored_weights(tensors, path)

    def stage(self, tensors: dict[TensorSpec, torch.Tensor], path: Path) -> None:
        """Write the stream of bf16 weights over the file at `path`."""
        write_staging(tensors, path)


TORCHRUN_VARIABLE = "ECHO_NODE_TORCHRUN_PID"  # By which a rank sees whether torchrun is still there


def main() -> None:
    os.environ[TORCHRUN_VARIABLE] = str(os.getpid())
    # Its own account of a rank's end is thirty lines, and hides what the rank said.
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
