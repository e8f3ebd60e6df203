"""New weights beneath running samples, the proof that vLLM holds them, and whether it still draws.

The file is checked against the signed sums; what a probe must give is computed from it; all samples are paused and
their caches dropped; the workers reload from a path that no version had before; the version's label is set; all resume,
a probe before them. No sample that ends before the proof is handed on, and if the proof fails, none that the new
weights touched. Each token's label is exact, since it changes only while nothing is drawn.

vLLM schedules nothing while it is paused, not even a probe, so the probe is the first thing after the pause. A forward
pass beside its scheduler would prove other code than the one that draws.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from swarm.broadcast.version.manifest import Layout
from swarm.errors import EchoError, UserError
from swarm.sampler.engine import Install, Installed, NotInstalled, Proof, Told
from swarm.sampler.proving import Expected, Reference, probe_tokens
from swarm.sampler.vllm import versions as vllm_versions
from swarm.sampler.weights import wrong_tensor
from swarm.types import Span, VersionId


class TokenWatch:
    """An engine that has samples to draw, is not paused and has drawn no token for `hang_s` hangs."""

    def __init__(self, hang_s: float) -> None:
        self._hang_s = hang_s
        self._samples = 0
        self._paused = False
        self._alive_at = 0.0

    def begin(self, *, now: float) -> None:
        if self._samples == 0:
            self._alive_at = now
        self._samples += 1

    def end(self) -> None:
        self._samples -= 1

    def token(self, *, now: float) -> None:
        self._alive_at = now

    def pause(self) -> None:
        """Nothing is drawn until `resume`; the caller bounds how long."""
        self._paused = True

    def resume(self, *, now: float) -> None:
        self._paused = False
        self._alive_at = now

    def due_s(self, *, now: float) -> float:
        """Seconds until the engine counts as hanging if it draws nothing; 0 or less if it hangs now."""
        if self._samples == 0 or self._paused:
            return self._hang_s
        return self._alive_at + self._hang_s - now


R = TypeVar("R")
PAUSE_S = 60.0  # A pause waits for the step in flight; the longest, a full prefill, takes seconds
CALL_S = 30.0  # A label, a cache reset, a resume: messages to the core that take milliseconds
RELOAD_S = 60.0
RELOAD_BYTES_PER_S = 50e6  # A reload copies from memory at GB/s, but from a spinning disk at this
PROBE_S = 60.0  # A probe is a prefill of 32 tokens, drawn before all else; on a CPU it waits for a step of many samples
BEAT_S = 1.0  # How often the node hears of progress while a call with a limit of its own is under way
UNPROVEN = "weights not proven"


class TookTooLong(EchoError):
    """vLLM did not answer a call within its limit."""


class Unproven(EchoError):
    """It is not known what the engine holds."""


Parts = dict[str, float]  # Seconds that the parts of an install took, by their names in Installed


@contextmanager
def timed(parts: Parts, name: str) -> Iterator[None]:
    """Add what this takes to `parts`."""
    began = time.monotonic()
    try:
        yield
    finally:
        parts[name] = parts.get(name, 0.0) + time.monotonic() - began


class Swaps:
    """Installs into `engine`, an AsyncLLM of `config`, one at a time. `give_up` ends all running samples with a fault.
    `version` is the one that was proven last. Once `unproven` says why, no install can mend it."""

    def __init__(
        self,
        engine: Any,
        config: Any,
        layout: Layout,
        reference: Reference,
        *,
        watch: TokenWatch,
        give_up: Callable[[str], None],
        is_cuda: bool,
    ) -> None:
        self.version: VersionId | None = None
        self.unproven = ""
        self._engine = engine
        self._layout = layout
        self._layout_json = msgspec.json.encode(msgspec.structs.replace(layout, files=()))
        self._reference = reference
        self._watch = watch
        self._give_up = give_up
        self._is_cuda = is_cuda
        self._dtype = str(config.model_config.dtype).removeprefix("torch.")
        self._tokens = probe_tokens(config.model_config.get_vocab_size(), config.model_config.max_model_len - 1)
        self._installing = asyncio.Lock()
        self._settled = asyncio.Event()
        self._settled.set()
        self._suspect: VersionId | None = None
        self._needs_probe = True
        self._probes = 0

    async def settled(self) -> None:
        """Return when it is known whether what was drawn until now can be handed on; an install's limits bound it."""
        await self._settled.wait()

    def touched(self, spans: tuple[Span, ...]) -> bool:
        """Whether weights that could not be proven drew some of these."""
        return bool(self.unproven) and any(span.version == self._suspect for span in spans)

    async def install(self, command: Install, progress: Told) -> Installed | NotInstalled:
        """Check, swap, prove. Raises vLLM's EngineDeadError if its processes are gone, and UserError if the file cannot
        be linked to."""
        async with self._installing:
            began = time.monotonic()
            if self.unproven:
                return NotInstalled("engine", self.unproven)
            parts: Parts = {}
            with timed(parts, "check_s"):
                sums = command.tensor_sums
                wrong = await asyncio.to_thread(wrong_tensor, command.path, self._layout, sums, progress)
            if wrong is not None:
                return NotInstalled("file", wrong)
            try:
                with _linked(Path(command.path), command.version) as path:
                    proof = await self._swap(command, path, parts, progress)
            except (Unproven, TookTooLong) as error:
                return NotInstalled("engine", str(error))
            return Installed(seconds=time.monotonic() - began, proof=proof, **parts)

    async def _swap(self, command: Install, path: Path, parts: Parts, progress: Told) -> Proof:
        """Change the weights beneath the samples and prove it. If that fails, every sample that the new weights may
        have touched is given up; Unproven or TookTooLong."""
        expected = await self._expect(path, parts, progress)
        probing: asyncio.Task[list[float]] | None = None
        self._settled.clear()
        self._suspect = command.version
        try:
            proof, probing = await self._swap_paused(command, path, expected, parts, progress)
            if expected is not None and probing is not None:
                with timed(parts, "proof_s"):
                    held = await self._limited(probing, PROBE_S, "answer a probe", progress)
                if (difference := expected.difference(held, self._dtype)) is not None:
                    raise Unproven(difference)
            self.version = command.version
        except BaseException as error:
            self._distrust(error)
            raise
        finally:
            if probing is not None:
                probing.cancel()
            self._settled.set()
        return proof

    async def _swap_paused(
        self, command: Install, path: Path, expected: Expected | None, parts: Parts, progress: Told
    ) -> tuple[Proof, asyncio.Task[list[float]] | None]:
        """The part of a swap in which nothing is drawn. If a probe is `expected` it is queued at the end."""
        engine, probing, label = self._engine, None, str(command.version)
        paused_at = time.monotonic()
        self._watch.pause()
        try:
            await self._limited(engine.pause_generation(mode="keep", clear_cache=True), PAUSE_S, "pause", progress)
            with timed(parts, "reload_s"):
                await self._reload(path, progress)
                await self._limited(engine.update_weight_version(label), CALL_S, "take a label", progress)
                await self._limited(engine.reset_prefix_cache(), CALL_S, "drop its cache", progress)
            with timed(parts, "proof_s"):
                proof = await self._prove_sums(command.tensor_sums, progress)
            if expected is not None:
                probing = asyncio.create_task(self._probe())
                # It sends its request before the resume is sent.
                await asyncio.sleep(0)
        except BaseException as error:
            # Before they go on: nothing more is to be drawn for them.
            self._distrust(error)
            raise
        finally:
            # Whatever happened: samples that stand still for ever would not even notice that they are given up.
            await self._limited(engine.resume_generation(), CALL_S, "resume", progress)
            self._watch.resume(now=time.monotonic())
            parts["pause_s"] = time.monotonic() - paused_at
        return proof, probing

    async def _expect(self, path: Path, parts: Parts, progress: Told) -> Expected | None:
        """What the probe must give, computed while samples are drawn; None if this install needs no probe."""
        if not self._needs_probe:
            return None
        with timed(parts, "proof_s"):
            work = asyncio.to_thread(self._reference.expect, str(path), self._tokens)
            return await self._limited(work, self._reload_limit_s, "have its probe computed", progress)

    async def _reload(self, path: Path, progress: Told) -> None:
        call = self._engine.collective_rpc("echo_reload", args=(str(path), self._layout_json))
        for why in await self._limited(_of_workers(call), self._reload_limit_s, "reload", progress):
            if why:
                raise Unproven(why)

    async def _prove_sums(self, sums: tuple[int, ...], progress: Told) -> Proof:
        """Compare the sums of all tensors that the workers still hold as they came. Unproven names one that differs."""
        call = self._engine.collective_rpc("echo_sums", args=(self._layout_json,))
        answers = await self._limited(_of_workers(call), self._reload_limit_s, "sum its weights", progress)
        workers = [msgspec.json.decode(answer, type=dict[str, int]) for answer in answers]
        covered = 0
        for spec, expected in zip(self._layout.tensors, sums, strict=True):
            if all(spec.name in worker for worker in workers):
                covered += 1
                if sum(worker[spec.name] for worker in workers) % (1 << 64) != expected:
                    raise Unproven(f"the engine's {spec.name} differs from what the learner signed")
        # On CPUs the head keeps its weights as they came, and computes with a copy in another form.
        probed, self._needs_probe = self._needs_probe, not self._is_cuda or covered < len(sums)
        if self._needs_probe and not probed:
            raise Unproven("the engine holds fewer tensors as they came than at its first install")
        if covered == 0:
            return "probe"
        return "sums and probe" if probed else "sums"

    async def _probe(self) -> list[float]:
        self._probes += 1
        prompt, params = {"prompt_token_ids": list(self._tokens)}, vllm_versions.probe_params()
        priority = vllm_versions.PROBE_PRIORITY
        output = await last(self._engine.generate(prompt, params, f"probe {self._probes}", priority=priority))
        return vllm_versions.prompt_logprobs(output, self._tokens)

    def _distrust(self, error: BaseException) -> None:
        """From here on nothing that the engine draws is handed on."""
        self.unproven = self.unproven or f"{UNPROVEN}: {error}"
        self._give_up(UNPROVEN)

    async def _limited(self, call: Awaitable[R], limit_s: float, what: str, progress: Told) -> R:
        """`limited`, but for a core that is gone: a call that it has not answered would wait for its limit."""

        def beat() -> None:
            if self._engine.errored:
                raise self._engine.dead_error
            progress()

        return await limited(call, limit_s, what, beat)

    @property
    def _reload_limit_s(self) -> float:
        return RELOAD_S + self._layout.total_bytes / RELOAD_BYTES_PER_S


