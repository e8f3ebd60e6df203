"""New weights beneath running samples, and the proof that vLLM holds them.

The steps: check the file against the signed sums; compute from it what a probe must give; pause all samples and drop
their caches; let the workers take the words that changed or, where they hold another form, reload from a path that no
version had before; set the version's label; resume, with a probe first. No sample that ends before the proof is handed
on. If the proof fails, neither is any sample that the new weights touched. Each token's label is exact, since it
changes only while nothing is drawn.

Of a run that trains an adapter the frozen tensors come so once, and without a probe. Each version is then an adapter
next to others (adapters.py), without a pause: loaded and compared bit for bit with the proven file. The first one is
probed, and in a small model each.

While paused, vLLM schedules nothing, not even a probe, so the probe is the first thing after the pause. A forward pass
outside its scheduler would test other code than the code that draws.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
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
from swarm.sampler.vllm.adapters import DIRECTORY, Adapters
from swarm.sampler.weights import wrong_tensor
from swarm.types import Rounding, Span, VersionId

R = TypeVar("R")
PAUSE_S = 60.0  # A pause waits for the current step; the longest, a full prefill, takes seconds
CALL_S = 30.0  # A label, a cache reset, a resume: messages to the core that take milliseconds
RELOAD_S = 60.0
PROBED_BYTES = 4e9  # Largest model of which each adapter is probed, not the first alone: its reference takes seconds
RELOAD_BYTES_PER_S = 50e6  # A reload copies from memory at GB/s, but from a spinning disk at this
PROBE_S = 60.0  # A probe is a prefill of 32 tokens and goes first; on a CPU it waits for a step of many samples
BEAT_S = 1.0  # How often the node hears of progress during a call that has its own limit
UNPROVEN = "weights not proven"


class TookTooLong(EchoError):
    """vLLM did not answer a call within its limit."""


class Unproven(EchoError):
    """It is unknown what the engine holds."""


class Swaps:
    """Installs into `engine`, an AsyncLLM of `config`, one at a time. `give_up` ends samples with a fault, all
    unless told which. `version` is the last proven one. Once `unproven` gives a reason, no install can repair it."""

    def __init__(
        self,
        engine: Any,
        config: Any,
        layout: Layout,
        reference: Reference,
        precision: Rounding,
        *,
        give_up: Callable[..., None],
        is_cuda: bool,
    ) -> None:
        self.version: VersionId | None = None
        self._sums: tuple[int, ...] = ()
        self.unproven = ""
        self._engine = engine
        self._layout = layout
        self._layout_json = msgspec.json.encode(msgspec.structs.replace(layout, files=()))
        self._reference = reference
        self._precision = precision
        self._give_up = give_up
        self._is_adapted = layout.adapter is not None
        self.adapters = Adapters(engine, layout, getattr(config.lora_config, "max_loras", 0), give_up)
        self._is_cuda = is_cuda
        self._dtype = str(config.model_config.dtype).removeprefix("torch.")
        self._tokens = probe_tokens(config.model_config.get_vocab_size(), config.model_config.max_model_len - 1)
        self._installing = asyncio.Lock()
        self._settled = asyncio.Event()
        self._settled.set()
        self._suspect: VersionId | None = None
        self._needs_probe = True
        self._probes = 0
        self._pause_s = 0.0

    async def settled(self) -> None:
        """Return when it is known whether everything drawn so far can be handed on; an install's limits bound this."""
        await self._settled.wait()

    def touched(self, spans: tuple[Span, ...]) -> bool:
        """Return whether weights that could not be proven drew some of these spans."""
        return bool(self.unproven) and any(span.version == self._suspect for span in spans)

    async def install(self, command: Install, progress: Told) -> Installed | NotInstalled:
        """Check, swap, prove. Raise vLLM's EngineDeadError if its processes are gone, and UserError if the file cannot
        be linked."""
        async with self._installing:
            began = time.monotonic()
            if self.unproven:
                return NotInstalled("engine", self.unproven)
            self._pause_s = 0.0
            if not command.proven:
                sums, held = command.tensor_sums, self._sums if self._is_adapted else ()
                wrong = await asyncio.to_thread(wrong_tensor, command.path, self._layout, sums, progress, held)
                if wrong is not None:
                    return NotInstalled("file", wrong)
            if self._is_adapted and self._sums and self._has_another_base(command.tensor_sums):
                return NotInstalled("engine", "this version stands beside other frozen weights")
            try:
                with _linked(Path(command.path), command.version) as path:
                    if not self._is_adapted or not self._sums:
                        proof = await self._swap(command, path, progress)
                    if self._is_adapted:
                        proof = await self._load(command, path, progress)
                self.version, self._sums = command.version, command.tensor_sums
            except (Unproven, TookTooLong) as error:
                return NotInstalled("engine", str(error))
            return Installed(seconds=time.monotonic() - began, pause_s=self._pause_s, proof=proof)

    async def _swap(self, command: Install, path: Path, progress: Told) -> Proof:
        """Change the weights beneath the samples and prove them. If that fails, give up every sample that the new
        weights may have touched, and raise Unproven or TookTooLong."""
        expected = await self._expect(path, self._needs_probe and not self._is_adapted, progress)
        probing: asyncio.Task[list[float]] | None = None
        self._settled.clear()
        self._suspect = command.version
        try:
            proof, probing = await self._swap_paused(command, path, expected, progress)
            if expected is not None and probing is not None:
                await self._check(expected, probing, progress)
        except BaseException as error:
            self._distrust(error)
            raise
        finally:
            if probing is not None:
                probing.cancel()
            self._settled.set()
        return proof

    async def _load(self, command: Install, path: Path, progress: Told) -> Proof:
        """Load an adapter next to the others, prove it and have new samples drawn with it. If that fails, give up every
        sample, and raise Unproven or TookTooLong."""

        async def call(work: Awaitable[R], what: str) -> R:
            return await self._limited(_of_workers(work), self._reload_limit_s, what, progress)

        try:
            is_probed = self.version is None or self._layout.total_bytes <= PROBED_BYTES
            expected = await self._expect(path, is_probed, progress)
            adapter = await self.adapters.load(command.version, path, call)
            given = (str(path), self._layout_json, adapter.request.lora_int_id)
            asked = self._engine.collective_rpc("echo_adapter", args=given)
            if any(found := await call(asked, "compare its adapter")):
                raise Unproven(max(found))
            if expected is not None:
                await self._check(expected, self._probe(adapter.request), progress)
        except BaseException as error:
            self._distrust(error)
            raise
        self.adapters.held.append(adapter)
        return "bits and probe" if is_probed else "bits"

    def _has_another_base(self, sums: tuple[int, ...]) -> bool:
        both = zip(self._layout.tensors, self._sums, sums, strict=True)
        return any(spec.frozen and before != now for spec, before, now in both)

    async def _swap_paused(
        self, command: Install, path: Path, expected: Expected | None, progress: Told
    ) -> tuple[Proof, asyncio.Task[list[float]] | None]:
        """Do the part of a swap during which nothing is drawn. If a probe is `expected`, queue it at the end."""
        engine, probing, label = self._engine, None, str(command.version)
        paused_at = time.monotonic()
        try:
            await self._limited(engine.pause_generation(mode="keep", clear_cache=True), PAUSE_S, "pause", progress)
            if not (is_changed := await self._change(command, path, progress)):
                await self._reload(path, progress)
            await self._limited(engine.update_weight_version(label), CALL_S, "take a label", progress)
            await self._limited(engine.reset_prefix_cache(), CALL_S, "drop its cache", progress)
            proof: Proof = "changed words" if is_changed else await self._prove_sums(command.tensor_sums, progress)
            if expected is not None:
                probing = asyncio.create_task(self._probe())
                # Let it send its request before the resume is sent.
                await asyncio.sleep(0)
        except BaseException as error:
            # Before samples resume: nothing more may be drawn for them.
            self._distrust(error)
            raise
        finally:
            # Always resume: paused samples would not even notice that they are given up.
            await self._limited(engine.resume_generation(), CALL_S, "resume", progress)
            self._pause_s = time.monotonic() - paused_at
        return proof, probing

    async def _expect(self, path: Path, is_probed: bool, progress: Told) -> Expected | None:
        """Compute what the probe must give, while samples are drawn. Return None if this install needs no probe."""
        if not is_probed:
            return None
        work = asyncio.to_thread(self._reference.expect, str(path), self._tokens)
        return await self._limited(work, self._reload_limit_s, "have its probe computed", progress)

    async def _reload(self, path: Path, progress: Told) -> None:
        call = self._engine.collective_rpc("echo_reload", args=(str(path), self._layout_json, self._precision))
        for why in await self._limited(_of_workers(call), self._reload_limit_s, "reload", progress):
            if why:
                raise Unproven(why)

    async def _change(self, command: Install, path: Path, progress: Told) -> bool:
        """Have the workers take only what changed. Return False if that is not known, or if one of them holds it in
        another form: then all of them take all of it."""
        if not command.changed or command.since is None or command.since != self.version:
            return False
        growth = [(after - before) % 2**64 for after, before in zip(command.tensor_sums, self._sums, strict=True)]
        given = (str(path), command.changed, self._layout_json, msgspec.json.encode(growth))
        call = self._engine.collective_rpc("echo_change", args=given)
        answers = await self._limited(_of_workers(call), self._reload_limit_s, "take what changed", progress)
        return not any(answers)

    async def _prove_sums(self, sums: tuple[int, ...], progress: Told) -> Proof:
        """Compare the sums of all tensors that the workers hold as they came. Raise Unproven if one differs."""
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

    async def _check(self, expected: Expected, probing: Awaitable[list[float]], progress: Told) -> None:
        held = await self._limited(probing, PROBE_S, "answer a probe", progress)
        if (difference := expected.difference(held, self._dtype)) is not None:
            raise Unproven(difference)

    async def _probe(self, adapter: Any = None) -> list[float]:
        self._probes += 1
        prompt, params = {"prompt_token_ids": list(self._tokens)}, vllm_versions.probe_params()
        named = {"priority": vllm_versions.PROBE_PRIORITY, "lora_request": adapter}
        output = await last(self._engine.generate(prompt, params, f"probe {self._probes}", **named))
        return vllm_versions.prompt_logprobs(output, self._tokens)

    def _distrust(self, error: BaseException) -> None:
        """Hand on nothing that the engine draws from here on."""
        self.unproven = self.unproven or f"{UNPROVEN}: {error}"
        self._give_up(UNPROVEN)

    async def _limited(self, call: Awaitable[R], limit_s: float, what: str, progress: Told) -> R:
        """Call `limited`, but stop soon if the core is gone, which would never answer."""

        def beat() -> None:
            if self._engine.errored:
                raise self._engine.dead_error
            progress()

        return await limited(call, limit_s, what, beat)

    @property
    def _reload_limit_s(self) -> float:
        return RELOAD_S + self._layout.total_bytes / RELOAD_BYTES_PER_S


