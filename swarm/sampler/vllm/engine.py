"""The engine for real GPUs: vLLM, one request per sample, batched while they run, with weights changed beneath them.

This process holds vLLM's front; its core and workers are separate processes that end with this one. A sample is drawn
by the lease's rules, never by the model's own defaults, and its log-probs belong to the distribution it was drawn from.
A sample that vLLM cannot draw exactly as the lease says is a fault.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import torch

from swarm.errors import UserError
from swarm.models.device import SMALL_MODEL_PARAMETERS
from swarm.sampler.engine import (
    TIME_LIMIT,
    Generate,
    Generated,
    Install,
    Installed,
    Job,
    NotInstalled,
    Sampled,
    Start,
    Started,
    Told,
    drawn,
    failed,
)
from swarm.sampler.proving import Reference
from swarm.sampler.room import reckon
from swarm.sampler.stopping import StopStrings, handed, load_tokenizer
from swarm.sampler.vllm import adapters, rounding
from swarm.sampler.vllm import versions as vllm_versions
from swarm.sampler.vllm.swap import CALL_S, UNPROVEN, Swaps, last, limited
from swarm.types import Span, VersionId

START_S = 1200.0  # Loading, compiling and warming up a large model for a GPU takes minutes; more than this is a hang
GRACE_S = 5.0  # After its time limit a request is aborted; if vLLM does not even confirm that, it is left alone


class VllmEngine:
    """An `Engine` over vLLM's AsyncLLM. `extension` names the class that extends its workers."""

    def __init__(self, extension: str = vllm_versions.EXTENSION) -> None:
        self._extension = extension
        self._engine: Any = None
        self._config: Any = None
        self._swaps: Swaps | None = None
        self._directory = ""
        self._places = 0
        self._requests = 0
        self._running: dict[str, str] = {}
        self._is_given_up = False
        self._progress: Told = lambda: None

    async def start(self, command: Start, progress: Told) -> Started:
        """Build the model with dummy weights. Raise UserError if the options or this machine's vLLM do not allow it,
        and WrongWeights if the layout belongs to another model."""
        vllm_versions.check()
        is_cuda = torch.version.cuda is not None
        _check_device(command.options.device, is_cuda=is_cuda)
        is_small = command.layout.total_bytes < 2 * SMALL_MODEL_PARAMETERS
        vllm_versions.prepare(is_cuda=is_cuda, is_small=is_small)
        self._progress, self._directory = progress, command.directory
        building = asyncio.to_thread(self._build, command, is_cuda)
        reference = await limited(building, START_S, "start", progress)
        await limited(self._engine.collective_rpc("echo_seed_draws"), CALL_S, "change its draws", progress)
        given = (self._engine, self._config, command.layout, reference, command.options.precision)
        self._swaps = Swaps(*given, give_up=self._give_up_all, is_cuda=is_cuda)
        return Started(
            engine="vllm",
            device="cuda" if is_cuda else "cpu",
            dtype=str(self._config.model_config.dtype).removeprefix("torch."),
            device_name=vllm_versions.gpu_name() if is_cuda else "",
            places=min(self._places, vllm_versions.fitting_sequences(self._config)),
            context_tokens=self._config.model_config.max_model_len,
            lockstep=False,
            precision=command.options.precision,
        )

    def _build(self, command: Start, is_cuda: bool) -> Reference:
        self._places = reckon("vllm", command.layout, command.options).places
        precision = command.options.precision
        if command.layout.adapter is not None:
            adapters.check(command.layout, precision, is_cuda=is_cuda)
        if precision != "none":
            rounding.check(command.layout, precision, is_cuda=is_cuda)
        reference = Reference(command.directory, command.layout, precision)
        config = vllm_versions.engine_config(command, self._extension, self._places, is_cuda=is_cuda)
        wanted = config.model_config.max_model_len
        self._engine, self._config = vllm_versions.make_engine(config, lambda: self._progress()), config
        if command.options.max_model_len is not None and (held := config.model_config.max_model_len) < wanted:
            raise UserError(
                f"the engine's cache holds {held} tokens, and one sample was to take {wanted}: "
                f"set max_model_len to {held} or less, or let the engine have a larger gpu_memory_share"
            )
        return reference

    # -- samples -----------------------------------------------------------------------------------------------

    async def generate(self, command: Generate, progress: Told) -> Generated:
        """Draw the jobs side by side with all others. Raise vLLM's EngineDeadError if its processes are gone."""
        assert self._swaps is not None
        assert self._swaps.version is not None or self._swaps.unproven
        self._progress = progress
        began = time.perf_counter()
        answers = await asyncio.gather(*(self._sample(self._swaps, job) for job in command.jobs))
        seconds = time.perf_counter() - began
        steps = max((tokens for _, tokens in answers), default=0)
        return Generated(samples=tuple(sampled for sampled, _ in answers), seconds=seconds, steps=steps)

    async def _sample(self, swaps: Swaps, job: Job) -> tuple[Sampled, int]:
        """Return one completion and how many tokens were drawn, also if it failed."""
        if fault := swaps.unproven or self._why_not(job):
            return failed(fault), 0
        if job.rules.stop:
            vllm_versions.have_tokenizer(self._engine, self._directory)
        self._requests += 1
        request = str(self._requests)
        self._running[request] = ""
        late = asyncio.get_running_loop().call_later(job.time_limit_s, self._give_up, request, TIME_LIMIT)
        output = None
        try:
            prompt, params = {"prompt_token_ids": list(job.prompt_token_ids)}, vllm_versions.sampling_params(job)
            with swaps.adapters.drawing(request) as adapter:
                async with asyncio.timeout(job.time_limit_s + GRACE_S):
                    output = await last(self._engine.generate(prompt, params, request, lora_request=adapter.request))
                    await swaps.settled()
        except TimeoutError:
            self._give_up(request, TIME_LIMIT)
        finally:
            late.cancel()
            fault = self._running.pop(request)
        if output is None or not output.finished:
            return failed(fault or "vLLM gave no answer"), 0
        completion = output.outputs[0]
        stops = StopStrings(load_tokenizer(self._directory), job.rules.stop) if job.rules.stop else None
        ended = fault and fault != TIME_LIMIT
        sampled = failed(fault) if ended else _sampled(swaps, job, completion, adapter.version, stops)
        return sampled, len(completion.token_ids)

    def _why_not(self, job: Job) -> str:
        """Return why vLLM cannot draw this job as the lease says, or "" if it can."""
        model = self._config.model_config
        if job.time_limit_s <= 0 or self._is_given_up:
            return TIME_LIMIT
        if len(job.prompt_token_ids) + job.rules.max_new_tokens > model.max_model_len:
            wanted = f"{len(job.prompt_token_ids)} prompt tokens and {job.rules.max_new_tokens} new ones"
            return f"{wanted} are over this engine's max_model_len of {model.max_model_len}"
        least, most = vllm_versions.MIN_TEMPERATURE, vllm_versions.MAX_TEMPERATURE
        if job.rules.temperature and not least <= job.rules.temperature <= most:
            return f"vLLM draws at temperatures from {least} to {most}, or at 0"
        if max(job.prompt_token_ids) >= model.get_vocab_size():
            return f"token {max(job.prompt_token_ids)} of the prompt is not in the model's vocabulary"
        return ""

    def _give_up(self, request: str, fault: str) -> None:
        if request in self._running:
            self._running[request] = self._running[request] or fault
            # If the core is gone, the request ends by itself with that error.
            asyncio.ensure_future(self._engine.abort(request)).add_done_callback(_retrieve)

    def give_up(self) -> None:
        self._is_given_up = True
        self._give_up_all(TIME_LIMIT)

    def _give_up_all(self, fault: str, requests: set[str] | None = None) -> None:
        for request in list(self._running if requests is None else requests):
            self._give_up(request, fault)

    async def install(self, command: Install, progress: Told) -> Installed | NotInstalled:
        """Check, swap and prove beneath running samples. Raise vLLM's EngineDeadError if its processes are gone."""
        assert self._swaps is not None
        return await self._swaps.install(command, progress)