async def limited(work: Awaitable[R], limit_s: float, what: str, progress: Told) -> R:
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


async def last(outputs: AsyncIterator[Any]) -> Any:
    """Of a request that answers once, at its end."""
    answer = None
    async for output in outputs:
        answer = output
    return answer


async def _of_workers(call: Awaitable[R]) -> R:
    """Unproven for what a worker raises, which arrives as a plain Exception; the core's own death keeps its type."""
    dead = vllm_versions.engine_dead_error()
    try:
        return await call
    except Exception as error:
        if isinstance(error, dead):
            raise
        raise Unproven((str(error).strip() or repr(error)).splitlines()[-1]) from error


@contextmanager
def _linked(path: Path, version: VersionId) -> Iterator[Path]:
    """The same file by a name that no version had before, since vLLM may cache by name. A link that a killed process
    left behind is removed: it would keep the blocks of a removed file."""
    fresh = path.with_name(f"{path.name}.{version}")
    try:
        for left in path.parent.glob(f"{path.name}.*"):
            if re.fullmatch(r"\d+\.\d+", left.name.removeprefix(f"{path.name}.")):
                left.unlink(missing_ok=True)
        os.link(path, fresh)
    except OSError as error:
        raise UserError(f"{path} cannot be linked to ({error.strerror}): keep it where hard links work") from error
    try:
        yield fresh
    finally:
        fresh.unlink(missing_ok=True)
