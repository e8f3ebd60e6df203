"""An engine without a model, for trying out a network of many nodes on one machine. ENGINE is its child's module.

It checks weights like every engine. Its answers are well-formed and worthless: tokens of the prompt in a seeded random
order, so its learner must audit nothing. It takes the arguments (`EngineOptions.arguments`)

    continuous      draw each sample on its own in its places, else a batch at a time
    tokens_per_s    the rate at which each sample of a batch grows, so a batch takes as long as its longest sample;
                    0 is at once
    noise           the largest share by which that varies from batch to batch
    device_name     what its device says that it is
"""

from __future__ import annotations

import time
from array import array
from asyncio import Semaphore, sleep, to_thread
from random import Random

from msgspec.structs import replace

from swarm.broadcast.version.manifest import Layout
from swarm.sampler import engine_child
from swarm.sampler.engine import (
    Generate,
    Generated,
    Install,
    Installed,
    Job,
    NotInstalled,
    Reckoned,
    Sampled,
    Start,
    Started,
    Told,
)
from swarm.sampler.room import CPU_PLACES
from swarm.sampler.stopping import StopStrings, load_tokenizer
from swarm.sampler.weights import wrong_tensor
from swarm.types import Span, VersionId

ENGINE = "tests.scripted_engine"
LOGPROB = -2.6  # Reported for every token: near that of the untrained tiny model, so that a learner trains on it
ARGUMENTS = "continuous", "tokens_per_s", "noise", "device_name"
STEP_S = 0.1  # In which it notices that it is to give up
TOO_SLOW = Sampled(token_ids=b"", logprobs=b"", spans=(), finish="failed", fault="time limit")


class ScriptedEngine:
    """An `Engine`."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._version: VersionId | None = None
        self._tokens_per_s = self._noise = 0.0
        self._places = Semaphore(1)
        self._directory = ""
        self._is_given_up = False

    async def start(self, command: Start, progress: Told) -> Started:
        self._layout, self._directory = command.layout, command.directory
        options = command.options
        continuous, self._tokens_per_s, self._noise, device = (options.arguments.get(name, 0) for name in ARGUMENTS)
        places = options.places or CPU_PLACES
        self._places = Semaphore(places if continuous else 1)
        return Started(
            engine="scripted",
            device="none",
            dtype="none",
            device_name=device or "",
            places=places,
            lockstep=not continuous,
        )

    async def install(self, command: Install, progress: Told) -> Installed | NotInstalled:
        assert self._layout is not None
        began = time.perf_counter()
        wrong = await to_thread(wrong_tensor, command.path, self._layout, command.tensor_sums, progress)
        if wrong is not None:
            return NotInstalled("file", wrong)
        self._version = command.version
        seconds = time.perf_counter() - began
        return Installed(seconds=seconds)

    async def generate(self, command: Generate, progress: Told) -> Generated:
        assert self._version is not None
        async with self._places:
            began = time.perf_counter()
            noise = Random(f"pace {[job.seed for job in command.jobs]}").uniform(-1, 1)
            tokens_per_s = self._tokens_per_s / (1 + self._noise * noise)
            samples, batch_s, longest = [], 0.0, 0
            for job in command.jobs:
                drawn = self._draw(job)
                tokens = len(drawn.token_ids) // 4
                took_s = tokens / tokens_per_s if tokens_per_s else 0.0
                samples.append(drawn if took_s <= job.time_limit_s else TOO_SLOW)
                batch_s, longest = max(batch_s, min(took_s, job.time_limit_s)), max(longest, tokens)
            while (left_s := began + batch_s - time.perf_counter()) > 0 and not self._is_given_up:
                await sleep(min(left_s, STEP_S))
                progress()
            if self._is_given_up:
                came = int((time.perf_counter() - began) * tokens_per_s)
                samples = [_so_far(one, came) for one in samples]
            steps = int(tokens_per_s * batch_s) or longest
            return Generated(samples=tuple(samples), seconds=time.perf_counter() - began, steps=steps)

    def give_up(self) -> None:
        self._is_given_up = True

    def _draw(self, job: Job) -> Sampled:
        """Return tokens of the prompt up to a stop string, a stop token or the limit."""
        assert self._version is not None
        random = Random(job.seed)
        limit, stops = job.rules.max_new_tokens, job.rules.stop_token_ids
        plain = [token for token in job.prompt_token_ids if token not in stops] or [0]
        length = random.randint(1, limit) if stops else limit
        tokens = random.choices(plain, k=length)
        if stops:
            tokens[-1] = stops[0]
        end = None
        if job.rules.stop:
            strings = StopStrings(load_tokenizer(self._directory), job.rules.stop)
            reached = strings.reached([tokens[:count] for count in range(1, len(tokens) + 1)])
            end = next((count for count, done in enumerate(reached, 1) if done), None)
        tokens = tokens[:end]
        return Sampled(
            token_ids=array("i", tokens).tobytes(),
            logprobs=array("f", [LOGPROB] * len(tokens)).tobytes(),
            spans=(Span(version=self._version, start=0, end=len(tokens)),),
            finish="stop" if stops or end else "length",
        )


def _so_far(one: Sampled, tokens: int) -> Sampled:
    """What has come of a sample after so many tokens."""
    if one.finish == "failed" or 4 * tokens >= len(one.token_ids):
        return one
    if not tokens:
        return TOO_SLOW
    ids, logprobs = (data[: 4 * tokens] for data in (one.token_ids, one.logprobs))
    return Sampled(ids, logprobs, (replace(one.spans[0], end=tokens),), finish="handed")


if __name__ == "__main__":
    engine_child.make_engine = lambda kind: ScriptedEngine()
    room = Reckoned(places=CPU_PLACES, dtype="none", said="room: no model needs any")
    engine_child.reckon = lambda *_: room  # type: ignore[attr-defined]
    engine_child.main()
