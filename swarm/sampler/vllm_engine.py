"""The engine for real GPUs: vLLM, one request a sample, batched while they run, weights changed beneath them.

An install goes: the file is checked against the signed sums; what a probe must give is computed from it; all samples
stand still, with their caches dropped; the workers reload from a path that no version had before; the version's label
is set; all go on, a probe before them. No sample that ends before the proof is out is handed on, and if it fails none
that the new weights touched. So each token's label is exact: it changes only while nothing is drawn.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import sys
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from swarm.broadcast.manifest import Layout
from swarm.errors import EchoError, UserError
from swarm.learner.device import SMALL_MODEL_PARAMETERS
from swarm.sampler import vllm_versions
from swarm.sampler.engine import (
    Generate,
    Generated,
    Install,
    Installed,
    Job,
    NotInstalled,
    Probe,
    Probed,
    Proof,
    Sampled,
    Start,
    Started,
    Told,
)
from swarm.sampler.proving import Expected, Reference, probe_tokens
from swarm.sampler.sums import wrong_tensor
from swarm.sampler.tokenwatch import TokenWatch
from swarm.types import VersionId

R = TypeVar("R")

START_S = 1200.0
"""Loading, compiling and warming up a large model for a GPU takes minutes; more than this is a hang."""

PAUSE_S = 60.0
"""A pause waits for the step in flight; the longest, a full prefill, takes seconds."""

CALL_S = 30.0
"""A label, a cache reset, a resume: messages to the core that take milliseconds."""

RELOAD_S = 60.0
RELOAD_BYTES_PER_S = 50e6
"""A reload copies from memory at GB/s; from a spinning disk, where the file did not stay in memory, at this."""

PROBE_S = 60.0
"""A probe is a prefill of 32 tokens, drawn before all else; on a CPU it waits for a step of many samples."""

BEAT_S = 1.0
"""While a call with a limit of its own is under way the node is told so."""

GRACE_S = 5.0
"""After its time limit a request is aborted; if vLLM does not even say so, it is left alone."""

UNPROVEN = "weights not proven"


class TookTooLong(EchoError):
    """vLLM did not answer a call within its limit."""


class Unproven(EchoError):
    """It is not known what the engine holds."""


class Parts:
    """Seconds that the parts of an install took."""

    def __init__(self) -> None:
        self.check_s = self.pause_s = self.reload_s = self.proof_s = 0.0


class VllmEngine:
    """An `Engine` over vLLM's AsyncLLM. `extension` names the class that its workers are extended by."""

    def __init__(self, extension: str = vllm_versions.EXTENSION) -> None:
        self._extension = extension
        self._engine: Any = None
        self._config: Any = None
        self._reference: Reference | None = None
        self._layout: Layout | None = None
        self._layout_json = b""
        self._probe: tuple[int, ...] = ()
        self._version: VersionId | None = None
        self._installing = asyncio.Lock()
        self._proven = asyncio.Event()
        self._proven.set()
        self._suspect: VersionId | None = None
        self._unproven = ""
        self._needs_probe = True
        self._requests = 0
        self._running: dict[str, str] = {}
        self._watch = TokenWatch(0.0)
        self._watching: asyncio.Task[None] | None = None
        self._progress: Told = lambda: None

    # -- start and stop ----------------------------------------------------------------------------------------

    async def start(self, command: Start, progress: Told) -> Started:
        """Build the model with dummy weights. UserError if the options or this machine's vLLM do not allow it,
        WrongWeights if the layout is another model's."""
        vllm_versions.check()
        is_cuda = torch.version.cuda is not None
        _check_device(command.device, is_cuda=is_cuda)
        is_small = command.layout.total_bytes < 2 * SMALL_MODEL_PARAMETERS
        vllm_versions.prepare(is_cuda=is_cuda, is_small=is_small)
        self._progress = progress
        await _limited(asyncio.to_thread(self._build, command, is_cuda), START_S, "start", progress)
        model = self._config.model_config
        self._layout = command.layout
        self._layout_json = msgspec.json.encode(msgspec.structs.replace(command.layout, files=()))
        self._probe = probe_tokens(model.get_vocab_size(), model.max_model_len - 1)
        self._watch = TokenWatch(command.hang_s)
        self._watching = asyncio.create_task(self._end_if_it_hangs())
        return Started(
            engine="vllm",
            device="cuda" if is_cuda else "cpu",
            dtype=self._dtype,
            device_name=_device_name(is_cuda=is_cuda),
            versions=vllm_versions.versions(),
            places=min(command.places, vllm_versions.fitting_sequences(self._config)),
            lockstep=False,
        )

    @property
    def _dtype(self) -> str:
        return str(self._config.model_config.dtype).removeprefix("torch.")

    def _build(self, command: Start, is_cuda: bool) -> None:
        self._reference = Reference(command.directory, command.layout)
        from vllm.v1.engine.async_llm import AsyncLLM

        config = vllm_versions.engine_config(command, self._extension, is_cuda=is_cuda)
        wanted = config.model_config.max_model_len
        counter = vllm_versions.token_counter(self._note_tokens)
        engine = AsyncLLM.from_vllm_config(config, stat_loggers=[counter], disable_log_stats=True)
        if config.model_config.max_model_len < wanted:
            engine.shutdown()
            raise UserError(
                f"the engine's cache holds {config.model_config.max_model_len} tokens, and one sample may take "
                f"{wanted}: set max_model_len to less, or give it more memory with gpu_memory_share"
            )
        self._engine, self._config = engine, config

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.shutdown)

    # -- samples -----------------------------------------------------------------------------------------------

    async def generate(self, command: Generate, progress: Told) -> Generated:
        """Draw the jobs beside all others. Raises vLLM's EngineDeadError if its processes are gone."""
        assert self._version is not None or command.trial
        self._progress = progress
        began = time.perf_counter()
        drawn = await asyncio.gather(*(self._sample(job, trial=command.trial) for job in command.jobs))
        seconds = time.perf_counter() - began
        steps = max((tokens for _, tokens in drawn), default=0)
        return Generated(samples=tuple(sampled for sampled, _ in drawn), seconds=seconds, steps=steps)

    async def _sample(self, job: Job, *, trial: bool) -> tuple[Sampled, int]:
        """One completion and how many tokens were drawn, of a failed one as well."""
        if fault := self._unproven or self._why_not(job):
            return _failed(fault), 0
        request = self._name()
        self._running[request] = ""
        self._watch.begin(now=time.monotonic())
        late = asyncio.get_running_loop().call_later(job.time_limit_s, self._give_up, request, "time limit")
        output = None
        try:
            async with asyncio.timeout(job.time_limit_s + GRACE_S):
                params = vllm_versions.sampling_params(job)
                output = await _last(self._engine.generate(_prompt(job.prompt_token_ids), params, request))
                await self._proven.wait()
        except TimeoutError:
            self._running[request] = "time limit"
        finally:
            late.cancel()
            self._watch.end()
            fault = self._running.pop(request)
        tokens = len(output.outputs[0].token_ids) if output is not None else 0
        return (_failed(fault) if fault else self._sampled(job, output, trial=trial)), tokens

    def _why_not(self, job: Job) -> str:
        """Why vLLM cannot draw this job as the lease has it; empty if it can."""
        limit = self._config.model_config.max_model_len
        if job.time_limit_s <= 0:
            return "time limit"
        if len(job.prompt_token_ids) + job.rules.max_new_tokens > limit:
            wanted = f"{len(job.prompt_token_ids)} prompt tokens and {job.rules.max_new_tokens} new ones"
            return f"{wanted} are over this engine's max_model_len of {limit}"
        if 0 < job.rules.temperature < vllm_versions.LEAST_TEMPERATURE:
            return f"vLLM draws at temperatures of at least {vllm_versions.LEAST_TEMPERATURE}, or 0"
        if max(job.prompt_token_ids) >= self._config.model_config.get_vocab_size():
            return f"token {max(job.prompt_token_ids)} of the prompt is not in the model's vocabulary"
        return ""

    def _sampled(self, job: Job, output: Any, *, trial: bool) -> Sampled:
        if output is None or not output.finished:
            return _failed("vLLM gave no answer")
        completion = output.outputs[0]
        token_ids, logprobs = list(completion.token_ids), vllm_versions.drawn_logprobs(completion)
        spans = vllm_versions.version_spans(completion)
        if spans is None and trial:
            spans = ()
        if spans is None or len(logprobs) != len(token_ids):
            return _failed("vLLM's account of its tokens has a gap")
        if self._unproven and any(span.version == self._suspect for span in spans):
            return _failed(UNPROVEN)
        stopped = token_ids[-1] in job.rules.stop_token_ids
        if not stopped and len(token_ids) != job.rules.max_new_tokens:
            return _failed(f"vLLM ended it: {completion.finish_reason}")
        return Sampled(
            token_ids=array("i", token_ids).tobytes(),
            logprobs=array("f", logprobs).tobytes(),
            spans=spans,
            finish="stop" if stopped else "length",
        )

    def _give_up(self, request: str, fault: str) -> None:
        """End a request early, for this reason."""
        if request in self._running:
            self._running[request] = self._running[request] or fault
            task = asyncio.ensure_future(self._engine.abort(request))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def probe(self, command: Probe, progress: Told) -> Probed:
        """UserError if the sequence does not fit."""
        limit = self._config.model_config.max_model_len - 1
        if len(command.token_ids) > limit:
            raise UserError(f"a probe of {len(command.token_ids)} tokens is over the {limit} that this engine takes")
        logprobs = await _limited(self._probe_logprobs(command.token_ids), PROBE_S, "answer a probe", progress)
        return Probed(logprobs=array("f", logprobs).tobytes())

    async def _probe_logprobs(self, token_ids: tuple[int, ...]) -> list[float]:
        if len(token_ids) < 2:
            return []
        calls = self._engine.generate(
            _prompt(token_ids), vllm_versions.probe_params(), self._name(), priority=vllm_versions.PROBE_PRIORITY
        )
        return vllm_versions.prompt_logprobs(await _last(calls), token_ids)

    def _name(self) -> str:
        self._requests += 1
        return str(self._requests)

    # -- weights -----------------------------------------------------------------------------------------------

    async def install(self, command: Install, progress: Told) -> Installed | NotInstalled:
        """Check, swap, prove. Raises vLLM's EngineDeadError if its processes are gone."""
        assert self._layout is not None
        async with self._installing:
            began = time.monotonic()
            if self._unproven:
                return NotInstalled("engine", self._unproven)
            sums = command.tensor_sums
            wrong = await asyncio.to_thread(wrong_tensor, command.path, self._layout, sums, progress)
            if wrong is not None:
                return NotInstalled("file", wrong)
            parts = Parts()
            parts.check_s = time.monotonic() - began
            try:
                proof = await self._swap(command, parts, progress)
            except (Unproven, TookTooLong) as error:
                return NotInstalled("engine", str(error))
            return Installed(
                seconds=time.monotonic() - began,
                pause_s=parts.pause_s,
                check_s=parts.check_s,
                reload_s=parts.reload_s,
                proof_s=parts.proof_s,
                proof=proof,
            )

    async def _swap(self, command: Install, parts: Parts, progress: Told) -> Proof:
        """Change the weights beneath the samples and prove it. Unproven or TookTooLong, and every sample that the new
        weights may have touched is given up, if that fails."""
        expected = await self._expect(command.path, parts, progress)
        probing: asyncio.Task[list[float]] | None = None
        with _linked(Path(command.path), command.version) as path:
            self._proven.clear()
            self._suspect = command.version
            try:
                probing, proof = await self._swap_paused(command, path, expected, parts, progress)
                if expected is not None and probing is not None:
                    await self._judge(expected, probing, parts, progress)
                self._version = command.version
            except BaseException as error:
                self._distrust(f"{UNPROVEN}: {error}")
                raise
            finally:
                if probing is not None:
                    probing.cancel()
                self._proven.set()
        return proof

    async def _swap_paused(
        self, command: Install, path: Path, expected: Expected | None, parts: Parts, progress: Told
    ) -> tuple[asyncio.Task[list[float]] | None, Proof]:
        """The part of a swap in which nothing is drawn. If a probe is `expected` it is queued at the end."""
        engine = self._engine
        paused_at = time.monotonic()
        self._watch.pause()
        probing = None
        try:
            await _limited(engine.pause_generation(mode="keep", clear_cache=True), PAUSE_S, "pause", progress)
            began = time.monotonic()
            await self._reload(path, progress)
            await _limited(engine.update_weight_version(str(command.version)), CALL_S, "take a label", progress)
            await _limited(engine.reset_prefix_cache(), CALL_S, "drop its cache", progress)
            parts.reload_s = time.monotonic() - began
            proof = await self._prove_sums(command.tensor_sums, parts, progress)
            if expected is not None:
                probing = asyncio.create_task(self._probe_logprobs(self._probe))
                await asyncio.sleep(0)
        except BaseException as error:
            # Before they go on: nothing more is to be drawn for them.
            self._distrust(f"{UNPROVEN}: {error}")
            raise
        finally:
            # Whatever happened: samples that stand still for ever would not even notice that they are given up.
            await _limited(engine.resume_generation(), CALL_S, "resume", progress)
            self._watch.resume(now=time.monotonic())
            parts.pause_s = time.monotonic() - paused_at
        return probing, proof

    async def _expect(self, path: str, parts: Parts, progress: Told) -> Expected | None:
        """What the probe must give, computed while samples are drawn; None if this install needs no probe."""
        if not self._needs_probe:
            return None
        assert self._reference is not None
        began = time.monotonic()
        limit_s = _reload_limit_s(self._layout_bytes)
        work = asyncio.to_thread(self._reference.expect, path, self._probe)
        expected = await _limited(work, limit_s, "have its probe computed", progress)
        parts.proof_s += time.monotonic() - began
        return expected

    async def _reload(self, path: Path, progress: Told) -> None:
        limit_s = _reload_limit_s(self._layout_bytes)
        call = self._engine.collective_rpc("echo_reload", args=(str(path), self._layout_json))
        for why in await _limited(_raised_as_unproven(call), limit_s, "reload", progress):
            if why:
                raise Unproven(f"{UNPROVEN}: {why}")

    async def _prove_sums(self, sums: tuple[int, ...], parts: Parts, progress: Told) -> Proof:
        """Compare the sums of all tensors that the workers still hold as they came. Unproven names one that differs."""
        assert self._layout is not None
        began = time.monotonic()
        limit_s = _reload_limit_s(self._layout_bytes)
        call = self._engine.collective_rpc("echo_sums", args=(self._layout_json,))
        answers = await _limited(_raised_as_unproven(call), limit_s, "sum its weights", progress)
        workers = [msgspec.json.decode(answer, type=dict[str, int]) for answer in answers]
        covered = 0
        for spec, expected in zip(self._layout.tensors, sums, strict=True):
            if not all(spec.name in worker for worker in workers):
                continue
            covered += 1
            if sum(worker[spec.name] for worker in workers) % (1 << 64) != expected:
                raise Unproven(f"{UNPROVEN}: the engine's {spec.name} differs from what the learner signed")
        parts.proof_s += time.monotonic() - began
        probed, self._needs_probe = self._needs_probe, covered < len(sums) or torch.version.cuda is None
        if covered == 0:
            return "probe"
        return "sums and probe" if probed else "sums"

    async def _judge(
        self, expected: Expected, probing: asyncio.Task[list[float]], parts: Parts, progress: Told
    ) -> None:
        began = time.monotonic()
        difference = expected.difference(await _limited(probing, PROBE_S, "answer a probe", progress), self._dtype)
        parts.proof_s += time.monotonic() - began
        if difference is not None:
            raise Unproven(f"{UNPROVEN}: {difference}")

    def _distrust(self, why: str) -> None:
        """From here on nothing that the engine draws is handed on."""
        self._unproven = self._unproven or why.removeprefix(f"{UNPROVEN}: {UNPROVEN}: ").strip()
        for request in list(self._running):
            self._give_up(request, UNPROVEN)

    @property
    def _layout_bytes(self) -> int:
        assert self._layout is not None
        return self._layout.total_bytes

    # -- watch -------------------------------------------------------------------------------------------------

    def _note_tokens(self, count: int) -> None:
        self._watch.token(now=time.monotonic())
        self._progress()

    async def _end_if_it_hangs(self) -> None:
        due_s = self._watch.due_s(now=time.monotonic())
        while due_s > 0:
            # No event tells that nothing happened.
            await asyncio.sleep(due_s)
            due_s = self._watch.due_s(now=time.monotonic())
        print("vLLM is busy and has drawn no token for too long: this process ends", file=sys.stderr, flush=True)
        if os.getpgrp() == os.getpid():
            # The node started this process as the first of a group: vLLM's own go with it, however they hang.
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(70)


