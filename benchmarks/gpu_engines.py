"""The part of the check of a GPU that draws: an engine's log-probs against the learner's, and swaps beneath samples.

bin/python -m benchmarks.gpu_engines vllm --device cuda --swaps 20
bin/python -m benchmarks.gpu_engines transformers --device cuda --dtype float32
bin/python -m benchmarks.gpu_engines vllm --device cuda --precision fp8

A random model of 0.6 billion parameters, on the device beside the engine, is the learner's: float32 weights, which are
of bf16 at first, so that publishing rounds nothing, and passes as the learner computes them, in bf16 for an engine in
bf16. `mismatch_kl` is what the learner calls so, in nats a token, over COMPARED samples. `moved_kl` is the same against
the version before: what an engine would show that kept old weights, or old caches.

With `--swaps` all places draw three times: undisturbed; with swaps between two versions beneath them, of which every
other is given as the words that changed; and undisturbed again. The mismatch after swaps is of tokens that the last
version drew, over contexts that all of them drew: an engine that computed no cache again would miss it by `moved_kl`.
Engines in lockstep, and adapters in vLLM, whose samples end with the version that they began with, swap between draws.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from benchmarks import Figures, parser_of, said
from benchmarks import sampler_models as models
from benchmarks.gpu_child import replays_per_step
from benchmarks.sampler_models import EngineProcess, floats, ints
from swarm.learner.adapter import attach, is_adapted, shape_of_adapter
from swarm.learner.batch import MicroBatch, Row, micro_batches
from swarm.learner.checkpoint.model_files import layout_of, save_small_files, stream_tensors, write_staging
from swarm.learner.messages import TrainerConfig
from swarm.learner.policy import Policy
from swarm.learner.tiny import tiny_tokenizer
from swarm.learner.update import MAX_TOKEN_KL
from swarm.models.device import pick_device
from swarm.sampler.engine import EngineOptions, Generate, Generated, Install, Installed, Job, Sampled, Start, Started
from swarm.types import VersionId
from swarm.wire import Digest
from tests.conformance import differing
from tests.unit.models import sums_of

PROMPT_TOKENS = 24
COMPARED = 16  # Samples: 16,000 tokens, whose mean mismatch is known within some percent
TURNED = 0.02  # Of the weights have another sign in the second version: seen in every log-prob, and a delta in size
SEED = 7
AGREED_TOKENS = 200  # Of a sample that is only compared
MEMORY_SHARE = 0.6  # Of the card, for the engine: the learner's model reads beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Weights of a model in a file, as an engine installs them; `turned` are those of the second version."""

    path: Path
    sums: tuple[int, ...]
    turned: bool


class Learner:
    def __init__(self, directory: Path, *, parameters: float, tokens: int, device: str, adapter: int) -> None:
        vocab_size = models.REAL_VOCABULARY if parameters >= 1e8 else 1024
        size = models.Size(parameters=parameters, vocab_size=vocab_size, context_tokens=PROMPT_TOKENS + tokens)
        self.model = models.random_model(size, device=device).eval()
        self.device = pick_device(device)
        if adapter:
            attach(self.model, adapter, 2.0 * adapter, name="random", seed=0)
        self._round()
        files = save_small_files(self.model, tiny_tokenizer(), directory / "model")
        shape = shape_of_adapter(self.model, Digest(bytes(32))) if adapter else None
        self.layout = layout_of(stream_tensors(self.model), files, shape)
        self.directory = directory
        self._is_turned = False
        self.versions = [self._staged(turned) for turned in (False, True)]
        forth, back = ((self.versions[at], self.versions[1 - at]) for at in (0, 1))
        self.changed = [
            differing(a.path, b.path, self.layout, directory / f"to-{int(b.turned)}") for a, b in (back, forth)
        ]

    @torch.no_grad()
    def _round(self) -> None:
        """To what bf16 holds, and an adapter to one that is not zero."""
        for name, parameter in self.model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
            parameter.copy_(parameter.bfloat16())

    @torch.no_grad()
    def be(self, version: Version) -> None:
        """Hold these weights. Of a model a share TURNED has its sign changed from one to the other, of an adapter all
        of B."""
        if version.turned == self._is_turned:
            return
        draw = torch.Generator(self.device).manual_seed(SEED)
        for name, parameter in self.model.named_parameters():
            if not is_adapted(self.model):
                chosen = torch.rand(parameter.shape, generator=draw, device=self.device) < TURNED
                parameter.mul_(1 - 2 * chosen.to(parameter.dtype))
            elif ".lora_B." in name:
                parameter.neg_()
        self._is_turned = version.turned

    def _staged(self, turned: bool) -> Version:
        path = self.directory / f"version-{int(turned)}.bin"
        self.be(Version(path=path, sums=(), turned=turned))
        write_staging(stream_tensors(self.model), path)
        return Version(path=path, sums=sums_of(path, self.layout), turned=turned)

    def mismatch(
        self, version: Version, number: int, drawn: Sequence[tuple[Job, Sampled]], *, half: bool
    ) -> dict[str, float]:
        """Of the tokens that version `number` drew: the mean mismatch in nats, the largest error of a log-prob, and how
        many they are."""
        self.be(version)
        rules = TrainerConfig(precision="bfloat16" if half else "float32", tokens_per_micro_batch=8192)
        policy = Policy(self.model, rules, temperature=1.0)
        rows = [row for row in (_row(job, sampled, number) for job, sampled in drawn) if len(row.behaviour)]
        nats, largest, tokens = 0.0, 0.0, 0.0
        for part in micro_batches(rows, rules, self.device):
            off = _log_ratio(policy, part)
            nats += float((off.exp() - 1 - off).clamp(max=MAX_TOKEN_KL).sum())
            largest = max(largest, float(off.abs().max()))
            tokens += len(off)
        return {"kl": nats / tokens if tokens else math.nan, "largest": largest, "tokens": tokens}