async def limited(work: Awaitable[R], limit_s: float, what: str, progress: Told) -> R:
    """Return the result of `work`. Raise TookTooLong after `limit_s`. Report progress: the limit is ours."""
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
    """Return the answer of a request that answers once, at its end."""
    answer = None
    async for output in outputs:
        answer = output
    return answer


async def _of_workers(call: Awaitable[R]) -> R:
    """Raise Unproven for a worker's error, which arrives as a plain Exception; the core's own death keeps its type."""
    dead = vllm_versions.engine_dead_error()
    try:
        return await call
    except Exception as error:
        if isinstance(error, dead):
            raise
        raise Unproven((str(error).strip() or repr(error)).splitlines()[-1]) from error


@contextmanager
def _linked(path: Path, version: VersionId) -> Iterator[Path]:
    """Link the file to a name that no version had before, since vLLM may cache by name. Remove links left behind by a
    killed process: they would keep the blocks of a removed file."""
    fresh = path.with_name(f"{path.name}.{version}")
    try:
        for left in path.parent.glob(f"{path.name}.*"):
            if re.fullmatch(rf"\d+\.\d+({DIRECTORY})?", left.name.removeprefix(f"{path.name}.")):
                shutil.rmtree(left) if left.suffix == DIRECTORY else left.unlink(missing_ok=True)
        os.link(path, fresh)
    except OSError as error:
        raise UserError(f"{path} cannot be linked to ({error.strerror}): keep it where hard links work") from error
    try:
        yield fresh
    finally:
        fresh.unlink(missing_ok=True)
