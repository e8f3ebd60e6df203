"""What runs inside vLLM's workers for gpu_child.py: the node's own extension, and a count of CUDA graphs' replays."""

from __future__ import annotations

import torch

from benchmarks.gpu_child import counted
from swarm.sampler.vllm.extension import EchoWorker

# Of the class: graphs are looked up there when they are replayed, whenever they were captured.
_counting, _count = counted(torch.cuda.CUDAGraph.replay)
torch.cuda.CUDAGraph.replay = _counting  # type: ignore[assignment,method-assign]


class CountingWorker(EchoWorker):
    def echo_replays(self) -> int:
        return _count()
