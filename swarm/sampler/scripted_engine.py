"""An engine without a model: it draws tokens by a script, for next to nothing, at once or as fast as it is told.

For trying out a network of many nodes on one machine. Weights are taken and checked like everybody's, so what arrives
is proven; answers are well-formed and worthless: their tokens are those of the prompt, in the order of a seeded draw.
Never let it sample for a run that is to learn. A rehearsal gives it the speed of a large model's engine: all samples of
a batch grow side by side at that rate, so a batch takes as long as its longest.
"""

from __future__ import annotations

import time
from array import array
from asyncio import Semaphore, sleep, to_thread
from random import Random

from tokenizers import Tokenizer

from swarm.broadcast.version.manifest import Layout
from swarm.process import PROGRESS_S
from swarm.sampler.engine import (
    Generate,
    Generated,
    Install,
    Installed,
    Job,
    NotInstalled,
    Probe,
    Probed,
    Sampled,
    Start,
    Started,
    Told,
)
from swarm.sampler.stopping import StopStrings, load_tokenizer
from swarm.sampler.weights import wrong_tensor
from swarm.types import Span, VersionId

LOGPROB = -1.0  # What it claims of every token
TOO_SLOW = Sampled(token_ids=b"", logprobs=b"", spans=(), finish="failed", fault="time limit")


class ScriptedEngine:
    """Answers the calls of `Engine`. With the argument `continuous` it takes on each sample by itself, in as many
    places as it is given, else a batch at a time."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._version: VersionId | None = None
        self._tokens_per_s = self._noise = 0.0
        self._places = Semaphore(1)
        self._directory = ""
        self._tokenizer: Tokenizer | None = None

    async def start(self, command: Start, progress: Told) -> Started:
        self._layout, self._directory = command.layout, command.directory
        self._tokens_per_s, self._noise = command.rehearse_tokens_per_s, command.rehearse_noise
        continuous = bool(command.options.arguments.get("continuous"))
        self._places = Semaphore(command.places if continuous else 1)
        return Started(engine="scripted", device="none", dtype="none", places=command.places, lockstep=not continuous)

    async def install(self, command: Install, progress: Told) -> Installed | NotInstalled:
        assert self._layout is not None
        began = time.perf_counter()
        wrong = await to_thread(wrong_tensor, command.path, self._layout, command.tensor_sums, progress)
        if wrong is not None:
            return NotInstalled("file", wrong)
        self._version = command.version
        seconds = time.perf_counter() - began
        return Installed(seconds=seconds, check_s=seconds)

    async def generate(self, command: Generate, progress: Told) -> Generated:
        assert self._version is not None or command.trial
        async with self._places:
            began = time.perf_counter()
            drawn = [self._draw(job) for job in command.jobs]
            tokens_per_s = self._pace(command)
            took_s = [len(one.token_ids) / 4 / tokens_per_s if tokens_per_s else 0.0 for one in drawn]
            limits_s = [job.time_limit_s for job in command.jobs]
            samples = tuple(
                one if took <= limit else TOO_SLOW for one, took, limit in zip(drawn, took_s, limits_s, strict=True)
            )
            batch_s = max((min(took, limit) for took, limit in zip(took_s, limits_s, strict=True)), default=0.0)
            steps = int(tokens_per_s * batch_s) or max((len(one.token_ids) // 4 for one in drawn), default=0)
            while (left_s := began + batch_s - time.perf_counter()) > 0:
                await sleep(min(left_s, PROGRESS_S))
                progress()
            return Generated(samples=samples, seconds=time.perf_counter() - began, steps=steps)

    async def probe(self, command: Probe, progress: Told) -> Probed:
        assert self._version is not None
        return Probed(logprobs=array("f", [LOGPROB] * (len(command.token_ids) - 1)).tobytes())

    async def stop(self) -> None: ...

    def _draw(self, job: Job) -> Sampled:
        """Tokens of the prompt, ended by a stop string if they hold one, by a stop token where there is one, else by
        the limit."""
        random = Random(job.seed)
        limit, stops = job.rules.max_new_tokens, job.rules.stop_token_ids
        plain = [token for token in job.prompt_token_ids if token not in stops] or [0]
        length = random.randint(1, limit) if stops else limit
        tokens = random.choices(plain, k=length)
        if stops:
            tokens[-1] = stops[0]
        end = self._stop_strings(job.rules.stop).end(tokens) if job.rules.stop else None
        tokens = tokens[:end]
        return Sampled(
            token_ids=array("i", tokens).tobytes(),
            logprobs=array("f", [LOGPROB] * len(tokens)).tobytes(),
            spans=(Span(version=self._version, start=0, end=len(tokens)),) if self._version else (),
            finish="stop" if stops or end else "length",
        )

    def _stop_strings(self, stops: tuple[str, ...]) -> StopStrings:
        self._tokenizer = self._tokenizer or load_tokenizer(self._directory)
        return StopStrings(self._tokenizer, stops)

    def _pace(self, command: Generate) -> float:
        """Tokens per second of each sample of this batch; 0 is as fast as it goes."""
        drawn = Random(f"pace {[job.seed for job in command.jobs]}").uniform(-1, 1)
        return self._tokens_per_s / (1 + self._noise * drawn)