@torch.no_grad()
def _log_ratio(policy: Policy, part: MicroBatch) -> torch.Tensor:
    return policy.read(part).logprobs - part.behaviour


def _row(job: Job, sampled: Sampled, number: int) -> Row:
    assert sampled.fault == "", sampled.fault
    first = len(job.prompt_token_ids)
    of_version = [span for span in sampled.spans if span.version.version == number]
    drawn = torch.tensor([at for span in of_version for at in range(span.start, span.end)], dtype=torch.long)
    return Row(
        token_ids=torch.tensor([*job.prompt_token_ids, *ints(sampled.token_ids)]),
        prompt_tokens=first,
        behaviour=torch.tensor(floats(sampled.logprobs))[drawn],
        drawn=first + drawn,
    )


class Sampler:
    def __init__(self, engine: EngineProcess, started: Started, learner: Learner, *, tokens: int, samples: int) -> None:
        self._engine, self.started, self._learner = engine, started, learner
        self._tokens, self._samples = tokens, min(samples, started.places)
        self._draws = 0
        self.number = -1

    @property
    def version(self) -> Version:
        return self._learner.versions[self.number % 2]

    async def install(self, *, as_changes: bool = False) -> Installed:
        self.number += 1
        command = Install(
            version=VersionId(incarnation=0, version=self.number),
            path=str(self.version.path),
            tensor_sums=self.version.sums,
            # A node has proven the file of any but the first version as it was received.
            proven=self.number > 0,
            since=VersionId(incarnation=0, version=self.number - 1) if as_changes else None,
            changed=str(self._learner.changed[self.number % 2]) if as_changes else "",
        )
        return await self._engine.install(command)

    async def draw(self, most: int | None = None) -> tuple[list[tuple[Job, Sampled]], float]:
        """Let all places draw samples of one length, for prompts of their own; and the tokens/s of all together."""
        self._draws += 1
        tokens = self._tokens if most is None else min(most, self._tokens)
        vocab_size = self._learner.model.config.vocab_size
        jobs = [
            models.random_job(seed, vocab_size, prompt_tokens=PROMPT_TOKENS, tokens=tokens)
            for seed in range(self._samples * self._draws, self._samples * (self._draws + 1))
        ]
        done: Generated = await self._engine.draw(Generate(jobs=tuple(jobs)))
        drawn = sum(len(ints(sampled.token_ids)) for sampled in done.samples)
        return list(zip(jobs, done.samples, strict=True)), drawn / done.seconds


