"""Lays a model out as an engine takes it, without a trainer. `python -m swarm.learner.frozen MODEL SEED DIRECTORY`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch

from swarm.broadcast.store.disk import map_file
from swarm.broadcast.version.codec import tensor_sum
from swarm.broadcast.version.manifest import tensor_spans
from swarm.errors import UserError
from swarm.learner.checkpoint.model_files import layout_of, load_model, save_small_files, stream_tensors, write_staging
from swarm.learner.messages import FROZEN, SMALL_FILES, WEIGHTS, Frozen
from swarm.learner.trainer import context_tokens_of, stop_token_ids_of


def freeze(name: str, seed: int, directory: Path) -> None:
    """Write weights, small files and what describes them."""
    model, tokenizer = load_model(name, seed, directory, lambda line: print(line, flush=True), torch.bfloat16)
    tensors = stream_tensors(model)
    layout = layout_of(tensors, save_small_files(model, tokenizer, directory / SMALL_FILES))
    write_staging(tensors, directory / WEIGHTS)
    weights = map_file(directory / WEIGHTS, layout.total_bytes)
    frozen = Frozen(
        layout=layout,
        tensor_sums=tuple(tensor_sum(weights[span.at]) for span in tensor_spans(layout)),
        context_tokens=context_tokens_of(model),
        stop_token_ids=stop_token_ids_of(model, tokenizer),
    )
    (directory / FROZEN).write_bytes(msgspec.msgpack.encode(frozen))


if __name__ == "__main__":
    try:
        freeze(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    except UserError as fault:
        sys.exit(str(fault))