def _sampled(swaps: Swaps, job: Job, completion: Any, adapter: VersionId | None, stops: StopStrings | None) -> Sampled:
    token_ids, logprobs = list(completion.token_ids), vllm_versions.drawn_logprobs(completion)
    if completion.finish_reason == "abort" and not token_ids:
        return failed(TIME_LIMIT)
    whole = () if adapter is None else (Span(version=adapter, start=0, end=len(token_ids)),)
    spans = whole or vllm_versions.version_spans(completion)
    if spans is None or len(logprobs) != len(token_ids):
        return failed("vLLM's account of its tokens has a gap")
    if swaps.touched(spans):
        return failed(UNPROVEN)
    if completion.finish_reason == "abort":
        return handed(token_ids, logprobs, spans, stops)
    stopped = token_ids[-1] in job.rules.stop_token_ids or (bool(job.rules.stop) and completion.finish_reason == "stop")
    if not stopped and len(token_ids) != job.rules.max_new_tokens:
        return failed(f"vLLM ended it after {len(token_ids)} tokens: {completion.finish_reason}")
    return drawn(token_ids, logprobs, spans, "stop" if stopped else "length")


def _retrieve(done: asyncio.Future[None]) -> None:
    """Read a result that nobody awaits, so that asyncio does not report it."""
    if not done.cancelled():
        done.exception()


def _check_device(wanted: str, *, is_cuda: bool) -> None:
    built_for = "cuda" if is_cuda else "cpu"
    kind, _, number = wanted.partition(":")
    if kind not in ("auto", built_for):
        raise UserError(f"this vLLM is built for {built_for}, not for {wanted}: choose --device auto or {built_for}")
    if number:
        raise UserError(
            f"vLLM takes the first GPU that it sees: instead of --device {wanted} set CUDA_VISIBLE_DEVICES={number}"
        )