async def agreement(sampler: Sampler, learner: Learner) -> Figures:
    """Draw with two versions, one after the other, and compare each with the learner's, the second also with the
    first."""
    half = sampler.started.dtype != "float32"
    found = []
    for _ in learner.versions:
        await sampler.install()
        drawn, rate = await sampler.draw(AGREED_TOKENS)
        found.append(learner.mismatch(sampler.version, sampler.number, drawn[:COMPARED], half=half))
    other = learner.versions[(sampler.number + 1) % 2]
    moved = learner.mismatch(other, sampler.number, drawn[:COMPARED], half=half)
    return {
        "mismatch_kl": max(one["kl"] for one in found),
        "largest_error": max(one["largest"] for one in found),
        "compared_tokens": sum(one["tokens"] for one in found),
        "moved_kl": moved["kl"],
        "tokens_per_s": rate,
    }


async def swapping(sampler: Sampler, learner: Learner, swaps: int) -> Figures:
    drawn, before = await sampler.draw()
    apart_s = len(drawn) * len(ints(drawn[0][1].token_ids)) / before / (swaps + 1)
    began_at = sampler.number
    if sampler.started.lockstep:
        installs = [await sampler.install(as_changes=bool(number % 2)) for number in range(swaps)]
        drawn, beneath = await sampler.draw()
    else:
        drawing = asyncio.create_task(sampler.draw())
        installs = []
        drawn_s = 0.0
        for number in range(swaps):
            # Samples go on during an install but for its pause.
            await asyncio.sleep(max(0.0, apart_s - drawn_s))
            installs.append(await sampler.install(as_changes=bool(number % 2)))
            drawn_s = installs[-1].seconds - installs[-1].pause_s
        drawn, beneath = await drawing
    half = sampler.started.dtype != "float32"
    # Of an adapter a sample has the version with which it began.
    at = drawn[0][1].spans[-1].version.version
    found = learner.mismatch(learner.versions[at % 2], at, drawn[:COMPARED], half=half)
    _, after = await sampler.draw()
    median = statistics.median
    return {
        "swaps": swaps,
        "samples": len(drawn),
        "swaps_met": min(sampled.spans[-1].version.version - began_at for _, sampled in drawn),
        "spans": min(len(sampled.spans) for _, sampled in drawn),
        "tokens_per_s_before": before,
        "tokens_per_s_beneath_swaps": beneath,
        "tokens_per_s_after": after,
        "after_over_before": after / before,
        "mismatch_kl_after_swaps": found["kl"],
        "install_s": median(one.seconds for one in installs),
        "most_install_s": max(one.seconds for one in installs),
        "pause_s": median(one.pause_s for one in installs),
        "proofs": sorted({one.proof for one in installs}),
    }


async def measure(options: argparse.Namespace, directory: Path) -> Figures:
    size = {name: getattr(options, name) for name in ("parameters", "tokens", "device", "adapter")}
    learner = Learner(directory, **size)
    engine_options = EngineOptions(
        device=options.device,
        dtype=options.dtype,
        precision=options.precision,
        tensor_parallel_size=options.ranks,
        gpu_memory_share=MEMORY_SHARE,
        max_model_len=PROMPT_TOKENS + options.tokens,
        places=options.samples,
        hang_s=models.HANG_S,
    )
    module = "benchmarks.gpu_child" if options.engine == "vllm" else "swarm.sampler.engine_child"
    async with models.running(options.engine, directory / "engine", module) as engine:
        start = Start(directory=str(directory / "model"), layout=learner.layout, options=engine_options)
        started = await engine.launch(start)
        sampler = Sampler(engine, started, learner, tokens=options.tokens, samples=options.samples)
        figures: Figures = {"parameters": models.parameters_of(learner.model), "started": msgspec.to_builtins(started)}
        figures |= await agreement(sampler, learner)
        if options.swaps:
            figures |= await swapping(sampler, learner, options.swaps)
        if options.engine == "vllm":
            replays = replays_per_step(engine.log)
            figures |= {"replays_per_step": replays, "replays_per_step_at_last": replays[-1]}
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("engine", choices=("transformers", "vllm"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--parameters", type=float, default=6e8)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--precision", default="none", choices=("none", "fp8", "int8"))
    parser.add_argument("--ranks", type=int, default=1, help="cards that share the model, in vLLM")
    parser.add_argument("--adapter", type=int, default=0, help="rank of an adapter; 0: a whole model is trained")
    parser.add_argument("--samples", type=int, default=128, help="that are drawn side by side, if they fit")
    parser.add_argument("--tokens", type=int, default=1000, help="of each of them")
    parser.add_argument("--swaps", type=int, default=0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="echo-node-gpu-engines-") as directory:
        said(asyncio.run(measure(options, Path(directory))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
