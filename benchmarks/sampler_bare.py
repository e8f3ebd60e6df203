"""The bare libraries, in a process of their own as an engine has one: `python -m benchmarks.sampler_bare KIND`.

No store, no swaps, no seeds of single samples but vLLM's own: `generate` of transformers draws a batch as its manual
has it, and AsyncLLM gets all samples at once. Weights are what the library makes up. On the CPU, in float32.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from swarm.process import ChildChannel
from swarm.sampler.engine import Job

CPU_CACHE_BYTES = 1 << 30  # Keys and values of all that is drawn at once, many times over


class BareStart(msgspec.Struct, frozen=True, tag=True):
    """Make the model that `directory`/config.json describes; `weight_bytes` are those of the weights in bf16."""

    directory: str
    context_tokens: int
    seats: int
    weight_bytes: int


class BareDraw(msgspec.Struct, frozen=True, tag=True):
    jobs: tuple[Job, ...]


class BareDrawn(msgspec.Struct, frozen=True):
    """Of a start nothing."""

    tokens: int = 0
    seconds: float = 0.0


Draw = Callable[[BareDraw], Awaitable[BareDrawn]]


def main() -> None:
    channel = ChildChannel()
    make = _vllm if sys.argv[1] == "vllm" else _transformers
    draw: Draw | None = None

    async def handle(command: BareStart | BareDraw) -> msgspec.Struct:
        nonlocal draw
        if isinstance(command, BareStart):
            with channel.alive():
                draw = await asyncio.to_thread(make, command)
            return BareDrawn()
        assert draw is not None
        with channel.alive():
            return await draw(command)

    asyncio.run(channel.serve_side_by_side(BareStart | BareDraw, handle))


def _transformers(command: BareStart) -> Draw:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from swarm.models.device import SMALL_MODEL_PARAMETERS

    config = AutoConfig.from_pretrained(command.directory)
    classes: Any = AutoModelForCausalLM  # annotated in part only
    model = classes.from_config(config, dtype=torch.float32).eval()
    if sum(parameter.numel() for parameter in model.parameters()) < SMALL_MODEL_PARAMETERS:
        torch.set_num_threads(1)

    @torch.inference_mode()
    def batch(jobs: Sequence[Job]) -> int:
        prompts = torch.tensor([job.prompt_token_ids for job in jobs])
        output = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=jobs[0].rules.max_new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        return int(output[:, prompts.shape[1] :].numel())

    async def draw(drawing: BareDraw) -> BareDrawn:
        began, jobs, seats = time.perf_counter(), drawing.jobs, command.seats
        tokens = 0
        for at in range(0, len(jobs), seats):
            tokens += await asyncio.to_thread(batch, jobs[at : at + seats])
        return BareDrawn(tokens=tokens, seconds=time.perf_counter() - began)

    return draw


def _vllm(command: BareStart) -> Draw:
    from swarm.models.device import SMALL_MODEL_PARAMETERS
    from swarm.sampler.vllm import versions as vllm_versions

    # Threads as the node's engine has them: they decide more than anything that is compared here.
    vllm_versions.prepare(is_cuda=False, is_small=command.weight_bytes < 2 * SMALL_MODEL_PARAMETERS)
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine: Any = None
    options: dict[str, Any] = {
        "model": command.directory,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "dtype": "float32",
        "max_model_len": command.context_tokens,
        "max_num_seqs": command.seats,
        # So that vLLM's processes end with this one; it does nothing else unless it is called.
        "worker_extension_cls": vllm_versions.EXTENSION,
        "enable_chunked_prefill": False,
        "disable_log_stats": True,
        "enforce_eager": True,
        "kv_cache_memory_bytes": CPU_CACHE_BYTES,
    }
    arguments = AsyncEngineArgs(**options)

    async def one(number: int, job: Job) -> int:
        params = vllm_versions.sampling_params(job)
        answers = engine.generate({"prompt_token_ids": list(job.prompt_token_ids)}, params, str(number))
        (last,) = [answer async for answer in answers]
        return len(last.outputs[0].token_ids)

    drawn = 0

    async def draw(drawing: BareDraw) -> BareDrawn:
        nonlocal engine, drawn
        # Its tasks belong to the loop that it is first used in.
        engine = engine or AsyncLLM.from_engine_args(arguments)
        began = time.perf_counter()
        tokens = await asyncio.gather(*(one(drawn + number, job) for number, job in enumerate(drawing.jobs)))
        drawn += len(drawing.jobs)
        return BareDrawn(tokens=sum(tokens), seconds=time.perf_counter() - began)

    return draw


if __name__ == "__main__":
    main()