async def _last(outputs: AsyncIterator[Any]) -> Any:
    """Of a request that answers once, at its end."""
    last = None
    async for output in outputs:
        last = output
    return last


async def _limited(work: Awaitable[R], limit_s: float, what: str, progress: Told) -> R:
    """The result of `work`; TookTooLong after `limit_s`. The node hears of progress meanwhile: the limit is ours."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    ends_at = loop.time() + limit_s
    try:
        while not task.done():
            if (left_s := ends_at - loop.time()) <= 0:
                raise TookTooLong(f"vLLM took over {limit_s:g} s to {what}")
            await asyncio.wait((task,), timeout=min(left_s, BEAT_S))
            progress()
        return task.result()
    finally:
        task.cancel()


async def _raised_as_unproven(call: Awaitable[R]) -> R:
    """What a worker raises arrives as a plain Exception; the core's own death keeps its type."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        return await call
    except EngineDeadError:
        raise
    except Exception as error:
        raise Unproven(f"{UNPROVEN}: {(str(error).strip() or repr(error)).splitlines()[-1]}") from error


@contextmanager
def _linked(path: Path, version: VersionId) -> Iterator[Path]:
    """The same file by a name that no version had before: vLLM may keep what it read by a name."""
    fresh = path.with_name(f"{path.name}.{version}")
    fresh.unlink(missing_ok=True)
    try:
        os.link(path, fresh)
    except OSError as error:
        raise UserError(f"{path} cannot be linked to ({error.strerror}): keep it where hard links work") from error
    try:
        yield fresh
    finally:
        fresh.unlink(missing_ok=True)


def _check_device(wanted: str, *, is_cuda: bool) -> None:
    kind = wanted.partition(":")[0]
    built_for = "cuda" if is_cuda else "cpu"
    if kind not in ("auto", built_for):
        raise UserError(f"this vLLM is built for {built_for}, not for {wanted}: choose --device auto or {built_for}")


def _device_name(*, is_cuda: bool) -> str:
    from vllm.platforms import current_platform

    return str(current_platform.get_device_name()) if is_cuda else platform.processor()


def _reload_limit_s(nbytes: int) -> float:
    return RELOAD_S + nbytes / RELOAD_BYTES_PER_S


def _prompt(token_ids: tuple[int, ...]) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(token_ids)}


def _failed(fault: str) -> Sampled:
    return Sampled(token_ids=b"", logprobs=b"", spans=(), finish="failed", fault=fault[:200])
