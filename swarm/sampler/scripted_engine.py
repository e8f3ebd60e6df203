"""An engine without a model: it draws tokens by a script, at a speed and for a cost of next to nothing.

For trying out a network of many nodes on one machine. Weights are taken and checked like everybody's, so what arrives
is proven; answers are well-formed and worthless: their tokens are those of the prompt, in the order of a seeded draw.
Never let it sample for a run that is to learn.
"""

from __future__ import annotations

import mmap
import time
from array import array
from collections.abc import Callable
from random import Random

from swarm.broadcast.codec import tensor_sum
from swarm.broadcast.manifest import Layout
from swarm.child import ChildChannel
from swarm.errors import ProtocolError
from swarm.sampler.engine import Generate, Generated, Install, Installed, Job, Sampled, Start, Started
from swarm.sampler.engine_child import serve
from swarm.types import Span, VersionId

LOGPROB = -1.0
"""What it claims of every token."""


class ScriptedEngine:
    """Answers the calls of `Engine`."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._version: VersionId | None = None

    def start(self, command: Start) -> Started:
        self._layout = command.layout
        return Started(engine="scripted", device="none", dtype="none")

    def install(self, command: Install, progress: Callable[[], None]) -> Installed:
        assert self._layout is not None
        began = time.perf_counter()
        with open(command.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as weights:
            at = 0
            for tensor, expected in zip(self._layout.tensors, command.tensor_sums, strict=True):
                if tensor_sum(weights[at : at + tensor.nbytes]) != expected:
                    raise ProtocolError(f"tensor {tensor.name} is not the learner's")
                at += tensor.nbytes
                progress()
        self._version = command.version
        return Installed(seconds=time.perf_counter() - began)

    def generate(self, command: Generate, progress: Callable[[], None]) -> Generated:
        assert self._version is not None
        began = time.perf_counter()
        samples = tuple(_draw(job, self._version) for job in command.jobs)
        steps = max((len(sampled.token_ids) // 4 for sampled in samples), default=0)
        return Generated(samples=samples, seconds=time.perf_counter() - began, steps=steps)


def _draw(job: Job, version: VersionId) -> Sampled:
    """Tokens of the prompt, ended by a stop token where there is one, else by the limit."""
    random = Random(job.seed)
    limit, stops = job.rules.max_new_tokens, job.rules.stop_token_ids
    plain = [token for token in job.prompt_token_ids if token not in stops] or [0]
    length = random.randint(1, limit) if stops else limit
    tokens = random.choices(plain, k=length)
    if stops:
        tokens[-1] = stops[0]
    return Sampled(
        token_ids=array("i", tokens).tobytes(),
        logprobs=array("f", [LOGPROB] * length).tobytes(),
        spans=(Span(version=version, start=0, end=length),),
        finish="stop" if stops else "length",
    )


if __name__ == "__main__":
    serve(ScriptedEngine(), ChildChannel())
