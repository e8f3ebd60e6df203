"""Generation with transformers: it works wherever torch does, one batch at a time, with swaps between batches."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Protocol, TypeVar

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from swarm.broadcast.version.codec import tensor_sum
from swarm.broadcast.version.manifest import Layout
from swarm.errors import UserError
from swarm.learner.policy import PROBE_ERROR
from swarm.models.device import SMALL_MODEL_PARAMETERS, pick_device
from swarm.models.draws import gumbel
from swarm.sampler.engine import (
    Generate,
    Generated,
    Install,
    Installed,
    Job,
    NotInstalled,
    Proof,
    Sampled,
    Start,
    Started,
    Told,
    drawn,
)
from swarm.sampler.growing import can_grow, grow
from swarm.sampler.room import reckon
from swarm.sampler.stopping import StopStrings, handed, load_tokenizer
from swarm.sampler.weights import (
    build_model,
    changed_items,
    items_at,
    mapped_tensors,
    own_tensors,
    put_items,
    sum_of_items,
    wrong_tensor,
)
from swarm.types import Finish, Span, VersionId

R = TypeVar("R")


class TransformersEngine:
    """The `Blocking` calls over `AutoModelForCausalLM.generate`."""

    def __init__(self) -> None:
        self._model: Any = None
        self._layout: Layout | None = None
        self._version: VersionId | None = None
        self.held_sums: list[int] = []
        self._directory = ""
        self._is_given_up = threading.Event()
        self._takes_filling: bool | None = None  # Whether prompts of other lengths may share a batch; not known yet

    def start(self, command: Start, progress: Told) -> Started:
        if command.options.precision != "none":
            raise UserError("--precision rounds the weights of other engines: transformers takes them as they are")
        device = pick_device(command.options.device)
        room = reckon("transformers", command.layout, command.options)
        model = build_model(command.directory, command.layout, getattr(torch, room.dtype))
        model.to(device).eval()
        # The model's own defaults (such as a repetition penalty) would distort the distribution that the lease asks
        # for.
        model.generation_config = GenerationConfig()
        if sum(p.numel() for p in model.parameters()) < SMALL_MODEL_PARAMETERS:
            torch.set_num_threads(1)
        self._model, self._layout, self._directory = model, command.layout, command.directory
        return Started(
            engine="transformers",
            device=str(device),
            dtype=room.dtype,
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
            places=room.places,
            context_tokens=room.context_tokens,
        )

    @torch.no_grad()
    def install(self, command: Install, progress: Told) -> Proof | NotInstalled:
        assert self._layout is not None
        held_since, held_sums = self._version, self.held_sums
        self._version, self.held_sums = None, []
        if command.changed and command.since is not None and command.since == held_since:
            return self._install_changes(command, self._layout, held_sums, progress)
        tensors = own_tensors(self._model, self._layout)
        mapped = mapped_tensors(command.path, self._layout)
        for index, ((spec, source), expected) in enumerate(zip(mapped, command.tensor_sums, strict=True)):
            if spec.frozen and held_sums and held_sums[index] == expected:
                continue
            for name in (spec.name, *spec.aliases):
                held = tensors[name]
                held.copy_(source)
                if tensor_sum(_bytes_of(held.to(source.dtype))) != expected:
                    return NotInstalled("engine", f"after the install {name} differs from what the learner signed")
            progress()
        self._version, self.held_sums = command.version, list(command.tensor_sums)
        return "sums"

    def _install_changes(
        self, command: Install, layout: Layout, sums: list[int], progress: Told
    ) -> Proof | NotInstalled:
        """Take the words that have changed since the present version, whose proven `sums` these are. What the engine
        held at the changed places and what it holds there now make the sums of the new one."""
        tensors = own_tensors(self._model, layout)
        with one_thread():
            for index, spec, at, items in changed_items(command.path, command.changed, layout):
                # Tied tensors are one in memory: the second would find nothing changed.
                for place in {tensors[name].data_ptr(): tensors[name] for name in (spec.name, *spec.aliases)}.values():
                    held = place.view(-1)
                    before = sum_of_items(items_at(held, at).to(items.dtype))
                    put_items(held, at, items)
                    change = sum_of_items(items_at(held, at).to(items.dtype)) - before
                sums[index] = (sums[index] + change) % 2**64
                progress()
        for spec, found, expected in zip(layout.tensors, sums, command.tensor_sums, strict=True):
            if found != expected:
                return NotInstalled("engine", f"after the install {spec.name} differs from what the learner signed")
        self._version, self.held_sums = command.version, sums
        return "changed words"

    @torch.inference_mode()
    def generate(self, command: Generate, progress: Told) -> Generated:
        assert self._version is not None
        began = time.monotonic()
        if self._takes_filling is None:
            self._takes_filling = can_grow(self._model) or self._is_filling_harmless()
        keys = [(*_batch_key(job), 0 if self._takes_filling else len(job.prompt_token_ids)) for job in command.jobs]
        order = sorted(range(len(command.jobs)), key=keys.__getitem__)
        samples: dict[int, Sampled] = {}
        steps = 0
        for _, batch in groupby(order, key=keys.__getitem__):
            places = list(batch)
            spent_s = time.monotonic() - began
            answers, length = self._generate_batch([command.jobs[i] for i in places], spent_s, progress)
            samples.update(zip(places, answers, strict=True))
            steps += length
        ordered = tuple(samples[i] for i in range(len(command.jobs)))
        return Generated(samples=ordered, seconds=time.monotonic() - began, steps=steps)

    def _generate_batch(self, jobs: list[Job], spent_s: float, progress: Told) -> tuple[Iterable[Sampled], int]:
        """Draw jobs with one limit and one set of stops; `spent_s` of their time has passed. Also return how many
        tokens the longest drew."""
        draw = SeededDraw(jobs, self._model.device, progress)
        stopping = self._stopping(jobs)
        time_s = max(0.0, min(job.time_limit_s for job in jobs) - spent_s)
        draw_all = self._drawn_as_a_tree if can_grow(self._model) else self._drawn_apart
        completions = draw_all(jobs, draw, stopping, time_s).cpu().tolist()
        logprobs = torch.stack(draw.logprobs, dim=1).cpu().tolist()
        ends = stopping.ends if stopping else [None] * len(jobs)
        sampled = [self._sampled(*row) for row in zip(jobs, completions, logprobs, ends, strict=True)]
        return sampled, len(draw.logprobs)

    def _drawn_as_a_tree(
        self, jobs: list[Job], draw: SeededDraw, stopping: StopsRows | None, time_s: float
    ) -> torch.Tensor:
        until, rules, device = time.monotonic() + time_s, jobs[0].rules, self._model.device
        stops = torch.tensor(rules.stop_token_ids, dtype=torch.long, device=device)

        def choose(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return draw.drawn(logits, rows).argmax(-1)

        def ended(completions: torch.Tensor) -> torch.Tensor:
            if self._is_given_up.is_set():
                return torch.ones(len(completions), dtype=torch.bool, device=device)
            stopped = torch.isin(completions[:, -1], stops)
            return stopped | stopping.reached(completions) if stopping else stopped

        prompts = [job.prompt_token_ids for job in jobs]
        return grow(self._model, prompts, choose, ended, most_tokens=rules.max_new_tokens, until=until)

    def _drawn_apart(
        self, jobs: list[Job], draw: SeededDraw, stopping: StopsRows | None, time_s: float
    ) -> torch.Tensor:
        """Each completion by itself, with prompts filled up on the left to one length."""
        rules, device = jobs[0].rules, self._model.device
        width = max(len(job.prompt_token_ids) for job in jobs)
        pad = rules.stop_token_ids[0] if rules.stop_token_ids else 0
        fills = [width - len(job.prompt_token_ids) for job in jobs]
        ids = [[*[pad] * fill, *job.prompt_token_ids] for job, fill in zip(jobs, fills, strict=True)]
        criteria = [self._given_up]
        if stopping:
            criteria.append(lambda ids, scores, **_: stopping.reached(ids[:, width:]))
        output: torch.Tensor = self._model.generate(
            torch.tensor(ids, device=device),
            attention_mask=torch.tensor([[0] * fill + [1] * (width - fill) for fill in fills], device=device),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=rules.max_new_tokens,
                max_time=time_s,
                eos_token_id=list(rules.stop_token_ids) or None,
                pad_token_id=pad,
            ),
            logits_processor=LogitsProcessorList([draw]),
            stopping_criteria=StoppingCriteriaList(criteria),
        )
        return output[:, width:]

    def _given_up(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(ids),), self._is_given_up.is_set(), device=ids.device)

    def give_up(self) -> None:
        self._is_given_up.set()

    def _is_filling_harmless(self) -> bool:
        """Try it: layers that keep a state may read what fills a prompt up on the left, and give it other logits."""
        ids, found = torch.arange(5, device=self._model.device)[None], []
        rules = GenerationConfig(max_new_tokens=1, output_logits=True, return_dict_in_generate=True, pad_token_id=0)
        for own in (ids, ids[:, 2:]):
            mask = (own >= 2).long()
            found.append(self._model.generate(own, attention_mask=mask, generation_config=rules).logits[0])
        return bool((found[0] - found[1]).abs().max() <= PROBE_ERROR[self._model.dtype])

    def _stopping(self, jobs: list[Job]) -> StopsRows | None:
        stops = self._stops_of(jobs[0])
        return StopsRows(stops, len(jobs)) if stops is not None else None

    def _stops_of(self, job: Job) -> StopStrings | None:
        return StopStrings(load_tokenizer(self._directory), job.rules.stop) if job.rules.stop else None

    def _sampled(self, job: Job, token_ids: list[int], logprobs: list[float], end: int | None) -> Sampled:
        """Cut the completion. `end` is the number of tokens after which a stop string was reached."""
        assert self._version is not None
        stops = job.rules.stop_token_ids
        length = next((i + 1 for i, token in enumerate(token_ids[:end]) if token in stops), end or len(token_ids))
        finish: Finish = "stop" if token_ids[length - 1] in stops or length == end else "length"
        spans = (Span(version=self._version, start=0, end=length),)
        if finish == "length" and length < job.rules.max_new_tokens:
            return handed(token_ids[:length], logprobs[:length], spans, self._stops_of(job))
        return drawn(token_ids[:length], logprobs[:length], spans, finish)


class Blocking(Protocol):
    """An `Engine`'s calls, blocking. `held_sums` are those of the tensors of the installed version, as proven; there
    are none before the first, or after an install that failed. An install's file is checked before, but for frozen
    tensors that the engine holds by them."""

    @property
    def held_sums(self) -> Sequence[int]: ...

    def start(self, command: Start, progress: Told) -> Started: ...

    def install(self, command: Install, progress: Told) -> Proof | NotInstalled: ...

    def generate(self, command: Generate, progress: Told) -> Generated: ...

    def give_up(self) -> None: ...


class Threaded:
    """An `Engine` over a blocking one: its calls run one after another in a thread. A file is checked while a batch
    runs, not after it; the rest of an install draws nothing."""

    def __init__(self, engine: Blocking) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._layout: Layout | None = None

    async def start(self, command: Start, progress: Told) -> Started:
        self._layout = command.layout
        return await self._run(self._engine.start, command, progress)

    async def install(self, command: Install, progress: Told) -> Installed | NotInstalled:
        assert self._layout is not None
        began = time.monotonic()
        if not command.proven:
            given = command.path, self._layout, command.tensor_sums, progress, self._engine.held_sums
            if (wrong := await asyncio.to_thread(wrong_tensor, *given)) is not None:
                return NotInstalled("file", wrong)
        check_s = time.monotonic() - began
        proof, pause_s = await self._run(self._timed_install, command, progress)
        if isinstance(proof, NotInstalled):
            return proof
        return Installed(seconds=check_s + pause_s, pause_s=pause_s, proof=proof)

    def _timed_install(self, command: Install, progress: Told) -> tuple[Proof | NotInstalled, float]:
        began = time.monotonic()
        return self._engine.install(command, progress), time.monotonic() - began

    async def generate(self, command: Generate, progress: Told) -> Generated:
        return await self._run(self._engine.generate, command, progress)

    def give_up(self) -> None:
        self._engine.give_up()

    async def _run(self, call: Callable[..., R], *arguments: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)


class SeededDraw(LogitsProcessor):
    """Draws each row's token by its own seed, whatever else is in the batch (draws.py), and records its log-prob.

    Temperature 0 is greedy; its log-probs are those at temperature 1.
    """

    def __init__(self, jobs: list[Job], device: torch.device, progress: Told) -> None:
        self._progress = progress
        self._seeds = torch.tensor([job.seed for job in jobs], device=device)
        self._positions = torch.tensor([len(job.prompt_token_ids) - 1 for job in jobs], device=device)
        temperatures = torch.tensor([[job.rules.temperature] for job in jobs], device=device)
        self._greedy = temperatures == 0
        self._all_greedy = bool(self._greedy.all())
        self._temperatures = torch.where(self._greedy, torch.ones_like(temperatures), temperatures)
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.drawn(scores, torch.arange(len(scores), device=scores.device))

    def drawn(self, scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return what the next tokens of `rows` are the maximum of: their `scores`, scaled, and noise."""
        self._progress()
        scaled = scores.float() / self._temperatures[rows]
        drawn = scaled
        if not self._all_greedy:
            noise = gumbel(self._seeds[rows], self._positions[rows] + len(self.logprobs), scores.shape[1])
            drawn = torch.where(self._greedy[rows], scaled, scaled + noise)
        chosen = drawn.argmax(dim=-1, keepdim=True)
        found = torch.zeros(len(self._seeds), device=scores.device)
        found[rows] = (scaled.gather(1, chosen) - scaled.logsumexp(-1, keepdim=True)).squeeze(1)
        self.logprobs.append(found)
        return drawn


class StopsRows:
    """Finds where each row of a batch reaches a stop string; `ends` holds its number of tokens at that point."""

    def __init__(self, stops: StopStrings, rows: int) -> None:
        self._stops = stops
        self.ends: list[int | None] = [None] * rows

    def reached(self, completions: torch.Tensor) -> torch.Tensor:
        """Return which of them have, [rows], at this token or before."""
        for row, reached in enumerate(self._stops.reached(completions.tolist())):
            if reached and self.ends[row] is None:
                self.ends[row] = completions.shape[1]
        return torch.tensor([end is not None for end in self.ends], device=completions.device)


def _batch_key(job: Job) -> tuple[int, tuple[int, ...], tuple[str, ...]]:
    # Long ones first: they need most of the time that their leases leave.
    return (-job.rules.max_new_tokens, job.rules.stop_token_ids, job.rules.stop)


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch use one thread within the block, which makes thousands of small calls. Several threads wait for each
    other's end in a loop: four engines on two cores took 40 s for what takes half a second."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
