"""An engine without a model: it draws tokens by a script, for next to nothing, at once or as fast as it is told.

For trying out a network of many nodes on one machine. Weights are taken and checked like everybody's, so what arrives
is proven; answers are well-formed and worthless: their tokens are those of the prompt, in the order of a seeded draw.
Never let it sample for a run that is to learn. A rehearsal gives it the speed of a large model's engine: all samples of
a batch grow side by side at that rate, so a batch takes as long as its longest.
"""

from __future__ import annotations

import mmap
import time
from array import array
from collections.abc import Callable
from random import Random

from swarm.broadcast.codec import tensor_sum
from swarm.broadcast.manifest import Layout
from swarm.child import PROGRESS_S, ChildChannel
from swarm.errors import ProtocolError
from swarm.sampler.engine import Generate, Generated, Install, Installed, Job, Sampled, Start, Started
from swarm.sampler.engine_child import serve
from swarm.types import Span, VersionId

LOGPROB = -1.0
"""What it claims of every token."""

TOO_SLOW = Sampled(token_ids=b"", logprobs=b"", spans=(), finish="failed", fault="time limit")


class ScriptedEngine:
    """Answers the calls of `Engine`."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._version: VersionId | None = None
        self._tokens_per_s = self._noise = 0.0

    def start(self, command: Start) -> Started:
        self._layout = command.layout
        self._tokens_per_s, self._noise = command.rehearse_tokens_per_s, command.rehearse_noise
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
        drawn = [_draw(job, self._version) for job in command.jobs]
        tokens_per_s = self._pace(command)
        took_s = [len(one.token_ids) / 4 / tokens_per_s if tokens_per_s else 0.0 for one in drawn]
        limits_s = [job.time_limit_s for job in command.jobs]
        samples = tuple(
            one if took <= limit else TOO_SLOW for one, took, limit in zip(drawn, took_s, limits_s, strict=True)
        )
        batch_s = max((min(took, limit) for took, limit in zip(took_s, limits_s, strict=True)), default=0.0)
        steps = int(tokens_per_s * batch_s) or max((len(one.token_ids) // 4 for one in drawn), default=0)
        while (left_s := began + batch_s - time.perf_counter()) > 0:
            time.sleep(min(left_s, PROGRESS_S))
            progress()
        return Generated(samples=samples, seconds=time.perf_counter() - began, steps=steps)

    def _pace(self, command: Generate) -> float:
        """Tokens per second of each sample of this batch; 0 is as fast as it goes."""
        drawn = Random(f"pace {[job.seed for job in command.jobs]}").uniform(-1, 1)
        return self._tokens_per_s / (1 + self._noise * drawn)


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
